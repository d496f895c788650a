package pgoutbox

import (
	"context"
	"embed"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/internal/migrate"
	"github.com/unecho/unecho/internal/migrate/pgxmigrate"
)

// Options are the settings that writers, relays and migrations of one outbox
// share. The zero value, and nil, is the default.
type Options struct {
	// Schema is where the tables are. Defaults to whatever unqualified names
	// mean on the connection (its search_path).
	Schema string
}

//go:embed migrations/*.sql
var migrations embed.FS

// line is the name of this driver in the table of versions.
const line = "outbox"

func (o *Options) set() (*migrate.Set, error) {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	schema := ""
	if o != nil {
		schema = o.Schema
	}
	return migrate.New(line, files, schema)
}

// Migrate creates the tables or brings them to the version that this program
// needs. Any number of processes may call it at once. It needs the right to
// create tables; afterwards the writers need INSERT on unecho_outbox, and the
// relay SELECT, INSERT, UPDATE and DELETE on all tables.
func Migrate(ctx context.Context, pool *pgxpool.Pool, o *Options) error {
	s, err := o.set()
	if err != nil {
		return fmt.Errorf("pgoutbox: %w", err)
	}
	return s.Up(ctx, pgxmigrate.DB(pool))
}

// Validate returns nil if the tables are at the version that this program
// needs, and otherwise an error that says what to do.
func Validate(ctx context.Context, pool *pgxpool.Pool, o *Options) error {
	s, err := o.set()
	if err != nil {
		return fmt.Errorf("pgoutbox: %w", err)
	}
	return s.Validate(ctx, pgxmigrate.DB(pool))
}

// SQL returns what Migrate would run on an empty database.
func SQL(o *Options) (string, error) {
	s, err := o.set()
	if err != nil {
		return "", fmt.Errorf("pgoutbox: %w", err)
	}
	return s.SQL(migrate.DialectPostgres), nil
}

// names are the quoted names of the tables.
type names struct{ outbox, shard, held string }

// names panics if the schema cannot be one, which is the programmer's error.
func (o *Options) names() names {
	s, err := o.set()
	if err != nil {
		panic("pgoutbox: " + err.Error())
	}
	return names{outbox: s.Table("unecho_outbox"), shard: s.Table("unecho_outbox_shard"), held: s.Table("unecho_outbox_held")}
}

// The columns of a message, in the order in which they are written and read.
const (
	writtenColumns = "topic, key, event_id, source, type, subject, content_type, data_schema, time, meta, body"
	readColumns    = "id, " + writtenColumns
)
