// Package storetest is the suite that every [dedupe.Store] passes, and that
// shows a new one to be right.
//
// A driver's test is a [Harness] around it and one call of [Run]: the harness
// opens stores, writes effects and counts the committed ones. What a store can
// do beyond that is an optional interface of the harness ([Pooled], [Retrier],
// [Aborter], [Ender], [Cutter], [Breaker], [Pruner], [Administered], [ClaimLog],
// [Eager]): the cases that need a power do not apply, and say so, where it is missing.
//
// Whether a store is a [dedupe.Batcher] or a [dedupe.Placer] is for the suite to
// find out; the cases of positions are those that begin with "position".
//
// [RunLease] is the same for lease drivers, and [RunClaim] for claims in
// transactions that the caller owns. [RunMachine], [RunLinear] and their like
// for leases check a store against a model, by random sequences and by
// histories of concurrent clients.
//
// The suite is tested itself: its own tests run it against stores that are
// broken on purpose, and demand that it fails.
//
// Invariants that the code does not show:
//
//   - An effect is a row in a table without a unique constraint, so that a
//     second effect shows instead of being masked.
//   - Effects are counted by a way of their own, not through the store.
//   - Cases wait for events, with a deadline. Where one lets time pass it is to
//     make a race wide, and it is right whatever the machine's speed.
//   - Sequences and histories are judged by one step function. What is wrong in
//     it is wrong in both, so the planted bugs run against both as well.
//   - A case fails, and does not hang, on a store that never answers, as long
//     as that store minds its context.
package storetest
