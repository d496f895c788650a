// Package consumer runs handlers on what a broker delivers: [Wrap] makes a
// handler run once for each event, by a store that holds the event's key in the
// scope of the handler's effect, and [Run] receives, retries, dead-letters,
// acknowledges and drains.
//
// # Invariants
//
//   - A delivery is acknowledged only after the handler has returned nil, and
//     Wrap returns nil only behind a commit that is known, the record of a
//     conflict, or the recognition of a duplicate that is done.
//   - A redrive runs the handler through the same key as a delivery, and what it
//     writes down never undoes what is known, or was decided, by then.
//   - In progress is no outcome: such a delivery comes back, however often.
//   - An outage is what the store or the broker says of itself, or what a
//     handler has marked. Whatever else a handler has met is its message's
//     own failure. Unknown commits, keys in progress, handlers that were cut
//     short and outages spend no attempts. An outage that one message meets
//     again and again while others are served is that message's failure.
//   - A message is acknowledged as a dead letter only after the hook has
//     returned nil, and the handler does not run while the hook is tried again.
//   - Deliveries of one lane, or with OrderByKey those of one lane and key, are
//     handled one after the other, in the order of their receipt, retries
//     included.
//   - A handler by positions ([WrapWatermark]) sees the messages of a lane in their
//     order, without exception: of one that was handled before an earlier one, the
//     earlier one would be lost. Nothing that is given back, that middleware
//     answers for, or that ends a goroutine lets what is behind it go first.
//   - What such a handler has dead-lettered, its position passes before the
//     acknowledgement.
//   - A handler's context does not end when Run's does, but when the grace is
//     over, its time-out passes, or the claim on its delivery is lost.
//   - While the store is known to be out of reach, receiving goes on up to a
//     bound and no further, and the probe goes round over what waits: no single
//     message decides whether the store is back.
package consumer
