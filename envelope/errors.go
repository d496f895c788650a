package envelope

import (
	"errors"
	"fmt"
)

// Reasons of a [FormatError]: machine-readable, stable, and safe as a metric
// label.
const (
	ReasonMissingID        = "missing_id"
	ReasonMissingSource    = "missing_source"
	ReasonMissingType      = "missing_type"
	ReasonBadVersion       = "bad_specversion"
	ReasonBadTime          = "bad_time"
	ReasonBadJSON          = "bad_json"
	ReasonBadData          = "bad_data"
	ReasonBadEncoding      = "bad_encoding"
	ReasonBadCharacter     = "bad_character"
	ReasonConflict         = "conflicting_values"
	ReasonBatch            = "batch_unsupported"
	ReasonUnknownFormat    = "unknown_format"
	ReasonNotACloudEvent   = "not_a_cloudevent"
	ReasonBadExtensionName = "bad_extension_name"
)

// FormatError says what is wrong with an envelope. It matches [ErrNoID] when
// the message names no event, and [ErrMalformed] otherwise. Its text never
// holds a value of the message.
type FormatError struct {
	// Reason is one of the Reason constants.
	Reason string
	// Field is the attribute or header concerned; may be empty.
	Field string
	// Detail says more, for people; may be empty.
	Detail string
}

func (e *FormatError) Error() string {
	s := "envelope: " + e.Reason
	if e.Field != "" {
		s += fmt.Sprintf(" (%s)", e.Field)
	}
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}

// Is makes the error match ErrNoID or ErrMalformed.
func (e *FormatError) Is(target error) bool {
	if e.Reason == ReasonMissingID {
		return target == ErrNoID
	}
	return target == ErrMalformed
}

// Reason returns the machine-readable reason that an error of this package
// carries, and "" for any other error.
func Reason(err error) string {
	var f *FormatError
	switch {
	case errors.As(err, &f):
		return f.Reason
	case errors.Is(err, ErrNoID):
		return ReasonMissingID
	case errors.Is(err, ErrMalformed):
		return "malformed"
	}
	return ""
}

func malformed(reason, field, format string, args ...any) error {
	return &FormatError{Reason: reason, Field: field, Detail: fmt.Sprintf(format, args...)}
}
