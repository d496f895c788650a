package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/unecho/unecho/envelope"
)

// Unrouted says what becomes of an event whose type nobody handles.
type Unrouted int

const (
	// UnroutedFails dead-letters it at once: a producer has begun to send
	// something that this consumer was not told about. It is the default.
	UnroutedFails Unrouted = iota
	// UnroutedIgnores acknowledges it. No key is written, so a later version
	// that handles the type may get it by a replay.
	UnroutedIgnores
)

// RouteOptions are the settings of [Route]. The zero value, and nil, is the
// default.
type RouteOptions struct {
	// Extractor reads the envelope, as that of Wrap does. Defaults to
	// envelope.CloudEvents.
	Extractor envelope.Extractor
	// Ignore are types that are acknowledged and not handled. No key is
	// written for them.
	Ignore []string
	// Unrouted is what becomes of all other types.
	Unrouted Unrouted
}

// ReasonUnrouted is the reason of a dead letter whose type nobody handles.
const ReasonUnrouted = "unrouted_type"

// ErrUnroutedType: nobody handles events of this type, and that was not
// declared. The message is dead-lettered, and its key is not written: handled by
// a later version, or by a redrive, it is new.
var ErrUnroutedType = errors.New("consumer: nobody handles this type of event")

// Route makes a [Handler] that gives every event to the handler of its type. The
// types are those of CloudEvents, compared as they are. Each handler is one of
// [Wrap], with a name of its own or the same for all; what is not handled never
// reaches a store. It panics without handlers, with an empty type or a nil
// handler, or if a type is handled and ignored.
func Route(handlers map[string]Handler, o *RouteOptions) Handler {
	r := &router{handlers: handlers}
	if o != nil {
		r.o = *o
	}
	if r.o.Extractor == nil {
		r.o.Extractor = envelope.CloudEvents()
	}
	if len(handlers) == 0 {
		panic("consumer: Route: there are no handlers")
	}
	for typ, h := range handlers {
		switch {
		case typ == "" || h == nil:
			panic(fmt.Sprintf("consumer: Route: type %q has the handler %v", typ, h))
		case slices.Contains(r.o.Ignore, typ):
			panic(fmt.Sprintf("consumer: Route: type %q is both handled and ignored", typ))
		}
	}
	return r
}

type router struct {
	handlers map[string]Handler
	o        RouteOptions
}

// Handle implements [Handler].
func (r *router) Handle(ctx context.Context, raw *envelope.Message) error {
	to := r.route(raw)
	if to.h == nil {
		return to.answer(ctx, raw)
	}
	return to.h.Handle(ctx, raw)
}

// destination is whose a message is; if it is nobody's, h is nil, and err is
// the answer.
type destination struct {
	h    Handler
	step Step // to be observed if it is nobody's; empty is none
	err  error
}

// route says whose a message is.
func (r *router) route(raw *envelope.Message) destination {
	m := raw
	if d, ok := r.o.Extractor.(envelope.Decoder); ok {
		var err error
		if m, err = d.Decode(raw); err != nil {
			return destination{step: StepIdentify, err: err}
		}
	}
	h, ok := r.handlers[m.Type]
	switch {
	case ok:
		return destination{h: h}
	case slices.Contains(r.o.Ignore, m.Type), r.o.Unrouted == UnroutedIgnores:
		return destination{step: StepIgnore}
	}
	return destination{err: Permanent(fmt.Errorf("%w: %.100q", ErrUnroutedType, m.Type))}
}

func (d destination) answer(ctx context.Context, raw *envelope.Message) error {
	if d.step != "" {
		observe(ctx, Event{Step: d.step, Position: raw.Position, Err: d.err})
	}
	return d.err
}

// groups implements groupHandler: every handler must be able to.
func (r *router) groups() error {
	for typ, h := range r.handlers {
		if _, err := groupsOf(h); err != nil {
			return fmt.Errorf("that of type %q: %w", typ, err)
		}
	}
	return nil
}

// handleGroup implements groupHandler. Messages of one handler that follow each
// other share a transaction, so that order is kept. What comes behind one that
// failed is not run.
func (r *router) handleGroup(ctx context.Context, ms []*member) []error {
	errs, to := notRun(len(ms)), make([]destination, len(ms))
	for i, m := range ms {
		to[i] = r.route(m.raw)
	}
	for from, end := 0, 0; from < len(ms); from = end {
		end = from + 1
		if g, ok := to[from].h.(groupHandler); ok {
			for end < len(ms) && to[end].h == to[from].h {
				end++
			}
			copy(errs[from:end], g.handleGroup(ctx, ms[from:end]))
		} else {
			errs[from] = to[from].answer(ctx, ms[from].raw)
		}
		if failed := func(err error) bool { return err != nil }; slices.ContainsFunc(errs[from:end], failed) {
			break
		}
	}
	return errs
}

// window implements windowed: the handler that forgets first.
func (r *router) window() (name string, keeps time.Duration) {
	var names []string
	for _, h := range r.handlers {
		w := windowOf(h)
		if w == nil {
			continue
		}
		n, k := w.window()
		if len(names) == 0 || k < keeps {
			keeps = k
		}
		names = append(names, n)
	}
	if len(names) == 0 {
		return "", 1<<63 - 1 // nobody keeps keys, so nobody forgets any
	}
	slices.Sort(names)
	return strings.Join(slices.Compact(names), ", "), keeps
}
