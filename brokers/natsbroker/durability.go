package natsbroker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
)

var (
	// ErrLazySync: what is acknowledged can be lost with the power of a server.
	ErrLazySync = errors.New("natsbroker: the server acknowledges before it has synced")
	// ErrVolatile: a stream does not keep what it acknowledges.
	ErrVolatile = errors.New("natsbroker: the stream does not keep what it acknowledges")
)

// CheckSync asks the monitoring endpoint of a server, such as
// http://127.0.0.1:8222, whether it syncs what it stores before it acknowledges a
// publish. Nil means that it does. The error matches ErrLazySync if it does not, and
// names the interval, and brokers.ErrUnavailable if the endpoint cannot be asked. A
// client cannot ask for that: it is a setting of the server, not of a stream.
//
// With replicas on machines that do not lose power together, a lazy sync can be
// good enough; that is for you to say.
func CheckSync(ctx context.Context, monitor string) error {
	var info struct {
		Disabled bool `json:"disabled"`
		Config   struct {
			Interval time.Duration `json:"sync_interval"`
			Always   bool          `json:"sync_always"`
		} `json:"config"`
	}
	if err := get(ctx, strings.TrimSuffix(monitor, "/")+"/jsz?config=1", &info); err != nil {
		return fmt.Errorf("natsbroker: ask %s about JetStream: %w: %w", monitor, brokers.ErrUnavailable, err)
	}
	switch {
	case info.Disabled:
		return fmt.Errorf("natsbroker: the server at %s has no JetStream", monitor)
	case info.Config.Always:
		return nil
	}
	return fmt.Errorf("%w: every %v; set sync_interval: always in its jetstream block, or keep sent rows for long enough to publish them again", ErrLazySync, info.Config.Interval)
}

func get(ctx context.Context, url string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("it answers %s", res.Status)
	}
	return json.NewDecoder(http.MaxBytesReader(nil, res.Body, 1<<20)).Decode(into)
}

// CheckSubjects reports what is wrong with the streams behind the subjects that
// are to be published to: for a start-up check. The error, which joins one for each
// subject, matches brokers.ErrNoRoute where there is no stream, ErrVolatile where it
// is in memory, persists what it has acknowledged later, or acknowledges nothing, and
// brokers.ErrUnavailable if the server could not be asked. Nil: nothing is wrong.
func CheckSubjects(ctx context.Context, nc *nats.Conn, subjects ...string) error {
	js, err := jetstream.New(nc)
	if err != nil {
		return fmt.Errorf("natsbroker: %w", err)
	}
	var all error
	for _, subject := range subjects {
		if err := checkStream(ctx, js, subject); err != nil {
			all = errors.Join(all, fmt.Errorf("natsbroker: subject %s: %w", subject, err))
		}
	}
	return all
}

func checkStream(ctx context.Context, js jetstream.JetStream, subject string) error {
	if err := checkSubject(subject); err != nil {
		return fmt.Errorf("%w: %w", brokers.ErrRejected, err)
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	name, err := js.StreamNameBySubject(ctx, subject)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return brokers.ErrNoRoute
	}
	var stream jetstream.Stream
	if err == nil {
		stream, err = js.Stream(ctx, name)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", brokers.ErrUnavailable, err)
	}
	switch c := stream.CachedInfo().Config; {
	case c.Storage == jetstream.MemoryStorage:
		return fmt.Errorf("%w: stream %s is in memory", ErrVolatile, name)
	case c.NoAck:
		return fmt.Errorf("%w: stream %s has NoAck", ErrVolatile, name)
	case c.PersistMode == jetstream.AsyncPersistMode:
		return fmt.Errorf("%w: stream %s persists in the background (persist_mode async)", ErrVolatile, name)
	}
	return nil
}
