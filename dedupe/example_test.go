package dedupe_test

import (
	"context"
	"errors"
	"fmt"

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
