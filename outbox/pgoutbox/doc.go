// Package pgoutbox is an outbox in PostgreSQL, on pgx: [NewWriter] writes
// messages in a business transaction, and [NewStore] is what a relay reads.
// [Migrate] creates the tables. It needs PostgreSQL 13 or newer.
//
// # Invariants
//
//   - A row carries the id of the transaction that wrote it. The reader takes
//     what became visible between two snapshots, so a transaction that commits
//     late is read late and is never passed over, and one that stays open, in
//     whichever database of the server, holds up nothing but its own rows.
//   - Within a window rows go by id, never by transaction id: one that took its
//     transaction id early, waited for a lock and wrote second would go first.
//   - The table is never updated. The position is one row, and a row that
//     cannot go is copied aside, so the position advances whatever happens.
//   - The epoch is checked by the statement that moves the position, in the
//     transaction that records everything else about the batch.
//   - Of the held rows of a topic and key, the first is never marked as waiting.
//     Only rows that are not are looked at, so what stands behind a parked row
//     costs nothing. Whoever changes which row is the first holds the lock of
//     the position.
//   - Rows are pruned by visibility, never by id.
//   - No session state: everything works through a pooler in transaction mode.
//     One that does not know of prepared statements needs a pool that makes
//     none (pgx.QueryExecModeExec).
package pgoutbox
