package consumer

import (
	"context"
	"errors"
	"maps"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// Attributes of an event that was caused by another one: the CloudEvents
// extensions for correlation and for distributed tracing.
const (
	attrCorrelation = "correlationid"
	attrCausation   = "causationid"
	attrTraceParent = "traceparent"
	attrTraceState  = "tracestate"
)

// ErrNoCause: Caused or Derive was called outside a handler of Wrap, or for a
// message that the handler was not given.
var ErrNoCause = errors.New("consumer: Caused and Derive work in a handler of Wrap, with the context and the message that the handler was given")

// Caused returns a copy of out, an event that a handler writes into an outbox in
// its own transaction, with what it owes to cause, the event that is handled:
//
//   - ID, if it is empty: derived from the identity of cause, from out's Type
//     and from ordinal (dedupe.Derive). Every run of the handler derives the
//     same, so whoever gets the event can tell a repetition. ordinal tells
//     several events of one type apart; take it from what cause says.
//   - causationid: the id of cause. correlationid: that of cause, or the id of
//     cause if it has none, so that all that one event has led to has one.
//   - traceparent and tracestate of cause.
//
// What out says itself stays. ctx and cause are what the handler was given, in a
// set handler one of its messages; the error is ErrNoCause if they are not.
func Caused(ctx context.Context, cause, out *envelope.Message, ordinal int) (*envelope.Message, error) {
	key, ok := keyOf(ctx, cause)
	if !ok {
		return nil, ErrNoCause
	}
	c := out.Clone()
	if c.ID == "" {
		c.ID = dedupe.Derive(key, "event:"+c.Type, ordinal)
	}
	c.Extensions = lineage(cause)
	maps.Copy(c.Extensions, out.Extensions)
	return c, nil
}

// Derive returns the idempotency key of something that the handler of m brings
// about in another system: the same at every run, so that the other side can
// recognise a repetition. operation and ordinal tell what one event brings about
// apart; see [dedupe.Derive]. ctx and m are what the handler was given; the error
// is ErrNoCause if they are not.
//
// What is done elsewhere is not undone with the handler's transaction. Where it
// matters, take a store of leases, whose handlers have Lease.Derive and learn what
// is unknown about an earlier attempt.
func Derive(ctx context.Context, m *envelope.Message, operation string, ordinal int) (string, error) {
	key, ok := keyOf(ctx, m)
	if !ok {
		return "", ErrNoCause
	}
	return dedupe.Derive(key, operation, ordinal), nil
}

// lineage is what an event owes to its cause. A message without a name, which a
// position names, is nobody's causation.
func lineage(cause *envelope.Message) map[string]string {
	ext := make(map[string]string)
	if cause.ID != "" {
		ext[attrCausation], ext[attrCorrelation] = cause.ID, cause.ID
	}
	for _, name := range []string{attrCorrelation, attrTraceParent, attrTraceState} {
		if v := cause.Extensions[name]; v != "" {
			ext[name] = v
		}
	}
	return ext
}

// keyOfEvent is where a handler's context has the key of its event, or, in a set
// handler, those of its messages.
type keyOfEvent struct{}

func withKey(ctx context.Context, k dedupe.Key) context.Context {
	return context.WithValue(ctx, keyOfEvent{}, k)
}

func withKeysOf(ctx context.Context, items []item, fresh []int) context.Context {
	keys := make(map[*envelope.Message]dedupe.Key, len(fresh))
	for _, i := range fresh {
		keys[items[i].m] = items[i].claim.Key
	}
	return context.WithValue(ctx, keyOfEvent{}, keys)
}

// keyOf is the key of m in a handler's context.
func keyOf(ctx context.Context, m *envelope.Message) (dedupe.Key, bool) {
	switch keys := ctx.Value(keyOfEvent{}).(type) {
	case dedupe.Key:
		return keys, true
	case map[*envelope.Message]dedupe.Key:
		k, ok := keys[m]
		return k, ok
	}
	return dedupe.Key{}, false
}
