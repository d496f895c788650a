package envelope

import (
	"slices"
	"strings"
)

// Mode is where the attributes of an event go.
type Mode int

const (
	// Binary puts the attributes into headers and the payload into the body.
	Binary Mode = iota
	// Structured puts both into one JSON document.
	Structured
)

// Binding is the way CloudEvents 1.0 are written on one kind of transport.
// Reading needs none: [Decode] recognises them all.
type Binding struct {
	prefix      string // of attribute headers
	contentType string // the header of the payload's media type in binary mode, "" if it is an attribute
	structured  string // the header that announces structured mode
	escape      bool   // percent-encode header values
}

var (
	// Kafka is the Kafka protocol binding: headers ce_id and so on in plain
	// UTF-8, and content-type.
	Kafka = Binding{prefix: "ce_", contentType: "content-type", structured: "content-type"}
	// NATS is the NATS protocol binding: headers ce-id and so on, percent-
	// encoded, among them ce-datacontenttype. Binary mode is part of the
	// binding's version 1.0.3; a consumer that knows 1.0.2 only needs
	// Structured.
	NATS = Binding{prefix: "ce-", structured: "Content-Type", escape: true}
)

const structuredType = "application/cloudevents+json"

// Encode returns the wire form of m: the attributes are in Header and Body as
// the binding wants them, and the attribute fields are empty. m is left
// untouched; the result may share its slices. Headers of m that would be read
// as attributes are dropped, so a message that hops carries them once.
//
// A message with neither ID, Source nor Type is passed on as it is, its
// headers included: that is how a raw message is published again. Otherwise
// all three must be there, and every attribute must be such that every
// binding carries it; the error matches ErrNoID or ErrMalformed.
func (b Binding) Encode(m *Message, mode Mode) (*Message, error) {
	if m.ID == "" && m.Source == "" && m.Type == "" {
		return m, nil
	}
	a, err := attributesOf(m)
	if err != nil {
		return nil, err
	}
	w := &Message{Topic: m.Topic, Key: m.Key, Body: m.Body, Time: m.Time, Position: m.Position}
	for _, f := range m.Header {
		if !isAttributeHeader(f.Name) {
			w.Header = append(w.Header, f)
		}
	}
	if mode == Structured {
		w.Header.Add(b.structured, []byte(structuredType+"; charset=UTF-8"))
		w.Body, err = marshalJSON(a, m.Body)
		return w, err
	}
	b.writeHeaders(a, w)
	return w, nil
}

// writeHeaders adds the attributes in the order of their names, so that one
// event has one wire form.
func (b Binding) writeHeaders(a attributes, w *Message) {
	names := make([]string, 0, len(a))
	for name := range a {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		header := b.prefix + name
		if name == "datacontenttype" && b.contentType != "" {
			header = b.contentType
		}
		v := a[name]
		if b.escape {
			v = escape(v)
		}
		w.Header.Add(header, []byte(v))
	}
}

// isAttributeHeader reports whether [Decode] takes a header of that name for
// an attribute.
func isAttributeHeader(name string) bool {
	if len(name) < 3 {
		return false
	}
	p := strings.ToLower(name[:3])
	return p == "ce_" || p == "ce-" || strings.EqualFold(name, "content-type")
}

// escape percent-encodes what the HTTP binding, section 3.1.3.2, and with it
// the NATS binding asks for: space, quote, percent, and all but U+0021-7E.
func escape(s string) string {
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c <= ' ' || c == '"' || c == '%' || c > '~' {
			b.WriteByte('%')
			b.WriteByte(hex[c>>4])
			b.WriteByte(hex[c&15])
			continue
		}
		b.WriteByte(c)
	}
	return b.String()
}

// unescape undoes escape. A percent sign that begins no escape stays as it
// is: not every sender encodes (the Go and Java SDKs do not), and such a
// value must not lose its message.
func unescape(s string) string {
	if !strings.Contains(s, "%") {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if hi, lo := unhex(s[i+1]), unhex(s[i+2]); hi >= 0 && lo >= 0 {
				b.WriteByte(byte(hi<<4 | lo))
				i += 2
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func unhex(c byte) int {
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
