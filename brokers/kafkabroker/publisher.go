package kafkabroker

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// PublisherConfig are the settings of [NewPublisher]. Brokers is mandatory, the
// zero value of everything else is the default. What safety depends on cannot
// be set: all in-sync replicas acknowledge, and one batch is in flight for
// each partition.
type PublisherConfig struct {
	// Brokers are addresses of brokers to start from, host:port.
	Brokers []string
	// TLS is used for all connections. Defaults to none.
	TLS *tls.Config
	// SASL authenticates all connections, as that of Config. Defaults to none.
	SASL sasl.Mechanism
	// ClientID is shown by the broker. Defaults to "unecho".
	ClientID string
	// Mode is how CloudEvents are written. Defaults to envelope.Binary.
	Mode envelope.Mode
	// MaxMessageBytes is the broker's limit for a batch (message.max.bytes, or
	// max.message.bytes of the topic). A larger message is rejected without
	// being sent. Defaults to 1,048,588, as the broker's does.
	MaxMessageBytes int
	// BatchSize bounds the messages of a batch. Defaults to 500.
	BatchSize int
	// RetryTimeout bounds how long a batch is tried again that the broker has
	// certainly not stored, when Publish's context does not end before. A
	// partition that does not serve holds up no other one of the call for that
	// long: when the others are done it has a second. Defaults to 10 s.
	RetryTimeout time.Duration
}

// Publisher publishes to Kafka. It implements brokers.Publisher, brokers.Prober and
// brokers.Router. Messages with a key go where the Java client's default partitioner
// puts them, the others take turns between the partitions that serve.
type Publisher struct {
	c         PublisherConfig
	client    *kafka.Client
	transport *kafka.Transport
	conns     connections
	waits     waits
	sizes     sync.Map      // by topic, how many partitions it was last known to have
	turn      atomic.Uint32 // of messages without a key

	mu       sync.Mutex
	closed   bool
	inFlight sync.WaitGroup
}

// NewPublisher returns a publisher. It connects when it is first used.
func NewPublisher(c PublisherConfig) (*Publisher, error) {
	if len(c.Brokers) == 0 {
		return nil, errors.New("kafkabroker: PublisherConfig.Brokers is empty")
	}
	if err := checkSecurity(c.SASL, c.TLS); err != nil {
		return nil, err
	}
	if c.ClientID == "" {
		c.ClientID = "unecho"
	}
	if c.MaxMessageBytes <= 0 {
		c.MaxMessageBytes = 1_048_588
	}
	if c.BatchSize <= 0 {
		c.BatchSize = 500
	}
	if c.RetryTimeout <= 0 {
		c.RetryTimeout = 10 * time.Second
	}
	p := &Publisher{c: c}
	p.transport = p.conns.transport(c.ClientID, c.TLS, c.SASL)
	p.waits.timeout = c.RetryTimeout
	p.client = &kafka.Client{Addr: kafka.TCP(c.Brokers...), Transport: p.transport, Timeout: 30 * time.Second}
	return p, nil
}

// item is a message on its way to a partition.
type item struct {
	i    int // its place in the call
	key  string
	wire *envelope.Message
	size int
}

// Publish implements brokers.Publisher. It returns at most a second after ctx
// is done.
func (p *Publisher) Publish(ctx context.Context, msgs []*envelope.Message) brokers.Results {
	if !p.enter() {
		return brokers.Fill(len(msgs), brokers.ErrClosed)
	}
	defer p.inFlight.Done()
	c := &call{p: p, ctx: ctx, end: time.Now().Add(p.c.RetryTimeout), parts: make(map[partitionKey][]item),
		res: make(brokers.Results, len(msgs)), failed: make(map[string]int)}
	var routes sync.WaitGroup
	for topic, items := range c.prepare(msgs) {
		routes.Go(func() { c.route(topic, items) })
	}
	routes.Wait()
	c.send()
	return c.res
}

func (p *Publisher) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.inFlight.Add(1)
	return true
}

// Close implements brokers.Publisher. It waits for the calls of Publish that
// are under way, which end with their contexts, or within the retry time-out
// and 30 s.
func (p *Publisher) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.inFlight.Wait()
	p.transport.CloseIdleConnections()
	p.conns.close()
	return nil
}

// call is one Publish.
type call struct {
	p   *Publisher
	ctx context.Context
	end time.Time // of trying to find the partitions

	mu     sync.Mutex // guards what follows
	parts  map[partitionKey][]item
	res    brokers.Results
	failed map[string]int // by topic and key, the place of the first message that has failed
}

type partitionKey struct {
	topic string
	id    int
}

// prepare encodes the messages and sorts out what no broker would take.
func (c *call) prepare(msgs []*envelope.Message) map[string][]item {
	topics := make(map[string][]item)
	for i, m := range msgs {
		it := item{i: i}
		if m.Key != nil {
			it.key = m.Topic + "\x00" + string(m.Key)
		}
		if c.blocked(it) {
			c.res[i] = brokers.ErrBlocked
			continue
		}
		var err error
		if it.wire, err = envelope.Kafka.Encode(m, c.p.c.Mode); err != nil {
			c.fail(it, fmt.Errorf("%w: %w", brokers.ErrRejected, err))
			continue
		}
		if it.size = size(it.wire); it.size > c.p.c.MaxMessageBytes {
			c.fail(it, fmt.Errorf("%w: the message has about %d bytes, %d are allowed (PublisherConfig.MaxMessageBytes)", brokers.ErrTooLarge, it.size, c.p.c.MaxMessageBytes))
			continue
		}
		topics[m.Topic] = append(topics[m.Topic], it)
	}
	return topics
}

// batchOverhead is what a batch costs beside its records, recordOverhead what the
// attributes of a record and its differences of time and offset cost at most.
const (
	batchOverhead  = 61
	recordOverhead = 9
)

// size is that of a batch that holds m alone. A message near the limit has to be
// the broker's to refuse: it is a few bytes too high at most.
func size(m *envelope.Message) int {
	n := recordOverhead + field(len(m.Key)) + field(len(m.Body)) + varint(len(m.Header))
	for _, h := range m.Header {
		n += field(len(h.Name)) + field(len(h.Value))
	}
	return batchOverhead + field(n)
}

// field is the size of so many bytes with their length before them.
func field(n int) int { return varint(n) + n }

// varint is the size of a length as records have it: seven bits a byte, and one
// for the sign.
func varint(n int) int { return (bits.Len(uint(n)<<1|1) + 6) / 7 }

// fail records the result of an item, and that its key must not go on.
func (c *call) fail(it item, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.res[it.i] = err
	if at, ok := c.failed[it.key]; it.key != "" && (!ok || it.i < at) {
		c.failed[it.key] = it.i
	}
}

// blocked reports whether an earlier message of the item's key has failed.
func (c *call) blocked(it item) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	at, ok := c.failed[it.key]
	return ok && at < it.i
}

// route gives the items of a topic to its partitions.
func (c *call) route(topic string, items []item) {
	ids, err := c.partitions(topic)
	if err != nil {
		for _, it := range items {
			if c.blocked(it) {
				err = brokers.ErrBlocked
			}
			c.fail(it, err)
		}
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, it := range items {
		k := partitionKey{topic, c.p.partitionOf(topic, it.wire.Key, ids)}
		c.parts[k] = append(c.parts[k], it)
	}
}

// partitionOf is the Java client's choice for a key; messages without one take
// turns, as nobody can ask for their order.
func (p *Publisher) partitionOf(topic string, key []byte, ids []int) int {
	if key == nil {
		return p.next(topic, ids)
	}
	return kafka.Murmur2Balancer{Consistent: true}.Balance(kafka.Message{Key: key}, ids...)
}

// next is the partition of a message without a key.
func (p *Publisher) next(topic string, ids []int) (id int) {
	for range ids {
		if id = ids[int(p.turn.Add(1)%uint32(len(ids)))]; !p.waits.isDown(partitionKey{topic, id}) {
			break
		}
	}
	return id
}

// Probe implements brokers.Prober.
func (p *Publisher) Probe(ctx context.Context) error {
	if !p.enter() {
		return fmt.Errorf("%w: %w", brokers.ErrUnavailable, brokers.ErrClosed)
	}
	defer p.inFlight.Done()
	res, err := p.client.ApiVersions(ctx, &kafka.ApiVersionsRequest{}) // what the client does not answer by itself
	if err == nil {
		err = res.Error
	}
	if err != nil {
		return fmt.Errorf("%w: %w", brokers.ErrUnavailable, err)
	}
	return nil
}

// Destination implements brokers.Router: the partition of a message with a key, as
// soon as it is known how many its topic has.
func (p *Publisher) Destination(m *envelope.Message) string {
	n, ok := p.sizes.Load(m.Topic)
	if !ok || m.Key == nil {
		return m.Topic
	}
	return m.Topic + "/" + strconv.Itoa(p.partitionOf(m.Topic, m.Key, upTo(n.(int))))
}

func upTo(n int) []int {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = i
	}
	return ids
}

// partitions asks for the partitions of a topic, until the broker has told.
func (c *call) partitions(topic string) (ids []int, err error) {
	err = c.retry(func() time.Time { return c.end }, func(ctx context.Context) error {
		res, err := c.p.client.Metadata(ctx, &kafka.MetadataRequest{Topics: []string{topic}})
		if err != nil {
			return notSent(err)
		}
		for _, t := range res.Topics {
			if t.Name != topic {
				continue
			}
			if t.Error != nil {
				return classify(t.Error)
			}
			ids = upTo(len(t.Partitions))
			c.p.sizes.Store(topic, len(ids))
		}
		if len(ids) == 0 {
			return fmt.Errorf("%w: %s", brokers.ErrNoRoute, topic)
		}
		return nil
	})
	return ids, err
}

// send publishes to all partitions at once, to each of them batch by batch.
func (c *call) send() {
	keys := slices.Collect(maps.Keys(c.parts))
	w := c.p.waits.begin(keys)
	var wg sync.WaitGroup
	for k, items := range c.parts {
		wg.Go(func() { c.sendPartition(k, items, w[k]) })
	}
	wg.Wait()
}

// sendPartition publishes the items of one partition. Behind a batch for which it
// does not serve nothing more is tried.
func (c *call) sendPartition(k partitionKey, items []item, w *wait) {
	err := w.err
	defer func() { w.finish(err) }()
	for len(items) > 0 {
		var batch []item
		if batch, items = c.cut(items); len(batch) == 0 {
			continue
		}
		if !errors.Is(err, brokers.ErrUnavailable) {
			err = c.sendBatch(k, batch, w)
		} else {
			c.failAll(batch, err)
		}
	}
}

// cut takes the next batch off items. What follows a failed message of its key
// is settled as blocked.
func (c *call) cut(items []item) (batch, rest []item) {
	bytes := batchOverhead
	for i, it := range items {
		if c.blocked(it) {
			c.fail(it, brokers.ErrBlocked)
			continue
		}
		bytes += it.size
		if len(batch) > 0 && (bytes > c.p.c.MaxMessageBytes || len(batch) == c.p.c.BatchSize) {
			return batch, items[i:]
		}
		batch = append(batch, it)
	}
	return batch, nil
}

// sendBatch publishes one batch. If the broker refuses it, the members are
// sent one by one, so that only the guilty one is refused. It returns what became
// of the last one.
func (c *call) sendBatch(k partitionKey, batch []item, w *wait) error {
	err := c.retry(w.until, func(ctx context.Context) error {
		err := c.produce(ctx, k, batch)
		w.note(err)
		return err
	})
	if errors.Is(err, brokers.ErrRejected) && len(batch) > 1 {
		for _, it := range batch {
			if c.blocked(it) {
				c.fail(it, brokers.ErrBlocked)
				continue
			}
			err = c.sendBatch(k, []item{it}, w)
		}
		return err
	}
	if err != nil { // the results are nil already
		c.failAll(batch, err)
	}
	return err
}

// failAll records the result of a batch.
func (c *call) failAll(batch []item, err error) {
	for _, it := range batch {
		if c.blocked(it) { // an earlier one of the batch has the same key and the same fate
			c.fail(it, brokers.ErrBlocked)
			continue
		}
		c.fail(it, err)
	}
}

func (c *call) produce(ctx context.Context, k partitionKey, batch []item) error {
	records := make([]kafka.Record, len(batch))
	for i, it := range batch {
		records[i] = kafka.Record{Time: it.wire.Time, Key: kafka.NewBytes(it.wire.Key), Value: kafka.NewBytes(it.wire.Body)}
		for _, h := range it.wire.Header {
			records[i].Headers = append(records[i].Headers, kafka.Header{Key: h.Name, Value: h.Value})
		}
	}
	res, err := c.p.client.Produce(ctx, &kafka.ProduceRequest{Topic: k.topic, Partition: k.id, RequiredAcks: kafka.RequireAll,
		Records: kafka.NewRecordReader(records...)})
	if err != nil {
		return classify(err)
	}
	return classify(res.Error)
}

// retry runs f until it succeeds, fails for good, or it is later than until says.
// Only what was certainly not stored is tried again here: whether to repeat an
// unknown one is for the caller, who knows what comes behind it.
func (c *call) retry(until func() time.Time, f func(context.Context) error) error {
	for n := 0; ; n++ {
		if c.ctx.Err() != nil {
			return fmt.Errorf("%w: %w", brokers.ErrUnavailable, c.ctx.Err())
		}
		err := f(c.ctx)
		again := errors.Is(err, brokers.ErrUnavailable) && !errors.Is(err, errRefusedDial) || errors.Is(err, brokers.ErrNoRoute) && n < 2
		if !again || time.Now().After(until()) {
			return err
		}
		pause(c.ctx, min(50*time.Millisecond<<min(n, 4), 500*time.Millisecond))
	}
}
