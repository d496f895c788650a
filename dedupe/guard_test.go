package dedupe_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
)

func ran(context.Context, *memdedupe.Tx) ([]byte, error) { return nil, nil }

func TestGuardLimits(t *testing.T) {
	st := dedupe.Guard(memdedupe.NewStore(nil), dedupe.GuardOptions{MaxPart: 40, ASCII: true, MinEntropy: 64})
	random := "9b2f6a58-6c0e-4d0e-8f43-0d7a1c5be201"
	for _, tc := range []struct {
		key  dedupe.Key
		want error
		says string
	}{
		{dedupe.Key{Consumer: "c", ID: random}, nil, ""},
		{dedupe.Key{Consumer: "c", ID: strings.Repeat("ab3", 14)}, dedupe.ErrInvalidKey, "the id is 42 bytes long, 40 are allowed"},
		{dedupe.Key{Consumer: "c", Source: "/caf\u00e9", ID: random}, dedupe.ErrInvalidKey, "the source has a character outside printable ASCII at byte 4"},
		{dedupe.Key{Consumer: "c", ID: "12345678"}, dedupe.ErrWeakKey, "64 are demanded"},
		{dedupe.Key{Consumer: "c", ID: "order-1"}, dedupe.ErrWeakKey, ""},
		{dedupe.Key{Consumer: "c", ID: strings.Repeat("a", 40)}, dedupe.ErrWeakKey, ""},
		{dedupe.Key{Consumer: "c"}, dedupe.ErrWeakKey, ""},
		{dedupe.Key{ID: random}, dedupe.ErrInvalidKey, "consumer is empty"},
	} {
		res, err := st.Once(t.Context(), dedupe.Claim{Key: tc.key}, ran)
		if !errors.Is(err, tc.want) || tc.want != nil && !strings.Contains(err.Error(), tc.says) || tc.want == nil && res.Outcome != dedupe.Processed {
			t.Errorf("%q: %v, %v; want %v that says %q", tc.key, res.Outcome, err, tc.want, tc.says)
		}
		if err != nil && tc.key.ID != "" && strings.Contains(err.Error(), tc.key.ID) {
			t.Errorf("%v shows the id", err)
		}
	}
}

func TestEntropy(t *testing.T) {
	for s, within := range map[string][2]float64{
		"":                                     {0, 0},
		"a":                                    {0, 0},
		"aaaaaaaaaaaaaaaaaaaaaaaa":             {0, 0},
		"12345678":                             {20, 27},
		"order-1":                              {15, 22},
		"9b2f6a58-6c0e-4d0e-8f43-0d7a1c5be201": {100, 145},
		"01ARZ3NDEKTSV4RRFFQ69G5FAV":           {90, 120},
	} {
		if got := dedupe.Entropy(s); got < within[0] || got > within[1] {
			t.Errorf("Entropy(%q) = %.1f, want between %v", s, got, within)
		}
	}
}

// A tenant that brings too much is held up alone, and only with what is new.
func TestGuardLimitsNewKeysOfATenant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := dedupe.Guard(memdedupe.NewStore(nil), dedupe.GuardOptions{NewPerSecond: 10, Burst: 5})
		bring := func(tenant string, n int) (processed, duplicate, limited int) {
			for i := range n {
				res, err := st.Once(t.Context(), dedupe.Claim{Key: dedupe.Key{Tenant: tenant, Consumer: "c", ID: fmt.Sprint(i)}}, ran)
				switch {
				case errors.Is(err, dedupe.ErrRateLimited):
					limited++
				case err != nil:
					t.Fatal(err)
				case res.Outcome == dedupe.Duplicate:
					duplicate++
				default:
					processed++
				}
			}
			return processed, duplicate, limited
		}
		for i, want := range [][3]int{{5, 0, 15}, {0, 5, 15}} {
			if p, d, l := bring("loud", 20); [3]int{p, d, l} != want {
				t.Errorf("round %d: %d processed, %d duplicates, %d limited; want %v", i, p, d, l, want)
			}
		}
		if p, _, l := bring("quiet", 5); p != 5 || l != 0 {
			t.Errorf("beside a loud tenant a quiet one has %d processed and %d limited", p, l)
		}
		time.Sleep(300 * time.Millisecond) // of the bubble: three more
		if p, d, l := bring("loud", 20); p != 3 || d != 5 || l != 12 {
			t.Errorf("after 300 ms: %d processed, %d duplicates, %d limited; want 3, 5, 12", p, d, l)
		}
	})
}

// What a handler fails at, or does again after a lost race, counts once.
func TestGuardCountsAClaimOnce(t *testing.T) {
	st := dedupe.Guard(memdedupe.NewStore(nil), dedupe.GuardOptions{NewPerSecond: 1e-9, Burst: 1})
	runs := 0
	res, err := st.Once(t.Context(), dedupe.Claim{Key: dedupe.Key{Consumer: "c", ID: "1"}}, func(context.Context, *memdedupe.Tx) ([]byte, error) {
		if runs++; runs < 3 {
			return nil, memdedupe.ErrConflict
		}
		return nil, nil
	})
	if err != nil || res.Outcome != dedupe.Processed || runs != 3 {
		t.Errorf("%v, %v after %d runs", res.Outcome, err, runs)
	}
}

// Counting tenants takes a bounded amount of memory, and forgets silent ones.
func TestGuardForgetsTenants(t *testing.T) {
	st := dedupe.Guard(memdedupe.NewStore(nil), dedupe.GuardOptions{NewPerSecond: 1e-9, Burst: 1, MaxTenants: 2})
	for i, want := range []error{nil, nil, dedupe.ErrRateLimited, nil, dedupe.ErrRateLimited, nil} {
		tenant := []string{"a", "b", "a", "c", "a", "b"}[i] // c pushes b out, which has been silent for longer than a
		_, err := st.Once(t.Context(), dedupe.Claim{Key: dedupe.Key{Tenant: tenant, Consumer: "c", ID: fmt.Sprint(i)}}, ran)
		if !errors.Is(err, want) {
			t.Errorf("claim %d of %s: %v, want %v", i, tenant, err, want)
		}
	}
}
