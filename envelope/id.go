package envelope

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"sync"
	"time"
)

// NewID returns a new UUIDv7 (RFC 9562, 5.7), the kind of id that events
// should carry: its leading bits are the time, so stores keep the keys of one
// time together. Ids of one process rise. It is safe for concurrent use.
func NewID() string { return ids.next(time.Now()) }

var ids idSource

// idSource makes ids that rise: within a millisecond, and when the clock goes
// back, the 12 bits behind the time count on (RFC 9562, 6.2, method 1).
type idSource struct {
	mu   sync.Mutex
	last uint64 // milliseconds << 12 | counter
}

func (s *idSource) next(now time.Time) string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	s.mu.Lock()
	tick := uint64(now.UnixMilli())<<12 | uint64(binary.BigEndian.Uint16(b[6:]))&0x7ff
	if tick <= s.last {
		tick = s.last + 1
	}
	s.last = tick
	s.mu.Unlock()
	binary.BigEndian.PutUint32(b[0:], uint32(tick>>28))
	binary.BigEndian.PutUint16(b[4:], uint16(tick>>12))
	binary.BigEndian.PutUint16(b[6:], 0x7000|uint16(tick&0xfff))
	b[8] = b[8]&0x3f | 0x80
	var out [36]byte
	hex.Encode(out[0:], b[0:4])
	hex.Encode(out[9:], b[4:6])
	hex.Encode(out[14:], b[6:8])
	hex.Encode(out[19:], b[8:10])
	hex.Encode(out[24:], b[10:16])
	out[8], out[13], out[18], out[23] = '-', '-', '-', '-'
	return string(out[:])
}
