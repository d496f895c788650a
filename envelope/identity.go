package envelope

import "errors"

// Identity names an event: CloudEvents makes source and id together unique.
type Identity struct{ Source, ID string }

// Extractor tells which event a message carries.
//
// Identify is pure: it reads m, keeps nothing of it, changes nothing in it and
// gives the same answer for the same message at any time, on any machine.
// It is called concurrently. It returns an error that matches [ErrNoID] when
// the message names no event, and one that matches [ErrMalformed] when what
// names it cannot be read; no other errors.
type Extractor interface {
	Identify(m *Message) (Identity, error)
}

// Decoder is an optional power of an [Extractor]: it turns the raw message of
// an adapter into the form a handler wants, with the event's attributes in
// their fields and the payload in Body. Decode leaves m untouched and may
// share its slices. It fails as Identify does.
type Decoder interface {
	Decode(m *Message) (*Message, error)
}

// ExtractorFunc makes an [Extractor] of a function.
type ExtractorFunc func(m *Message) (Identity, error)

// Identify calls f.
func (f ExtractorFunc) Identify(m *Message) (Identity, error) { return f(m) }

var (
	// ErrNoID is matched by errors about a message that names no event: the
	// id is missing, empty or blank. Such a message can never be deduplicated,
	// so it is dead-lettered, never retried.
	ErrNoID = errors.New("envelope: the message has no id")
	// ErrMalformed is matched by errors about an envelope that is there but
	// cannot be read. Retrying cannot help. errors.As with a [*FormatError]
	// tells what was wrong and where.
	ErrMalformed = errors.New("envelope: malformed")
)
