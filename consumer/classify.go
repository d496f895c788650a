package consumer

import (
	"context"
	"errors"
	"slices"

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
	// run, no connection of the pool was free, or its tenant has too many new
	// keys. It is tried again later, and no attempt is spent.
	ClassContention Class = "contention"
	// ClassUnknown: the answer to the commit was lost. It is tried again at
	// once, the key decides, and no attempt is spent.
	ClassUnknown Class = "unknown"
	// ClassUnavailable: the store or a broker is out of reach, the handler has
	// marked the outage of something that it needs, or the log is another one
	// than it was (dedupe.ErrLogReplaced). The delivery is tried again, and no
	// attempt is spent. When different messages meet it, consumption pauses until
	// it is back. An outage that one message meets again and again while others are
	// served is that message's failure.
	ClassUnavailable Class = "unavailable"
)

// Classify judges the error of a handler as [Run] does, but for
// RunOptions.Classify. An outage is what the store or the broker says of itself,
// or what a handler has marked by [Unavailable] or [Dependency]; it is recognised
// before anything else that the error may also be. Whatever else a handler
// inside [Wrap] has met, a refused connection or the outage of another database,
// is the failure of its message, also if the error matches one of the store's.
func Classify(err error) Class {
	switch {
	case err == nil:
		return ClassNone
	case stated(err, dedupe.ErrUnknownOutcome):
		return ClassUnknown
	case stated(err, dedupe.ErrInProgress), stated(err, dedupe.ErrLeaseLost):
		return ClassInProgress
	case isOutage(err):
		return ClassUnavailable
	case stated(err, dedupe.ErrContention), stated(err, dedupe.ErrRateLimited), stated(err, dedupe.ErrBusy):
		return ClassContention
	case stated(err, dedupe.ErrParked):
		return ClassUncertain
	case errors.Is(err, ErrCrashLoop):
		return ClassCrashLoop
	case IsPermanent(err), stated(err, dedupe.ErrReplyTooLarge):
		return ClassPermanent
	case errors.Is(err, envelope.ErrNoID), errors.Is(err, envelope.ErrMalformed), stated(err, dedupe.ErrInvalidKey), stated(err, dedupe.ErrWeakKey):
		return ClassMalformed
	}
	return ClassFailed
}

// isOutage reports whether something was out of reach that is not the message's
// own. A deadline that passed is none: a handler that always takes too long would
// never be dead-lettered. Nor is a broken connection: the store says so if it was
// its own, and if it was another one, the others of the consumer do not need it.
func isOutage(err error) bool {
	var marked *unavailableError
	return errors.As(err, &marked) || isStores(err) || isBrokers(err)
}

func isStores(err error) bool {
	return stated(err, dedupe.ErrUnavailable) || stated(err, dedupe.ErrLogReplaced)
}

func isBrokers(err error) bool { return stated(err, brokers.ErrUnavailable) }

// mayCharge reports whether an outage can turn out to be a message's own. That a
// log was replaced, or has no places, is for a person to settle; no message of it
// is to be dead-lettered.
func mayCharge(err error) bool {
	return !stated(err, dedupe.ErrLogReplaced) && !errors.Is(err, errNoPlace)
}

// handlerError is what the function inside Wrap has returned, on its way through
// the store. A handler may have met the outage of another store, or of a broker
// that it publishes to, and its error then matches what the own store would say.
type handlerError struct{ err error }

func (e *handlerError) Error() string { return e.err.Error() }
func (e *handlerError) Unwrap() error { return e.err }

// ofHandler marks what a handler has returned.
func ofHandler(err error) error {
	if err == nil {
		return nil
	}
	return &handlerError{err}
}

// stated reports whether err matches target as errors.Is does, but for what a
// handler inside Wrap has returned.
func stated(err, target error) bool {
	for err != nil {
		if _, handlers := err.(*handlerError); handlers { //nolint:errorlint // err is unwrapped here
			return false
		}
		if err == target { //nolint:errorlint // see above
			return true
		}
		if is, ok := err.(interface{ Is(target error) bool }); ok && is.Is(target) { //nolint:errorlint // see above
			return true
		}
		switch u := err.(type) { //nolint:errorlint // see above
		case interface{ Unwrap() error }:
			err = u.Unwrap()
		case interface{ Unwrap() []error }:
			return slices.ContainsFunc(u.Unwrap(), func(err error) bool { return stated(err, target) })
		default:
			return false
		}
	}
	return false
}

// classify is Classify with the user's judgement of what is the handler's.
func (o *RunOptions) classify(err error) Class {
	class := Classify(err)
	if o.Classify == nil || err == nil {
		return class
	}
	var own *handlerError
	switch {
	case errors.As(err, &own) && !statesAny(err):
		err = own.err
	case class != ClassFailed && class != ClassPermanent:
		return class // the store's word, the broker's, or an envelope's
	}
	switch theirs := o.Classify(err); theirs {
	case ClassFailed, ClassPermanent, ClassContention, ClassUnavailable:
		return theirs
	}
	return class
}

// statesAny reports whether the store has said something of its own in err.
func statesAny(err error) bool {
	for _, said := range [...]error{dedupe.ErrUnknownOutcome, dedupe.ErrInProgress, dedupe.ErrLeaseLost, dedupe.ErrUnavailable, dedupe.ErrLogReplaced,
		dedupe.ErrContention, dedupe.ErrRateLimited, dedupe.ErrBusy, dedupe.ErrParked, dedupe.ErrReplyTooLarge, dedupe.ErrScope} {
		if stated(err, said) {
			return true
		}
	}
	return false
}

// cutShort reports whether err is the end of the context that the handler was
// given, brought about by the runtime: no fault of the message.
func cutShort(ctx context.Context, err error) bool {
	cause := context.Cause(ctx)
	return err != nil && (errors.Is(cause, errDraining) || errors.Is(cause, brokers.ErrLost))
}
