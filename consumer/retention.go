package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/unecho/unecho/brokers"
)

// ErrShortRetention: the handler forgets keys before the broker forgets their
// messages. What is delivered again after that would be handled again. Raise
// consumer.Options.Retain, let the broker keep messages for a shorter time, or
// say with RunOptions.Redelivery that you know better.
var ErrShortRetention = errors.New("consumer: keys are kept for a shorter time than messages can come again")

// horizonTimeout bounds one question to the broker.
const horizonTimeout = 10 * time.Second

// windowed is a handler that keeps keys for a while.
type windowed interface {
	window() (name string, keeps time.Duration)
}

// windowOf finds the handler of Wrap in what Run was given; nil if there is
// none in sight.
func windowOf(h Handler) windowed {
	for {
		switch v := h.(type) {
		case windowed:
			return v
		case *chained:
			h = v.inner
		default:
			return nil
		}
	}
}

// proveRetention compares how long keys are kept with how long messages can come
// again. While the broker is out of reach it asks again, for an outage is no
// reason not to start; nothing is received meanwhile.
func (r *runner) proveRetention(ctx context.Context) error {
	w := windowOf(r.h)
	if w == nil {
		return nil
	}
	horizon, err := r.horizon(ctx)
	if err != nil || horizon.Why == "" {
		return err
	}
	name, keeps := w.window()
	if keeps >= horizon.For {
		return nil
	}
	err = fmt.Errorf("%w: %s keeps them for %v, but %s", ErrShortRetention, name, keeps, horizon.Why)
	if !r.o.AcceptShortRetention {
		return fmt.Errorf("%w; set consumer.Options.Retain to at least that, or see RunOptions.Redelivery and AcceptShortRetention", err)
	}
	r.short.Store(&err)
	observe(ctx, Event{Step: StepRetention, Consumer: name, Err: err})
	return nil
}

// accepted returns the retention that was accepted although it is too short.
func (r *runner) accepted() error {
	if err := r.short.Load(); err != nil {
		return *err
	}
	return nil
}

// horizon is for how long messages can come again, and why; no reason if
// nobody says, or ctx is done.
func (r *runner) horizon(ctx context.Context) (brokers.Horizon, error) {
	h := brokers.Horizon{For: r.o.Redelivery}
	if h.For > 0 {
		h.Why = fmt.Sprintf("RunOptions.Redelivery declares that they can come again for %v", h.For)
	} else if src, ok := r.src.(brokers.Retaining); ok {
		var err error
		if h, err = r.ask(ctx, src); err != nil {
			return h, err
		}
	}
	if r.o.Replay > 0 && h.Why != "" {
		h.Why = fmt.Sprintf("%s, and RunOptions.Replay adds %v", h.Why, r.o.Replay)
		if h.For < brokers.Forever-r.o.Replay {
			h.For += r.o.Replay
		}
	}
	return h, nil
}

// ask asks until the broker is in reach.
func (r *runner) ask(ctx context.Context, src brokers.Retaining) (brokers.Horizon, error) {
	for n := 1; ; n++ {
		h, err := askOnce(ctx, src)
		switch {
		case err == nil:
			return h, nil
		case ctx.Err() != nil:
			return brokers.Horizon{}, nil //nolint:nilerr // Run drains
		case !isOutage(err) && !errors.Is(err, context.DeadlineExceeded):
			return h, fmt.Errorf("consumer: Run: ask the broker for how long it can deliver a message again (RunOptions.Redelivery says so instead): %w", err)
		}
		after := r.o.Backoff.after(n)
		observe(ctx, Event{Step: StepRetention, Class: ClassUnavailable, Err: err, Wait: after})
		if !wait(ctx, after) {
			return brokers.Horizon{}, nil
		}
	}
}

func askOnce(ctx context.Context, src brokers.Retaining) (brokers.Horizon, error) {
	ctx, cancel := context.WithTimeout(ctx, horizonTimeout)
	defer cancel()
	return src.Horizon(ctx)
}
