package consumer

import (
	"context"
	"reflect"
	"sync"
)

// trail is what one try of a message has come by. It is in the context of the
// handler, and the handlers of Wrap write it down.
type trail struct {
	mu      sync.Mutex
	key     any  // of the store that was asked last; nil if none was
	wrapped bool // a handler of Wrap was reached
	ran     bool // and the function inside has begun
}

type trailKey struct{}

func trailOf(ctx context.Context) *trail {
	t, _ := ctx.Value(trailKey{}).(*trail)
	return t
}

func (t *trail) reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.key, t.wrapped, t.ran = nil, false, false
}

// asks notes that a store is asked now.
func (t *trail) asks(key any) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.key, t.wrapped = key, true
}

// runs notes that the function inside Wrap begins.
func (t *trail) runs() {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ran = true
}

func (t *trail) store() any {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.key
}

// handled reports whether a handler that returned nil has done its work: that of
// Wrap has not for a duplicate.
func (t *trail) handled() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.ran || !t.wrapped
}

// storeRef is a store behind a handler.
type storeRef struct {
	key   any                             // equal for two handlers on one store
	probe func(ctx context.Context) error // nil if the store cannot be asked
	conns int                             // of its pool; 0 is no bound
}

// refTo returns a reference to st; own stands for it if stores like it cannot be
// compared.
func refTo(st, own any) storeRef {
	ref := storeRef{key: st}
	if !reflect.ValueOf(st).Comparable() {
		ref.key = own
	}
	if p, ok := st.(interface {
		Probe(ctx context.Context) error
	}); ok {
		ref.probe = p.Probe
	}
	if b, ok := st.(interface{ MaxConcurrent() int }); ok {
		ref.conns = b.MaxConcurrent()
	}
	return ref
}

// backed is a handler that knows the stores behind it.
type backed interface{ refs() []storeRef }

func (w *wrapped) refs() []storeRef { return []storeRef{w.ref} }
func (c *chained) refs() []storeRef { return refsOf(c.inner) }
func (r *router) refs() []storeRef {
	var refs []storeRef
	for _, h := range r.handlers {
		refs = append(refs, refsOf(h)...)
	}
	return refs
}

func refsOf(h Handler) []storeRef {
	if b, ok := h.(backed); ok {
		return b.refs()
	}
	return nil
}
