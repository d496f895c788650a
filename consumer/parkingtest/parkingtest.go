// Package parkingtest is the conformance suite of what package consumer keeps
// about messages that cannot be handled: [RunLot] shows that a parking lot keeps
// its contract, and [RunCounter] that a counter of starts does.
package parkingtest

import (
	"errors"
	"testing"
	"time"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/envelope"
)

// LotCase is one case of the suite of lots. It needs an empty lot.
type LotCase struct {
	Name string
	Func func(t testing.TB, lot consumer.ParkingLot)
}

// RunLot runs every case on a lot of its own. What open returns is empty and kept in a
// real store.
func RunLot(t *testing.T, open func(t testing.TB) consumer.ParkingLot) {
	for _, c := range LotCases() {
		t.Run(c.Name, func(t *testing.T) { c.Func(t, open(t)) })
	}
}

// LotCases returns the cases of [RunLot].
func LotCases() []LotCase {
	return []LotCase{
		{"messages are kept as on the wire", keptAsOnTheWire},
		{"a record is nobody's but the lot's", nothingShared},
		{"no error text keeps a message from being parked", oddTexts},
		{"parking again is one record", parkedAgain},
		{"a redelivery undoes no decision", decisionStays},
		{"other messages are other records", otherMessages},
		{"of two changes for one version one is made", compareAndSet},
		{"an update changes what it says", updates},
		{"an edit is whole", replaces},
		{"an edit of what was changed is nothing", replaceOfChanged},
		{"lists by page, without payloads", pages},
		{"lists by state and consumer", filters},
		{"redrives at once have one effect and one record", redrives},
	}
}

// CounterCase is one case of the suite of counters. Every call of open returns
// the same empty counts as another process sees them.
type CounterCase struct {
	Name string
	Func func(t testing.TB, open func() consumer.StartCounter)
}

// RunCounter runs every case on counts of their own. open returns what gives
// access to them, for one process at each call.
func RunCounter(t *testing.T, open func(t testing.TB) func() consumer.StartCounter) {
	for _, c := range CounterCases() {
		t.Run(c.Name, func(t *testing.T) { c.Func(t, open(t)) })
	}
}

// CounterCases returns the cases of [RunCounter].
func CounterCases() []CounterCase {
	return []CounterCase{
		{"starts count until their end", countUntilEnd},
		{"starts count for all processes", countForAll},
		{"starts are counted up to a bound", countToBound},
		{"starts at once are all counted", countAtOnce},
		{"an end is that of its places alone", endsApart},
	}
}

var errBoom = errors.New("boom")

// wire is an event as Kafka hands it over.
func wire(t testing.TB, id, body string) *envelope.Message {
	t.Helper()
	m, err := envelope.Kafka.Encode(&envelope.Message{ID: id, Source: "/shop", Type: "placed", Topic: "orders", Key: []byte("c"), Body: []byte(body),
		Time: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)}, envelope.Binary)
	if err != nil {
		t.Fatal(err)
	}
	m.Position = "orders/0/" + id
	return m
}

// park parks m, which failed with err, for a consumer.
func park(t testing.TB, lot consumer.ParkingLot, name string, m *envelope.Message, attempts int, err error) {
	t.Helper()
	f := &consumer.Failure{Message: m, Class: consumer.ClassFailed, Reason: "failed", Attempts: attempts, Err: err}
	if err := consumer.ParkIn(lot, name)(t.Context(), f); err != nil {
		t.Fatalf("Park: %v", err)
	}
}

// parked parks an event for billing, and returns its record.
func parked(t testing.TB, lot consumer.ParkingLot, id string) *consumer.Parked {
	t.Helper()
	park(t, lot, "billing", wire(t, id, "body"), 10, errBoom)
	ids := list(t, lot, consumer.ParkedFilter{})
	if len(ids) == 0 {
		t.Fatal("what was parked is not listed")
	}
	return find(t, lot, ids[len(ids)-1])
}

func find(t testing.TB, lot consumer.ParkingLot, id string) *consumer.Parked {
	t.Helper()
	p, err := lot.Find(t.Context(), id)
	if err != nil {
		t.Fatalf("Find: %v", err)
	}
	return p
}

// list returns the ids of the first page.
func list(t testing.TB, lot consumer.ParkingLot, f consumer.ParkedFilter) (ids []string) {
	t.Helper()
	page, err := lot.List(t.Context(), f)
	if err != nil {
		t.Fatalf("List: %v", err)
	}
	for _, p := range page.Records {
		ids = append(ids, p.ID)
	}
	return ids
}
