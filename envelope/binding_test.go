package envelope_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/envelope"
)

// wire is one of the ways in which an event can be written.
type wire struct {
	name    string
	binding envelope.Binding
	mode    envelope.Mode
}

var allWires = []wire{
	{"kafka binary", envelope.Kafka, envelope.Binary},
	{"kafka structured", envelope.Kafka, envelope.Structured},
	{"nats binary", envelope.NATS, envelope.Binary},
	{"nats structured", envelope.NATS, envelope.Structured},
}

// encode is Encode for a message that must be writable.
func encode(t tb, w wire, m *envelope.Message) *envelope.Message {
	t.Helper()
	before := m.Clone()
	out, err := w.binding.Encode(m, w.mode)
	if err != nil {
		t.Fatalf("%s: Encode: %v", w.name, err)
	}
	if !reflect.DeepEqual(m, before) {
		t.Fatalf("%s: Encode changed its input\nfrom %+v\nto   %+v", w.name, before, m)
	}
	return out
}

func full() *envelope.Message {
	return &envelope.Message{
		ID: "Euro € 😀", Source: "/a?b=1&c=<\"%\"", Type: "t", Subject: "line\r\nEvil: 1", ContentType: "text/plain; charset=utf-8",
		DataSchema: "http://example.com/s", Extensions: map[string]string{"b": "", "a": "\x00 "},
		Topic: "orders", Key: []byte("k"), Body: []byte("é\"\\\n"), Position: "orders/0/1",
		Time:   time.Date(2026, 1, 2, 3, 4, 5, 600, time.FixedZone("", 3600)),
		Header: envelope.Header{{Name: "own", Value: []byte("1")}, {Name: "Own", Value: []byte{}}},
	}
}

func TestEncodeWritesTheBinding(t *testing.T) {
	t.Parallel()
	const document = `{"specversion":"1.0","id":"Euro € 😀","source":"/a?b=1&c=<\"%\"","type":"t",` +
		`"subject":"line\u000D\nEvil: 1","time":"2026-01-02T02:04:05.0000006Z","datacontenttype":"text/plain; charset=utf-8",` +
		`"dataschema":"http://example.com/s","a":"\u0000 ","b":"","data":"é\"\\\n"}`
	for _, c := range []struct {
		wire
		lines []string
		body  string
	}{
		{allWires[0], []string{"ce_specversion", "1.0", "ce_id", "Euro € 😀", "ce_source", "/a?b=1&c=<\"%\"", "ce_type", "t",
			"ce_subject", "line\r\nEvil: 1", "ce_time", "2026-01-02T02:04:05.0000006Z", "content-type", "text/plain; charset=utf-8",
			"ce_dataschema", "http://example.com/s", "ce_a", "\x00 ", "ce_b", "", "own", "1", "Own", ""}, "é\"\\\n"},
		{allWires[1], []string{"content-type", "application/cloudevents+json; charset=UTF-8", "own", "1", "Own", ""}, document},
		{allWires[2], []string{"ce-specversion", "1.0", "ce-id", "Euro%20%E2%82%AC%20%F0%9F%98%80", "ce-source", "/a?b=1&c=<%22%25%22", "ce-type", "t",
			"ce-subject", "line%0D%0AEvil:%201", "ce-time", "2026-01-02T02:04:05.0000006Z", "ce-datacontenttype", "text/plain;%20charset=utf-8",
			"ce-dataschema", "http://example.com/s", "ce-a", "%00%20", "ce-b", "", "own", "1", "Own", ""}, "é\"\\\n"},
		{allWires[3], []string{"Content-Type", "application/cloudevents+json; charset=UTF-8", "own", "1", "Own", ""}, document},
	} {
		var lines []string
		m := encode(t, c.wire, full())
		for _, f := range m.Header {
			lines = append(lines, f.Name, string(f.Value))
		}
		if !reflect.DeepEqual(lines, c.lines) {
			t.Errorf("%s: header\n%q, want\n%q", c.name, lines, c.lines)
		}
		if string(m.Body) != c.body {
			t.Errorf("%s: body\n%s, want\n%s", c.name, m.Body, c.body)
		}
		if c.mode == envelope.Structured && !json.Valid(m.Body) {
			t.Errorf("%s: not JSON: %s", c.name, m.Body)
		}
		m.Header, m.Body = nil, nil
		if want := (&envelope.Message{Topic: "orders", Key: []byte("k"), Position: "orders/0/1", Time: full().Time}); !reflect.DeepEqual(m, want) {
			t.Errorf("%s: beside header and body %+v, want %+v", c.name, m, want)
		}
	}
}

// crossBinding are events that must be the same to a handler whatever carries
// them.
func crossBinding() map[string]*envelope.Message {
	base := func(change func(m *envelope.Message)) *envelope.Message {
		m := &envelope.Message{ID: "e-1", Source: "/orders", Type: "placed"}
		change(m)
		return m
	}
	events := map[string]*envelope.Message{
		"minimal":   base(func(*envelope.Message) {}),
		"full":      full(),
		"tombstone": base(func(m *envelope.Message) { m.ContentType = "application/json" }),
	}
	for i, id := range []string{"a b", "100%", "%41", `"q"`, `\`, "é", "e\u0301", "\u202ex", "�", "a/b:c|d,e;f=g", strings.Repeat("0", 3000)} {
		events[fmt.Sprintf("id %d", i)] = base(func(m *envelope.Message) { m.ID, m.Source, m.Type = id, id+"/s", id+"/t" })
	}
	for i, c := range []struct{ contentType, body string }{
		{"application/json", `{"b": 1e2, "a":12345678901234567890.10, "a":"\u0000"}`}, {"application/json", ` {"space":"around"} `},
		{"application/json", "\n"}, {"application/json", ""}, {"application/json", "null"}, {"application/json", `"\ud800"`},
		{"application/json", `1,"id":"e-2"`}, {"application/json", "{"}, {"application/json", "\"\xff\""}, {"application/json", "\"\u2028\""},
		{"APPLICATION/X+JSON; a=b", "[1 , 2]"}, {"text/plain", ""}, {"text/plain", "a\x00\u2028<>"}, {"text/plain", "\xff"}, {"text/plain", `{"a":1}`},
		{"", "{}"}, {"", ""}, {"", "\xff\x00"}, {"image/png", "\x89PNG\r\n"},
		{"application/cloudevents+json", `{"specversion":"1.0","id":"inner","source":"i","type":"i"}`},
		{"Application/CloudEvents-Batch+JSON", `[]`}, {"application/cloudevents+avro; x", "\x00"}, {" application/cloudevents", "x"},
		{"application/json", strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000)},
		{"application/json", strings.Repeat("[", 9_999) + strings.Repeat("]", 9_999)},
	} {
		events[fmt.Sprintf("body %d", i)] = base(func(m *envelope.Message) { m.ContentType, m.Body = c.contentType, []byte(c.body) })
	}
	return events
}

func TestCrossBinding(t *testing.T) {
	t.Parallel()
	for name, m := range crossBinding() {
		want := m.Clone()
		want.Time = want.Time.UTC()
		for _, w := range allWires {
			d := decode(t, encode(t, w, m))
			if d.Source != m.Source || d.ID != m.ID {
				t.Errorf("%s, %s: identity %q %q, want %q %q", name, w.name, d.Source, d.ID, m.Source, m.ID)
			}
			if !reflect.DeepEqual(d, want) {
				t.Errorf("%s, %s:\ngot  %.400v\nwant %.400v", name, w.name, d, want)
			}
		}
	}
}

// A reader of the released NATS binding and of Kafka finds structured events
// without their header line too.
func TestStructuredWithoutHeader(t *testing.T) {
	t.Parallel()
	for name, m := range crossBinding() {
		w := encode(t, allWires[3], m)
		w.Header.Del("content-type")
		if d := decode(t, w); d.ID != m.ID || !bytes.Equal(d.Body, m.Body) || d.ContentType != m.ContentType {
			t.Errorf("%s: decoded %.300v", name, d)
		}
	}
}

func TestEncodeReplacesStaleAttributes(t *testing.T) {
	t.Parallel()
	m := &envelope.Message{ID: "new", Source: "s", Type: "t", Body: []byte("x"), ContentType: "text/plain"}
	for _, name := range []string{"ce_id", "CE-ID", "Ce_stale", "ce-", "content-type", "Content-Type"} {
		m.Header.Add(name, []byte("application/cloudevents+json"))
	}
	m.Header.Add("cent", []byte("own"))
	for _, w := range allWires {
		d := decode(t, encode(t, w, m))
		if d.ID != "new" || d.Extensions != nil || d.ContentType != "text/plain" || len(d.Header) != 1 || d.Header[0].Name != "cent" {
			t.Errorf("%s: decoded %+v", w.name, d)
		}
	}
}

func TestEncodePassesRawMessagesOn(t *testing.T) {
	t.Parallel()
	raw := sample("id", " broken ").kafka()
	raw.Header.Add("CE_ID", []byte("other"))
	raw.Header.Add("content-type", []byte("application/json"))
	raw.Topic, raw.Key, raw.Position, raw.Time = "dead", []byte("k"), "t/0/1", time.Unix(1, 0)
	for _, mode := range []envelope.Mode{envelope.Binary, envelope.Structured} {
		m := encode(t, wire{"", envelope.Kafka, mode}, raw)
		if !reflect.DeepEqual(m, raw) {
			t.Errorf("%+v became %+v", raw, m)
		}
		if m == raw {
			t.Error("the message itself was returned; a caller that sets a field would change it")
		}
	}
	raw.Header = envelope.Header{{Name: "ce-id", Value: []byte("100% \u00e9")}, {Name: "Nats-Expected", Value: nil}}
	if m := encode(t, allWires[2], raw); !reflect.DeepEqual(m, raw) {
		t.Errorf("%+v became %+v", raw, m)
	}
}

// A client for NATS writes names as they are, and turns line breaks and
// surrounding space in values into something else without a word.
func TestB13HeaderInjection(t *testing.T) {
	t.Parallel()
	own := envelope.Header{
		{Name: "x\r\nNats-Msg-Id: forged", Value: []byte("v")}, {Name: "a: b", Value: []byte("v")}, {Name: "", Value: []byte("v")},
		{Name: "ü", Value: []byte("v")}, {Name: "v", Value: []byte("a\r\nNats-Msg-Id: forged\r\n")}, {Name: "lead", Value: []byte(" v")},
		{Name: "trail", Value: []byte("v\t")}, {Name: "fine", Value: []byte("100% é")}, {Name: "x%20y", Value: []byte{}},
	}
	want := envelope.Header{
		{Name: "x%0D%0ANats-Msg-Id%3A%20forged", Value: []byte("v")}, {Name: "a%3A%20b", Value: []byte("v")},
		{Name: "%C3%BC", Value: []byte("v")}, {Name: "v", Value: []byte("a%0D%0ANats-Msg-Id:%20forged%0D%0A")}, {Name: "lead", Value: []byte("%20v")},
		{Name: "trail", Value: []byte("v%09")}, {Name: "fine", Value: []byte("100% é")}, {Name: "x%20y", Value: []byte{}},
	}
	for _, mode := range []envelope.Mode{envelope.Binary, envelope.Structured} {
		w := wire{"nats", envelope.NATS, mode}
		m := full()
		m.Header = own
		for _, m := range []*envelope.Message{m, {Header: own}} {
			out := encode(t, w, m)
			for _, f := range out.Header {
				if strings.ContainsAny(f.Name, "\r\n: ") || strings.ContainsAny(string(f.Value), "\r\n") || strings.TrimSpace(string(f.Value)) != string(f.Value) {
					t.Errorf("mode %d: line %q: %q", mode, f.Name, f.Value)
				}
			}
			if got := out.Header[len(out.Header)-len(want):]; !reflect.DeepEqual(got, want) {
				t.Errorf("mode %d: own lines\n%q, want\n%q", mode, got, want)
			}
		}
		k := encode(t, wire{"kafka", envelope.Kafka, mode}, m)
		if got := k.Header[len(k.Header)-len(own):]; !reflect.DeepEqual(got, own) {
			t.Errorf("mode %d: Kafka carries every line, and got %q", mode, got)
		}
	}
}

func TestEncodeRefuses(t *testing.T) {
	t.Parallel()
	valid := func() *envelope.Message { return &envelope.Message{ID: "e-1", Source: "/s", Type: "t"} }
	cases := map[string]func(m *envelope.Message) string{
		"no id":           func(m *envelope.Message) string { m.ID = ""; return envelope.ReasonMissingID },
		"blank id":        func(m *envelope.Message) string { m.ID = " \t"; return envelope.ReasonMissingID },
		"no source":       func(m *envelope.Message) string { m.Source = ""; return envelope.ReasonMissingSource },
		"no type":         func(m *envelope.Message) string { m.Type = ""; return envelope.ReasonMissingType },
		"id alone":        func(m *envelope.Message) string { m.Source, m.Type = "", ""; return envelope.ReasonMissingSource },
		"subject alone":   func(m *envelope.Message) string { *m = envelope.Message{Subject: "s"}; return envelope.ReasonMissingID },
		"bytes for id":    func(m *envelope.Message) string { m.ID = "\xff"; return envelope.ReasonBadEncoding },
		"bytes":           func(m *envelope.Message) string { m.Subject = "\xff"; return envelope.ReasonBadEncoding },
		"extension bytes": func(m *envelope.Message) string { m.Extensions = ext("a", "\xff"); return envelope.ReasonBadEncoding },
		"extension empty": func(m *envelope.Message) string { m.Extensions = ext("", "v"); return envelope.ReasonBadExtensionName },
		"extension upper": func(m *envelope.Message) string { m.Extensions = ext("A", "v"); return envelope.ReasonBadExtensionName },
		"extension colon": func(m *envelope.Message) string {
			m.Extensions = ext("a: b", "v")
			return envelope.ReasonBadExtensionName
		},
		"extension break": func(m *envelope.Message) string {
			m.Extensions = ext("a\r\nb", "v")
			return envelope.ReasonBadExtensionName
		},
		"extension id": func(m *envelope.Message) string {
			m.Extensions = ext("id", "v")
			return envelope.ReasonBadExtensionName
		},
		"extension data": func(m *envelope.Message) string {
			m.Extensions = ext("data", "v")
			return envelope.ReasonBadExtensionName
		},
		"extension base64": func(m *envelope.Message) string {
			m.Extensions = ext("data_base64", "v")
			return envelope.ReasonBadExtensionName
		},
		"year": func(m *envelope.Message) string {
			m.Time = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)
			return envelope.ReasonBadTime
		},
		"year of another zone": func(m *envelope.Message) string {
			m.Time = time.Date(9999, 12, 31, 23, 0, 0, 0, time.FixedZone("", -7200))
			return envelope.ReasonBadTime
		},
	}
	for name, change := range cases {
		for _, w := range allWires {
			m := valid()
			reason := change(m)
			out, err := w.binding.Encode(m, w.mode)
			if err == nil {
				t.Errorf("%s, %s: accepted as %+v", name, w.name, out)
				continue
			}
			checkError(t, err, reason)
		}
	}
	for _, f := range []func() (*envelope.Message, error){
		func() (*envelope.Message, error) { return envelope.Binding(0).Encode(valid(), envelope.Binary) },
		func() (*envelope.Message, error) { return envelope.Kafka.Encode(valid(), envelope.Mode(7)) },
	} {
		if m, err := f(); err == nil || envelope.Reason(err) != "" {
			t.Errorf("accepted as %+v, or the message was blamed: %v", m, err)
		}
	}
}

func ext(name, value string) map[string]string { return map[string]string{name: value} }

// What is written has the verdict of what is read.
func TestB13EncodeHasTheVerdictOfDecode(t *testing.T) {
	t.Parallel()
	for text, reason := range identityCases {
		for i := range 3 {
			m := &envelope.Message{ID: "e-1", Source: "/s", Type: "t"}
			*[]*string{&m.ID, &m.Source, &m.Type}[i] = text
			for _, w := range allWires {
				if _, err := w.binding.Encode(m, w.mode); envelope.Reason(err) != reason {
					t.Errorf("%q in %d, %s: %v; want %q", text, i, w.name, err, reason)
				}
			}
		}
	}
}
