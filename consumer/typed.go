package consumer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/unecho/unecho/envelope"
)

// Codec decodes the body of a message into what a pointer points at. It is
// called concurrently. An error says that the body is not what it should be: no
// retry can mend that.
type Codec interface {
	Decode(m *envelope.Message, into any) error
}

// CodecFunc makes a [Codec] of a function.
type CodecFunc func(m *envelope.Message, into any) error

// Decode calls f.
func (f CodecFunc) Decode(m *envelope.Message, into any) error { return f(m, into) }

// JSON decodes one JSON document, and refuses a body with anything behind it.
// Unknown members are ignored, since producers add some: see StrictJSON.
var JSON Codec = jsonCodec{}

// StrictJSON is JSON, but refuses members that the type does not have.
var StrictJSON Codec = jsonCodec{strict: true}

type jsonCodec struct{ strict bool }

// Decode implements [Codec].
func (c jsonCodec) Decode(m *envelope.Message, into any) error {
	dec := json.NewDecoder(bytes.NewReader(m.Body))
	if c.strict {
		dec.DisallowUnknownFields()
	}
	if err := dec.Decode(into); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is something behind the JSON document")
	}
	return nil
}

// ReasonBadPayload is the reason of a dead letter whose body its codec refused.
const ReasonBadPayload = "bad_payload"

// PayloadError is what a codec said about a body. It matches
// envelope.ErrMalformed, so the message is dead-lettered at once.
type PayloadError struct {
	// Type is the event's, Into the Go type that its body was to become.
	Type, Into string
	// Err is the codec's. It may quote the body, so Error does not print it
	// unless it is a JSON error, which quotes at most one character.
	Err error
}

// Error says what was to be decoded into what.
func (e *PayloadError) Error() string {
	s := fmt.Sprintf("consumer: the body of an event of type %.100q is no %s", e.Type, e.Into)
	var syntax *json.SyntaxError
	var mismatch *json.UnmarshalTypeError
	switch {
	case errors.As(e.Err, &syntax):
		return fmt.Sprintf("%s: %v at byte %d", s, syntax, syntax.Offset)
	case errors.As(e.Err, &mismatch):
		return fmt.Sprintf("%s: a JSON %s stands where field %q has a %v", s, jsonKind(mismatch.Value), mismatch.Field, mismatch.Type)
	}
	return s
}

// jsonKind is the kind of a value that a mismatch names; for a number it may
// name the number as well.
func jsonKind(value string) string {
	kind, _, _ := bytes.Cut([]byte(value), []byte(" "))
	return string(kind)
}

// Unwrap returns the codec's error, and what makes it malformed.
func (e *PayloadError) Unwrap() []error { return []error{envelope.ErrMalformed, e.Err} }

// Typed makes a handler, for [Wrap], of one that takes the body decoded by c; nil
// is JSON. A body that c refuses never reaches h: the error is a *PayloadError,
// the transaction is rolled back, and the message goes to the dead letters.
func Typed[S, T any](c Codec, h func(ctx context.Context, scope S, m *envelope.Message, payload T) error) func(ctx context.Context, scope S, m *envelope.Message) error {
	if c == nil {
		c = JSON
	}
	return func(ctx context.Context, scope S, m *envelope.Message) error {
		var payload T
		if err := c.Decode(m, &payload); err != nil {
			return &PayloadError{Type: m.Type, Into: fmt.Sprintf("%T", payload), Err: err}
		}
		return h(ctx, scope, m, payload)
	}
}
