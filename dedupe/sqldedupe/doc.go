// Package sqldedupe keeps the keys of package dedupe in a database by
// database/sql. The scope of a handler is a *sql.Tx: what it writes there and
// the key are committed together, or neither is.
//
//	db, err := sql.Open("sqlite", "file:app.db?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
//	err = sqldedupe.Migrate(ctx, db, sqldedupe.SQLite, nil)
//	store := sqldedupe.NewStore(db, sqldedupe.SQLite, nil)
//
// The store is a dedupe.Batcher: it claims the keys of a group of events, of a
// thousand as well, in one transaction with one commit. It is a dedupe.Placer,
// too: it keeps the position of a partition in place of keys.
//
// # PostgreSQL
//
// The tables are those of package pgdedupe, which takes fewer round trips and
// sees more of what a handler does wrong: prefer it where the handler can work
// with pgx.
//
// # MariaDB and MySQL
//
// What is proved is proved on MariaDB 10.11, where a claim bounds its wait for a
// lock by max_statement_time; on MySQL it is innodb_lock_wait_timeout, in whole
// seconds, and that way was proved on MariaDB. The connections need autocommit;
// the store turns it off while a handler works, because a deadlock ends a
// transaction there behind the handler's back, and what the handler does after
// one that it ignores must not be committed. DDL commits by itself, and is found
// out at the commit. A batch in which all keys are new is claimed by one insert;
// where some are done, a failed insert, a read of the winners and another insert
// take its place. [Validate] refuses tables that are not InnoDB, a server that
// does not write its log at every commit, and a read-only one.
//
// # SQLite
//
// SQLite has one writer at a time, so handlers of one database run one after
// another, whatever their keys, and a claim waits for every other writer. The
// data source needs journal_mode(WAL), because in the other modes a reader can
// make a commit fail (the handler is then run again), and synchronous(FULL),
// because otherwise a power failure undoes what was acknowledged to the broker.
// [Validate] refuses what loses data. A busy_timeout is not needed: the store
// waits by itself. An error of a statement undoes that statement, not the
// transaction, so a handler that ignores it commits the rest.
//
// # What a handler may do with its transaction
//
// Everything but end it, and use it after it has returned. A *sql.Tx cannot
// keep a handler from ending it, so this is found out at the commit, and the
// run ends with dedupe.ErrScope. A handler that commits has committed its key
// as well, so the event is a duplicate from then on; nothing that it has done
// in the transaction is lost or doubled, but what it does after that commit is
// not undone with it.
//
// # Invariants
//
//   - The claim is the first statement of the transaction. On SQLite it takes
//     the write lock, so a plain BEGIN does: no view of the database was taken
//     before.
//   - The context of the transaction is not the handler's: database/sql rolls
//     back when it ends, while a commit that is due must go on.
//   - Before the commit the transaction has to prove that it is the one of the
//     claim: by its id on PostgreSQL, by a savepoint that was set after the
//     claim on MySQL and SQLite.
//   - On MySQL the claim is decided by the error of a plain insert, and the winner
//     is read with a lock: a view that was taken before does not show it.
//   - A batch is claimed in the order of dedupe.Key.Stored, on every dialect. On
//     MySQL an insert of several rows owns all or none; the winners are read when
//     its transaction is over, in one of their own at READ COMMITTED: there, its
//     own rows would pass for a winner's.
//   - The lock of a position is taken first, on MySQL by a locking read, which shows
//     what was committed last at every level, and on SQLite by an insert that may
//     do nothing.
//   - A batch is divided into statements, never into transactions.
//   - An error in answer to a commit is a failure only if it is the database's
//     verdict. All others are unknown.
//   - database/sql waits without a bound for a call that the handler has left
//     behind in its transaction; the store does not: see finish.
package sqldedupe
