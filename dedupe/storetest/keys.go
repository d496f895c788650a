package storetest

import (
	"encoding/base64"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/unecho/unecho/dedupe"
)

func keyCases[S any]() []Case[S] {
	return []Case[S]{
		{"B05 two consumers", twoConsumers[S]},
		{"two tenants", twoTenants[S]},
		{"B04 two sources", twoSources[S]},
		{"B03 separators in parts", separators[S]},
		{"B06 B07 long and odd ids", oddIDs[S]},
		{"invalid claims", invalidClaims[S]},
	}
}

// distinct processes every key once and then finds each of them done.
func distinct[S any](e *env[S], keys []dedupe.Key) {
	e.tb.Helper()
	for _, k := range keys {
		e.once(claimOf(k, "same"), e.effect("e", []byte(k.ID)), dedupe.Processed)
	}
	e.wantCount("e", len(keys))
	for _, k := range keys {
		res := e.once(claimOf(k, "same"), e.effect("e", nil), dedupe.Duplicate)
		if string(res.Reply) != k.ID {
			e.tb.Errorf("%q has the reply of %q", k.ID, res.Reply)
		}
	}
	e.wantCount("e", len(keys))
	if n := e.h.Conflicts(e.tb); n != 0 {
		e.tb.Errorf("%d conflicts are recorded, want none", n)
	}
}

func twoConsumers[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	var wg sync.WaitGroup
	for _, consumer := range [...]string{"billing", "email"} {
		c := claimOf(dedupe.Key{Consumer: consumer, Source: "/orders", ID: "1"}, "same")
		wg.Go(func() {
			res, err := e.h.Store().Once(e.ctx, c, e.effect(consumer, nil))
			if err != nil || res.Outcome != dedupe.Processed {
				tb.Errorf("%s: %v, %v; want processed", consumer, res.Outcome, err)
			}
		})
	}
	wg.Wait()
	for _, consumer := range [...]string{"billing", "email"} {
		e.once(claimOf(dedupe.Key{Consumer: consumer, Source: "/orders", ID: "1"}, "same"), e.no("it was done"), dedupe.Duplicate)
		e.wantCount(consumer, 1)
	}
}

func twoTenants[S any](tb testing.TB, open Open[S]) {
	distinct(start(tb, open, Settings{}), []dedupe.Key{
		{Tenant: "a", Consumer: "c", Source: "s", ID: "1"},
		{Tenant: "b", Consumer: "c", Source: "s", ID: "1"},
		{Tenant: "", Consumer: "c", Source: "s", ID: "1"},
		{Tenant: "A", Consumer: "c", Source: "s", ID: "1"},
	})
}

func twoSources[S any](tb testing.TB, open Open[S]) {
	distinct(start(tb, open, Settings{}), []dedupe.Key{
		{Consumer: "c", Source: "/lms", ID: "100"},
		{Consumer: "c", Source: "/studio", ID: "100"},
		{Consumer: "c", Source: "/lms/", ID: "100"},
		{Consumer: "c", Source: "/LMS", ID: "100"},
		{Consumer: "c", Source: "", ID: "100"},
	})
}

func separators[S any](tb testing.TB, open Open[S]) {
	var keys []dedupe.Key
	for _, sep := range [...]string{":", "|", "/", ",", "-", ".", "\\", " ", "%00", "\u2028"} {
		keys = append(keys,
			dedupe.Key{Consumer: "c", Source: "a", ID: "b" + sep + "c"},
			dedupe.Key{Consumer: "c", Source: "a" + sep + "b", ID: "c"})
	}
	keys = append(keys,
		dedupe.Key{Consumer: "x", Source: "y", ID: "1"},
		dedupe.Key{Consumer: "xy", Source: "", ID: "1"},
		dedupe.Key{Tenant: "x", Consumer: "y", Source: "", ID: "1"},
		dedupe.Key{Tenant: "", Consumer: "x", Source: "y1", ID: "1"},
		dedupe.Key{Tenant: "", Consumer: "x", Source: "y", ID: "11"},
		dedupe.Key{Consumer: "c", Source: "http://h/a", ID: "b"},
		dedupe.Key{Consumer: "c", Source: "http://h", ID: "/a/b"})
	distinct(start(tb, open, Settings{}), keys)
}

func oddIDs[S any](tb testing.TB, open Open[S]) {
	ids := []string{
		"😀", "\u00e9", "e\u0301", // one letter, composed and decomposed: two keys
		"\u05e9\u05dc\u05d5\u05dd", "'; drop table e; --", `\`, `"`, "%s", "$1", "?", "null", "0", "00", "ID", "id",
		"018f4d2e-7b1a-7c3d-8e4f-0123456789ab", "018F4D2E-7B1A-7C3D-8E4F-0123456789AB", // UUIDv7, of one time
		"018f4d2e-7b1a-7c3d-8e4f-0123456789ac", "01HXZ3R8E9ABCDEFGHJKMNPQRS", "01HXZ3R8E9ABCDEFGHJKMNPQRT",
		"018f4d2e7b1a7c3d8e4f0123456789ab",
	}
	for _, n := range [...]int{1, 255, 256, 2000, dedupe.MaxPart} {
		ids = append(ids, randomText(n))
	}
	long := randomText(dedupe.MaxPart - 1)
	ids = append(ids, long+"x", long+"y")
	keys := make([]dedupe.Key, len(ids))
	for i, id := range ids {
		keys[i] = dedupe.Key{Consumer: "c", Source: "s", ID: id}
	}
	distinct(start(tb, open, Settings{}), keys)
}

// randomText does not compress: an index takes ten thousand equal letters.
func randomText(n int) string {
	raw := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(n)}).Read(raw)
	return base64.RawURLEncoding.EncodeToString(raw)[:n]
}

func invalidClaims[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	good := claim("1").Key
	for name, change := range map[string]func(*dedupe.Key){
		"no consumer":     func(k *dedupe.Key) { k.Consumer = "" },
		"no id":           func(k *dedupe.Key) { k.ID = "" },
		"blank id":        func(k *dedupe.Key) { k.ID = "  " },
		"blank before id": func(k *dedupe.Key) { k.ID = " 1" },
		"blank after id":  func(k *dedupe.Key) { k.ID = "1 " },
		"line break":      func(k *dedupe.Key) { k.ID = "1\n2" },
		"NUL":             func(k *dedupe.Key) { k.ID = "a\x00b" },
		"not UTF-8":       func(k *dedupe.Key) { k.ID = "\xff\xfe" },
		"NUL in source":   func(k *dedupe.Key) { k.Source = "a\x00" },
		"NUL in tenant":   func(k *dedupe.Key) { k.Tenant = "\x00" },
		"too long":        func(k *dedupe.Key) { k.ID = strings.Repeat("x", dedupe.MaxPart+1) },
	} {
		k := good
		change(&k)
		_, err := e.h.Store().Once(e.ctx, claimOf(k, ""), e.no("the key is invalid: "+name))
		if !errors.Is(err, dedupe.ErrInvalidKey) {
			tb.Errorf("%s: %v, want ErrInvalidKey", name, err)
		}
	}
	c := claim("1")
	c.Retain = -1
	_ = e.fails(c, e.no("the claim is invalid"), dedupe.ErrInvalidClaim)
	e.wantIdle()
}
