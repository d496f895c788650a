package main

import (
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
{"Action":"output","Package":"m/p","Test":"TestC/one","Output":"    x.go:1: n/a: the harness is no Cutter\n"}
{"Action":"skip","Package":"m/p","Test":"TestC/one"}
{"Action":"pass","Package":"m/p","Test":"TestC/two"}
{"Action":"pass","Package":"m/p","Test":"TestC"}`, true, []string{"does not apply to 1: the harness is no Cutter", "cases=1 failed=0 skipped=0"}},
		"skipped": {`
{"Action":"output","Package":"m/p","Test":"TestC/one","Output":"    x.go:1: no service\n"}
{"Action":"skip","Package":"m/p","Test":"TestC/one"}
{"Action":"pass","Package":"m/p","Test":"TestC/two"}`, false, []string{"SKIPPED one"}},
		"failed": {`{"Action":"fail","Package":"m/p","Test":"TestC/one"}`, false, []string{"FAILED one", "failed=1"}},
		"package did not build": {`{"Action":"fail","Package":"m/p"}
{"Action":"pass","Package":"m/q","Test":"TestC/one"}`, false, []string{"FAIL m/p"}},
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
