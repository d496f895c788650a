package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// limited is a publisher whose topic takes messages up to a size, headers counted.
type limited struct {
	brokers.Publisher
	max  int
	sent []*envelope.Message
	err  error // instead
}

func (p *limited) Publish(_ context.Context, msgs []*envelope.Message) brokers.Results {
	res := make(brokers.Results, len(msgs))
	for i, m := range msgs {
		n := len(m.Body) + len(m.Key)
		for _, h := range m.Header {
			n += len(h.Name) + len(h.Value)
		}
		switch {
		case p.err != nil:
			res[i] = p.err
		case n > p.max:
			res[i] = fmt.Errorf("limited: %w", brokers.ErrTooLarge)
		default:
			p.sent = append(p.sent, m.Clone())
		}
	}
	return res
}

func failureOf(t *testing.T, size int) *Failure {
	m := raw(t, "1", strings.Repeat("x", size))
	m.Position, m.Key = "orders/0/7", []byte("k")
	return &Failure{Message: m, Class: ClassFailed, Reason: "failed", Attempts: 3, Err: errors.New(strings.Repeat("why ", 100))}
}

// What does not fit with all that we add goes whole, with the id and the reason.
func TestDeadLetterToSendsTheSmallestWholeForm(t *testing.T) {
	f := failureOf(t, 1000)
	for name, hops := range map[string]int{"a first hop": 1, "a second hop": 2} {
		p := &limited{max: 1 << 20}
		for range hops - 1 { // our headers of an earlier hop do not count as its own
			if err := DeadLetterTo(p, "dead")(t.Context(), f); err != nil {
				t.Fatal(err)
			}
			f = &Failure{Message: p.sent[0], Class: ClassPermanent, Reason: "permanent", Err: f.Err}
		}
		p.max, p.sent = 1300, nil
		if err := DeadLetterTo(p, "dead")(t.Context(), f); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		m := p.sent[0]
		if !bytes.Equal(m.Body, f.Message.Body) || string(m.Key) != "k" {
			t.Errorf("%s: body of %d bytes, key %q", name, len(m.Body), m.Key)
		}
		if got, err := envelope.Decode(m); err != nil || got.ID != "1" {
			t.Errorf("%s: the envelope is gone: %v, %v", name, got, err)
		}
		var ours []string
		for _, h := range m.Header {
			if strings.HasPrefix(h.Name, "unecho-dead-") {
				ours = append(ours, h.Name)
			}
		}
		slices.Sort(ours)
		if !slices.Equal(ours, []string{HeaderDeadID, HeaderDeadReason}) {
			t.Errorf("%s: of ours %q, want the id and the reason", name, ours)
		}
		if why, _ := m.Header.Get(HeaderDeadReason); string(why) != f.Reason {
			t.Errorf("%s: reason %q", name, why)
		}
	}
	p := &limited{max: 1000}
	if err := DeadLetterTo(p, "dead")(t.Context(), f); !errors.Is(err, brokers.ErrTooLarge) || len(p.sent) != 0 {
		t.Errorf("nothing fits: %v, sent %d", err, len(p.sent))
	}
}

// A definite refusal goes on to the next place. An outage, or an answer that was
// lost, never does.
func TestFirstDeadLetter(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		next bool
	}{
		"taken":       {nil, false},
		"rejected":    {fmt.Errorf("x: %w", brokers.ErrRejected), true},
		"too large":   {fmt.Errorf("x: %w", brokers.ErrTooLarge), true},
		"permanent":   {Permanent(errors.New("no")), true},
		"missing":     {brokers.ErrNoRoute, false},
		"unavailable": {brokers.ErrUnavailable, false},
		"unknown":     {brokers.ErrUnknown, false},
		"closed":      {brokers.ErrClosed, false},
		"late":        {context.DeadlineExceeded, false},
		"ordinary":    {errors.New("dial: refused"), false},
	} {
		a, b := &limited{max: 1 << 20, err: c.err}, &limited{max: 1 << 20}
		err := FirstDeadLetter(DeadLetterTo(a, "a"), DeadLetterTo(b, "b"))(t.Context(), failureOf(t, 10))
		if next := len(b.sent) == 1; next != c.next {
			t.Errorf("%s: went on %v, want %v", name, next, c.next)
		}
		if want := c.err != nil && !c.next; (err != nil) != want || want && !errors.Is(err, c.err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	a, b := &limited{err: brokers.ErrRejected}, &limited{max: 10}
	err := FirstDeadLetter(DeadLetterTo(a, "a"), DeadLetterTo(b, "b"))(t.Context(), failureOf(t, 10))
	if !errors.Is(err, brokers.ErrRejected) || !errors.Is(err, brokers.ErrTooLarge) {
		t.Errorf("refused by all: %v, want both answers", err)
	}
}

// A topic that is missing for a while may only be electing its leader.
func TestFirstDeadLetterWaitsForAMissingTopic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := &limited{max: 1 << 20, err: brokers.ErrNoRoute}, &limited{max: 1 << 20}
		first, f := FirstDeadLetter(DeadLetterTo(a, "a"), DeadLetterTo(b, "b")), failureOf(t, 10)
		for range 10 { // it flaps: each time it was there in between
			if err := first(t.Context(), f); !errors.Is(err, brokers.ErrNoRoute) {
				t.Fatal(err)
			}
			time.Sleep(missingFor - time.Second)
			a.err = nil
			if err := first(t.Context(), f); err != nil {
				t.Fatal(err)
			}
			a.err = brokers.ErrNoRoute
		}
		_ = first(t.Context(), f)
		time.Sleep(missingFor)
		if err := first(t.Context(), f); err != nil || len(b.sent) != 1 {
			t.Errorf("gone for %v: %v, the next place has %d", missingFor, err, len(b.sent))
		}
	})
}
