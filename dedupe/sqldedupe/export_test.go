package sqldedupe

import (
	"database/sql"

	"github.com/unecho/unecho/dedupe"
)

// BySession makes a claim bound its wait as it does on MySQL, on MariaDB too.
func BySession(o Options) Options {
	o.bound = boundBySession
	return o
}

// Driver and Scope are for drivers that are broken on purpose.
type (
	Driver = dialect
	Scope  = scope
)

// NewDriver returns the driver behind a store.
func NewDriver(db *sql.DB, d Dialect, o *Options) Driver {
	return newDriver(base{db: db, o: o.normal(d)}, d)
}

// StoreOf returns the store over a driver.
func StoreOf(d Driver) dedupe.Store[*sql.Tx] { return newStore(d, nil) }

// Tx is the transaction of a scope.
func (s *scope) Tx() *sql.Tx { return s.tx }
