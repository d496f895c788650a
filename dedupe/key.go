package dedupe

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
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
	for _, p := range k.parts() {
		if err := validatePart(p.value); err != nil {
			return fmt.Errorf("%w: the %s %w", ErrInvalidKey, p.name, err)
		}
	}
	return nil
}

type part struct{ name, value string }

func (k Key) parts() [4]part {
	return [...]part{{"tenant", k.Tenant}, {"consumer", k.Consumer}, {"source", k.Source}, {"id", k.ID}}
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
const fingerprintVersion = 2

// Fingerprint digests what an event says: its identity and the parts that make
// its meaning, in order, such as its type and its payload. Each part is hashed
// behind its length, so that no two lists of parts meet; nil and empty are the
// same. Leave out what changes between two deliveries of one event: headers
// that a broker adds, or a time of sending.
//
// The identity is in it because a store keeps only 16 bytes of a key: two keys
// that meet there differ here, and show as a [Conflict]. The first 8 bytes name
// the identity alone; a store sees to that for fingerprints that were made
// otherwise, too.
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
	return k.seal(sum)
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

// KeyID is the form in which stores keep a key.
type KeyID [16]byte

// String returns the form of a UUID, as a database shows it.
func (id KeyID) String() string {
	s := hex.EncodeToString(id[:])
	return s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:]
}

// ParseKeyID reads what [KeyID.String] has written; hyphens do not matter.
func ParseKeyID(s string) (KeyID, error) {
	b, err := hex.DecodeString(strings.ReplaceAll(s, "-", ""))
	if err != nil || len(b) != len(KeyID{}) {
		return KeyID{}, fmt.Errorf("%w: %q is not the id of a key: 32 hexadecimal digits, with or without hyphens", ErrInvalidKey, s)
	}
	return KeyID(b), nil
}

// digest is a SHA-256 of all parts.
func (k Key) digest() (sum [sha256.Size]byte) {
	h := sha256.New()
	h.Write([]byte{storedVersion})
	h.Write(k.Encode())
	h.Sum(sum[:0])
	return sum
}

// Stored is the form in which stores keep the key: 16 bytes that are a pure
// function of the identity, so they fit a uuid column and can be computed
// anywhere.
//
// When the id is a UUIDv7, a ULID or a [PositionID], the first six bytes are
// the time or the offset that it carries, so that keys of one time lie together
// in an index however large it grows; the rest is a SHA-256 of all parts.
// Otherwise all 16 bytes are. Keys that meet in 16 bytes by chance show as a
// conflict, see [ReasonIdentity], instead of passing for duplicates.
func (k Key) Stored() KeyID {
	sum := k.digest()
	out := KeyID(sum[:16])
	if lead, ok := leading(k.ID); ok {
		binary.BigEndian.PutUint16(out[0:], uint16(lead>>32))
		binary.BigEndian.PutUint32(out[2:], uint32(lead))
	}
	return out
}

// sealed is how much of a fingerprint names the identity.
const sealed = 8

// seal puts a part of the identity's digest that is not in its stored form in
// the place of the first bytes of a fingerprint. Whatever the caller took for
// the content, two identities never have the same fingerprint, and when two
// fingerprints differ it shows in which of the two.
func (k Key) seal(fp [32]byte) [32]byte {
	sum := k.digest()
	copy(fp[:sealed], sum[16:])
	return fp
}

// PositionID is the id of an event that has no other name than its place in a
// log: a partition of a Kafka topic, or a stream, that is named by Key.Source.
// A log that was deleted and made anew counts from the beginning: give its
// events another source.
func PositionID(partition int, offset int64) string {
	return fmt.Sprintf("%d@%d", partition, offset)
}

// leading returns the 48 bits of an id that rise with time.
func leading(id string) (lead uint64, ok bool) {
	switch len(id) {
	case 36:
		return uuid7Time(id)
	case 26:
		return ulidTime(id)
	}
	return positionOffset(id)
}

// positionOffset reads a [PositionID], and nothing that only looks like one.
func positionOffset(id string) (uint64, bool) {
	p, o, ok := strings.Cut(id, "@")
	if !ok {
		return 0, false
	}
	partition, e1 := strconv.ParseUint(p, 10, 31)
	offset, e2 := strconv.ParseUint(o, 10, 63)
	return offset, e1 == nil && e2 == nil && PositionID(int(partition), int64(offset)) == id
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
