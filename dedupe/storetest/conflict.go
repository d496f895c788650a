package storetest

import (
	"fmt"
	"slices"
	"testing"

	"github.com/unecho/unecho/dedupe"
)

func conflictCases[S any]() []Case[S] {
	return []Case[S]{
		{"B14 a conflict names the fields that differ", conflictFields[S]},
		{"B14 no false conflicts", noFalseConflicts[S]},
	}
}

// document is a claim whose content is a JSON document.
func document(id, doc string) dedupe.Claim {
	c := claim(id)
	canonical, ok := dedupe.CanonicalJSON([]byte(doc))
	if !ok {
		panic(fmt.Sprintf("storetest: %q has no canonical form", doc))
	}
	c.Fingerprint = dedupe.Fingerprint(c.Key, canonical)
	c.Fields = dedupe.JSONFields(c.Key, []byte(doc))
	return c
}

func conflictFields[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	a := power[Administered](tb, e.h).Admin()
	first := document("1", `{"amount": 100, "to": {"name": "Ann", "city": "Oslo"}, "tags": ["a"], "gone": 1}`)
	other := document("1", `{"amount": 1e2, "to": {"name": "Ann", "city": "Bergen"}, "tags": ["a"], "new": 1}`)
	e.once(first, e.effect("e", nil), dedupe.Processed)
	for range 3 {
		e.once(other, e.no("its key was done with another content"), dedupe.Conflict)
	}
	raw := claimOf(first.Key, "no JSON")
	e.once(raw, e.no("its key was done with another content"), dedupe.Conflict)

	found, err := a.Conflicts(e.ctx, first.Key.Stored())
	if err != nil || len(found) != 2 {
		tb.Fatalf("Conflicts: %d records, %v; want 2", len(found), err)
	}
	if found[0].Fields == nil {
		slices.Reverse(found) // both may be of one millisecond
	}
	r := found[0]
	if r.Key == (dedupe.Key{}) { // the store keeps nothing for people
		if r.Fields != nil {
			tb.Errorf("the names of fields, %q, are kept although the parts of the key are not", r.Fields)
		}
		return
	}
	if want := []string{"/amount", "/gone", "/new", "/to/city"}; !slices.Equal(r.Fields, want) {
		tb.Errorf("the fields that differ are %q, want %q", r.Fields, want)
	}
	if r.Reason != dedupe.ReasonContent || r.Key != first.Key || r.Fingerprint == r.First || r.SeenAt.IsZero() {
		tb.Errorf("the record is %+v", r)
	}
	if found[1].Fields != nil || found[1].First != r.First || found[1].Fingerprint == r.Fingerprint {
		tb.Errorf("the record of what is no JSON is %+v beside %+v", found[1], r)
	}
}

// noFalseConflicts: what a producer or a broker may change on the way is no
// other content.
func noFalseConflicts[S any](tb testing.TB, open Open[S]) {
	e := start(tb, open, Settings{})
	for i, doc := range []string{
		`{"a":1,"b":{"c":[1,2],"d":"x"}}`,
		` { "b" : { "d" : "\u0078" , "c" : [ 1 , 2 ] } , "a" : 1 } `,
		"{\n\t\"b\": {\"c\": [1, 2], \"d\": \"x\"},\n\t\"a\": 1\n}",
	} {
		want := dedupe.Duplicate
		if i == 0 {
			want = dedupe.Processed
		}
		e.once(document("1", doc), e.effect("e", nil), want)
	}
	e.wantCount("e", 1)
	if n := e.h.Conflicts(tb); n != 0 {
		tb.Errorf("%d conflicts are recorded, want none", n)
	}
}
