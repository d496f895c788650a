// Package sqloutbox is an outbox on database/sql: in SQLite, with [NewWriter]
// and [NewStore], and the writing side of the PostgreSQL outbox of package
// pgoutbox for programs whose business transactions are a *sql.Tx
// ([NewPostgresWriter]).
//
// SQLite needs write-ahead logging and a busy time-out, which belong in the data
// source name: for modernc.org/sqlite
//
//	file:app.db?_pragma=journal_mode(wal)&_pragma=busy_timeout(5000)&_txlock=immediate
//
// _txlock=immediate keeps two business transactions that first read and then
// write from deadlocking.
//
// # Invariants
//
//   - SQLite has one writer at a time, so the order of ids is the order of
//     commits and a cursor on the id loses nothing. On PostgreSQL it would.
//   - The epoch is checked by the statement that moves the position, which is
//     the first of its transaction and takes the write lock.
//   - A null and an empty key or body are kept apart.
package sqloutbox
