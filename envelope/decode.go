package envelope

import "slices"

// contentTypeName is the header line that says in which mode an event is, and
// in Kafka's binary mode what its payload is.
const contentTypeName = "content-type"

// Decode reads the CloudEvent that m carries in its wire form, in whatever
// binding and mode it is, and returns it with its attributes in their fields,
// its payload in Body, and a Header without attribute lines (ce_, ce-) and
// without content-type. The other fields are those of m; so is Time if the
// event does not say when it happened. JSON without a datacontenttype has the
// ContentType application/json.
//
// A message that has attributes in its fields was decoded before: it is
// checked and returned as it is, but for a Header as above.
//
// Decode leaves m untouched, and what it returns may share the slices and the
// map of m. The error is a [*FormatError]: it matches [ErrNoID] if m names no
// event, and [ErrMalformed] if m cannot be read. Decode may be called
// concurrently, also on one message.
func Decode(m *Message) (*Message, error) {
	if m.isEvent() {
		return decoded(m)
	}
	contentType, err := oneContentType(m.Header)
	if err != nil {
		return nil, err
	}
	switch formatOf(contentType) {
	case formatJSON:
		return decodeStructured(m)
	case formatBatch:
		return nil, &FormatError{Reason: ReasonBatch, Field: contentTypeName}
	case formatOther:
		return nil, &FormatError{Reason: ReasonUnknownFormat, Field: contentTypeName}
	}
	p, err := readHeader(m.Header)
	if err != nil {
		return nil, err
	}
	if p.specversion.text == "" && looksStructured(m.Body) {
		return decodeStructured(m)
	}
	if p.contentType.text == "" {
		p.contentType.text = contentType
	}
	d, err := p.event(m)
	if err != nil && !slices.ContainsFunc(m.Header, isAttribute) {
		return nil, &FormatError{Reason: ReasonMissingID, Detail: "the message is no CloudEvent; if its id is elsewhere, say so with FromHeader or an Extractor of your own"}
	}
	return d, err
}

// decoded is Decode for a message that was decoded before.
func decoded(m *Message) (*Message, error) {
	if err := m.check(); err != nil {
		return nil, err
	}
	c := *m
	c.Header = withoutAttributes(m.Header)
	return &c, nil
}

// oneContentType returns the content-type that the header states, "" if none.
func oneContentType(h Header) (string, error) {
	v, ok, same := h.one(contentTypeName)
	switch {
	case !same:
		return "", &FormatError{Reason: ReasonConflict, Field: contentTypeName}
	case !ok:
		return "", nil
	}
	return string(v), nil
}

// one returns the value of name if all its lines have the same.
func (h Header) one(name string) (value []byte, ok, same bool) {
	for i := range h {
		if !equalFold(h[i].Name, name) {
			continue
		}
		if ok && string(h[i].Value) != string(value) {
			return nil, true, false
		}
		value, ok = h[i].Value, true
	}
	return value, ok, true
}

// readHeader reads the attribute lines of both bindings. A message can have
// both kinds after a bridge has added its own; they must say the same.
func readHeader(h Header) (*parts, error) {
	p := new(parts)
	for i := range h {
		name, text, ok := attributeOf(&h[i])
		if !ok {
			continue
		}
		v := p.of(name)
		switch {
		case v == nil:
			p.extend(name, text)
		case v.seen && v.text != text:
			return nil, conflict(name)
		default:
			*v = part{text: text, seen: true}
		}
	}
	return p, nil
}

func conflict(name string) error {
	if name == attrID {
		return &FormatError{Reason: ReasonConflictingID, Field: name}
	}
	return &FormatError{Reason: ReasonConflict, Field: name}
}

// isAttributeLine reports whether a line of this name belongs to an event.
func isAttributeLine(name string) bool {
	return len(name) >= 3 && lowerByte(name[0]) == 'c' && lowerByte(name[1]) == 'e' &&
		(name[2] == '_' || name[2] == '-')
}

func isAttribute(f Field) bool { return isAttributeLine(f.Name) }

// attributeOf returns the attribute, by its lower-case name, that a line states.
func attributeOf(f *Field) (name, text string, ok bool) {
	if !isAttributeLine(f.Name) {
		return "", "", false
	}
	name = lower(f.Name[3:])
	if f.Name[2] == '-' {
		return name, percentDecode(f.Value), true
	}
	return name, string(f.Value), true
}

// withoutAttributes returns the lines of h that are not the envelope's.
func withoutAttributes(h Header) Header {
	var own Header
	for _, f := range h {
		if !isAttributeLine(f.Name) && !equalFold(f.Name, contentTypeName) {
			own = append(own, f)
		}
	}
	return own
}
