package main

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/envelope"
)

// TestDead is a morning after: a message that failed, one that cannot be read and
// talks to the terminal, and one about which somebody has decided.
func TestDead(t *testing.T) {
	d := openDB(t)
	if _, stderr := d.cli(1, "dead", "count"); !strings.Contains(stderr, "run `relay migrate parking`") {
		t.Errorf("without tables: %q", stderr)
	}
	if text, _ := d.cli(0, "migrate", "parking", "--sql"); !strings.Contains(text, "unecho_parked") {
		t.Errorf("the statements are %q", text)
	}
	d.cli(0, "migrate", "parking")
	if counts, _ := d.cli(0, "dead", "count"); strings.Contains(counts, "oldest") || !strings.Contains(counts, "parked     0\n") {
		t.Errorf("counts of nothing\n%s", counts)
	}
	lot := pgparking.NewLot(d.pool, nil)
	event, err := envelope.Kafka.Encode(&envelope.Message{ID: "evt-1", Source: "/shop", Type: "placed", Topic: "orders", Body: []byte("card 4111"),
		Header: envelope.Header{{Name: "auth", Value: []byte("token-77")}}}, envelope.Binary)
	if err != nil {
		t.Fatal(err)
	}
	event.Position = "orders/0/1"
	rude := &envelope.Message{Topic: "orders", Position: "orders/0/2\x1b[2J", Key: []byte{}, Body: []byte("a\x1b]0;x\x07b\nid c"), Header: envelope.Header{{Name: "x\x1b", Value: nil}}}
	for _, m := range []*envelope.Message{event, rude, {Topic: "orders", Position: "orders/0/3"}} {
		f := &consumer.Failure{Message: m, Class: consumer.ClassFailed, Reason: "failed", Attempts: 10, Err: errors.New("boom\u009b31m")}
		if err := consumer.ParkIn(lot, "billing")(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	list, _ := d.cli(0, "dead", "list")
	lines := strings.Split(strings.TrimSpace(list), "\n")
	if len(lines) != 4 || !strings.Contains(lines[1], "orders/0/1") || strings.ContainsAny(list, "\x1b\u009b") || strings.Contains(list, "4111") {
		t.Fatalf("listed is\n%q", list)
	}
	var ids []string
	for _, l := range lines[1:] {
		ids = append(ids, strings.Fields(l)[0])
	}

	show, _ := d.cli(0, "dead", "show", ids[0])
	for _, want := range []string{ids[0], "state      parked", `source "/shop", id "evt-1", type "placed"`, "body       9 bytes", "header     auth: 8 bytes",
		"consumer.Redrive(ctx, lot, handler, nil, \"" + ids[0] + "\")", "the handler of \"billing\"", "relay dead discard"} {
		if !strings.Contains(show, want) {
			t.Errorf("show does not say %q:\n%s", want, show)
		}
	}
	for _, secret := range []string{"4111", "token-77"} {
		if strings.Contains(show, secret) {
			t.Errorf("show says %q:\n%s", secret, show)
		}
	}
	if show, _ := d.cli(0, "dead", "show", "--body", ids[0]); !strings.Contains(show, "body       card 4111") || !strings.Contains(show, "auth: token-77") {
		t.Errorf("with its body it is\n%s", show)
	}
	whole, _ := d.cli(0, "dead", "show", "--body", ids[1])
	if strings.ContainsAny(whole, "\x1b\x07\u009b") || !strings.Contains(whole, "key        \n") || !strings.Contains(whole, "header     x?: null") || strings.Contains(whole, "\nid c") {
		t.Errorf("shown is %q", whole)
	}

	var j struct {
		ID, State, Position string
		Bytes               int
		Event               map[string]string
		Key, Body           *string
		Header              []struct{ Name, Value string }
	}
	text, _ := d.cli(0, "dead", "show", "--json", ids[0])
	if err := json.Unmarshal([]byte(text), &j); err != nil || j.Event["id"] != "evt-1" || j.Body != nil || j.Header != nil || j.Bytes != 9 {
		t.Errorf("as JSON %s, %v", text, err)
	}
	text, _ = d.cli(0, "dead", "show", "--json", "--body", ids[1])
	if err := json.Unmarshal([]byte(text), &j); err != nil || j.Key == nil || *j.Key != "" || j.Body == nil || *j.Body != base64.StdEncoding.EncodeToString(rude.Body) {
		t.Errorf("as JSON %s, %v", text, err)
	}
	text, _ = d.cli(0, "dead", "show", "--json", "--body", ids[2])
	if !strings.Contains(text, `"body":null`) || !strings.Contains(text, `"key":null`) || !strings.Contains(text, `"bytes":-1`) {
		t.Errorf("a null body is %s", text)
	}

	if out, _ := d.cli(0, "dead", "discard", ids[0], ids[2]); out != "discarded "+ids[0]+"\ndiscarded "+ids[2]+"\n" {
		t.Errorf("discard: %q", out)
	}
	out, stderr := d.cli(1, "dead", "discard", ids[0], strings.Repeat("0", 32), ids[1])
	if out != "discarded "+ids[1]+"\n" || !strings.Contains(stderr, "it is discarded") || !strings.Contains(stderr, "no parked message") {
		t.Errorf("discard of what is settled, of nothing and of what waits: %q, %q", out, stderr)
	}
	if list, _ := d.cli(0, "dead", "list", "--json"); list != "" {
		t.Errorf("waiting after all was discarded: %q", list)
	}
	page, hint := d.cli(0, "dead", "list", "--json", "--state", "discarded", "--limit", "2", "--consumer", "billing")
	if strings.Count(page, "\n") != 2 || !strings.Contains(hint, "--after ") || strings.ContainsRune(page, '\x1b') {
		t.Errorf("a page is %q, %q", page, hint)
	}
	counts, _ := d.cli(0, "dead", "count", "--json")
	var n map[string]any
	if err := json.Unmarshal([]byte(counts), &n); err != nil || n["discarded"] != float64(3) || n["parked"] != float64(0) || n["oldest"] != nil {
		t.Errorf("counts %s, %v", counts, err)
	}
	if out, _ := d.cli(0, "dead", "prune"); out != "pruned 0\n" {
		t.Errorf("prune: %q", out)
	}
	if out, _ := d.cli(0, "dead", "prune", "--keep", "1ns"); out != "pruned 3\n" {
		t.Errorf("prune: %q", out)
	}
	for _, args := range [][]string{{"show"}, {"show", "x"}, {"discard"}, {"discard", "x"}, {"list", "--state", "odd"}, {"list", "--limit", "0"}, {"nothing"}, {}, {"count", "x"}} {
		d.cli(2, append([]string{"dead"}, args...)...)
	}
}
