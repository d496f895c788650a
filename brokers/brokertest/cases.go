package brokertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

func roundTrip(t testing.TB, f Fixture) {
	want := Event(f.Topic(), "k", 1)
	want.Subject, want.Extensions = "sub", map[string]string{"correlationid": "c 1 é"}
	want.Time = time.Date(2026, 5, 4, 3, 2, 1, 123e6, time.UTC)
	publish(t, f.Publisher(t), want)
	src := f.Source(t, "g")
	d := next(t, src)
	got, err := envelope.Decode(d.Message)
	if err != nil {
		t.Fatal(err)
	}
	switch {
	case got.ID != want.ID || got.Source != want.Source || got.Type != want.Type || got.Subject != want.Subject:
		t.Errorf("received %+v", got)
	case got.ContentType != want.ContentType || got.Extensions["correlationid"] != "c 1 é" || !got.Time.Equal(want.Time):
		t.Errorf("received %+v", got)
	case !bytes.Equal(got.Body, want.Body) || got.Topic != want.Topic || got.Position == "":
		t.Errorf("received %+v", got)
	}
	if d.Lane != "" && !bytes.Equal(got.Key, want.Key) {
		t.Errorf("key %q, want %q", got.Key, want.Key)
	}
	ack(t, src, d)
}

func headers(t testing.TB, f Fixture) {
	m := Event(f.Topic(), "k", 1)
	m.Header.Add("X-One", []byte("1"))
	m.Header.Add("x-two", []byte("a"))
	m.Header.Add("x-two", []byte("b"))
	publish(t, f.Publisher(t), m)
	src := f.Source(t, "g")
	d := next(t, src)
	var got []string
	for _, v := range d.Message.Header.Values("x-two") {
		got = append(got, string(v))
	}
	if !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("x-two arrived as %q", got)
	}
	if !slices.ContainsFunc(d.Message.Header, func(f envelope.Field) bool { return f.Name == "X-One" && string(f.Value) == "1" }) {
		t.Errorf("X-One did not arrive as it was: %q", d.Message.Header)
	}
	ack(t, src, d)
}

func nullBody(t testing.TB, f Fixture) {
	if _, ok := f.(NullBody); !ok {
		t.Skip("n/a: the broker has no null")
	}
	null, empty := Event(f.Topic(), "k", 1), Event(f.Topic(), "k", 2)
	null.Body, empty.Body = nil, []byte{}
	unkeyed, emptyKey := Event(f.Topic(), "", 3), Event(f.Topic(), "", 4)
	emptyKey.Key = []byte{}
	publish(t, f.Publisher(t), null, empty, unkeyed, emptyKey)
	src := f.Source(t, "g")
	for range 4 {
		d := next(t, src)
		m := d.Message
		switch id(t, d) {
		case "k-1":
			if m.Body != nil {
				t.Errorf("a null body arrived as %q", m.Body)
			}
		case "k-2":
			if m.Body == nil {
				t.Error("an empty body arrived as null")
			}
		case "-3":
			if m.Key != nil {
				t.Errorf("a null key arrived as %q", m.Key)
			}
		case "-4":
			if m.Key == nil {
				t.Error("an empty key arrived as null")
			}
		}
		ack(t, src, d)
	}
}

func largeBody(t testing.TB, f Fixture) {
	m := Event(f.Topic(), "k", 1)
	m.Body = bytes.Repeat([]byte("x"), 1000<<10)
	publish(t, f.Publisher(t), m)
	src := f.Source(t, "g")
	d := next(t, src)
	if !bytes.Equal(d.Message.Body, m.Body) {
		t.Errorf("%d bytes arrived, want %d", len(d.Message.Body), len(m.Body))
	}
	ack(t, src, d)
}

func ackedStays(t testing.TB, f Fixture) {
	events(t, f, 5, "k")
	src := f.Source(t, "g")
	for range 5 {
		ack(t, src, next(t, src))
	}
	closeSource(t, src)
	events(t, f, 1, "after")
	again := f.Source(t, "g")
	d := next(t, again)
	if got := id(t, d); got != "after-0" {
		t.Errorf("received %s again", got)
	}
	ack(t, again, d)
}

// A consumer dies in the middle: what it had not settled comes back to the
// next one, and nothing else has to.
func unsettledComesBack(t testing.TB, f Fixture) {
	events(t, f, 5, "k")
	src := f.Source(t, "g")
	for i := range 5 {
		d := next(t, src)
		if i < 2 {
			ack(t, src, d)
		}
	}
	closeSource(t, src)
	got := settledOnce(t, 3, f.Source(t, "g"))[0]
	slices.Sort(got) // a broker without lanes may deliver again in any order
	if !slices.Equal(got, []string{"k-2", "k-3", "k-4"}) {
		t.Errorf("came back: %q", got)
	}
}

func returnedComesBack(t testing.TB, f Fixture) {
	events(t, f, 3, "k")
	src := f.Source(t, "g")
	first := next(t, src)
	if err := src.Return(t.Context(), first); err != nil {
		t.Fatalf("return: %v", err)
	}
	got := settledOnce(t, 3, src)[0]
	slices.Sort(got)
	if !slices.Equal(got, []string{"k-0", "k-1", "k-2"}) {
		t.Errorf("received %q", got)
	}
}

func nackedComesBack(t testing.TB, f Fixture) {
	events(t, f, 1, "k")
	src := f.Source(t, "g")
	nacker, ok := src.(brokers.Nacker)
	if !ok {
		t.Skip("n/a: the broker cannot wait")
	}
	d := next(t, src)
	const after = 700 * time.Millisecond
	start := time.Now()
	if err := nacker.Nack(t.Context(), d, after); err != nil {
		t.Fatal(err)
	}
	again := next(t, src)
	if took := time.Since(start); took < after-50*time.Millisecond {
		t.Errorf("it came back after %v, want not before %v", took, after)
	}
	if again.Attempt != 2 {
		t.Errorf("attempt %d, want 2", again.Attempt)
	}
	ack(t, src, again)
	none(t, src, 300*time.Millisecond)
}

func laterAck(t testing.TB, f Fixture) {
	events(t, f, 10, "k")
	src := f.Source(t, "g")
	var ds []*brokers.Delivery
	for range 10 {
		ds = append(ds, next(t, src))
	}
	want := id(t, ds[0])
	for _, d := range ds[1:] { // the first still runs
		ack(t, src, d)
	}
	closeSource(t, src)
	again := f.Source(t, "g")
	d := next(t, again)
	if got := id(t, d); got != want {
		t.Errorf("%s is lost: %s came first", want, got)
	}
	ack(t, again, d)
}

func manyInOrder(t testing.TB, f Fixture) {
	n, keys := 10_000, []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	if testing.Short() {
		n = 800
	}
	p := f.Publisher(t)
	for i := 0; i < n; i += 400 {
		var msgs []*envelope.Message
		for j := i; j < i+400; j++ {
			msgs = append(msgs, Event(f.Topic(), keys[j%len(keys)], j/len(keys)))
		}
		publish(t, p, msgs...)
	}
	got := settledOnce(t, n, f.Source(t, "g"))[0]
	for _, k := range keys {
		i := 0
		for _, id := range got {
			if strings.HasPrefix(id, k+"-") {
				if id != fmt.Sprintf("%s-%d", k, i) {
					t.Fatalf("key %s: %s came at place %d", k, id, i)
				}
				i++
			}
		}
	}
}

func sharing(t testing.TB, f Fixture) {
	a, b := f.Source(t, "g"), f.Source(t, "g")
	events(t, f, 400, "a", "b", "c", "d", "e", "f", "g", "h")
	got := settledOnce(t, 400, a, b)
	if len(got[0])+len(got[1]) != 400 {
		t.Errorf("%d and %d events", len(got[0]), len(got[1]))
	}
}

func groups(t testing.TB, f Fixture) {
	events(t, f, 20, "a", "b")
	settledOnce(t, 20, f.Source(t, "one"))
	settledOnce(t, 20, f.Source(t, "two"))
}

func receiveContext(t testing.TB, f Fixture) {
	src := f.Source(t, "g")
	none(t, src, 50*time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := src.Receive(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("receive with a context that is done: %v", err)
	}
	events(t, f, 1, "k") // and it goes on
	ack(t, src, next(t, src))
}

func receiveAfterClose(t testing.TB, f Fixture) {
	src := f.Source(t, "g")
	waiting := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := src.Receive(ctx)
		waiting <- err
	}()
	closeSource(t, src)
	if err := <-waiting; !errors.Is(err, brokers.ErrClosed) {
		t.Errorf("receive that close ended: %v, want ErrClosed", err)
	}
	if _, err := src.Receive(t.Context()); !errors.Is(err, brokers.ErrClosed) {
		t.Errorf("receive after close: %v, want ErrClosed", err)
	}
	closeSource(t, src)
}

func closeBusy(t testing.TB, f Fixture) {
	events(t, f, 20, "a", "b")
	src := f.Source(t, "g")
	var ds []*brokers.Delivery
	for range 6 {
		ds = append(ds, next(t, src))
	}
	closeSource(t, src)
	for _, d := range ds {
		if err := src.Ack(t.Context(), d); err == nil {
			t.Errorf("ack of %s after close: nil, it is not settled", d.Message.Position)
		}
	}
	settledOnce(t, 20, f.Source(t, "g"))
}

func lost(t testing.TB, f Fixture) {
	r, ok := f.(Revoker)
	if !ok {
		t.Skip("n/a: claims of this broker cannot be taken away on demand")
	}
	events(t, f, 1, "k")
	src := f.Source(t, "g")
	d := next(t, src)
	r.Revoke(t, src)
	select {
	case <-d.Lost:
	case <-time.After(patience):
		t.Fatal("Lost is not closed")
	}
	if err := src.Ack(t.Context(), d); !errors.Is(err, brokers.ErrLost) {
		t.Errorf("ack of a lost delivery: %v, want ErrLost", err)
	}
	if err := src.Return(t.Context(), d); !errors.Is(err, brokers.ErrLost) {
		t.Errorf("return of a lost delivery: %v, want ErrLost", err)
	}
	settledOnce(t, 1, src)
}

// What is in hand is nobody else's, however long it takes: another source of the
// group gets nothing, where its coming does not want everything back.
func slow(t testing.TB, f Fixture) {
	s, ok := f.(Slow)
	if !ok {
		t.Skip("n/a: this fixture holds nothing for long")
	}
	events(t, f, 1, "k")
	src := f.Source(t, "g")
	d := next(t, src)
	other := src
	if d.Lane == "" {
		other = f.Source(t, "g")
	}
	none(t, other, s.HoldFor())
	if d.Lost != nil {
		select {
		case <-d.Lost:
			t.Fatal("the delivery is lost although its source lives")
		default:
		}
	}
	ack(t, src, d)
	closeSource(t, src)
	none(t, f.Source(t, "g"), 300*time.Millisecond)
}

// A delivery whose acknowledgement did not arrive comes again, to whoever is there
// then.
func lostAck(t testing.TB, f Fixture) {
	l, ok := f.(AckLoser)
	if !ok {
		t.Skip("n/a: this fixture loses no acknowledgements")
	}
	events(t, f, 1, "k")
	src := f.Source(t, "g")
	d := next(t, src)
	want := id(t, d)
	l.LoseAcks(t, src)
	ack(t, src, d)
	closeSource(t, src)
	again := f.Source(t, "g")
	d = next(t, again)
	if got := id(t, d); got != want {
		t.Errorf("received %s, want %s again", got, want)
	}
	ack(t, again, d)
	closeSource(t, again)
	none(t, f.Source(t, "g"), 300*time.Millisecond)
}

// What was confirmed before the broker was killed is delivered, what was
// acknowledged before may come again, and publishing goes on.
func restart(t testing.TB, f Fixture) {
	r, ok := f.(Restarter)
	if !ok {
		t.Skip("n/a: this fixture's broker is everybody's")
	}
	p, src := f.Publisher(t), f.Source(t, "g")
	publish(t, p, Event(f.Topic(), "a", 0), Event(f.Topic(), "a", 1), Event(f.Topic(), "a", 2))
	ack(t, src, next(t, src))
	next(t, src) // in hand when it happens
	r.Restart(t)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for p.Publish(ctx, []*envelope.Message{Event(f.Topic(), "b", 0)}).Err() != nil {
		if ctx.Err() != nil {
			t.Fatal("nothing can be published after the restart")
		}
		time.Sleep(50 * time.Millisecond) // an unknown one is published again, and may be there twice
	}
	want := map[string]bool{"a-1": true, "a-2": true, "b-0": true}
	for len(want) > 0 {
		d, err := src.Receive(ctx)
		if err != nil {
			t.Fatalf("after the restart %v did not come: %v", want, err)
		}
		delete(want, id(t, d))
		_ = src.Ack(ctx, d)
	}
}

func prefetch(t testing.TB, f Fixture) {
	src := f.Source(t, "g")
	d, ok := src.(brokers.Demander)
	if !ok {
		t.Skip("n/a: the source has a bound of its own")
	}
	d.Demand(3)
	events(t, f, 10, "k")
	var got []*brokers.Delivery
	for range 3 {
		got = append(got, next(t, src))
	}
	none(t, src, 300*time.Millisecond)
	ack(t, src, got[0])
	got = append(got, next(t, src))
	none(t, src, 300*time.Millisecond)
	for _, d := range got[1:] {
		ack(t, src, d)
	}
}

// A consumer that waits for what is in 70 lanes, as for a tenant that is limited
// or a handler that hangs, and has told how much it can hold.
func heldLanes(t testing.TB, f Fixture) {
	w, ok := f.(Widener)
	if !ok {
		t.Skip("n/a: the broker has no lanes")
	}
	f = w.Widen(t, 90)
	src := f.Source(t, "g")
	s, ok := src.(brokers.Sharer)
	if !ok {
		t.Skip("n/a: the source has a bound of its own")
	}
	const bound, events, held = 200, 4000, 70
	s.Share(bound)
	fill(t, f, events)
	per := lanes(t, f.Source(t, "count"), events)

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stuck, unsettled, got := make(map[string]bool), 0, make(map[string]int)
	left := events
	for left > 0 {
		d, err := src.Receive(ctx)
		if err != nil {
			t.Fatalf("%d events of the other lanes are missing beside %d lanes whose %d deliveries are not settled: %v", left, len(stuck), unsettled, err)
		}
		if len(stuck) < held && !stuck[d.Lane] && got[d.Lane] == 0 {
			stuck[d.Lane] = true
			left -= per[d.Lane]
		}
		if stuck[d.Lane] {
			unsettled++
		} else {
			got[d.Lane]++
			left--
			ack(t, src, d)
		}
		if unsettled > bound {
			t.Fatalf("%d deliveries are not settled, %d are allowed", unsettled, bound)
		}
	}
}

// fill publishes n events of many keys.
func fill(t testing.TB, f Fixture, n int) {
	keys := make([]string, 800)
	for i := range keys {
		keys[i] = fmt.Sprint("k", i)
	}
	events(t, f, n, keys...)
}

// lanes settles n events and returns how many each lane has.
func lanes(t testing.TB, src brokers.Source, n int) map[string]int {
	per := make(map[string]int)
	for range n {
		d := next(t, src)
		per[d.Lane]++
		ack(t, src, d)
	}
	closeSource(t, src)
	return per
}

func oversized(t testing.TB, f Fixture) {
	o, ok := f.(Oversize)
	if !ok {
		t.Skip("n/a: the broker refuses no size")
	}
	msgs := []*envelope.Message{Event(f.Topic(), "a", 0), Event(f.Topic(), "b", 0), Event(f.Topic(), "c", 0), Event(f.Topic(), "", 0)}
	msgs[1].Body = bytes.Repeat([]byte("x"), o.Oversize())
	res := f.Publisher(t).Publish(t.Context(), msgs)
	if !errors.Is(res[1], brokers.ErrTooLarge) {
		t.Errorf("oversized: %v, want ErrTooLarge", res[1])
	}
	for _, i := range []int{0, 2, 3} {
		if res[i] != nil {
			t.Errorf("message %d beside an oversized one: %v", i, res[i])
		}
	}
	settledOnce(t, 3, f.Source(t, "g"))
}

func missingTopic(t testing.TB, f Fixture) {
	o, ok := f.(MissingTopic)
	if !ok {
		t.Skip("n/a: topics need not exist")
	}
	good, lost := Event(f.Topic(), "a", 0), Event(o.MissingTopic(), "a", 0)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	res := f.Publisher(t).Publish(ctx, []*envelope.Message{lost, good})
	if !errors.Is(res[0], brokers.ErrNoRoute) {
		t.Errorf("a missing topic: %v, want ErrNoRoute", res[0])
	}
	if res[1] != nil {
		t.Errorf("beside a missing topic: %v", res[1])
	}
}

func blocked(t testing.TB, f Fixture) {
	o, ok := f.(Oversize)
	if !ok {
		t.Skip("n/a: the broker refuses nothing")
	}
	msgs := []*envelope.Message{Event(f.Topic(), "a", 0), Event(f.Topic(), "a", 1), Event(f.Topic(), "a", 2), Event(f.Topic(), "b", 0)}
	msgs[1].Body = bytes.Repeat([]byte("x"), o.Oversize())
	res := f.Publisher(t).Publish(t.Context(), msgs)
	if res[0] != nil || !errors.Is(res[1], brokers.ErrRejected) || !errors.Is(res[2], brokers.ErrBlocked) || res[3] != nil {
		t.Errorf("results %v, want nil, rejected, blocked, nil", res)
	}
	got := settledOnce(t, 2, f.Source(t, "g"))[0]
	slices.Sort(got)
	if !slices.Equal(got, []string{"a-0", "b-0"}) {
		t.Errorf("received %q: what follows a failed message of its key was sent", got)
	}
}

func publishAfterClose(t testing.TB, f Fixture) {
	p := f.Publisher(t)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	res := p.Publish(t.Context(), []*envelope.Message{Event(f.Topic(), "k", 0)})
	if len(res) != 1 || !errors.Is(res[0], brokers.ErrClosed) {
		t.Errorf("publish after close: %v, want ErrClosed", res)
	}
	if err := p.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func probe(t testing.TB, f Fixture) {
	p := f.Publisher(t)
	asked, ok := p.(brokers.Prober)
	if !ok {
		t.Skip("n/a: the publisher cannot be asked")
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := asked.Probe(ctx); err != nil {
		t.Errorf("probe of a broker that serves: %v", err)
	}
	if d, ok := f.(Stopper); ok {
		d.Stop(t)
		short, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if err := asked.Probe(short); !errors.Is(err, brokers.ErrUnavailable) {
			t.Errorf("probe of a broker that was stopped: %v, want ErrUnavailable", err)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if err := asked.Probe(ctx); !errors.Is(err, brokers.ErrUnavailable) {
		t.Errorf("probe after close: %v, want ErrUnavailable", err)
	}
}

func publishDone(t testing.TB, f Fixture) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	res := f.Publisher(t).Publish(ctx, []*envelope.Message{Event(f.Topic(), "k", 0)})
	if len(res) != 1 || res[0] == nil {
		t.Errorf("publish with a context that is done: %v, want an error", res)
	}
	if len(res) == 1 && !errors.Is(res[0], brokers.ErrUnknown) && !errors.Is(res[0], brokers.ErrUnavailable) {
		t.Errorf("publish with a context that is done: %v, want ErrUnknown or ErrUnavailable", res[0])
	}
}
