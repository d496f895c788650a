package envelope_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/unecho/unecho/envelope"
)

// event is what a producer says, before a binding makes a message of it. The
// wire forms below are built without the package's own encoder, so that an
// error in both directions of it cannot cancel out.
type event map[string]string

// sample returns a valid event with some attributes replaced, or left out when
// they are "-".
func sample(changes ...string) event {
	e := event{"specversion": "1.0", "id": "e-1", "source": "/orders", "type": "com.example.order.placed"}
	for i := 0; i < len(changes); i += 2 {
		if e[changes[i]] = changes[i+1]; changes[i+1] == "-" {
			delete(e, changes[i])
		}
	}
	return e
}

func (e event) header(prefix string, value func(string) string) envelope.Header {
	var h envelope.Header
	for _, name := range slices.Sorted(maps.Keys(e)) {
		h.Add(prefix+name, []byte(value(e[name])))
	}
	return h
}

// kafka is the binary mode of Kafka.
func (e event) kafka() *envelope.Message {
	return &envelope.Message{Header: e.header("ce_", func(s string) string { return s }), Body: []byte("{}")}
}

// nats is the binary mode of NATS. It escapes every byte, which a reader has
// to accept.
func (e event) nats() *envelope.Message {
	return &envelope.Message{Body: []byte("{}"), Header: e.header("ce-", func(s string) string {
		var b strings.Builder
		for i := 0; i < len(s); i++ {
			fmt.Fprintf(&b, "%%%02x", s[i])
		}
		return b.String()
	})}
}

// json is the structured mode, with a header that says so or without.
func (e event) json(contentType string) *envelope.Message {
	body, err := json.Marshal(e)
	if err != nil {
		panic(err)
	}
	m := &envelope.Message{Body: body}
	if contentType != "" {
		m.Header.Add("content-type", []byte(contentType))
	}
	return m
}

// wires are all the ways in which an event can arrive.
func (e event) wires() map[string]*envelope.Message {
	return map[string]*envelope.Message{
		"kafka binary":     e.kafka(),
		"kafka structured": e.json("application/cloudevents+json"),
		"nats binary":      e.nats(),
		"nats structured":  e.json("application/cloudevents+json; charset=UTF-8"),
		"nats headerless":  e.json(""),
	}
}

// structured is a message in structured mode with this body.
func structured(body string) *envelope.Message {
	m := &envelope.Message{Body: []byte(body)}
	m.Header.Add("content-type", []byte("application/cloudevents+json"))
	return m
}

// withMembers is a valid structured event with more members, as JSON text.
func withMembers(members string) *envelope.Message {
	return structured(`{"specversion":"1.0","id":"e-1","source":"/orders","type":"t"` + members + `}`)
}

// tb is what tests, fuzz targets and properties have in common.
type tb interface {
	Helper()
	Fatalf(format string, args ...any)
}

// decode is Decode for a message that must be readable. It also looks that
// the message stayed as it was and that Identify agrees.
func decode(t tb, m *envelope.Message) *envelope.Message {
	t.Helper()
	before := m.Clone()
	d, err := envelope.Decode(m)
	if err != nil {
		t.Fatalf("Decode: %v", err)
	}
	if !reflect.DeepEqual(m, before) {
		t.Fatalf("Decode changed its input\nfrom %+v\nto   %+v", before, m)
	}
	id, err := envelope.CloudEvents().Identify(m)
	if want := (envelope.Identity{Source: d.Source, ID: d.ID}); err != nil || id != want {
		t.Fatalf("Identify = %q, %v; Decode found %q", id, err, want)
	}
	return d
}

// refuse checks that m is refused, for this reason, by Decode and Identify.
func refuse(t tb, m *envelope.Message, reason string) {
	t.Helper()
	before := m.Clone()
	d, err := envelope.Decode(m)
	if err == nil {
		t.Fatalf("Decode accepted it as %+v; want %s", d, reason)
	}
	checkError(t, err, reason)
	if _, err := envelope.CloudEvents().Identify(m); envelope.Reason(err) != reason {
		t.Fatalf("Identify: %v; Decode said %s", err, reason)
	}
	if !reflect.DeepEqual(m, before) {
		t.Fatalf("Decode changed its input\nfrom %+v\nto   %+v", before, m)
	}
}

// checkError checks what every error of the package must be.
func checkError(t tb, err error, reason string) {
	t.Helper()
	var f *envelope.FormatError
	if !errors.As(err, &f) || f.Reason != reason || envelope.Reason(err) != reason {
		t.Fatalf("error %v has the reason %q; want %q", err, envelope.Reason(err), reason)
	}
	noID := reason == envelope.ReasonMissingID
	if errors.Is(err, envelope.ErrNoID) != noID || errors.Is(err, envelope.ErrMalformed) == noID {
		t.Fatalf("error %v matches the wrong sentinel", err)
	}
	if !strings.HasPrefix(err.Error(), "envelope: ") || !strings.Contains(err.Error(), "; ") {
		t.Fatalf("error %q has no prefix, or no advice", err)
	}
}
