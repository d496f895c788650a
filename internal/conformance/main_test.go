package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	for name, tc := range map[string]struct {
		in   string
		ok   bool
		says []string
	}{
		"all well": {`
{"Action":"pass","Package":"m/pgdedupe","Test":"TestConformance/a/one","Elapsed":0.5}
{"Action":"pass","Package":"m/pgdedupe","Test":"TestConformance/a/two","Elapsed":1}
{"Action":"pass","Package":"m/pgdedupe","Test":"TestConformance/a"}
{"Action":"pass","Package":"m/pgdedupe","Test":"TestConformance"}
{"Action":"pass","Package":"m/pgdedupe"}`, true, []string{"pgdedupe Conformance/a", "drivers=1 cases=2 failed=0 skipped=0"}},
		"does not apply": {`
{"Action":"output","Package":"m/p","Test":"TestConformance/one","Output":"    x.go:1: n/a: the harness is no Cutter\n"}
{"Action":"skip","Package":"m/p","Test":"TestConformance/one"}
{"Action":"pass","Package":"m/p","Test":"TestConformance/two"}
{"Action":"pass","Package":"m/p","Test":"TestConformance"}`, true, []string{"does not apply to 1: the harness is no Cutter", "cases=1 failed=0 skipped=0"}},
		"skipped": {`
{"Action":"output","Package":"m/p","Test":"TestConformance/one","Output":"    x.go:1: no service\n"}
{"Action":"skip","Package":"m/p","Test":"TestConformance/one"}
{"Action":"pass","Package":"m/p","Test":"TestConformance/two"}`, false, []string{"SKIPPED one"}},
		"failed": {`{"Action":"fail","Package":"m/p","Test":"TestConformance/one"}`, false, []string{"FAILED one", "failed=1"}},
		"package did not build": {`{"Action":"fail","Package":"m/p"}
{"Action":"pass","Package":"m/q","Test":"TestConformance/one"}`, false, []string{"FAIL m/p"}},
		"nothing ran": {``, false, []string{"cases=0"}},
	} {
		r, err := read(strings.NewReader(strings.TrimSpace(tc.in)))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		out, ok := r.table()
		if ok != tc.ok {
			t.Errorf("%s: it is well: %v, want %v\n%s", name, ok, tc.ok, out)
		}
		for _, s := range tc.says {
			if !strings.Contains(out, s) {
				t.Errorf("%s: it does not say %q:\n%s", name, s, out)
			}
		}
	}
	if _, err := read(strings.NewReader("FAIL: no JSON")); err == nil {
		t.Error("what is no JSON was read")
	}
}

func TestMatrix(t *testing.T) {
	r, err := read(strings.NewReader(`{"Action":"pass","Package":"m/a","Test":"TestConformance/one"}
{"Action":"fail","Package":"m/b","Test":"TestConformance/one"}
{"Action":"output","Package":"m/b","Test":"TestConformance/two","Output":"n/a: it has no null\n"}
{"Action":"skip","Package":"m/b","Test":"TestConformance/two"}`))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(r.matrix()), "\n")
	if len(lines) != 5 || !strings.HasPrefix(lines[0], "1 = a Conformance") || strings.Join(strings.Fields(lines[3]), " ") != "one ok FAIL" || strings.Join(strings.Fields(lines[4]), " ") != "two - n/a" {
		t.Errorf("%q", lines)
	}
}

func TestTraps(t *testing.T) {
	r, err := read(strings.NewReader(`{"Action":"pass","Package":"m/a","Test":"TestX"}
{"Action":"fail","Package":"m/a","Test":"TestY"}`))
	if err != nil {
		t.Fatal(err)
	}
	for tests, want := range map[string]bool{"a/TestX": true, "a/TestX, a/TestY": false, "a/TestZ": false} {
		text, ok := r.traps([]trap{{"K01", "a trap", strings.Split(tests, ", ")}})
		if ok != want || !strings.Contains(text, "a trap") {
			t.Errorf("%s: %v\n%s", tests, ok, text)
		}
	}
}

// Every trap of the list has a number of its own, and tests that there are.
func TestTheListOfTraps(t *testing.T) {
	list, err := readTraps("traps.txt")
	if err != nil {
		t.Fatal(err)
	}
	if len(list) < 42 {
		t.Errorf("%d traps", len(list))
	}
	seen := map[string]bool{}
	for _, x := range list {
		if seen[x.number] {
			t.Errorf("%s twice", x.number)
		}
		seen[x.number] = true
		for _, test := range x.tests {
			if !exists(t, test) {
				t.Errorf("%s: there is no test %s", x.number, test)
			}
		}
	}
	for _, bad := range []string{"K01 | no tests", "K01 | x | "} {
		if _, err := parseTraps(bad); err == nil {
			t.Errorf("%q is no error", bad)
		}
	}
}

// exists looks for a test in the sources of its package.
func exists(t *testing.T, test string) bool {
	t.Helper()
	pkg, name, _ := strings.Cut(test, "/")
	name, _, _ = strings.Cut(name, "/")
	for _, dir := range []string{"../../brokers/", "../"} {
		files, err := filepath.Glob(dir + pkg + "/*_test.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(text), "func "+name+"(") {
				return true
			}
		}
	}
	return false
}
