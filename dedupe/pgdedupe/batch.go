package pgdedupe

import (
	"context"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
)

// BeginBatch implements dedupe.BatchDriver: one round trip, and another one if
// not all keys are new.
func (d *driver) BeginBatch(ctx context.Context, claims []dedupe.Claim) (pgx.Tx, []*dedupe.Record, error) {
	conn, err := d.acquire(ctx)
	if err != nil {
		return nil, nil, err
	}
	s := newSession(conn)
	t, owned, err := d.claimEach(ctx, s, claims)
	if err != nil {
		return nil, nil, err
	}
	priors, err := d.winners(ctx, s, claims, owned)
	switch {
	case err != nil:
		_ = d.giveBack(ctx, s)
		return nil, nil, err
	case len(owned) == 0:
		return nil, priors, d.giveBack(ctx, s)
	}
	return t, priors, nil
}

// claimEach opens a transaction and claims the keys. After an error the
// connection is back in the pool.
func (d *driver) claimEach(ctx context.Context, s *session, claims []dedupe.Claim) (*tx, map[dedupe.KeyID]bool, error) {
	bounded, cancel := context.WithTimeout(ctx, d.o.LockWait+d.o.Timeout)
	defer cancel()
	b := &pgx.Batch{}
	b.BeginTx(pgx.TxOptions{IsoLevel: d.o.Isolation})
	b.Queue(d.sql.ClaimEach, d.claimEachArgs(claims)...)
	b.Queue(pgkeys.LockBack)
	br := s.pgx.SendBatch(bounded, b)
	inner := br.Tx()
	_, err := br.Exec()
	owned := make(map[dedupe.KeyID]bool, len(claims))
	if err == nil {
		owned, err = s.owned(br)
	}
	if end := br.Close(); err == nil {
		err = end
	}
	if err != nil {
		_ = d.giveBack(ctx, s)
		return nil, nil, d.claimError(ctx, err)
	}
	return &tx{s: s, inner: inner, top: inner}, owned, nil
}

// owned reads the keys that a claim has inserted, and the transaction's id.
func (s *session) owned(br pgx.BatchResults) (map[dedupe.KeyID]bool, error) {
	rows, err := br.Query()
	if err != nil {
		return nil, err
	}
	owned := make(map[dedupe.KeyID]bool)
	var text string
	_, err = pgx.ForEachRow(rows, []any{&text, &s.xid}, func() error {
		id, err := dedupe.ParseKeyID(text)
		owned[id] = true
		return err
	})
	return owned, err
}

func (d *driver) claimEachArgs(claims []dedupe.Claim) []any {
	n := len(claims)
	keys, retain := make([]pgtype.UUID, n), make([]int64, n)
	fingerprints, fields := make([][]byte, n), make([][]byte, n)
	readable := [4][]*string{}
	for i := range readable {
		readable[i] = make([]*string, n)
	}
	for i, c := range claims {
		keys[i], fingerprints[i], retain[i], fields[i] = uuid(c.Key), c.Fingerprint[:], pgkeys.Microseconds(c.Retain), d.fields(c)
		if d.o.Anonymous {
			continue
		}
		for j, part := range []string{c.Key.Tenant, c.Key.Consumer, c.Key.Source, c.Key.ID} {
			readable[j][i] = &part
		}
	}
	return []any{keys, fingerprints, retain, strconv.FormatInt(pgkeys.Milliseconds(d.o.LockWait), 10),
		readable[0], readable[1], readable[2], readable[3], fields}
}

// winners reads who has done the keys that are not owned. One that has come and
// gone meanwhile is as in progress: the claims are made again.
func (d *driver) winners(ctx context.Context, s *session, claims []dedupe.Claim, owned map[dedupe.KeyID]bool) ([]*dedupe.Record, error) {
	priors := make([]*dedupe.Record, len(claims))
	var taken []pgtype.UUID
	at := make(map[dedupe.KeyID]int)
	for i, c := range claims {
		if id := c.Key.Stored(); !owned[id] {
			taken, at[id] = append(taken, uuid(c.Key)), i
		}
	}
	if len(taken) == 0 {
		return priors, nil
	}
	ctx, cancel := context.WithTimeout(ctx, d.o.Timeout)
	defer cancel()
	rows, err := s.pgx.Query(ctx, d.sql.Winners, taken)
	if err != nil {
		return nil, fmt.Errorf("pgdedupe: read the records of the keys: %w", err)
	}
	_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (struct{}, error) {
		var r dedupe.Record
		var text string
		var fingerprint []byte
		if err := row.Scan(&text, &fingerprint, &r.Fields, &r.Reply, &r.DoneAt); err != nil {
			return struct{}{}, err
		}
		id, err := dedupe.ParseKeyID(text)
		copy(r.Fingerprint[:], fingerprint)
		priors[at[id]] = &r
		delete(at, id)
		return struct{}{}, err
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("pgdedupe: read the records of the keys: %w", err)
	case len(at) > 0:
		return nil, errVanishing
	}
	return priors, nil
}

// CommitBatch implements dedupe.BatchDriver.
func (d *driver) CommitBatch(ctx context.Context, t pgx.Tx, claims []dedupe.Claim, replies [][]byte) error {
	return d.end(ctx, t, func(b *pgx.Batch) { d.queueReplies(b, claims, replies) })
}

// queueReplies stores the replies that there are.
func (d *driver) queueReplies(b *pgx.Batch, claims []dedupe.Claim, replies [][]byte) {
	var keys []pgtype.UUID
	var kept [][]byte
	for i, r := range replies {
		if r != nil {
			keys, kept = append(keys, uuid(claims[i].Key)), append(kept, r)
		}
	}
	if len(keys) > 0 {
		b.Queue(d.sql.Replies, keys, kept)
	}
}

var _ dedupe.BatchDriver[pgx.Tx] = (*driver)(nil)
