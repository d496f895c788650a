package envelope

import "encoding/base64"

// structured is a JSON event as it was read: its attributes, and the JSON
// values of its payload, nil if absent.
type structured struct {
	parts
	data, base64 []byte
}

// decodeStructured is Decode for an event in the JSON format.
func decodeStructured(m *Message) (*Message, error) {
	s, err := readStructured(m.Body)
	if err != nil {
		return nil, err
	}
	if err := s.agree(m.Header); err != nil {
		return nil, err
	}
	body, err := s.payload()
	if err != nil {
		return nil, err
	}
	d, err := s.event(m)
	if err != nil {
		return nil, err
	}
	d.Body = body
	return d, nil
}

func readStructured(body []byte) (*structured, error) {
	if err := checkObject(body); err != nil {
		return nil, err
	}
	s := new(structured)
	for name, value := range members(body) {
		if err := s.add(name, value); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// add notes one member.
func (s *structured) add(name string, value []byte) error {
	switch name {
	case memberData:
		return once(&s.data, name, value)
	case memberBase64:
		return once(&s.base64, name, value)
	}
	p := s.of(name)
	if p == nil {
		if text, ok := extensionText(value); ok {
			s.extend(name, text)
		}
		return nil
	}
	if p.seen {
		return &FormatError{Reason: ReasonDuplicateMember, Field: name}
	}
	p.seen = true
	if value[0] == 'n' { // null is absent
		return nil
	}
	text, err := stringOf(name, value)
	p.text = text
	return err
}

func once(member *[]byte, name string, value []byte) error {
	if *member != nil {
		return &FormatError{Reason: ReasonDuplicateMember, Field: name}
	}
	*member = value
	return nil
}

// stringOf returns what a JSON string says.
func stringOf(name string, value []byte) (string, error) {
	if value[0] != '"' {
		return "", &FormatError{Reason: ReasonNotAString, Field: name}
	}
	text, ok := unquote(value)
	if !ok {
		return "", &FormatError{Reason: ReasonBadEncoding, Field: name}
	}
	return text, nil
}

// extensionText returns the canonical string of a JSON value: what a string
// says, and the JSON text of anything else. A null has none.
func extensionText(value []byte) (string, bool) {
	switch value[0] {
	case 'n':
		return "", false
	case '"':
		return unquote(value)
	}
	return string(value), true
}

// agree refuses an identity in the header that is not the one in the body.
// The body would decide, but a hop that only looks at the header has decided
// otherwise, and one of them is wrong.
func (s *structured) agree(h Header) error {
	for i := range h {
		name, text, ok := attributeOf(&h[i])
		if !ok {
			continue
		}
		if name == attrID && text != s.id.text || name == attrSource && text != s.source.text {
			return conflict(name)
		}
	}
	return nil
}

// payload returns the body of the event, nil if it has none.
func (s *structured) payload() ([]byte, error) {
	if s.base64 != nil && s.base64[0] == 'n' { // null is absent
		s.base64 = nil
	}
	switch {
	case s.base64 != nil && s.data != nil:
		return nil, &FormatError{Reason: ReasonDataTwice, Field: memberData}
	case s.base64 != nil:
		return decodeBase64(s.base64)
	case s.data == nil:
		return nil, nil
	}
	if s.contentType.text == "" {
		s.contentType.text = "application/json" // what the format says it is
	}
	if isJSON(s.contentType.text) {
		return s.data, nil
	}
	switch s.data[0] {
	case '"':
	case 'n': // no string, and no JSON either
		return nil, nil
	default: // not what the format asks for, but there is only one way to read it
		return s.data, nil
	}
	text, err := stringOf(memberData, s.data)
	if err != nil {
		return nil, err
	}
	return []byte(text), nil
}

func decodeBase64(value []byte) ([]byte, error) {
	text, err := stringOf(memberBase64, value)
	if err != nil {
		return nil, err
	}
	body, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, &FormatError{Reason: ReasonBadBase64, Field: memberBase64}
	}
	return body, nil
}
