package pgdedupe_test

import (
	"context"
	_ "embed"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/internal/testenv"
)

// asRole returns a URL that connects as a new role with no privilege but usage
// of the schema, with settings of its own.
func asRole(t *testing.T, owner *pgxpool.Pool, schemaURL, role string, settings ...string) string {
	t.Helper()
	u, err := url.Parse(schemaURL)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	schema := q.Get("search_path")
	name := pgx.Identifier{role}.Sanitize()
	var exists bool
	if err := owner.QueryRow(t.Context(), "select exists (select from pg_roles where rolname = $1)", role).Scan(&exists); err != nil {
		t.Fatal(err)
	}
	if !exists {
		if _, err := owner.Exec(t.Context(), "create role "+name+" login"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_, _ = owner.Exec(ctx, "drop owned by "+name)
			_, _ = owner.Exec(ctx, "drop role "+name)
		})
	}
	if _, err := owner.Exec(t.Context(), "grant usage on schema "+pgx.Identifier{schema}.Sanitize()+" to "+name); err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(settings); i += 2 {
		q.Set(settings[i], settings[i+1])
	}
	u.User, u.RawQuery = url.User(role), q.Encode()
	return u.String()
}

// ownerOf opens a schema, migrated by its owner.
func ownerOf(t *testing.T) (schemaURL string, owner *pgxpool.Pool) {
	t.Helper()
	schemaURL = testenv.SchemaURL(t)
	owner = testenv.PoolOf(t, schemaURL, 2)
	if err := pgdedupe.Migrate(t.Context(), owner, nil); err != nil {
		t.Fatal(err)
	}
	return schemaURL, owner
}

// A program needs to read and write five tables and to draw from a sequence. It
// needs no privilege to create, alter or drop anything, and calling Migrate on
// every start is nevertheless no error.
func TestRuntimeRoleNeedsNoDDL(t *testing.T) {
	schemaURL, owner := ownerOf(t)
	role := strings.ToLower(testenv.Name("role"))
	pool := testenv.PoolOf(t, asRole(t, owner, schemaURL, role), 4)
	grants := `grant select, insert, update, delete on unecho_key, unecho_conflict, unecho_lease, unecho_position to ROLE;
		grant usage on sequence unecho_token to ROLE;
		grant select on unecho_migration to ROLE;
		create table effect (name text); grant insert on effect to ROLE`
	if _, err := owner.Exec(t.Context(), strings.ReplaceAll(grants, "ROLE", pgx.Identifier{role}.Sanitize())); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if _, err := pool.Exec(ctx, "create table mine (n int)"); sqlState(err) != "42501" {
		t.Fatalf("the role may create tables, so this test shows nothing: %v", err)
	}
	if err := errors.Join(pgdedupe.Migrate(ctx, pool, nil), pgdedupe.Validate(ctx, pool, nil)); err != nil {
		t.Error(err)
	}
	c, other := claim("1"), claim("1")
	other.Fingerprint[31]++
	for _, want := range []dedupe.Outcome{dedupe.Processed, dedupe.Duplicate} {
		if res, err := pgdedupe.NewStore(pool, nil).Once(ctx, c, exec("insert into effect values ('e')")); err != nil || res.Outcome != want {
			t.Errorf("Once: %v, %v; want %v", res.Outcome, err, want)
		}
		res, err := pgdedupe.NewPipelinedStore(pool, nil).Once(ctx, claim("2"), func(_ context.Context, b *pgx.Batch) ([]byte, error) {
			b.Queue("insert into effect values ('e')")
			return []byte("reply"), nil
		})
		if err != nil || res.Outcome != want {
			t.Errorf("Once, pipelined: %v, %v; want %v", res.Outcome, err, want)
		}
		res, err = pgdedupe.NewLeaseStore(pool, nil).Once(ctx, claim("3"), func(context.Context, *dedupe.Lease) ([]byte, error) { return nil, nil })
		if err != nil || res.Outcome != want {
			t.Errorf("Once, leases: %v, %v; want %v", res.Outcome, err, want)
		}
	}
	at := dedupe.Partition{Consumer: "c", Topic: "t"}
	if answers, err := pgdedupe.NewStore(pool, nil).(dedupe.Placer[pgx.Tx]).OnceAt(ctx, at, []dedupe.Place{{Offset: 1}}, nil, func(context.Context, pgx.Tx, []int) ([][]byte, error) {
		return nil, nil
	}); err != nil || answers[0].Outcome != dedupe.Processed {
		t.Errorf("OnceAt: %v, %v", answers, err)
	}
	if res, err := pgdedupe.NewStore(pool, nil).Once(ctx, other, exec("select 1/0")); err != nil || res.Outcome != dedupe.Conflict {
		t.Errorf("another content: %v, %v", res.Outcome, err)
	}
	a := pgdedupe.NewAdmin(pool, nil)
	_, e1 := a.Find(ctx, c.Key.Stored())
	_, e2 := a.List(ctx, dedupe.Filter{InConflict: true})
	_, e3 := a.Counts(ctx)
	_, e4 := pgdedupe.Prune(ctx, pool, nil, 0)
	_, e5 := a.(dedupe.PositionAdmin).Positions(ctx)
	if err := errors.Join(e1, e2, e3, e4, e5, a.(dedupe.PositionAdmin).ResetPosition(ctx, at, 0), a.Settle(ctx, c.Key.Stored()), a.Evict(ctx, c.Key.Stored())); err != nil {
		t.Errorf("the admin's and the pruner's work: %v", err)
	}
}

func sqlState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

//go:embed testdata/tenants.sql
var tenants string

// Under the policies of testdata/tenants.sql a tenant's program meets nothing of
// another tenant's, by whichever way it asks.
func TestRowLevelSecurityKeepsTenantsApart(t *testing.T) {
	schemaURL, owner := ownerOf(t)
	role := strings.ToLower(testenv.Name("app"))
	pools := map[string]*pgxpool.Pool{}
	for _, tenant := range []string{"acme", "rival"} {
		pools[tenant] = testenv.PoolOf(t, asRole(t, owner, schemaURL, role, "app.tenant", tenant), 4)
	}
	if _, err := owner.Exec(t.Context(), strings.NewReplacer(" to app", " to "+pgx.Identifier{role}.Sanitize()).Replace(tenants)); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	of := func(tenant, id string) dedupe.Claim {
		k := dedupe.Key{Tenant: tenant, Consumer: "c", ID: id}
		return dedupe.Claim{Key: k, Fingerprint: dedupe.Fingerprint(k), Retain: time.Millisecond}
	}
	reply := func(text string) handler {
		return func(context.Context, pgx.Tx) ([]byte, error) { return []byte(text), nil }
	}
	for tenant, pool := range pools {
		for _, want := range []dedupe.Outcome{dedupe.Processed, dedupe.Duplicate} {
			res, err := pgdedupe.NewStore(pool, nil).Once(ctx, of(tenant, "1"), reply("secret of "+tenant))
			if err != nil || res.Outcome != want || string(res.Reply) != "secret of "+tenant {
				t.Errorf("%s: %v, %q, %v; want %v", tenant, res.Outcome, res.Reply, err, want)
			}
		}
		if res, err := pgdedupe.NewLeaseStore(pool, nil).Once(ctx, of(tenant, "2"), func(context.Context, *dedupe.Lease) ([]byte, error) { return nil, nil }); err != nil || res.Outcome != dedupe.Processed {
			t.Errorf("%s, a lease: %v, %v", tenant, res.Outcome, err)
		}
	}
	rival, acme := pools["rival"], of("acme", "1")
	a := pgdedupe.NewAdmin(rival, nil)
	if _, err := a.Find(ctx, acme.Key.Stored()); !errors.Is(err, dedupe.ErrNotFound) {
		t.Errorf("the rival finds acme's key: %v", err)
	}
	if err := a.Evict(ctx, acme.Key.Stored()); !errors.Is(err, dedupe.ErrNotFound) {
		t.Errorf("the rival evicts acme's key: %v", err)
	}
	if page, err := a.List(ctx, dedupe.Filter{State: dedupe.StateDone}); err != nil || len(page.Entries) != 2 {
		t.Errorf("the rival lists %d keys, %v; its own are 2", len(page.Entries), err)
	}
	for name, once := range map[string]func() (dedupe.Result, error){
		"a transaction": func() (dedupe.Result, error) { return pgdedupe.NewStore(rival, nil).Once(ctx, acme, reply("stolen")) },
		"a new key": func() (dedupe.Result, error) {
			return pgdedupe.NewStore(rival, nil).Once(ctx, of("acme", "new"), reply("forged"))
		},
		"a lease": func() (dedupe.Result, error) {
			return pgdedupe.NewLeaseStore(rival, nil).Once(ctx, of("acme", "2"), func(context.Context, *dedupe.Lease) ([]byte, error) {
				t.Error("the handler ran in another tenant's name")
				return nil, nil
			})
		},
	} {
		if res, err := once(); err == nil || res.Reply != nil {
			t.Errorf("%s in acme's name: %v, %q; want an error", name, res.Outcome, res.Reply)
		}
	}
	testenv.Within(t, 10*time.Second, "the rival's own keys expire", func() bool {
		if _, err := pgdedupe.Prune(ctx, rival, nil, 0); err != nil {
			t.Fatal(err)
		}
		page, err := a.List(ctx, dedupe.Filter{State: dedupe.StateDone})
		return err == nil && len(page.Entries) == 0
	})
	if res, err := pgdedupe.NewStore(pools["acme"], nil).Once(ctx, acme, reply("again")); err != nil || res.Outcome != dedupe.Duplicate || string(res.Reply) != "secret of acme" {
		t.Errorf("after all that acme gets %v, %q, %v", res.Outcome, res.Reply, err)
	}
}
