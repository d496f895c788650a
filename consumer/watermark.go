package consumer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// WrapWatermark makes a [Handler] of h that runs at most once for each record of
// a partition: the partition's position is recorded in the scope that h works in,
// so that both are durable or neither is. One row for each partition and consumer
// stands for all keys, and is never too old: whatever is below the position is
// done, also after a rewind on purpose. It takes a log whose order is its
// identity, which is Kafka, and keeps that order: see Order in [RunOptions].
//
// name is the logical consumer: two handlers with different names both get the
// record, and renaming a handler makes it see every partition anew. Of o only
// Tenant counts, unless it has an Extractor: then keys are recorded as well, as
// by [Wrap], so that an event that its producer has sent twice, at two offsets,
// takes effect once; keys are kept as long as Retain says. Without an Extractor a
// message need not name an event; h gets it as it was on the wire, and its place
// is its key for [Caused].
//
// The Handler's error is what [dedupe.Placer] OnceAt returns. dedupe.ErrLogReplaced
// is among it: consumption pauses until somebody has reset the position. So it
// does, rather than dead-letter anything, at a message whose position is not
// topic/partition/offset.
//
// A message that goes to the dead letters is passed by the position as well,
// before it is acknowledged, and is a duplicate when it comes again. A handler
// that ends its goroutine has failed. Middleware must not answer nil for a message
// that is to be handled later.
//
// It panics as Wrap does, if st is no dedupe.Placer, and if o asks for Shadow.
func WrapWatermark[S any](name string, st dedupe.Store[S], h func(ctx context.Context, scope S, m *envelope.Message) error, o *Options) Handler {
	if h == nil {
		panic("consumer: WrapWatermark: the handler is nil")
	}
	return newWatermark(name, st, o, func(ctx context.Context, scope S, items []item, fresh []int) error {
		for _, i := range fresh {
			it := items[i]
			if err := it.within(ctx, func(ctx context.Context) error {
				observe(ctx, Event{Step: StepHandle, Consumer: name, Position: it.raw.Position})
				trailOf(ctx).runs()
				return ofHandler(sheltered(func() error { return h(withKey(ctx, it.claim.Key), scope, it.m) }))
			}); err != nil {
				return &memberError{i, err}
			}
		}
		return nil
	})
}

// WrapWatermarkBatch is [WrapWatermark] for handlers that take several messages
// at once, as [WrapBatch] is Wrap for them.
func WrapWatermarkBatch[S any](name string, st dedupe.Store[S], h func(ctx context.Context, scope S, ms []*envelope.Message) error, o *Options) Handler {
	if h == nil {
		panic("consumer: WrapWatermarkBatch: the handler is nil")
	}
	return newWatermark(name, st, o, func(ctx context.Context, scope S, items []item, fresh []int) error {
		of := ctx // of the group
		if len(items) == 1 {
			of = items[0].ctx
		}
		return together(ctx, of, name, items, fresh, func(ctx context.Context, ms []*envelope.Message) error {
			return sheltered(func() error { return h(ctx, scope, ms) })
		})
	})
}

func newWatermark[S any](name string, st dedupe.Store[S], o *Options, h func(ctx context.Context, scope S, items []item, fresh []int) error) Handler {
	p, ok := st.(dedupe.Placer[S])
	switch {
	case name == "":
		panic("consumer: WrapWatermark: the name is empty; every consumer needs one of its own")
	case st == nil:
		panic("consumer: WrapWatermark: the store is nil")
	case !ok:
		panic("consumer: WrapWatermark: the store is no dedupe.Placer: it keeps no positions; pgdedupe.NewStore does")
	case o != nil && o.Shadow:
		panic("consumer: WrapWatermark: Options.Shadow is for Wrap: a position suppresses what is below it, or it is none")
	}
	w := &watermark{wrapped: &wrapped{name: name}}
	w.ref = refTo(st, w)
	if o != nil {
		w.Options = *o
	}
	w.keys = w.Extractor != nil
	if w.Content == nil {
		w.Content = RawContent
	}
	w.each = func(ctx context.Context, items []item) ([]dedupe.Answer, error) {
		places := make([]dedupe.Place, len(items))
		for i, it := range items {
			places[i] = it.place.Place
		}
		var claims []dedupe.Claim
		if w.keys {
			claims = claimsOf(items)
		}
		return p.OnceAt(ctx, items[0].place.in, places, claims, func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
			return nil, h(ctx, scope, items, fresh)
		})
	}
	w.once = func(ctx context.Context, c dedupe.Claim, m *envelope.Message) (dedupe.Result, error) {
		return st.Once(ctx, c, func(ctx context.Context, scope S) ([]byte, error) {
			return nil, h(ctx, scope, []item{{member: &member{raw: m, ctx: ctx}, claim: c, m: m}}, []int{0})
		})
	}
	w.without = func(ctx context.Context, at place, err error) error {
		_, err = p.OnceAt(ctx, at.in, []dedupe.Place{at.Place}, nil, func(context.Context, S, []int) ([][]byte, error) { return nil, err })
		return err
	}
	return w
}

// watermark is a wrapped that records positions.
type watermark struct {
	*wrapped
	keys bool // keys, too
	// without passes a place without an effect, unless err is not nil. Where the
	// place is done, err does not matter.
	without func(ctx context.Context, at place, err error) error
}

// errHandlerGone is the answer of a handler that has called runtime.Goexit.
var errHandlerGone = errors.New("consumer: the handler ended its goroutine")

// sheltered makes an error of a panic, and of the end of the goroutine: that would
// take the delivery out of its lane without an answer, and what is behind it would
// move the position past it.
func sheltered(f func() error) error {
	ended := make(chan error, 1)
	go func() {
		err := errHandlerGone
		defer func() { ended <- err }()
		err = guarded(f)
	}()
	return <-ended
}

// errNoPlace: the message is not from a log with partitions and offsets.
var errNoPlace = errors.New("consumer: a handler of WrapWatermark takes messages from a log with partitions, such as a Kafka topic")

// placeOf reads a position as adapters of such logs write it: topic/partition/offset.
func placeOf(position string) (topic string, partition int, offset int64, err error) {
	parts := strings.Split(position, "/")
	if len(parts) == 3 && parts[0] != "" {
		p, e1 := strconv.ParseUint(parts[1], 10, 31)
		o, e2 := strconv.ParseUint(parts[2], 10, 63)
		if e1 == nil && e2 == nil && strconv.FormatUint(p, 10) == parts[1] && strconv.FormatUint(o, 10) == parts[2] {
			return parts[0], int(p), int64(o), nil //nolint:gosec // of 31 and 63 bits
		}
	}
	return "", 0, 0, Unavailable(fmt.Errorf("%w; the position of this one is %q, not topic/partition/offset", errNoPlace, position))
}

// place is where a log holds a record.
type place struct {
	dedupe.Place
	in dedupe.Partition
}

// behind reports whether p comes behind q in one partition.
func (p place) behind(q place) bool { return p.in == q.in && p.Offset > q.Offset }

// place is where the log holds raw, and the key that this makes. The fingerprint
// is of what no broker changes: a record keeps its key, body and timestamp.
func (w *watermark) place(raw *envelope.Message) (at place, key dedupe.Key, err error) {
	topic, number, offset, err := placeOf(raw.Position)
	if err != nil {
		return at, key, err
	}
	at.in = dedupe.Partition{Tenant: w.Tenant, Consumer: w.name, Topic: topic, Number: number}
	key = dedupe.Key{Tenant: w.Tenant, Consumer: w.name, Source: topic, ID: dedupe.PositionID(number, offset)}
	written := binary.BigEndian.AppendUint64(nil, uint64(raw.Time.UnixMilli())) //nolint:gosec // bits
	at.Place = dedupe.Place{Offset: offset, Time: raw.Time, Fingerprint: dedupe.Fingerprint(key, raw.Key, raw.Body, written)}
	return at, key, nil
}

// identify makes an item of a message. malformed is why there are to be keys and
// it names no event.
func (w *watermark) identify(ctx context.Context, m *member, i int) (it item, malformed, err error) {
	at, key, err := w.place(m.raw)
	it = item{member: m, claim: dedupe.Claim{Key: key}, m: m.raw, at: i, place: at}
	if err == nil && w.keys {
		it.claim, it.m, malformed = w.wrapped.identify(m.raw)
	}
	e := Event{Step: StepIdentify, Consumer: w.name, Position: m.raw.Position, Err: errors.Join(err, malformed)}
	if e.Err == nil {
		e.KeyHash = it.claim.Key.String()
	}
	observe(ctx, e)
	return it, malformed, err
}

// byKey is in the context of a redrive: the key of the event decides alone. What is
// parked was passed by the position, and shadow mode would run a duplicate.
type byKey struct{}

// Handle implements [Handler].
func (w *watermark) Handle(ctx context.Context, raw *envelope.Message) error {
	if ctx.Value(byKey{}) != nil && w.keys {
		return w.wrapped.Handle(ctx, raw)
	}
	return w.handleGroup(ctx, []*member{{raw: raw, ctx: ctx}})[0]
}

// groups implements groupHandler.
func (w *watermark) groups() error { return nil }

// handleGroup implements groupHandler. A group ends where a message names no
// event, for the position must not pass it before it is with the dead letters;
// and where places do not ascend: a lane may hold what was lost in a rebalance,
// and behind it the same again.
func (w *watermark) handleGroup(ctx context.Context, ms []*member) []error {
	g := &group{w: w.wrapped, errs: notRun(len(ms))}
	for i, m := range ms {
		it, malformed, err := w.identify(ctx, m, i)
		if i > 0 && (err != nil || malformed != nil || !it.place.behind(g.items[i-1].place)) {
			break
		}
		switch {
		case err != nil:
			g.errs[0] = err
			return g.errs
		case malformed != nil:
			g.errs[0] = w.refuse(ctx, it, malformed)
			return g.errs
		}
		g.items = append(g.items, it)
	}
	g.isolate(ctx)
	return g.errs
}

// refuse answers for a message that names no event: with why, if it is new. One
// that was dead-lettered before is done; and in a log that was replaced nothing
// is to be dead-lettered.
func (w *watermark) refuse(ctx context.Context, it item, why error) error {
	trailOf(it.ctx).asks(w.ref.key)
	start := time.Now()
	err := w.without(ctx, it.place, why)
	e := Event{Step: StepDecide, Consumer: w.name, Position: it.raw.Position, Err: err, Took: time.Since(start)}
	if err == nil {
		e.Outcome = dedupe.Duplicate
	}
	observe(ctx, e)
	return err
}

// window implements windowed: positions are kept for ever.
func (w *watermark) window() (name string, keeps time.Duration) {
	if w.keys {
		return w.wrapped.window()
	}
	return w.name, brokers.Forever
}

// ordered is a handler for which the order of a lane is more than a courtesy: of
// what is handled before an earlier message of its lane, the earlier one is lost.
type ordered interface {
	ordered() bool
}

func (w *watermark) ordered() bool { return true }
func (c *chained) ordered() bool   { return isOrdered(c.inner) }
func (r *router) ordered() bool {
	for _, h := range r.handlers {
		if isOrdered(h) {
			return true
		}
	}
	return false
}

func isOrdered(h Handler) bool {
	o, ok := h.(ordered)
	return ok && o.ordered()
}

// isKeyless reports whether h, or one of a Route, keeps positions alone.
func isKeyless(h Handler) bool {
	switch v := h.(type) {
	case *watermark:
		return !v.keys
	case *chained:
		return isKeyless(v.inner)
	case *router:
		for _, h := range v.handlers {
			if isKeyless(h) {
				return true
			}
		}
	}
	return false
}

// checkOrder returns what is wrong with a run whose handler needs order. A source
// whose broker redelivers single messages keeps none.
func (r *runner) checkOrder() error {
	if !r.ordered {
		return nil
	}
	switch {
	case r.nacker != nil:
		return fmt.Errorf("consumer: Run: the source is a brokers.Nacker, whose broker delivers single messages again: %w", errNoPlace)
	case r.o.Order != OrderByLane:
		return fmt.Errorf("consumer: Run: RunOptions.Order is %v, but a handler of WrapWatermark needs all of a partition in its order", r.o.Order)
	}
	return nil
}

// refuseUnordered gives back a delivery without a lane that needs one.
func (r *runner) refuseUnordered(ctx context.Context, d *brokers.Delivery) error {
	if d.Lane != "" || !r.ordered {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	return errors.Join(fmt.Errorf("the delivery has no lane: %w", errNoPlace), r.src.Return(ctx, d))
}

// passer is a handler that must know of what goes to the dead letters.
type passer interface {
	// pass records that raw is done, without an effect.
	pass(ctx context.Context, raw *envelope.Message) error
}

// pass implements passer. What goes to the dead letters came here without
// middleware, so its bytes may be others than those that Handle gets to see.
func (w *watermark) pass(ctx context.Context, raw *envelope.Message) error {
	at, _, err := w.place(raw)
	if err != nil {
		return err
	}
	at.Fingerprint = [32]byte{}
	return w.without(ctx, at, nil)
}

func (c *chained) pass(ctx context.Context, raw *envelope.Message) error {
	return pass(ctx, c.inner, raw)
}

func (r *router) pass(ctx context.Context, raw *envelope.Message) error {
	return pass(ctx, r.route(raw).h, raw)
}

// pass tells h, if it must know, that raw is with the dead letters.
//
// Without it, a redelivery could pass for the beginning of another log: a record
// is dead-lettered, the next one, which a producer has dated a moment earlier,
// moves the position past it, the process dies before the acknowledgement, and
// the record comes again, below the position and later than all that is done.
func pass(ctx context.Context, h Handler, raw *envelope.Message) error {
	if p, ok := h.(passer); ok {
		return p.pass(ctx, raw)
	}
	return nil
}
