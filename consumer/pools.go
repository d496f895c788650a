package consumer

import (
	"context"
	"fmt"
)

// checkPools says, once, that handlers will wait for each other's connections.
func (r *runner) checkPools(ctx context.Context) {
	for _, ref := range r.stores {
		if ref.conns <= 0 || ref.conns >= r.o.Concurrency {
			continue
		}
		r.small = fmt.Errorf("consumer: the pool of the store has %d connections for %d handlers at once, so handlers wait for each other; "+
			"give it at least as many as RunOptions.Concurrency, and some for whatever else uses it", ref.conns, r.o.Concurrency)
		observe(ctx, Event{Step: StepSmallPool, Err: r.small})
	}
}
