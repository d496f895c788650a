// Package redisdedupe keeps leases of package dedupe in Redis 7.0 or newer, by
// go-redis: standalone, behind Sentinel, or a cluster. It is for handlers whose
// effect is outside a database transaction; its scope is a *dedupe.Lease.
//
//	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
//	store, err := redisdedupe.NewStore(rdb, nil)
//
// Redis can lose what it has acknowledged: on a crash within a second without
// appendfsync always, and on a failover. Then a key is forgotten, and its event
// handled once more when it comes again. [Driver.Check] says what can be said at
// start.
//
// # Invariants
//
//   - One event is one Redis key, so every step is one script on one slot.
//   - Expiry is judged by Redis' clock, inside the script.
//   - A token is the greater of Redis' clock in microseconds and the last token
//     plus one: it rises also when Redis has forgotten the last one.
//   - A claim has a random owner. The client repeats a command whose answer was
//     lost, and the repetition finds its own claim.
//   - When the server's memory is full no claim is granted, and those that were
//     can still be extended, completed and released.
//   - Every key has a time to live. A key whose owner vanished, or that is
//     parked, keeps it for as long as a key that is done, because what came of
//     it is not known. Redis forgets on time: there is no pruner, and what
//     comes later than the retention is a new event.
package redisdedupe
