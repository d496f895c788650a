package membroker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/planted"
)

type fixture struct {
	*Broker
	source    func(brokers.Source) brokers.Source
	publisher func(brokers.Publisher) brokers.Publisher
}

func open(testing.TB) *fixture {
	return wide(4)
}

func wide(partitions int) *fixture {
	b := New()
	b.CreateTopic("t", partitions)
	return &fixture{Broker: b,
		source:    func(s brokers.Source) brokers.Source { return s },
		publisher: func(p brokers.Publisher) brokers.Publisher { return p }}
}

func (f *fixture) Topic() string        { return "t" }
func (f *fixture) MissingTopic() string { return "missing" }
func (f *fixture) Oversize() int        { return MaxMessage + 1 }
func (f *fixture) NullBody()            {}

// Widen keeps what is wrong with f.
func (f *fixture) Widen(_ testing.TB, lanes int) brokertest.Fixture {
	w := wide(lanes)
	w.source, w.publisher = f.source, f.publisher
	return w
}

func (f *fixture) Source(t testing.TB, group string) brokers.Source {
	s := f.Broker.Source("t", group)
	t.Cleanup(func() { _ = s.Close() })
	return f.source(s)
}

func (f *fixture) Publisher(testing.TB) brokers.Publisher { return f.publisher(f.Broker.Publisher()) }

func (f *fixture) Revoke(testing.TB, brokers.Source) { f.Rebalance("t", "g") }

// LoseAcks loses the next acknowledgement.
func (f *fixture) LoseAcks(testing.TB, brokers.Source) {
	var once sync.Once
	f.SetFaults(Faults{DropAck: func(*brokers.Delivery) (drop bool) {
		once.Do(func() { drop = true })
		return drop
	}})
}

func TestConformance(t *testing.T) {
	brokertest.Run(t, func(t testing.TB) brokertest.Fixture { return open(t) })
}

// What brokertest must see: adapters that did these things have lost messages.
func TestPlanted(t *testing.T) {
	brokertest.SetPatience(2 * time.Second)
	defer brokertest.SetPatience(30 * time.Second)
	for name, bug := range map[string]func(*fixture){
		"highest offset committed": func(f *fixture) {
			f.source = func(s brokers.Source) brokers.Source { return highest{s.(*Source)} }
		},
		"ack before the commit": func(f *fixture) {
			f.source = func(s brokers.Source) brokers.Source { return acksEarly{s.(*Source)} }
		},
		"ack that does nothing": func(f *fixture) {
			f.source = func(s brokers.Source) brokers.Source { return neverAcks{s.(*Source)} }
		},
		"return that acknowledges": func(f *fixture) {
			f.source = func(s brokers.Source) brokers.Source { return returnAcks{s.(*Source)} }
		},
		"lost delivery acknowledged": func(f *fixture) {
			f.source = func(s brokers.Source) brokers.Source { return hidesLost{s.(*Source)} }
		},
		"what was acknowledged is thought to have arrived": func(f *fixture) {
			acked := &sync.Map{}
			f.source = func(s brokers.Source) brokers.Source { return remembers{s.(*Source), acked} }
		},
		"unbounded prefetch": func(f *fixture) {
			f.source = func(s brokers.Source) brokers.Source { return unbounded{s.(*Source)} }
		},
		"one bound over all lanes": func(f *fixture) {
			f.source = func(s brokers.Source) brokers.Source { return common{s.(*Source), new(int)} }
		},
		"a size told as any refusal": func(f *fixture) {
			f.publisher = func(p brokers.Publisher) brokers.Publisher { return vague{p} }
		},
		"a refusal taken for success": func(f *fixture) {
			f.publisher = func(p brokers.Publisher) brokers.Publisher { return optimist{p} }
		},
		"a failed head passed": func(f *fixture) {
			f.publisher = func(p brokers.Publisher) brokers.Publisher { return oneByOne{p} }
		},
		"published in another order": func(f *fixture) {
			f.publisher = func(p brokers.Publisher) brokers.Publisher { return backwards{p} }
		},
	} {
		var runs []func(testing.TB)
		for _, c := range brokertest.Cases() {
			runs = append(runs, func(t testing.TB) {
				f := open(t)
				bug(f)
				c.Func(t, f)
			})
		}
		t.Run(name, func(t *testing.T) { planted.Caught(t, "brokertest/"+name, runs...) })
	}
}

// remembers acknowledges again whatever its group was sent once.
type remembers struct {
	*Source
	acked *sync.Map // by group and position
}

func (s remembers) place(d *brokers.Delivery) string {
	return fmt.Sprintf("%p %s", s.g, d.Message.Position)
}

func (s remembers) Ack(ctx context.Context, d *brokers.Delivery) error {
	s.acked.Store(s.place(d), true)
	return s.Source.Ack(ctx, d)
}

func (s remembers) Receive(ctx context.Context) (*brokers.Delivery, error) {
	for {
		d, err := s.Source.Receive(ctx)
		if err != nil {
			return nil, err
		}
		if _, known := s.acked.Load(s.place(d)); !known {
			return d, nil
		}
		if err := s.Source.Ack(ctx, d); err != nil {
			return nil, err
		}
	}
}

type highest struct{ *Source }

func (s highest) Ack(ctx context.Context, d *brokers.Delivery) error {
	h := d.Handle.(*handle)
	s.b.mu.Lock()
	s.g.next[h.partition] = max(s.g.next[h.partition], h.offset)
	s.b.mu.Unlock()
	return s.Source.Ack(ctx, d)
}

type acksEarly struct{ *Source }

func (s acksEarly) Receive(ctx context.Context) (*brokers.Delivery, error) {
	d, err := s.Source.Receive(ctx)
	if err == nil {
		err = s.Source.Ack(ctx, d)
	}
	return d, err
}
func (s acksEarly) Ack(context.Context, *brokers.Delivery) error { return nil }

type neverAcks struct{ *Source }

func (s neverAcks) Ack(context.Context, *brokers.Delivery) error { return nil }

type returnAcks struct{ *Source }

func (s returnAcks) Return(ctx context.Context, d *brokers.Delivery) error {
	return s.Source.Ack(ctx, d)
}

type hidesLost struct{ *Source }

func (s hidesLost) Ack(ctx context.Context, d *brokers.Delivery) error {
	_ = s.Source.Ack(ctx, d)
	return nil
}

type unbounded struct{ *Source }

func (s unbounded) Share(int) {}

// common has one bound over all partitions, and no shares.
type common struct {
	*Source
	bound *int
}

func (s common) Share(unsettled int) { *s.bound = unsettled }

func (s common) Receive(ctx context.Context) (*brokers.Delivery, error) {
	for {
		s.b.mu.Lock()
		unsettled, changed := 0, s.b.changed
		for _, c := range s.parts {
			unsettled += len(c.open)
		}
		s.b.mu.Unlock()
		if *s.bound == 0 || unsettled < *s.bound {
			return s.Source.Receive(ctx)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// vague tells a size as any other refusal.
type vague struct{ brokers.Publisher }

func (p vague) Publish(ctx context.Context, msgs []*envelope.Message) brokers.Results {
	res := p.Publisher.Publish(ctx, msgs)
	for i, err := range res {
		if errors.Is(err, brokers.ErrTooLarge) {
			res[i] = brokers.ErrRejected
		}
	}
	return res
}

type optimist struct{ brokers.Publisher }

func (p optimist) Publish(ctx context.Context, msgs []*envelope.Message) brokers.Results {
	p.Publisher.Publish(ctx, msgs)
	return make(brokers.Results, len(msgs))
}

type oneByOne struct{ brokers.Publisher }

func (p oneByOne) Publish(ctx context.Context, msgs []*envelope.Message) brokers.Results {
	var res brokers.Results
	for _, m := range msgs {
		res = append(res, p.Publisher.Publish(ctx, []*envelope.Message{m})...)
	}
	return res
}

type backwards struct{ brokers.Publisher }

func (p backwards) Publish(ctx context.Context, msgs []*envelope.Message) brokers.Results {
	res := make(brokers.Results, len(msgs))
	for i := range msgs {
		j := len(msgs) - 1 - i
		res[j] = p.Publisher.Publish(ctx, []*envelope.Message{msgs[j]})[0]
	}
	return res
}
