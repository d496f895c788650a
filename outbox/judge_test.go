package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

var (
	wrapped    = func(err error) error { return fmt.Errorf("adapter: %w: detail", err) }
	errRefused = errors.New("an answer of no class")
)

// judged are the settlements of rows when the publisher gives results for those that
// go; nil in an outage.
func judged(t *testing.T, r *Relay, rows []Row, results brokers.Results) []Settlement {
	b := r.plan(rows)
	for i := range b {
		if b[i].fate != stays {
			b[i].err, results = results[0], results[1:]
		}
	}
	ss, err := r.judge(t.Context(), b)
	if (ss == nil) != isOutage(err) {
		t.Fatalf("%d settlements, %v", len(ss), err)
	}
	return ss
}

// One row, refused for each reason, for the given time. The other row of the
// batch went, so that it is no outage.
func TestJudgeEveryClass(t *testing.T) {
	skip := &RelayOptions{SkipParked: true}
	forever := &RelayOptions{MaxAttempts: -1}
	for _, c := range []struct {
		name     string
		o        *RelayOptions
		attempts int
		err      error
		want     Action
		counted  bool
		after    time.Duration
	}{
		{"acknowledged", nil, 3, nil, Sent, false, 0},
		{"blocked", nil, 3, wrapped(brokers.ErrBlocked), Hold, false, 0},
		{"unavailable", nil, 9, wrapped(brokers.ErrUnavailable), Hold, false, 500 * time.Millisecond},
		{"unknown", nil, 9, wrapped(brokers.ErrUnknown), Hold, false, 500 * time.Millisecond},
		{"closed", nil, 9, wrapped(brokers.ErrClosed), Hold, false, 500 * time.Millisecond},
		{"no route", nil, 9, wrapped(brokers.ErrNoRoute), Hold, false, 500 * time.Millisecond},
		{"rejected", nil, 0, wrapped(brokers.ErrRejected), Park, true, 0},
		{"rejected, pass", skip, 0, wrapped(brokers.ErrRejected), Skip, true, 0},
		{"rejected, no limit", forever, 0, wrapped(brokers.ErrRejected), Park, true, 0},
		{"refused first", nil, 0, errRefused, Hold, true, 500 * time.Millisecond},
		{"refused again", nil, 3, errRefused, Hold, true, 4 * time.Second},
		{"refused last", nil, 9, errRefused, Park, true, time.Minute},
		{"refused last, pass", skip, 9, errRefused, Skip, true, time.Minute},
		{"refused, no limit", forever, 1_000_000, errRefused, Hold, true, time.Minute},
	} {
		r := NewRelay(newMemory(), takes(0), c.o)
		row := Row{ID: 1, Attempts: c.attempts, Message: &envelope.Message{}}
		ss := judged(t, r, []Row{row, {ID: 2, Message: &envelope.Message{}}}, brokers.Results{c.err, nil})
		got := ss[0]
		if got.Row.ID != 1 || got.Action != c.want || got.Counted != c.counted || got.After != c.after {
			t.Errorf("%s: %+v, want action %d, counted %v, after %v", c.name, got, c.want, c.counted, c.after)
		}
		if (got.Reason == "") != (c.want == Sent) {
			t.Errorf("%s: the reason is %q", c.name, got.Reason)
		}
		if ss[1].Action != Sent {
			t.Errorf("%s: the other row is %+v", c.name, ss[1])
		}
	}
}

// A batch of which nothing could go settles nothing; one answer that only a
// broker in reach can give, and everything is settled.
func TestB42JudgeTellsAnOutage(t *testing.T) {
	const blocked = "blocked by an earlier batch"
	down := map[string]any{"a": brokers.ErrUnavailable}
	for _, c := range []struct {
		name    string
		answers []any
		outage  bool
	}{
		{"unavailable", []any{down["a"]}, true},
		{"closed and unknown", []any{brokers.ErrClosed, brokers.ErrUnknown}, true},
		{"and behind one in the batch", []any{brokers.ErrUnknown, brokers.ErrBlocked}, true},
		{"and behind one from before", []any{blocked, brokers.ErrUnavailable}, true},
		{"and one that the adapter refuses", []any{brokers.ErrRejected, brokers.ErrUnavailable}, true},
		{"one went", []any{brokers.ErrUnavailable, nil}, false},
		{"one has no topic", []any{brokers.ErrNoRoute, brokers.ErrUnavailable}, false},
		{"one was refused", []any{errRefused, brokers.ErrUnavailable}, false},
		{"only a refusal", []any{brokers.ErrRejected}, false},
		{"only blocked rows", []any{blocked, blocked}, false},
	} {
		var rows []Row
		var results brokers.Results
		for i, a := range c.answers {
			row := Row{ID: int64(i), Message: &envelope.Message{}, Blocked: a == blocked}
			if !row.Blocked {
				err, _ := a.(error)
				results = append(results, err)
			}
			rows = append(rows, row)
		}
		ss := judged(t, NewRelay(newMemory(), takes(0), nil), rows, results)
		if (ss == nil) != c.outage {
			t.Errorf("%s: settled %v, outage %v", c.name, ss, c.outage)
		}
		for i, s := range ss {
			if s.Row.ID != int64(i) || s.Action == 0 || rows[i].Blocked && s.Action != Hold {
				t.Errorf("%s: settlement %d is %+v", c.name, i, s)
			}
		}
	}
}

// A row that cannot be read is parked, blocks its key and nothing else, and
// does not shift the answers for the others.
func TestUnreadableRow(t *testing.T) {
	key := func(k string) *envelope.Message { return &envelope.Message{ID: k, Topic: "t", Key: []byte(k)} }
	corrupt := errors.New("the headers are corrupt")
	for _, skip := range []bool{false, true} {
		s := newMemory()
		s.rows = []memoryRow{{Row: Row{ID: 1, Message: key("a"), Err: corrupt}}, {Row: Row{ID: 2, Message: key("b")}},
			{Row: Row{ID: 3, Message: key("a")}}, {Row: Row{ID: 4, Message: &envelope.Message{Topic: "t"}, Err: corrupt}},
			{Row: Row{ID: 5, Message: &envelope.Message{ID: "c", Topic: "t"}}}}
		n := 0
		_, err := NewRelay(s, publisher(func(_ context.Context, msgs []*envelope.Message) brokers.Results {
			n = len(msgs)
			return make(brokers.Results, n)
		}), &RelayOptions{SkipParked: skip}).Step(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		want, published := []Action{Park, Sent, Hold, Park, Sent}, 2
		if skip {
			want, published = []Action{Skip, Sent, Sent, Skip, Sent}, 3
		}
		for i, st := range s.settled {
			if st.Action != want[i] || st.Row.ID != int64(i+1) || (st.Action == Park && st.Reason != corrupt.Error()) {
				t.Errorf("skip %v: row %d is settled as %+v", skip, i+1, st)
			}
		}
		if n != published || len(s.settled) != 5 {
			t.Errorf("skip %v: %d published, %d settled", skip, n, len(s.settled))
		}
	}
}

func TestReasonIsBoundedText(t *testing.T) {
	got := reason(errors.New(strings.Repeat("ü", maxReason)))
	if len(got) > maxReason || len(got) < maxReason-utf8.UTFMax || !utf8.ValidString(got) {
		t.Errorf("%d bytes, valid %v", len(got), utf8.ValidString(got))
	}
	got = reason(errors.New("x" + strings.Repeat("ü", maxReason)))
	if len(got) > maxReason || !utf8.ValidString(got) {
		t.Errorf("%d bytes, valid %v", len(got), utf8.ValidString(got))
	}
}
