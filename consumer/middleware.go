package consumer

import (
	"context"
	"errors"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/unecho/unecho/envelope"
)

// Middleware puts something around a handler. It sees every delivery, also
// the duplicates that the handler inside [Wrap] never sees, and also messages
// whose envelope cannot be read.
//
// In a run that commits in groups ([Batch]) the middleware of all messages of a
// group is entered at once, each in a goroutine of its own, and is returned to
// when the group is over: with nil when all of it is committed, and with an
// error that matches ErrNotRun where a message before failed. It should hand
// its own context on to the handler inside: that is how the handler is told of
// its values, and of its end.
type Middleware func(Handler) Handler

// ErrNotRun is what middleware sees of a message whose group was given up before
// it, because of another message: nothing has happened to it, and it comes again.
// It is the same delivery, and no failure.
var ErrNotRun = errors.New("consumer: not run yet, for one before it in its group")

// Chain puts mw around h. The first one given is the outermost.
//
// What Run asks of a handler of Wrap, it finds through Chain.
func Chain(h Handler, mw ...Middleware) Handler {
	outer := Handler(&landing{h})
	for i := len(mw) - 1; i >= 0; i-- {
		outer = mw[i](outer)
	}
	return &chained{outer, h}
}

// chained remembers what middleware hides.
type chained struct {
	Handler
	inner Handler
}

// groups implements groupHandler.
func (c *chained) groups() error {
	_, err := groupsOf(c.inner)
	return err
}

// enterTimeout is how long a group waits, from when it begins, for the middleware
// of its messages to let them in.
const enterTimeout = 100 * time.Millisecond

// handleGroup implements groupHandler: every message goes through the
// middleware in a goroutine of its own, up to the landing; there the group is
// handled by what is inside, and every message takes its answer back.
//
// Middleware may let in only some at once, such as by a semaphore: one message
// waits for the answer of another that waits for the group. So what is not in
// after a while does not belong to the group, and those behind it do not either.
func (c *chained) handleGroup(ctx context.Context, ms []*member) []error {
	inner, err := groupsOf(c.inner)
	if err != nil { // Run has asked before
		return slices.Repeat([]error{err}, len(ms))
	}
	g := &seated{errs: make([]error, len(ms)), ordered: c.ordered()}
	defer g.wg.Wait()
	defer g.dismiss() // whatever becomes of the group, nobody may wait for it any longer
	for i, m := range ms {
		g.enter(c, i, m, len(ms))
	}
	if in := g.arrived(ctx); len(in) > 0 {
		inside := make([]*member, len(in))
		for i, s := range in {
			inside[i] = &s.member
		}
		for i, err := range inner.handleGroup(ctx, inside) {
			in[i].answer(err)
		}
	}
	g.dismiss()
	g.wg.Wait()
	for i, s := range g.seats {
		if s.asked && errors.Is(s.err, ErrNotRun) {
			g.errs[i] = ErrNotRun // whatever the middleware has made of it
		}
	}
	if errors.Is(g.errs[0], ErrNotRun) { // it was not let in: alone it is
		g.errs[0] = guarded(func() error {
			return ms[0].within(ctx, func(ctx context.Context) error { return c.Handle(ctx, ms[0].raw) })
		})
	}
	return g.errs
}

// seated is a group on its way through middleware.
type seated struct {
	wg    sync.WaitGroup
	seats []*seat
	errs  []error // of a seat, to be read when it was shut by its goroutine, or that has ended

	ordered bool // nothing may be handled before what comes again
}

// enter sends a message into the middleware. n messages that run one after the
// other are the bound of its stay there.
func (g *seated) enter(c *chained, i int, m *member, n int) {
	s := &seat{member: *m, here: make(chan struct{}), answered: make(chan struct{})}
	g.seats = append(g.seats, s)
	g.wg.Go(func() {
		defer s.shut()
		ctx := context.WithValue(m.ctx, seatKey{}, s)
		if m.timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, time.Duration(n+1)*m.timeout)
			defer cancel()
		}
		g.errs[i] = errGoneAway
		g.errs[i] = guarded(func() error { return c.Handle(ctx, m.raw) })
	})
}

// arrived waits for the messages and returns those that are handled together:
// all up to the first one that was not let in, but for those that the
// middleware has answered by itself.
func (g *seated) arrived(ctx context.Context) (in []*seat) {
	patience := time.NewTimer(enterTimeout)
	defer patience.Stop()
	late := false
	for i, s := range g.seats {
		if !late {
			select {
			case <-s.here:
			case <-patience.C:
				late = true
			case <-ctx.Done():
				late = true
			}
		}
		switch {
		case late:
			s.shut()
		case s.taken:
			in = append(in, s)
		case g.ordered && g.errs[i] != nil: // it comes again, and what is behind it after it
			late = true
		}
	}
	return in
}

// dismiss answers those who have no answer yet.
func (g *seated) dismiss() {
	for _, s := range g.seats {
		s.answer(ErrNotRun)
	}
}

// errGoneAway is the answer for middleware that ended its goroutine.
var errGoneAway = errors.New("consumer: the middleware ended its goroutine")

// guarded makes an error of a panic.
func guarded(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return f()
}

// landing is where the middleware of a chain hands a message to what is inside.
type landing struct{ inner Handler }

type seatKey struct{}

// Handle implements [Handler]. Of a group, the message waits for the group.
func (l *landing) Handle(ctx context.Context, m *envelope.Message) error {
	if s, ok := ctx.Value(seatKey{}).(*seat); ok && s != nil {
		return s.wait(context.WithValue(ctx, seatKey{}, (*seat)(nil)), m)
	}
	return l.inner.Handle(ctx, m)
}

// seat is the place of one message in its group.
type seat struct {
	member          // with the context and the message that the middleware handed on
	taken      bool // in time
	asked      bool // whether in time or not; to be read when the middleware has returned
	arrival    sync.Once
	here       chan struct{} // closed when it has arrived, or will not in time
	settlement sync.Once
	answered   chan struct{}
	err        error // once it is answered
}

// wait takes the seat, unless it is too late, and returns the group's answer. It
// needs no bound of its own: the group has one, and answers every seat. Asked
// again, it answers the same.
func (s *seat) wait(ctx context.Context, m *envelope.Message) error {
	s.asked = true
	s.arrival.Do(func() {
		s.ctx, s.raw, s.taken = ctx, m, true
		close(s.here)
	})
	<-s.answered
	return s.err
}

// shut ends the wait for the message, if it has not arrived.
func (s *seat) shut() { s.arrival.Do(func() { close(s.here) }) }

func (s *seat) answer(err error) {
	s.settlement.Do(func() {
		s.err = err
		close(s.answered)
	})
}
