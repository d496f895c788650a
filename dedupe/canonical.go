package dedupe

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth bounds the nesting of documents that have a canonical form. Nobody's
// events are deeper, and each level costs stack.
const maxDepth = 200

// CanonicalJSON returns a form of a JSON document that is equal for two
// documents if and only if they differ in nothing but the order of members,
// insignificant space, and the way in which characters are escaped. Literals of
// numbers are kept, so 100 and 1e2 differ, and so do large numbers that a float
// would make equal. Members that occur twice are kept, in their order.
//
// The form is for a [Fingerprint] and for nothing else; it is no JSON. It
// reports false for what is not one valid document in UTF-8, or nested deeper
// than 200 levels: take the bytes as they are then.
func CanonicalJSON(doc []byte) ([]byte, bool) {
	if !utf8.Valid(doc) || hasLoneSurrogate(doc) {
		return nil, false
	}
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.UseNumber()
	out, err := canonicalValue(nil, dec, 0)
	if err != nil {
		return nil, false
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, false
	}
	return out, true
}

// hasLoneSurrogate reports whether a document escapes half a character, which
// the decoder would replace: two documents could become one.
func hasLoneSurrogate(doc []byte) bool {
	for i := 0; i < len(doc); i++ {
		if doc[i] != '\\' {
			continue
		}
		switch r := escaped(doc[i:]); {
		case r < 0: // another escape, of two bytes
			i++
		case utf16.IsSurrogate(r):
			if utf16.DecodeRune(r, escaped(doc[min(i+6, len(doc)):])) == utf8.RuneError {
				return true
			}
			i += 11
		default:
			i += 5
		}
	}
	return false
}

// escaped returns what \uXXXX at the beginning of b stands for, or -1.
func escaped(b []byte) rune {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return -1
	}
	r := rune(0)
	for _, c := range b[2:6] {
		v := hexDigit(c)
		if v < 0 {
			return -1
		}
		r = r<<4 | rune(v)
	}
	return r
}

var errNoCanonicalForm = errors.New("dedupe: no canonical form")

// canonicalValue appends the next value. Every string and number stands behind
// its length, so nothing in it can pass for structure.
func canonicalValue(out []byte, dec *json.Decoder, depth int) ([]byte, error) {
	t, err := dec.Token()
	if err != nil {
		return nil, err
	}
	switch v := t.(type) {
	case nil:
		return append(out, 'n'), nil
	case bool:
		if v {
			return append(out, 't'), nil
		}
		return append(out, 'f'), nil
	case json.Number:
		return appendSized(append(out, '#'), string(v)), nil
	case string:
		return appendSized(append(out, '"'), v), nil
	case json.Delim:
		if depth == maxDepth {
			return nil, errNoCanonicalForm
		}
		if v == '[' {
			return canonicalArray(out, dec, depth+1)
		}
		return canonicalObject(out, dec, depth+1)
	}
	return nil, errNoCanonicalForm
}

func canonicalArray(out []byte, dec *json.Decoder, depth int) ([]byte, error) {
	out = append(out, '[')
	var err error
	for dec.More() {
		if out, err = canonicalValue(out, dec, depth); err != nil {
			return nil, err
		}
	}
	_, err = dec.Token() // the closing bracket
	return append(out, ']'), err
}

func canonicalObject(out []byte, dec *json.Decoder, depth int) ([]byte, error) {
	type member struct {
		name  string
		value []byte
	}
	var members []member
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, err
		}
		name, ok := t.(string)
		if !ok {
			return nil, errNoCanonicalForm
		}
		value, err := canonicalValue(nil, dec, depth)
		if err != nil {
			return nil, err
		}
		members = append(members, member{name, value})
	}
	if _, err := dec.Token(); err != nil { // the closing brace
		return nil, err
	}
	slices.SortStableFunc(members, func(a, b member) int { return strings.Compare(a.name, b.name) })
	out = append(out, '{')
	for _, m := range members {
		out = append(appendSized(out, m.name), m.value...)
	}
	return append(out, '}'), nil
}

// appendSized appends s behind its length.
func appendSized(out []byte, s string) []byte {
	out = appendLength(out, len(s))
	return append(out, s...)
}

func appendLength(out []byte, n int) []byte {
	for ; n >= 0x80; n >>= 7 {
		out = append(out, byte(n)|0x80)
	}
	return append(out, byte(n))
}
