package consumer

import (
	"context"
	"crypto/rand"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// shadowSource is the source of keys under which the handler runs although it
// should not. It is no URI, so no event has it.
const shadowSource = "unecho shadow"

// shadows reports whether a duplicate is to run. That of a redrive is not: a person
// asks for the one effect that is missing.
func (w *wrapped) shadows(ctx context.Context) bool { return w.Shadow && ctx.Value(byKey{}) == nil }

// inShadow runs the handler for a delivery for which it would not have run: a
// duplicate, a conflict, or what names no event. It runs under a key that no
// other delivery has, which need not be kept, so that the scope is what it would
// otherwise be; err is the handler's.
func (w *wrapped) inShadow(ctx context.Context, m *envelope.Message, key dedupe.Key, would Event) error {
	would.Step, would.Consumer, would.Position = StepShadow, w.name, m.Position
	observe(ctx, would)
	c := dedupe.Claim{Retain: dedupe.LeastLifetime,
		Key: dedupe.Key{Tenant: w.Tenant, Consumer: w.name, Source: shadowSource, ID: rand.Text()}}
	if key == (dedupe.Key{}) {
		key = c.Key
	}
	res, err := w.once(context.WithValue(ctx, shadowKey{}, key), c, m)
	if err == nil && w.reply != nil {
		return w.reply(ctx, m, res)
	}
	return err
}

// shadowKey is where the context of a handler in shadow has the key of its
// event, in place of the one of its claim.
type shadowKey struct{}

func eventKey(ctx context.Context, c dedupe.Claim) dedupe.Key {
	if k, ok := ctx.Value(shadowKey{}).(dedupe.Key); ok {
		return k
	}
	return c.Key
}
