package redisdedupe

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/unecho/unecho/dedupe"
)

// Admin returns a view for people of the keys under the driver's prefix.
//
// Its lists are made by SCAN, node by node: a page may repeat an entry of an
// earlier one, or be a little longer than was asked, and a key that comes or
// goes meanwhile may or may not be in it.
// Redis has none of the counts without a scan, so all of them are -1.
func (d *Driver) Admin() dedupe.Admin { return &admin{d} }

type admin struct{ *Driver }

// Find implements dedupe.Admin.
func (a *admin) Find(ctx context.Context, id dedupe.KeyID) (dedupe.Entry, error) {
	answer, err := findScript.Run(ctx, a.client, []string{a.name(id), a.conflicts(id)}).StringSlice()
	switch {
	case err != nil:
		return dedupe.Entry{}, fmt.Errorf("redisdedupe: find: %w", err)
	case len(answer) == 0:
		return dedupe.Entry{}, fmt.Errorf("redisdedupe: %w: %v", dedupe.ErrNotFound, id)
	}
	e, err := entry(id, answer)
	if err != nil {
		return e, fmt.Errorf("redisdedupe: find: the entry of %v is corrupt: %w", id, err)
	}
	return e, nil
}

var states = map[string]dedupe.State{
	"d": dedupe.StateDone, "r": dedupe.StateRunning, "f": dedupe.StateFree, "u": dedupe.StateUnknown, "p": dedupe.StateParked,
}

// entry reads the answer of findScript.
func entry(id dedupe.KeyID, answer []string) (dedupe.Entry, error) {
	if len(answer) != 11 {
		return dedupe.Entry{}, fmt.Errorf("the script answered %q", answer)
	}
	var n numbers
	e := dedupe.Entry{
		ID: id, State: states[answer[0]], Holder: answer[1], Token: n.of(answer[2]), Attempt: int(n.of(answer[4])),
		ReplySize: int(n.of(answer[6])), ExpiresAt: time.UnixMilli(n.of(answer[8])), Conflicts: int(n.of(answer[10])),
	}
	if until := n.of(answer[3]); until > 0 {
		e.LeaseUntil = time.UnixMilli(until)
	}
	if at := n.of(answer[7]); at > 0 {
		e.DoneAt = time.UnixMilli(at)
	}
	fp, err := hex.DecodeString(answer[5])
	copy(e.Fingerprint[:], fp)
	var parts []string
	if answer[9] != "" {
		err = errors.Join(err, json.Unmarshal([]byte(answer[9]), &parts))
	}
	e.Key = keyOf(parts)
	return e, errors.Join(n.err, err)
}

// numbers parses several, and keeps the first error.
type numbers struct{ err error }

func (n *numbers) of(s string) int64 {
	v, err := strconv.ParseInt(s, 10, 64)
	n.err = cmp.Or(n.err, err)
	return v
}

func keyOf(parts []string) dedupe.Key {
	if len(parts) != 4 {
		return dedupe.Key{}
	}
	return dedupe.Key{Tenant: parts[0], Consumer: parts[1], Source: parts[2], ID: parts[3]}
}

// Release implements dedupe.Admin.
func (a *admin) Release(ctx context.Context, id dedupe.KeyID) error {
	freed, err := freeScript.Run(ctx, a.client, []string{a.name(id)}).Bool()
	switch {
	case err != nil:
		return fmt.Errorf("redisdedupe: release: %w", err)
	case freed:
		return nil
	}
	e, err := a.Find(ctx, id)
	if err != nil {
		return err
	}
	return fmt.Errorf("redisdedupe: release: %w: it is %v, only one that is unknown or parked can be released", dedupe.ErrWrongState, e.State)
}

// Evict implements dedupe.Admin. The deletes are one transaction.
func (a *admin) Evict(ctx context.Context, id dedupe.KeyID) error {
	var key *redis.IntCmd
	_, err := a.client.TxPipelined(ctx, func(p redis.Pipeliner) error {
		key = p.Del(ctx, a.name(id))
		p.Del(ctx, a.conflicts(id))
		return nil
	})
	switch {
	case err != nil:
		return fmt.Errorf("redisdedupe: evict: %w", err)
	case key.Val() == 0:
		return fmt.Errorf("redisdedupe: %w: %v", dedupe.ErrNotFound, id)
	}
	return nil
}

// Settle implements dedupe.Admin.
func (a *admin) Settle(ctx context.Context, id dedupe.KeyID) error {
	if err := a.client.Del(ctx, a.conflicts(id)).Err(); err != nil {
		return fmt.Errorf("redisdedupe: settle: %w", err)
	}
	return nil
}

// Conflicts implements dedupe.Admin.
func (a *admin) Conflicts(ctx context.Context, id dedupe.KeyID) ([]dedupe.ConflictRecord, error) {
	stored, err := a.client.HGetAll(ctx, a.conflicts(id)).Result()
	if err != nil {
		return nil, fmt.Errorf("redisdedupe: conflicts: %w", err)
	}
	var found []dedupe.ConflictRecord
	for fingerprint, text := range stored {
		r, err := conflict(fingerprint, text)
		if err != nil {
			return nil, fmt.Errorf("redisdedupe: conflicts: a record of %v is corrupt: %w", id, err)
		}
		found = append(found, r)
	}
	slices.SortFunc(found, func(x, y dedupe.ConflictRecord) int {
		return cmp.Or(x.SeenAt.Compare(y.SeenAt), bytes.Compare(x.Fingerprint[:], y.Fingerprint[:]))
	})
	return found, nil
}

func conflict(fingerprint, text string) (dedupe.ConflictRecord, error) {
	ms, text, _ := strings.Cut(text, " ")
	at, e1 := strconv.ParseInt(ms, 10, 64)
	var kept storedConflict
	e2 := json.Unmarshal([]byte(text), &kept)
	r := dedupe.ConflictRecord{Key: keyOf(kept.Key), Reason: kept.Reason, Fields: kept.Fields, SeenAt: time.UnixMilli(at)}
	fp, e3 := hex.DecodeString(fingerprint)
	first, e4 := hex.DecodeString(kept.First)
	copy(r.Fingerprint[:], fp)
	copy(r.First[:], first)
	return r, errors.Join(e1, e2, e3, e4)
}

// Counts implements dedupe.Admin.
func (a *admin) Counts(context.Context) (dedupe.Counts, error) {
	return dedupe.Counts{Done: -1, Running: -1, Free: -1, Unknown: -1, Parked: -1, Conflicts: -1}, nil
}

// A page looks at scanCount names at a time, and ends after maxScans of that
// even if it has found nothing.
const (
	scanCount = 500
	maxScans  = 20
)

// List implements dedupe.Admin.
func (a *admin) List(ctx context.Context, f dedupe.Filter) (dedupe.Page, error) {
	if err := f.Check(); err != nil {
		return dedupe.Page{}, fmt.Errorf("redisdedupe: list: %w", err)
	}
	nodes, err := a.nodes(ctx)
	if err != nil {
		return dedupe.Page{}, fmt.Errorf("redisdedupe: list: %w", err)
	}
	at, err := parsePlace(f.After, len(nodes))
	if err != nil {
		return dedupe.Page{}, err
	}
	var page dedupe.Page
	for range maxScans {
		if page.Entries, err = a.scan(ctx, nodes, &at, f, page.Entries); err != nil {
			return dedupe.Page{}, fmt.Errorf("redisdedupe: list: %w", err)
		}
		if at.node == len(nodes) {
			return page, nil
		}
		if len(page.Entries) >= f.PageSize() {
			break
		}
	}
	page.Next = at.String()
	return page, nil
}

// place is where a list goes on.
type place struct {
	node   int
	cursor uint64
}

func (p place) String() string { return fmt.Sprintf("%d.%d", p.node, p.cursor) }

func parsePlace(s string, nodes int) (p place, err error) {
	if s == "" {
		return p, nil
	}
	if _, err := fmt.Sscanf(s, "%d.%d", &p.node, &p.cursor); err != nil || p.node < 0 || p.node >= nodes {
		return p, fmt.Errorf("redisdedupe: list: %w: After is %q, not what a page has returned", dedupe.ErrInvalidFilter, s)
	}
	return p, nil
}

// scan appends what one SCAN finds, and moves on. It looks at no more names
// than fit into the page, but SCAN may return more than it was asked for.
func (a *admin) scan(ctx context.Context, nodes []redis.Cmdable, at *place, f dedupe.Filter, to []dedupe.Entry) ([]dedupe.Entry, error) {
	match := escapeGlob.Replace(a.prefix) + "{*}"
	if f.InConflict {
		match += ":conflicts"
	}
	names, cursor, err := nodes[at.node].Scan(ctx, at.cursor, match, int64(min(scanCount, f.PageSize()))).Result()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		id, err := dedupe.ParseKeyID(strings.Trim(strings.TrimSuffix(name[len(a.prefix):], ":conflicts"), "{}"))
		if err != nil {
			continue // not ours
		}
		e, err := a.Find(ctx, id)
		switch {
		case errors.Is(err, dedupe.ErrNotFound):
		case err != nil:
			return nil, err
		case f.InConflict || e.State == f.State:
			to = append(to, e)
		}
	}
	if at.cursor = cursor; cursor == 0 {
		at.node++
	}
	return to, nil
}

var escapeGlob = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)
