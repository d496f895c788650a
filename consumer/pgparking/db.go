package pgparking

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/internal/sqlstate"
)

// db sends statements, each bounded and a transaction of its own, and says what
// came of them.
type db struct {
	pool *pgxpool.Pool
	o    Options
	sql  sqlTexts
}

func newDB(pool *pgxpool.Pool, o *Options) db {
	return db{pool: pool, o: o.normal(), sql: statements(o.set())}
}

// change runs a statement that changes something.
func (d db) change(ctx context.Context, op, statement string, args ...any) (changed int64, err error) {
	err = d.on(ctx, op, true, func(ctx context.Context, c *pgxpool.Conn) error {
		tag, err := c.Exec(ctx, statement, args...)
		changed = tag.RowsAffected()
		return err
	})
	return changed, err
}

// rows runs a statement and reads all that it returns.
func rows[T any](ctx context.Context, d db, op string, changes bool, scan pgx.RowToFunc[T], statement string, args ...any) (found []T, err error) {
	err = d.on(ctx, op, changes, func(ctx context.Context, c *pgxpool.Conn) error {
		rs, err := c.Query(ctx, statement, args...)
		if err == nil {
			found, err = pgx.CollectRows(rs, scan)
		}
		return err
	})
	return found, err
}

// on runs do on a connection. The wait for a connection is apart, because before
// it nothing was sent.
func (d db) on(ctx context.Context, op string, changes bool, do func(context.Context, *pgxpool.Conn) error) error {
	bounded, cancel := context.WithTimeout(ctx, d.o.Timeout)
	defer cancel()
	conn, err := d.pool.Acquire(bounded)
	if err != nil {
		return fmt.Errorf("pgparking: %s: get a connection: %w", op, unavailable(ctx, err))
	}
	defer conn.Release()
	bounded, cancel = context.WithTimeout(ctx, d.o.Timeout)
	defer cancel()
	if err := do(bounded, conn); err != nil {
		return fmt.Errorf("pgparking: %s: %w", op, judge(ctx, err, changes))
	}
	return nil
}

// unavailable is an error that came before anything was done: the database is
// out of reach, unless it was the caller who has given up.
func unavailable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("%w: %w", dedupe.ErrUnavailable, err)
}

const undefinedTable = "42P01"

// judge says what an error means. Only the server's own verdict on the statement
// says that it has changed nothing: of anything else that comes once a statement
// may have been sent nobody knows.
func judge(ctx context.Context, err error, changes bool) error {
	var pg *pgconn.PgError
	verdict := errors.As(err, &pg) && sqlstate.Verdict(pg.Severity, pg.SeverityUnlocalized, pg.Code)
	switch {
	case !verdict && changes:
		return fmt.Errorf("%w: %w", dedupe.ErrUnknownOutcome, err)
	case !verdict:
		return unavailable(ctx, err)
	case sqlstate.Outage(pg.Code):
		return fmt.Errorf("%w: %w", dedupe.ErrUnavailable, err)
	case pg.Code == undefinedTable:
		return fmt.Errorf("%w: run pgparking.Migrate, or relay migrate parking: %w", dedupe.ErrUnavailable, err)
	case sqlstate.Contention(pg.Code):
		return fmt.Errorf("%w: %w", dedupe.ErrContention, err)
	case sqlstate.Data(pg.Code):
		return consumer.Permanent(err)
	}
	return err
}
