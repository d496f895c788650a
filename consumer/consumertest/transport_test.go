package consumertest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/consumertest"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// payments is a service that knows a repetition by its key, and keeps what it
// has done in the order of the calls.
type payments struct {
	*httptest.Server
	ledger
	mu   sync.Mutex
	keys map[string]bool
}

func openPayments(tb testing.TB) *payments {
	p := &payments{keys: map[string]bool{}}
	p.Server = httptest.NewServer(p)
	tb.Cleanup(p.Close)
	return p
}

func (p *payments) ServeHTTP(_ http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	key := r.Header.Get("Idempotency-Key")
	p.mu.Lock()
	known := key != "" && p.keys[key]
	p.keys[key] = true
	p.mu.Unlock()
	if !known {
		p.add(string(body))
	}
}

// pay makes a payment, with keys if there are any.
func pay(ctx context.Context, c *http.Client, url, body string, keys ...string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/pay?secret=1", strings.NewReader(body))
	if err != nil {
		return err
	}
	r.Header["Idempotency-Key"] = keys
	res, err := c.Do(r)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// client is one whose calls and connections are watched.
func client(tb testing.TB, o consumertest.TransportOptions) *http.Client {
	next := &http.Transport{}
	tb.Cleanup(next.CloseIdleConnections)
	o.Next = next
	t := consumertest.NewTransport(tb, &o)
	next.DialContext = t.Dial(nil)
	return &http.Client{Transport: t}
}

func keyOf(m *envelope.Message) dedupe.Key {
	return dedupe.Key{Consumer: "billing", Source: m.Source, ID: m.ID}
}

// Which calls pass, by what they are sent with.
func TestTransportWantsTheDerivedKey(t *testing.T) {
	first := keyOf(&envelope.Message{ID: "1", Source: "/s"})
	for name, c := range map[string]struct {
		operations []string
		keys       func(m *envelope.Message) []string
		complaint  string // none if the call passes
	}{
		"derived":                       {nil, func(m *envelope.Message) []string { return []string{dedupe.Derive(keyOf(m), "pay", 0)} }, ""},
		"derived, by name":              {[]string{"refund", "pay"}, func(m *envelope.Message) []string { return []string{dedupe.Derive(keyOf(m), "pay", 99)} }, ""},
		"none":                          {nil, func(*envelope.Message) []string { return nil }, "has no header Idempotency-Key"},
		"empty":                         {nil, func(*envelope.Message) []string { return []string{""} }, "has no header Idempotency-Key"},
		"two":                           {nil, func(m *envelope.Message) []string { return []string{dedupe.Derive(keyOf(m), "pay", 0), "x"} }, "has 2 headers"},
		"random":                        {nil, func(*envelope.Message) []string { return []string{envelope.NewID()} }, "is none that is derived"},
		"the event's id":                {nil, func(m *envelope.Message) []string { return []string{m.ID} }, "is none that is derived"},
		"another event's":               {nil, func(*envelope.Message) []string { return []string{dedupe.Derive(first, "pay", 0)} }, "was sent for another event"},
		"another event's, by name":      {[]string{"pay"}, func(*envelope.Message) []string { return []string{dedupe.Derive(first, "pay", 0)} }, "is not what is derived"},
		"an operation nobody has named": {[]string{"pay"}, func(m *envelope.Message) []string { return []string{dedupe.Derive(keyOf(m), "mail", 0)} }, "TransportOptions.Operations"},
		"an ordinal that is too great":  {[]string{"pay"}, func(m *envelope.Message) []string { return []string{dedupe.Derive(keyOf(m), "pay", 100)} }, "an ordinal below 100"},
	} {
		t.Run(name, func(t *testing.T) {
			p, r := openPayments(t), &recording{TB: t}
			http := client(r, consumertest.TransportOptions{Operations: c.operations})
			defer r.clean()
			h := consumer.Wrap("billing", consumertest.Watch(memdedupe.NewStore(nil)), func(ctx context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
				return pay(ctx, http, p.URL, m.ID, c.keys(m)...)
			}, nil)
			var err error
			for _, m := range orders(t, 3)[1:] { // twice, for a key of another event shows at the second one
				err = h.Handle(t.Context(), m)
			}
			switch {
			case c.complaint == "" && (err != nil || len(r.errors) > 0):
				t.Errorf("%v, told %q", err, r.errors)
			case c.complaint == "":
				if got := p.state(t); got != "1\n2" {
					t.Errorf("paid %q", got)
				}
			case !errors.Is(err, consumertest.ErrKeyless) || !consumer.IsPermanent(err):
				t.Errorf("the handler got %v", err)
			case len(r.errors) != 1 || !strings.Contains(r.errors[0], c.complaint):
				t.Errorf("told %q, want once %q", r.errors, c.complaint)
			case strings.Contains(r.errors[0], "secret"):
				t.Errorf("it shows the query: %q", r.errors)
			}
		})
	}
}

// What nobody calls a handler passes, and what a handler does by itself does not.
func TestDialIsTheTransportsAlone(t *testing.T) {
	p, r := openPayments(t), &recording{TB: t}
	defer r.clean()
	c := client(r, consumertest.TransportOptions{})
	if err := pay(t.Context(), c, p.URL, "outside"); err != nil || len(r.errors) > 0 {
		t.Fatalf("outside a handler: %v, %q", err, r.errors)
	}
	c.CloseIdleConnections()
	dial := consumertest.NewTransport(r, nil).Dial(nil)
	h := consumer.Wrap("billing", consumertest.Watch(memdedupe.NewStore(nil)), func(ctx context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		if err := pay(ctx, c, p.URL, "inside", dedupe.Derive(keyOf(m), "pay", 0)); err != nil { // opens a connection
			t.Error(err)
		}
		conn, err := dial(ctx, "tcp", p.Listener.Addr().String())
		if err == nil {
			err = conn.Close()
		}
		return err
	}, nil)
	if err := h.Handle(t.Context(), orders(t, 1)[0]); !errors.Is(err, consumertest.ErrKeyless) {
		t.Errorf("a connection of its own: %v", err)
	}
	if len(r.errors) != 1 || !strings.Contains(r.errors[0], "a connection to 127.0.0.1:") {
		t.Errorf("told %q", r.errors)
	}
	if conn, err := dial(t.Context(), "tcp", p.Listener.Addr().String()); err != nil {
		t.Errorf("outside a handler: %v", err)
	} else if err := conn.Close(); err != nil {
		t.Error(err)
	}
	if got := p.state(t); got != "outside\ninside" {
		t.Errorf("paid %q", got)
	}
}

// In a group any event of it may be the cause, and no other one. The group must
// really be one, or nothing is shown.
func TestTransportInAGroup(t *testing.T) {
	for name, keyFor := range map[string]func(m *envelope.Message) dedupe.Key{
		"":                       keyOf,
		"is not what is derived": func(*envelope.Message) dedupe.Key { return dedupe.Key{Consumer: "billing", ID: "else"} },
	} {
		p, r := openPayments(t), &recording{TB: t}
		c := client(r, consumertest.TransportOptions{Operations: []string{"pay"}})
		b := membroker.New()
		b.CreateTopic("t", 1)
		most := 0
		h := consumer.WrapBatch("billing", consumertest.Watch(memdedupe.NewStore(nil)), func(ctx context.Context, _ *memdedupe.Tx, ms []*envelope.Message) error {
			most = max(most, len(ms))
			for _, m := range ms {
				if err := pay(ctx, c, p.URL, m.ID, dedupe.Derive(keyFor(m), "pay", 0)); err != nil {
					return err
				}
			}
			return nil
		}, nil)
		for _, id := range []string{"1", "2", "3"} {
			publish(t, b, &envelope.Message{ID: id, Source: "/s", Type: "t", Topic: "t", Key: []byte("k")})
		}
		dead := consumertest.Drain(t, b, "t", "g", h, &consumertest.DrainOptions{Run: consumer.RunOptions{Batch: consumer.Batch{Max: 3, Wait: 1e9}}})
		r.clean()
		if most != 3 {
			t.Errorf("the greatest group had %d events", most)
		}
		if name == "" && (len(r.errors) > 0 || len(dead) > 0 || p.state(t) != "1\n2\n3") {
			t.Errorf("told %q, %d dead letters, paid %q", r.errors, len(dead), p.state(t))
		}
		if name != "" && (len(r.errors) != 1 || !strings.Contains(r.errors[0], name) || len(dead) != 3 || p.state(t) != "") {
			t.Errorf("told %q, %d dead letters, paid %q", r.errors, len(dead), p.state(t))
		}
	}
}

// A handler that fails after its call makes it again, by the same key. Without the
// header the call would not be made, and the test would fail.
func ExampleNewTransport() {
	var t testing.TB = exampleTB{} // of your test
	service := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		fmt.Println("paid by", r.Header.Get("Idempotency-Key"))
	}))
	defer service.Close()
	c := &http.Client{Transport: consumertest.NewTransport(t, &consumertest.TransportOptions{Operations: []string{"pay"}})}
	defer c.CloseIdleConnections()

	store := consumertest.Watch(memdedupe.NewLeaseStore(nil))
	h := consumer.Wrap("billing", store, func(ctx context.Context, l *dedupe.Lease, _ *envelope.Message) error {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, service.URL, nil)
		if err != nil {
			return err
		}
		r.Header.Set("Idempotency-Key", l.Derive("pay", 0))
		res, err := c.Do(r)
		if err != nil {
			return err
		}
		_ = res.Body.Close()
		if l.Attempt == 1 {
			return errors.New("not yet")
		}
		return nil
	}, nil)
	m := &envelope.Message{ID: "1", Source: "/shop", Type: "order.placed", Topic: "orders"}
	fmt.Println(h.Handle(context.Background(), m))
	fmt.Println(h.Handle(context.Background(), m))
	// Output:
	// paid by 7c19c975-4fdd-8359-9305-bafa1be06d9a
	// not yet
	// paid by 7c19c975-4fdd-8359-9305-bafa1be06d9a
	// <nil>
}
