package envelope

import "errors"

// The reasons of a [FormatError]: stable, machine-readable, without blanks.
const (
	// ReasonMissingID: no id, or one that is empty or blank.
	ReasonMissingID = "missing_id"
	// ReasonMissingSource: no source, or one that is empty or blank.
	ReasonMissingSource = "missing_source"
	// ReasonMissingType: no type, or one that is empty or blank.
	ReasonMissingType = "missing_type"
	// ReasonMissingVersion: an id, but no specversion.
	ReasonMissingVersion = "missing_specversion"
	// ReasonBadVersion: a version of CloudEvents other than 1.0.
	ReasonBadVersion = "bad_specversion"
	// ReasonConflictingID: two different ids in one message.
	ReasonConflictingID = "conflicting_id"
	// ReasonConflict: two values for another attribute.
	ReasonConflict = "conflicting_values"
	// ReasonControlCharacter: a control character in what must have none.
	ReasonControlCharacter = "control_character"
	// ReasonSurroundingSpace: white space at the beginning or the end of what
	// a broker may trim.
	ReasonSurroundingSpace = "surrounding_space"
	// ReasonBadEncoding: text that is not Unicode.
	ReasonBadEncoding = "bad_encoding"
	// ReasonBadTime: a time that is not RFC 3339.
	ReasonBadTime = "bad_time"
	// ReasonBadExtensionName: a name that an extension attribute cannot have.
	ReasonBadExtensionName = "bad_extension_name"
	// ReasonBadJSON: a structured event that is not JSON, or is too deep.
	ReasonBadJSON = "bad_json"
	// ReasonNotAnObject: a structured event that is another JSON value.
	ReasonNotAnObject = "not_an_object"
	// ReasonNotAString: an attribute whose JSON value is not a string.
	ReasonNotAString = "not_a_string"
	// ReasonDuplicateMember: a JSON member that occurs twice.
	ReasonDuplicateMember = "duplicate_member"
	// ReasonDataTwice: both data and data_base64.
	ReasonDataTwice = "data_twice"
	// ReasonBadBase64: data_base64 that is not base64.
	ReasonBadBase64 = "bad_base64"
	// ReasonBatch: a batch of events in one message.
	ReasonBatch = "batch_unsupported"
	// ReasonUnknownFormat: a structured event in a format other than JSON.
	ReasonUnknownFormat = "unknown_format"
)

// reasonMalformed is what Reason says of an [ErrMalformed] that is no FormatError.
const reasonMalformed = "malformed"

// explanations has for each reason what is wrong and what to do about it.
var explanations = map[string]struct{ problem, remedy string }{
	ReasonMissingID:        {"the id is missing, empty or blank", "the producer must give every event one"},
	ReasonMissingSource:    {"the source is missing, empty or blank", "the producer must set it, an id alone is no identity"},
	ReasonMissingType:      {"the type is missing, empty or blank", "the producer must set it"},
	ReasonMissingVersion:   {"the specversion is missing", "the producer must set it to 1.0"},
	ReasonBadVersion:       {"the specversion is not 1.0", "the producer must write CloudEvents 1.0"},
	ReasonConflictingID:    {"there are two different ids", "the producer, or a hop that adds one, must write one only"},
	ReasonConflict:         {"there are two different values", "the producer, or a hop that adds one, must write one only"},
	ReasonControlCharacter: {"there is a control character in it", "the producer must leave it out, not every broker can carry it"},
	ReasonSurroundingSpace: {"there is white space around it", "the producer must trim it, some brokers do and others do not"},
	ReasonBadEncoding:      {"it is not valid Unicode", "the producer must write UTF-8 without lone surrogates"},
	ReasonBadTime:          {"it is not a time of RFC 3339 with a year from 0 to 9999", "the producer must write it like 2006-01-02T15:04:05Z"},
	ReasonBadExtensionName: {"an extension attribute cannot have this name", "use lower-case letters and digits, and no name that CloudEvents defines"},
	ReasonBadJSON:          {"the structured event is not valid JSON, or is nested too deeply", "the producer must write one JSON object in UTF-8"},
	ReasonNotAnObject:      {"the structured event is not a JSON object", "the producer must write one event for each message, as an object"},
	ReasonNotAString:       {"its JSON value is not a string", "the producer must write a string"},
	ReasonDuplicateMember:  {"the JSON member occurs twice", "the producer must write it once"},
	ReasonDataTwice:        {"there are both data and data_base64", "the producer must write one of them"},
	ReasonBadBase64:        {"it is not base64", "the producer must write RFC 4648 base64 with padding"},
	ReasonBatch:            {"batches are not supported", "the producer must write one event for each message"},
	ReasonUnknownFormat:    {"the structured event is in a format other than JSON", "the producer must write application/cloudevents+json, or use binary mode"},
}

// FormatError says why a message could not be read as an event, or be written
// as one. It matches [ErrNoID] when Reason is [ReasonMissingID] and
// [ErrMalformed] otherwise. It shows no payload and no attribute value, so it
// may be logged.
type FormatError struct {
	// Reason is one of the Reason constants.
	Reason string
	// Field is the attribute, JSON member or header line that is wrong, by
	// the name that this package or the program gave it; empty when the
	// whole message is.
	Field string
	// Detail says more for people, such as where; may be empty.
	Detail string
}

// Error says what was wrong, where, and what to do.
func (e *FormatError) Error() string {
	s := "envelope: "
	if e.Field != "" {
		s += e.Field + ": "
	}
	x, ok := explanations[e.Reason]
	if !ok {
		x.problem = e.Reason
	}
	s += x.problem
	if e.Detail != "" {
		s += " (" + e.Detail + ")"
	}
	if x.remedy != "" {
		s += "; " + x.remedy
	}
	return s
}

// Is reports whether target is the sentinel that e belongs to.
func (e *FormatError) Is(target error) bool {
	if e.Reason == ReasonMissingID {
		return target == ErrNoID
	}
	return target == ErrMalformed
}

// Reason returns the machine-readable reason of an error of an [Extractor], a
// [Decoder] or [Binding.Encode], however it is wrapped. An error that matches
// [ErrNoID] or [ErrMalformed] without being a [*FormatError] has the reason
// "missing_id" or "malformed"; every other error, and nil, has none: "".
func Reason(err error) string {
	var f *FormatError
	switch {
	case errors.As(err, &f):
		return f.Reason
	case errors.Is(err, ErrNoID):
		return ReasonMissingID
	case errors.Is(err, ErrMalformed):
		return reasonMalformed
	}
	return ""
}
