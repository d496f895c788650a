package wire

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// raw is a message as a foreign producer writes it. prefix is what attributes begin
// with on this broker: a header's name may have it in place of "ce:".
func raw(body string, headers ...string) func(prefix string) *envelope.Message {
	return func(prefix string) *envelope.Message {
		m := &envelope.Message{Body: []byte(body)}
		for i := 0; i < len(headers); i += 2 {
			name := headers[i]
			if len(name) > 3 && (name[:3] == "ce:" || name[:3] == "CE:" || name[:3] == "Ce:") {
				name = name[:2] + prefix + name[3:]
			}
			m.Header.Add(name, []byte(headers[i+1]))
		}
		return m
	}
}

// prefixOf is the sign between "ce" and the name of an attribute.
func (w *way) prefixOf() string {
	if w.name[:5] == "Kafka" {
		return "_"
	}
	return "-"
}

// once is one way of each broker: foreign messages have a mode of their own.
func once(t *testing.T) []*way {
	t.Helper()
	return []*way{kafka(t, "foreign", envelope.Binary), nats(t, "foreign", envelope.Binary)}
}

// B09: names of headers are read in any case, and no other name passes for one.
func TestB09SpellingsOfHeaders(t *testing.T) {
	spellings := []func(string) *envelope.Message{
		raw("x", "ce:specversion", "1.0", "ce:id", "1", "ce:source", "/s", "ce:type", "t"),
		raw("x", "CE:SPECVERSION", "1.0", "CE:ID", "1", "CE:SOURCE", "/s", "CE:TYPE", "t"),
		raw("x", "Ce:Specversion", "1.0", "Ce:Id", "1", "Ce:Source", "/s", "Ce:Type", "t", "CONTENT-TYPE", "text/plain"),
		raw("x", "ce:specversion", "1.0", "ce:id", "1", "ce:source", "/s", "ce:type", "t", "x_ce_id", "2", "orig-ce-id", "3", "ce", "4", "ceid", "5"),
		raw("x", "ce:specversion", "1.0", "ce:id", "1", "ce:source", "/s", "ce:type", "t", "CE:ID", "1"), // says it twice
	}
	st := memdedupe.NewStore(nil)
	for i, w := range once(t) {
		for _, s := range spellings {
			if err := w.publish(t, s(w.prefixOf())); err != nil {
				t.Fatal(err)
			}
		}
		two := raw("x", "ce:specversion", "1.0", "ce:id", "1", "CE:ID", "2", "ce:source", "/s", "ce:type", "t")
		if err := w.publish(t, two(w.prefixOf())); err != nil {
			t.Fatal(err)
		}
		last := fmt.Sprint("last ", i)
		if err := w.publish(t, event(last)); err != nil {
			t.Fatal(err)
		}
		got := w.consume(t, st, last)
		if n := got.outcomes[dedupe.Conflict]; len(got.keys) != 2 || n != 0 {
			t.Errorf("%s: %d keys and %d conflicts, want one event and the last: %v", w.name, len(got.keys), n, got.handled)
		}
		if !slices.Equal(got.dead, []string{envelope.ReasonConflictingID}) {
			t.Errorf("%s: dead letters %q, want one for two ids", w.name, got.dead)
		}
	}
}

// B02 and B11: what cannot be read is a dead letter at once, with its bytes and the
// reason, and what is behind it is handled.
func TestB02UnreadableEnvelopes(t *testing.T) {
	const structured, batch = "application/cloudevents+json", "application/cloudevents-batch+json"
	const good = `{"specversion":"1.0","id":"%s","source":"/s","type":"t","data":1}`
	table := []struct {
		what   string
		m      func(string) *envelope.Message
		reason string // "" is handled
	}{
		{"truncated JSON", raw(`{"specversion":"1.0","id":"b1"`, "content-type", structured), envelope.ReasonBadJSON},
		{"an array", raw(`[1,2]`, "content-type", structured), envelope.ReasonNotAnObject},
		{"another version", raw(`{"specversion":"9.9","id":"b2","source":"/s","type":"t"}`, "content-type", structured), envelope.ReasonBadVersion},
		{"no source", raw(`{"specversion":"1.0","id":"b3","type":"t"}`, "content-type", structured), envelope.ReasonMissingSource},
		{"an id alone", raw("x", "ce:id", "b4"), envelope.ReasonMissingSource},
		{"no such time", raw(`{"specversion":"1.0","id":"b5","source":"/s","type":"t","time":"yesterday"}`, "content-type", structured), envelope.ReasonBadTime},
		{"an odd extension", raw(`{"specversion":"1.0","id":"ok1","source":"/s","type":"t","confluentRouting":{"a":1}}`, "content-type", structured), ""},
		{"a batch", raw("["+fmt.Sprintf(good, "b6")+"]", "content-type", batch), envelope.ReasonBatch},
		{"an empty batch", raw("[]", "content-type", batch), envelope.ReasonBatch},
		{"parameters and case", raw(fmt.Sprintf(good, "ok2"), "content-type", "Application/CloudEvents+JSON;charset=UTF-8"), ""},
		{"nothing at all", raw("x"), envelope.ReasonMissingID},
	}
	for i, w := range once(t) {
		var want []string
		var wantBodies [][]byte
		for n, c := range table {
			m := c.m(w.prefixOf())
			if err := w.publish(t, m); err != nil {
				t.Fatalf("%s: %s: %v", w.name, c.what, err)
			}
			if c.reason != "" {
				want, wantBodies = append(want, c.reason), append(wantBodies, m.Body)
			}
			if err := w.publish(t, event(fmt.Sprint("behind ", n))); err != nil {
				t.Fatal(err)
			}
		}
		last := fmt.Sprint("last ", i)
		if err := w.publish(t, event(last)); err != nil {
			t.Fatal(err)
		}
		got := w.consume(t, memdedupe.NewStore(nil), last)
		if !slices.Equal(got.dead, want) {
			t.Errorf("%s: dead letters %q, want %q", w.name, got.dead, want)
		}
		if !slices.EqualFunc(got.bodies, wantBodies, bytes.Equal) {
			t.Errorf("%s: the dead letters have the bodies %q, want %q", w.name, got.bodies, wantBodies)
		}
		for n, c := range table {
			if !slices.Contains(got.handled, fmt.Sprint("behind ", n)) {
				t.Errorf("%s: what is behind %s was not handled", w.name, c.what)
			}
		}
		if n := len(table)*2 + 1 - len(want); len(got.handled) != n {
			t.Errorf("%s: handled %q, want %d", w.name, got.handled, n)
		}
	}
}
