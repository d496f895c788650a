// Package consumerotel reports what package consumer does to OpenTelemetry.
//
//	tel, err := consumerotel.New(&consumerotel.Options{System: "kafka"})
//	err = consumer.Run(ctx, src, tel.Trace(h), &consumer.RunOptions{Observer: tel, …})
//
// An [Observer] counts and measures; [Observer.Trace] is middleware that makes a
// span around every delivery, linked to where the message was created.
//
// # Metrics
//
// Named by the semantic conventions for messaging, where these have a name, and
// by "unecho.consumer." otherwise:
//
//	messaging.process.duration        histogram, s   outcome, error.type
//	unecho.consumer.decisions         counter        consumer, outcome
//	unecho.consumer.retries           counter        class
//	unecho.consumer.dead_letters      counter        class, outcome
//	unecho.consumer.acks              counter        outcome
//	unecho.consumer.returned          counter
//	unecho.consumer.shadowed          counter        consumer, outcome
//	unecho.consumer.ignored           counter
//	unecho.consumer.pauses            counter
//	unecho.consumer.in_flight         gauge          where there is a Control
//	unecho.consumer.running           gauge          where there is a Control
//	unecho.consumer.stuck             gauge          where there is a Control
//	unecho.consumer.ready             gauge, 0 or 1  where there is a Control
//	unecho.consumer.live              gauge, 0 or 1  where there is a Control
//
// outcome of a decision is processed (a new event), duplicate, conflict, or the
// class of an error. Effects avoided are the duplicates.
//
// # Invariants
//
//   - Nothing that an event carries becomes a label: no identity, key, subject,
//     tenant or position. Labels are names that the program chose, and words
//     of package consumer.
//   - The text of an error is in no metric and in no span; it may quote anything.
//     Its class is.
//   - A span is linked to the message's creation, and is not its child: a
//     message may be handled a day later, and more than once. Of the message's
//     trace context the link has the ids and flags, and no tracestate.
package consumerotel
