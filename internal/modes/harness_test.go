package modes

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
)

// patience bounds one run of a history.
const patience = 40 * time.Second

// A mark is the idempotency key of an effect outside the store's transaction; an
// effect within it has none, so nothing but the store keeps it from a second time.
const schema = `create table effects (
	seq bigserial primary key, key text not null, id text not null, body text not null,
	mark text unique, repeats int not null default 0)`

const insertOne = `insert into effects (key, id, body, mark) values ($1, $2, $3, $4)
	on conflict (mark) do update set repeats = effects.repeats + 1`

const insertAll = `insert into effects (key, id, body)
	select k, i, b from unnest($1::text[], $2::text[], $3::text[]) with ordinality as u (k, i, b, n) order by n`

// execer is a transaction or a pool.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// env is what one run has for itself.
type env struct {
	pool    *pgxpool.Pool // the store's
	outside *pgxpool.Pool // of effects that are not in the store's transaction

	failed    atomic.Int64 // runs of a handler that flaky has made fail
	twins     atomic.Int64 // claims behind one of the same event in one group
	conflicts atomic.Int64 // claims behind one of another content in one group

	mu    sync.Mutex
	dead  map[string]int
	acked map[string]bool // by position
}

func newEnv(tb testing.TB) *env {
	tb.Helper()
	url := testenv.SchemaURL(tb)
	e := &env{pool: testenv.PoolOf(tb, url, 4), outside: testenv.PoolOf(tb, url, 4), dead: map[string]int{}, acked: map[string]bool{}}
	if err := pgdedupe.Migrate(tb.Context(), e.pool, nil); err != nil {
		tb.Fatal(err)
	}
	if _, err := e.pool.Exec(tb.Context(), schema); err != nil {
		tb.Fatal(err)
	}
	return e
}

// verdict is how the handler ends on a content.
func (e *env) verdict(body []byte) error {
	switch string(body) {
	case poisoned:
		return consumer.Permanent(errors.New("this content is refused"))
	case flaky:
		if e.failed.Add(1) <= failures {
			return errors.New("not yet")
		}
	}
	return nil
}

// effect is the handler of one event. It fails, if it does, behind its effect:
// the transaction must undo it.
func (e *env) effect(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
	return e.effectBy(ctx, tx, m)
}

func (e *env) effectBy(ctx context.Context, db execer, m *envelope.Message) error {
	if _, err := db.Exec(ctx, insertOne, string(m.Key), m.ID, string(m.Body), nil); err != nil {
		return err
	}
	return e.verdict(m.Body)
}

// effects is the handler of several events, in one statement.
func (e *env) effects(ctx context.Context, tx pgx.Tx, ms []*envelope.Message) error {
	var keys, ids, bodies []string
	for _, m := range ms {
		keys, ids, bodies = append(keys, string(m.Key)), append(ids, m.ID), append(bodies, string(m.Body))
	}
	if _, err := tx.Exec(ctx, insertAll, keys, ids, bodies); err != nil {
		return err
	}
	for _, m := range ms {
		if err := e.verdict(m.Body); err != nil {
			return err
		}
	}
	return nil
}

// leased is the handler whose effect no transaction undoes: it refuses a poison
// before it, and what has to be tried again does it again under the same mark.
func (e *env) leased(mark func(l *dedupe.Lease) string) func(context.Context, *dedupe.Lease, *envelope.Message) error {
	return func(ctx context.Context, l *dedupe.Lease, m *envelope.Message) error {
		err := e.verdict(m.Body)
		if consumer.IsPermanent(err) {
			return err
		}
		if _, failed := e.outside.Exec(ctx, insertOne, string(m.Key), m.ID, string(m.Body), mark(l)); failed != nil {
			return failed
		}
		return err
	}
}

// deadLetter keeps what does not depend on where a message was.
func (e *env) deadLetter(_ context.Context, f *consumer.Failure) error {
	id, _ := f.Message.Header.Get("ce_id")
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dead[string(id)+": "+f.Reason]++
	return nil
}

// mode is a way to consume.
type mode struct {
	name    string
	batch   consumer.Batch
	repeats int // effects that are brought about again, and are recognised
	handler func(e *env) consumer.Handler
}

// run consumes all of a history, and returns what it left behind.
func (m mode) run(tb testing.TB, h []delivery) (*env, result) {
	tb.Helper()
	e := newEnv(tb)
	b := membroker.New()
	b.CreateTopic(topic, 3)
	for _, d := range h {
		if err := b.Publisher().Publish(tb.Context(), []*envelope.Message{d.message()}).Err(); err != nil {
			tb.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	err := consumer.Run(ctx, b.Source(topic, "group"), m.handler(e), &consumer.RunOptions{
		DeadLetter: e.deadLetter, Batch: m.batch,
		Backoff: consumer.Backoff{Min: time.Millisecond, Max: 5 * time.Millisecond},
		Observer: consumer.ObserverFunc(func(_ context.Context, ev consumer.Event) {
			if ev.Step == consumer.StepAck && ev.Err == nil && e.ack(ev.Position) == len(h) {
				cancel() // nothing more will come
			}
		}),
	})
	if err != nil {
		tb.Fatal(err)
	}
	if len(e.acked) != len(h) {
		tb.Fatalf("%d of %d deliveries were acknowledged within %v", len(e.acked), len(h), patience)
	}
	return e, e.result(tb)
}

// ack returns how many deliveries have been acknowledged.
func (e *env) ack(position string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.acked[position] = true
	return len(e.acked)
}

func (e *env) result(tb testing.TB) result {
	tb.Helper()
	r := result{effects: map[string][]string{}, dead: e.dead, conflicts: map[string]int{}}
	rows, err := e.pool.Query(tb.Context(), "select key, id, body, repeats from effects order by seq")
	if err != nil {
		tb.Fatal(err)
	}
	var key, id, body string
	var repeats int
	if _, err := pgx.ForEachRow(rows, []any{&key, &id, &body, &repeats}, func() error {
		r.effects[key] = append(r.effects[key], id+": "+body)
		r.repeats += repeats
		return nil
	}); err != nil {
		tb.Fatal(err)
	}
	admin, f := pgdedupe.NewAdmin(e.pool, nil), dedupe.Filter{InConflict: true}
	for more := true; more; more = f.After != "" {
		page, err := admin.List(tb.Context(), f)
		if err != nil {
			tb.Fatal(err)
		}
		for _, entry := range page.Entries {
			r.conflicts[entry.Key.ID] += entry.Conflicts
		}
		f.After = page.Next
	}
	return r
}

// check fails tb unless m makes of a history what has to come of it.
func (m mode) check(tb testing.TB, h []delivery) *env {
	tb.Helper()
	e, got := m.run(tb, h)
	want := expected(h)
	for _, key := range keys(want.effects, got.effects) {
		if !slices.Equal(got.effects[key], want.effects[key]) {
			tb.Errorf("effects of %s:\ngot  %q\nwant %q", key, got.effects[key], want.effects[key])
		}
	}
	counts(tb, "dead letters", got.dead, want.dead)
	counts(tb, "conflict records", got.conflicts, want.conflicts)
	if got.repeats != m.repeats {
		tb.Errorf("%d effects were recognised as repeated, want %d", got.repeats, m.repeats)
	}
	return e
}

func counts(tb testing.TB, what string, got, want map[string]int) {
	tb.Helper()
	for _, k := range keys(got, want) {
		if got[k] != want[k] {
			tb.Errorf("%s of %s: %d, want %d", what, k, got[k], want[k])
		}
	}
}

// keys are those of either map.
func keys[V any](a, b map[string]V) []string {
	all := slices.AppendSeq(slices.Collect(maps.Keys(a)), maps.Keys(b))
	slices.Sort(all)
	return slices.Compact(all)
}
