// Package rows is the stored form of the parts of a message that have no
// column of their own, shared by the outbox stores.
package rows

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/unecho/unecho/envelope"
)

// version leads every encoding, so that rows written by an older program can
// be told apart.
const version = 1

var (
	// errCorrupt: the bytes are not what EncodeMeta has written.
	errCorrupt = errors.New("outbox: the stored headers cannot be read")
	errNewer   = fmt.Errorf("%w: a newer program wrote them", errCorrupt)
)

// EncodeMeta returns headers and extension attributes as bytes that
// [DecodeMeta] turns into the same again: names, values, order, repetition, and
// the difference between nil and empty.
func EncodeMeta(m *envelope.Message) []byte {
	b := []byte{version}
	b = binary.AppendUvarint(b, uint64(len(m.Header)))
	for _, f := range m.Header {
		b = appendString(b, f.Name)
		b = appendValue(b, f.Value)
	}
	names := make([]string, 0, len(m.Extensions))
	for name := range m.Extensions {
		names = append(names, name)
	}
	slices.Sort(names)
	b = binary.AppendUvarint(b, uint64(len(names)))
	for _, name := range names {
		b = appendString(b, name)
		b = appendString(b, m.Extensions[name])
	}
	return b
}

func appendString(b []byte, s string) []byte {
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

// appendValue writes the length plus one, 0 is nil.
func appendValue(b, v []byte) []byte {
	if v == nil {
		return append(b, 0)
	}
	b = binary.AppendUvarint(b, uint64(len(v))+1)
	return append(b, v...)
}

// DecodeMeta sets the Header and Extensions of m from b. After an error they
// are not to be used.
func DecodeMeta(b []byte, m *envelope.Message) error {
	d := decoder{b: b}
	switch v := d.byte(); {
	case v > version:
		return errNewer
	case v < version:
		return errCorrupt
	}
	for range d.count() {
		name := d.string()
		m.Header = append(m.Header, envelope.Field{Name: name, Value: d.value()})
	}
	for range d.count() {
		if m.Extensions == nil {
			m.Extensions = make(map[string]string)
		}
		name := d.string()
		_, twice := m.Extensions[name]
		m.Extensions[name] = d.string()
		d.bad = d.bad || twice
	}
	if d.bad || len(d.b) > 0 {
		return errCorrupt
	}
	return nil
}

// decoder reads from b; the first thing that does not fit makes it bad, and
// everything after that zero.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) byte() byte {
	if len(d.b) == 0 {
		d.bad = true
		return 0
	}
	c := d.b[0]
	d.b = d.b[1:]
	return c
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.bad, d.b = true, nil
		return 0
	}
	d.b = d.b[n:]
	return v
}

// count is a number of things that follow, each of at least two bytes.
func (d *decoder) count() int {
	n := d.uvarint()
	if n > uint64(len(d.b))/2 {
		d.bad = d.bad || n > 0
		return 0
	}
	return int(n)
}

func (d *decoder) take(n uint64) []byte {
	if n > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) string() string { return string(d.take(d.uvarint())) }

func (d *decoder) value() []byte {
	n := d.uvarint()
	if n == 0 {
		return nil
	}
	v := d.take(n - 1)
	if v == nil && !d.bad {
		v = []byte{}
	}
	return v
}
