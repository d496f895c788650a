package dedupe

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Key says whose event, for whom, from where, which. All four parts take
// part in equality, byte for byte: nothing is trimmed, folded or normalised.
type Key struct {
	// Tenant separates customers; empty when there is one.
	Tenant string
	// Consumer is the logical name of the handler: two consumers of one event
	// both process it. Mandatory.
	Consumer string
	// Source and ID are the event's identity. ID is mandatory.
	Source, ID string
}

// MaxPart is the greatest length of one part of a key, in bytes. The stored
// form has a fixed size, so this bounds only what is kept for people to read.
const MaxPart = 2048

// Validate returns nil or an error that matches ErrInvalidKey and names the
// part. A part must be valid UTF-8 without control characters or white space
// around it, and at most [MaxPart] bytes long: what one broker carries and
// another would change can never be two keys on the one and one on the other.
func (k Key) Validate() error {
	if k.Consumer == "" {
		return fmt.Errorf("%w: the consumer is empty", ErrInvalidKey)
	}
	if k.ID == "" {
		return fmt.Errorf("%w: the id is empty", ErrInvalidKey)
	}
	for _, p := range [...]struct{ name, value string }{
		{"tenant", k.Tenant}, {"consumer", k.Consumer}, {"source", k.Source}, {"id", k.ID},
	} {
		if err := validatePart(p.value); err != nil {
			return fmt.Errorf("%w: the %s %w", ErrInvalidKey, p.name, err)
		}
	}
	return nil
}

func validatePart(s string) error {
	if len(s) > MaxPart {
		return fmt.Errorf("is %d bytes long, %d are allowed", len(s), MaxPart)
	}
	if !utf8.ValidString(s) {
		return errors.New("is not valid UTF-8")
	}
	if strings.TrimSpace(s) != s {
		return errors.New("begins or ends with white space, or is blank")
	}
	for i, r := range s {
		if r < 0x20 || r >= 0x7f && r <= 0x9f {
			return fmt.Errorf("has the control character %U at byte %d", r, i)
		}
	}
	return nil
}

// Encode returns the four parts, each behind its length: two keys have equal
// encodings if and only if they are equal.
func (k Key) Encode() []byte {
	b := make([]byte, 0, 4*binary.MaxVarintLen32+len(k.Tenant)+len(k.Consumer)+len(k.Source)+len(k.ID))
	for _, p := range [...]string{k.Tenant, k.Consumer, k.Source, k.ID} {
		b = binary.AppendUvarint(b, uint64(len(p)))
		b = append(b, p...)
	}
	return b
}

// fingerprintVersion is part of what is hashed, like storedVersion. Raising it
// turns every redelivery of an event that was done before into a conflict.
const fingerprintVersion = 1

// Fingerprint digests what an event says: its identity and the parts that make
// its meaning, in order, such as its type and its payload. Each part is hashed
// behind its length, so that no two lists of parts meet; nil and empty are the
// same. Leave out what changes between two deliveries of one event: headers
// that a broker adds, or a time of sending.
//
// The identity is in it because a store keeps only 16 bytes of a key: two keys
// that meet there differ here, and show as a [Conflict].
func Fingerprint(k Key, parts ...[]byte) [32]byte {
	h := sha256.New()
	var length [binary.MaxVarintLen64]byte
	add := func(p []byte) {
		h.Write(length[:binary.PutUvarint(length[:], uint64(len(p)))])
		h.Write(p)
	}
	h.Write([]byte{fingerprintVersion})
	add(k.Encode())
	for _, p := range parts {
		add(p)
	}
	var sum [sha256.Size]byte
	h.Sum(sum[:0])
	return sum
}

// String names the consumer and a prefix of the stored form. It shows neither
// the tenant, nor the source, nor the id: they may be secrets, and String is
// what ends up in logs.
func (k Key) String() string {
	h := k.Stored()
	return fmt.Sprintf("%s/%x", k.Consumer, h[10:])
}

// storedVersion is part of what is hashed: another way of storing keys will
// have another number, so that the two never meet by accident.
const storedVersion = 1

// Stored is the form in which stores keep the key: 16 bytes that are a pure
// function of the identity, so they fit a uuid column and can be computed
// anywhere.
//
// When the id is a UUIDv7 or a ULID, the first six bytes are the time that it
// carries, so that keys of one time lie together in an index however large it
// grows; the rest is a SHA-256 of all parts. Otherwise all 16 bytes are. Keys
// that meet in 16 bytes by chance differ in their fingerprint, which covers
// the identity too, and show as a conflict instead of passing for duplicates.
func (k Key) Stored() [16]byte {
	h := sha256.New()
	h.Write([]byte{storedVersion})
	h.Write(k.Encode())
	var sum [sha256.Size]byte
	h.Sum(sum[:0])
	var out [16]byte
	copy(out[:], sum[:])
	if ms, ok := idTime(k.ID); ok {
		binary.BigEndian.PutUint16(out[0:], uint16(ms>>32))
		binary.BigEndian.PutUint32(out[2:], uint32(ms))
	}
	return out
}

// idTime returns the milliseconds since 1970 that an id carries.
func idTime(id string) (ms uint64, ok bool) {
	switch len(id) {
	case 36:
		return uuid7Time(id)
	case 26:
		return ulidTime(id)
	}
	return 0, false
}

// uuid7Time reads "tttttttt-tttt-7xxx-yxxx-xxxxxxxxxxxx" (RFC 9562, 5.7).
func uuid7Time(id string) (ms uint64, ok bool) {
	for i := 0; i < len(id); i++ {
		c := id[i]
		switch i {
		case 8, 13, 18, 23:
			if c != '-' {
				return 0, false
			}
		default:
			v := hexDigit(c)
			if v < 0 {
				return 0, false
			}
			if i < 13 {
				ms = ms<<4 | uint64(v)
			}
		}
	}
	return ms, id[14] == '7' && strings.IndexByte("89abAB", id[19]) >= 0
}

func hexDigit(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

const crockford = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

// ulidTime reads the first ten characters of a ULID, 50 bits of which the
// upper two are zero.
func ulidTime(id string) (ms uint64, ok bool) {
	for i := 0; i < len(id); i++ {
		c := id[i]
		if c >= 'a' && c <= 'z' {
			c -= 'a' - 'A'
		}
		v := strings.IndexByte(crockford, c)
		if v < 0 {
			return 0, false
		}
		if i < 10 {
			ms = ms<<5 | uint64(v)
		}
	}
	return ms, ms < 1<<48
}
