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
