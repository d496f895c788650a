// Package pgxmigrate is the front end of migrate for a pgx pool. It is apart so
// that a program on database/sql does not link pgx.
//
// It sends text by the simple protocol only, so it works through a pooler in
// transaction mode whatever the pool's query mode.
package pgxmigrate

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/internal/migrate"
)

// DB makes a migrate.DB of a pool.
func DB(pool *pgxpool.Pool) migrate.DB { return db{pool} }

type db struct{ pool *pgxpool.Pool }

func (d db) Dialect() migrate.Dialect { return migrate.DialectPostgres }

func (d db) Int(ctx context.Context, sql string) (int, error) { return scanInt(ctx, d.pool, sql) }

func (d db) InTx(ctx context.Context, fn func(context.Context, migrate.Tx) error) error {
	o := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
	return pgx.BeginTxFunc(ctx, d.pool, o, func(t pgx.Tx) error {
		return fn(ctx, tx{t})
	})
}

type tx struct{ tx pgx.Tx }

func (t tx) Exec(ctx context.Context, sql string) error {
	_, err := t.tx.Exec(ctx, sql)
	return err
}

func (t tx) Int(ctx context.Context, sql string) (int, error) { return scanInt(ctx, t.tx, sql) }

type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func scanInt(ctx context.Context, q querier, sql string) (n int, err error) {
	err = q.QueryRow(ctx, sql, pgx.QueryExecModeSimpleProtocol).Scan(&n)
	return n, err
}
