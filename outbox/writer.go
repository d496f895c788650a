package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/unecho/unecho/envelope"
)

// WriterOptions are the settings of [NewWriter]. The zero value, and nil, is
// the default.
type WriterOptions struct {
	// Source is given to messages that have none.
	Source string
	// MaxBytes bounds body, key and headers of one message together. A row
	// that no broker takes would only be found out by the relay, long after
	// the business transaction. Defaults to 900 KiB, which fits the default
	// limits of Kafka and NATS with room for the envelope.
	MaxBytes int
}

const defaultMaxBytes = 900 << 10

// Writer writes messages into the outbox, in the transaction of the business
// change that they tell of. It is safe for concurrent use.
type Writer[Tx any] struct {
	to Appender[Tx]
	o  WriterOptions
}

// NewWriter returns a writer. o may be nil. It panics if to is nil.
func NewWriter[Tx any](to Appender[Tx], o *WriterOptions) *Writer[Tx] {
	if to == nil {
		panic("outbox: NewWriter: the appender is nil")
	}
	w := &Writer[Tx]{to: to}
	if o != nil {
		w.o = *o
	}
	if w.o.MaxBytes <= 0 {
		w.o.MaxBytes = defaultMaxBytes
	}
	return w
}

// Write adds msgs to the outbox in tx, in their order. They are published if
// and only if tx commits, at least once, and after the earlier messages of
// the same topic and key whose transactions were serialised with this one, as
// those are that lock the same row first.
//
// A message needs a Topic, a Type, and a Source unless the writer has one. ID,
// Time and Source are set in the message where they are empty, so the caller
// knows what will be published. A message that cannot be published on any
// broker is refused with an error that matches ErrInvalidMessage and says
// which one and why; nothing is written then, and tx is as it was. Any other
// error is the database's.
func (w *Writer[Tx]) Write(ctx context.Context, tx Tx, msgs ...*envelope.Message) error {
	now := time.Now()
	for i, m := range msgs {
		if m == nil {
			return fmt.Errorf("%w: message %d is nil", ErrInvalidMessage, i)
		}
		w.fill(m, now)
		if err := w.check(m); err != nil {
			return fmt.Errorf("%w: message %d: %w", ErrInvalidMessage, i, err)
		}
	}
	if len(msgs) == 0 {
		return nil
	}
	return w.to.Append(ctx, tx, msgs)
}

func (w *Writer[Tx]) fill(m *envelope.Message, now time.Time) {
	if m.ID == "" {
		m.ID = envelope.NewID()
	}
	if m.Source == "" {
		m.Source = w.o.Source
	}
	if m.Time.IsZero() {
		m.Time = now
	}
}

func (w *Writer[Tx]) check(m *envelope.Message) error {
	if err := checkTopic(m.Topic); err != nil {
		return err
	}
	if _, err := envelope.Kafka.Encode(m, envelope.Binary); err != nil {
		return err
	}
	for name, v := range map[string]string{"subject": m.Subject, "content type": m.ContentType, "data schema": m.DataSchema} {
		if strings.ContainsRune(v, 0) { // which would end the transaction in PostgreSQL
			return fmt.Errorf("the %s has a NUL character", name)
		}
	}
	size := len(m.Body) + len(m.Key)
	for _, f := range m.Header {
		size += len(f.Name) + len(f.Value)
	}
	if size > w.o.MaxBytes {
		return fmt.Errorf("body, key and headers have %d bytes, %d are allowed (WriterOptions.MaxBytes)", size, w.o.MaxBytes)
	}
	return nil
}

func checkTopic(topic string) error {
	switch {
	case topic == "":
		return errors.New("the topic is empty")
	case !utf8.ValidString(topic):
		return errors.New("the topic is not valid UTF-8")
	case strings.ContainsFunc(topic, func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }):
		return errors.New("the topic has white space or control characters")
	}
	return nil
}
