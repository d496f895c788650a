package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// matrix has a line for each case, and a column for each driver.
func (r *report) matrix() string {
	names := slices.Sorted(maps.Keys(r.drivers))
	cases := map[string]map[string]string{}
	mark := func(driver string, list []string, what string) {
		for _, c := range list {
			if cases[c] == nil {
				cases[c] = map[string]string{}
			}
			cases[c][driver] = what
		}
	}
	to := &strings.Builder{}
	for i, name := range names {
		d := r.drivers[name]
		mark(name, d.passed, "ok")
		mark(name, d.failed, "FAIL")
		mark(name, d.skipped, "SKIPPED")
		mark(name, d.na, "n/a")
		fmt.Fprintf(to, "%d = %s\n", i+1, name)
	}
	fmt.Fprintf(to, "%-62s", "case")
	for i := range names {
		fmt.Fprintf(to, " %4d", i+1)
	}
	to.WriteByte('\n')
	for _, c := range slices.Sorted(maps.Keys(cases)) {
		fmt.Fprintf(to, "%-62s", strings.ReplaceAll(c, "_", " "))
		for _, name := range names {
			what := cases[c][name]
			if what == "" {
				what = "-" // not asked for
			}
			fmt.Fprintf(to, " %4s", what)
		}
		to.WriteByte('\n')
	}
	return to.String()
}
