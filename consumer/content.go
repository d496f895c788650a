package consumer

import (
	"fmt"
	"strings"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// Meaning is what makes the meaning of a message: two deliveries of one identity
// whose meanings differ are a conflict. Its slices may share the message's bytes.
type Meaning struct {
	// Parts are compared, in order. None make every delivery the same.
	Parts [][]byte
	// Document, if it is a JSON object, lets the record of a conflict name the
	// fields that differ; see dedupe.JSONFields for what is kept of it. It is
	// not compared.
	Document []byte
}

// Content says what of a message makes its meaning. It is pure and called
// concurrently.
type Content func(m *envelope.Message) Meaning

// RawContent is the type and the body, byte for byte. A tombstone and an empty
// body are one content: not every broker can tell them apart, and a copy must
// not become a conflict on its way through one that cannot.
func RawContent(m *envelope.Message) Meaning {
	return Meaning{Parts: [][]byte{[]byte(m.Type), m.Body}}
}

// JSONContent is the type and the body as a JSON document, whose members may
// come in any order and with any space: for producers that encode an event anew
// when they send it again. Conflicts name the fields that differ. A body that is
// no such document is taken raw.
func JSONContent(m *envelope.Message) Meaning {
	if c, ok := dedupe.CanonicalJSON(m.Body); ok {
		return Meaning{Parts: [][]byte{[]byte(m.Type), []byte("json"), c}, Document: m.Body}
	}
	return RawContent(m)
}

// FieldsContent is the type and the chosen fields of a JSON body: for producers
// that put into a body what changes whenever it is sent, such as a time of
// sending. pointers are JSON pointers (RFC 6901) through objects, such as
// "/order/id"; a field that is not there is a content of its own. A body that is
// no JSON document is taken raw. It panics if there is no pointer, or one does
// not begin with a slash.
func FieldsContent(pointers ...string) Content {
	if len(pointers) == 0 {
		panic("consumer: FieldsContent: choose a field; NoContent compares nothing")
	}
	for _, p := range pointers {
		if !strings.HasPrefix(p, "/") {
			panic(fmt.Sprintf("consumer: FieldsContent: %q is no JSON pointer: it does not begin with a slash", p))
		}
	}
	return func(m *envelope.Message) Meaning {
		fields, ok := dedupe.FieldsOf(m.Body, pointers...)
		if !ok {
			return RawContent(m)
		}
		return Meaning{Parts: append([][]byte{[]byte(m.Type), []byte("fields")}, fields...), Document: m.Body}
	}
}

// NoContent makes every delivery of an identity the same: a reused identity is
// then a duplicate and goes unnoticed.
func NoContent(*envelope.Message) Meaning { return Meaning{} }
