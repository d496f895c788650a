package dedupe

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestDiffFields(t *testing.T) {
	k := Key{Consumer: "c", ID: "1"}
	for _, tc := range []struct{ first, second, want string }{
		{`{"a":1}`, `{"a":1}`, ""},
		{`{"a":1,"b":2}`, ` { "b" : 2, "a" : 1 } `, ""},
		{`{"a":1}`, `{"a":1.0}`, "/a"},
		{`{"a":"1"}`, `{"a":1}`, "/a"},
		{`{"a":null}`, `{}`, "?"},
		{`{"a":null,"b":1}`, `{"b":1}`, "/a"},
		{`{"b":1}`, `{"a":null,"b":1}`, "/a"},
		{`{"a":{"b":{"c":1,"d":2}}}`, `{"a":{"b":{"c":1,"d":3}}}`, "/a/b/d"},
		{`{"a":{"b":1}}`, `{"a":[1]}`, "/a /a/b"},
		{`{"a":{}}`, `{"a":{"b":1}}`, "/a /a/b"},
		{`{"a":[1,2]}`, `{"a":[2,1]}`, "/a"},
		{`{"a":[{"x":1,"y":2}]}`, `{"a":[{"y":2,"x":1}]}`, ""},
		{`{"a/b":1,"~":1}`, `{"a/b":2,"~":2}`, "/a~1b /~0"},
		{`{"a":{"b":1},"a/b":1}`, `{"a":{"b":1},"a/b":2}`, "/a~1b"},
		{`{"":1}`, `{"":2}`, "/"},
		{`{"a":1,"a":2}`, `{"a":2,"a":1}`, "/a"},
		{`{"a":1,"a":2}`, `{"a":1}`, "/a"},
		{`[1]`, `[2]`, "?"}, {`1`, `2`, "?"}, {`no JSON`, `{"a":1}`, "?"}, {`{"a":1}`, `{"a":1}}`, "?"},
	} {
		got := DiffFields(JSONFields(k, []byte(tc.first)), JSONFields(k, []byte(tc.second)))
		if tc.want == "?" {
			if got != nil {
				t.Errorf("%s and %s differ in %q, want that it is not known", tc.first, tc.second, got)
			}
			continue
		}
		if got == nil || strings.Join(got, " ") != tc.want {
			t.Errorf("%s and %s differ in %q, want %q", tc.first, tc.second, got, tc.want)
		}
	}
}

// What is kept of the fields shows no value, not even to somebody who compares
// two keys of the same value.
func TestFieldsShowNoValue(t *testing.T) {
	doc := []byte(`{"iban":"DE02120300000000202051","amount":123456}`)
	a, b := JSONFields(Key{Consumer: "c", ID: "1"}, doc), JSONFields(Key{Consumer: "c", ID: "2"}, doc)
	for _, value := range []string{"DE0212", "123456"} {
		if bytes.Contains(a, []byte(value)) {
			t.Errorf("%q is in what is kept", value)
		}
	}
	if got := DiffFields(a, b); len(got) != 2 {
		t.Errorf("the digests of one value are equal for two keys: only %q differ", got)
	}
}

func TestFieldsAreBounded(t *testing.T) {
	k := Key{Consumer: "c", ID: "1"}
	many := func(n int, name string) []byte {
		var parts []string
		for i := range n {
			parts = append(parts, fmt.Sprintf("%q:%d", fmt.Sprint(name, i), i))
		}
		return []byte("{" + strings.Join(parts, ",") + "}")
	}
	for _, tc := range []struct {
		doc  []byte
		want bool
	}{
		{many(0, "f"), false}, {many(1, "f"), true}, {many(64, "f"), true}, {many(65, "f"), false},
		{many(60, strings.Repeat("n", 30)), true}, {many(60, strings.Repeat("n", 60)), false},
	} {
		got := JSONFields(k, tc.doc)
		if (got != nil) != tc.want || len(got) > 3<<10 {
			t.Errorf("%.40s… has fields in %d bytes, want any: %v", tc.doc, len(got), tc.want)
		}
	}
}

func TestFieldsOf(t *testing.T) {
	doc := []byte(`{"order":{"id":7,"lines":[1,2]},"sent":"now","a/b":1,"n":null,"d":1,"d":2}`)
	same := []byte(`{"sent":"later","a/b":1,"order":{"lines":[1, 2],"id":7},"d":1,"d":2,"n":null}`)
	all := []string{"/order/id", "/order/lines", "/order", "/a~1b", "/n", "/d", "/nowhere", "/order/id/deeper"}
	a, ok1 := FieldsOf(doc, all...)
	b, ok2 := FieldsOf(same, all...)
	if !ok1 || !ok2 || len(a) != len(all) || !slices.EqualFunc(a, b, bytes.Equal) {
		t.Errorf("documents that differ in what was not chosen: %q and %q", a, b)
	}
	for _, pair := range [][2]string{
		{`{"n":null}`, `{}`}, {`{"n":null}`, `{"n":false}`}, {`{"n":1}`, `{"n":"1"}`}, {`{"n":1}`, `{"n":1,"n":1}`}, {`{"n":[]}`, `{"n":{}}`},
	} {
		a, _ := FieldsOf([]byte(pair[0]), "/n")
		b, _ := FieldsOf([]byte(pair[1]), "/n")
		if slices.EqualFunc(a, b, bytes.Equal) {
			t.Errorf("%s and %s have the same /n: %q", pair[0], pair[1], a)
		}
	}
	if _, ok := FieldsOf([]byte("no JSON"), "/n"); ok {
		t.Error("fields of what is no JSON")
	}
	if whole, ok := FieldsOf([]byte(`{"a":1}`), ""); !ok || len(whole[0]) < 5 {
		t.Errorf("the empty pointer names %q, want the document", whole)
	}
}

// FuzzFields: fields are a function of what the document says; what was written
// by hand or by another version is not read as something else.
func FuzzFields(f *testing.F) {
	f.Add([]byte(`{"a":{"b":1},"c":[1,"x"]}`), []byte(`{"a":{"b":1},"c":[1,"x"]}`))
	f.Add([]byte(`{"a":1}`), []byte("\x01\x02/aXXXX"))
	k := Key{Consumer: "c", ID: "1"}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		fa, fb := JSONFields(k, a), JSONFields(k, b)
		ca, ok1 := CanonicalJSON(a)
		cb, ok2 := CanonicalJSON(b)
		diff := DiffFields(fa, fb)
		if ok1 && ok2 && bytes.Equal(ca, cb) && (!bytes.Equal(fa, fb) || len(diff) > 0) {
			t.Errorf("%q and %q say the same, their fields differ in %q", a, b, diff)
		}
		if ok1 && ok2 && !bytes.Equal(ca, cb) && diff != nil && len(diff) == 0 {
			t.Errorf("%q and %q say something else, and no field differs", a, b)
		}
		DiffFields(fa, b) // b as it may be in a table: no panic
		DiffFields(b, fb)
	})
}
