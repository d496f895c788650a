// Package kafkabroker consumes from and publishes to Apache Kafka, on
// segmentio/kafka-go.
//
// A [Source] is a member of a consumer group. It is built on kafka-go's
// ConsumerGroup and on fetch requests of its own, not on kafka.Reader, which
// hands out messages of generations that have ended, commits for whichever
// generation is live, lets an offset go backwards, shows control records and
// aborted ones as messages, and cannot tell a null value from an empty one.
// A [Publisher] sends produce requests of its own, one at a time for each
// partition, so that a batch that fails is not overtaken by the next one, which
// kafka.Writer cannot promise.
//
// What is consumed is a list of topics, a pattern of their names, or a fixed list
// of partitions without a membership; see [Config]. Connections may use TLS and SASL
// by PLAIN (over TLS only), SCRAM and OAUTHBEARER.
//
// # No transactions
//
// Messages of transactions are read as they should be: what is open waits, what was
// aborted is hidden. A Publisher has none of its own. kafka-go has requests for
// them, but sends a batch without the producer's id, so the broker appends it
// outside the transaction, where it stays visible after an abort. Beside, a
// transaction of Kafka's does not cover the effect in your database; the key in the
// handler's transaction does.
//
// # Defaults
//
//   - Session time-out 10 s, heartbeat every 2 s: a consumer that was killed is
//     replaced after 10 s, and four heartbeats may be lost before a live one is.
//     Shorter ones mistake a pause of the garbage collector or of the machine
//     for a death, and every mistake is a rebalance.
//   - Rebalance time-out 30 s. The time that handlers have to finish when a
//     partition is taken away is the lesser of the two, less a margin, because
//     kafka-go sends no heartbeats once a generation has ended.
//   - Window of 65,536 offsets for each partition, and 64 MiB over all of them: a
//     message that has to wait holds up no other one before a crash would bring back
//     more than that, and what a slow handler can pile up is bounded.
//   - A fetch takes 1 MiB of a partition and waits for half a second if there is
//     nothing: larger ones are hardly faster, and are memory for each partition.
//   - Offsets are committed at most 200 ms after progress: they only decide how
//     much is delivered again after a crash, all of which is recognised.
//
// # Invariants
//
//   - The offset committed for a partition is that of the lowest delivery that
//     is not settled, or what follows the last one. It never goes backwards
//     within a generation, is never committed for a generation that has ended,
//     and never covers a message that was not handed out.
//   - Offsets have gaps (control records, aborted transactions, compaction):
//     "contiguous" is about the messages that were delivered, in their order.
//   - To read what is committed is left to the client: the broker holds back what
//     is open, returns what was aborted, and names the transactions. The end of one may
//     be the first thing in an answer.
//   - A batch whose last records are compacted away is returned, at the end of a
//     segment alone, for every offset of its range. Its end is searched for: to ask
//     again behind its last record is to ask for ever, and to guess is to lose.
//   - When a generation ends its deliveries are told to stop, those that run may
//     finish within the bound, what they did is committed, and only then is the
//     rest lost and the group joined again.
//   - After a broken connection kafka-go forgets its member id and joins as a
//     new member, while the coordinator waits for the old one to time out. So
//     the source leaves the group for the old id, until that is answered.
//   - The group is joined with the topics that are there. One that is missing makes
//     kafka-go give nobody a partition of any topic, so its balancers look again by
//     themselves where they are given none.
//   - A call of Publish returns when all of its partitions have answered, so one
//     that does not serve is not waited for to the end beside others that do.
//   - How many partitions there are is counted before the join whose assignment
//     they decide, so that what appears in between is noticed.
//   - A broken connection is not a lost generation: a commit that met one is
//     tried again.
package kafkabroker
