package pgparking

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/unecho/unecho/envelope"
)

// errMeta: the column was not written by this package, or by a newer one.
var errMeta = errors.New("the stored message cannot be read by this version")

const metaVersion = 1

// meta is what a message has beside its key and its body. All of it is bytes, and
// so base64 in JSON, because names and values on the wire may be no text; nil and
// empty are told apart.
type meta struct {
	V        int     `json:"v"`
	Topic    []byte  `json:"topic"`
	Position []byte  `json:"position"`
	Header   []field `json:"header"`
	Time     []byte  `json:"time"`
	Event    *event  `json:"event,omitempty"`
}

type field struct {
	N []byte `json:"n"`
	V []byte `json:"v"`
}

// event is what an adapter has decoded that decodes by itself.
type event struct {
	ID, Source, Type, Subject, ContentType, DataSchema []byte
	Extensions                                         []field
}

func encodeMeta(m *envelope.Message) []byte {
	t, _ := m.Time.UTC().MarshalBinary() // UTC has a form
	w := meta{V: metaVersion, Topic: []byte(m.Topic), Position: []byte(m.Position), Time: t}
	if m.Header != nil {
		w.Header = make([]field, len(m.Header))
	}
	for i, f := range m.Header {
		w.Header[i] = field{[]byte(f.Name), f.Value}
	}
	if m.ID != "" || m.Source != "" || m.Type != "" || m.Subject != "" || m.ContentType != "" || m.DataSchema != "" || m.Extensions != nil {
		w.Event = &event{ID: []byte(m.ID), Source: []byte(m.Source), Type: []byte(m.Type), Subject: []byte(m.Subject),
			ContentType: []byte(m.ContentType), DataSchema: []byte(m.DataSchema)}
		for name, value := range m.Extensions {
			w.Event.Extensions = append(w.Event.Extensions, field{[]byte(name), []byte(value)})
		}
	}
	b, _ := json.Marshal(w) // bytes and numbers have a form
	return b
}

func decodeMeta(b []byte) (*envelope.Message, error) {
	var w meta
	if err := json.Unmarshal(b, &w); err != nil {
		return nil, err
	}
	if w.V != metaVersion {
		return nil, errors.New("its version is another one")
	}
	var at time.Time
	if err := at.UnmarshalBinary(w.Time); err != nil {
		return nil, err
	}
	m := &envelope.Message{Topic: string(w.Topic), Position: string(w.Position), Time: at}
	if w.Header != nil {
		m.Header = make(envelope.Header, len(w.Header))
	}
	for i, f := range w.Header {
		m.Header[i] = envelope.Field{Name: string(f.N), Value: f.V}
	}
	if e := w.Event; e != nil {
		m.ID, m.Source, m.Type, m.Subject = string(e.ID), string(e.Source), string(e.Type), string(e.Subject)
		m.ContentType, m.DataSchema = string(e.ContentType), string(e.DataSchema)
		m.Extensions = make(map[string]string, len(e.Extensions))
		for _, f := range e.Extensions {
			m.Extensions[string(f.N)] = string(f.V)
		}
	}
	return m, nil
}
