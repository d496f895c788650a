package envelope

import (
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

const specVersion = "1.0"

// attributes are the CloudEvents attributes of one message as strings, by
// lower-case name, without data. This is what all bindings have in common.
type attributes map[string]string

// apply checks a and puts it into m.
func (a attributes) apply(m *Message) error {
	switch v, ok := a["specversion"]; {
	case !ok:
		return malformed(ReasonBadVersion, "specversion", "it is missing, %s is supported", specVersion)
	case v != specVersion:
		return malformed(ReasonBadVersion, "specversion", "only %s is supported", specVersion)
	}
	if err := checkIdentity(a["source"], a["id"]); err != nil {
		return err
	}
	if a["type"] == "" {
		return malformed(ReasonMissingType, "type", "CloudEvents requires it")
	}
	if t, ok := a["time"]; ok {
		parsed, err := time.Parse(time.RFC3339Nano, t)
		if err != nil {
			return malformed(ReasonBadTime, "time", "it is not an RFC 3339 timestamp")
		}
		m.Time = parsed
	}
	m.ID, m.Source, m.Type, m.Subject = a["id"], a["source"], a["type"], a["subject"]
	m.ContentType, m.DataSchema = a["datacontenttype"], a["dataschema"]
	m.Extensions = a.extensions()
	return nil
}

func (a attributes) extensions() map[string]string {
	var x map[string]string
	for name, v := range a {
		if coreAttribute(name) {
			continue
		}
		if x == nil {
			x = make(map[string]string)
		}
		x[name] = v
	}
	return x
}

func coreAttribute(name string) bool {
	switch name {
	case "specversion", "id", "source", "type", "subject", "time", "datacontenttype", "dataschema":
		return true
	}
	return false
}

// attributesOf is the other direction: the attributes of a message that is to
// be published. They must be complete.
func attributesOf(m *Message) (attributes, error) {
	if err := checkIdentity(m.Source, m.ID); err != nil {
		return nil, err
	}
	if m.Type == "" {
		return nil, malformed(ReasonMissingType, "type", "CloudEvents requires it; set Message.Type")
	}
	a := attributes{"specversion": specVersion, "id": m.ID, "source": m.Source, "type": m.Type}
	for name, v := range map[string]string{"subject": m.Subject, "datacontenttype": m.ContentType, "dataschema": m.DataSchema} {
		if v != "" {
			a[name] = v
		}
	}
	if !m.Time.IsZero() {
		a["time"] = m.Time.Format(time.RFC3339Nano)
	}
	for name, v := range m.Extensions {
		if !validName(name) || coreAttribute(name) {
			return nil, malformed(ReasonBadExtensionName, "extension", "a name is made of a-z and 0-9 and is not that of an attribute")
		}
		a[name] = v
	}
	for name, v := range a {
		if err := checkText(name, v); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// checkIdentity holds ids and sources to what every binding carries
// unchanged: NATS trims header values and turns line breaks into spaces, so
// an id that has them would be one event on Kafka and another on NATS.
func checkIdentity(source, id string) error {
	if strings.TrimSpace(id) == "" {
		return &FormatError{Reason: ReasonMissingID, Field: "id", Detail: "it is missing, empty or blank"}
	}
	if strings.TrimSpace(source) == "" {
		return malformed(ReasonMissingSource, "source", "it is missing, empty or blank")
	}
	for _, f := range [...]struct{ name, value string }{{"id", id}, {"source", source}} {
		if err := checkText(f.name, f.value); err != nil {
			return err
		}
		if strings.TrimSpace(f.value) != f.value {
			return malformed(ReasonBadCharacter, f.name, "it begins or ends with white space")
		}
	}
	return nil
}

// checkText refuses what CloudEvents does not allow in a string.
func checkText(field, s string) error {
	if !utf8.ValidString(s) {
		return malformed(ReasonBadEncoding, field, "it is not valid UTF-8")
	}
	for i, r := range s {
		if unicode.IsControl(r) {
			return malformed(ReasonBadCharacter, field, "it has the control character %U at byte %d", r, i)
		}
	}
	return nil
}

// validName reports whether name may be the name of an attribute we write.
// What others write is read with any name.
func validName(name string) bool {
	if name == "" {
		return false
	}
	for i := 0; i < len(name); i++ {
		if c := name[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return name != "data"
}
