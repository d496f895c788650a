// Package receive is what the Receive methods of the adapters have in common.
package receive

import (
	"context"

	"github.com/unecho/unecho/brokers"
)

// Loop calls take until it returns a delivery or an error, or ctx is done. In
// between it waits for the channel that take returned, which closes when it is
// worth another try. A context that is done wins over a delivery that is there:
// nobody would settle that.
func Loop(ctx context.Context, take func() (*brokers.Delivery, <-chan struct{}, error)) (*brokers.Delivery, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		d, changed, err := take()
		if d != nil || err != nil {
			return d, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}
