package outboxtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
)

func committedOnce(t testing.TB, f Fixture) {
	b := &Broker{}
	r := outbox.NewRelay(f.Store(t), b, quick())
	commit(t, f, Event("a", "k"), Event("b", "k"))
	commit(t, f, Event("c", ""))
	drain(t, r)
	drain(t, r)
	expect(t, b, "a", "b", "c")
	commit(t, f, Event("d", "k"))
	drain(t, r)
	expect(t, b, "a", "b", "c", "d")
}

func rolledBack(t testing.TB, f Fixture) {
	b := &Broker{}
	r := outbox.NewRelay(f.Store(t), b, quick())
	tx := f.Begin(t)
	if err := tx.Write(Event("ghost", "k")); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	commit(t, f, Event("a", "k"))
	drain(t, r)
	expect(t, b, "a")
}

func fidelity(t testing.TB, f Fixture) {
	full := &envelope.Message{ID: "é-NFC", Source: "urn:s", Type: "t", Subject: "sub", ContentType: "application/octet-stream",
		DataSchema: "http://x/y", Extensions: map[string]string{"a": "1", "traceparent": "x"}, Topic: "t.x", Key: []byte{0, 0xff},
		Body: []byte{0, 1, 0xff, 0xfe}, Time: time.Unix(1700000000, 123456000).UTC(),
		Header: envelope.Header{{Name: "H", Value: []byte{0, 0xff}}, {Name: "h", Value: []byte("2")}, {Name: "H", Value: nil}, {Name: "e", Value: []byte{}}}}
	odd := []*envelope.Message{full, Event("nil", ""), Event("empty", ""), Event("emptykey", "")}
	odd[1].Body = nil
	odd[2].Body = []byte{}
	odd[3].Key = []byte{}
	odd = append(odd, Event("json", ""), Event("big", ""))
	odd[4].Body = []byte(`{"b":1e2,"a":"\u0000","a":2}`)
	odd[5].Body = bytes.Repeat([]byte{0, 0xab}, 200_000)
	var want []*envelope.Message
	for _, m := range odd {
		want = append(want, m.Clone())
	}
	commit(t, f, odd...)
	b := &Broker{}
	drain(t, outbox.NewRelay(f.Store(t), b, quick()))
	if len(b.taken) != len(want) {
		t.Fatalf("%d published, want %d", len(b.taken), len(want))
	}
	for i, got := range b.taken {
		if !got.Time.Equal(want[i].Time) {
			t.Errorf("%s: time %v, want %v", want[i].ID, got.Time, want[i].Time)
		}
		got.Time = want[i].Time
		if !reflect.DeepEqual(got, want[i]) {
			t.Errorf("%s arrived as\n %.300v\nwant\n %.300v", want[i].ID, got, want[i])
		}
	}
}

func orderOfKey(t testing.TB, f Fixture) {
	b := &Broker{}
	o := quick()
	o.Batch = 7 // smaller than what is there, so that batches split keys
	r := outbox.NewRelay(f.Store(t), b, o)
	for i := range 30 {
		commit(t, f, Event(fmt.Sprint("a", i), "a"), Event(fmt.Sprint("b", i), "b"))
	}
	drain(t, r)
	for _, k := range []string{"a", "b"} {
		if got := ofKey(b.IDs(), k); !slices.Equal(got, names(k, 30)) {
			t.Errorf("key %s went out as %q", k, got)
		}
	}
}

func failedHead(t testing.TB, f Fixture) {
	for _, batch := range []int{1, 3, 100} {
		b, fails := &Broker{}, 0
		b.Answer = func(m *envelope.Message) error {
			if m.ID == "a1" && fails < 2 {
				fails++
				return errRefused
			}
			return nil
		}
		o := quick()
		o.Batch = batch
		r := outbox.NewRelay(f.Store(t), b, o)
		commit(t, f, Event("a1", "a"), Event("a2", "a"))
		commit(t, f, Event("c1", "c"), Event("a3", "a"))
		until(t, r, "all four", func() bool { return len(b.IDs()) >= 4 })
		drain(t, r)
		if got := ofKey(b.IDs(), "a"); !slices.Equal(got, []string{"a1", "a2", "a3"}) {
			t.Errorf("batch %d: key a went out as %q", batch, got)
		}
		if at := slices.Index(b.IDs(), "c1"); batch == 100 && at != 0 {
			t.Errorf("c1 went out at place %d, it had to wait for another key", at)
		}
		stop(t, r)
	}
}

// stop makes r give up its lease.
func stop(t testing.TB, r *outbox.Relay) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := r.Run(ctx); err != nil {
		t.Fatalf("stop: %v", err)
	}
}

func unkeyed(t testing.TB, f Fixture) {
	b, fails := &Broker{}, 0
	b.Answer = func(m *envelope.Message) error {
		if m.ID == "u1" && fails < 3 {
			fails++
			return errRefused
		}
		return nil
	}
	r := outbox.NewRelay(f.Store(t), b, quick())
	commit(t, f, Event("u1", ""), Event("u2", ""), Event("u3", ""))
	if _, err := r.Step(context.Background()); err != nil {
		t.Fatal(err)
	}
	expect(t, b, "u2", "u3")
	until(t, r, "u1", func() bool { return len(b.IDs()) == 3 })
	expect(t, b, "u2", "u3", "u1")
}

func rejected(t testing.TB, f Fixture) {
	b, asked := &Broker{}, 0
	b.Answer = func(m *envelope.Message) error {
		if m.ID == "bad" {
			asked++
			return fmt.Errorf("%w: 2 MiB are too large", brokers.ErrRejected)
		}
		return nil
	}
	r := outbox.NewRelay(f.Store(t), b, quick())
	commit(t, f, Event("a", "1"), Event("bad", "2"), Event("c", "3"), Event("d", "4"), Event("e", ""))
	drain(t, r)
	drain(t, r)
	expect(t, b, "a", "c", "d", "e")
	if asked != 1 {
		t.Errorf("the broker was asked %d times about a row that it rejects, want once", asked)
	}
	ps := parkedRows(t, f)
	if len(ps) != 1 || ps[0].Attempts != 1 || ps[0].Topic != "t" || ps[0].Size != 3 || !bytes.Contains([]byte(ps[0].Reason), []byte("too large")) {
		t.Errorf("parked: %+v", ps)
	}
}

func parkedRows(t testing.TB, f Fixture) []outbox.Parked {
	t.Helper()
	p, ok := f.Store(t).(outbox.Parker)
	if !ok {
		t.Skip("the store is no Parker")
	}
	ps, err := p.Parked(context.Background(), 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	return ps
}

// rejecting refuses one id until it is told otherwise.
func rejecting(id string) *Broker {
	b := &Broker{}
	b.Answer = func(m *envelope.Message) error {
		if m.ID == id {
			return brokers.ErrRejected
		}
		return nil
	}
	return b
}

func parkedHead(t testing.TB, f Fixture) {
	b := rejecting("a1")
	r := outbox.NewRelay(f.Store(t), b, quick())
	commit(t, f, Event("a1", "a"), Event("a2", "a"))
	drain(t, r)
	commit(t, f, Event("a3", "a"), Event("c1", "c"))
	drain(t, r)
	expect(t, b, "c1")
	b.SetAnswer(nil)
	ps := parkedRows(t, f)
	if len(ps) != 1 {
		t.Fatalf("parked: %+v, want the head only", ps)
	}
	p := f.Store(t).(outbox.Parker)
	if ok, err := p.Requeue(context.Background(), ps[0].ID); err != nil || !ok {
		t.Fatalf("requeue: %v, %v", ok, err)
	}
	if ok, err := p.Requeue(context.Background(), ps[0].ID); err != nil || ok {
		t.Errorf("requeue of a row that is not parked: %v, %v", ok, err)
	}
	until(t, r, "the key", func() bool { return len(b.IDs()) == 4 })
	expect(t, b, "c1", "a1", "a2", "a3")
}

func droppedHead(t testing.TB, f Fixture) {
	b := rejecting("a1")
	r := outbox.NewRelay(f.Store(t), b, quick())
	commit(t, f, Event("a1", "a"), Event("a2", "a"))
	drain(t, r)
	expect(t, b)
	ps := parkedRows(t, f)
	if ok, err := f.Store(t).(outbox.Parker).Drop(context.Background(), ps[0].ID); err != nil || !ok {
		t.Fatalf("drop: %v, %v", ok, err)
	}
	until(t, r, "a2", func() bool { return len(b.IDs()) == 1 })
	expect(t, b, "a2")
}

func skippedHead(t testing.TB, f Fixture) {
	b := rejecting("a1")
	o := quick()
	o.SkipParked = true
	r := outbox.NewRelay(f.Store(t), b, o)
	commit(t, f, Event("a1", "a"), Event("a2", "a"))
	until(t, r, "a2", func() bool { return len(b.IDs()) == 1 })
	commit(t, f, Event("a3", "a"))
	drain(t, r)
	expect(t, b, "a2", "a3")
	if ps := parkedRows(t, f); len(ps) != 1 {
		t.Errorf("parked: %+v", ps)
	}
}

// a1 is passed by a2, which is then held. Requeued, a1 goes in front of it
// again, and while it cannot go a2 may not, although that is due.
func requeuedInPlace(t testing.TB, f Fixture) {
	b := rejecting("a1")
	o := quick()
	o.SkipParked, o.MaxBackoff = true, time.Second
	r := outbox.NewRelay(f.Store(t), b, o)
	commit(t, f, Event("a1", "a"))
	drain(t, r)
	b.SetAnswer(func(m *envelope.Message) error { return errRefused })
	commit(t, f, Event("a2", "a"), Event("a3", "a"))
	drain(t, r)
	requeueOne(t, f)
	b.SetAnswer(func(m *envelope.Message) error {
		if m.ID == "a1" {
			return brokers.ErrNoRoute // for longer than a2 has to wait
		}
		return nil
	})
	waitFor(t, "a1 to be tried again", func() bool { n, err := r.Step(context.Background()); return n == 3 && err == nil })
	for range 5 {
		if _, err := r.Step(context.Background()); err != nil {
			t.Fatalf("step: %v", err)
		}
	}
	expect(t, b)
	b.SetAnswer(nil)
	commit(t, f, Event("a4", "a"))
	until(t, r, "all", func() bool { return len(b.IDs()) == 4 })
	expect(t, b, "a1", "a2", "a3", "a4")
}

// requeueOne requeues the one row that is parked.
func requeueOne(t testing.TB, f Fixture) {
	t.Helper()
	ps := parkedRows(t, f)
	if len(ps) != 1 {
		t.Fatalf("parked: %+v, want one row", ps)
	}
	if ok, err := f.Store(t).(outbox.Parker).Requeue(context.Background(), ps[0].ID); err != nil || !ok {
		t.Fatalf("requeue: %v, %v", ok, err)
	}
}

// a1 is parked so that others pass it, and a2 by a relay with the other policy.
// When a1 comes back it goes, and a2 stays parked.
func requeuedBeforeParked(t testing.TB, f Fixture) {
	b := rejecting("a1")
	o := quick()
	o.SkipParked = true
	r := outbox.NewRelay(f.Store(t), b, o)
	commit(t, f, Event("a1", "a"))
	drain(t, r)
	first := parkedRows(t, f)
	stop(t, r)
	b.SetAnswer(func(*envelope.Message) error { return brokers.ErrRejected })
	r = outbox.NewRelay(f.Store(t), b, quick())
	commit(t, f, Event("a2", "a"))
	drain(t, r)
	b.SetAnswer(nil)
	if ok, err := f.Store(t).(outbox.Parker).Requeue(context.Background(), first[0].ID); err != nil || !ok {
		t.Fatalf("requeue: %v, %v", ok, err)
	}
	commit(t, f, Event("a3", "a"))
	drain(t, r)
	expect(t, b, "a1")
	requeueOne(t, f)
	drain(t, r)
	expect(t, b, "a1", "a2", "a3")
}

// What is written behind a held row goes in one batch with it.
func goesWithItsHead(t testing.TB, f Fixture) {
	b := rejecting("a1")
	r := outbox.NewRelay(f.Store(t), b, quick())
	commit(t, f, Event("a1", "a"))
	drain(t, r)
	b.SetAnswer(nil)
	requeueOne(t, f)
	commit(t, f, Event("a2", "a"))
	if n, err := r.Step(context.Background()); n != 2 || err != nil {
		t.Errorf("step: %d rows, %v, want both", n, err)
	}
	expect(t, b, "a1", "a2")
}

// Two keys that no index takes whole, alike but for their last byte.
func longKeys(t testing.TB, f Fixture) {
	b, refused := &Broker{}, true
	b.Answer = func(m *envelope.Message) error {
		if m.ID == "a1" && refused {
			return errRefused
		}
		return nil
	}
	r := outbox.NewRelay(f.Store(t), b, quick())
	long := make([]byte, 8000)
	_, _ = rand.Read(long) // it must not be compressible
	var msgs []*envelope.Message
	for _, id := range []string{"a1", "b1", "a2", "b2", "a3"} {
		m := Event(id, "")
		m.Key = append(bytes.Clone(long), id[0])
		msgs = append(msgs, m)
	}
	commit(t, f, msgs[:4]...)
	if _, err := r.Step(context.Background()); err != nil {
		t.Fatalf("step: %v", err)
	}
	commit(t, f, msgs[4])
	if _, err := r.Step(context.Background()); err != nil {
		t.Fatalf("step: %v", err)
	}
	expect(t, b, "b1", "b2")
	refused = false
	until(t, r, "all", func() bool { return len(b.IDs()) == 5 })
	expect(t, b, "b1", "b2", "a1", "a2", "a3")
}

// A held row without a key is no row of the empty key.
func emptyKey(t testing.TB, f Fixture) {
	b := &Broker{}
	b.Answer = func(m *envelope.Message) error {
		switch m.ID {
		case "e1":
			return brokers.ErrRejected
		case "u1":
			return errRefused
		}
		return nil
	}
	r := outbox.NewRelay(f.Store(t), b, quick())
	e1, u1, e2 := Event("e1", ""), Event("u1", ""), Event("e2", "")
	e1.Key, e2.Key = []byte{}, []byte{}
	commit(t, f, e1, u1)
	if _, err := r.Step(context.Background()); err != nil {
		t.Fatalf("step: %v", err)
	}
	commit(t, f, e2)
	waitFor(t, "u1 and e2 in one batch", func() bool { n, err := r.Step(context.Background()); return n == 2 && err == nil })
	expect(t, b) // e1 is parked, so e2 waits
}

func attemptsSpent(t testing.TB, f Fixture) {
	b, asked := &Broker{}, 0
	b.Answer = func(*envelope.Message) error { asked++; return errRefused }
	o := quick()
	o.MaxAttempts = 3
	r := outbox.NewRelay(f.Store(t), b, o)
	commit(t, f, Event("a", "a"))
	until(t, r, "parked", func() bool { return len(parkedRows(t, f)) == 1 })
	if asked != 3 {
		t.Errorf("asked %d times, want 3", asked)
	}
}

func outageSpendsNothing(t testing.TB, f Fixture) {
	b := &Broker{}
	b.Answer = func(*envelope.Message) error { return fmt.Errorf("%w: connection refused", brokers.ErrUnavailable) }
	o := quick()
	o.MaxAttempts = 5
	r := outbox.NewRelay(f.Store(t), b, o)
	for i := range 50 {
		commit(t, f, Event(fmt.Sprint("a", i), "a"))
	}
	for range 20 {
		if _, err := r.Step(context.Background()); !errors.Is(err, brokers.ErrUnavailable) {
			t.Fatalf("step during an outage: %v, want ErrUnavailable", err)
		}
	}
	b.SetAnswer(nil)
	until(t, r, "all of them", func() bool { return len(b.IDs()) >= 50 })
	expect(t, b, names("a", 50)...)
	if ps := parkedRows(t, f); len(ps) != 0 {
		t.Errorf("an outage parked %d rows", len(ps))
	}
}

func missingTopic(t testing.TB, f Fixture) {
	b := &Broker{}
	b.Answer = func(m *envelope.Message) error {
		if m.Topic == "missing" {
			return brokers.ErrNoRoute
		}
		return nil
	}
	o := quick()
	o.MaxAttempts = 2
	r := outbox.NewRelay(f.Store(t), b, o)
	lost := Event("m1", "k")
	lost.Topic = "missing"
	commit(t, f, lost, Event("a", "k"))
	for range 20 {
		if _, err := r.Step(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	expect(t, b, "a") // the same key in another topic is another order
	b.SetAnswer(nil)
	until(t, r, "m1", func() bool { return len(b.IDs()) == 2 })
}

// asked is a Broker that can be asked, and serves.
type asked struct{ *Broker }

func (asked) Probe(context.Context) error { return nil }

// More rows than several batches take go to a topic that does not serve, and were
// written first. The broker says that it serves.
func downTopic(t testing.TB, f Fixture) {
	const down, up = 60, 20
	b := &Broker{}
	b.Answer = func(m *envelope.Message) error {
		if m.Topic == "down" {
			return fmt.Errorf("%w: no leader", brokers.ErrUnavailable)
		}
		return nil
	}
	o := quick()
	o.Batch, o.MaxAttempts = 10, 2
	r := outbox.NewRelay(f.Store(t), asked{b}, o)
	for i := range down {
		m := Event(fmt.Sprint("d", i), fmt.Sprint("k", i%7))
		m.Topic = "down"
		commit(t, f, m)
	}
	for i := range up {
		commit(t, f, Event(fmt.Sprint("u", i), fmt.Sprint("k", i%7)))
	}
	until(t, r, "the topic that serves", func() bool { return len(b.IDs()) == up })
	b.SetAnswer(nil)
	until(t, r, "the topic that was down", func() bool { return len(b.IDs()) == up+down })
	for k := range 7 {
		var want []string
		for i := k; i < down; i += 7 {
			want = append(want, fmt.Sprint("d", i))
		}
		var got []string
		for _, id := range b.IDs() {
			if slices.Contains(want, id) {
				got = append(got, id)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("key k%d went in the order %q", k, got)
		}
	}
	if ps := parkedRows(t, f); len(ps) != 0 {
		t.Errorf("%d rows were parked", len(ps))
	}
}

// One of two partitions has no leader: its rows are tried again and again, and
// are more than a batch takes.
func heldLeaveRoom(t testing.TB, f Fixture) {
	b := &Broker{}
	b.Answer = func(m *envelope.Message) error {
		if m.Topic == "down" {
			return brokers.ErrUnavailable
		}
		return nil
	}
	o := quick()
	o.Batch = 10
	r := outbox.NewRelay(f.Store(t), b, o)
	mixed := func(name string) {
		for i := range 15 {
			down, up := Event(fmt.Sprint("down", name, i), ""), Event(fmt.Sprint(name, i), "")
			down.Topic = "down"
			commit(t, f, down, up)
		}
	}
	mixed("a")
	until(t, r, "the first rows of the topic that is up", func() bool { return len(b.IDs()) == 15 })
	mixed("b")
	until(t, r, "the later rows of the topic that is up", func() bool { return len(b.IDs()) == 30 })
	b.SetAnswer(nil)
	until(t, r, "the topic that was down", func() bool { return len(b.IDs()) == 60 })
}

// A relay that has fallen behind must not read what does not fit in memory,
// however large the rows are. Each is held once, so that held rows and others
// are read together.
func bytesBounded(t testing.TB, f Fixture) {
	const n, size, bound = 80, 512 << 10, 20 << 20
	for range n {
		m := Event("big", "")
		m.Body = bytes.Repeat([]byte{0xab}, size)
		commit(t, f, m)
	}
	ctx, s := context.Background(), f.Store(t)
	l, err := s.Acquire(ctx, "me", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int64]bool{}
	for sent := 0; sent < n; {
		rows, err := s.Read(ctx, l, n)
		if err != nil || len(rows) == 0 {
			t.Fatalf("read: %d rows, %v", len(rows), err)
		}
		if got := len(rows) * size; got > bound {
			t.Fatalf("a read returned %d MiB, the bound is %d", got>>20, bound>>20)
		}
		ss := make([]outbox.Settlement, len(rows))
		for i, row := range rows {
			ss[i] = outbox.Settlement{Row: row, Action: outbox.Hold, Reason: "test"}
			if seen[row.ID] {
				ss[i].Action = outbox.Sent
				sent++
			}
			seen[row.ID] = true
		}
		if err := s.Settle(ctx, l, ss); err != nil {
			t.Fatal(err)
		}
	}
}

// A read of a large batch takes longer than a lease lasts.
func renewDuringRead(t testing.TB, f Fixture) {
	for i := range 20 {
		commit(t, f, Event(fmt.Sprint("e", i), ""))
	}
	ctx, s := context.Background(), f.Store(t)
	l, err := s.Acquire(ctx, "me", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	renewed := make(chan error)
	go func() {
		var err error
		for range 20 {
			err = errors.Join(err, s.Renew(ctx, l))
		}
		renewed <- err
	}()
	for range 20 {
		if rows, err := s.Read(ctx, l, 100); err != nil || len(rows) != 20 {
			t.Errorf("read: %d rows, %v", len(rows), err)
		}
	}
	if err := <-renewed; err != nil {
		t.Errorf("renew: %v", err)
	}
}

func lostAnswer(t testing.TB, f Fixture) {
	b, lost := &Broker{}, true
	b.Answer = func(m *envelope.Message) error {
		if m.ID == "a2" && lost {
			lost = false
			return brokers.ErrUnknown
		}
		return nil
	}
	r := outbox.NewRelay(f.Store(t), b, quick())
	commit(t, f, Event("a1", "a"), Event("a2", "a"), Event("a3", "a"))
	until(t, r, "all three", func() bool { return len(b.IDs()) >= 3 })
	expect(t, b, "a1", "a2", "a3")
}

// unsettled is a store whose relay dies before it can settle.
type unsettled struct{ outbox.Store }

var errCrash = errors.New("the relay died here")

func (unsettled) Settle(context.Context, outbox.Lease, []outbox.Settlement) error { return errCrash }

func crashBeforeSettle(t testing.TB, f Fixture) {
	b := &Broker{}
	commit(t, f, Event("a1", "a"), Event("b1", "b"), Event("a2", "a"))
	o := quick()
	o.Lease, o.Batch = 300*time.Millisecond, 2
	dying := outbox.NewRelay(unsettled{f.Store(t)}, b, o)
	if _, err := dying.Step(context.Background()); !errors.Is(err, errCrash) {
		t.Fatalf("step: %v", err)
	}
	commit(t, f, Event("a3", "a"))
	next := outbox.NewRelay(f.Store(t), b, o)
	until(t, next, "the rest", func() bool { return len(firsts(b.IDs())) == 4 })
	if got := ofKey(firsts(b.IDs()), "a"); !slices.Equal(got, []string{"a1", "a2", "a3"}) {
		t.Errorf("first publishes of key a: %q", got)
	}
	if n := len(b.IDs()); n > 4+o.Batch {
		t.Errorf("%d publishes of 4 rows, one batch may be repeated", n)
	}
}

func lease(t testing.TB, f Fixture) {
	ctx := context.Background()
	commit(t, f, Event("a", "k"))
	old, other := f.Store(t), f.Store(t)
	l1, err := old.Acquire(ctx, "old", 400*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := old.Read(ctx, l1, 10)
	if err != nil || len(rows) != 1 {
		t.Fatalf("read: %v, %v", rows, err)
	}
	if _, err := other.Acquire(ctx, "other", time.Second); !errors.Is(err, outbox.ErrHeld) {
		t.Fatalf("second acquire: %v, want ErrHeld", err)
	}
	if err := old.Renew(ctx, l1); err != nil {
		t.Fatal(err)
	}
	var l2 outbox.Lease
	waitFor(t, "the lease to run out", func() bool {
		l2, err = other.Acquire(ctx, "other", 10*time.Second)
		return err == nil
	})
	if l2.Epoch <= l1.Epoch {
		t.Errorf("the new epoch is %d, the old one %d", l2.Epoch, l1.Epoch)
	}
	if err := old.Settle(ctx, l1, []outbox.Settlement{{Row: rows[0], Action: outbox.Sent}}); !errors.Is(err, outbox.ErrFenced) {
		t.Errorf("settle by the old holder: %v, want ErrFenced", err)
	}
	if err := old.Renew(ctx, l1); !errors.Is(err, outbox.ErrFenced) {
		t.Errorf("renew by the old holder: %v, want ErrFenced", err)
	}
	if err := old.Release(ctx, l1); err != nil {
		t.Errorf("release by the old holder: %v", err)
	}
	if rows, err := other.Read(ctx, l2, 10); err != nil || len(rows) != 1 {
		t.Errorf("the row is gone after the old holder's settle: %v, %v", rows, err)
	}
	if _, err := old.Acquire(ctx, "old", time.Second); !errors.Is(err, outbox.ErrHeld) {
		t.Errorf("acquire after the old holder's release: %v, want ErrHeld", err)
	}
}

func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func release(t testing.TB, f Fixture) {
	r := outbox.NewRelay(f.Store(t), &Broker{}, &outbox.RelayOptions{Lease: time.Minute})
	drain(t, r)
	stop(t, r)
	if _, err := f.Store(t).Acquire(context.Background(), "next", time.Second); err != nil {
		t.Errorf("acquire after a clean stop: %v", err)
	}
}

func stopping(t testing.TB, f Fixture) {
	b := &Broker{}
	const n = 500
	for i := range n / 50 {
		var ms []*envelope.Message
		for j := range 50 {
			ms = append(ms, Event(fmt.Sprint("e", i*50+j), fmt.Sprint(j%7)))
		}
		commit(t, f, ms...)
	}
	for len(b.IDs()) < n {
		ctx, cancel := context.WithCancel(context.Background())
		var taken atomic.Int32
		b.SetAnswer(func(*envelope.Message) error {
			if taken.Add(1) == 37 { // in the middle of a batch
				cancel()
			}
			return nil
		})
		o := quick()
		o.Batch = 50
		if err := outbox.NewRelay(f.Store(t), b, o).Run(ctx); err != nil {
			t.Fatal(err)
		}
		cancel()
	}
	if got := b.IDs(); len(firsts(got)) != n || len(got) != n {
		t.Errorf("%d publishes of %d rows over %d rows written", len(got), len(firsts(got)), n)
	}
}

func pruning(t testing.TB, f Fixture) {
	p, ok := f.Store(t).(outbox.Pruner)
	if !ok {
		t.Skip("the store is no Pruner")
	}
	ctx, b := context.Background(), &Broker{}
	commit(t, f, Event("a", ""), Event("b", ""), Event("c", ""))
	r := outbox.NewRelay(f.Store(t), b, quick())
	if n, err := p.Prune(ctx, 0, 100); err != nil || n != 0 {
		t.Errorf("pruned %d rows that are not settled: %v", n, err)
	}
	drain(t, r)
	commit(t, f, Event("d", "")) // not settled
	if n, err := p.Prune(ctx, time.Hour, 100); err != nil || n != 0 {
		t.Errorf("pruned %d rows that are too young: %v", n, err)
	}
	total := 0
	waitFor(t, "three rows to be pruned", func() bool {
		n, err := p.Prune(ctx, 0, 2)
		if err != nil || n > 2 {
			t.Fatalf("prune: %d, %v", n, err)
		}
		total += n
		return total >= 3
	})
	drain(t, r)
	expect(t, b, "a", "b", "c", "d")
}

func backlog(t testing.TB, f Fixture) {
	n := 20_000
	if testing.Short() {
		n = 2_000
	}
	tx := f.Begin(t)
	for i := 0; i < n; i += 500 {
		ms := make([]*envelope.Message, 500)
		for j := range ms {
			ms[j] = Event(fmt.Sprint("e", i+j), fmt.Sprint((i+j)%13))
		}
		if err := tx.Write(ms...); err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	b := &Broker{}
	o := quick()
	o.Batch = 1000
	drain(t, outbox.NewRelay(f.Store(t), b, o))
	if got := b.IDs(); !slices.Equal(got, names("e", n)) {
		t.Errorf("%d published, want %d in order", len(got), n)
	}
}

func overlapping(t testing.TB, f Fixture) Overlapping {
	o, ok := f.(Overlapping)
	if !ok {
		t.Skip("write transactions of this database do not overlap")
	}
	return o
}

// Ids 1 and 2 are drawn, 2 commits and is published, then 1 commits.
func lateCommit(t testing.TB, f Fixture) {
	overlapping(t, f)
	b := &Broker{}
	r := outbox.NewRelay(f.Store(t), b, quick())
	late, gone := f.Begin(t), f.Begin(t)
	if err := errors.Join(late.Write(Event("late", "l")), gone.Write(Event("ghost", "g"))); err != nil {
		t.Fatal(err)
	}
	commit(t, f, Event("early", "e"))
	drain(t, r)
	expect(t, b, "early")
	if err := gone.Rollback(); err != nil {
		t.Fatal(err)
	}
	commit(t, f, Event("between", "e"))
	drain(t, r)
	if err := late.Commit(); err != nil {
		t.Fatal(err)
	}
	drain(t, r)
	expect(t, b, "early", "between", "late")
}

// Ids 1 and 2 are drawn, 2 commits and is published, 1 commits, and before the
// relay looks again everything that is settled is pruned.
func pruneLateCommit(t testing.TB, f Fixture) {
	overlapping(t, f)
	p, ok := f.Store(t).(outbox.Pruner)
	if !ok {
		t.Skip("the store is no Pruner")
	}
	b := &Broker{}
	r := outbox.NewRelay(f.Store(t), b, quick())
	late := f.Begin(t)
	if err := late.Write(Event("late", "l")); err != nil {
		t.Fatal(err)
	}
	commit(t, f, Event("early", "e"))
	drain(t, r)
	if err := late.Commit(); err != nil {
		t.Fatal(err)
	}
	if n, err := p.Prune(context.Background(), 0, 100); err != nil || n > 1 {
		t.Errorf("pruned %d rows, one is settled: %v", n, err)
	}
	drain(t, r)
	expect(t, b, "early", "late")
}

func longWriter(t testing.TB, f Fixture) {
	o := overlapping(t, f)
	b := &Broker{}
	r := outbox.NewRelay(f.Store(t), b, quick())
	long := f.Begin(t)
	o.TakeID(t, long)
	for i := range 100 {
		commit(t, f, Event(fmt.Sprint("a", i), "a"))
	}
	drain(t, r)
	expect(t, b, names("a", 100)...)
	if err := long.Commit(); err != nil {
		t.Fatal(err)
	}
}

// The transaction that began first waits for the lock and writes second: it
// has the smaller transaction id and the greater row id.
func beganFirst(t testing.TB, f Fixture) {
	o := overlapping(t, f)
	b := &Broker{}
	r := outbox.NewRelay(f.Store(t), b, quick())
	first, second := f.Begin(t), f.Begin(t)
	o.TakeID(t, first)
	o.Lock(t, second)
	if err := second.Write(Event("a1", "a")); err != nil {
		t.Fatal(err)
	}
	if err := second.Commit(); err != nil {
		t.Fatal(err)
	}
	o.Lock(t, first)
	if err := first.Write(Event("a2", "a")); err != nil {
		t.Fatal(err)
	}
	if err := first.Commit(); err != nil {
		t.Fatal(err)
	}
	drain(t, r)
	expect(t, b, "a1", "a2")
}
