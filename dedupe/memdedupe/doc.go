// Package memdedupe keeps the keys of package dedupe in memory: for tests,
// examples, and programs of one process whose effects are in memory as well.
//
// Its scope, [Tx], stages effects and applies them at the commit, so that
// effect and key appear together or not at all, as in a database.
//
// Invariants that the code does not show:
//
//   - All keys are lost with the process. Where the broker is not, that is a
//     second run of everything that it delivers again.
//   - Time is the process's clock, which under testing/synctest is the bubble's.
//   - A key takes memory until its Claim's Retain is over; expired ones go with
//     the next claim, without a pruner, and also those in conflict. Conflicts are kept for ever, one for each key and
//     fingerprint.
//   - Positions are kept for ever, one for each partition and consumer.
//   - Staged effects run under the store's lock, so a claim sees a key as done
//     only after all of its effects.
package memdedupe
