// Package consumertest tests handlers: it lets their process end at every
// boundary between a delivery and its acknowledgement, delivers again, and
// demands the state that an undisturbed run leaves.
//
//	func TestBilling(t *testing.T) {
//		consumertest.Explore(t, func(tb testing.TB) consumertest.World[pgx.Tx] {
//			pool := …                       // an empty database
//			return consumertest.World[pgx.Tx]{
//				Store: pgdedupe.NewStore(pool, nil), Handler: bill,
//				State: func(tb testing.TB) string { return … }, // what bill has written, as text
//			}
//		}, orders...)
//	}
//
// # Invariants
//
//   - An end of the process is simulated: what the handler has changed outside
//     its scope stays, what is in the scope is rolled back, and the delivery is
//     not acknowledged. That is what a crash does, seen from the database and
//     from the broker.
//   - After an end all events are delivered again from the first one, as a broker
//     does that lost its acknowledgements too.
//   - The world is made anew for every place, so that no run sees another's.
package consumertest
