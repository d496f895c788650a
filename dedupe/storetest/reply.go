package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/unecho/unecho/dedupe"
)

func replyCases[S any]() []Case[S] {
	return []Case[S]{
		{"a reply over the cap is refused whole", replyTooLarge[S]},
		{"a reply is that of the attempt that was committed", replyOfCommitted[S]},
		{"a reply is nobody else's", replyOfOthers[S]},
	}
}

// replyTooLarge: the cap of the harness's store is the default.
func replyTooLarge[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	most := bytes.Repeat([]byte{'x'}, dedupe.DefaultMaxReply)
	_ = e.fails(claim("over"), e.effect("over", append(most, 'x')), dedupe.ErrReplyTooLarge)
	e.noTrace(claim("over"), "over")
	for _, want := range [...]dedupe.Outcome{dedupe.Processed, dedupe.Duplicate} {
		if res := e.once(claim("most"), e.effect("most", most), want); !bytes.Equal(res.Reply, most) {
			tb.Errorf("%v: a reply of %d bytes, want the %d of the cap", want, len(res.Reply), len(most))
		}
	}
}

func replyOfCommitted[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{Conns: 2})
	add := e.effect("e", nil)
	for i := range 3 {
		_, err := e.h.Store().Once(e.ctx, claim("1"), func(ctx context.Context, scope S) ([]byte, error) {
			_, err := add(ctx, scope)
			return fmt.Appendf(nil, "of attempt %d", i), errors.Join(err, errHandler)
		})
		if !errors.Is(err, errHandler) {
			tb.Fatalf("Once: %v, want the handler's error", err)
		}
	}
	e.once(claim("1"), e.effect("e", nil), dedupe.Processed)
	if res := e.once(claim("1"), e.no("it was done"), dedupe.Duplicate); res.Reply != nil {
		tb.Errorf("the duplicate's reply is %q, of an attempt that was rolled back", res.Reply)
	}
	e.wantCount("e", 1)
}

// replyOfOthers: tenants, consumers and keys have their own replies.
func replyOfOthers[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	keys := []dedupe.Key{
		{Tenant: "a", Consumer: "c", Source: "s", ID: "1"}, {Tenant: "b", Consumer: "c", Source: "s", ID: "1"},
		{Tenant: "a", Consumer: "d", Source: "s", ID: "1"}, {Tenant: "a", Consumer: "c", Source: "t", ID: "1"},
		{Tenant: "a", Consumer: "c", Source: "s", ID: "2"}, {Consumer: "c", Source: "s", ID: "1"},
	}
	for _, want := range [...]dedupe.Outcome{dedupe.Processed, dedupe.Duplicate} {
		for i, k := range keys {
			reply := fmt.Sprint("secret of ", i)
			if res := e.once(claimOf(k, "same"), e.effect("e", []byte(reply)), want); string(res.Reply) != reply {
				tb.Errorf("%v of %+v: %q, want %q", want, k, res.Reply, reply)
			}
		}
	}
	e.wantCount("e", len(keys))
}
