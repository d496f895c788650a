package envelope_test

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/unecho/unecho/envelope"
)

// name draws a text that may be an id, a source or a type.
func name() *rapid.Generator[string] {
	return rapid.Map(rapid.String(), func(s string) string {
		s = strings.TrimSpace(strings.Map(func(r rune) rune {
			if r < 0x20 || r >= 0x7f && r <= 0x9f {
				return -1
			}
			return r
		}, s))
		if s == "" {
			return "%2"
		}
		return s
	})
}

func contentType() *rapid.Generator[string] {
	return rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{
		"", "application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json", "text/plain", " application/json ",
		"application/cloudevents+json", "APPLICATION/CloudEvents-batch", "application/cloudevents+x", "application/cloudevents2",
	}))
}

func body() *rapid.Generator[[]byte] {
	text := rapid.Map(rapid.String(), func(s string) []byte { return []byte(s) })
	document := rapid.Map(rapid.MapOf(rapid.String(), rapid.SliceOf(rapid.String())), func(m map[string][]string) []byte {
		b, _ := json.MarshalIndent(m, "", " ")
		return b
	})
	return rapid.OneOf(rapid.Just[[]byte](nil), rapid.Just([]byte{}), rapid.SliceOf(rapid.Byte()), text, document,
		rapid.Map(document, func(b []byte) []byte { return append(b, ' ') }),
		rapid.SampledFrom([][]byte{[]byte("null"), []byte(`"\ud800"`), []byte(`{"a":1,"a":2}`), []byte(`1,"id":"x"`), []byte("-1.50e+1")}))
}

func extensions() *rapid.Generator[map[string]string] {
	names := rapid.StringMatching("x[a-z0-9_.%!|~-]*")
	return rapid.OneOf(rapid.Just[map[string]string](nil), rapid.MapOfN(names, rapid.String(), 1, 4))
}

// ownHeader draws lines that no broker alters.
func ownHeader() *rapid.Generator[envelope.Header] {
	return rapid.Custom(func(t *rapid.T) envelope.Header {
		var h envelope.Header
		for range rapid.IntRange(0, 3).Draw(t, "lines") {
			h.Add("x-"+rapid.StringMatching("[A-Za-z_%-]*").Draw(t, "line name"), []byte(name().Draw(t, "line value")))
		}
		return h
	})
}

func instant() *rapid.Generator[time.Time] {
	return rapid.OneOf(rapid.Just(time.Time{}), rapid.Custom(func(t *rapid.T) time.Time {
		return time.Unix(rapid.Int64Range(-62167219200, 253402300799).Draw(t, "s"), rapid.Int64Range(0, 999999999).Draw(t, "ns")).UTC()
	}))
}

func message() *rapid.Generator[*envelope.Message] {
	return rapid.Custom(func(t *rapid.T) *envelope.Message {
		return &envelope.Message{
			ID: name().Draw(t, "id"), Source: name().Draw(t, "source"), Type: name().Draw(t, "type"),
			Subject: rapid.String().Draw(t, "subject"), ContentType: contentType().Draw(t, "content type"),
			DataSchema: rapid.String().Draw(t, "data schema"), Extensions: extensions().Draw(t, "extensions"),
			Topic: rapid.String().Draw(t, "topic"), Key: rapid.SliceOf(rapid.Byte()).Draw(t, "key"),
			Header: ownHeader().Draw(t, "header"), Body: body().Draw(t, "body"), Time: instant().Draw(t, "time"),
			Position: rapid.String().Draw(t, "position"),
		}
	})
}

// roundTrip: what was encoded in any way is decoded to what it was.
func roundTrip(t *rapid.T) {
	m := message().Draw(t, "message")
	for _, w := range allWires {
		d := decode(t, encode(t, w, m))
		if !reflect.DeepEqual(d, m) {
			t.Fatalf("%s:\ngot  %#v\nwant %#v", w.name, d, m)
		}
	}
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, roundTrip)
}

func FuzzRoundTrip(f *testing.F) { f.Fuzz(rapid.MakeFuzz(roundTrip)) }

// FuzzDecode: any header and body is refused as an error of this package, or
// read as an event that every binding can carry on.
func FuzzDecode(f *testing.F) {
	for _, m := range crossBinding() {
		if len(m.Body) > 1000 || len(m.ID) > 1000 {
			continue
		}
		for _, w := range allWires {
			e := encode(f, w, m)
			f.Add(joinLines(e.Header), e.Body)
		}
	}
	f.Add([]byte("ce_id: a\nCE-ID:a%2\ncontent-type:application/cloudevents-batch+json"), []byte(`[{}]`))
	f.Add([]byte("ce-id:\"a\\\"b\"\nce_Ext:\xff"), []byte(`{"specversion":"1.0","\u0069d":"\ud83d\ude00\ud800","data":null,"data_base64":"A==="}`))
	f.Fuzz(func(t *testing.T, lines, body []byte) {
		m := &envelope.Message{Header: splitLines(lines), Body: body}
		before := m.Clone()
		_, err := envelope.Decode(m)
		if !reflect.DeepEqual(m, before) {
			t.Fatalf("Decode changed its input\nfrom %q\nto   %q", before, m)
		}
		if err != nil {
			checkError(t, err, envelope.Reason(err))
			return
		}
		d := decode(t, m)
		for _, w := range allWires {
			again := decode(t, encode(t, w, d))
			if again.Header = d.Header; !reflect.DeepEqual(again, d) { // NATS may have to escape the lines
				t.Fatalf("%s:\ngot  %#v\nwant %#v", w.name, again, d)
			}
		}
	})
}

func joinLines(h envelope.Header) []byte {
	var b bytes.Buffer
	for _, f := range h {
		b.WriteString(f.Name + ":" + string(f.Value) + "\n")
	}
	return b.Bytes()
}

func splitLines(b []byte) envelope.Header {
	var h envelope.Header
	for line := range bytes.SplitSeq(b, []byte("\n")) {
		if name, value, ok := bytes.Cut(line, []byte(":")); ok {
			h.Add(string(name), value)
		}
	}
	return h
}
