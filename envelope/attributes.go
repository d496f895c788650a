package envelope

import (
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// The attributes that CloudEvents defines, and the JSON members of the payload.
const (
	attrSpecversion = "specversion"
	attrID          = "id"
	attrSource      = "source"
	attrType        = "type"
	attrSubject     = "subject"
	attrTime        = "time"
	attrContentType = "datacontenttype"
	attrDataSchema  = "dataschema"
	memberData      = "data"
	memberBase64    = "data_base64"
)

const specversion = "1.0"

// isExtensionName reports whether an extension attribute can have this name on
// every broker. CloudEvents wants letters and digits; what else a header line
// can carry is let through, for events that are already on their way.
func isExtensionName(name string) bool {
	switch name {
	case "", attrSpecversion, attrID, attrSource, attrType, attrSubject, attrTime,
		attrContentType, attrDataSchema, memberData, memberBase64:
		return false
	}
	for i := 0; i < len(name); i++ {
		if c := name[i]; !isToken(c) || lowerByte(c) != c {
			return false
		}
	}
	return true
}

// isEvent reports whether attributes are set, other than on a raw message.
func (m *Message) isEvent() bool {
	return m.ID != "" || m.Source != "" || m.Type != "" || m.Subject != "" ||
		m.ContentType != "" || m.DataSchema != "" || len(m.Extensions) > 0
}

// check returns what is wrong with the attributes of m. Decode and Encode both
// call it, so that a message is refused by both or by neither.
func (m *Message) check() error {
	if err := checkIdentity(attrID, m.ID, ReasonMissingID); err != nil {
		return err
	}
	if err := checkIdentity(attrSource, m.Source, ReasonMissingSource); err != nil {
		return err
	}
	// The type is no part of the identity, but it is of what is compared when
	// an identity comes again, so it must survive every broker too.
	if err := checkIdentity(attrType, m.Type, ReasonMissingType); err != nil {
		return err
	}
	for _, name := range m.extensionNames() {
		if !isExtensionName(name) {
			return &FormatError{Reason: ReasonBadExtensionName, Field: strconv.Quote(name)}
		}
	}
	for name, value := range m.attributes() {
		if !utf8.ValidString(value) {
			return &FormatError{Reason: ReasonBadEncoding, Field: name}
		}
	}
	if !isWritable(m.Time) {
		return &FormatError{Reason: ReasonBadTime, Field: attrTime}
	}
	return nil
}

// isWritable reports whether RFC 3339 has a form for t.
func isWritable(t time.Time) bool {
	y := t.UTC().Year()
	return y >= 0 && y <= 9999
}

// extensionNames returns the names of the extensions in a fixed order.
func (m *Message) extensionNames() []string {
	if len(m.Extensions) == 0 {
		return nil
	}
	return slices.Sorted(maps.Keys(m.Extensions))
}

// checkIdentity refuses what brokers alter on the way, besides what is missing.
func checkIdentity(field, value, missing string) error {
	trimmed := strings.TrimSpace(value)
	reason := ""
	switch {
	case trimmed == "":
		reason = missing
	case !utf8.ValidString(value):
		reason = ReasonBadEncoding
	case strings.ContainsFunc(value, isControl):
		reason = ReasonControlCharacter
	case trimmed != value:
		reason = ReasonSurroundingSpace
	default:
		return nil
	}
	return &FormatError{Reason: reason, Field: field}
}

func isControl(r rune) bool { return r < 0x20 || r >= 0x7f && r <= 0x9f }

// attributes yields the attributes that are set, by name, in a fixed order.
func (m *Message) attributes() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		known := [...]struct{ name, value string }{
			{attrSpecversion, specversion},
			{attrID, m.ID},
			{attrSource, m.Source},
			{attrType, m.Type},
			{attrSubject, m.Subject},
			{attrTime, formatTime(m.Time)},
			{attrContentType, m.ContentType},
			{attrDataSchema, m.DataSchema},
		}
		for _, a := range known {
			if a.value != "" && !yield(a.name, a.value) {
				return
			}
		}
		for _, name := range m.extensionNames() {
			if !yield(name, m.Extensions[name]) {
				return
			}
		}
	}
}

func formatTime(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// parseTime reads a time of RFC 3339, with what the standard allows beyond
// time.Parse: small letters, and the leap second, which is the next second.
func parseTime(s string) (time.Time, error) {
	s = strings.ToUpper(s)
	var leap time.Duration
	if len(s) > 19 && s[17:19] == "60" {
		s, leap = s[:17]+"59"+s[19:], time.Second
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return time.Time{}, &FormatError{Reason: ReasonBadTime, Field: attrTime}
	}
	return t.UTC().Add(leap), nil
}

// parts are the attributes of one event as they were read, before they are
// judged as a whole.
type parts struct {
	specversion, id, source, typ, subject, time, contentType, dataSchema part
	extensions                                                           map[string]string
	torn                                                                 map[string]bool // extensions that said two things
}

type part struct {
	text string
	seen bool // which it may have been without text
}

// of returns the part of an attribute that CloudEvents defines, otherwise nil.
func (p *parts) of(name string) *part {
	switch name {
	case attrSpecversion:
		return &p.specversion
	case attrID:
		return &p.id
	case attrSource:
		return &p.source
	case attrType:
		return &p.typ
	case attrSubject:
		return &p.subject
	case attrTime:
		return &p.time
	case attrContentType:
		return &p.contentType
	case attrDataSchema:
		return &p.dataSchema
	}
	return nil
}

// extend notes an extension attribute, unless there is nothing certain that
// could be carried on. It never fails: no extension is worth losing an event
// whose identity can be read.
func (p *parts) extend(name, text string) {
	name = lower(name)
	if !isExtensionName(name) || !utf8.ValidString(text) || p.torn[name] {
		return
	}
	if old, ok := p.extensions[name]; ok && old != text {
		delete(p.extensions, name)
		if p.torn == nil {
			p.torn = make(map[string]bool)
		}
		p.torn[name] = true
		return
	}
	if p.extensions == nil {
		p.extensions = make(map[string]string)
	}
	p.extensions[name] = text
}

// event makes the decoded message of raw: the parts in their fields, and the
// header without them.
func (p *parts) event(raw *Message) (*Message, error) {
	if v := p.specversion.text; v != "" && v != specversion {
		return nil, &FormatError{Reason: ReasonBadVersion, Field: attrSpecversion}
	}
	m := *raw
	m.ID, m.Source, m.Type, m.Subject = p.id.text, p.source.text, p.typ.text, p.subject.text
	m.ContentType, m.DataSchema = p.contentType.text, p.dataSchema.text
	m.Extensions = nil
	if len(p.extensions) > 0 {
		m.Extensions = p.extensions
	}
	m.Header = withoutAttributes(raw.Header)
	if !isWritable(m.Time) { // the broker's, which is not the event's fault
		m.Time = time.Time{}
	}
	if err := m.check(); err != nil {
		return nil, err
	}
	if p.specversion.text == "" {
		return nil, &FormatError{Reason: ReasonMissingVersion, Field: attrSpecversion}
	}
	if p.time.text != "" {
		t, err := parseTime(p.time.text)
		if err != nil {
			return nil, err
		}
		m.Time = t
	}
	return &m, nil
}
