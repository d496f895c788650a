package dedupe

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

// GuardOptions are the settings of [Guard]. The zero value is the default, and
// lets everything through.
type GuardOptions struct {
	// MaxPart is the greatest length of one part of a key, in bytes. Defaults
	// to the package's MaxPart, which is also the most.
	MaxPart int
	// ASCII refuses parts with characters outside printable ASCII, whose forms
	// look alike or get lost on the way through other systems.
	ASCII bool
	// MinEntropy is the least entropy of an id, in bits, as [Entropy] estimates
	// it. An id that others can guess lets them make somebody's event a
	// duplicate before it comes. 64 is sensible for keys that clients choose.
	// Defaults to none.
	MinEntropy float64
	// NewPerSecond is how many new keys each tenant may bring in a second, on
	// average; it counts in this process alone. Duplicates are free. Defaults
	// to no limit.
	NewPerSecond float64
	// Burst is how many new keys a tenant may bring at once. Defaults to
	// NewPerSecond, at least 1.
	Burst int
	// MaxTenants is how many tenants are counted at a time. The one that has
	// been silent for longest is forgotten first. Defaults to 10,000.
	MaxTenants int
}

// ErrWeakKey: the id is easier to guess than the store allows. The event is
// malformed; nothing of it is stored.
var ErrWeakKey = errors.New("dedupe: the id is too easy to guess")

// ErrRateLimited: the tenant brings more new keys than it may. Nothing of the
// event is stored. Come back later.
var ErrRateLimited = errors.New("dedupe: the tenant brings too many new keys")

// Guard returns a store that passes on to st what o allows, for keys that come
// from outside. What it refuses it refuses before anything is stored, and the
// same whichever broker carried it: ErrInvalidKey, ErrWeakKey or ErrRateLimited.
// It panics if st is nil or o asks for more than MaxPart bytes.
//
// The rate is limited where the key has turned out to be new: the claim is
// undone, and a redelivery of something that is done is never held up.
//
// The store is a [Batcher] if st is one. A claim of a batch that is refused has
// the reason in its [Answer], and leaves nothing, while the others are done; of
// one tenant no new key is done behind one that was refused for the rate. Where
// some are, the batch is claimed again without them before the handler runs. A
// batch that fails as a whole costs nothing of the rate.
func Guard[S any](st Store[S], o GuardOptions) Store[S] {
	if st == nil {
		panic("dedupe: Guard: the store is nil")
	}
	if o.MaxPart > MaxPart || o.MaxPart < 0 {
		panic(fmt.Sprintf("dedupe: Guard: MaxPart is %d, the most is %d", o.MaxPart, MaxPart))
	}
	if o.MaxPart == 0 {
		o.MaxPart = MaxPart
	}
	g := &guard[S]{inner: st, o: o}
	if o.NewPerSecond > 0 {
		g.rates = newRates(o)
	}
	if b, ok := st.(Batcher[S]); ok {
		return &guardBatch[S]{g, b}
	}
	return g
}

type guard[S any] struct {
	inner Store[S]
	o     GuardOptions
	rates *rates // nil without a limit
}

// Once implements [Store].
func (g *guard[S]) Once(ctx context.Context, c Claim, fn func(ctx context.Context, scope S) ([]byte, error)) (Result, error) {
	if err := g.check(c.Key); err != nil {
		return Result{}, err
	}
	if g.rates == nil {
		return g.inner.Once(ctx, c, fn)
	}
	counted := false // a lost race runs fn again, and counts once
	return g.inner.Once(ctx, c, func(ctx context.Context, scope S) ([]byte, error) {
		if err := limited(g.rates.take(c.Key.Tenant, time.Now(), counted)); err != nil {
			return nil, err
		}
		counted = true
		return fn(ctx, scope)
	})
}

func (g *guard[S]) check(k Key) error {
	for _, p := range k.parts() {
		if len(p.value) > g.o.MaxPart {
			return fmt.Errorf("%w: the %s is %d bytes long, %d are allowed", ErrInvalidKey, p.name, len(p.value), g.o.MaxPart)
		}
		if i := notASCII(p.value); g.o.ASCII && i >= 0 {
			return fmt.Errorf("%w: the %s has a character outside printable ASCII at byte %d", ErrInvalidKey, p.name, i)
		}
	}
	if e := Entropy(k.ID); e < g.o.MinEntropy {
		return fmt.Errorf("%w: about %.0f bits, %.0f are demanded; use a random UUID", ErrWeakKey, e, g.o.MinEntropy)
	}
	return nil
}

// notASCII returns where the first such character is, or -1.
func notASCII(s string) int {
	for i := 0; i < len(s); i++ {
		if s[i] < 0x20 || s[i] > 0x7e {
			return i
		}
	}
	return -1
}

// Entropy estimates, in bits and from above, how hard a string is to guess: its
// length times the lesser of the information in the frequencies of its
// characters, and of one character of the classes (digits, hexadecimal,
// letters) that it is made of. A random UUID has over 100, a number of eight
// digits at most 27, one character repeated none. It knows nothing of counters
// and of words.
func Entropy(s string) float64 {
	counts := make(map[rune]int)
	n := 0
	for _, r := range s {
		counts[r]++
		n++
	}
	perRune := 0.0
	for _, c := range counts {
		p := float64(c) / float64(n)
		perRune -= p * math.Log2(p)
	}
	return float64(n) * min(perRune, math.Log2(alphabet(counts)))
}

// alphabet is the size of the least class of characters that has all of these.
func alphabet(of map[rune]int) float64 {
	size := 1.0
	for r := range of {
		switch {
		case r >= '0' && r <= '9':
			size = max(size, 10)
		case r >= 'a' && r <= 'f', r >= 'A' && r <= 'F', r == '-':
			size = max(size, 16)
		case r < utf8.RuneSelf && unicode.IsLetter(r):
			size = max(size, 62)
		default:
			size = max(size, 128)
		}
	}
	return size
}

// rates are the token buckets of the tenants that were here latest.
type rates struct {
	perSecond, burst float64
	most             int

	mu     sync.Mutex
	bucket map[string]*list.Element
	recent list.List // of *bucket, the latest one at the front
}

type bucket struct {
	tenant string
	tokens float64
	at     time.Time
}

func newRates(o GuardOptions) *rates {
	r := &rates{perSecond: o.NewPerSecond, burst: float64(o.Burst), most: o.MaxTenants, bucket: make(map[string]*list.Element)}
	if o.Burst <= 0 {
		r.burst = max(o.NewPerSecond, 1)
	}
	if o.MaxTenants <= 0 {
		r.most = 10_000
	}
	return r
}

// take takes a token of a tenant, unless it has one for this claim, and returns
// how long it will be until there is one if there is none.
func (r *rates) take(tenant string, now time.Time, has bool) time.Duration {
	if has {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	b := r.of(tenant, now)
	b.tokens = min(r.burst, b.tokens+max(0, now.Sub(b.at).Seconds())*r.perSecond)
	b.at = now
	if b.tokens < 1 {
		return time.Duration((1 - b.tokens) / r.perSecond * float64(time.Second))
	}
	b.tokens--
	return 0
}

// give gives a token back to a tenant. One that was forgotten has all it can have.
func (r *rates) give(tenant string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e, ok := r.bucket[tenant]; ok {
		b := e.Value.(*bucket)
		b.tokens = min(r.burst, b.tokens+1)
	}
}

// of returns the bucket of a tenant, a full one for one that is new here.
func (r *rates) of(tenant string, now time.Time) *bucket {
	if e, ok := r.bucket[tenant]; ok {
		r.recent.MoveToFront(e)
		return e.Value.(*bucket)
	}
	if r.recent.Len() >= r.most {
		oldest := r.recent.Back()
		delete(r.bucket, r.recent.Remove(oldest).(*bucket).tenant)
	}
	b := &bucket{tenant: tenant, tokens: r.burst, at: now}
	r.bucket[tenant] = r.recent.PushFront(b)
	return b
}
