package envelope

import (
	"bytes"
	"encoding/json"
	"errors"
	"iter"
	"slices"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// encoding/json judges whether a text is JSON. It cannot do the rest: it takes
// the last of two equal members, ignores the case of their names, and makes
// U+FFFD of what is not Unicode, so that two ids would become one. The
// functions here read only what it has found valid.

// maxNesting is how deep encoding/json goes before it calls a text invalid.
const maxNesting = 10000

// checkObject refuses what is not one JSON object in UTF-8.
func checkObject(b []byte) error {
	if !json.Valid(b) {
		return &FormatError{Reason: ReasonBadJSON, Detail: whereInvalid(b)}
	}
	if !utf8.Valid(b) {
		return &FormatError{Reason: ReasonBadEncoding}
	}
	if b[skipSpace(b, 0)] != '{' {
		return &FormatError{Reason: ReasonNotAnObject}
	}
	return nil
}

// whereInvalid says where invalid JSON goes wrong. The message of encoding/json
// itself would show a piece of the payload.
func whereInvalid(b []byte) string {
	if len(b) == 0 {
		return "the body is empty"
	}
	var raw json.RawMessage
	var syntax *json.SyntaxError
	if errors.As(json.Unmarshal(b, &raw), &syntax) {
		return "at byte " + strconv.FormatInt(syntax.Offset, 10)
	}
	return ""
}

// looksStructured reports whether b is a JSON object with a string member
// specversion: an event of a sender that writes no header.
func looksStructured(b []byte) bool {
	if i := skipSpace(b, 0); i == len(b) || b[i] != '{' || !bytes.Contains(b, []byte(`"`+attrSpecversion+`"`)) || !json.Valid(b) {
		return false
	}
	for name, value := range members(b) {
		if name == attrSpecversion && value[0] == '"' {
			return true
		}
	}
	return false
}

// members yields the members of the object that the valid JSON text b is, in
// order and with repetitions. The values are slices of b, without spare
// capacity.
func members(b []byte) iter.Seq2[string, []byte] {
	return func(yield func(string, []byte) bool) {
		i := skipSpace(b, skipSpace(b, 0)+1)
		for b[i] != '}' {
			end := stringEnd(b, i)
			name, _ := unquote(b[i:end])
			i = skipSpace(b, skipSpace(b, end)+1) // over the colon
			end = valueEnd(b, i)
			if !yield(name, slices.Clip(bytes.TrimRight(b[i:end], jsonSpace))) {
				return
			}
			if i = end; b[i] == ',' {
				i = skipSpace(b, i+1)
			}
		}
	}
}

const jsonSpace = " \t\r\n"

// skipSpace returns the index of the first byte from i on that is no space.
func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\t' || b[i] == '\r' || b[i] == '\n') {
		i++
	}
	return i
}

// stringEnd returns the index behind the string that begins at i.
func stringEnd(b []byte, i int) int {
	for i++; b[i] != '"'; i++ {
		if b[i] == '\\' {
			i++
		}
	}
	return i + 1
}

// valueEnd returns the index of the comma or brace behind the member value
// that begins at i.
func valueEnd(b []byte, i int) int {
	for depth := 0; ; {
		switch b[i] {
		case '"':
			i = stringEnd(b, i)
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return i
			}
			depth--
		case ',':
			if depth == 0 {
				return i
			}
		}
		i++
	}
}

// nesting returns how deep the valid JSON text b goes.
func nesting(b []byte) int {
	depth, deepest := 0, 0
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '"':
			i = stringEnd(b, i) - 1
		case '{', '[':
			depth++
			deepest = max(deepest, depth)
		case '}', ']':
			depth--
		}
	}
	return deepest
}

// unquote returns what a valid JSON string says, and whether that is Unicode.
func unquote(b []byte) (string, bool) {
	if bytes.IndexByte(b, '\\') < 0 {
		return string(b[1 : len(b)-1]), true
	}
	if hasLoneSurrogate(b) {
		return "", false
	}
	var s string
	err := json.Unmarshal(b, &s)
	return s, err == nil
}

// hasLoneSurrogate reports whether an escape in a valid JSON string is one half
// of a character, for which encoding/json would put U+FFFD.
func hasLoneSurrogate(b []byte) bool {
	for i := 0; i < len(b); i++ {
		if b[i] != '\\' {
			continue
		}
		r := escapedUnit(b[i:])
		if !utf16.IsSurrogate(r) {
			i++
			continue
		}
		if utf16.DecodeRune(r, escapedUnit(b[i+6:])) == utf8.RuneError {
			return true
		}
		i += 11
	}
	return false
}

// escapedUnit returns the UTF-16 unit of the escape that b begins with, -1 if none.
func escapedUnit(b []byte) rune {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return -1
	}
	v, err := strconv.ParseUint(string(b[2:6]), 16, 16)
	if err != nil {
		return -1
	}
	return rune(v)
}

// appendJSONString appends the JSON string of valid UTF-8.
func appendJSONString(b []byte, s string) []byte {
	b = append(b, '"')
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c == '\n':
			b = append(b, '\\', 'n')
		case c < 0x20:
			b = append(b, '\\', 'u', '0', '0', upperHex[c>>4], upperHex[c&15])
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}
