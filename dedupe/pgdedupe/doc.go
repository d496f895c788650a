// Package pgdedupe keeps the keys of package dedupe in PostgreSQL, by pgx. The
// scope of a handler is a [pgx.Tx]: what it writes there and the key are
// committed together, or neither is.
//
//	pool, err := pgxpool.New(ctx, url)
//	err = pgdedupe.Migrate(ctx, pool, nil)
//	store := pgdedupe.NewStore(pool, nil)
//
// A key that is new costs no round trip more than the transaction that the
// handler needs anyway: BEGIN goes with the claim, and the reply and a guard go
// with COMMIT. It needs PostgreSQL 13 or newer.
//
// # What a handler may do with its transaction
//
// Everything but end it. Begin opens a savepoint, whose Commit and Rollback are
// the handler's. Commit and Rollback of the transaction itself, and statements
// that do the same, are refused, and the run ends with dedupe.ErrScope even if
// the handler ignores that. What is done by Conn() is not seen here, but the
// server refuses to commit another transaction than the one that the claim was
// made in. Rows, batches and copies must be read or closed before the handler
// returns; the transaction does not work after that.
//
// A transaction serves one call at a time, as in pgx, and says so when two
// goroutines use it at once.
//
// # Fewer round trips
//
// A handler that only contributes statements takes a *pgx.Batch from
// [NewPipelinedStore]: claim, statements and commit are one round trip. In a
// transaction that is made elsewhere a [Claimer] claims.
//
// # Keeping and looking
//
// Keys go by [Prune], which [dedupe.RunPruner] calls; until then they count.
// [NewAdmin] is for people. The program's role needs to read and write the four
// tables and to use the sequence, nothing else; testdata/tenants.sql shows how
// row-level security keeps the keys of tenants apart, and is tested.
//
// # Poolers
//
// Nothing is kept in a session, so PgBouncer and its like may work in
// transaction mode, with pgx's default_query_exec_mode set to cache_describe
// or exec; the suite passes through PgBouncer in both, with every kind of store. Set
// connect_timeout in the pool's URL: a connection that does not come about is
// waited for, by the pool, as long as that says.
//
// # A consumer that dies
//
// Its transaction is rolled back, and its keys are free, when the server notices:
// at once where the transaction was idle, but only at the end of a statement that
// runs. Set client_connection_check_interval (PostgreSQL 14), such as to 1s, for
// the role or in the pool's URL, and that takes a second as well. If a whole
// machine disappears it is tcp_keepalives_idle and tcp_user_timeout that count.
//
// # Failover
//
// A standby is refused: by [Validate] with an error that names it, and by every
// claim as an outage. Give the pool both hosts and target_session_attrs=read-write,
// and it finds the primary. What was acknowledged survives a failover only if
// commits wait for the standby (synchronous_standby_names); otherwise the last
// commits are gone with the primary, keys and effects together, while their
// messages were acknowledged.
//
// # Invariants
//
//   - The claim is the first statement of the transaction, and bounds its wait
//     by lock_timeout for itself alone: RETURNING puts back what was set before.
//   - The record of the winner is read by a statement of its own. The one that
//     has met the winner's row does not see it at READ COMMITTED.
//   - The claim never changes a row that is there: ON CONFLICT DO UPDATE would
//     lock it even where it changes nothing, and duplicates are many.
//   - In a pipeline the claim must fail where it comes second, because whatever
//     does not fail lets the statements behind it happen. The commit is the end
//     of the pipeline, so an answer that is lost anywhere in it is unknown.
//   - COMMIT is a success only by its tag: for an aborted transaction the server
//     answers it with ROLLBACK, without an error.
//   - An error in answer to a commit is a failure only if it is the server's
//     verdict on a statement. All others are unknown, including those that
//     pgconn.SafeToRetry calls safe.
//   - A connection whose state is in doubt is closed, never given back.
//   - The row of a position is locked by a statement of its own, first thing, and
//     an update of a row that is gone fails. Wherever the row is made, the wait for
//     another transaction that makes it is bounded, too.
//   - No scope reaches its connection after the driver has begun to end the
//     transaction: see session.
package pgdedupe
