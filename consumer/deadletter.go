package consumer

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// Failure is a message that will not be tried again.
type Failure struct {
	// Message is the message as it was on the wire, bytes and headers.
	Message *envelope.Message
	// Class is ClassFailed (attempts spent), ClassPermanent, ClassMalformed,
	// ClassUncertain or ClassCrashLoop.
	Class Class
	// Reason is machine-readable: for a malformed envelope what is wrong with
	// it (envelope.Reason), ReasonBadPayload, ReasonUnrouted,
	// ReasonCrashLoop, otherwise the class.
	Reason string
	// Attempts is how often the handler failed on it, as far as is known here.
	Attempts int
	// Err is the last error.
	Err error
}

// DeadLetter puts a message where people will find it. The delivery is
// acknowledged only after it has returned nil; until then it is called again
// with back-off, and the handler is not. It may be called twice for one
// message, after a crash between its success and the acknowledgement.
type DeadLetter func(ctx context.Context, f *Failure) error

// Headers of a dead letter. Each occurs once, however often a message hops.
const (
	// HeaderDeadID is equal for two dead letters of one message from one position:
	// 32 hexadecimal digits. It covers the content, as the ID of a Parked does.
	HeaderDeadID = "unecho-dead-id"
	// HeaderDeadReason is Failure.Reason.
	HeaderDeadReason = "unecho-dead-reason"
	// HeaderDeadError is the text of the error, at most 1 KiB.
	HeaderDeadError = "unecho-dead-error"
	// HeaderDeadAttempts is Failure.Attempts.
	HeaderDeadAttempts = "unecho-dead-attempts"
	// HeaderDeadFrom is the position from which the message was taken.
	HeaderDeadFrom = "unecho-dead-from"
)

const maxErrorText = 1024

// DeadLetterTo publishes dead letters to a topic or subject: the original
// bytes, key and headers, and headers that say why it is there. Where the
// target answers that this is too large (brokers.ErrTooLarge), it is sent once
// more in the smallest form that is whole: of the headers above only
// HeaderDeadID and HeaderDeadReason. Where that does not fit either, the error
// matches brokers.ErrTooLarge; name another place by [FirstDeadLetter]. The error
// text becomes a header, so keep secrets out of errors.
func DeadLetterTo(pub brokers.Publisher, topic string) DeadLetter {
	return func(ctx context.Context, f *Failure) error {
		m := f.Message.Clone()
		m.Topic = topic
		m.Header.Set(HeaderDeadID, []byte(parkedID("", f.Message)))
		m.Header.Set(HeaderDeadReason, []byte(f.Reason))
		smallest := m.Clone()
		m.Header.Set(HeaderDeadError, []byte(errorText(f.Err)))
		m.Header.Set(HeaderDeadAttempts, []byte(strconv.Itoa(f.Attempts)))
		m.Header.Set(HeaderDeadFrom, []byte(f.Message.Position))
		err := pub.Publish(ctx, []*envelope.Message{m}).Err()
		if !errors.Is(err, brokers.ErrTooLarge) {
			return err
		}
		for _, ours := range [...]string{HeaderDeadError, HeaderDeadAttempts, HeaderDeadFrom} {
			smallest.Header.Del(ours) // of an earlier hop
		}
		return pub.Publish(ctx, []*envelope.Message{smallest}).Err()
	}
}

// missingFor is for how long a place has to answer that there is no such topic
// before it counts as a refusal. While a stream elects a leader the answer is
// the same.
const missingFor = 30 * time.Second

// missingApart is how far apart two such answers are to count as two absences.
const missingApart = time.Hour

// FirstDeadLetter puts a message into the first of places that takes it, for
// example the topic of the dead letters and, for what does not fit there, a
// parking lot. The next place is asked when one has refused the message
// definitely: its error matches brokers.ErrRejected, or is marked by [Permanent],
// or has matched brokers.ErrNoRoute for 30 seconds. Any other error may be an
// outage, after which the same place may take the message, or already has: it is
// returned, and the message is offered to the first place again. When all have
// refused it, the error joins their answers. It panics if there is no place, or
// one is nil.
func FirstDeadLetter(places ...DeadLetter) DeadLetter {
	if len(places) == 0 || slices.ContainsFunc(places, func(d DeadLetter) bool { return d == nil }) {
		panic("consumer: FirstDeadLetter: give at least one place, and none that is nil")
	}
	chain := make([]*deadPlace, len(places))
	for i, d := range places {
		chain[i] = &deadPlace{put: d}
	}
	return func(ctx context.Context, f *Failure) error {
		var refusals []error
		for _, p := range chain {
			err := p.put(ctx, f)
			if !p.refused(err) {
				return err
			}
			refusals = append(refusals, err)
		}
		return errors.Join(refusals...)
	}
}

// deadPlace is one of a chain.
type deadPlace struct {
	put     DeadLetter
	mu      sync.Mutex
	missing time.Time // since when it answers that there is no such topic
	last    time.Time // when it did so last
}

// refused reports whether err says for good that the place does not take a message.
func (p *deadPlace) refused(err error) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !errors.Is(err, brokers.ErrNoRoute) {
		p.missing = time.Time{}
		return errors.Is(err, brokers.ErrRejected) || IsPermanent(err)
	}
	now := time.Now()
	if p.missing.IsZero() || now.Sub(p.last) >= missingApart {
		p.missing = now
	}
	p.last = now
	return now.Sub(p.missing) >= missingFor
}

// Discard drops messages that cannot be handled. It is for those who can
// afford to lose them, and has to be asked for by name.
func Discard(context.Context, *Failure) error { return nil }

// errorText is err's text in one line of bounded length.
func errorText(err error) string {
	if err == nil {
		return ""
	}
	b := []byte(err.Error())
	b = b[:min(len(b), maxErrorText)]
	for i, c := range b {
		if c < 0x20 || c == 0x7f {
			b[i] = ' '
		}
	}
	return string(b)
}
