package consumertest

import (
	"context"
	"slices"

	"github.com/unecho/unecho/dedupe"
)

// Watch returns a store that does what st does, and by whose handlers' contexts a
// [Transport] knows on behalf of which event a call is made. Give it to
// consumer.Wrap in place of st. It is a dedupe.Batcher if st is one. [Explore]
// does it by itself.
func Watch[S any](st dedupe.Store[S]) dedupe.Store[S] {
	w := watched[S]{st}
	if b, ok := st.(dedupe.Batcher[S]); ok {
		return &watchedBatch[S]{w, b}
	}
	return &w
}

type watched[S any] struct{ inner dedupe.Store[S] }

// Once implements dedupe.Store.
func (w *watched[S]) Once(ctx context.Context, c dedupe.Claim, fn func(ctx context.Context, scope S) ([]byte, error)) (dedupe.Result, error) {
	return w.inner.Once(ctx, c, func(ctx context.Context, scope S) ([]byte, error) {
		return fn(withEvents(ctx, c.Key), scope)
	})
}

type watchedBatch[S any] struct {
	watched[S]
	batch dedupe.Batcher[S]
}

// OnceEach implements dedupe.Batcher. What a handler of a group calls may be on
// behalf of any event of the group.
func (w *watchedBatch[S]) OnceEach(ctx context.Context, claims []dedupe.Claim, fn func(ctx context.Context, scope S, fresh []int) ([][]byte, error)) ([]dedupe.Answer, error) {
	return w.batch.OnceEach(ctx, claims, func(ctx context.Context, scope S, fresh []int) ([][]byte, error) {
		var keys []dedupe.Key
		for _, i := range fresh {
			keys = append(keys, claims[i].Key)
		}
		return fn(withEvents(ctx, keys...), scope, fresh)
	})
}

// eventsKey is where the context of a watched handler has its events.
type eventsKey struct{}

func withEvents(ctx context.Context, keys ...dedupe.Key) context.Context {
	return context.WithValue(ctx, eventsKey{}, slices.Clip(keys))
}

// eventsOf returns on behalf of which events ctx is; none outside a handler.
func eventsOf(ctx context.Context) []dedupe.Key {
	keys, _ := ctx.Value(eventsKey{}).([]dedupe.Key)
	return keys
}
