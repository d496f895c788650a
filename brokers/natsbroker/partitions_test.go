package natsbroker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/testenv"
)

// The recipe for order per key: the stream puts the subjects of a key into one
// partition, and each partition is a durable whose MaxAckPending is 1. The order is
// kept over failures, handed-back deliveries and members that come and go, with
// several members on each partition.
func TestOrderPerKeyByPartitions(t *testing.T) {
	const partitions, keys, each, members = 3, 8, 25, 2
	url := testenv.NATS(t)
	f := &fixture{url: url, stream: testenv.Name("P"), ackWait: 2 * time.Second}
	js := f.js(t)
	_, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: f.stream, Subjects: []string{f.stream + ".*"},
		SubjectTransform: &jetstream.SubjectTransformConfig{Source: f.stream + ".*", Destination: fmt.Sprintf("%s.{{partition(%d,1)}}.{{wildcard(1)}}", f.stream, partitions)}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.remove)
	p := f.Publisher(t)
	for n := range each {
		var ms []*envelope.Message
		for k := range keys {
			ms = append(ms, &envelope.Message{ID: fmt.Sprintf("%d-%d", k, n), Source: "/p", Type: "t", Topic: fmt.Sprintf("%s.key%d", f.stream, k), Key: fmt.Append(nil, k), Body: fmt.Append(nil, n)})
		}
		if err := p.Publish(t.Context(), ms).Err(); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	done, used := map[string][]int{}, map[string]bool{}
	total := func() (n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, list := range done {
			n += len(list)
		}
		return n
	}
	store := memdedupe.NewStore(nil)
	h := consumer.Wrap("p", store, func(ctx context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
		if rand.N(10) == 0 {
			return errors.New("not this time")
		}
		key, _, _ := strings.Cut(m.ID, "-")
		n, _ := strconv.Atoi(string(m.Body))
		return tx.OnCommit(func() {
			mu.Lock()
			defer mu.Unlock()
			done[key] = append(done[key], n)
			used[strings.Split(m.Topic, ".")[1]] = true
		})
	}, nil)
	var wg sync.WaitGroup
	member := func(partition int) context.CancelFunc {
		src := f.source(t, Config{Stream: f.stream, Durable: fmt.Sprint("p", partition), Subjects: []string{fmt.Sprintf("%s.%d.*", f.stream, partition)}, AckWait: f.ackWait, MaxAckPending: 1})
		ctx, cancel := context.WithCancel(context.Background())
		wg.Go(func() {
			err := consumer.Run(ctx, src, h, &consumer.RunOptions{Backoff: consumer.Backoff{Min: time.Millisecond, Max: 10 * time.Millisecond}, MaxAttempts: 1000, DeadLetter: consumer.Discard, AcceptShortRetention: true})
			if err != nil {
				t.Error(err)
			}
		})
		return cancel
	}
	var running []context.CancelFunc
	for i := range partitions * members {
		running = append(running, member(i%partitions))
	}
	testenv.Within(t, 60*time.Second, "half is done", func() bool { return total() >= keys*each/2 })
	for i := range partitions {
		running[i]()
		running = append(running, member(i))
	}
	testenv.Within(t, 60*time.Second, "all is done", func() bool { return total() >= keys*each })
	for _, stop := range running {
		stop()
	}
	wg.Wait()
	for key, list := range done {
		if !slices.IsSorted(list) || len(list) != each {
			t.Errorf("key %s was handled in the order %v", key, list)
		}
	}
	if len(used) < 2 {
		t.Errorf("the partitions %v were used: nothing was shown", used)
	}
}
