package envelope

import "time"

// Message is one event, on its way to a broker or as it came from one.
//
// The same struct serves both directions. What an adapter receives is raw:
// Header and Body are what was on the wire, and the CloudEvents attributes
// (ID, Source, Type, Subject, ContentType, DataSchema, Extensions) are empty
// until [Decode] has lifted them out. What a producer publishes has the
// attributes set, and the adapter writes them in its broker's binding, with
// [Binding.Encode].
//
// A Message is not safe for concurrent mutation. Whoever receives one may
// read it and everything it points to, and must not modify the slices: an
// adapter may share them between messages.
type Message struct {
	// ID and Source name the event: together they are its identity, and two
	// messages that carry the same pair are copies of one event. An ID alone
	// is not an identity.
	ID, Source string
	// Type says what happened, Subject to what. Neither is part of the identity.
	Type, Subject string
	// ContentType is the media type of Body (the datacontenttype attribute);
	// empty when unknown.
	ContentType string
	// DataSchema is the URI of the schema Body adheres to; empty when unknown.
	DataSchema string
	// Extensions are the CloudEvents attributes that have no field of their
	// own, by lower-case name, in their canonical string form: "true", "42".
	// May be nil.
	Extensions map[string]string

	// Topic is the Kafka topic or the NATS subject.
	Topic string
	// Key is the ordering key: messages with an equal Topic and Key keep their
	// order. Nil is unordered; an empty, non-nil Key is a key like any other.
	Key []byte
	// Header holds what the transport carries beside the event. On a message
	// that was decoded or is to be published it holds no CloudEvents attribute.
	Header Header
	// Body is the payload. Nil is a tombstone, empty is an empty payload.
	Body []byte
	// Time is when the event happened (the time attribute, in UTC after
	// Decode), or when the broker stored it if the envelope does not say; the
	// zero value is unknown.
	Time time.Time

	// Position is where the broker keeps this copy, for people and for logs:
	// "topic/partition/offset" or "stream/sequence". Adapters set it on what
	// they receive; it is empty on what is published. Two copies of one event
	// have two positions.
	Position string
}

// Clone returns a copy that shares no mutable memory with m.
// Nil and empty slices stay what they are. Clone of nil is nil.
func (m *Message) Clone() *Message {
	if m == nil {
		return nil
	}
	c := *m
	c.Key = cloneBytes(m.Key)
	c.Body = cloneBytes(m.Body)
	c.Header = m.Header.Clone()
	if m.Extensions != nil {
		c.Extensions = make(map[string]string, len(m.Extensions))
		for k, v := range m.Extensions {
			c.Extensions[k] = v
		}
	}
	return &c
}

// cloneBytes keeps the difference between nil and empty, which bytes.Clone
// does as well, and never returns spare capacity of the original.
func cloneBytes(b []byte) []byte {
	if b == nil {
		return nil
	}
	return append(make([]byte, 0, len(b)), b...)
}
