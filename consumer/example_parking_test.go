package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// memoryLot is a parking lot for the examples; a program takes the one of package
// pgparking.
type memoryLot struct {
	mu      sync.Mutex
	records []*consumer.Parked
}

func (l *memoryLot) at(id string) int {
	return slices.IndexFunc(l.records, func(p *consumer.Parked) bool { return p.ID == id })
}

func (l *memoryLot) Park(_ context.Context, p *consumer.Parked) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.park(p)
	return nil
}

func (l *memoryLot) park(p *consumer.Parked) {
	if i := l.at(p.ID); i >= 0 {
		old := l.records[i]
		old.Class, old.Reason, old.Error, old.Attempts, old.LastAt = p.Class, p.Reason, p.Error, max(old.Attempts, p.Attempts), time.Now()
		old.Version++
		return
	}
	c := *p
	c.Message, c.Version, c.ParkedAt, c.LastAt = p.Message.Clone(), 1, time.Now(), time.Now()
	l.records = append(l.records, &c)
}

func (l *memoryLot) Find(_ context.Context, id string) (*consumer.Parked, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := l.at(id)
	if i < 0 {
		return nil, consumer.ErrNotParked
	}
	c := *l.records[i]
	c.Message, c.Age = c.Message.Clone(), time.Since(c.ParkedAt)
	return &c, nil
}

func (l *memoryLot) List(_ context.Context, f consumer.ParkedFilter) (page consumer.ParkedPage, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.records {
		if f.State == p.State || f.State == "" && p.State == consumer.ParkedWaiting {
			c := *p
			page.Records = append(page.Records, &c)
		}
	}
	return page, nil
}

func (l *memoryLot) Update(_ context.Context, p *consumer.Parked) error {
	return l.change(p, func(old *consumer.Parked) {
		old.State, old.Class, old.Reason, old.Attempts, old.Error = p.State, p.Class, p.Reason, p.Attempts, p.Error
	})
}

func (l *memoryLot) Replace(_ context.Context, p, next *consumer.Parked) error {
	return l.change(p, func(old *consumer.Parked) {
		old.State, old.EditedInto = consumer.ParkedEdited, next.ID
		l.park(next)
	})
}

func (l *memoryLot) change(p *consumer.Parked, do func(old *consumer.Parked)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := l.at(p.ID)
	if i < 0 || l.records[i].Version != p.Version {
		return consumer.ErrParkedChanged
	}
	l.records[i].Version++
	do(l.records[i])
	return nil
}

// parkAll runs h until everything is handled or parked.
func parkAll(h consumer.Handler, lot consumer.ParkingLot) {
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	b := broker(ctx)
	if err := consumer.Run(ctx, b.Source("orders", "billing"), h, &consumer.RunOptions{DeadLetter: consumer.ParkIn(lot, "billing")}); err != nil {
		panic(err)
	}
}

// billing is a handler that cannot handle order 2 until it is mended.
func billing(mended *bool) consumer.Handler {
	return consumer.Wrap("billing", memdedupe.NewStore(nil), func(_ context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		if string(m.Body) == "order 2" && !*mended {
			return consumer.Permanent(errors.New("there is no such customer"))
		}
		fmt.Printf("billed %s\n", m.Body)
		return nil
	}, nil)
}

// What no retry can mend waits for a person, and is run once more when the reason
// is gone.
func ExampleRedrive() {
	ctx := context.Background()
	mended := false
	h, lot := billing(&mended), &memoryLot{}
	parkAll(h, lot)

	page, _ := lot.List(ctx, consumer.ParkedFilter{})
	for _, p := range page.Records {
		fmt.Printf("parked %s: %s\n", p.Message.Position, p.Error)
	}
	mended = true
	for _, p := range page.Records {
		answers, err := consumer.Redrive(ctx, lot, h, nil, p.ID)
		fmt.Println(answers[0].Outcome, answers[0].Err, err)
	}
	// Output:
	// billed order 1
	// parked orders/0/2: there is no such customer
	// billed order 2
	// redriven <nil> <nil>
}

// A message whose content is wrong is replaced by a corrected one, which is an
// event of its own and says what it is a copy of.
func ExampleEdit() {
	ctx := context.Background()
	mended := false
	h, lot := billing(&mended), &memoryLot{}
	parkAll(h, lot)

	page, _ := lot.List(ctx, consumer.ParkedFilter{})
	id, err := consumer.Edit(ctx, lot, page.Records[0].ID, func(m *envelope.Message) error {
		fmt.Println("a copy of", m.Extensions["unechoeditof"])
		m.Body = []byte("order 2b")
		return nil
	}, nil)
	if err != nil {
		panic(err)
	}
	answers, err := consumer.Redrive(ctx, lot, h, nil, id)
	fmt.Println(answers[0].Outcome, err)
	// Output:
	// billed order 1
	// a copy of 2
	// billed order 2b
	// redriven <nil>
}

// A person decides that a message is to have no effect.
func ExampleDiscardParked() {
	ctx := context.Background()
	mended := false
	lot := &memoryLot{}
	parkAll(billing(&mended), lot)

	page, _ := lot.List(ctx, consumer.ParkedFilter{})
	fmt.Println(consumer.DiscardParked(ctx, lot, page.Records[0].ID))
	page, _ = lot.List(ctx, consumer.ParkedFilter{State: consumer.ParkedDiscarded})
	fmt.Println(len(page.Records), page.Records[0].Reason)
	// Output:
	// billed order 1
	// <nil>
	// 1 permanent
}

// The messages that cannot be handled are kept by a lot.
func ExampleParkIn() {
	mended := false
	lot := &memoryLot{}
	parkAll(billing(&mended), lot)
	fmt.Println(len(lot.records), "parked")
	// Output:
	// billed order 1
	// 1 parked
}
