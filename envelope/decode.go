package envelope

import (
	"mime"
	"strings"
)

// Decode reads a CloudEvent 1.0 from a message as it was on the wire, in the
// binary mode of the Kafka binding (ce_) or of the NATS and HTTP bindings
// (ce-), or in structured JSON mode, which may be announced by a content type
// or, from NATS senders of an older binding, by nothing.
//
// The result has the attributes in their fields, the payload in Body, and the
// other headers in Header. m is left untouched and may share slices with it.
// Errors match ErrNoID or ErrMalformed and are a [*FormatError].
//
// Names of headers match whatever their case; a name that occurs with two
// different values is malformed. Attributes that CloudEvents would not allow
// but that are not needed, such as an oddly named extension, are tolerated.
// Nothing is trimmed, normalised or repaired, so the identity is what the
// producer wrote; white space around an id and control characters in it are
// malformed on every transport, because some transports cannot carry them.
func Decode(m *Message) (*Message, error) {
	content, err := contentType(m.Header)
	if err != nil {
		return nil, err
	}
	switch kind, format := cloudEventsType(content); {
	case kind == "batch":
		return nil, malformed(ReasonBatch, "content-type", "send the events one by one")
	case kind == "single" && format != "" && format != "json":
		return nil, malformed(ReasonUnknownFormat, "content-type", "only the JSON format is supported")
	case kind == "single":
		return decodeStructured(m)
	}
	a, rest, err := headerAttributes(m.Header, content)
	if err != nil {
		return nil, err
	}
	if len(a) == 0 {
		if looksStructured(m.Body) {
			return decodeStructured(m)
		}
		return nil, &FormatError{Reason: ReasonMissingID, Field: "id",
			Detail: "the message is not a CloudEvent; send one, or say where the id is with FromHeader"}
	}
	d := *m
	d.Header = rest
	return &d, binaryDefaults(a, content).apply(&d)
}

// binaryDefaults puts the content type where the attributes are.
func binaryDefaults(a attributes, content string) attributes {
	if _, ok := a["datacontenttype"]; !ok && content != "" {
		a["datacontenttype"] = content
	}
	return a
}

// contentType returns the one content-type of h, "" if there is none.
func contentType(h Header) (string, error) {
	vs := h.Values("content-type")
	for _, v := range vs {
		if string(v) != string(vs[0]) {
			return "", malformed(ReasonConflict, "content-type", "it occurs with different values")
		}
	}
	if len(vs) == 0 {
		return "", nil
	}
	return string(vs[0]), nil
}

// cloudEventsType tells whether a content type announces one event or a
// batch in structured mode, and the format behind the plus sign.
func cloudEventsType(content string) (kind, format string) {
	media, _, err := mime.ParseMediaType(content)
	if err != nil {
		media, _, _ = strings.Cut(content, ";") // a broken parameter does not change the type
		media = strings.ToLower(strings.TrimSpace(media))
	}
	base, format, _ := strings.Cut(media, "+")
	switch base {
	case "application/cloudevents":
		return "single", format
	case "application/cloudevents-batch":
		return "batch", format
	}
	return "", ""
}

// headerAttributes collects the attributes of binary mode, and returns the
// headers that are none.
func headerAttributes(h Header, content string) (attributes, Header, error) {
	a := attributes{}
	var rest Header
	for _, f := range h {
		if !isAttributeHeader(f.Name) {
			rest = append(rest, f)
			continue
		}
		if strings.EqualFold(f.Name, "content-type") {
			continue
		}
		name, v := strings.ToLower(f.Name[3:]), string(f.Value)
		if f.Name[2] == '-' {
			v = unescape(v)
		}
		if had, ok := a[name]; ok && had != v {
			return nil, nil, malformed(ReasonConflict, f.Name[:3]+safeName(name), "it occurs with different values")
		}
		a[name] = v
	}
	if len(a) == 0 && content != "" {
		rest = h
	}
	return a, rest, nil
}

// safeName keeps the names of unknown attributes out of error texts.
func safeName(name string) string {
	if coreAttribute(name) {
		return name
	}
	return "extension"
}
