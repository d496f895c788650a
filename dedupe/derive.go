package dedupe

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
)

// deriveVersion is part of what is hashed, like storedVersion.
const deriveVersion = 1

// Derive returns the id of something that the handler of parent brings about:
// the idempotency key of a call to another service, the id of an event that it
// writes, the id of a nested call. It has the form of a UUID (version 8, RFC
// 9562) and is a pure function of its arguments: every run of the handler, on
// any machine, derives the same, so the other side can recognise a repetition.
//
// operation names what is done and ordinal tells several of them apart. Take
// both from what the event says, never from the order of a map or of
// goroutines, which differs from run to run.
func Derive(parent Key, operation string, ordinal int) string {
	h := sha256.New()
	h.Write([]byte{deriveVersion})
	h.Write(parent.Encode())
	var n [binary.MaxVarintLen64]byte
	h.Write(n[:binary.PutUvarint(n[:], uint64(len(operation)))])
	h.Write([]byte(operation))
	h.Write(n[:binary.PutVarint(n[:], int64(ordinal))])
	var sum [sha256.Size]byte
	h.Sum(sum[:0])
	sum[6] = sum[6]&0x0f | 0x80
	sum[8] = sum[8]&0x3f | 0x80
	s := hex.EncodeToString(sum[:16])
	return s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:]
}
