package envelope

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"slices"
	"strings"
)

// decodeStructured reads the JSON format of CloudEvents 1.0.
func decodeStructured(m *Message) (*Message, error) {
	a, members, err := readObject(m.Body)
	if err != nil {
		return nil, err
	}
	d := *m
	d.Header = nil
	for _, f := range m.Header {
		if !isAttributeHeader(f.Name) {
			d.Header = append(d.Header, f)
		}
	}
	if err := a.apply(&d); err != nil {
		return nil, err
	}
	d.Body, err = payload(members, d.ContentType)
	return &d, err
}

// readObject splits the document into attributes and the two members that may
// hold the payload. The document is read token by token, because a map would
// hide a member that occurs twice.
func readObject(doc []byte) (a attributes, members map[string]json.RawMessage, err error) {
	dec := json.NewDecoder(bytes.NewReader(doc))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, nil, malformed(ReasonBadJSON, "", "the body is not a JSON object")
	}
	a, members = attributes{}, map[string]json.RawMessage{}
	seen := map[string]bool{}
	for dec.More() {
		t, err := dec.Token()
		name, isName := t.(string)
		var raw json.RawMessage
		if err != nil || !isName || dec.Decode(&raw) != nil {
			return nil, nil, malformed(ReasonBadJSON, "", "the body is not valid JSON")
		}
		if seen[name] && (coreAttribute(name) || name == "data" || name == "data_base64") {
			return nil, nil, malformed(ReasonConflict, name, "it occurs twice in the document")
		}
		seen[name] = true
		if name == "data" || name == "data_base64" {
			members[name] = raw
			continue
		}
		if err := a.addJSON(name, raw); err != nil {
			return nil, nil, err
		}
	}
	if _, err := dec.Token(); err != nil { // the closing brace
		return nil, nil, malformed(ReasonBadJSON, "", "the body is not valid JSON")
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, nil, malformed(ReasonBadJSON, "", "there is something behind the document")
	}
	return a, members, nil
}

// addJSON adds one member. Null is the same as absent. An attribute that we
// need must be a string; an extension may be a number or boolean, which is
// kept in its canonical form, and anything else is passed over, because real
// producers send it and the event is readable without.
func (a attributes) addJSON(name string, raw json.RawMessage) error {
	if string(raw) == "null" {
		return nil
	}
	if raw[0] == '"' {
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			return malformed(ReasonBadJSON, safeName(name), "it is not a valid JSON string")
		}
		a[name] = s
		return nil
	}
	if coreAttribute(name) {
		return malformed(ReasonBadJSON, name, "it must be a string")
	}
	if raw[0] != '{' && raw[0] != '[' {
		a[name] = string(raw)
	}
	return nil
}

// payload takes the payload out of the document, byte for byte where it is
// JSON. Absent data is a nil body.
func payload(members map[string]json.RawMessage, content string) ([]byte, error) {
	data, hasData := members["data"]
	encoded, hasBase64 := members["data_base64"]
	switch {
	case hasData && hasBase64:
		return nil, malformed(ReasonBadData, "data", "both data and data_base64 are there")
	case hasBase64:
		return decodeBase64(encoded)
	case !hasData:
		return nil, nil
	case isJSONType(content):
		return data, nil
	}
	var s string
	if err := json.Unmarshal(data, &s); err != nil {
		return data, nil // not a string: the producer meant JSON after all
	}
	return []byte(s), nil
}

func decodeBase64(raw json.RawMessage) ([]byte, error) {
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		return nil, malformed(ReasonBadData, "data_base64", "it must be a string")
	}
	b, err := base64.StdEncoding.Strict().DecodeString(s)
	if err != nil {
		return nil, malformed(ReasonBadData, "data_base64", "it is not valid base64")
	}
	return b, nil
}

// isJSONType reports whether data of that content type is a JSON value: so it
// is when the type says nothing.
func isJSONType(content string) bool {
	if content == "" {
		return true
	}
	media, _, err := mime.ParseMediaType(content)
	if err != nil {
		return false
	}
	return strings.HasSuffix(media, "/json") || strings.HasSuffix(media, "+json")
}

// looksStructured recognises an event in JSON that nothing announces, as
// senders of the NATS binding 1.0.2 send it.
func looksStructured(body []byte) bool {
	trimmed := bytes.TrimLeft(body, " \t\r\n")
	if len(trimmed) == 0 || trimmed[0] != '{' || !bytes.Contains(body, []byte(`"specversion"`)) {
		return false
	}
	var doc struct {
		SpecVersion string `json:"specversion"`
	}
	return json.Unmarshal(body, &doc) == nil && doc.SpecVersion != ""
}

// marshalJSON writes the JSON format. A body that is valid JSON of a JSON
// type goes in as it is, every other one as base64, so that reading gives the
// same bytes back.
func marshalJSON(a attributes, body []byte) ([]byte, error) {
	names := make([]string, 0, len(a))
	for name := range a {
		names = append(names, name)
	}
	slices.Sort(names)
	var b bytes.Buffer
	b.WriteByte('{')
	for i, name := range names {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(`"` + name + `":`)
		b.Write(quote(a[name]))
	}
	switch {
	case body == nil:
	case isJSONType(a["datacontenttype"]) && verbatim(body):
		b.WriteString(`,"data":`)
		b.Write(body)
	default:
		b.WriteString(`,"data_base64":"` + base64.StdEncoding.EncodeToString(body) + `"`)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// verbatim reports whether body, put into a document, comes out of a JSON
// parser byte for byte: it is one valid value with no space around it.
func verbatim(body []byte) bool {
	return len(body) == len(bytes.TrimSpace(body)) && json.Valid(body)
}

// quote makes a JSON string of valid UTF-8.
func quote(s string) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // a string always has an encoding
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
