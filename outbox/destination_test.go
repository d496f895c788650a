package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// asked is a publisher that can be asked how the broker is.
type asked struct {
	publisher
	probe func() error
}

func (a asked) Probe(context.Context) error { return a.probe() }

var errNoLeader = fmt.Errorf("%w: no leader", brokers.ErrUnavailable)

// The broker says that it is away itself: nothing is settled, and so nothing moves
// aside, however many topics there are. It also says so of what looks like topics
// that are not there.
func TestOutageOfTheBrokerHoldsNothing(t *testing.T) {
	for name, answer := range map[string]error{"unavailable": errNoLeader, "no route": brokers.ErrNoRoute, "unknown": brokers.ErrUnknown} {
		t.Run(name, func(t *testing.T) {
			s := newMemory()
			for i := range 5 {
				s.addTo(fmt.Sprint("t", i), fmt.Sprint(i))
			}
			r := NewRelay(s, asked{func(_ context.Context, msgs []*envelope.Message) brokers.Results {
				return brokers.Fill(len(msgs), answer)
			}, func() error { return brokers.ErrUnavailable }}, nil)
			for range 5 {
				if _, err := r.Step(t.Context()); !errors.Is(err, answer) {
					t.Errorf("step: %v, want %v", err, answer)
				}
			}
			if len(s.settled) != 0 || len(r.down) != 0 {
				t.Errorf("%d settled, %d destinations down", len(s.settled), len(r.down))
			}
		})
	}
}

// down is a world in which one topic does not serve for some time, beside another.
type down struct {
	*memory
	relay  *Relay
	tries  []time.Time // that found it down
	events *events
}

func newDown(end time.Time, poison string) *down {
	d := &down{memory: newMemory(), events: &events{}}
	d.relay = NewRelay(d.memory, asked{func(_ context.Context, msgs []*envelope.Message) brokers.Results {
		res := make(brokers.Results, len(msgs))
		for i, m := range msgs {
			if m.Topic == "down" && time.Now().Before(end) || m.ID == poison {
				res[i] = errNoLeader
				d.tries = append(d.tries, time.Now())
			}
		}
		return res
	}, func() error { return nil }}, &RelayOptions{Batch: 10, Observer: d.events})
	return d
}

// A topic is down for two minutes. It is tried again by one row at a time, less and
// less often; what goes elsewhere goes at once; and when it serves all goes soon,
// with no attempts spent.
func TestDownTopicIsProbed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const outage = 2 * time.Minute
		d := newDown(time.Now().Add(outage), "")
		for i := range 50 {
			d.addTo("down", fmt.Sprint("d", i))
		}
		stop := start(t, d.relay)
		for i := range 12 {
			d.addTo("up", fmt.Sprint("u", i))
			time.Sleep(10 * time.Second)
			if got := d.sent(); !slices.Contains(got, fmt.Sprint("u", i)) {
				t.Fatalf("u%d has not gone beside a topic that is down: %q", i, got)
			}
		}
		if n := len(d.tries); n < 10+20 || n > 10+60 {
			t.Errorf("it was tried %d times in %v", n, outage)
		}
		time.Sleep(longestAside + lastProbe)
		if n := len(d.sent()); n != 62 {
			t.Errorf("%d of 62 have gone", n)
		}
		stop()
		for _, st := range d.settled {
			if st.Counted || st.Action == Park {
				t.Fatalf("%s was settled as %+v", st.Row.Message.ID, st)
			}
		}
		if d.events.of(StepDown) != 1 || d.events.of(StepUp) != 1 {
			t.Errorf("told %d times that it is down, %d times that it is up", d.events.of(StepDown), d.events.of(StepUp))
		}
	})
}

// A topic that is back after a second, as when another leader is elected, is
// published to soon.
func TestDownTopicIsBackSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDown(time.Now().Add(time.Second), "")
		d.addTo("down", "a", "b", "c")
		stop := start(t, d.relay)
		time.Sleep(2*time.Second + 500*time.Millisecond)
		if n := len(d.sent()); n != 3 {
			t.Errorf("%d of 3 have gone", n)
		}
		stop()
	})
}

// One row meets what looks like an outage, always. It keeps no other one back, also
// as the probe of its topic.
func TestRowThatMeetsAnOutageAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDown(time.Now().Add(time.Second), "bad")
		d.addTo("down", "bad", "a", "b", "c", "d")
		stop := start(t, d.relay)
		time.Sleep(10 * time.Second)
		if n := len(d.sent()); n != 4 {
			t.Errorf("%d of the 4 others have gone", n)
		}
		stop()
	})
}
