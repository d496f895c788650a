package sqldedupe_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/sqldedupe"
)

// The *sql.Tx that a handler gets also holds the event's key.
func ExampleNewStore() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "app.db")+"?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	ctx := context.Background()
	if err := sqldedupe.Migrate(ctx, db, sqldedupe.SQLite, nil); err != nil {
		panic(err)
	}
	store := sqldedupe.NewStore(db, sqldedupe.SQLite, nil)
	claim := dedupe.Claim{Key: dedupe.Key{Consumer: "billing", Source: "/shop", ID: "42"}}
	for range 2 {
		res, err := store.Once(ctx, claim, func(ctx context.Context, tx *sql.Tx) ([]byte, error) {
			_, err := tx.ExecContext(ctx, "create table invoice_42 (cents integer)") // a second run would fail
			return nil, err
		})
		fmt.Println(res.Outcome, err)
	}
	// Output:
	// processed <nil>
	// duplicate <nil>
}

// A group of events in one transaction: the keys, the effects of those that are
// new, and one commit.
func ExampleNewStore_batch() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "app.db")+"?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	ctx := context.Background()
	if err := sqldedupe.Migrate(ctx, db, sqldedupe.SQLite, nil); err != nil {
		panic(err)
	}
	store := sqldedupe.NewStore(db, sqldedupe.SQLite, nil).(dedupe.Batcher[*sql.Tx])
	var claims []dedupe.Claim
	for _, id := range []string{"41", "42", "41"} {
		claims = append(claims, dedupe.Claim{Key: dedupe.Key{Consumer: "billing", Source: "/shop", ID: id}})
	}
	answers, err := store.OnceEach(ctx, claims, func(ctx context.Context, tx *sql.Tx, fresh []int) ([][]byte, error) {
		for _, i := range fresh {
			if _, err := tx.ExecContext(ctx, "create table invoice_"+claims[i].Key.ID+" (cents integer)"); err != nil {
				return nil, err
			}
		}
		return nil, nil // no replies
	})
	for _, a := range answers {
		fmt.Println(a.Outcome, a.Err)
	}
	fmt.Println(err)
	// Output:
	// processed <nil>
	// processed <nil>
	// duplicate <nil>
	// <nil>
}

// The transaction is made elsewhere, so the claim goes into it.
func ExampleClaimer() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "app.db")+"?_pragma=journal_mode(WAL)&_txlock=immediate")
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	ctx := context.Background()
	if err := sqldedupe.Migrate(ctx, db, sqldedupe.SQLite, nil); err != nil {
		panic(err)
	}
	claimer := sqldedupe.NewClaimer(sqldedupe.SQLite, nil)
	claim := dedupe.Claim{Key: dedupe.Key{Consumer: "billing", Source: "/shop", ID: "42"}}
	for range 2 {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			panic(err)
		}
		done, err := claimer.Claim(ctx, tx, claim)
		if err == nil && done == nil {
			err = claimer.SetReply(ctx, tx, claim.Key, []byte("invoice 7")) // beside the effect
		}
		if done != nil {
			fmt.Println(done.Outcome, string(done.Reply))
		}
		fmt.Println(err, tx.Commit())
	}
	e, err := sqldedupe.NewAdmin(db, sqldedupe.SQLite, nil).Find(ctx, claim.Key.Stored())
	fmt.Println(e.State, e.ReplySize, err)
	// Output:
	// <nil> <nil>
	// duplicate invoice 7
	// <nil> <nil>
	// done 9 <nil>
}
