package linear

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
)

var errHandler = errors.New("the handler's own error")

// step is one line of a script.
type step struct {
	tenant, id, content string
	fails               bool
	reply               []byte
	retain              time.Duration
	forget              byte // e evict, s settle, x wait until it has expired and prune
}

// script is what happens to a few keys of a few tenants, the same for a seed.
func script(seed uint64, n int) []step {
	rnd := rand.New(rand.NewPCG(seed, 0))
	steps := make([]step, n)
	for i := range steps {
		s := step{
			tenant: []string{"", "acme", "rival"}[rnd.IntN(3)], id: fmt.Sprint("k", rnd.IntN(4)), content: []string{"a", "a", "b"}[rnd.IntN(3)],
			fails: rnd.IntN(4) == 0, retain: time.Hour,
		}
		if rnd.IntN(3) > 0 {
			s.reply = []byte(strings.Repeat("r", rnd.IntN(3)) + fmt.Sprint(i))
		}
		switch rnd.IntN(16) {
		case 0:
			s.forget = 'e'
		case 1:
			s.forget = 's'
		}
		steps[i] = s
	}
	return steps
}

// play runs a script and returns its answers, line by line.
func play(t *testing.T, s store, steps []step) []string {
	source := fmt.Sprint("/", s.name)
	var lines []string
	for i, st := range steps {
		k := dedupe.Key{Tenant: st.tenant, Consumer: "script", Source: source, ID: st.id}
		lines = append(lines, fmt.Sprintf("%3d %5s/%s=%s fails=%-5v forget=%q: ", i, st.tenant, st.id, st.content, st.fails, st.forget)+s.line(t, k, st))
	}
	return lines
}

// line is what one step is answered, in words that are no store's own.
func (s store) line(t *testing.T, k dedupe.Key, st step) string {
	ctx := t.Context()
	switch st.forget {
	case 'e':
		err := s.admin.Evict(ctx, k.Stored())
		return fmt.Sprint("evicted ", err == nil, " not found ", errors.Is(err, dedupe.ErrNotFound))
	case 's':
		return fmt.Sprint("settled ", s.admin.Settle(ctx, k.Stored()) == nil)
	}
	doc := fmt.Appendf(nil, `{"content":%q,"same":1}`, st.content)
	c := dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k, doc), Fields: dedupe.JSONFields(k, doc), Retain: st.retain}
	var fail error
	if st.fails {
		if e, err := s.admin.Find(ctx, k.Stored()); s.eager && err == nil && e.State == dedupe.StateDone {
			st.fails = false // an eager handler runs before the store looks; let it contribute in vain
		} else {
			fail = errHandler
		}
	}
	res, err := s.once(ctx, c, k.Tenant+k.ID, st.reply, fail)
	conflicts, e1 := s.admin.Conflicts(ctx, k.Stored())
	var fields []string
	for _, r := range conflicts {
		fields = append(fields, r.Fields...)
	}
	state := "none"
	if e, err := s.admin.Find(ctx, k.Stored()); err == nil && e.State == dedupe.StateDone {
		state = fmt.Sprintf("done, a reply of %d", e.ReplySize) // what a failed attempt leaves is the store's own
	}
	return fmt.Sprintf("%v %q nil=%v handler=%v other=%v, %d conflicts %v, %s, %d effects",
		res.Outcome, res.Reply, res.Reply == nil, errors.Is(err, errHandler), err != nil && !errors.Is(err, errHandler),
		len(conflicts), slices.Compact(fields), state, s.count(t, k.Tenant+k.ID)) + fmt.Sprint(e1 == nil)
}

// TestOneScript: whatever a store is made of, it gives the same answers.
func TestOneScript(t *testing.T) {
	steps := script(1, 400)
	var mu sync.Mutex
	var first []string
	var of string
	each(t, func(t *testing.T, s store) {
		lines := play(t, s, steps)
		mu.Lock()
		defer mu.Unlock()
		if first == nil {
			first, of = lines, s.name
			return
		}
		for i := range lines {
			if lines[i] != first[i] {
				t.Errorf("%s differs from %s:\n%s\n%s", s.name, of, lines[i], first[i])
				return
			}
		}
	})
	counts := map[string]int{}
	for _, l := range first {
		for _, word := range []string{": processed", ": duplicate", ": conflict", "handler=true", "evicted true", "[/content]"} {
			if strings.Contains(l, word) {
				counts[word]++
			}
		}
	}
	for _, word := range []string{": processed", ": duplicate", ": conflict", "handler=true", "evicted true", "[/content]"} {
		if counts[word] < 5 {
			t.Errorf("the script has %d lines with %q: it shows nothing", counts[word], word)
		}
	}
}

// TestTenantsAreApart: two tenants with the same keys at the same time see their
// own results, and nothing that is done to the one changes the other.
func TestTenantsAreApart(t *testing.T) {
	each(t, func(t *testing.T, s store) {
		claim := func(tenant, id string) dedupe.Claim {
			k := dedupe.Key{Tenant: tenant, Consumer: "apart", Source: "/" + s.name, ID: id}
			return dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k, []byte("same"))}
		}
		var wg sync.WaitGroup
		for _, tenant := range []string{"acme", "rival", "", "acm", "e"} {
			wg.Go(func() {
				for i := range 20 {
					c := claim(tenant, fmt.Sprint("e", i))
					if tenant == "acm" {
						c.Key.Source = "e" + c.Key.Source // no way of joining the parts makes it acme's
					}
					for _, want := range []dedupe.Outcome{dedupe.Processed, dedupe.Duplicate} {
						res, err := s.retry(t.Context(), c, "apart "+tenant, []byte("secret of "+tenant))
						if err != nil || res.Outcome != want || string(res.Reply) != "secret of "+tenant {
							t.Errorf("%q: %v, %q, %v; want %v and its own reply", tenant, res.Outcome, res.Reply, err, want)
							return
						}
					}
				}
			})
		}
		wg.Wait()
		if err := s.admin.Evict(t.Context(), claim("rival", "e1").Key.Stored()); err != nil {
			t.Fatal(err)
		}
		if res, err := s.retry(t.Context(), claim("acme", "e1"), "apart acme", nil); err != nil || res.Outcome != dedupe.Duplicate || string(res.Reply) != "secret of acme" {
			t.Errorf("after the other's eviction: %v, %q, %v", res.Outcome, res.Reply, err)
		}
		for _, tenant := range []string{"acme", "rival", "", "acm", "e"} {
			if n := s.count(t, "apart "+tenant); n != 20 {
				t.Errorf("%q has %d effects, want 20", tenant, n)
			}
		}
	})
}

// retry claims again while others are in the way: SQLite has one writer.
func (s store) retry(ctx context.Context, c dedupe.Claim, effect string, reply []byte) (dedupe.Result, error) {
	for {
		res, err := s.once(ctx, c, effect, reply, nil)
		if !errors.Is(err, dedupe.ErrInProgress) && !errors.Is(err, dedupe.ErrContention) {
			return res, err
		}
	}
}
