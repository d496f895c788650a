// Package arch holds the direction of the imports.
package arch

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/unecho/unecho/"

// core says what each core package may import of this module, directly or not.
// Beside that it imports the standard library only.
var core = map[string][]string{
	"envelope": {},
	"dedupe":   {},
	"brokers":  {"envelope"},
	"consumer": {"envelope", "brokers", "dedupe"},
	"outbox":   {"envelope", "brokers"},
}

// adapters says what of this module every other public package may import.
var adapters = map[string][]string{
	"brokers/kafkabroker":   {"envelope", "brokers", "brokers/internal/fair", "brokers/internal/receive"},
	"brokers/natsbroker":    {"envelope", "brokers", "brokers/internal/receive"},
	"brokers/membroker":     {"envelope", "brokers", "brokers/internal/fair", "brokers/internal/receive"},
	"brokers/brokertest":    {"envelope", "brokers"},
	"dedupe/pgdedupe":       {"dedupe", "dedupe/internal/pgkeys", "internal/prune", "internal/sqlstate", "internal/migrate", "internal/migrate/pgxmigrate"},
	"dedupe/sqldedupe":      {"dedupe", "dedupe/internal/pgkeys", "internal/prune", "internal/sqlstate", "internal/migrate"},
	"dedupe/redisdedupe":    {"dedupe"},
	"dedupe/memdedupe":      {"dedupe"},
	"dedupe/storetest":      {"dedupe"},
	"consumer/consumertest": {"envelope", "brokers", "brokers/membroker", "brokers/internal/fair", "brokers/internal/receive", "dedupe", "consumer"},
	"consumer/consumerotel": {"envelope", "brokers", "dedupe", "consumer"},
	"consumer/parkingtest":  {"envelope", "brokers", "dedupe", "dedupe/memdedupe", "consumer"},
	"consumer/pgparking":    {"envelope", "brokers", "dedupe", "consumer", "internal/prune", "internal/sqlstate", "internal/migrate", "internal/migrate/pgxmigrate"},
	"outbox/pgoutbox":       {"envelope", "brokers", "outbox", "outbox/internal/rows", "internal/migrate", "internal/migrate/pgxmigrate"},
	"outbox/sqloutbox":      {"envelope", "brokers", "outbox", "outbox/internal/rows", "internal/migrate"},
	"outbox/outboxtest":     {"envelope", "brokers", "outbox"},
}

func TestCoreImportsStandardLibraryOnly(t *testing.T) {
	for pkg, allowed := range core {
		for _, p := range deps(t, pkg) {
			name, ours := strings.CutPrefix(p.ImportPath, module)
			switch {
			case p.Standard || name == pkg:
			case !ours:
				t.Errorf("%s imports %s, which is not the standard library", pkg, p.ImportPath)
			case !slices.Contains(allowed, name):
				t.Errorf("%s imports %s", pkg, name)
			}
		}
	}
}

func TestAdaptersImportTheirSeamsOnly(t *testing.T) {
	for pkg, allowed := range adapters {
		for _, p := range deps(t, pkg) {
			name, ours := strings.CutPrefix(p.ImportPath, module)
			if ours && name != pkg && !slices.Contains(allowed, name) {
				t.Errorf("%s imports %s", pkg, name)
			}
		}
	}
}

// Every public package must be in one of the lists, or a new one would be free.
func TestEveryPackageHasADirection(t *testing.T) {
	for _, p := range list(t, "./...") {
		name := strings.TrimPrefix(p.ImportPath, module)
		if strings.HasPrefix(name, "internal/") || strings.HasPrefix(name, "examples/") || strings.HasPrefix(name, "cmd/") || strings.Contains(name, "/internal/") {
			continue
		}
		if _, ok := core[name]; ok {
			continue
		}
		if _, ok := adapters[name]; !ok {
			t.Errorf("%s has no rule here: say what it may import", name)
		}
	}
}

type pkg struct {
	ImportPath string
	Standard   bool
}

func deps(t *testing.T, name string) []pkg { return list(t, "-deps", module+name) }

func list(t *testing.T, args ...string) []pkg {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Standard"}, args...)...)
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %v: %v", args, err)
	}
	var pkgs []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}
