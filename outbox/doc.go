// Package outbox publishes what a transaction has written: a [Writer] adds
// messages to a table in the transaction of the business change, and a [Relay]
// publishes the rows of committed transactions, at least once.
//
// # Invariants
//
//   - Every row of a committed transaction reaches the broker or is parked with
//     a reason, however late that transaction committed. No row of a
//     transaction that rolled back ever does.
//   - A row is settled as sent only behind a positive acknowledgement. An
//     answer that was lost is no answer: the row is published again.
//   - The first publishes of the rows of one topic and key happen in the order
//     of their ids, across crashes and relays. A row that cannot go blocks the
//     later rows of its key and nothing else. Ids follow the order of writing
//     for writers that are serialised by a lock; for others there is no order
//     to keep.
//   - Only the holder of the newest epoch settles. A relay that was stopped and
//     goes on later may publish rows again, and cannot record anything.
//   - An outage spends nobody's attempts and moves nothing aside. One that lasts
//     costs the lease between two tries: another relay may reach the broker.
//   - A batch is bounded in rows and in bytes, and held rows never fill it while
//     others wait. A row that cannot be read is parked like one that is refused.
//   - The lease is judged by the store's clock; a relay counts from before it
//     asked, so it believes to hold the lease for a shorter time than it does.
//     It renews the lease while it reads and publishes, and stops before the end.
//   - Every call of the store and of the broker has a deadline. What was
//     acknowledged is recorded even when the relay is told to stop.
package outbox
