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

// ErrNoCause: Caused was called outside a handler of Wrap.
var ErrNoCause = errors.New("consumer: Caused works in a handler of Wrap, with the context that the handler was given")

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
// What out says itself stays. ctx is the handler's; the error is ErrNoCause if it
// is not.
func Caused(ctx context.Context, cause, out *envelope.Message, ordinal int) (*envelope.Message, error) {
	key, ok := ctx.Value(keyOfEvent{}).(dedupe.Key)
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

// lineage is what an event owes to its cause.
func lineage(cause *envelope.Message) map[string]string {
	ext := map[string]string{attrCausation: cause.ID, attrCorrelation: cause.ID}
	for _, name := range []string{attrCorrelation, attrTraceParent, attrTraceState} {
		if v := cause.Extensions[name]; v != "" {
			ext[name] = v
		}
	}
	return ext
}

// keyOfEvent is where a handler's context has the key of its event.
type keyOfEvent struct{}

func withKey(ctx context.Context, k dedupe.Key) context.Context {
	return context.WithValue(ctx, keyOfEvent{}, k)
}
