// Package natsbroker consumes from and publishes to NATS JetStream, on
// nats-io/nats.go and its jetstream package.
//
// A [Source] is a durable pull consumer. Its deliveries have no lane: JetStream
// delivers again what was not acknowledged, behind what came later, so there is
// no order to promise. A [Publisher] publishes asynchronously in a bounded
// window, with a time-out on every acknowledgement.
//
// NATS has no ordering key and cannot tell a null body from an empty one: a Key
// orders the publishes of one Publisher and is not carried, and an empty body is
// received as empty, never as null.
//
// Requests of core NATS come from a [RequestSource], and their stored reply goes to
// whichever of several equal requests came last.
//
// # Order
//
// To have the events of a key in order and several keys at once, let the stream put
// each key into a partition, and make each partition a durable of its own:
//
//	js.CreateStream(ctx, jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.*"},
//		SubjectTransform: &jetstream.SubjectTransformConfig{Source: "orders.*", Destination: "orders.{{partition(8,1)}}.{{wildcard(1)}}"}})
//	natsbroker.Config{Stream: "ORDERS", Durable: "billing-3", Subjects: []string{"orders.3.*"}, MaxAckPending: 1}
//
// The key is the last token of the subject that is published to. With MaxAckPending 1
// nothing of a partition is delivered behind what is not acknowledged, by however
// many members; tested with failures and members that come and go.
//
// # Connecting
//
// [Connect] takes options of nats.go: UserCredentials for a file of credentials,
// NkeyOptionFromSeed, RootCAs and ClientCert for TLS, TLSHandshakeFirst for servers
// that begin with it. All of them are tested.
//
// # Defaults
//
//   - AckWait 30 s, and a heartbeat (in progress) every third of it for every
//     delivery in hand, waiting or running: a consumer that was killed is
//     replaced after AckWait, however long its handlers take.
//   - As many deliveries are in hand as there are workers: what waits in a
//     client's buffer cannot go to another one.
//   - Pulls last 5 s with a server heartbeat every second, so that a change of
//     the leader that the client did not see costs 2 s.
//
// When the server dies that leads a stream of several replicas, the others take 4
// to 9 s to elect another one, which no client can shorten. What waits for it goes
// on within a second of that, and nothing is lost.
//
// # Durability
//
// JetStream acknowledges a publish before it has synced the file: by default it
// syncs every two minutes, and loses on power failure what it acknowledged since.
// Set sync_interval to always in the server's configuration, or replicate the
// stream, and keep sent rows in the outbox for long enough to publish them again.
// [CheckSync] asks a server's monitoring endpoint, which alone can tell, and
// [CheckSubjects] finds subjects without a stream, or with one that keeps nothing.
//
// # Invariants
//
//   - The server does not compare delivery numbers: a late acknowledgement or
//     heartbeat would settle a delivery that another worker has by now. So
//     nothing is sent for a delivery whose last confirmed heartbeat, or receipt,
//     is AckWait ago, less a tenth. Such a delivery is lost.
//   - A heartbeat counts only if the server has answered a ping sent behind it:
//     publishing succeeds while the connection is away.
//   - Failures are handed back with a delay, never with a bare nak, which comes
//     back at once and ignores any back-off. A consumer with a BackOff is
//     refused, since that overrides AckWait.
//   - A consumer that others made is used as it is, or not at all: it is changed
//     by Config.Update alone. A mark in the metadata tells which ones are ours.
//   - The message id by which the server recognises a repeated publish covers the
//     event's identity and the subject: one event on two subjects of a stream is
//     two messages. If the server calls a publish a duplicate, the stored message
//     is looked at before that is believed.
package natsbroker
