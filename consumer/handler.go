package consumer

import (
	"context"
	"errors"
	"fmt"

	"github.com/unecho/unecho/envelope"
)

// Handler handles one delivery of a message. Nil means that the delivery may
// be acknowledged, because its effect is durable or it is to have none. Handle
// is called concurrently for messages of different lanes.
type Handler interface {
	Handle(ctx context.Context, m *envelope.Message) error
}

// HandlerFunc makes a [Handler] of a function.
type HandlerFunc func(ctx context.Context, m *envelope.Message) error

// Handle calls f.
func (f HandlerFunc) Handle(ctx context.Context, m *envelope.Message) error { return f(ctx, m) }

// Permanent marks an error as one that no retry can mend: the message goes to
// the dead letters at once. Permanent of nil is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// Unavailable marks an error as the outage of something that every message
// needs, such as another service: when different messages meet it and none gets
// through, consumption pauses and probes until it is back, and no attempt is
// spent. One message that meets it while others are handled has failed: what only
// some messages need is a [Dependency]. An outage of the store is recognised
// without. Unavailable of nil is nil.
func Unavailable(err error) error {
	if err == nil {
		return nil
	}
	return &unavailableError{err: err}
}

type unavailableError struct {
	err error
	of  Dependency // empty: every message needs it
}

func (e *unavailableError) Error() string { return e.err.Error() }
func (e *unavailableError) Unwrap() error { return e.err }

// IsPermanent reports whether err was marked by [Permanent].
func IsPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p)
}

// PanicError is what a panic of a handler becomes. It counts as a failed
// attempt, like any other error.
type PanicError struct {
	// Value is what was passed to panic. It may hold anything, so Error does
	// not print it unless it is an error or a runtime message.
	Value any
	// Stack is the stack of the goroutine that panicked.
	Stack []byte
}

func (e *PanicError) Error() string {
	if err, ok := e.Value.(error); ok {
		return "consumer: the handler panicked: " + err.Error()
	}
	return fmt.Sprintf("consumer: the handler panicked with a %T", e.Value)
}

// Unwrap returns the error that was passed to panic, or nil.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
