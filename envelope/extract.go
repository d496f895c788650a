package envelope

// CloudEvents returns the [Extractor] of messages that are CloudEvents 1.0, in
// any binding and mode that [Decode] reads. The identity is the source and the
// id attribute. It is a [Decoder] too.
func CloudEvents() Extractor { return cloudEvents{} }

type cloudEvents struct{}

// Identify has the verdict of Decode: an event whose payload cannot be read
// must not take the identity of its repaired copy.
func (cloudEvents) Identify(m *Message) (Identity, error) {
	d, err := Decode(m)
	if err != nil {
		return Identity{}, err
	}
	return Identity{Source: d.Source, ID: d.ID}, nil
}

func (cloudEvents) Decode(m *Message) (*Message, error) { return Decode(m) }

// FromHeader returns the [Extractor] of messages that have their id in the
// header line name, byte for byte. Case does not matter in the name. source
// says within what ids are unique; when it is empty that is the message's
// Topic. The messages reach the handler as they are on the wire.
//
// A message without such a line, or with an empty or blank one, is an
// [ErrNoID]. It is an [ErrMalformed] if two lines differ, or if the id or the
// source has white space around it, a control character in it, or is not
// UTF-8. FromHeader panics if name is empty, or if source is not fit to be one.
func FromHeader(name, source string) Extractor {
	if name == "" {
		panic("envelope: FromHeader: the name is empty; name the header line that has the id")
	}
	if source != "" {
		if err := checkIdentity("source", source, ReasonMissingSource); err != nil {
			panic("envelope: FromHeader: " + err.Error())
		}
	}
	return fromHeader{name: name, source: source}
}

type fromHeader struct{ name, source string }

func (x fromHeader) Identify(m *Message) (Identity, error) {
	v, _, same := m.Header.one(x.name)
	if !same {
		return Identity{}, &FormatError{Reason: ReasonConflictingID, Field: x.name}
	}
	id := Identity{Source: x.source, ID: string(v)}
	if id.Source == "" {
		id.Source = m.Topic
	}
	if err := checkIdentity(x.name, id.ID, ReasonMissingID); err != nil {
		return Identity{}, err
	}
	if err := checkIdentity(attrSource, id.Source, ReasonMissingSource); err != nil {
		return Identity{}, err
	}
	return id, nil
}
