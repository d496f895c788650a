// Package migrate brings the tables of a driver to the version that the
// program needs: numbered SQL files, embedded by the driver, run once, under a
// lock, in one transaction.
//
// A driver declares a [Set] from its files; a front end makes a [DB] of what
// the user has ([Postgres], [MySQL] and [SQLite] for database/sql, and the package
// pgxmigrate for a pgx pool).
//
// Invariants that the code does not show:
//
//   - The lock is taken first, inside the transaction, and ends with it: an
//     advisory transaction lock on PostgreSQL, which a pooler in transaction
//     mode passes on, and BEGIN IMMEDIATE on SQLite. Ten replicas that start
//     at once run each file once.
//   - On PostgreSQL the transaction is READ COMMITTED whatever the default:
//     with a snapshot from before the lock, the version that a waiter reads
//     would be the one from before the winner ran.
//   - All files that are due run in one transaction, so a file must not hold a
//     statement that refuses to run in one (CREATE INDEX CONCURRENTLY).
//   - On MySQL DDL commits by itself. The lock is a named one of the connection,
//     and every statement of a file must do nothing when it is run again,
//     because the version is recorded after the last one.
//   - No value reaches SQL but numbers and names that New has checked.
package migrate
