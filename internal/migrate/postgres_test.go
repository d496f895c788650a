package migrate_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/unecho/unecho/internal/migrate"
	"github.com/unecho/unecho/internal/migrate/pgxmigrate"
	"github.com/unecho/unecho/internal/testenv"
)

func TestPgx(t *testing.T) {
	t.Run("search path", func(t *testing.T) {
		exercise(t, func(t *testing.T) (migrate.DB, string) {
			return pgxmigrate.DB(testenv.Pool(t, 10)), ""
		})
	})
	t.Run("schema that is missing", func(t *testing.T) {
		exercise(t, func(t *testing.T) (migrate.DB, string) {
			pool := testenv.Pool(t, 10)
			schema := testenv.Name("T-ü ") // every name that can be quoted
			t.Cleanup(func() { dropSchema(t, pool, schema) })
			return pgxmigrate.DB(pool), schema
		})
	})
	t.Run("serializable by default", func(t *testing.T) {
		exercise(t, func(t *testing.T) (migrate.DB, string) {
			cfg, err := pgxpool.ParseConfig(testenv.SchemaURL(t))
			if err != nil {
				t.Fatal(err)
			}
			cfg.MaxConns = 10
			cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(pool.Close)
			return pgxmigrate.DB(pool), ""
		})
	})
}

func dropSchema(t *testing.T, pool *pgxpool.Pool, schema string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := pool.Exec(ctx, "drop schema if exists "+pgx.Identifier{schema}.Sanitize()+" cascade"); err != nil {
		t.Error(err)
	}
}

func TestPostgresBySQL(t *testing.T) {
	exercise(t, func(t *testing.T) (migrate.DB, string) {
		db, err := sql.Open("pgx", testenv.SchemaURL(t))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = db.Close() })
		return migrate.Postgres(db), ""
	})
}
