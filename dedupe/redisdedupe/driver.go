package redisdedupe

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
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
	client redis.UniversalClient
	prefix string
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
	if o != nil && o.Prefix != "" {
		d.prefix = o.Prefix
	}
	if strings.ContainsAny(d.prefix, "{}") {
		return nil, fmt.Errorf("redisdedupe: the prefix %q has a brace, which would decide the slot", d.prefix)
	}
	return d, nil
}

// name is the Redis key of k. The braces make it the whole of what decides the
// slot; user input reaches it as a hash only.
func (d *Driver) name(k dedupe.Key) string {
	id := k.Stored()
	return d.prefix + "{" + hex.EncodeToString(id[:]) + "}"
}

// Acquire implements dedupe.LeaseDriver.
func (d *Driver) Acquire(ctx context.Context, c dedupe.Claim, owner string, lease time.Duration) (dedupe.Grant, *dedupe.Record, error) {
	answer, err := acquireScript.Run(ctx, d.client, []string{d.name(c.Key)},
		owner, hex.EncodeToString(c.Fingerprint[:]), lease.Milliseconds(), c.Retain.Milliseconds()).StringSlice()
	if err != nil {
		return dedupe.Grant{}, nil, fmt.Errorf("redisdedupe: acquire: %w", err)
	}
	switch {
	case len(answer) == 4 && answer[0] == "grant":
		return grant(answer)
	case len(answer) == 4 && answer[0] == "done":
		r, err := record(answer)
		return dedupe.Grant{}, r, err
	case len(answer) == 2 && answer[0] == "busy":
		return dedupe.Grant{}, nil, fmt.Errorf("%w: for another %s ms", dedupe.ErrInProgress, answer[1])
	}
	return dedupe.Grant{}, nil, fmt.Errorf("redisdedupe: acquire: the script answered %q", answer)
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
	r := &dedupe.Record{Fingerprint: [32]byte(fp), DoneAt: time.UnixMilli(ms)}
	if reply, ok := strings.CutPrefix(answer[2], "r"); ok { // "" is no reply, "r" an empty one
		r.Reply = []byte(reply)
	}
	return r, nil
}

// Extend implements dedupe.LeaseDriver.
func (d *Driver) Extend(ctx context.Context, k dedupe.Key, owner string, token int64, lease time.Duration) error {
	return d.verdict("extend", extendScript.Run(ctx, d.client, []string{d.name(k)}, owner, token, lease.Milliseconds()))
}

// Complete implements dedupe.LeaseDriver.
func (d *Driver) Complete(ctx context.Context, c dedupe.Claim, owner string, token int64, reply []byte) error {
	stored := ""
	if reply != nil {
		stored = "r" + string(reply)
	}
	return d.verdict("complete", completeScript.Run(ctx, d.client, []string{d.name(c.Key)},
		owner, token, hex.EncodeToString(c.Fingerprint[:]), stored, c.Retain.Milliseconds()))
}

// Release implements dedupe.LeaseDriver.
func (d *Driver) Release(ctx context.Context, k dedupe.Key, owner string, token int64, unknown bool) error {
	return d.verdict("release", releaseScript.Run(ctx, d.client, []string{d.name(k)}, owner, token, unknown))
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

// Conflict implements dedupe.LeaseDriver. The records of a key are a set beside
// it, on the same slot.
func (d *Driver) Conflict(ctx context.Context, c dedupe.Claim, _ dedupe.Record) error {
	name := d.name(c.Key) + ":conflicts"
	_, err := d.client.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.SAdd(ctx, name, hex.EncodeToString(c.Fingerprint[:]))
		p.PExpire(ctx, name, c.Retain)
		return nil
	})
	if err != nil {
		return fmt.Errorf("redisdedupe: record a conflict: %w", err)
	}
	return nil
}

// Conflicts returns how many other contents than the first have been seen for
// a key, and not forgotten since.
func (d *Driver) Conflicts(ctx context.Context, k dedupe.Key) (int, error) {
	n, err := d.client.SCard(ctx, d.name(k)+":conflicts").Result()
	if err != nil {
		return 0, fmt.Errorf("redisdedupe: count conflicts: %w", err)
	}
	return int(n), nil
}

// ErrEvicts: the server drops keys when its memory is full. A key that was
// dropped is an event that is handled again.
var ErrEvicts = errors.New("redisdedupe: the server evicts keys; set maxmemory-policy to noeviction")

// ErrVolatile: the server writes no append-only file, so a crash of it forgets
// every key since the last snapshot.
var ErrVolatile = errors.New("redisdedupe: the server has no append-only file; set appendonly to yes")

// Check asks the server for what endangers keys. Its error matches ErrEvicts or
// ErrVolatile, or both, or says that the server could not be asked. Call it at
// start, and decide.
func (d *Driver) Check(ctx context.Context) error {
	info, err := d.client.Info(ctx).Result()
	if err != nil {
		return fmt.Errorf("redisdedupe: check: %w", err)
	}
	var found []error
	for line := range strings.Lines(info) {
		switch name, v, _ := strings.Cut(strings.TrimSpace(line), ":"); {
		case name == "maxmemory_policy" && v != "noeviction":
			found = append(found, fmt.Errorf("%w (it is %s)", ErrEvicts, v))
		case name == "aof_enabled" && v != "1":
			found = append(found, ErrVolatile)
		}
	}
	return errors.Join(found...)
}
