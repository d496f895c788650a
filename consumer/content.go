package consumer

import (
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

// Content says what of a message makes its meaning: two deliveries of one
// identity whose content differs are a conflict. It returns parts, in order; it
// is pure and called concurrently, and the parts may share the message's bytes.
type Content func(m *envelope.Message) [][]byte

// RawContent is the type and the body, byte for byte. A tombstone and an empty
// body are one content: not every broker can tell them apart, and a copy must
// not become a conflict on its way through one that cannot.
func RawContent(m *envelope.Message) [][]byte { return [][]byte{[]byte(m.Type), m.Body} }

// JSONContent is the type and the body as a JSON document, whose members may
// come in any order and with any space: for producers that encode an event anew
// when they send it again. A body that is no such document is taken raw.
func JSONContent(m *envelope.Message) [][]byte {
	if c, ok := dedupe.CanonicalJSON(m.Body); ok {
		return [][]byte{[]byte(m.Type), []byte("json"), c}
	}
	return RawContent(m)
}

// NoContent makes every delivery of an identity the same: a reused identity is
// then a duplicate and goes unnoticed.
func NoContent(*envelope.Message) [][]byte { return nil }
