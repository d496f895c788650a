package consumer

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// retaining is a scripted source that knows how long it keeps messages, or does
// not.
type retaining struct {
	*scripted
	horizon brokers.Horizon
	errs    []error // before it answers
	asked   atomic.Int32
}

func (r *retaining) Horizon(context.Context) (brokers.Horizon, error) {
	r.asked.Add(1)
	if len(r.errs) > 0 {
		err := r.errs[0]
		r.errs = r.errs[1:]
		return brokers.Horizon{}, err
	}
	return r.horizon, nil
}

// B48: a handler that forgets before the broker does is refused, by an error
// that names both; and told apart from everything that only looks like it.
func TestB48ShortRetentionIsRefused(t *testing.T) {
	day := 24 * time.Hour
	kept := brokers.Horizon{For: 7 * day, Why: "the topic keeps them for 168h0m0s"}
	ever := brokers.Horizon{For: brokers.Forever, Why: "the stream keeps them for ever"}
	for name, tc := range map[string]struct {
		retain  time.Duration
		horizon brokers.Horizon
		o       RunOptions
		mw      bool
		refused []string // what the error says; nil starts
	}{
		"default":                      {0, kept, RunOptions{}, false, nil},
		"longer":                       {8 * day, kept, RunOptions{}, false, nil},
		"equal":                        {7 * day, kept, RunOptions{}, false, nil},
		"shorter":                      {6 * day, kept, RunOptions{}, false, []string{"billing", "144h0m0s", "168h0m0s"}},
		"shorter, behind middleware":   {6 * day, kept, RunOptions{}, true, []string{"144h0m0s", "168h0m0s"}},
		"for ever":                     {365 * day, ever, RunOptions{}, false, []string{"for ever"}},
		"declared shorter":             {6 * day, ever, RunOptions{Redelivery: 5 * day}, false, nil},
		"declared longer":              {8 * day, kept, RunOptions{Redelivery: 9 * day}, false, []string{"216h0m0s", "Redelivery"}},
		"replay":                       {8 * day, kept, RunOptions{Replay: 2 * day}, false, []string{"168h0m0s", "Replay adds 48h0m0s"}},
		"replay of what is for ever":   {8 * day, ever, RunOptions{Replay: 2 * day}, false, []string{"for ever"}},
		"accepted":                     {6 * day, kept, RunOptions{AcceptShortRetention: true}, false, nil},
		"a source that does not know":  {day, brokers.Horizon{}, RunOptions{}, false, nil},
		"declared for a source that …": {day, brokers.Horizon{}, RunOptions{Redelivery: 2 * day}, false, []string{"48h0m0s"}},
	} {
		h := Wrap("billing", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }, &Options{Retain: tc.retain})
		if tc.mw {
			hide := func(h Handler) Handler {
				return HandlerFunc(func(ctx context.Context, m *envelope.Message) error { return h.Handle(ctx, m) })
			}
			h = Chain(Chain(h, hide), hide, hide)
		}
		var src brokers.Source = newScripted()
		if tc.horizon.Why != "" {
			src = &retaining{scripted: newScripted(), horizon: tc.horizon}
		}
		told := 0
		tc.o.DeadLetter = Discard
		tc.o.Observer = ObserverFunc(func(_ context.Context, e Event) {
			if e.Step == StepRetention && errors.Is(e.Err, ErrShortRetention) {
				told++
			}
		})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		err := Run(ctx, src, h, &tc.o)
		if (err != nil) != (tc.refused != nil) || err != nil && !errors.Is(err, ErrShortRetention) {
			t.Errorf("%s: %v", name, err)
		}
		for _, word := range tc.refused {
			if err != nil && !strings.Contains(err.Error(), word) {
				t.Errorf("%s: %v does not say %q", name, err, word)
			}
		}
		if (told > 0) != (name == "accepted") {
			t.Errorf("%s: the observer was told %d times of a retention that was accepted", name, told)
		}
	}
}

// While the broker is out of reach Run waits, and receives nothing; an answer
// that will not come otherwise ends it.
func TestRetentionIsAskedUntilTheBrokerIsThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &retaining{scripted: newScripted(), horizon: brokers.Horizon{For: time.Hour, Why: "an hour"}, errs: []error{brokers.ErrUnavailable, context.DeadlineExceeded, brokers.ErrUnavailable}}
		src.deliver("l", "p0")
		runs := 0
		h := Wrap("billing", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { runs++; return nil },
			&Options{Extractor: envelope.FromHeader("id", "/s"), Retain: 2 * time.Hour})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- Run(ctx, src, h, &RunOptions{DeadLetter: Discard}) }()
		synctest.Wait()
		if notes := src.notes(); len(notes) > 0 || src.asked.Load() != 1 {
			t.Errorf("before the broker was there: asked %d times, %v", src.asked.Load(), notes)
		}
		time.Sleep(time.Minute)
		if src.asked.Load() != 4 || len(src.notes()) == 0 {
			t.Errorf("asked %d times, %v; want 4, and then deliveries", src.asked.Load(), src.notes())
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		denied := errors.New("not authorised")
		src = &retaining{scripted: newScripted(), errs: []error{denied}}
		if err := Run(t.Context(), src, h, &RunOptions{DeadLetter: Discard}); !errors.Is(err, denied) || !strings.Contains(err.Error(), "RunOptions.Redelivery") {
			t.Errorf("an answer that is refused: %v", err)
		}
	})
}
