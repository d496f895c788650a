// Package membroker is a broker in memory, for tests and examples: topics with
// partitions, consumer groups with committed offsets, and faults on demand.
// It keeps the contracts of package brokers and behaves like Kafka where the
// two leave a choice. Nothing survives the process.
//
// # Invariants
//
//   - A group's offset of a partition never passes an unsettled delivery.
//   - A partition belongs to one source of a group at a time. When it moves,
//     deliveries that are unsettled are lost to the old one and come back.
//   - It has no goroutines, so it works inside a testing/synctest bubble.
package membroker
