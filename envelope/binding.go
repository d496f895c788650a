package envelope

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"unicode/utf8"
)

// Binding is the way in which a broker's messages carry CloudEvents.
type Binding int

const (
	// Kafka: attributes in ce_ lines as plain UTF-8, datacontenttype in
	// content-type.
	Kafka Binding = iota + 1
	// NATS: attributes in ce- lines, percent-encoded.
	NATS
)

// Mode is how an event is laid out on the wire.
type Mode int

const (
	// Binary: attributes are header lines, and the payload is the body.
	Binary Mode = iota
	// Structured: the body is a JSON object with attributes and payload. No
	// header is needed to read it, only one that says so.
	Structured
)

// structuredType is the content type of one event in the JSON format.
const structuredType = "application/cloudevents+json; charset=UTF-8"

// Encode returns the wire form of m: what an adapter publishes, and what
// [Decode] reads back. Its attribute fields are empty. Its Header has the
// attributes, or says that the body has them, and the lines of m without any
// attribute lines (ce_, ce-) and content-type that a hop has left there. Topic,
// Key, Time and Position are those of m.
//
// A message without any attribute is raw, and is passed on as it is: so a dead
// letter keeps the envelope with which it came, however broken.
//
// On NATS, a line of the message's own that the broker would refuse or alter
// (another name than an HTTP token, line breaks or white space around the
// value) is percent-encoded, raw or not, and one without a name is left out.
// Nothing in a message can add a line.
//
// An event whose ContentType is itself a CloudEvents format is written
// structured on Kafka, because in binary mode its reader would take the
// payload for the event. Only binary mode makes a tombstone of a nil Body.
//
// Encode leaves m untouched, and what it returns may share its slices. The
// error is a [*FormatError], for exactly the attributes that Decode refuses:
// an ID, Source or Type that is missing, has white space around it or a control
// character in it, text that is not UTF-8, an extension name that is none. It
// never helps to try again. A Binding or Mode that does not exist is an error
// of another type.
func (b Binding) Encode(m *Message, mode Mode) (*Message, error) {
	if b != Kafka && b != NATS {
		return nil, fmt.Errorf("envelope: there is no binding %d; use Kafka or NATS", int(b))
	}
	if mode != Binary && mode != Structured {
		return nil, fmt.Errorf("envelope: there is no mode %d; use Binary or Structured", int(mode))
	}
	w := *m
	if !m.isEvent() {
		w.Header = b.carry(m.Header)
		return &w, nil
	}
	if err := m.check(); err != nil {
		return nil, err
	}
	if b == Kafka && formatOf(m.ContentType) != formatNone {
		mode = Structured
	}
	if mode == Structured {
		w.Header = Header{{Name: b.contentType(), Value: []byte(structuredType)}}
		w.Body = m.appendJSON(nil)
	} else {
		w.Header = b.lines(m)
	}
	w.Header = append(w.Header, b.carry(withoutAttributes(m.Header))...)
	w.ID, w.Source, w.Type, w.Subject = "", "", "", ""
	w.ContentType, w.DataSchema, w.Extensions = "", "", nil
	return &w, nil
}

// carry returns a message's own lines as the broker can carry them.
func (b Binding) carry(h Header) Header {
	if b == NATS {
		return carryNATS(h)
	}
	return h
}

// contentType is the name of the content-type line, in the broker's spelling.
func (b Binding) contentType() string {
	if b == NATS {
		return "Content-Type"
	}
	return contentTypeName
}

// lines returns the attributes as header lines.
func (b Binding) lines(m *Message) Header {
	h := make(Header, 0, 8+len(m.Extensions)+len(m.Header))
	for name, value := range m.attributes() {
		switch {
		case b == NATS:
			h.Add("ce-"+name, percentEncode(value))
		case name == attrContentType:
			h.Add(contentTypeName, []byte(value))
		default:
			h.Add("ce_"+name, []byte(value))
		}
	}
	return h
}

// appendJSON appends the event in the JSON format.
func (m *Message) appendJSON(b []byte) []byte {
	sep := byte('{')
	for name, value := range m.attributes() {
		b = appendJSONString(append(b, sep), name)
		b = appendJSONString(append(b, ':'), value)
		sep = ','
	}
	return append(m.appendData(b), '}')
}

// appendData appends the payload: as it is where the format can give it back
// byte for byte, otherwise as base64. Nothing for a tombstone.
func (m *Message) appendData(b []byte) []byte {
	switch {
	case m.Body == nil:
		return b
	case m.ContentType != "" && isJSON(m.ContentType) && embeds(m.Body):
		return append(append(b, `,"data":`...), m.Body...)
	case m.ContentType != "" && !isJSON(m.ContentType) && utf8.Valid(m.Body):
		return appendJSONString(append(b, `,"data":`...), string(m.Body))
	}
	b = append(b, `,"data_base64":"`...)
	return append(base64.StdEncoding.AppendEncode(b, m.Body), '"')
}

// embeds reports whether body is JSON that can be a member of an object and be
// cut out of it again: no space around it, which would be lost, and one level
// less than a reader goes.
func embeds(body []byte) bool {
	return len(bytes.Trim(body, jsonSpace)) == len(body) && utf8.Valid(body) && json.Valid(body) && nesting(body) < maxNesting
}
