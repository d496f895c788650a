package outboxtest

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
)

// histories runs random histories, the same ones each time: rows are written,
// published, refused, parked, requeued and dropped, the broker is out of reach
// or its answers are lost, and relays die or take over. In the end every row
// that was not dropped has been published, and the first publishes of a key
// are in the order of writing.
func histories(t testing.TB, f Fixture) {
	for seed := range uint64(3) {
		h := &history{t: t, f: f, seed: seed, rand: rand.New(rand.NewPCG(seed, 1)), refused: map[string]int{}, mended: map[string]bool{}, gone: map[string]bool{}}
		h.takeOver()
		for range 120 {
			h.act()
		}
		h.finish()
		h.check()
		stop(t, h.relay)
		if t.Failed() {
			t.Logf("the history of seed %d", seed)
			return
		}
	}
}

type history struct {
	t     testing.TB
	f     Fixture
	seed  uint64
	rand  *rand.Rand
	relay *outbox.Relay

	written []*envelope.Message
	stored  []string        // ids, as the broker has them
	refused map[string]int  // how often
	mended  map[string]bool // what was rejected, and is not any more
	gone    map[string]bool // dropped

	outage, dies bool
}

// takeOver has a new relay, with a store and a size of batch of its own.
func (h *history) takeOver() {
	if h.relay != nil {
		stop(h.t, h.relay)
	}
	o := quick()
	o.Batch = 1 + h.rand.IntN(9)
	h.relay = outbox.NewRelay(mortal{h.f.Store(h.t), h}, h, o)
}

// mortal dies before it settles.
type mortal struct {
	outbox.Store
	h *history
}

func (m mortal) Settle(ctx context.Context, l outbox.Lease, ss []outbox.Settlement) error {
	if m.h.dies {
		return errCrash
	}
	return m.Store.Settle(ctx, l, ss)
}

func (h *history) act() {
	switch n := h.rand.IntN(20); {
	case n < 6:
		h.write()
	case n < 7:
		h.takeOver()
	case n < 9:
		h.operate()
	default:
		h.outage, h.dies = h.rand.IntN(8) == 0, h.rand.IntN(8) == 0
		h.step()
		h.outage, h.dies = false, false
	}
}

func (h *history) write() {
	var msgs []*envelope.Message
	for range 1 + h.rand.IntN(4) {
		m := Event(fmt.Sprintf("%d-%d", h.seed, len(h.written)+len(msgs)), "")
		if k := h.rand.IntN(5); k > 0 {
			m.Key = []byte("abc")[:k-1] // nil, empty, a, ab, abc
		}
		msgs = append(msgs, m)
	}
	commit(h.t, h.f, msgs...)
	h.written = append(h.written, msgs...)
}

func (h *history) step() int {
	n, err := h.relay.Step(context.Background())
	switch {
	case err == nil, h.outage && errors.Is(err, brokers.ErrUnavailable), h.dies && errors.Is(err, errCrash), errors.Is(err, brokers.ErrUnknown):
	default:
		h.t.Fatalf("seed %d: step: %v", h.seed, err)
	}
	return n
}

// operate requeues or drops a parked row.
func (h *history) operate() {
	for _, p := range parkedRows(h.t, h.f) {
		switch h.rand.IntN(3) {
		case 0:
			h.requeue(p.ID)
		case 1:
			h.drop(p.ID)
		}
	}
}

func (h *history) requeue(id int64) {
	h.mended[h.nameOf(id)] = true
	if ok, err := h.f.Store(h.t).(outbox.Parker).Requeue(context.Background(), id); !ok || err != nil {
		h.t.Fatalf("seed %d: requeue: %v, %v", h.seed, ok, err)
	}
}

func (h *history) drop(id int64) {
	h.gone[h.nameOf(id)] = true
	if ok, err := h.f.Store(h.t).(outbox.Parker).Drop(context.Background(), id); !ok || err != nil {
		h.t.Fatalf("seed %d: drop: %v, %v", h.seed, ok, err)
	}
}

// nameOf is the event in a parked row, which tells its size and not its id:
// the reason does, as Publish has put it there.
func (h *history) nameOf(id int64) (name string) {
	for _, p := range parkedRows(h.t, h.f) {
		if p.ID == id {
			_, _ = fmt.Sscanf(p.Reason, brokers.ErrRejected.Error()+": event %s", &name)
		}
	}
	if name == "" {
		h.t.Fatalf("seed %d: no event is known of the parked row %d", h.seed, id)
	}
	return name
}

// Publish implements brokers.Publisher.
func (h *history) Publish(_ context.Context, msgs []*envelope.Message) brokers.Results {
	if h.outage {
		return brokers.Fill(len(msgs), brokers.ErrUnavailable)
	}
	res, failed := make(brokers.Results, len(msgs)), map[string]bool{}
	for i, m := range msgs {
		if m.Key != nil && failed[string(m.Key)] {
			res[i] = brokers.ErrBlocked
			continue
		}
		res[i] = h.answer(m)
		if res[i] == nil || errors.Is(res[i], brokers.ErrUnknown) {
			h.stored = append(h.stored, m.ID)
		}
		failed[string(m.Key)] = failed[string(m.Key)] || m.Key != nil && res[i] != nil
	}
	return res
}

// Close implements brokers.Publisher.
func (h *history) Close() error { return nil }

// answer is what the broker makes of a message: it depends on its id, and on
// how often it was refused.
func (h *history) answer(m *envelope.Message) error {
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(m.ID))
	kind := sum.Sum32() % 16
	h.refused[m.ID]++
	switch {
	case kind == 0 && !h.mended[m.ID]:
		return fmt.Errorf("%w: event %s", brokers.ErrRejected, m.ID)
	case kind == 1 && h.refused[m.ID] < 3:
		return errRefused
	case kind == 2 && h.refused[m.ID] < 2:
		return brokers.ErrNoRoute
	case kind == 3 && h.refused[m.ID] < 2:
		return brokers.ErrUnknown // and it is stored
	}
	return nil
}

// finish mends what is parked, and steps until everything is settled.
func (h *history) finish() {
	deadline := time.Now().Add(20 * time.Second)
	for quiet := 0; quiet < 5; quiet++ {
		if time.Now().After(deadline) {
			h.t.Fatalf("seed %d: there is no end", h.seed)
		}
		ps := parkedRows(h.t, h.f)
		for _, p := range ps {
			h.requeue(p.ID)
		}
		if h.step() > 0 || len(ps) > 0 {
			quiet = 0
		}
		time.Sleep(2 * time.Millisecond) // for rows to become due
	}
}

func (h *history) check() {
	h.t.Helper()
	got := firsts(h.stored)
	for _, key := range [][]byte{nil, {}, []byte("a"), []byte("ab"), []byte("abc")} {
		var want, of []string
		for _, m := range h.written {
			if (m.Key == nil) != (key == nil) || string(m.Key) != string(key) {
				continue
			}
			if !h.gone[m.ID] {
				want = append(want, m.ID)
			}
			if i := slices.Index(got, m.ID); i >= 0 {
				of = append(of, m.ID)
			}
		}
		slices.SortFunc(of, func(a, b string) int { return slices.Index(got, a) - slices.Index(got, b) })
		if key == nil {
			slices.Sort(of)
			slices.Sort(want)
		}
		if !slices.Equal(of, want) {
			h.t.Errorf("seed %d: key %q (nil %v) was published as %q, want %q", h.seed, key, key == nil, of, want)
		}
	}
}
