package consumertest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
)

// TransportOptions are the settings of [NewTransport]. The zero value, and nil,
// is the default.
type TransportOptions struct {
	// Header carries the key. Defaults to Idempotency-Key.
	Header string
	// Operations are the names that the handler derives keys for, as it gives
	// them to consumer.Derive or Lease.Derive, with ordinals below Ordinals. Without any, a key must
	// only look like a derived one, and be no other event's.
	Operations []string
	// Ordinals defaults to 100.
	Ordinals int
	// Next makes the calls. Defaults to http.DefaultTransport.
	Next http.RoundTripper
}

// Transport is an http.RoundTripper that lets no call pass that a handler makes
// without the idempotency key of its event: when the transaction is rolled back,
// or the process ends before the commit, the call is made again, and only by an
// equal key can the other side know. Such a call is not made, and fails the test;
// the handler gets an error that consumer.Permanent has marked. Calls outside a
// handler pass.
//
// It knows a handler's call by the request's context, which must come from the
// context that the handler was given, and the handler's store be one of [Watch].
// It is safe for concurrent use.
type Transport struct {
	tb testing.TB
	o  TransportOptions

	mu   sync.Mutex
	told map[string]bool       // complaints, each once
	keys map[string]dedupe.Key // whose a key is
}

// ErrKeyless: a call was not made, because it had no derived key.
var ErrKeyless = errors.New("consumertest: a handler calls another service without an idempotency key derived from its event")

// NewTransport returns a transport that fails tb. o may be nil.
func NewTransport(tb testing.TB, o *TransportOptions) *Transport {
	t := &Transport{tb: tb, told: map[string]bool{}, keys: map[string]dedupe.Key{}}
	if o != nil {
		t.o = *o
	}
	if t.o.Header == "" {
		t.o.Header = "Idempotency-Key"
	}
	if t.o.Ordinals <= 0 {
		t.o.Ordinals = 100
	}
	if t.o.Next == nil {
		t.o.Next = http.DefaultTransport
	}
	return t
}

// RoundTrip implements http.RoundTripper.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	events := eventsOf(r.Context())
	if len(events) == 0 {
		return t.o.Next.RoundTrip(r)
	}
	if why := t.judge(events, r.Header.Values(t.o.Header)); why != "" {
		if r.Body != nil {
			_ = r.Body.Close() // as a RoundTripper must
		}
		return nil, t.refuse("%s %s://%s: %s", r.Method, r.URL.Scheme, r.URL.Host, why)
	}
	return t.o.Next.RoundTrip(r.WithContext(context.WithValue(r.Context(), keyedKey{}, true)))
}

// CloseIdleConnections is what http.Client.CloseIdleConnections calls.
func (t *Transport) CloseIdleConnections() {
	if c, ok := t.o.Next.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// keyedKey marks the context of a call that has its key, for [Transport.Dial].
type keyedKey struct{}

// Dial returns a function that dials by next, and refuses connections that a
// handler opens by itself: what it sends over one has no key, whatever the
// protocol. Those of calls that RoundTrip has let pass, and those outside a
// handler, are opened. A nil next is that of a net.Dialer.
//
// It suits http.Transport.DialContext, and pgconn.Config.DialFunc, where it finds
// the handler that takes a second connection beside its transaction.
func (t *Transport) Dial(next func(ctx context.Context, network, address string) (net.Conn, error)) func(ctx context.Context, network, address string) (net.Conn, error) {
	if next == nil {
		next = (&net.Dialer{}).DialContext
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		if len(eventsOf(ctx)) > 0 && ctx.Value(keyedKey{}) == nil {
			return nil, t.refuse("a connection to %s: write the effect with the scope that the handler was given, or call by HTTP with the header %s", address, t.o.Header)
		}
		return next(ctx, network, address)
	}
}

// refuse fails the test, once for each complaint.
func (t *Transport) refuse(format string, args ...any) error {
	err := fmt.Errorf("%w: %s", ErrKeyless, fmt.Sprintf(format, args...))
	t.mu.Lock()
	told := t.told[err.Error()]
	t.told[err.Error()] = true
	t.mu.Unlock()
	if !told {
		t.tb.Error(err)
	}
	return consumer.Permanent(err)
}

// judge says what is wrong with the keys of a call and what to do; nothing if
// there is nothing.
func (t *Transport) judge(events []dedupe.Key, values []string) string {
	switch {
	case len(values) == 0 || values[0] == "":
		return fmt.Sprintf("it has no header %s; set it to what Lease.Derive, or consumer.Derive, returns, "+
			"or leave the call to a consumer of an event that the handler writes into its outbox", t.o.Header)
	case len(values) > 1:
		return fmt.Sprintf("it has %d headers %s, and the other side may take any of them; send one", len(values), t.o.Header)
	case len(t.o.Operations) > 0 && !t.derived(events, values[0]):
		return fmt.Sprintf("its %s is not what is derived from the event for any of the operations %q, with an ordinal below %d; "+
			"set it to what Lease.Derive, or consumer.Derive, returns, and name the operation in TransportOptions.Operations",
			t.o.Header, t.o.Operations, t.o.Ordinals)
	case !looksDerived(values[0]):
		return fmt.Sprintf("its %s is none that is derived, so the next run of the handler sends another one; "+
			"set it to what Lease.Derive, or consumer.Derive, returns", t.o.Header)
	case !t.belongs(events, values[0]):
		return fmt.Sprintf("its %s was sent for another event, so the other side takes the one for a repetition of the other; "+
			"derive it from the key of the event that is handled", t.o.Header)
	}
	return ""
}

// derived reports whether a value is derived for one of the operations.
func (t *Transport) derived(events []dedupe.Key, value string) bool {
	for _, k := range events {
		for _, operation := range t.o.Operations {
			for n := range t.o.Ordinals {
				if dedupe.Derive(k, operation, n) == value {
					return true
				}
			}
		}
	}
	return false
}

// looksDerived reports whether a value has the form of what dedupe.Derive
// returns: a UUID of version 8, in lower case. Those that are random, or made
// of the time, have other versions.
func looksDerived(value string) bool {
	if len(value) != 36 || value[14] != '8' || !strings.ContainsRune("89ab", rune(value[19])) {
		return false
	}
	_, err := dedupe.ParseKeyID(value)
	return err == nil && strings.ToLower(value) == value
}

// belongs reports whether a value was not sent for other events before.
func (t *Transport) belongs(events []dedupe.Key, value string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	owner, known := t.keys[value]
	if !known {
		if len(events) == 1 { // in a group nobody knows for which it is
			t.keys[value] = events[0]
		}
		return true
	}
	return slices.Contains(events, owner)
}
