package sqloutbox

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/migrate"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/internal/rows"
)

// NewWriter returns a writer for business transactions in SQLite. o may be nil.
func NewWriter(o *outbox.WriterOptions) *outbox.Writer[*sql.Tx] {
	return outbox.NewWriter[*sql.Tx](sqliteAppender{}, o)
}

// NewPostgresWriter returns a writer for business transactions in PostgreSQL
// by database/sql. The tables and the relay are those of package pgoutbox;
// schema is theirs, empty for the search_path. o may be nil. It panics if
// schema cannot be one.
func NewPostgresWriter(schema string, o *outbox.WriterOptions) *outbox.Writer[*sql.Tx] {
	if schema != "" {
		if err := migrate.CheckName(schema); err != nil {
			panic("sqloutbox: " + err.Error())
		}
	}
	return outbox.NewWriter[*sql.Tx](postgresAppender{table: migrate.Table(schema, "unecho_outbox")}, o)
}

type sqliteAppender struct{}

const sqliteInsert = "insert into unecho_outbox (" + columns + ", created_at) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, " + now + ")"

// Append implements [outbox.Appender].
func (sqliteAppender) Append(ctx context.Context, tx *sql.Tx, msgs []*envelope.Message) error {
	stmt, err := tx.PrepareContext(ctx, sqliteInsert)
	if err != nil {
		return fmt.Errorf("sqloutbox: append: %w", err)
	}
	defer func() { _ = stmt.Close() }()
	for _, m := range msgs {
		if _, err := stmt.ExecContext(ctx, values(m, m.Time.UnixMicro())...); err != nil {
			return fmt.Errorf("sqloutbox: append: %w", err)
		}
	}
	return nil
}

func values(m *envelope.Message, time any) []any {
	return []any{m.Topic, m.Key, m.ID, m.Source, m.Type, m.Subject, m.ContentType, m.DataSchema, time, rows.EncodeMeta(m), m.Body}
}

type postgresAppender struct{ table string }

// perInsert keeps an insert below the 65,535 parameters of PostgreSQL's
// protocol, and its text of moderate length.
const perInsert = 200

// Append implements [outbox.Appender].
func (a postgresAppender) Append(ctx context.Context, tx *sql.Tx, msgs []*envelope.Message) error {
	for len(msgs) > 0 {
		n := min(len(msgs), perInsert)
		var text strings.Builder
		text.WriteString("insert into " + a.table + " (" + columns + ") values ")
		var args []any
		for i, m := range msgs[:n] {
			if i > 0 {
				text.WriteString(", ")
			}
			writePlaceholders(&text, len(args))
			args = append(args, values(m, m.Time)...)
		}
		if _, err := tx.ExecContext(ctx, text.String(), args...); err != nil {
			return fmt.Errorf("sqloutbox: append: %w", err)
		}
		msgs = msgs[n:]
	}
	return nil
}

// writePlaceholders writes ($n+1, …, $n+11).
func writePlaceholders(text *strings.Builder, n int) {
	for i := range strings.Count(columns, ",") + 1 {
		sep := ", "
		if i == 0 {
			sep = "("
		}
		fmt.Fprintf(text, "%s$%d", sep, n+i+1)
	}
	text.WriteString(")")
}
