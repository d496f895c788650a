package consumer

import (
	"context"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// Options are the settings of [Wrap]. The zero value, and nil, is the default.
type Options struct {
	// Extractor tells which event a message carries. Defaults to
	// envelope.CloudEvents.
	Extractor envelope.Extractor
	// Tenant is part of every key. It is a setting, because a tenant that a
	// payload names is one that any producer can name. Defaults to none.
	Tenant string
	// Content says what of a message makes its meaning. Defaults to
	// RawContent. Changing it makes a conflict of every redelivery of an event
	// that was done before.
	Content Content
	// Retain is how long a key is kept after it is done. It must outlast
	// every redelivery that the broker can still make and every replay that
	// you will ask for. Defaults to dedupe.DefaultRetain.
	Retain time.Duration
	// Shadow decides and records, and suppresses nothing: the handler runs for
	// every delivery, also for a duplicate, a conflict and a message that names
	// no event, as it did before there was a Wrap around it. The Observer is told
	// (StepShadow) what would have been suppressed; conflicts are recorded as
	// always. It is for finding out, on live traffic, whether identities and
	// contents are what they should be, before they are relied on. Every run is
	// one transaction of its own, so such a handler takes no Batch, and leaves a
	// key of no lifetime more for each delivery that is not new, until the
	// pruner comes. Outages hold it up like any other, and so does a copy that is
	// in progress. A Lease has a key of its own at each such run, and
	// derives others from it. Redrive is not in shadow: it never has a second
	// effect.
	Shadow bool
}

// Wrap makes a [Handler] of h that runs at most once for each event: the
// event's key is recorded in the scope that h works in, so that both are
// durable or neither is. A delivery of an event that is done already is
// answered with nil, and h does not run; so is an event that reuses an
// identity for another content, after the conflict was recorded.
//
// name is the logical consumer and part of every key: two handlers with
// different names both get the event, and renaming a handler makes it see
// every event anew. h gets the decoded message, must not keep the scope, and
// may be run again when it fails or its transaction loses against another.
// It may be called concurrently.
//
// The Handler's error matches envelope.ErrNoID or envelope.ErrMalformed for an
// envelope that names no event, and is otherwise what [dedupe.Store] Once
// returns. Wrap panics if name is empty or st or h is nil.
func Wrap[S any](name string, st dedupe.Store[S], h func(ctx context.Context, scope S, m *envelope.Message) error, o *Options) Handler {
	if h == nil {
		panic("consumer: Wrap: the handler is nil")
	}
	return WrapReply(name, st, func(ctx context.Context, scope S, m *envelope.Message) ([]byte, error) {
		return nil, h(ctx, scope, m)
	}, nil, o)
}

// WrapReply is [Wrap] for handlers with a reply, which is stored with the key:
// h's at the first delivery, and the same bytes at every other one, are given to
// reply before the delivery is acknowledged. An error of reply is as one of h,
// but what h did is done: the redelivery is a duplicate, and reply is called
// with the stored reply again. It must mind that it may be called more than
// once. A nil reply stores replies and sends none.
//
// A conflict has no reply: reply is not called for it.
func WrapReply[S any](name string, st dedupe.Store[S], h func(ctx context.Context, scope S, m *envelope.Message) ([]byte, error),
	reply func(ctx context.Context, m *envelope.Message, r dedupe.Result) error, o *Options) Handler {
	switch {
	case name == "":
		panic("consumer: Wrap: the name is empty; every consumer needs one of its own")
	case st == nil:
		panic("consumer: Wrap: the store is nil")
	case h == nil:
		panic("consumer: Wrap: the handler is nil")
	}
	w := wrapped{name: name, reply: reply}
	w.ref = refTo(st, &w)
	if o != nil {
		w.Options = *o
	}
	if w.Extractor == nil {
		w.Extractor = envelope.CloudEvents()
	}
	if w.Content == nil {
		w.Content = RawContent
	}
	// The type parameter ends here: everything around a handler is the same
	// for every kind of scope.
	w.once = func(ctx context.Context, c dedupe.Claim, m *envelope.Message) (dedupe.Result, error) {
		return st.Once(ctx, c, func(ctx context.Context, scope S) ([]byte, error) {
			observe(ctx, Event{Step: StepHandle, Consumer: name, Position: m.Position})
			trailOf(ctx).runs()
			reply, err := h(withKey(ctx, eventKey(ctx, c)), scope, m)
			return reply, ofHandler(err)
		})
	}
	if b, ok := st.(dedupe.Batcher[S]); ok {
		w.each = eachOf(name, b, h)
	}
	return &w
}

type wrapped struct {
	Options
	name  string
	ref   storeRef
	each  func(ctx context.Context, items []item) ([]dedupe.Answer, error)      // nil if the store cannot
	reply func(ctx context.Context, m *envelope.Message, r dedupe.Result) error // may be nil
	once  func(ctx context.Context, c dedupe.Claim, m *envelope.Message) (dedupe.Result, error)
}

// Handle implements [Handler].
func (w *wrapped) Handle(ctx context.Context, raw *envelope.Message) error {
	claim, m, err := w.identify(raw)
	if err != nil {
		observe(ctx, Event{Step: StepIdentify, Consumer: w.name, Position: raw.Position, Err: err})
		if w.shadows(ctx) {
			return w.inShadow(ctx, raw, dedupe.Key{}, Event{Err: err})
		}
		return err
	}
	hash := claim.Key.String()
	observe(ctx, Event{Step: StepIdentify, Consumer: w.name, Position: raw.Position, KeyHash: hash})
	trailOf(ctx).asks(w.ref.key)
	start := time.Now()
	res, err := w.once(ctx, claim, m)
	observe(ctx, Event{Step: StepDecide, Consumer: w.name, Position: raw.Position, KeyHash: hash,
		Outcome: res.Outcome, Err: err, Took: time.Since(start)})
	if w.shadows(ctx) && (err == nil && res.Outcome != dedupe.Processed || Classify(err) == ClassMalformed) {
		return w.inShadow(ctx, m, claim.Key, Event{Outcome: res.Outcome, Err: err, KeyHash: hash})
	}
	if err == nil && w.reply != nil && res.Outcome != dedupe.Conflict {
		return w.reply(ctx, m, res)
	}
	return err
}

// window implements windowed.
func (w *wrapped) window() (string, time.Duration) {
	if w.Retain <= 0 {
		return w.name, dedupe.DefaultRetain
	}
	return w.name, w.Retain
}

// identify reads the envelope: whose event it is, and what the handler sees.
func (w *wrapped) identify(raw *envelope.Message) (dedupe.Claim, *envelope.Message, error) {
	m, err := w.decode(raw)
	if err != nil {
		return dedupe.Claim{}, nil, err
	}
	id, err := w.Extractor.Identify(m)
	if err != nil {
		return dedupe.Claim{}, nil, err
	}
	if m.ID == "" && m.Source == "" { // what the extractor found, where there is no envelope
		named := *m
		named.ID, named.Source = id.ID, id.Source
		m = &named
	}
	key := dedupe.Key{Tenant: w.Tenant, Consumer: w.name, Source: id.Source, ID: id.ID}
	if err := key.Validate(); err != nil {
		return dedupe.Claim{}, nil, err
	}
	meaning := w.Content(m)
	c := dedupe.Claim{Key: key, Fingerprint: dedupe.Fingerprint(key, meaning.Parts...), Retain: w.Retain}
	if meaning.Document != nil {
		c.Fields = dedupe.JSONFields(key, meaning.Document)
	}
	return c, m, nil
}

// decode gives the message the form that a handler wants, if the extractor can.
func (w *wrapped) decode(raw *envelope.Message) (*envelope.Message, error) {
	if d, ok := w.Extractor.(envelope.Decoder); ok {
		return d.Decode(raw)
	}
	return raw, nil
}
