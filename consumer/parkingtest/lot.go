package parkingtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// Whatever a broker can deliver comes out of the lot as it went in.
func keptAsOnTheWire(t testing.TB, lot consumer.ParkingLot) {
	header := envelope.Header{{Name: "a", Value: []byte("1")}, {Name: "b", Value: nil}, {Name: "a", Value: []byte{}}, {Name: "A", Value: []byte{0, 0xff, '\n'}},
		{Name: "no\x00text\xff", Value: []byte("x")}}
	for _, c := range []struct {
		name string
		m    *envelope.Message
	}{
		{"an event", wire(t, "1", `{"n":1}`)},
		{"a null body", &envelope.Message{Topic: "t", Position: "t/0/1", Key: []byte{}, Body: nil}},
		{"an empty body", &envelope.Message{Topic: "t", Position: "t/0/1", Key: nil, Body: []byte{}}},
		{"headers", &envelope.Message{Topic: "t", Position: "t/0/2", Header: header, Body: []byte{0, 1, 0xff}}},
		{"an empty list", &envelope.Message{Topic: "t", Position: "t/0/3", Header: envelope.Header{}}},
		{"1 MiB", &envelope.Message{Topic: "t", Position: "t/0/4", Body: bytes.Repeat([]byte{0, 'x', 0xff, '\n'}, 1<<18)}},
		{"no text", &envelope.Message{Topic: "t\xff\x00", Position: "\x00\xfe", Body: []byte("x")}},
		{"no position", &envelope.Message{Topic: "t", Body: []byte("y")}},
		{"decoded before", &envelope.Message{Topic: "t", ID: "i", Source: "s", Type: "y", Subject: "u", ContentType: "c", DataSchema: "d", Extensions: map[string]string{"x": "1"}}},
	} {
		before := len(list(t, lot, consumer.ParkedFilter{}))
		park(t, lot, "billing", c.m, 3, errBoom)
		ids := list(t, lot, consumer.ParkedFilter{})
		if len(ids) != before+1 {
			t.Fatalf("%s: %d records are new, want 1", c.name, len(ids)-before)
		}
		p := find(t, lot, ids[before])
		if !reflect.DeepEqual(p.Message, c.m) {
			t.Errorf("%s went in %#v\ncame out %#v", c.name, c.m, p.Message)
		}
		size := len(c.m.Body)
		if c.m.Body == nil {
			size = -1
		}
		if p.Size != size || p.Attempts != 3 || p.Class != consumer.ClassFailed || p.Reason != "failed" || p.Error != "boom" || p.Consumer != "billing" {
			t.Errorf("%s: the record is %+v", c.name, p)
		}
		if p.State != consumer.ParkedWaiting || p.ParkedAt.IsZero() || !p.SettledAt.IsZero() || p.Age < 0 || p.Age > time.Minute {
			t.Errorf("%s: the record is %+v", c.name, p)
		}
	}
}

// What the caller does to its message, or to a record it was given, later does not
// reach the lot.
func nothingShared(t testing.TB, lot consumer.ParkingLot) {
	p := parked(t, lot, "1")
	want := wire(t, "1", "body")
	p.Message.Body[0], p.Message.Header[0].Value[0], p.State = 'X', 'X', consumer.ParkedDiscarded
	if got := find(t, lot, p.ID); !reflect.DeepEqual(got.Message, want) || got.State != consumer.ParkedWaiting {
		t.Errorf("it is %+v with %+v, want the message as it was parked", got, got.Message)
	}
	m := wire(t, "2", "body")
	park(t, lot, "billing", m, 1, errBoom)
	m.Body[0], m.Header[0].Value[0] = 'X', 'X'
	ids := list(t, lot, consumer.ParkedFilter{})
	if got := find(t, lot, ids[len(ids)-1]); !reflect.DeepEqual(got.Message, wire(t, "2", "body")) {
		t.Errorf("it is %+v, want the message as it was parked", got.Message)
	}
}

// A message that could not be parked would block what is behind it for ever.
func oddTexts(t testing.TB, lot consumer.ParkingLot) {
	for i, text := range []string{"a\x00b\x1b[2Jc\nd\x7f", "\xff\xfe broken", strings.Repeat("é", 2000), "", "\u009b31m"} {
		park(t, lot, "billing\x00", wire(t, fmt.Sprint(i), "x"), 1, errors.New(text))
		got := find(t, lot, list(t, lot, consumer.ParkedFilter{})[i]).Error
		if len(got) > 1024+2 || strings.ContainsAny(got, "\x00\x1b\n\x7f\u009b") || text != "" && got == "" {
			t.Errorf("%q became %q", text, got)
		}
	}
}

func parkedAgain(t testing.TB, lot consumer.ParkingLot) {
	m := wire(t, "1", "x")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			f := &consumer.Failure{Message: m, Class: consumer.ClassFailed, Reason: "failed", Attempts: i + 1, Err: errBoom}
			if err := consumer.ParkIn(lot, "billing")(context.WithoutCancel(t.Context()), f); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	ids := list(t, lot, consumer.ParkedFilter{})
	if len(ids) != 1 {
		t.Fatalf("%d records, want 1", len(ids))
	}
	p := find(t, lot, ids[0])
	park(t, lot, "billing", m, 3, errors.New("the last"))
	again := find(t, lot, ids[0])
	if again.Attempts != 8 || again.Error != "the last" || again.Version <= p.Version || !again.ParkedAt.Equal(p.ParkedAt) || again.LastAt.Before(p.LastAt) {
		t.Errorf("parked again it is %+v, before %+v", again, p)
	}
}

func decisionStays(t testing.TB, lot consumer.ParkingLot) {
	p := parked(t, lot, "1")
	if err := consumer.DiscardParked(t.Context(), lot, p.ID); err != nil {
		t.Fatal(err)
	}
	settled := find(t, lot, p.ID)
	park(t, lot, "billing", wire(t, "1", "body"), 11, errBoom)
	if p := find(t, lot, p.ID); p.State != consumer.ParkedDiscarded || p.Attempts != 11 || p.SettledAt.IsZero() || !p.SettledAt.Equal(settled.SettledAt) {
		t.Errorf("a redelivery has undone a decision: %+v, before %+v", p, settled)
	}
	if ids := list(t, lot, consumer.ParkedFilter{}); len(ids) != 0 {
		t.Errorf("%q wait, want none", ids)
	}
}

// Another consumer, another content at the same position (the topic was made
// anew), and no position at all are other messages.
func otherMessages(t testing.TB, lot consumer.ParkingLot) {
	none := wire(t, "1", "x")
	none.Position = ""
	same := none.Clone()
	for _, p := range []struct {
		name string
		m    *envelope.Message
	}{{"billing", wire(t, "1", "x")}, {"email", wire(t, "1", "x")}, {"billing", wire(t, "1", "y")}, {"billing", none}, {"billing", same}} {
		park(t, lot, p.name, p.m, 1, errBoom)
	}
	if ids := list(t, lot, consumer.ParkedFilter{}); len(ids) != 4 {
		t.Errorf("%d records, want 4", len(ids))
	}
}

func compareAndSet(t testing.TB, lot consumer.ParkingLot) {
	p := parked(t, lot, "1")
	const people = 8
	var made atomic.Int64
	var wg sync.WaitGroup
	for i := range people {
		wg.Go(func() {
			mine := *p
			mine.State, mine.Attempts = consumer.ParkedRedriven, 100+i
			switch err := lot.Update(context.WithoutCancel(t.Context()), &mine); {
			case err == nil:
				made.Add(1)
			case !errors.Is(err, consumer.ErrParkedChanged):
				t.Errorf("Update: %v, want ErrParkedChanged", err)
			}
		})
	}
	wg.Wait()
	if n := made.Load(); n != 1 {
		t.Errorf("%d of %d changes for one version were made, want 1", n, people)
	}
	if err := consumer.DiscardParked(t.Context(), lot, p.ID); !errors.Is(err, consumer.ErrParkedChanged) {
		t.Errorf("discard of what is redriven: %v, want ErrParkedChanged", err)
	}
	none := *p
	none.ID = strings.Repeat("f", 32)
	if err := lot.Update(t.Context(), &none); !errors.Is(err, consumer.ErrParkedChanged) {
		t.Errorf("update of what is not there: %v, want ErrParkedChanged", err)
	}
	if _, err := lot.Find(t.Context(), none.ID); !errors.Is(err, consumer.ErrNotParked) {
		t.Errorf("find of what is not there: %v, want ErrNotParked", err)
	}
}

func updates(t testing.TB, lot consumer.ParkingLot) {
	p := parked(t, lot, "1")
	next := *p
	next.Class, next.Reason, next.Attempts, next.Error = consumer.ClassPermanent, "permanent", 11, "another"
	if err := lot.Update(t.Context(), &next); err != nil {
		t.Fatal(err)
	}
	got := find(t, lot, p.ID)
	if got.Class != next.Class || got.Reason != next.Reason || got.Attempts != 11 || got.Error != "another" || got.State != consumer.ParkedWaiting ||
		got.Version <= p.Version || !got.SettledAt.IsZero() || !got.ParkedAt.Equal(p.ParkedAt) || !reflect.DeepEqual(got.Message, p.Message) {
		t.Errorf("it is %+v, want what the update said", got)
	}
	settled := *got
	settled.State = consumer.ParkedSkipped
	if err := lot.Update(t.Context(), &settled); err != nil {
		t.Fatal(err)
	}
	if got := find(t, lot, p.ID); got.State != consumer.ParkedSkipped || got.SettledAt.IsZero() {
		t.Errorf("it is %+v, want it skipped, and when", got)
	}
}

func replaces(t testing.TB, lot consumer.ParkingLot) {
	p := parked(t, lot, "1")
	into, err := consumer.Edit(t.Context(), lot, p.ID, func(m *envelope.Message) error { m.Body = []byte("mended"); return nil }, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := find(t, lot, p.ID); got.State != consumer.ParkedEdited || got.EditedInto != into || got.SettledAt.IsZero() || string(got.Message.Body) != "body" {
		t.Errorf("the original is %+v, want it edited into %s", got, into)
	}
	if got := find(t, lot, into); got.State != consumer.ParkedWaiting || got.EditOf != p.ID || string(got.Message.Body) != "mended" {
		t.Errorf("the copy is %+v, want it to wait, as an edit of %s", got, p.ID)
	}
	if ids := list(t, lot, consumer.ParkedFilter{}); !slices.Equal(ids, []string{into}) {
		t.Errorf("%q wait, want the copy", ids)
	}
}

// Neither half of an edit is made: there would be two messages that somebody
// redrives, or none.
func replaceOfChanged(t testing.TB, lot consumer.ParkingLot) {
	p := parked(t, lot, "1")
	old := *p
	if err := consumer.DiscardParked(t.Context(), lot, p.ID); err != nil {
		t.Fatal(err)
	}
	next := *p
	next.ID, next.Message, next.EditOf = strings.Repeat("f", 32), wire(t, "2", "y"), p.ID
	for _, of := range []*consumer.Parked{&old, find(t, lot, p.ID)} {
		if err := lot.Replace(t.Context(), of, &next); !errors.Is(err, consumer.ErrParkedChanged) {
			t.Errorf("replace of what is settled: %v, want ErrParkedChanged", err)
		}
	}
	if _, err := lot.Find(t.Context(), next.ID); !errors.Is(err, consumer.ErrNotParked) {
		t.Errorf("the copy: %v, want ErrNotParked", err)
	}
	if got := find(t, lot, p.ID); got.State != consumer.ParkedDiscarded || got.EditedInto != "" {
		t.Errorf("the original is %+v, want it discarded", got)
	}
}

func pages(t testing.TB, lot consumer.ParkingLot) {
	var want, got []string
	for i := range 5 {
		want = append(want, parked(t, lot, fmt.Sprint(i)).ID)
	}
	filter := consumer.ParkedFilter{Limit: 2}
	for range 10 {
		page, err := lot.List(t.Context(), filter)
		if err != nil {
			t.Fatal(err)
		}
		if len(page.Records) > 2 {
			t.Errorf("a page of %d records, want 2 at most", len(page.Records))
		}
		for _, p := range page.Records {
			got = append(got, p.ID)
			if p.Message.Body != nil || p.Message.Header != nil || p.Message.Topic != "orders" || !strings.HasPrefix(p.Message.Position, "orders/0/") || p.Size != 4 {
				t.Errorf("listed is %+v with %+v", p, p.Message)
			}
		}
		if filter.After = page.Next; page.Next == "" {
			break
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("listed %q, parked %q", got, want)
	}
	if _, err := lot.List(t.Context(), consumer.ParkedFilter{After: "x"}); err == nil {
		t.Error("a list after nonsense is no error")
	}
}

func filters(t testing.TB, lot consumer.ParkingLot) {
	first, second := parked(t, lot, "1").ID, parked(t, lot, "2").ID
	park(t, lot, "email", wire(t, "1", "body"), 1, errBoom)
	if err := consumer.DiscardParked(t.Context(), lot, first); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		f    consumer.ParkedFilter
		want int
	}{
		{consumer.ParkedFilter{}, 2},
		{consumer.ParkedFilter{Consumer: "email"}, 1},
		{consumer.ParkedFilter{Consumer: "nobody"}, 0},
		{consumer.ParkedFilter{State: consumer.ParkedDiscarded}, 1},
		{consumer.ParkedFilter{State: consumer.ParkedDiscarded, Consumer: "email"}, 0},
	} {
		if ids := list(t, lot, c.f); len(ids) != c.want {
			t.Errorf("%+v: %q, want %d", c.f, ids, c.want)
		}
	}
	if ids := list(t, lot, consumer.ParkedFilter{Consumer: "billing"}); !slices.Equal(ids, []string{second}) {
		t.Errorf("listed %q, want %s", ids, second)
	}
}

// Several people redrive the same messages at once.
func redrives(t testing.TB, lot consumer.ParkingLot) {
	const people, messages = 4, 3
	var ids []string
	for i := range messages {
		ids = append(ids, parked(t, lot, fmt.Sprint(i)).ID)
	}
	var effects, done atomic.Int64
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), func(_ context.Context, tx *memdedupe.Tx, _ *envelope.Message) error {
		return tx.OnCommit(func() { effects.Add(1) })
	}, nil)
	var wg sync.WaitGroup
	for range people {
		wg.Go(func() {
			answers, err := consumer.Redrive(context.WithoutCancel(t.Context()), lot, h, nil, ids...)
			if err != nil {
				t.Error(err)
			}
			for _, a := range answers {
				switch a.Outcome {
				case consumer.RedriveDone:
					done.Add(1)
				case consumer.RedriveSkipped, consumer.RedriveRefused, consumer.RedriveUndecided: // the other one is at it
				default:
					t.Errorf("%s, %v", a.Outcome, a.Err)
				}
			}
		})
	}
	wg.Wait()
	if effects.Load() != messages || done.Load() != messages {
		t.Errorf("%d effects of %d redrives, want %d", effects.Load(), done.Load(), messages)
	}
	for _, id := range ids {
		if p := find(t, lot, id); p.State != consumer.ParkedRedriven {
			t.Errorf("it is %s, want it redriven", p.State)
		}
	}
}
