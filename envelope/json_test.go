package envelope

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
)

// FuzzMembers compares the walk over an object with encoding/json's decoder.
func FuzzMembers(f *testing.F) {
	for _, s := range []string{`{}`, ` { "a" : 1 , "b":[1,{"c":"}\"]"}] ,"a":"x"} `, `{"\u0061\\":"\\","":null}`, `{"a":{"b":{}},"c":-1.5e+3}`, `{"a":"\ud800"}`, `[1]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if checkObject(b) != nil {
			return
		}
		dec := json.NewDecoder(bytes.NewReader(b))
		if _, err := dec.Token(); err != nil {
			t.Fatal(err)
		}
		for name, value := range members(b) {
			want, err := dec.Token()
			if err != nil {
				t.Fatalf("one member too many: %q", name)
			}
			if strings.Contains(want.(string), "\ufffd") {
				want = name // which may be where the two differ on purpose
			}
			var raw json.RawMessage
			if err := dec.Decode(&raw); err != nil || name != want || !bytes.Equal(raw, value) {
				t.Fatalf("member %q: %s, want %q: %s, %v", name, value, want, raw, err)
			}
			checkUnquote(t, value)
		}
		if dec.More() {
			t.Fatal("members were passed over")
		}
		if n := nesting(b); n < 1 || n > maxNesting {
			t.Fatalf("nesting %d", n)
		}
	})
}

// checkUnquote compares unquote with encoding/json: the same where the text is
// Unicode, and refused where encoding/json puts U+FFFD in its place.
func checkUnquote(t *testing.T, value []byte) {
	if value[0] != '"' {
		return
	}
	var want string
	if err := json.Unmarshal(value, &want); err != nil {
		t.Fatal(err)
	}
	got, ok := unquote(value)
	written := bytes.Count(value, []byte("\ufffd")) + strings.Count(strings.ToLower(string(value)), `\ufffd`)
	lone := strings.Count(want, "\ufffd") > written
	if lone && ok || !lone && ok && got != want {
		t.Fatalf("unquote(%s) = %q, %v; want %q", value, got, ok, want)
	}
	if ok {
		var back string
		if err := json.Unmarshal(appendJSONString(nil, got), &back); err != nil || back != got {
			t.Fatalf("appendJSONString(%q) reads as %q, %v", got, back, err)
		}
	}
}

func TestLoneSurrogates(t *testing.T) {
	t.Parallel()
	for text, lone := range map[string]bool{
		`"\ud83d\ude00"`: false, `"\uD83D\uDE00\ud83d\ude00"`: false, `"\\ud800"`: false, `"\\\\ud800"`: false, `"\n\u00e9"`: false, `"\ufffd"`: false,
		`"\ud800"`: true, `"\udc00"`: true, `"\ude00\ud83d"`: true, `"\ud83dx\ude00"`: true, `"\ud83d\u0041"`: true, `"\\\ud800"`: true,
		`"\ud83d\ude00\ude00"`: true, `"\ud83d\\ude00"`: true, `"\ud83d\n"`: true,
	} {
		if _, ok := unquote([]byte(text)); ok == lone {
			t.Errorf("%s: lone surrogate %v, want %v", text, !ok, lone)
		}
	}
}

// The walk relies on how deep encoding/json goes.
func TestMaxNesting(t *testing.T) {
	t.Parallel()
	deep := func(n int) []byte { return []byte(strings.Repeat("[", n) + strings.Repeat("]", n)) }
	if !json.Valid(deep(maxNesting)) || json.Valid(deep(maxNesting+1)) {
		t.Errorf("encoding/json does not go %d deep", maxNesting)
	}
	if n := nesting([]byte(`{"a":[[]],"b":"[[[[","c":[{"d":{}}]}`)); n != 4 {
		t.Errorf("nesting = %d, want 4", n)
	}
}
