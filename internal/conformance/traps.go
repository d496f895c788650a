package main

import (
	"fmt"
	"os"
	"strings"
)

// trap is something that a client library or a broker really does, and the tests
// that show that we are not caught by it.
type trap struct {
	number, what string
	tests        []string // package/Test
}

func readTraps(file string) ([]trap, error) {
	text, err := os.ReadFile(file) //nolint:gosec // the caller's own
	if err != nil {
		return nil, err
	}
	return parseTraps(string(text))
}

func parseTraps(text string) (list []trap, err error) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		parts := strings.Split(line, "|")
		if len(parts) != 3 || strings.TrimSpace(parts[2]) == "" {
			return nil, fmt.Errorf("%q is not: number | what it is | tests", line)
		}
		t := trap{number: strings.TrimSpace(parts[0]), what: strings.TrimSpace(parts[1])}
		for test := range strings.SplitSeq(parts[2], ",") {
			t.tests = append(t.tests, strings.TrimSpace(test))
		}
		list = append(list, t)
	}
	return list, nil
}

// traps returns the list with what became of each test, and whether all have
// passed.
func (r *report) traps(list []trap) (string, bool) {
	to, passed := &strings.Builder{}, 0
	for _, t := range list {
		fmt.Fprintf(to, "%s %s\n", t.number, t.what)
		all := true
		for _, test := range t.tests {
			became := r.tests[test]
			if became == "" {
				became = "NOT RUN"
			}
			fmt.Fprintf(to, "      %-7s %s\n", became, test)
			all = all && became == "pass"
		}
		if all {
			passed++
		}
	}
	fmt.Fprintf(to, "traps=%d passed=%d\n", len(list), passed)
	return to.String(), passed == len(list)
}
