// Package sqlitetest gives tests a SQLite database of their own.
package sqlitetest

import (
	"database/sql"
	"path/filepath"
	"testing"

	_ "modernc.org/sqlite" // the driver "sqlite"
)

// Settings are the parameters that package sqloutbox and package sqldedupe ask
// for in a data source name.
const Settings = "?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)&_txlock=immediate"

// Open opens a new database file; it goes with the test.
func Open(t testing.TB) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "test.db")+Settings)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}
