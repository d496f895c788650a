package storetest

import (
	"bytes"
	"context"
	"math/rand/v2"
	"testing"

	"github.com/unecho/unecho/dedupe"
)

func basicCases[S any]() []Case[S] {
	return []Case[S]{
		{"new key", newKey[S]},
		{"duplicate", duplicate[S]},
		{"reply byte for byte", replies[S]},
		{"conflict", conflict[S]},
		{"prior effects do not matter", manyKeys[S]},
	}
}

func newKey[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	type key struct{}
	ctx := context.WithValue(e.ctx, key{}, "kept")
	res, err := e.h.Store().Once(ctx, claim("1"), func(ctx context.Context, scope S) ([]byte, error) {
		if ctx.Value(key{}) != "kept" {
			tb.Error("the handler's context lost the caller's values")
		}
		return e.effect("e", []byte("reply"))(ctx, scope)
	})
	if err != nil || res.Outcome != dedupe.Processed || string(res.Reply) != "reply" {
		tb.Fatalf("Once: %v, %q, %v; want processed, \"reply\"", res.Outcome, res.Reply, err)
	}
	e.wantRuns(1)
	e.wantCount("e", 1)
	e.wantIdle()
}

func duplicate[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 4})
	e.once(claim("1"), e.effect("e", []byte("first")), dedupe.Processed)
	for range 100 {
		res := e.once(claim("1"), e.effect("e", []byte("later")), dedupe.Duplicate)
		if string(res.Reply) != "first" {
			tb.Fatalf("the duplicate's reply is %q, want that of the first run", res.Reply)
		}
	}
	e.wantRuns(1)
	e.wantCount("e", 1)
	if n := e.h.Conflicts(tb); n != 0 {
		tb.Errorf("%d conflicts are recorded, want none", n)
	}
	e.wantIdle()
}

func replies[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	big := make([]byte, 64<<10)
	rnd := rand.NewChaCha8([32]byte{1})
	_, _ = rnd.Read(big)
	for name, reply := range map[string][]byte{
		"nil": nil, "empty": {}, "every byte": all, "64 KiB": big, "zero": {0}, "text": []byte(`'"\x00; --`),
	} {
		c := claim("reply " + name)
		for _, want := range [...]dedupe.Outcome{dedupe.Processed, dedupe.Duplicate} {
			res := e.once(c, e.effect("e", reply), want)
			if !bytes.Equal(res.Reply, reply) || (res.Reply == nil) != (reply == nil) {
				tb.Errorf("%s, %v: the reply is %d bytes, nil: %v; want %d bytes, nil: %v",
					name, want, len(res.Reply), res.Reply == nil, len(reply), reply == nil)
			}
		}
	}
}

// conflict is B14: an identity that comes back with another content.
func conflict[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	first := claim("1")
	e.once(first, e.effect("e", []byte("first")), dedupe.Processed)
	changed, again := claimOf(first.Key, "other amount"), claimOf(first.Key, "third amount")
	for range 5 {
		res := e.once(changed, e.no("its key was done with another content"), dedupe.Conflict)
		if res.Reply != nil {
			tb.Errorf("the conflict's reply is %q, want nil: it is another event's", res.Reply)
		}
	}
	if n := e.h.Conflicts(tb); n != 1 {
		tb.Errorf("%d conflicts are recorded after five copies, want 1", n)
	}
	e.once(again, e.no("its key was done with another content"), dedupe.Conflict)
	if n := e.h.Conflicts(tb); n != 2 {
		tb.Errorf("%d conflicts are recorded after a third content, want 2", n)
	}
	res := e.once(first, e.no("it was done"), dedupe.Duplicate)
	if string(res.Reply) != "first" {
		tb.Errorf("after a conflict the first reply is %q", res.Reply)
	}
	e.wantCount("e", 1)
	e.wantIdle()
}

func manyKeys[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	for round := range 2 {
		for i := range 50 {
			want := dedupe.Processed
			if round > 0 {
				want = dedupe.Duplicate
			}
			e.once(claim(string(rune('A'+i))), e.effect("e", nil), want)
		}
	}
	e.wantCount("e", 50)
}
