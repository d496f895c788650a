package dedupe_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/unecho/unecho/dedupe"
)

// A claim that meets another record shows whether the content differs, or two
// identities have met in 16 bytes; whatever the caller took for a fingerprint.
func TestConflictReason(t *testing.T) {
	k := dedupe.Key{Consumer: "billing", ID: "1"}
	other := dedupe.Key{Consumer: "billing", ID: "2"}
	for name, tc := range map[string]struct {
		first, second dedupe.Claim
		want          dedupe.ConflictReason // "" is a duplicate
	}{
		"same":                      {dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k, []byte("a"))}, dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k, []byte("a"))}, ""},
		"content":                   {dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k, []byte("a"))}, dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k, []byte("b"))}, dedupe.ReasonContent},
		"identity":                  {dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k, []byte("a"))}, dedupe.Claim{Key: other, Fingerprint: dedupe.Fingerprint(other, []byte("a"))}, dedupe.ReasonIdentity},
		"identity, no fingerprints": {dedupe.Claim{Key: k}, dedupe.Claim{Key: other}, dedupe.ReasonIdentity},
		"identity, same foreign fp": {dedupe.Claim{Key: k, Fingerprint: [32]byte{1}}, dedupe.Claim{Key: other, Fingerprint: [32]byte{1}}, dedupe.ReasonIdentity},
		"content, foreign fp":       {dedupe.Claim{Key: k, Fingerprint: [32]byte{31: 1}}, dedupe.Claim{Key: k, Fingerprint: [32]byte{31: 2}}, dedupe.ReasonContent},
		"no fingerprints":           {dedupe.Claim{Key: k}, dedupe.Claim{Key: k}, ""},
	} {
		tc.first.Fields = dedupe.JSONFields(tc.first.Key, []byte(`{"a":1,"b":1}`))
		tc.second.Fields = dedupe.JSONFields(tc.second.Key, []byte(`{"a":2,"b":1}`))
		d := &scripted{}
		store := dedupe.NewTxStore(d, nil)
		if _, err := store.Once(t.Context(), tc.first, returns(nil)); err != nil {
			t.Fatal(err)
		}
		d.prior = &dedupe.Record{Fingerprint: d.claims[0].Fingerprint, Fields: d.claims[0].Fields}
		res, err := store.Once(t.Context(), tc.second, returns(nil))
		if err != nil || (res.Outcome == dedupe.Duplicate) != (tc.want == "") {
			t.Errorf("%s: %v, %v", name, res.Outcome, err)
		}
		if tc.want == "" {
			continue
		}
		if len(d.conflicts) != 1 || d.conflicts[0].Reason != tc.want || d.conflicts[0].First == d.conflicts[0].Fingerprint {
			t.Errorf("%s: recorded is %+v", name, d.conflicts)
		}
		if want := []string{"/a"}; tc.want == dedupe.ReasonContent && !slices.Equal(d.conflicts[0].Fields, want) {
			t.Errorf("%s: the fields are %q, want %q", name, d.conflicts[0].Fields, want)
		}
	}
}

// A driver that claims at the commit answers with what it has found.
func TestTakenAtTheCommit(t *testing.T) {
	d := &scripted{}
	store := dedupe.NewTxStore(d, nil)
	_, _ = store.Once(t.Context(), claimOf("1"), returns(nil))
	taken := &dedupe.Taken{Record: dedupe.Record{Fingerprint: d.claims[0].Fingerprint, Reply: []byte("first")}}
	d.commit, d.calls = []error{taken}, nil
	res, err := store.Once(t.Context(), claimOf("1"), returns(nil))
	if err != nil || res.Outcome != dedupe.Duplicate || string(res.Reply) != "first" {
		t.Errorf("Once: %v, %q, %v; want the first one's reply", res.Outcome, res.Reply, err)
	}
	other := *taken
	other.Fingerprint[31]++
	d.commit = []error{&other}
	if res, err := store.Once(t.Context(), claimOf("1"), returns(nil)); err != nil || res.Outcome != dedupe.Conflict || res.Reply != nil {
		t.Errorf("Once: %v, %q, %v; want a conflict", res.Outcome, res.Reply, err)
	}
	if calls := strings.Join(d.calls, " "); calls != "begin commit begin commit conflict" {
		t.Errorf("the driver was called: %s", calls)
	}
}

func TestKeyID(t *testing.T) {
	id := dedupe.Key{Consumer: "c", ID: "1"}.Stored()
	for _, s := range []string{id.String(), strings.ReplaceAll(id.String(), "-", ""), strings.ToUpper(id.String())} {
		if got, err := dedupe.ParseKeyID(s); err != nil || got != id {
			t.Errorf("ParseKeyID(%q) = %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "x", id.String()[1:], id.String() + "00", "g" + id.String()[1:]} {
		if _, err := dedupe.ParseKeyID(s); err == nil {
			t.Errorf("ParseKeyID(%q) is no error", s)
		}
	}
}

func TestStates(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range dedupe.States() {
		got, err := dedupe.ParseState(s.String())
		if err != nil || got != s || seen[s.String()] {
			t.Errorf("%v is parsed as %v, %v", s, got, err)
		}
		seen[s.String()] = true
		if text := (dedupe.Entry{State: s, ReplySize: -1}).Explain(); strings.Contains(text, "not known") || strings.Contains(text, "reply") {
			t.Errorf("%v is explained as\n%s", s, text)
		}
	}
	if _, err := dedupe.ParseState(""); err == nil {
		t.Error("there is a state without a name")
	}
	if s := dedupe.State(9).String(); s != "state(9)" {
		t.Errorf("an unknown state is %q", s)
	}
}
