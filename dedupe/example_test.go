package dedupe_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
)

// A function runs once for each key, and its reply is given to every copy.
func ExampleStore() {
	ctx, store := context.Background(), memdedupe.NewStore(nil)
	key := dedupe.Key{Consumer: "billing", Source: "/shop", ID: "42"}
	bill := func(context.Context, *memdedupe.Tx) ([]byte, error) {
		fmt.Println("billed")
		return []byte("invoice 7"), nil
	}
	for _, content := range []string{"10 euros", "10 euros", "99 euros"} {
		claim := dedupe.Claim{Key: key, Fingerprint: dedupe.Fingerprint(key, []byte(content))}
		res, err := store.Once(ctx, claim, bill)
		fmt.Println(res.Outcome, string(res.Reply), err)
	}
	// Output:
	// billed
	// processed invoice 7 <nil>
	// duplicate invoice 7 <nil>
	// conflict  <nil>
}

// What fails leaves no trace: the next delivery runs afresh.
func ExampleNewTxStore() {
	ctx, store := context.Background(), dedupe.NewTxStore(memdedupe.NewDriver(nil), &dedupe.TxOptions{Retries: -1})
	claim := dedupe.Claim{Key: dedupe.Key{Consumer: "billing", Source: "/shop", ID: "42"}}
	_, err := store.Once(ctx, claim, func(context.Context, *memdedupe.Tx) ([]byte, error) { return nil, errors.New("no such customer") })
	fmt.Println(err)
	res, err := store.Once(ctx, claim, func(context.Context, *memdedupe.Tx) ([]byte, error) { return nil, nil })
	fmt.Println(res.Outcome, err)
	// Output:
	// no such customer
	// processed <nil>
}

// A key is checked before it is stored, and its String shows no secret.
func ExampleKey() {
	k := dedupe.Key{Consumer: "billing", Source: "/shop", ID: "42"}
	fmt.Println(k, k.Validate())
	fmt.Println(dedupe.Key{Consumer: "billing", ID: "4\n2"}.Validate())
	// Output:
	// billing/b21622605e28 <nil>
	// dedupe: invalid key: the id has the control character U+000A at byte 1
}

// A fingerprint tells two contents of one identity apart.
func ExampleFingerprint() {
	k := dedupe.Key{Consumer: "billing", Source: "/shop", ID: "42"}
	a, b := dedupe.Fingerprint(k, []byte("order.placed"), []byte("10 euros")), dedupe.Fingerprint(k, []byte("order.placed"), []byte("99 euros"))
	fmt.Println(a == b)
	// Output: false
}

// The id of what a handler brings about elsewhere is the same at every attempt.
func ExampleDerive() {
	k := dedupe.Key{Consumer: "billing", Source: "/shop", ID: "42"}
	fmt.Println(dedupe.Derive(k, "charge", 0))
	fmt.Println(dedupe.Derive(k, "charge", 0) == dedupe.Derive(k, "refund", 0))
	// Output:
	// e52b1b63-2c46-8373-b0a9-41cf9089634b
	// false
}

// The order of members and the space between them make no difference, the
// literal of a number does.
func ExampleCanonicalJSON() {
	form := func(doc string) string { c, _ := dedupe.CanonicalJSON([]byte(doc)); return string(c) }
	fmt.Println(form(`{"a":1,"b":2}`) == form(`{ "b": 2, "a": 1 }`))
	fmt.Println(form(`{"a":100}`) == form(`{"a":1e2}`))
	// Output:
	// true
	// false
}

// Keys that clients choose are held to a length, to a form and to being hard to
// guess, and a tenant to a rate.
func ExampleGuard() {
	store := dedupe.Guard(memdedupe.NewStore(nil), dedupe.GuardOptions{ASCII: true, MinEntropy: 64, NewPerSecond: 1, Burst: 1})
	once := func(id string) {
		res, err := store.Once(context.Background(), dedupe.Claim{Key: dedupe.Key{Tenant: "acme", Consumer: "api", ID: id}},
			func(context.Context, *memdedupe.Tx) ([]byte, error) { return nil, nil })
		fmt.Println(res.Outcome, errors.Is(err, dedupe.ErrWeakKey), errors.Is(err, dedupe.ErrRateLimited))
	}
	once("12345")
	once("9b2f6a58-6c0e-4d0e-8f43-0d7a1c5be201")
	once("9b2f6a58-6c0e-4d0e-8f43-0d7a1c5be201") // what is done is not limited
	once("1c9d3e07-5a11-4c52-9f6e-7be2f0d4a8c3")
	// Output:
	// outcome(0) true false
	// processed false false
	// duplicate false false
	// outcome(0) false true
}

// A conflict says which fields differ. No value was kept.
func ExampleJSONFields() {
	k := dedupe.Key{Consumer: "billing", Source: "/shop", ID: "42"}
	first := dedupe.JSONFields(k, []byte(`{"cents": 100, "to": {"name": "Ann"}}`))
	second := dedupe.JSONFields(k, []byte(`{"to": {"name": "Ann"}, "cents": 999}`))
	fmt.Println(dedupe.DiffFields(first, second))
	// Output: [/cents]
}

// Only what was chosen takes part in a fingerprint.
func ExampleFieldsOf() {
	a, _ := dedupe.FieldsOf([]byte(`{"order": {"id": 7}, "sent": "10:00"}`), "/order/id")
	b, _ := dedupe.FieldsOf([]byte(`{"sent": "10:05", "order": {"id": 7}}`), "/order/id")
	k := dedupe.Key{Consumer: "billing", ID: "42"}
	fmt.Println(dedupe.Fingerprint(k, a...) == dedupe.Fingerprint(k, b...))
	// Output: true
}

// Expired keys are deleted now and then, and none soon after the start.
func ExampleRunPruner() {
	ctx, cancel := context.WithCancel(context.Background())
	prune := func(_ context.Context, limit int) (int, error) { // such as pgdedupe.Prune
		fmt.Println("up to", limit)
		cancel()
		return 3, nil
	}
	err := dedupe.RunPruner(ctx, prune, &dedupe.PrunerOptions{
		Delay: time.Millisecond, Limit: 5000,
		Report: func(deleted int, err error) { fmt.Println(deleted, err) },
	})
	fmt.Println(err)
	// Output:
	// up to 5000
	// 3 <nil>
	// <nil>
}

// At three in the morning: what does the store know about this event?
func ExampleAdmin() {
	ctx, driver := context.Background(), memdedupe.NewLeaseDriver()
	store := dedupe.NewLeaseStore(driver, &dedupe.LeaseOptions{Holder: "payments-3"})
	k := dedupe.Key{Consumer: "payments", Source: "/shop", ID: "42"}
	_, _ = store.Once(ctx, dedupe.Claim{Key: k}, func(context.Context, *dedupe.Lease) ([]byte, error) { return nil, errors.New("declined") })
	admin := driver.Admin()
	e, err := admin.Find(ctx, k.Stored())
	fmt.Println(e.State, e.Attempt, e.Holder[:10], err)
	fmt.Println(errors.Is(admin.Release(ctx, k.Stored()), dedupe.ErrWrongState))
	fmt.Println(strings.Split(e.Explain(), "\n")[2])
	// Output:
	// free 1 payments-3 <nil>
	// true
	// state      free: the last attempt failed; the next delivery is handled
}

// An event whose only name is its place in a log.
func ExamplePositionID() {
	k := dedupe.Key{Consumer: "billing", Source: "kafka:orders", ID: dedupe.PositionID(3, 1042)}
	fmt.Println(k.ID, k.Stored())
	// Output: 3@1042 00000000-0412-08ce-a099-912f74d742c9
}

// An id is random enough if it is as hard to guess as a key.
func ExampleEntropy() {
	fmt.Println(dedupe.Entropy("order-1") > 64, dedupe.Entropy("9b2f6a58-6c0e-4d0e-8f43-0d7a1c5be201") > 64)
	// Output: false true
}

// The position of a partition is kept with the effects. What is below it is done,
// and a record that cannot be among that is told from a duplicate.
func ExamplePlacer() {
	ctx, store := context.Background(), memdedupe.NewStore(nil).(dedupe.Placer[*memdedupe.Tx])
	p := dedupe.Partition{Consumer: "chart", Topic: "readings"}
	day := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)
	handle := func(at ...dedupe.Place) {
		answers, err := store.OnceAt(ctx, p, at, nil, func(_ context.Context, _ *memdedupe.Tx, fresh []int) ([][]byte, error) {
			for _, i := range fresh {
				fmt.Println("handled offset", at[i].Offset)
			}
			return nil, nil
		})
		for _, a := range answers {
			fmt.Println(a.Outcome)
		}
		if err != nil {
			fmt.Println(err)
		}
	}
	handle(dedupe.Place{Offset: 7, Time: day}, dedupe.Place{Offset: 9, Time: day.Add(time.Hour)})
	handle(dedupe.Place{Offset: 9, Time: day.Add(time.Hour)})
	handle(dedupe.Place{Offset: 0, Time: day.Add(48 * time.Hour)})
	// Output:
	// handled offset 7
	// handled offset 9
	// processed
	// processed
	// duplicate
	// dedupe: the log was replaced: partition 0 of topic readings holds a record of 2026-01-04T00:00:00Z at offset 0, but everything below offset 10 was done by then, up to 2026-01-02T01:00:00Z; find out where this log begins, and reset the position to the first offset that is not done
}

// A topic was made anew, and somebody has made sure that it begins at offset 0.
func ExamplePositionAdmin() {
	ctx, d := context.Background(), memdedupe.NewDriver(nil)
	admin := d.Admin().(dedupe.PositionAdmin)
	p := dedupe.Partition{Consumer: "chart", Topic: "readings"}
	if err := admin.ResetPosition(ctx, p, 0); err != nil {
		panic(err)
	}
	all, err := admin.Positions(ctx)
	fmt.Println(all[0].Partition.Topic, all[0].Partition.Number, all[0].Next, err)
	// Output: readings 0 0 <nil>
}
