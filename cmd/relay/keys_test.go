package main

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
)

// TestKeys is a night on call: an event in conflict, one that is parked, and one
// that nobody knows.
func TestKeys(t *testing.T) {
	d := openDB(t)
	if _, stderr := d.cli(1, "keys", "count"); !strings.Contains(stderr, "run `relay migrate dedupe`") {
		t.Errorf("without tables: %q", stderr)
	}
	d.cli(0, "migrate", "dedupe")
	ctx := t.Context()
	store := pgdedupe.NewLeaseStore(d.pool, &pgdedupe.LeaseOptions{Lease: dedupe.LeaseOptions{Holder: "payments-3"}})
	driver := pgdedupe.NewLeaseDriver(d.pool, nil)
	claim := func(id, doc string) dedupe.Claim {
		k := dedupe.Key{Tenant: "acme", Consumer: "payments", Source: "/shop", ID: id}
		return dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k, []byte(doc)), Fields: dedupe.JSONFields(k, []byte(doc))}
	}
	for _, doc := range []string{`{"cents":100,"to":"Ann"}`, `{"cents":999,"to":"Ann"}`} {
		if _, err := store.Once(ctx, claim("met", doc), func(context.Context, *dedupe.Lease) ([]byte, error) { return []byte("charged"), nil }); err != nil {
			t.Fatal(err)
		}
	}
	parked, err := claim("parked", "{}").Normal()
	if err != nil {
		t.Fatal(err)
	}
	g, _, err := driver.Acquire(ctx, parked, "a", time.Minute)
	if err := errors.Join(err, driver.Release(ctx, parked.Key, "a", g.Token, dedupe.StateParked)); err != nil {
		t.Fatal(err)
	}
	met := claim("met", "").Key

	show, _ := d.cli(0, "keys", "show", "--tenant", "acme", "--consumer", "payments", "--source", "/shop", "--id", "met")
	for _, want := range []string{met.Stored().String(), "state      done: handled", "payments-3/", "reply      7 bytes", "conflict   content", "differs in /cents\n"} {
		if !strings.Contains(show, want) {
			t.Errorf("show does not say %q:\n%s", want, show)
		}
	}
	for _, secret := range []string{"999", "charged"} {
		if strings.Contains(show, secret) {
			t.Errorf("show says %q:\n%s", secret, show)
		}
	}
	if again, _ := d.cli(0, "keys", "show", met.Stored().String()); again != show {
		t.Errorf("by its id:\n%s\nby the identity:\n%s", again, show)
	}
	if _, stderr := d.cli(1, "keys", "show", "--consumer", "payments", "--id", "none"); !strings.Contains(stderr, "not in the store") {
		t.Errorf("show of no key: %q", stderr)
	}

	list, _ := d.cli(0, "keys", "list", "--state", "parked")
	if !strings.Contains(list, parked.Key.Stored().String()) || strings.Count(list, "\n") != 2 {
		t.Errorf("parked are\n%s", list)
	}
	lines, _ := d.cli(0, "keys", "list", "--in-conflict", "--json")
	var line struct {
		Key, State, ID string
		Conflicts      int
	}
	if err := json.Unmarshal([]byte(lines), &line); err != nil || line.Key != met.Stored().String() || line.State != "done" || line.ID != "met" || line.Conflicts != 1 {
		t.Errorf("in conflict are %q, %v", lines, err)
	}
	if counts, _ := d.cli(0, "keys", "count"); !strings.Contains(counts, "parked") || !strings.Contains(counts, "conflicts        1\n") {
		t.Errorf("counts\n%s", counts)
	}

	id := parked.Key.Stored().String()
	if out, _ := d.cli(0, "keys", "release", id); out != "released "+id+"\n" {
		t.Errorf("release: %q", out)
	}
	out, stderr := d.cli(1, "keys", "release", met.Stored().String(), id)
	if out != "" || strings.Count(stderr, "another state") != 2 {
		t.Errorf("release of what is done, and free: %q, %q", out, stderr)
	}
	d.cli(0, "keys", "settle", met.Stored().String())
	if lines, _ := d.cli(0, "keys", "list", "--in-conflict", "--json"); lines != "" {
		t.Errorf("in conflict after it was settled: %q", lines)
	}
	d.cli(0, "keys", "forget", met.Stored().String())
	if _, stderr := d.cli(1, "keys", "forget", met.Stored().String()); !strings.Contains(stderr, "not in the store") {
		t.Errorf("forget again: %q", stderr)
	}
	if out, _ := d.cli(0, "keys", "prune"); out != "pruned 0\n" {
		t.Errorf("prune: %q", out)
	}
}
