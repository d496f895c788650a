package envelope_test

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/envelope"
)

func TestDecodeBinary(t *testing.T) {
	t.Parallel()
	want := &envelope.Message{
		ID: "Euro € 😀", Source: "/a b?x=100%", Type: "t", Subject: "s",
		ContentType: "application/json; charset=utf-8", DataSchema: "http://example.com/s#1",
		Extensions: map[string]string{"traceparent": "00-x", "empty": ""},
		Header:     envelope.Header{{Name: "x-own", Value: []byte(" v")}},
		Topic:      "orders", Key: []byte("k"), Body: []byte(`{ "a": 1e2 }`), Position: "orders/0/7",
		Time: time.Date(2026, 1, 2, 2, 4, 5, 600, time.UTC),
	}
	raw := func(lines ...string) *envelope.Message {
		m := &envelope.Message{Topic: want.Topic, Key: want.Key, Body: want.Body, Position: want.Position}
		for i := 0; i < len(lines); i += 2 {
			m.Header.Add(lines[i], []byte(lines[i+1]))
		}
		return m
	}
	for name, m := range map[string]*envelope.Message{
		"kafka": raw("ce_specversion", "1.0", "ce_id", "Euro € 😀", "ce_source", "/a b?x=100%", "ce_type", "t",
			"ce_subject", "s", "content-type", "application/json; charset=utf-8", "x-own", " v",
			"ce_dataschema", "http://example.com/s#1", "ce_traceparent", "00-x", "ce_empty", "",
			"ce_time", "2026-01-02T03:04:05.0000006+01:00"),
		"nats": raw("ce-specversion", "1.0", "ce-id", "Euro%20%E2%82%AC%20%f0%9f%98%80", "ce-source", "/a b?x=100%", "ce-type", "%74",
			"ce-subject", `"\s"`, "ce-datacontenttype", "application/json;%20charset=utf-8", "x-own", " v", "Content-Type", "text/plain",
			"ce-dataschema", "http://example.com/s#1", "ce-traceparent", "00-x", "ce-empty", "",
			"ce-time", "2026-01-02T03:04:05.0000006+01:00"),
	} {
		if got := decode(t, m); !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v", name, got, want)
		}
	}
}

func TestDecodeKeepsTheTimeOfTheBroker(t *testing.T) {
	t.Parallel()
	stored := time.Date(2026, 5, 6, 7, 8, 9, 0, time.UTC)
	m := sample().kafka()
	m.Time = stored
	if got := decode(t, m).Time; !got.Equal(stored) {
		t.Errorf("Time = %v, want that of the broker, %v", got, stored)
	}
	m.Time = time.UnixMilli(1 << 62) // a record may say anything
	if got := decode(t, m).Time; !got.IsZero() {
		t.Errorf("Time = %v, want unknown", got)
	}
}

func TestDecodeAgain(t *testing.T) {
	t.Parallel()
	m := sample("subject", "s", "ext", "1").kafka()
	m.Header.Add("own", []byte("v"))
	d := decode(t, m)
	if again := decode(t, d); !reflect.DeepEqual(again, d) {
		t.Errorf("decoding again gave %+v, want %+v", again, d)
	}
	refuse(t, &envelope.Message{ID: " x", Source: "s", Type: "t"}, envelope.ReasonSurroundingSpace)
	refuse(t, &envelope.Message{Source: "s", Type: "t"}, envelope.ReasonMissingID)
}

func TestB01MissingID(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"-", "", "   ", "\t \u00a0"} {
		for name, m := range sample("id", id).wires() {
			t.Run(fmt.Sprintf("%q/%s", id, name), func(t *testing.T) {
				t.Parallel()
				refuse(t, m, envelope.ReasonMissingID)
			})
		}
	}
	refuse(t, structured(`{"specversion":"1.0","id":null,"source":"/s","type":"t"}`), envelope.ReasonMissingID)
	refuse(t, &envelope.Message{}, envelope.ReasonMissingID)
	refuse(t, &envelope.Message{Body: []byte(`{"order":1}`), Header: envelope.Header{{Name: "content-type", Value: []byte("application/json")}}}, envelope.ReasonMissingID)
	refuse(t, &envelope.Message{Header: envelope.Header{{Name: "ce_id"}, {Name: "ce_source", Value: []byte("s")}}}, envelope.ReasonMissingID)
}

func TestB02UnreadableEnvelope(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		reason string
		attrs  event
	}{
		{envelope.ReasonBadVersion, sample("specversion", "9.9")},
		{envelope.ReasonBadVersion, sample("specversion", "9.9", "id", "-")},
		{envelope.ReasonBadVersion, sample("specversion", "0.3")},
		{envelope.ReasonMissingSource, sample("source", "-")},
		{envelope.ReasonMissingSource, sample("source", " ")},
		{envelope.ReasonMissingType, sample("type", "-")},
		{envelope.ReasonBadTime, sample("time", "yesterday")},
		{envelope.ReasonBadTime, sample("time", "2026-01-02 03:04:05Z")},
		{envelope.ReasonBadTime, sample("time", "2026-01-02T03:04:05")},
		{envelope.ReasonBadTime, sample("time", "2026-02-30T03:04:05Z")},
		{envelope.ReasonBadTime, sample("time", "1767322800")},
	} {
		for name, m := range c.attrs.wires() {
			t.Run(fmt.Sprintf("%v/%s", c.attrs, name), func(t *testing.T) {
				t.Parallel()
				refuse(t, m, c.reason)
			})
		}
	}
	for body, reason := range map[string]string{
		"":                                   envelope.ReasonBadJSON,
		" ":                                  envelope.ReasonBadJSON,
		`{"specversion":"1.0","id":"a"`:      envelope.ReasonBadJSON,
		`{"specversion":"1.0","id":"a"}x`:    envelope.ReasonBadJSON,
		`[{"specversion":"1.0","id":"a"}]`:   envelope.ReasonNotAnObject,
		`"1.0"`:                              envelope.ReasonNotAnObject,
		`null`:                               envelope.ReasonNotAnObject,
		`{}`:                                 envelope.ReasonMissingID,
		`{"id":"a","source":"s","type":"t"}`: envelope.ReasonMissingVersion,
		`{"specversion":1.0,"id":"a"}`:       envelope.ReasonNotAString,
		`{"specversion":"1.0","id":7}`:       envelope.ReasonNotAString,
		`{"specversion":"1.0","id":["a"]}`:   envelope.ReasonNotAString,
		`{"specversion":"1.0","time":true}`:  envelope.ReasonNotAString,
		"{\"specversion\":\"1.0\",\"id\":\"\xff\"}": envelope.ReasonBadEncoding,
	} {
		t.Run(body, func(t *testing.T) {
			t.Parallel()
			refuse(t, structured(body), reason)
		})
	}
	only := &envelope.Message{Header: envelope.Header{{Name: "ce_id", Value: []byte("e-1")}}, Body: []byte(`{}`)}
	refuse(t, only, envelope.ReasonMissingSource)
	refuse(t, sample("specversion", "-").kafka(), envelope.ReasonMissingVersion)
	refuse(t, sample("specversion", "-").nats(), envelope.ReasonMissingVersion)
}

func TestB02OddExtensionsAreTolerated(t *testing.T) {
	t.Parallel()
	d := decode(t, withMembers(`,"confluentRouting":{"a": [1, "}"]},"n":7,"b":true,"f":1.5,"none":null,"s":"v",
		"under_score":"u","with space":"x","":"x","ünï":"x","ID":"other","\u212aelvin":"x","lone":"\ud800","data_base_64":"ok"`))
	want := map[string]string{"confluentrouting": `{"a": [1, "}"]}`, "n": "7", "b": "true", "f": "1.5", "s": "v",
		"under_score": "u", "data_base_64": "ok"}
	if !reflect.DeepEqual(d.Extensions, want) {
		t.Errorf("extensions %q, want %q", d.Extensions, want)
	}
	m := sample("confluentRouting", "{}", "with space", "x", "", "x", "data", "x", "bad", "\xff").kafka()
	if d := decode(t, m); !reflect.DeepEqual(d.Extensions, map[string]string{"confluentrouting": "{}"}) || d.Header != nil {
		t.Errorf("extensions %q, header %q", d.Extensions, d.Header)
	}
}

func TestB02ExtensionThatSaysTwoThingsIsLeftOut(t *testing.T) {
	t.Parallel()
	m := sample("traceparent", "1").kafka()
	m.Header.Add("CE_TraceParent", []byte("2"))
	m.Header.Add("ce_traceparent", []byte("1"))
	m.Header.Add("ce_twice", []byte("same"))
	m.Header.Add("ce-twice", []byte("same"))
	want := map[string]string{"twice": "same"}
	if d := decode(t, m); !reflect.DeepEqual(d.Extensions, want) {
		t.Errorf("extensions %q, want %q", d.Extensions, want)
	}
	if d := decode(t, withMembers(`,"a":"1","A":"2","a":"1","twice":"same","Twice":"same"`)); !reflect.DeepEqual(d.Extensions, want) {
		t.Errorf("extensions %q, want %q", d.Extensions, want)
	}
}

func TestB07IDsThatAreNotText(t *testing.T) {
	t.Parallel()
	for id, reason := range map[string]string{
		"a\x00b": envelope.ReasonControlCharacter, "\x00": envelope.ReasonControlCharacter,
		"\x7f": envelope.ReasonControlCharacter, "\u0085x": envelope.ReasonControlCharacter,
	} {
		for name, m := range sample("id", id).wires() {
			t.Run(fmt.Sprintf("%q/%s", id, name), func(t *testing.T) {
				t.Parallel()
				refuse(t, m, reason)
			})
		}
	}
	refuse(t, sample("id", "\xff\xfe").kafka(), envelope.ReasonBadEncoding)
	refuse(t, sample("id", "\xc0\xa0").nats(), envelope.ReasonBadEncoding)
	refuse(t, sample("subject", "\xff").kafka(), envelope.ReasonBadEncoding)
	// Two ids that are both U+FFFD to encoding/json.
	refuse(t, structured(`{"specversion":"1.0","id":"\ud800","source":"/s","type":"t"}`), envelope.ReasonBadEncoding)
	refuse(t, structured(`{"specversion":"1.0","id":"\udfff\ud800","source":"/s","type":"t"}`), envelope.ReasonBadEncoding)

	seen := map[string]string{}
	for _, id := range []string{"é", "e\u0301", "😀", "\u202eid", "�", "a\u00a0b"} {
		for name, m := range sample("id", id).wires() {
			got := decode(t, m).ID
			if got != id {
				t.Errorf("%s: id %q came as %q", name, id, got)
			}
			seen[got] = id
		}
	}
	if len(seen) != 6 {
		t.Errorf("%d different ids of 6: %q", len(seen), seen)
	}
	if d := decode(t, structured(`{"specversion":"1.0","id":"\ud83d\ude00\\ud800","source":"/s","type":"t"}`)); d.ID != `😀\ud800` {
		t.Errorf("id %q", d.ID)
	}
}

func TestB09HeaderNames(t *testing.T) {
	t.Parallel()
	respell := func(m *envelope.Message, spell func(string) string) *envelope.Message {
		m.Header.Add("x_ce_id", []byte("decoy"))
		m.Header.Add("orig-ce-id", []byte("decoy"))
		m.Header.Add("ce.id", []byte("decoy"))
		m.Header.Add("ceid", []byte("decoy"))
		m.Header.Add("id", []byte("decoy"))
		m.Header.Add("ce_\u017fource", []byte("decoy")) // a long s
		for i := range m.Header {
			m.Header[i].Name = spell(m.Header[i].Name)
		}
		return m
	}
	title := func(s string) string { // Ce_Id
		if len(s) > 3 {
			s = s[:3] + asciiUpper(s[3:4]) + s[4:]
		}
		return asciiUpper(s[:1]) + s[1:]
	}
	for name, spell := range map[string]func(string) string{
		"lower": func(s string) string { return s }, "upper": asciiUpper, "title": title,
	} {
		for mode, m := range map[string]*envelope.Message{"kafka": sample().kafka(), "nats": sample().nats()} {
			d := decode(t, respell(m, spell))
			if d.ID != "e-1" || d.Source != "/orders" {
				t.Errorf("%s %s: identity %q %q", mode, name, d.Source, d.ID)
			}
			if d.Extensions != nil || len(d.Header) != 5 {
				t.Errorf("%s %s: extensions %q, header %q", mode, name, d.Extensions, d.Header)
			}
		}
		m := respell(sample().json("application/cloudevents+json"), spell)
		if d := decode(t, m); d.ID != "e-1" {
			t.Errorf("content-type %s: id %q", name, d.ID)
		}
	}
}

func asciiUpper(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' {
			return r - 32
		}
		return r
	}, s)
}

func TestB09TwoValuesForOneName(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, value, reason string }{
		{"ce_id", "e-2", envelope.ReasonConflictingID},
		{"CE_ID", "e-2", envelope.ReasonConflictingID},
		{"ce-id", "e-2", envelope.ReasonConflictingID},
		{"Ce-Id", "", envelope.ReasonConflictingID},
		{"ce_id", " e-1", envelope.ReasonConflictingID},
		{"Ce_Source", "/Orders", envelope.ReasonConflict},
		{"ce-type", "x", envelope.ReasonConflict},
		{"Ce-Specversion", "1.1", envelope.ReasonConflict},
	} {
		for _, first := range []bool{true, false} {
			m := sample().kafka()
			line := envelope.Field{Name: c.name, Value: []byte(c.value)}
			if m.Header = append(m.Header, line); first {
				m.Header = append(envelope.Header{line}, sample().kafka().Header...)
			}
			t.Run(fmt.Sprint(c, first), func(t *testing.T) {
				t.Parallel()
				refuse(t, m, c.reason)
			})
		}
	}
	m := sample("id", "a b").kafka()
	m.Header.Add("CE_ID", []byte("a b"))
	m.Header.Add("ce-id", []byte("a%20b"))
	if d := decode(t, m); d.ID != "a b" {
		t.Errorf("id %q of lines that say the same", d.ID)
	}
	m = sample().kafka()
	m.Header.Add("content-type", []byte("application/json"))
	m.Header.Add("Content-Type", []byte("application/cloudevents+json"))
	refuse(t, m, envelope.ReasonConflict)
}

func TestB09IdentityInHeaderAndBody(t *testing.T) {
	t.Parallel()
	for _, contentType := range []string{"application/cloudevents+json", ""} {
		m := sample().json(contentType)
		m.Header.Add("ce-id", []byte("e-2"))
		refuse(t, m, envelope.ReasonConflictingID)
		m = sample().json(contentType)
		m.Header.Add("ce_source", []byte("/other"))
		refuse(t, m, envelope.ReasonConflict)
		m = sample().json(contentType)
		m.Header.Add("ce_id", []byte("e-1"))
		m.Header.Add("CE-Source", []byte("/%6Frders"))
		m.Header.Add("ce_subject", []byte("the body decides"))
		if d := decode(t, m); d.ID != "e-1" || d.Subject != "" || d.Header != nil {
			t.Errorf("decoded %+v", d)
		}
	}
}

func TestB11Batch(t *testing.T) {
	t.Parallel()
	one := string(sample().json("").Body)
	for _, body := range []string{"[" + one + "," + string(sample("id", "e-2").json("").Body) + "," + string(sample("id", "e-3").json("").Body) + "]",
		"[]", "[" + one + "," + one + "]", one} {
		for _, contentType := range []string{"application/cloudevents-batch+json", "Application/CloudEvents-Batch+JSON; charset=utf-8", "application/cloudevents-batch"} {
			m := &envelope.Message{Body: []byte(body)}
			m.Header.Add("Content-Type", []byte(contentType))
			refuse(t, m, envelope.ReasonBatch)
		}
		if body != one {
			refuse(t, structured(body), envelope.ReasonNotAnObject)
			refuse(t, &envelope.Message{Body: []byte(body)}, envelope.ReasonMissingID)
		}
	}
}

func TestB11MediaTypes(t *testing.T) {
	t.Parallel()
	for _, contentType := range []string{
		"application/cloudevents+json", "Application/CloudEvents+JSON;charset=UTF-8", " application/cloudevents+json ; charset=\"utf-8\"",
		"application/cloudevents+json;;", "application/cloudevents; charset=utf-8", "",
	} {
		if d := decode(t, sample().json(contentType)); d.ID != "e-1" {
			t.Errorf("%q: id %q", contentType, d.ID)
		}
	}
	for _, contentType := range []string{"application/cloudevents+avro", "application/cloudevents+xml;charset=utf-8"} {
		refuse(t, sample().json(contentType), envelope.ReasonUnknownFormat)
	}
	// Names that only begin alike say nothing about the mode.
	m := sample().kafka()
	m.Header.Add("content-type", []byte("application/cloudeventsx+json"))
	if d := decode(t, m); d.ContentType != "application/cloudeventsx+json" || string(d.Body) != "{}" {
		t.Errorf("decoded %+v", d)
	}
	for contentType, body := range map[string]string{
		"application/json; charset=utf-8": `"a\u0062"`, "APPLICATION/JSON": `"a\u0062"`, "text/json ;x": `"a\u0062"`,
		"application/vnd.example+json": `"a\u0062"`, "text/plain": "ab", "application/jsonx": "ab", "json": "ab",
	} {
		d := decode(t, withMembers(`,"datacontenttype":"`+contentType+`","data":"a\u0062"`))
		if string(d.Body) != body || d.ContentType != contentType {
			t.Errorf("%q: body %q of %q, want %q", contentType, d.Body, d.ContentType, body)
		}
	}
}

// identityCases are texts for what takes part in the identity, and the reason
// for which they are refused, "" if they are not.
var identityCases = map[string]string{
	"a": "", "a b": "", "a%20b": "", `"a"`: "", "a:b/c?d#e": "", "100%": "", "ä\u3000b": "",
	" a": envelope.ReasonSurroundingSpace, "a ": envelope.ReasonSurroundingSpace, "\u00a0a": envelope.ReasonSurroundingSpace,
	"a\u3000": envelope.ReasonSurroundingSpace,
	"a\nb":    envelope.ReasonControlCharacter, "a\tb": envelope.ReasonControlCharacter, "a\r\nEvil: 1": envelope.ReasonControlCharacter,
	"\ta": envelope.ReasonControlCharacter, "a\n": envelope.ReasonControlCharacter, "a\u009fb": envelope.ReasonControlCharacter,
}

func TestB13OneVerdictOnAllBindings(t *testing.T) {
	t.Parallel()
	for text, reason := range identityCases {
		for _, attr := range []string{"id", "source", "type"} {
			for name, m := range sample(attr, text).wires() {
				t.Run(fmt.Sprintf("%s=%q/%s", attr, text, name), func(t *testing.T) {
					t.Parallel()
					if reason != "" {
						refuse(t, m, reason)
						return
					}
					d := decode(t, m)
					if got := map[string]string{"id": d.ID, "source": d.Source, "type": d.Type}[attr]; got != text {
						t.Errorf("read as %q", got)
					}
				})
			}
		}
	}
}

func TestB14DataTwice(t *testing.T) {
	t.Parallel()
	for members, reason := range map[string]string{
		`,"data":{},"data_base64":"e30="`:                 envelope.ReasonDataTwice,
		`,"data_base64":"","data":""`:                     envelope.ReasonDataTwice,
		`,"data":null,"data_base64":"e30="`:               envelope.ReasonDataTwice,
		`,"data_base64":"e30"`:                            envelope.ReasonBadBase64,
		`,"data_base64":"e3*="`:                           envelope.ReasonBadBase64,
		`,"data_base64":"__8="`:                           envelope.ReasonBadBase64,
		`,"data_base64":7`:                                envelope.ReasonNotAString,
		`,"data":1,"data":1`:                              envelope.ReasonDuplicateMember,
		`,"data_base64":null,"data_base64":"e30="`:        envelope.ReasonDuplicateMember,
		`,"id":"e-1"`:                                     envelope.ReasonDuplicateMember,
		`,"\u0069d":"e-2"`:                                envelope.ReasonDuplicateMember,
		`,"source":"/x"`:                                  envelope.ReasonDuplicateMember,
		`,"specversion":null`:                             envelope.ReasonDuplicateMember,
		`,"subject":null,"subject":"s"`:                   envelope.ReasonDuplicateMember,
		`,"datacontenttype":"text/plain","data":"\ud800"`: envelope.ReasonBadEncoding,
	} {
		t.Run(members, func(t *testing.T) {
			t.Parallel()
			refuse(t, withMembers(members), reason)
		})
	}
}

func TestB14PayloadIsNotRewritten(t *testing.T) {
	t.Parallel()
	for members, want := range map[string][]byte{
		``:                    nil,
		`,"data_base64":null`: nil,
		`,"data":null`:        []byte("null"),
		`,"data":""`:          []byte(`""`),
		`,"data" : {"b" : 1e2, "b":12345678901234567890.10,"a":"\u0000"}  `: []byte(`{"b" : 1e2, "b":12345678901234567890.10,"a":"\u0000"}`),
		`,"data":"\ud800"`:                                                      []byte(`"\ud800"`), // JSON, and nobody's business
		`,"data":[1,"]",{"x":"\"}"}]`:                                           []byte(`[1,"]",{"x":"\"}"}]`),
		`,"data":true,"datacontenttype":"application/json"`:                     []byte("true"),
		`,"data":"","datacontenttype":"text/plain"`:                             {},
		`,"data":null,"datacontenttype":"text/plain"`:                           nil,
		`,"data":{"a": 1},"datacontenttype":"text/plain"`:                       []byte(`{"a": 1}`),
		`,"data":"<a>\n\u20ac\ud83d\ude00","datacontenttype":"application/xml"`: []byte("<a>\n€😀"),
		`,"data_base64":""`:                                                     {},
		`,"data_base64":"AP8="`:                                                 {0, 0xff},
		`,"data_base64":"AP\r\n8="`:                                             {0, 0xff},
		`,"data_base64":"e30=","datacontenttype":"application/json"`:            []byte("{}"),
	} {
		d := decode(t, withMembers(members))
		if !bytes.Equal(d.Body, want) || (d.Body == nil) != (want == nil) {
			t.Errorf("%s: body %q, want %q (nil %v)", members, d.Body, want, want == nil)
		}
		if isJSON := d.ContentType == "application/json"; isJSON && strings.Contains(members, `"data"`) && cap(d.Body) > len(d.Body) {
			t.Errorf("%s: appending to the body would write into the message", members)
		}
		implied := strings.HasPrefix(members, `,"data"`) && !strings.Contains(members, "datacontenttype")
		if implied != (d.ContentType == "application/json") && !strings.Contains(members, "application/json") {
			t.Errorf("%s: content type %q", members, d.ContentType)
		}
	}
}

func TestDecodeTombstone(t *testing.T) {
	t.Parallel()
	for _, body := range [][]byte{nil, {}} {
		m := sample().kafka()
		m.Body = body
		if d := decode(t, m); (d.Body == nil) != (body == nil) {
			t.Errorf("body %#v of %#v", d.Body, body)
		}
	}
}

func TestDecodeTimes(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Time{
		"2026-01-02T03:04:05Z":                 time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		"2026-01-02t03:04:05.123456789z":       time.Date(2026, 1, 2, 3, 4, 5, 123456789, time.UTC),
		"2026-01-02T03:04:05.1234567891-23:59": time.Date(2026, 1, 3, 3, 3, 5, 123456789, time.UTC),
		"2016-12-31T23:59:60Z":                 time.Date(2017, 1, 1, 0, 0, 0, 0, time.UTC),
		"2016-12-31T23:59:60.5Z":               time.Date(2017, 1, 1, 0, 0, 0, 5e8, time.UTC),
		"0000-01-01T00:00:00Z":                 time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC),
	} {
		for name, m := range sample("time", text).wires() {
			if d := decode(t, m); !reflect.DeepEqual(d.Time, want) {
				t.Errorf("%s: %s read as %v, want %v", name, text, d.Time, want)
			}
		}
	}
}

func TestDecodeBombs(t *testing.T) {
	t.Parallel()
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	refuse(t, withMembers(`,"data":`+strings.Repeat("[", 1_000_000)), envelope.ReasonBadJSON)
	refuse(t, withMembers(`,"data":`+deep(1_000_000)), envelope.ReasonBadJSON)
	refuse(t, withMembers(`,"ext":`+strings.Repeat(`{"a":`, 100_000)+"1"+strings.Repeat("}", 100_000)), envelope.ReasonBadJSON)
	refuse(t, &envelope.Message{Body: []byte(`{"specversion":"1.0","x":` + deep(1_000_000) + `}`)}, envelope.ReasonMissingID)
	if d := decode(t, withMembers(`,"data":`+deep(9_999))); len(d.Body) != 2*9_999 {
		t.Errorf("body of %d bytes", len(d.Body))
	}
	m := sample().kafka()
	for i := range 10_000 {
		m.Header.Add(fmt.Sprint("ce_x", i), []byte("v"))
		m.Header.Add(fmt.Sprint("own", i), []byte("v"))
	}
	if d := decode(t, m); len(d.Extensions) != 10_000 || len(d.Header) != 10_000 {
		t.Errorf("%d extensions, %d lines", len(d.Extensions), len(d.Header))
	}
	if d := decode(t, withMembers(strings.Repeat(`,"x":1`, 100_000))); len(d.Extensions) != 1 {
		t.Errorf("%d extensions", len(d.Extensions))
	}
}

// A source is a name and no address: what a URI library would make equal stays
// two sources.
func TestB04SourcesAreNotNormalised(t *testing.T) {
	t.Parallel()
	for _, source := range []string{"HTTP://Example.COM/a#", "http://example.com/a", "/lms", "/lms/", "/a%20b", "/a b", "/./a", "1-555-123-4567"} {
		for name, m := range sample("source", source).wires() {
			if d := decode(t, m); d.Source != source {
				t.Errorf("%s: source %q read as %q", name, source, d.Source)
			}
		}
	}
}
