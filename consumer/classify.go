package consumer

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// Class says what an error of a handler means for the delivery.
type Class string

const (
	// ClassNone: no error.
	ClassNone Class = ""
	// ClassFailed: the handler failed on this message. It is tried again, and
	// dead-lettered when its attempts are spent.
	ClassFailed Class = "failed"
	// ClassPermanent: it was marked by Permanent, dead-lettered at once.
	ClassPermanent Class = "permanent"
	// ClassMalformed: the envelope names no event or cannot be read. It is
	// dead-lettered at once.
	ClassMalformed Class = "malformed"
	// ClassUncertain: an earlier attempt has vanished, and the policy is that a
	// person finds out what came of it. It is dead-lettered at once; its key
	// stays parked.
	ClassUncertain Class = "uncertain"
	// ClassCrashLoop: the process has ended whenever the message was handled. It
	// is dead-lettered at once.
	ClassCrashLoop Class = "crash loop"
	// ClassInProgress: another delivery of the event is at work, or has taken
	// its lease over. It is tried again later, and no attempt is spent.
	ClassInProgress Class = "in progress"
	// ClassContention: the transaction lost against others as often as it was
	// run, or its tenant has too many new keys. It is tried again later, and no
	// attempt is spent.
	ClassContention Class = "contention"
	// ClassUnknown: the answer to the commit was lost. It is tried again at
	// once, the key decides, and no attempt is spent.
	ClassUnknown Class = "unknown"
	// ClassUnavailable: the store or a broker is out of reach, or the log is
	// another one than it was (dedupe.ErrLogReplaced). Consumption pauses until
	// it is back, and no attempt is spent.
	ClassUnavailable Class = "unavailable"
)

// Classify judges an error that a handler returned. An outage is recognised
// before anything else that the error may also be: no message is dead-lettered
// for an outage, however a handler wrapped it.
func Classify(err error) Class {
	switch {
	case err == nil:
		return ClassNone
	case errors.Is(err, dedupe.ErrUnknownOutcome):
		return ClassUnknown
	case errors.Is(err, dedupe.ErrInProgress), errors.Is(err, dedupe.ErrLeaseLost):
		return ClassInProgress
	case isOutage(err):
		return ClassUnavailable
	case errors.Is(err, dedupe.ErrContention), errors.Is(err, dedupe.ErrRateLimited):
		return ClassContention
	case errors.Is(err, dedupe.ErrParked):
		return ClassUncertain
	case errors.Is(err, ErrCrashLoop):
		return ClassCrashLoop
	case IsPermanent(err), errors.Is(err, dedupe.ErrReplyTooLarge):
		return ClassPermanent
	case errors.Is(err, envelope.ErrNoID), errors.Is(err, envelope.ErrMalformed), errors.Is(err, dedupe.ErrInvalidKey), errors.Is(err, dedupe.ErrWeakKey):
		return ClassMalformed
	}
	return ClassFailed
}

// isOutage reports whether something was out of reach. A deadline that passed
// is none: a handler that always takes too long would never be dead-lettered.
func isOutage(err error) bool {
	var marked *unavailableError
	if errors.As(err, &marked) {
		return true
	}
	for _, target := range [...]error{
		dedupe.ErrUnavailable, dedupe.ErrLogReplaced, brokers.ErrUnavailable,
		syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE, syscall.EHOSTUNREACH, syscall.ENETUNREACH,
		io.ErrUnexpectedEOF, net.ErrClosed,
	} {
		if errors.Is(err, target) {
			return true
		}
	}
	var dns *net.DNSError
	if errors.As(err, &dns) {
		return dns.IsTemporary || dns.IsTimeout
	}
	return false
}

// cutShort reports whether err is the end of the context that the handler was
// given, brought about by the runtime: no fault of the message.
func cutShort(ctx context.Context, err error) bool {
	cause := context.Cause(ctx)
	return err != nil && (errors.Is(cause, errDraining) || errors.Is(cause, brokers.ErrLost))
}
