// Package brokers is what is asked of a message broker: a [Source] to consume
// from and a [Publisher] to publish to. The adapters are packages of their
// own, kafkabroker, natsbroker and membroker, and brokertest is the suite that
// each of them passes.
//
// # Invariants
//
//   - A delivery is settled once. Until then the message can come back, and
//     what was acknowledged does not, unless the acknowledgement got lost.
//   - A delivery that was not acknowledged comes back, whatever happened to
//     those received behind it.
//   - Nothing is settled for a claim that is gone: the delivery may be another
//     consumer's by now, and a late acknowledgement would settle that one.
//   - An answer of a publisher is nil only behind a positive acknowledgement,
//     and an answer that was lost is ErrUnknown, not a failure.
//   - Optional powers are interfaces that an adapter has or has not.
package brokers
