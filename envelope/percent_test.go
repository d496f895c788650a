package envelope

import "testing"

func TestPercentDecode(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"": "", "plain": "plain", "Euro%20%E2%82%AC%20%F0%9F%98%80": "Euro € 😀", "%e2%82%ac": "€", "%41": "A",
		"%2520": "%20", // one round only
		"100%":  "100%", "%": "%", "%4": "%4", "%zz%20": "%zz ", "%%41": "%A", "+": "+",
		`"quoted"`: "quoted", `"a\"b\\c%20"`: `a"b\c `, `""`: "", `"`: `"`, `"open`: `"open`, `close"`: `close"`, `"a"b"`: `"a"b"`, `"a\"`: `"a\"`,
	} {
		if got := percentDecode([]byte(text)); got != want {
			t.Errorf("percentDecode(%s) = %q, want %q", text, got, want)
		}
	}
}

func TestPercentEncode(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"": "", "Euro € 😀": "Euro%20%E2%82%AC%20%F0%9F%98%80", `a"b%c\d~`: `a%22b%25c\d~`, "\r\n\x7f": "%0D%0A%7F",
	} {
		if got := string(percentEncode(text)); got != want {
			t.Errorf("percentEncode(%q) = %s, want %s", text, got, want)
		}
	}
}
