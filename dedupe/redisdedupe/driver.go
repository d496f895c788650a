package redisdedupe

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/unecho/unecho/dedupe"
)

// Options are the settings of [NewStore] and [NewDriver]. The zero value, and
// nil, is the default.
type Options struct {
	// Prefix begins the name of every key. Defaults to "unecho:". It must not
	// have a brace, which would decide the slot.
	Prefix string
	// Anonymous leaves the readable parts of the key, and the names of fields,
	// out of Redis: tenant, consumer, source and id may be personal data, and
	// nothing but people reads them. Defaults to keeping them.
	Anonymous bool
	// Lease are the settings of the leases.
	Lease dedupe.LeaseOptions
}

// NewStore returns a store of leases in Redis. client stays the caller's. o may
// be nil. It fails as [NewDriver] does.
func NewStore(client redis.UniversalClient, o *Options) (dedupe.Store[*dedupe.Lease], error) {
	d, err := NewDriver(client, o)
	if err != nil {
		return nil, err
	}
	if o == nil {
		o = &Options{}
	}
	return dedupe.NewLeaseStore(d, &o.Lease), nil
}

// Driver implements dedupe.LeaseDriver.
type Driver struct {
	client    redis.UniversalClient
	prefix    string
	anonymous bool
}

// NewDriver returns a driver. An error says which setting of the client or of o
// makes no sense: without ContextTimeoutEnabled the client waits longer than it
// is told, and a lease would run out behind its owner's back.
func NewDriver(client redis.UniversalClient, o *Options) (*Driver, error) {
	if client == nil {
		return nil, errors.New("redisdedupe: the client is nil")
	}
	bounded := true
	switch c := client.(type) {
	case *redis.Client:
		bounded = c.Options().ContextTimeoutEnabled
	case *redis.ClusterClient:
		bounded = c.Options().ContextTimeoutEnabled
	}
	if !bounded {
		return nil, errors.New("redisdedupe: set ContextTimeoutEnabled in the options of the Redis client: without it, deadlines are not kept")
	}
	d := &Driver{client: client, prefix: "unecho:"}
	if o != nil {
		d.prefix = cmp.Or(o.Prefix, d.prefix)
		d.anonymous = o.Anonymous
	}
	if strings.ContainsAny(d.prefix, "{}") {
		return nil, fmt.Errorf("redisdedupe: the prefix %q has a brace, which would decide the slot", d.prefix)
	}
	return d, nil
}

// name is the Redis key of k. The braces make it the whole of what decides the
// slot; user input reaches it as a hash only.
func (d *Driver) name(id dedupe.KeyID) string {
	return d.prefix + "{" + hex.EncodeToString(id[:]) + "}"
}

// conflicts is the Redis key of the conflicts of a key, on the same slot.
func (d *Driver) conflicts(id dedupe.KeyID) string { return d.name(id) + ":conflicts" }

// Acquire implements dedupe.LeaseDriver.
func (d *Driver) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	if err := dedupe.CheckLifetimes(lease, c.Retain); err != nil {
		return dedupe.Grant{}, nil, err
	}
	fields, readable := d.forPeople(c)
	answer, err := acquireScript.Run(ctx, d.client, []string{d.name(c.Key.Stored())},
		owner, hex.EncodeToString(c.Fingerprint[:]), lease.Milliseconds(), c.Retain.Milliseconds(), fields, readable).StringSlice()
	if err != nil {
		return dedupe.Grant{}, nil, fmt.Errorf("redisdedupe: acquire: %w", err)
	}
	switch {
	case len(answer) == 4 && answer[0] == "grant":
		return grant(answer)
	case len(answer) == 5 && answer[0] == "done":
		r, err := record(answer)
		return dedupe.Grant{}, r, err
	case len(answer) == 2 && answer[0] == "busy":
		left, err := strconv.ParseInt(answer[1], 10, 64)
		if err != nil {
			return dedupe.Grant{}, nil, fmt.Errorf("%w: the script says for %q ms", dedupe.ErrInProgress, answer[1])
		}
		return dedupe.Grant{}, nil, &dedupe.HeldError{Left: time.Duration(left) * time.Millisecond}
	case len(answer) == 1 && answer[0] == "parked":
		return dedupe.Grant{}, nil, dedupe.ErrParked
	}
	return dedupe.Grant{}, nil, fmt.Errorf("redisdedupe: acquire: the script answered %q", answer)
}

// forPeople is what is kept for them only.
func (d *Driver) forPeople(c dedupe.Claim) (fields []byte, readable string) {
	if d.anonymous {
		return nil, ""
	}
	b, _ := json.Marshal([]string{c.Key.Tenant, c.Key.Consumer, c.Key.Source, c.Key.ID}) // strings have a form
	return c.Fields, string(b)
}

func grant(answer []string) (g dedupe.Grant, _ *dedupe.Record, err error) {
	var e1, e2 error
	g.Token, e1 = strconv.ParseInt(answer[1], 10, 64)
	g.Attempt, e2 = strconv.Atoi(answer[2])
	g.Unknown = answer[3] == "1"
	if err := errors.Join(e1, e2); err != nil {
		return dedupe.Grant{}, nil, fmt.Errorf("redisdedupe: acquire: %w", err)
	}
	return g, nil, nil
}

func record(answer []string) (*dedupe.Record, error) {
	fp, e1 := hex.DecodeString(answer[1])
	ms, e2 := strconv.ParseInt(answer[3], 10, 64)
	if err := errors.Join(e1, e2); err != nil || len(fp) != 32 {
		return nil, fmt.Errorf("redisdedupe: the record of a key is corrupt: %w", err)
	}
	r := &dedupe.Record{Fingerprint: [32]byte(fp), Fields: []byte(answer[4]), DoneAt: time.UnixMilli(ms)}
	if reply, ok := strings.CutPrefix(answer[2], "r"); ok { // "" is no reply, "r" an empty one
		r.Reply = []byte(reply)
	}
	return r, nil
}

// Extend implements dedupe.LeaseDriver.
func (d *Driver) Extend(ctx context.Context, k dedupe.Key, owner string, token int64, lease time.Duration) error {
	if err := dedupe.CheckLifetimes(lease); err != nil {
		return err
	}
	return d.verdict("extend", extendScript.Run(ctx, d.client, []string{d.name(k.Stored())}, owner, token, lease.Milliseconds()))
}

// Complete implements dedupe.LeaseDriver.
func (d *Driver) Complete(ctx context.Context, c dedupe.Claim, owner string, token int64, reply []byte) error {
	if err := dedupe.CheckLifetimes(c.Retain); err != nil {
		return err
	}
	stored := ""
	if reply != nil {
		stored = "r" + string(reply)
	}
	return d.verdict("complete", completeScript.Run(ctx, d.client, []string{d.name(c.Key.Stored())},
		owner, token, stored, c.Retain.Milliseconds()))
}

// Release implements dedupe.LeaseDriver.
func (d *Driver) Release(ctx context.Context, k dedupe.Key, owner string, token int64, to dedupe.State) error {
	stored, ok := map[dedupe.State][2]string{dedupe.StateFree: {"f", "0"}, dedupe.StateUnknown: {"f", "1"}, dedupe.StateParked: {"p", "1"}}[to]
	if !ok {
		return fmt.Errorf("redisdedupe: release: %w: no lease is given up as %v", dedupe.ErrWrongState, to)
	}
	return d.verdict("release", releaseScript.Run(ctx, d.client, []string{d.name(k.Stored())}, owner, token, stored[0], stored[1]))
}

// verdict reads the answer of a script that says 1 or, for a lost lease, 0.
func (d *Driver) verdict(what string, cmd *redis.Cmd) error {
	ok, err := cmd.Bool()
	switch {
	case err != nil:
		return fmt.Errorf("redisdedupe: %s: %w", what, err)
	case !ok:
		return fmt.Errorf("%w: %s: another owner has the key, or nobody", dedupe.ErrLeaseLost, what)
	}
	return nil
}

// Conflict implements dedupe.LeaseDriver. The records of a key are a hash beside
// it, which lives as long as the latest copy's retention.
func (d *Driver) Conflict(ctx context.Context, r dedupe.ConflictRecord) error {
	if err := dedupe.CheckLifetimes(r.Retain); err != nil {
		return err
	}
	kept := storedConflict{First: hex.EncodeToString(r.First[:]), Reason: r.Reason}
	if !d.anonymous {
		kept.Fields, kept.Key = r.Fields, []string{r.Key.Tenant, r.Key.Consumer, r.Key.Source, r.Key.ID}
	}
	b, _ := json.Marshal(kept) // strings have a form
	err := conflictScript.Run(ctx, d.client, []string{d.conflicts(r.Key.Stored())}, hex.EncodeToString(r.Fingerprint[:]), b, r.Retain.Milliseconds()).Err()
	if err != nil {
		return fmt.Errorf("redisdedupe: record a conflict: %w", err)
	}
	return nil
}

// storedConflict is the form of a record, behind the milliseconds of its time.
type storedConflict struct {
	First  string                `json:"first"`
	Reason dedupe.ConflictReason `json:"reason"`
	Fields []string              `json:"fields"`
	Key    []string              `json:"key,omitempty"`
}

// ErrEvicts: the server drops keys when its memory is full. A key that was
// dropped is an event that is handled again.
var ErrEvicts = errors.New("redisdedupe: the server evicts keys; set maxmemory-policy to noeviction")

// ErrVolatile: the server writes no append-only file, or does not write it out,
// so a crash of it forgets keys.
var ErrVolatile = errors.New("redisdedupe: the server forgets keys in a crash; set appendonly to yes and appendfsync to everysec or always")

// Check asks every server that has keys for what endangers them. Its error
// matches ErrEvicts or ErrVolatile, or both, or says which server could not be
// asked. Call it at start, and decide. appendfsync everysec, which loses a
// second in a crash, passes.
func (d *Driver) Check(ctx context.Context) error {
	nodes, err := d.nodes(ctx)
	found := []error{err}
	for _, n := range nodes {
		found = append(found, check(ctx, n))
	}
	if err := errors.Join(found...); err != nil {
		return fmt.Errorf("redisdedupe: check: %w", err)
	}
	return nil
}

func check(ctx context.Context, node redis.Cmdable) error {
	info, err := node.Info(ctx).Result()
	if err != nil {
		return err
	}
	port := ""
	var found []error
	for line := range strings.Lines(info) {
		switch name, v, _ := strings.Cut(strings.TrimSpace(line), ":"); {
		case name == "tcp_port":
			port = v
		case name == "maxmemory_policy" && v != "noeviction":
			found = append(found, fmt.Errorf("%w (it is %s at port %s)", ErrEvicts, v, port))
		case name == "aof_enabled" && v != "1":
			found = append(found, fmt.Errorf("%w (at port %s)", ErrVolatile, port))
		}
	}
	// Hosted servers refuse CONFIG; what they say of themselves must do then.
	if sync, err := node.ConfigGet(ctx, "appendfsync").Result(); err == nil && sync["appendfsync"] == "no" {
		found = append(found, fmt.Errorf("%w: appendfsync is no, so the file is written when the system likes (at port %s)", ErrVolatile, port))
	}
	return errors.Join(found...)
}

// nodes are those that have keys, in a stable order.
func (d *Driver) nodes(ctx context.Context) ([]redis.Cmdable, error) {
	cluster, ok := d.client.(*redis.ClusterClient)
	if !ok {
		return []redis.Cmdable{d.client}, nil
	}
	var mu sync.Mutex
	var masters []*redis.Client
	err := cluster.ForEachMaster(ctx, func(_ context.Context, c *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		masters = append(masters, c)
		return nil
	})
	slices.SortFunc(masters, func(x, y *redis.Client) int { return strings.Compare(x.Options().Addr, y.Options().Addr) })
	nodes := make([]redis.Cmdable, len(masters))
	for i, m := range masters {
		nodes[i] = m
	}
	return nodes, err
}
