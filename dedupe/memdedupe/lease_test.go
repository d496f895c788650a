package memdedupe_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/dedupe/storetest"
)

type leases struct{ *memdedupe.LeaseDriver }

func (l leases) Driver() dedupe.LeaseDriver { return l.LeaseDriver }

func TestLeaseConformance(t *testing.T) {
	storetest.RunLease(t, func(testing.TB) storetest.LeaseHarness { return leases{memdedupe.NewLeaseDriver()} })
}

// A handler under a lease sees which attempt it is, and derives the same key at
// each of them.
func ExampleNewLeaseStore() {
	store, ctx := memdedupe.NewLeaseStore(nil), context.Background()
	claim := dedupe.Claim{Key: dedupe.Key{Consumer: "payments", Source: "/shop", ID: "42"}}
	for range 3 {
		res, err := store.Once(ctx, claim, func(_ context.Context, l *dedupe.Lease) ([]byte, error) {
			fmt.Println("attempt", l.Attempt, l.Derive("charge", 0)[:8])
			if l.Attempt == 1 {
				return nil, errors.New("the provider is busy")
			}
			return []byte("charged"), nil
		})
		fmt.Println(res.Outcome, string(res.Reply), err)
	}
	// Output:
	// attempt 1 2b0e6396
	// outcome(0)  the provider is busy
	// attempt 2 2b0e6396
	// processed charged <nil>
	// duplicate charged <nil>
}
