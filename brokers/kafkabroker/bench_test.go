package kafkabroker

import (
	"fmt"
	"testing"

	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/envelope"
)

// BenchmarkReceive receives and acknowledges, on a real Kafka: few partitions with
// much in each, and many.
func BenchmarkReceive(b *testing.B) {
	for _, partitions := range []int{4, 200} {
		b.Run(fmt.Sprintf("%d partitions", partitions), func(b *testing.B) {
			f := openReal(b, partitions)
			p := f.Publisher(b)
			const stored, each = 200_000, 10_000
			for n := 0; n < stored; n += each {
				msgs := make([]*envelope.Message, each)
				for i := range msgs {
					msgs[i] = brokertest.Event(f.topic, fmt.Sprint("k", (n+i)%5000), n+i)
				}
				if err := p.Publish(b.Context(), msgs).Err(); err != nil {
					b.Fatal(err)
				}
			}
			got, group := stored, 0
			var s *Source
			for b.Loop() {
				if got == stored {
					b.StopTimer()
					group++
					s = f.source(b, f.config(fmt.Sprint("g", group)))
					if err := s.Ack(b.Context(), next(b, s)); err != nil {
						b.Fatal(err)
					}
					got = 1
					b.StartTimer()
				}
				if err := s.Ack(b.Context(), next(b, s)); err != nil {
					b.Fatal(err)
				}
				got++
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
		})
	}
}
