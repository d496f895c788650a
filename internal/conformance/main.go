// Command conformance reads what `go test -json` says of conformance tests and
// prints a table of drivers and cases, or with -matrix all cases of all drivers. With
// -traps it also prints a list of traps and what became of the tests that are
// named for each. It fails if a case or a test has failed, or was skipped for any
// other reason than that it does not apply.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// event is a line of go test -json.
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

// driver is one test, whose subtests without subtests are cases.
type driver struct {
	passed, failed, skipped []string
	notApplicable           map[string]int // by reason
	na                      []string
	took                    time.Duration
}

func main() {
	matrix := flag.Bool("matrix", false, "print every case of every driver")
	traps := flag.String("traps", "", "a file with traps and their tests")
	flag.Parse()
	if err := run(*matrix, *traps); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

var errNotWell = errors.New("not all is well")

func run(matrix bool, traps string) error {
	report, err := read(os.Stdin)
	if err != nil {
		return err
	}
	if matrix {
		fmt.Print(report.matrix())
	}
	table, ok := report.table()
	fmt.Print(table)
	if traps != "" {
		list, err := readTraps(traps)
		if err != nil {
			return err
		}
		text, well := report.traps(list)
		fmt.Print(text)
		ok = ok && well
	}
	if !ok {
		return errNotWell
	}
	return nil
}

type report struct {
	drivers  map[string]*driver
	packages []string          // that failed
	tests    map[string]string // what became of them, by package and name
}

func read(from io.Reader) (*report, error) {
	ends := map[string]event{} // of tests, by package and name
	outputs := map[string]string{}
	r := &report{drivers: map[string]*driver{}, tests: map[string]string{}}
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return nil, fmt.Errorf("%q is no line of go test -json", lines.Text())
		}
		id := e.Package + "\x00" + e.Test
		switch {
		case e.Action == "output":
			outputs[id] += e.Output
		case e.Test == "" && e.Action == "fail":
			r.packages = append(r.packages, e.Package)
		case e.Test != "" && (e.Action == "pass" || e.Action == "fail" || e.Action == "skip"):
			ends[id] = e
			r.tests[lastPart(e.Package)+"/"+e.Test] = e.Action
		}
	}
	for id, e := range ends {
		switch {
		case hasChildren(ends, id):
		case strings.Contains(e.Test, "Conformance"):
			r.add(e, outputs[id])
		case e.Action == "fail":
			r.packages = append(r.packages, lastPart(e.Package)+" "+e.Test)
		}
	}
	return r, lines.Err()
}

func lastPart(pkg string) string { return pkg[strings.LastIndexByte(pkg, '/')+1:] }

func hasChildren(ends map[string]event, id string) bool {
	for other := range ends {
		if strings.HasPrefix(other, id+"/") {
			return true
		}
	}
	return false
}

// add counts a case for the test that it is in.
func (r *report) add(e event, output string) {
	parent, name := e.Test, ""
	if i := strings.LastIndexByte(e.Test, '/'); i >= 0 {
		parent, name = e.Test[:i], e.Test[i+1:]
	}
	key := lastPart(e.Package) + " " + strings.TrimPrefix(parent, "Test")
	d := r.drivers[key]
	if d == nil {
		d = &driver{notApplicable: map[string]int{}}
		r.drivers[key] = d
	}
	d.took += time.Duration(e.Elapsed * float64(time.Second))
	_, reason, na := strings.Cut(output, "n/a: ")
	switch {
	case e.Action == "pass":
		d.passed = append(d.passed, name)
	case e.Action == "fail":
		d.failed = append(d.failed, name)
	case na:
		reason, _, _ = strings.Cut(reason, "\n")
		d.notApplicable[reason]++
		d.na = append(d.na, name)
	default:
		d.skipped = append(d.skipped, name)
	}
}

// table returns the table, and whether all is well.
func (r *report) table() (string, bool) {
	to := &strings.Builder{}
	var passed, failed, skipped int
	fmt.Fprintf(to, "%-55s %6s %6s %7s %7s\n", "driver", "cases", "failed", "skipped", "seconds")
	names := slices.Sorted(maps.Keys(r.drivers))
	for _, name := range names {
		d := r.drivers[name]
		fmt.Fprintf(to, "%-55s %6d %6d %7d %7.1f\n", name, len(d.passed)+len(d.failed), len(d.failed), len(d.skipped), d.took.Seconds())
		for _, reason := range slices.Sorted(maps.Keys(d.notApplicable)) {
			fmt.Fprintf(to, "    does not apply to %d: %s\n", d.notApplicable[reason], reason)
		}
		for _, f := range slices.Sorted(slices.Values(d.failed)) {
			fmt.Fprintf(to, "    FAILED %s\n", f)
		}
		for _, s := range slices.Sorted(slices.Values(d.skipped)) {
			fmt.Fprintf(to, "    SKIPPED %s\n", s)
		}
		passed, failed, skipped = passed+len(d.passed), failed+len(d.failed), skipped+len(d.skipped)
	}
	fmt.Fprintf(to, "drivers=%d cases=%d failed=%d skipped=%d\n", len(names), passed+failed, failed, skipped)
	for _, p := range r.packages {
		fmt.Fprintf(to, "FAIL %s\n", p)
	}
	return to.String(), failed == 0 && skipped == 0 && len(r.packages) == 0 && passed > 0
}
