package dedupe

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

func canonical(t testing.TB, doc string) string {
	t.Helper()
	c, ok := CanonicalJSON([]byte(doc))
	if !ok {
		t.Fatalf("%s has no canonical form", doc)
	}
	return string(c)
}

// B14: a reordered copy is a copy, and a changed amount is not.
func TestB14CanonicalJSON(t *testing.T) {
	for _, same := range [][2]string{
		{`{"a":1,"b":[1,2]}`, " {\n\"b\" : [ 1 , 2 ], \"a\":1 }\n"},
		{`{"a":{"x":1,"y":2},"b":null}`, `{"b":null,"a":{"y":2,"x":1}}`},
		{`"A/é"`, `"\u0041\/\u00e9"`},
		{`{"\u0061":true}`, `{"a":true}`},
		{`"\ud83d\ude00"`, `"😀"`}, {`"\\ud800"`, `"\\\u0075d800"`},
	} {
		if canonical(t, same[0]) != canonical(t, same[1]) {
			t.Errorf("%s and %s differ", same[0], same[1])
		}
	}
	different := []string{`{"a":1}`, `{"a":1.0}`, `{"a":"1"}`, `{"a":100}`, `{"a":1e2}`, `{"a":12345678901234567890}`, `{"a":12345678901234567891}`,
		`{"a":[1,2]}`, `{"a":[2,1]}`, `{"a":[[1],2]}`, `{"a":[1,[2]]}`, `{"a":null}`, `{}`, `[]`, `""`, `null`, `{"a":{}}`, `{"a":[]}`,
		`{"a":1,"a":2}`, `{"a":2,"a":1}`, `{"ab":"c"}`, `{"a":"bc"}`, `["ab","c"]`, `["a","bc"]`, `true`, `false`}
	for i, a := range different {
		for _, b := range different[i+1:] {
			if canonical(t, a) == canonical(t, b) {
				t.Errorf("%s and %s meet", a, b)
			}
		}
	}
}

func TestCanonicalJSONOfWhatIsNone(t *testing.T) {
	for _, doc := range []string{``, ` `, `{`, `{"a":1}x`, `{"a":1}{}`, "\"\xff\"", `"\ud800"`, `"\ude00"`, `"\ud83dx\ude00"`, `"\ud83d\ud83d"`, `{"a":}`, `nul`, strings.Repeat("[", 300) + strings.Repeat("]", 300)} {
		if c, ok := CanonicalJSON([]byte(doc)); ok {
			t.Errorf("%.40q has the canonical form %q", doc, c)
		}
	}
	if _, ok := CanonicalJSON([]byte(strings.Repeat("[", 200) + strings.Repeat("]", 200))); !ok {
		t.Error("200 levels are allowed")
	}
}

// Two documents have one form if and only if they parse to one tree.
func FuzzCanonicalJSON(f *testing.F) {
	f.Add([]byte(`{"a":1,"b":[true,null,"x"]}`), []byte(`{"b":[true,null,"x"],"a":1}`))
	f.Add([]byte(`{"a":1,"a":2}`), []byte(`{"a":2}`))
	f.Add([]byte(`[1,[2]]`), []byte(`[[1],2]`))
	f.Fuzz(func(t *testing.T, x, y []byte) {
		before := bytes.Clone(x)
		cx, okX := CanonicalJSON(x)
		cy, okY := CanonicalJSON(y)
		if !bytes.Equal(x, before) {
			t.Fatal("the document was modified")
		}
		if okX && !json.Valid(x) {
			t.Fatalf("%q is no JSON", x)
		}
		if !okX || !okY || twice(x) || twice(y) {
			return // a map cannot hold what occurs twice
		}
		if got, want := bytes.Equal(cx, cy), reflect.DeepEqual(tree(t, x), tree(t, y)); got != want {
			t.Errorf("%q and %q: one form %v, one tree %v", x, y, got, want)
		}
	})
}

func tree(t *testing.T, doc []byte) (v any) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(doc))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// twice reports whether a member may occur twice: its tree has fewer than the
// document has colons outside of strings, roughly.
func twice(doc []byte) bool {
	var v any
	d := json.NewDecoder(bytes.NewReader(doc))
	d.UseNumber()
	if d.Decode(&v) != nil {
		return true
	}
	names := 0
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.UseNumber()
	var stack []bool // whether an object, and below whether a name is due
	due := false
	for {
		tok, err := dec.Token()
		if err != nil {
			return names != count(v)
		}
		switch tok {
		case json.Delim('{'):
			stack, due = append(stack, true), true
			continue
		case json.Delim('['):
			stack, due = append(stack, false), false
			continue
		case json.Delim('}'), json.Delim(']'):
			stack = stack[:len(stack)-1]
		default:
			if due {
				names++
				due = false
				continue
			}
		}
		due = len(stack) > 0 && stack[len(stack)-1]
	}
}

func count(v any) (n int) {
	switch v := v.(type) {
	case map[string]any:
		for _, m := range v {
			n += 1 + count(m)
		}
	case []any:
		for _, m := range v {
			n += count(m)
		}
	}
	return n
}
