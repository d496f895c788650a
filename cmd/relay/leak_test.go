package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/sqlitetest"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/sqloutbox"
)

// stopper is a log that ends a run when a step of it has failed.
type stopper struct {
	bytes.Buffer
	stop context.CancelFunc // nil at first
}

// Write implements io.Writer.
func (s *stopper) Write(line []byte) (int, error) {
	if s.stop != nil && bytes.Contains(line, []byte("step failed")) {
		s.stop()
	}
	return s.Buffer.Write(line)
}

// Nothing of a row but its number and its topic is in the log, at any level,
// whatever becomes of the row: sent, refused, held behind another one, without a
// topic, unknown, or met by an outage.
func TestLogsNothingOfARow(t *testing.T) {
	for _, format := range []string{"json", "text"} {
		c := &config{}
		c.Log.Level, c.Log.Format = "debug", format
		var out stopper
		log := logger(c, &out)
		db := sqlitetest.Open(t)
		if err := sqloutbox.Migrate(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		w := sqloutbox.NewWriter(nil)
		for _, name := range []string{"sent", "refused", "behind", "unknown", "failed"} {
			m := &envelope.Message{ID: "canary-id-" + name, Source: "/canary-source", Type: "t", Subject: "canary-subject", Topic: "t", Key: []byte("canary-key"), Body: []byte("canary-body")}
			m.Header.Add("x-secret", []byte("canary-header"))
			if name != "refused" && name != "behind" {
				m.Key = []byte("canary-key of " + name)
			}
			if err := w.Write(t.Context(), tx, m); err != nil {
				t.Fatal(err)
			}
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		b := membroker.New()
		b.CreateTopic("t", 1)
		b.SetFaults(membroker.Faults{Publish: func(m *envelope.Message) error {
			switch strings.TrimPrefix(m.ID, "canary-id-") {
			case "refused":
				return fmt.Errorf("%w: too large", brokers.ErrRejected)
			case "unknown":
				return brokers.ErrUnknown
			case "failed":
				return errors.New("an answer of a kind of its own")
			}
			return nil
		}})
		o := c.relayOptions(log)
		o.Lease, o.StoreTimeout, o.PublishTimeout = time.Minute, time.Minute, time.Minute
		relay := outbox.NewRelay(sqloutbox.NewStore(db), b.Publisher(), o)
		for range 2 {
			_, _ = relay.Step(t.Context()) // the rows say what came of them
		}
		b.SetFaults(membroker.Faults{Publish: func(*envelope.Message) error { return brokers.ErrUnavailable }})
		for range 2 {
			_, _ = relay.Step(t.Context())
		}
		_ = db.Close() // and the store is gone, too
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		out.stop = cancel
		_ = relay.Run(ctx) // it says that it could not give the lease back
		cancel()
		for _, logged := range []string{"lease taken", "read", "publish", "settle", "row parked", "step failed"} {
			if !strings.Contains(out.String(), logged) {
				t.Errorf("%q is not logged:\n%s", logged, out.String())
			}
		}
		for _, c := range []string{"canary", hex.EncodeToString([]byte("canary")), strings.Trim(fmt.Sprintf("%d", []byte("canary")), "[]"), "Y2FuYXJ5"} {
			if strings.Contains(strings.ToLower(out.String()), strings.ToLower(c)) {
				t.Errorf("%q is logged:\n%s", c, out.String())
			}
		}
	}
}
