package consumer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"strings"
	"time"
	"unicode"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// ParkedState says what became of a message in a [ParkingLot].
type ParkedState string

const (
	// ParkedWaiting: a person has to decide about it. The other states are
	// settled, and only they are pruned.
	ParkedWaiting ParkedState = "parked"
	// ParkedRedriven: Redrive has run the handler, and its effect is durable.
	ParkedRedriven ParkedState = "redriven"
	// ParkedSkipped: Redrive has found the event done already.
	ParkedSkipped ParkedState = "skipped"
	// ParkedDiscarded: it is to have no effect.
	ParkedDiscarded ParkedState = "discarded"
	// ParkedEdited: a record with another content has replaced it.
	ParkedEdited ParkedState = "edited"
)

// ParkedStates are all states.
func ParkedStates() []ParkedState {
	return []ParkedState{ParkedWaiting, ParkedRedriven, ParkedSkipped, ParkedDiscarded, ParkedEdited}
}

// Parked is a message that waits for a person, or has waited.
type Parked struct {
	// ID is the same for all deliveries of one message from one position to
	// one consumer: 32 hexadecimal digits.
	ID string
	// Consumer is the name given to ParkIn.
	Consumer string
	// Class, Reason and Attempts are those of the [Failure], and of the last
	// run of Redrive. Reason is ReasonConflict if that met a conflict.
	Class    Class
	Reason   string
	Attempts int
	// Error is the text of the last error: one line of UTF-8, at most 1 KiB.
	Error string
	// Message is the message as it was on the wire: Topic, Position, Key, Body,
	// with nil and empty told apart, Time, and Header with its order and its
	// repetitions. In what List returns it has a Topic and a Position only.
	Message *envelope.Message
	// Size is that of the body in bytes; -1 for a nil one.
	Size int

	State ParkedState
	// EditOf is the ID of the record of which this is an edited copy, and
	// EditedInto that of the one by which this was replaced; empty if there is none.
	EditOf, EditedInto string

	// ParkedAt is when it was parked first, LastAt when last, and SettledAt
	// when its state ceased to be ParkedWaiting (zero before): by the lot's clock.
	ParkedAt, LastAt, SettledAt time.Time
	// Age is how long before it was read the message was parked first, by the
	// lot's clock alone.
	Age time.Duration
	// Version rises with every change.
	Version int64
}

// ParkedFilter selects records.
type ParkedFilter struct {
	// State defaults to ParkedWaiting.
	State ParkedState
	// Consumer, if not empty, is that of the records.
	Consumer string
	// After is ParkedPage.Next of the page before; empty for the first one.
	After string
	// Limit is how many records a page has at most. Defaults to 100, the most
	// is 1,000.
	Limit int
}

// PageSize is Limit with its default and its bound.
func (f ParkedFilter) PageSize() int { return dedupe.Filter{Limit: f.Limit}.PageSize() }

// ParkedPage is a part of a list.
type ParkedPage struct {
	Records []*Parked
	// Next continues the list; empty at its end.
	Next string
}

var (
	// ErrNotParked: the lot has no record with this id.
	ErrNotParked = errors.New("consumer: there is no parked message with this id")
	// ErrParkedChanged: the record is not in the version, or not in the state,
	// that the change was made for. Nothing was changed: find it again.
	ErrParkedChanged = errors.New("consumer: the parked message was changed meanwhile")
)

// ParkingLot keeps messages that cannot be handled until a person has decided
// about them. It is safe for concurrent use. An outage is an error that matches
// dedupe.ErrUnavailable. If the answer to a change was lost, the error matches
// dedupe.ErrUnknownOutcome: it was made, or was not.
type ParkingLot interface {
	// Park stores p, with the state ParkedWaiting, and returns nil only when
	// that is durable. If the lot has a record with p.ID, that one stays, with
	// its state and the time when it was parked first: its Class, Reason and
	// Error become those of p, and its Attempts if p's are more. A decision
	// that was made about a message is not undone by a redelivery. The times,
	// State, Age, Size and Version of p are not looked at. p stays the caller's.
	Park(ctx context.Context, p *Parked) error
	// Find returns a record. The error matches ErrNotParked if there is none.
	Find(ctx context.Context, id string) (*Parked, error)
	// List returns records without their payloads, in the order in which they
	// were parked, page by page.
	List(ctx context.Context, f ParkedFilter) (ParkedPage, error)
	// Update stores State, Class, Reason, Attempts and Error of p, if the
	// record still has p.Version; otherwise the error matches ErrParkedChanged,
	// also if there is no such record any more.
	Update(ctx context.Context, p *Parked) error
	// Replace parks next and makes p, which is in the state ParkedWaiting, an
	// edited one that points to it: both or neither. It fails as Update does.
	Replace(ctx context.Context, p, next *Parked) error
}

// ParkIn keeps the messages that cannot be handled in lot. The delivery is
// acknowledged only after its record is durable, and parking it again, after a
// crash or a lost answer, finds that record. consumer is the name given to Wrap
// (with Route, one of your choice): it is part of the record's id, so several
// consumers share a lot.
//
// The text of the error is stored, so keep secrets out of errors. It panics if
// lot is nil or consumer is empty.
func ParkIn(lot ParkingLot, consumer string) DeadLetter {
	switch {
	case lot == nil:
		panic("consumer: ParkIn: the lot is nil")
	case consumer == "":
		panic("consumer: ParkIn: the consumer is empty; give the name that was given to Wrap")
	}
	return func(ctx context.Context, f *Failure) error {
		return lot.Park(ctx, &Parked{
			ID: parkedID(consumer, f.Message), Consumer: consumer, Message: f.Message, State: ParkedWaiting,
			Class: f.Class, Reason: f.Reason, Attempts: f.Attempts, Error: parkedError(f.Err),
		})
	}
}

// DiscardParked decides that messages are to have no effect. Redelivered, they
// fail again and stay discarded. It changes those before the first error, which
// matches ErrNotParked or ErrParkedChanged for a record that is not there or is
// settled already.
func DiscardParked(ctx context.Context, lot ParkingLot, ids ...string) error {
	for _, id := range ids {
		p, err := findWaiting(ctx, lot, id)
		if err != nil {
			return err
		}
		p.State = ParkedDiscarded
		if err := lot.Update(ctx, p); err != nil {
			return fmt.Errorf("consumer: discard %s: %w", id, err)
		}
	}
	return nil
}

// findWaiting returns a record about which nobody has decided.
func findWaiting(ctx context.Context, lot ParkingLot, id string) (*Parked, error) {
	p, err := lot.Find(ctx, id)
	if err == nil && p.State != ParkedWaiting {
		err = fmt.Errorf("%w: it is %s", ErrParkedChanged, p.State)
	}
	if err != nil {
		return nil, fmt.Errorf("consumer: %s: %w", id, err)
	}
	return p, nil
}

// parkedID is a function of the consumer, the position and the content. The
// content is in it because a position alone can come to mean another message,
// when a topic is deleted and created again, and because a source may have no
// positions: a second message must never be taken for the first one.
func parkedID(consumer string, m *envelope.Message) string {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(consumer), []byte(m.Topic), []byte(m.Position), m.Key, m.Body} {
		writePart(h, part)
	}
	for _, f := range m.Header {
		writePart(h, []byte(f.Name))
		writePart(h, f.Value)
	}
	for _, part := range []string{m.ID, m.Source, m.Type} { // of an adapter that decodes by itself
		writePart(h, []byte(part))
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// writePart writes a part so that no two lists of parts are one text. Nil and
// empty are two parts.
func writePart(h hash.Hash, part []byte) {
	n := uint64(len(part)) + 1
	if part == nil {
		n = 0
	}
	h.Write(binary.AppendUvarint(nil, n))
	h.Write(part)
}

// parkedError is errorText as every database can keep it, and every terminal bear
// it.
func parkedError(err error) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(errorText(err), "?"))
}
