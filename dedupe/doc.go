// Package dedupe makes an event take effect once, however often it is
// delivered: it records the event's [Key] in the same transaction as the
// effect, so that there are both or neither.
//
// A [Store] is that, for one kind of scope: [github.com/jackc/pgx/v5.Tx] in
// package pgdedupe, *sql.Tx in sqldedupe, and an in-memory one for tests in
// memdedupe. Its only method, Once, claims a key, runs a function in a
// transaction if the key is new, and commits effect, key and reply together.
// What a copy of the event gets instead says what to do with it:
//
//   - [Duplicate] and [Conflict] are outcomes. The event is done: acknowledge.
//   - [ErrInProgress], [ErrUnknownOutcome], [ErrUnavailable] and
//     [ErrContention] are errors of which no message is to blame: do not
//     acknowledge, and do not count them as failures of the message.
//   - [ErrLogReplaced] has everything wait until a person has reset a position.
//   - [ErrParked] means that a person has to find out, by [Admin].
//   - Every other error is the handler's.
//
// A store is built from a [TxDriver] by [NewTxStore], which holds the decisions
// that all transactional stores share; the suite in package storetest shows
// that a driver is right. A [LeaseDriver] and [NewLeaseStore] are the same for
// effects that no transaction can hold.
//
// A log whose order is its identity, such as a partition of a Kafka topic, needs
// one row for each partition instead of a key for each event: that is a [Placer].
//
// # Invariants
//
//   - Committed effects per key are at most one, for the four parts of a key
//     together. Two consumers of one event both run.
//   - The key is claimed first, by an insert that a unique constraint decides.
//     A copy that arrives meanwhile waits a bounded time for the owner to end,
//     and is never answered as done before that.
//   - Done and in progress are values of different types, so that no code can
//     take the one for the other by a missing case.
//   - The answer to a commit may be lost. That is neither success nor failure:
//     nothing here retries it, and the next claim of the key shows what it was.
//   - The fingerprint covers the identity. Stores keep 16 bytes of a key, and
//     what meets there by chance must not pass for a duplicate.
//   - A key counts until it is pruned, however old it is: the redeliveries after
//     a downtime are older than any retention. Only a store that forgets by
//     itself, such as Redis, forgets on time.
//   - Age alone never deletes a lease that is not done, or a key in conflict.
//   - Another content of a key is a conflict unless the store knows that the
//     first one had no effect.
//   - A handler's transaction is checked when it comes back: one that was
//     aborted and whose error was swallowed, or that was ended by the handler,
//     is not success.
//   - Errors of the store's own statements never count against a message: until
//     the handler runs, nothing that fails can be its fault.
//   - Expiry is judged by the store's clock, never by the process's.
//   - A position is locked before it is read, and moved in the transaction of the
//     effect. What is below it is done; what is below it and cannot be among what
//     is done is [ErrLogReplaced], and never a duplicate. A conflict that a
//     position passes is recorded in its transaction, for nobody comes back.
//   - A lease that ran out without completion is unknown, not new. Whoever claims
//     the key next is told, under a greater token.
//   - A handler's context ends before its lease can have run out by the store's
//     clock: the process counts from before it asked.
package dedupe
