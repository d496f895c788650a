package envelope

// CloudEvents returns the extractor for CloudEvents 1.0 in any mode that
// [Decode] reads. It is a [Decoder] too.
func CloudEvents() Extractor { return cloudEvents{} }

type cloudEvents struct{}

func (cloudEvents) Identify(m *Message) (Identity, error) {
	d, err := Decode(m)
	if err != nil {
		return Identity{}, err
	}
	return Identity{Source: d.Source, ID: d.ID}, nil
}

func (cloudEvents) Decode(m *Message) (*Message, error) { return Decode(m) }

// FromHeader returns an extractor that takes the id from one header, whatever
// the case of its name, and calls the source by a fixed name: ids of two
// producers may coincide, so give each of them a source of its own. With an
// empty source the message's topic is the source.
//
// The header must occur with one value only. A missing, empty or blank value
// matches ErrNoID; what no binding could carry is malformed, as for
// CloudEvents.
func FromHeader(name, source string) Extractor {
	return ExtractorFunc(func(m *Message) (Identity, error) {
		vs := m.Header.Values(name)
		if len(vs) == 0 {
			return Identity{}, &FormatError{Reason: ReasonMissingID, Field: name, Detail: "there is no such header"}
		}
		for _, v := range vs {
			if string(v) != string(vs[0]) {
				return Identity{}, malformed(ReasonConflict, name, "it occurs with different values")
			}
		}
		id := Identity{Source: source, ID: string(vs[0])}
		if source == "" {
			id.Source = m.Topic
		}
		return id, checkIdentity(id.Source, id.ID)
	})
}
