// Package orders is what the two programs of the example share: the shop's
// tables and the event. The programs are producer and consumer, as they would
// be written for production on PostgreSQL and Kafka; between them runs the
// relay command.
package orders
