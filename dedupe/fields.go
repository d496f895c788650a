package dedupe

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"slices"
	"strings"
)

// What JSONFields keeps has these limits; a document beyond them has no fields.
const (
	maxFields     = 64
	maxFieldBytes = 2 << 10
	fieldDigest   = 4
	fieldsVersion = 1
)

// JSONFields digests the fields of a JSON document one by one, for
// Claim.Fields: with them a conflict can say which fields differ, though
// nobody has kept a value. A field is a member of the document or of an object
// in it that is not an object itself; an array is one field. Values are
// compared as [CanonicalJSON] does.
//
// The result holds the names and, of each value, 4 bytes of a digest in which
// the identity takes part. It is nil for what is not a JSON object, or has more
// than 64 fields or names of over 2 KiB together.
func JSONFields(k Key, doc []byte) []byte {
	if _, ok := CanonicalJSON(doc); !ok {
		return nil
	}
	var fields []field
	if !eachField(doc, "", func(pointer string, canonical []byte) {
		fields = append(fields, field{pointer, k.digestField(pointer, canonical)})
	}) {
		return nil
	}
	slices.SortStableFunc(fields, func(a, b field) int { return strings.Compare(a.pointer, b.pointer) })
	return encodeFields(fields)
}

// field is one field of a document.
type field struct {
	pointer string // RFC 6901
	digest  [fieldDigest]byte
}

// eachField calls f for every field of a document that has a canonical form, in
// its order. It reports false if doc is no object.
func eachField(doc []byte, prefix string, f func(pointer string, canonical []byte)) bool {
	members, ok := membersOf(doc)
	for _, m := range members {
		pointer := prefix + "/" + pointerEscape.Replace(m.name)
		if len(m.value) > 2 && m.value[0] == '{' && eachField(m.value, pointer, f) {
			continue
		}
		if c, ok := CanonicalJSON(m.value); ok {
			f(pointer, c)
		}
	}
	return ok
}

var pointerEscape = strings.NewReplacer("~", "~0", "/", "~1")

type member struct {
	name  string
	value []byte
}

// membersOf returns the members of an object, also those that occur twice.
func membersOf(doc []byte) (members []member, ok bool) {
	dec := json.NewDecoder(bytes.NewReader(doc))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, false
	}
	for dec.More() {
		t, err := dec.Token()
		name, isName := t.(string)
		var value json.RawMessage
		if err != nil || !isName || dec.Decode(&value) != nil {
			return nil, false
		}
		members = append(members, member{name, value})
	}
	return members, true
}

func (k Key) digestField(pointer string, canonical []byte) (d [fieldDigest]byte) {
	sum := Fingerprint(k, []byte{fieldsVersion}, []byte(pointer), canonical)
	copy(d[:], sum[sealed:]) // what is before that is the identity's
	return d
}

// encodeFields writes a version, and of each field its name behind its length
// and its digest.
func encodeFields(fields []field) []byte {
	if len(fields) == 0 || len(fields) > maxFields {
		return nil
	}
	out := []byte{fieldsVersion}
	for _, f := range fields {
		out = append(appendSized(out, f.pointer), f.digest[:]...)
	}
	if len(out) > maxFieldBytes+maxFields*(fieldDigest+2) {
		return nil
	}
	return out
}

// decodeFields reads them. It reports false for what is not of this version.
func decodeFields(b []byte) ([]field, bool) {
	if len(b) == 0 || b[0] != fieldsVersion {
		return nil, false
	}
	var fields []field
	for b = b[1:]; len(b) > 0; {
		n, size := binary.Uvarint(b)
		if size <= 0 || n > uint64(len(b)) || uint64(len(b)) < uint64(size)+n+fieldDigest {
			return nil, false
		}
		b = b[size:]
		f := field{pointer: string(b[:n])}
		copy(f.digest[:], b[n:])
		fields = append(fields, f)
		b = b[n+fieldDigest:]
	}
	return fields, true
}

// DiffFields returns the JSON pointers (RFC 6901) of the fields in which two
// results of [JSONFields] for one key differ, and of those that only one has,
// sorted. It is nil if either is nil or was made by another version of this
// package, and empty if nothing in the fields differs.
func DiffFields(first, second []byte) []string {
	a, ok1 := decodeFields(first)
	b, ok2 := decodeFields(second)
	if !ok1 || !ok2 {
		return nil
	}
	in := func(fields []field) map[string][]byte {
		m := make(map[string][]byte, len(fields))
		for _, f := range fields { // a name that occurs twice has both digests
			m[f.pointer] = append(m[f.pointer], f.digest[:]...)
		}
		return m
	}
	differing := []string{}
	old, now := in(a), in(b)
	for pointer, d := range now {
		if !bytes.Equal(d, old[pointer]) {
			differing = append(differing, pointer)
		}
	}
	for pointer := range old {
		if _, ok := now[pointer]; !ok {
			differing = append(differing, pointer)
		}
	}
	slices.Sort(differing)
	return differing
}

// FieldsOf returns, for a [Fingerprint], the values of chosen fields of a JSON
// document in their canonical form, each behind a mark of whether it is there.
// pointers are JSON pointers (RFC 6901) that go through objects, in the order
// in which they take part. It reports false if doc has no canonical form.
func FieldsOf(doc []byte, pointers ...string) ([][]byte, bool) {
	if _, ok := CanonicalJSON(doc); !ok {
		return nil, false
	}
	parts := make([][]byte, 0, len(pointers))
	for _, p := range pointers {
		part := []byte{'-'}
		for _, value := range resolve(doc, p) {
			c, _ := CanonicalJSON(value)
			part = append(append(part, '+'), c...)
		}
		parts = append(parts, part)
	}
	return parts, true
}

// resolve returns the values that a pointer names; more than one if a member
// occurs more than once.
func resolve(doc []byte, pointer string) [][]byte {
	if pointer == "" {
		return [][]byte{doc}
	}
	token, rest, _ := strings.Cut(strings.TrimPrefix(pointer, "/"), "/")
	if rest != "" || strings.Count(pointer, "/") > 1 {
		rest = "/" + rest
	}
	name := pointerUnescape.Replace(token)
	var found [][]byte
	members, _ := membersOf(doc)
	for _, m := range members {
		if m.name == name {
			found = append(found, resolve(m.value, rest)...)
		}
	}
	return found
}

var pointerUnescape = strings.NewReplacer("~1", "/", "~0", "~")
