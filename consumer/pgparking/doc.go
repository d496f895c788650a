// Package pgparking keeps messages that cannot be handled in PostgreSQL, by pgx,
// until a person has decided about them: [NewLot] is a consumer.ParkingLot. It
// also counts there which handlers were started and have not come to an end, so
// that a message that ends processes is found out: [NewStartCounter].
//
//	lot := pgparking.NewLot(pool, nil)
//	err := consumer.Run(ctx, src, h, &consumer.RunOptions{DeadLetter: consumer.ParkIn(lot, "billing")})
//	…
//	answers, err := consumer.Redrive(ctx, lot, h, nil, ids...)
//
// # Invariants
//
//   - Every change is one statement, and so one transaction. Of one whose answer
//     did not come nobody knows whether it was made: that is
//     dedupe.ErrUnknownOutcome, never a success and never an outage.
//   - A change of a record names the version that it was made for, and is not
//     made if there is another.
//   - Parking a message again never changes its state, and no other statement
//     than a change of the state settles a record.
//   - What is on the wire is kept as bytes. The columns that are text are for
//     people, and hold what a text can hold of it.
//   - All times and ages are the database's.
//   - Age alone never deletes a record that waits.
package pgparking
