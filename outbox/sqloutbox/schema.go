package sqloutbox

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"

	"github.com/unecho/unecho/internal/migrate"
)

//go:embed migrations/*.sql
var migrations embed.FS

// set is the schema of the SQLite outbox.
func set() *migrate.Set {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		panic(err) // the files are embedded
	}
	return migrate.MustNew("outbox", files, "")
}

// Migrate creates the tables in a SQLite database or brings them to the version
// that this program needs. Any number of processes may call it at once.
func Migrate(ctx context.Context, db *sql.DB) error {
	if err := set().Up(ctx, migrate.SQLite(db)); err != nil {
		return fmt.Errorf("sqloutbox: %w", err)
	}
	return nil
}

// Validate returns nil if the tables are at the version that this program
// needs, and otherwise an error that says what to do.
func Validate(ctx context.Context, db *sql.DB) error {
	if err := set().Validate(ctx, migrate.SQLite(db)); err != nil {
		return fmt.Errorf("sqloutbox: %w", err)
	}
	return nil
}

// The columns of a message, in the order in which they are written and read.
const columns = "topic, key, event_id, source, type, subject, content_type, data_schema, time, meta, body"

// now is the database's clock in milliseconds.
const now = "cast(unixepoch('subsec') * 1000 as integer)"
