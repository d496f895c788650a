package consumer

import (
	"context"
	"strconv"

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
// bytes, key and headers, and headers that say why it is there. The error
// text becomes a header, so keep secrets out of errors.
func DeadLetterTo(pub brokers.Publisher, topic string) DeadLetter {
	return func(ctx context.Context, f *Failure) error {
		m := f.Message.Clone()
		m.Topic = topic
		m.Header.Set(HeaderDeadID, []byte(parkedID("", f.Message)))
		m.Header.Set(HeaderDeadReason, []byte(f.Reason))
		m.Header.Set(HeaderDeadError, []byte(errorText(f.Err)))
		m.Header.Set(HeaderDeadAttempts, []byte(strconv.Itoa(f.Attempts)))
		m.Header.Set(HeaderDeadFrom, []byte(f.Message.Position))
		return pub.Publish(ctx, []*envelope.Message{m}).Err()
	}
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
