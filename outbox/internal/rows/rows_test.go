package rows

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/unecho/unecho/envelope"
)

// drawn is any message's header and extensions.
func drawn(t *rapid.T) *envelope.Message {
	m := &envelope.Message{}
	for range rapid.IntRange(0, 5).Draw(t, "fields") {
		f := envelope.Field{Name: rapid.String().Draw(t, "name")}
		if rapid.Bool().Draw(t, "has value") {
			f.Value = rapid.SliceOf(rapid.Byte()).Draw(t, "value")
		}
		m.Header = append(m.Header, f)
	}
	if n := rapid.IntRange(0, 5).Draw(t, "extensions"); n > 0 {
		m.Extensions = rapid.MapOfN(rapid.String(), rapid.String(), n, n).Draw(t, "extension")
	}
	return m
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, got := drawn(t), &envelope.Message{}
		b := EncodeMeta(m)
		if err := DecodeMeta(b, got); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, m) {
			t.Fatalf("%#v came back as %#v", m, got)
		}
		for n := range b {
			if DecodeMeta(b[:n], &envelope.Message{}) == nil {
				t.Fatalf("%d of %d bytes were taken for the whole", n, len(b))
			}
		}
		if DecodeMeta(append(b, 0), &envelope.Message{}) == nil {
			t.Fatal("a byte too many was taken")
		}
	})
}

// The bytes are in databases: they may be added to under a new version, and
// never read otherwise.
func TestGolden(t *testing.T) {
	for want, m := range map[string]*envelope.Message{
		"010000": {},
		"01040148" + "0300ff" + "0168" + "0232" + "0148" + "00" + "0165" + "01" + "00": {Header: envelope.Header{
			{Name: "H", Value: []byte{0, 0xff}}, {Name: "h", Value: []byte("2")}, {Name: "H"}, {Name: "e", Value: []byte{}}}},
		"0100020161" + "0131" + "0162" + "00": {Extensions: map[string]string{"b": "", "a": "1"}},
	} {
		if got := hex.EncodeToString(EncodeMeta(m)); got != want {
			t.Errorf("%+v is written as %s, want %s", m, got, want)
		}
		b, _ := hex.DecodeString(want)
		got := &envelope.Message{}
		if err := DecodeMeta(b, got); err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("%s is read as %+v, %v", want, got, err)
		}
	}
}

func TestCorrupt(t *testing.T) {
	huge := string(binary.AppendUvarint(nil, 1<<62))
	for name, b := range map[string]string{
		"empty": "", "version 0": "\x00\x00\x00", "version 2": "\x02\x00\x00", "many fields": "\x01" + huge,
		"many fields and some": "\x01" + huge + strings.Repeat("\x00", 64), "long name": "\x01\x01" + huge + "x",
		"long value": "\x01\x01\x01x" + huge + "y", "longest value": "\x01\x01\x01x\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01y",
		"length without an end": "\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "rest": "\x01\x00\x00\x00",
		"one extension twice": "\x01\x00\x02\x01a\x00\x01a\x00",
	} {
		if err := DecodeMeta([]byte(b), &envelope.Message{}); !errors.Is(err, errCorrupt) {
			t.Errorf("%s: %v, want errCorrupt", name, err)
		}
	}
}

func TestNewerVersion(t *testing.T) {
	if err := DecodeMeta([]byte{version + 1, 9}, &envelope.Message{}); !errors.Is(err, errNewer) {
		t.Errorf("%v, want errNewer", err)
	}
}

// Whatever stands in the column: no panic, memory in proportion to the bytes,
// and what is accepted is what EncodeMeta writes for it.
func FuzzDecodeMeta(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{1, 0, 0})
	f.Add(EncodeMeta(&envelope.Message{Header: envelope.Header{{Name: "h", Value: []byte("v")}, {Name: "h"}}, Extensions: map[string]string{"a": "b"}}))
	f.Add(append([]byte{1}, binary.AppendUvarint(nil, 1<<40)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		m := &envelope.Message{}
		err := DecodeMeta(b, m)
		runtime.ReadMemStats(&after)
		if got, bound := after.TotalAlloc-before.TotalAlloc, uint64(1<<16+200*len(b)); got > bound {
			t.Fatalf("%d bytes were allocated for %d", got, len(b))
		}
		if err != nil {
			return
		}
		again := &envelope.Message{}
		if err := DecodeMeta(EncodeMeta(m), again); err != nil || !reflect.DeepEqual(m, again) {
			t.Fatalf("%#v came back as %#v, %v", m, again, err)
		}
	})
}
