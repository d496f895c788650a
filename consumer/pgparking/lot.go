package pgparking

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// NewLot returns the parking lot in the database of pool, which stays the
// caller's. o may be nil. Nothing is sent yet: see [Migrate] and [Validate]. It
// panics if pool is nil, or with [Options.Check]'s error.
func NewLot(pool *pgxpool.Pool, o *Options) *Lot {
	if pool == nil {
		panic("pgparking: NewLot: the pool is nil")
	}
	return &Lot{newDB(pool, o)}
}

// Lot implements [consumer.ParkingLot]. It is safe for concurrent use. Beside
// what that says, its errors match dedupe.ErrContention if a statement lost
// against others, and the context's if that was done first. A table that is
// missing is an outage.
type Lot struct{ db db }

// Park implements [consumer.ParkingLot].
func (l *Lot) Park(ctx context.Context, p *consumer.Parked) error {
	_, err := l.db.change(ctx, "park", l.db.sql.park, append(append([]any{text(p.ID)}, message(p)...), text(p.EditOf))...)
	return err
}

// message are the columns of a record that park and replace write.
func message(p *consumer.Parked) []any {
	m := p.Message
	return []any{text(p.Consumer), text(string(p.Class)), text(p.Reason), p.Attempts, text(p.Error),
		text(m.Topic), text(m.Position), m.Key, m.Body, encodeMeta(m)}
}

// Find implements [consumer.ParkingLot].
func (l *Lot) Find(ctx context.Context, id string) (*consumer.Parked, error) {
	found, err := rows(ctx, l.db, "find", false, scanWhole, l.db.sql.find, text(id))
	switch {
	case err != nil:
		return nil, err
	case len(found) == 0:
		return nil, fmt.Errorf("pgparking: %w", consumer.ErrNotParked)
	}
	return found[0].p, nil
}

// List implements [consumer.ParkingLot].
func (l *Lot) List(ctx context.Context, f consumer.ParkedFilter) (consumer.ParkedPage, error) {
	var after int64
	if f.After != "" {
		var err error
		if after, err = strconv.ParseInt(f.After, 10, 64); err != nil {
			return consumer.ParkedPage{}, fmt.Errorf("pgparking: list: %q does not continue a list", f.After)
		}
	}
	if f.State == "" {
		f.State = consumer.ParkedWaiting
	}
	found, err := rows(ctx, l.db, "list", false, scanSlim, l.db.sql.list, text(string(f.State)), text(f.Consumer), after, f.PageSize())
	if err != nil {
		return consumer.ParkedPage{}, err
	}
	page := consumer.ParkedPage{Records: make([]*consumer.Parked, len(found))}
	for i, r := range found {
		page.Records[i] = r.p
	}
	if len(found) >= f.PageSize() {
		page.Next = strconv.FormatInt(found[len(found)-1].seq, 10)
	}
	return page, nil
}

// Update implements [consumer.ParkingLot].
func (l *Lot) Update(ctx context.Context, p *consumer.Parked) error {
	return l.compareAndSet(ctx, "update", l.db.sql.update,
		text(p.ID), p.Version, text(string(p.State)), text(string(p.Class)), text(p.Reason), p.Attempts, text(p.Error))
}

// Replace implements [consumer.ParkingLot].
func (l *Lot) Replace(ctx context.Context, p, next *consumer.Parked) error {
	return l.compareAndSet(ctx, "replace", l.db.sql.replace, append([]any{text(p.ID), p.Version, text(next.ID)}, message(next)...)...)
}

func (l *Lot) compareAndSet(ctx context.Context, op, statement string, args ...any) error {
	n, err := l.db.change(ctx, op, statement, args...)
	if err == nil && n == 0 {
		err = fmt.Errorf("pgparking: %s: %w", op, consumer.ErrParkedChanged)
	}
	return err
}

// Counts are the numbers of records.
type Counts struct {
	// States has every state. A number is exact below dedupe.CountCap, and means
	// that or more there.
	States map[consumer.ParkedState]int64
	// Oldest is when the message that has waited longest was parked first, by the
	// database's clock; zero if none waits.
	Oldest time.Time
}

// Counts returns numbers for a glance. It reads no more than dedupe.CountCap
// rows of a state.
func (l *Lot) Counts(ctx context.Context) (Counts, error) {
	c := Counts{States: make(map[consumer.ParkedState]int64)}
	var states []string // which every mode of pgx can encode, other than a slice of states
	for _, s := range consumer.ParkedStates() {
		states = append(states, string(s))
	}
	_, err := rows(ctx, l.db, "count", false, func(row pgx.CollectableRow) (struct{}, error) {
		var state consumer.ParkedState
		var n int64
		var oldest *time.Time
		err := row.Scan(&state, &n, &oldest)
		c.States[state] = n
		if state == consumer.ParkedWaiting && oldest != nil {
			c.Oldest = *oldest
		}
		return struct{}{}, err
	}, l.db.sql.counts, states, dedupe.CountCap)
	return c, err
}

// record is a row.
type record struct {
	p   *consumer.Parked
	seq int64
}

// scanRecord reads the columns, and then those behind them into more.
func scanRecord(row pgx.CollectableRow, more ...any) (record, error) {
	r := record{p: &consumer.Parked{Message: &envelope.Message{}}}
	p := r.p
	var settled *time.Time
	var seconds float64
	into := []any{&p.ID, &r.seq, &p.Consumer, &p.State, &p.Class, &p.Reason, &p.Attempts, &p.Error, &p.EditOf, &p.EditedInto,
		&p.ParkedAt, &p.LastAt, &settled, &seconds, &p.Version, &p.Size}
	err := row.Scan(append(into, more...)...)
	if settled != nil {
		p.SettledAt = *settled
	}
	p.Age = time.Duration(seconds * float64(time.Second))
	return r, err
}

func scanSlim(row pgx.CollectableRow) (record, error) {
	var topic, position string
	r, err := scanRecord(row, &topic, &position)
	r.p.Message.Topic, r.p.Message.Position = topic, position
	return r, err
}

func scanWhole(row pgx.CollectableRow) (record, error) {
	var key, body, meta []byte
	r, err := scanRecord(row, &key, &body, &meta)
	if err != nil {
		return r, err
	}
	if r.p.Message, err = decodeMeta(meta); err != nil {
		return r, errors.Join(errMeta, err)
	}
	r.p.Message.Key, r.p.Message.Body = key, body
	return r, nil
}

// text is s as a column of that type can hold it: without NUL, and in UTF-8, which
// Map makes of anything. What is for people may lose what is no text; refusing it
// would let the message block what is behind it.
func text(s string) string {
	return strings.Map(func(r rune) rune {
		if r == 0 {
			return ' '
		}
		return r
	}, s)
}
