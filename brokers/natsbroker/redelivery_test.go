package natsbroker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

func (f *fixture) produce(t testing.TB, n int) {
	t.Helper()
	var msgs []*envelope.Message
	key := testenv.Name("k") // events of their own, in each call
	for i := range n {
		msgs = append(msgs, brokertest.Event(f.Topic(), key, i))
	}
	if err := f.Publisher(t).Publish(t.Context(), msgs).Err(); err != nil {
		t.Fatal(err)
	}
}

func next(t testing.TB, s *Source) *brokers.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	d, err := s.Receive(ctx)
	if err != nil {
		t.Fatalf("receive: %v", err)
	}
	return d
}

func (f *fixture) js(t testing.TB) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(f.connect(t))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// B20: a handler that takes three times AckWait runs once for each message,
// with one replica and with two, and the server delivers each once.
func TestB20SlowHandlersRunOnce(t *testing.T) {
	url := embedded(t)
	for _, replicas := range []int{1, 2} {
		for _, inFlight := range []int{1, 4} {
			t.Run(fmt.Sprint(replicas, " replicas, ", inFlight, " in flight"), func(t *testing.T) {
				t.Parallel()
				slowHandlers(t, url, replicas, inFlight)
			})
		}
	}
}

func slowHandlers(t *testing.T, url string, replicas, inFlight int) {
	const messages = 6
	f := open(t, url)
	f.ackWait = 900 * time.Millisecond // a busy machine may stand still for a third of it
	f.produce(t, messages)
	var mu sync.Mutex
	runs := map[string]int{}
	ended := make(chan struct{}, 100)
	h := consumer.HandlerFunc(func(_ context.Context, m *envelope.Message) error {
		mu.Lock()
		runs[m.Position]++
		mu.Unlock()
		time.Sleep(3 * f.ackWait) // the work
		ended <- struct{}{}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, replicas)
	for range replicas {
		c := f.config("g")
		c.MaxInFlight = inFlight
		s := f.source(t, c)
		go func() {
			done <- consumer.Run(ctx, s, h, &consumer.RunOptions{DeadLetter: consumer.Discard, Concurrency: 2})
		}()
	}
	for range messages {
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			t.Error("not all were handled")
		}
	}
	cancel()
	for range replicas {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	for pos, n := range runs {
		if n != 1 {
			t.Errorf("%s was handled %d times", pos, n)
		}
	}
	if i := f.info(t, "g"); len(runs) != messages || i.Delivered.Consumer != messages || i.NumAckPending != 0 {
		t.Errorf("%d handled, %d deliveries, %d unsettled, want %d, %d and 0", len(runs), i.Delivered.Consumer, i.NumAckPending, messages, messages)
	}
}

func (f *fixture) info(t testing.TB, durable string) *jetstream.ConsumerInfo {
	t.Helper()
	c, err := f.js(t).Consumer(t.Context(), f.stream, durable)
	if err != nil {
		t.Fatal(err)
	}
	i, err := c.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// answers counts what is sent for the first delivery of messages of the
// consumer g from now on.
func (f *fixture) answers(t testing.TB) func() int {
	t.Helper()
	nc := f.connect(t)
	sub, err := nc.SubscribeSync("$JS.ACK." + f.stream + ".g.1.>")
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	return func() int {
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
		n, _, err := sub.Pending()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}

// B21: worker 1 stalls past AckWait, worker 2 has the redelivery. What worker 1
// then says must not settle it: when worker 2 fails, it comes a third time.
func TestB21LateAnswersSettleNothing(t *testing.T) {
	f := open(t, embedded(t))
	f.ackWait = 400 * time.Millisecond
	f.produce(t, 1)
	one := f.source(t, f.config("g"))
	first := next(t, one)
	one.stop() // neither heartbeats nor pulls: it has stalled
	two := f.source(t, f.config("g"))
	second := next(t, two)
	if second.Attempt != 2 {
		t.Fatalf("attempt %d, want the redelivery", second.Attempt)
	}
	sent := f.answers(t)
	one.beat()
	for what, err := range map[string]error{
		"ack":    one.Ack(t.Context(), first),
		"nack":   one.Nack(t.Context(), first, 0),
		"return": one.Return(t.Context(), first),
	} {
		if !errors.Is(err, brokers.ErrLost) {
			t.Errorf("late %s: %v, want ErrLost", what, err)
		}
	}
	if err := one.Close(); err != nil {
		t.Fatal(err)
	}
	if n := sent(); n != 0 {
		t.Errorf("worker 1 has sent %d late answers", n)
	}
	if err := two.Return(t.Context(), second); err != nil {
		t.Fatal(err)
	}
	if third := next(t, two); third.Attempt != 3 {
		t.Errorf("attempt %d, want 3", third.Attempt)
	}
}

// A delivery that was on the way for longer than AckWait is another worker's by
// the time it arrives: it is not handed out, and nothing is sent for it.
func TestB21DeliveryThatArrivesLate(t *testing.T) {
	f := open(t, embedded(t))
	f.ackWait = 400 * time.Millisecond
	net := startProxy(t, f.url)
	slow := *f
	slow.url = net.url
	c := f.config("g")
	c.MaxInFlight = 1
	one := slow.source(t, c)
	testenv.Within(t, 10*time.Second, "worker 1 asks", func() bool {
		cons, err := f.js(t).Consumer(t.Context(), f.stream, "g")
		return err == nil && cons.CachedInfo().NumWaiting == 1
	})
	net.hold()
	f.produce(t, 1)
	testenv.Within(t, 10*time.Second, "it is on the way", func() bool { return f.info(t, "g").NumAckPending == 1 })
	two := f.source(t, f.config("g"))
	second := next(t, two)
	if second.Attempt != 2 {
		t.Fatalf("attempt %d, want the redelivery", second.Attempt)
	}
	sent := f.answers(t)
	net.pass()
	ctx, cancel := context.WithTimeout(t.Context(), 2*f.ackWait)
	defer cancel()
	if d, err := one.Receive(ctx); err == nil {
		t.Errorf("received attempt %d, which is another worker's", d.Attempt)
	}
	if n := sent(); n != 0 {
		t.Errorf("worker 1 has sent %d answers", n)
	}
	if err := two.Ack(t.Context(), second); err != nil {
		t.Error(err)
	}
}

// An acknowledgement that cannot leave now must not leave later.
func TestB21NothingIsSentAfterAReconnect(t *testing.T) {
	f := open(t, embedded(t))
	f.ackWait = 400 * time.Millisecond
	f.produce(t, 1)
	net := startProxy(t, f.url)
	far := *f
	far.url = net.url
	one := far.source(t, f.config("g"))
	first := next(t, one)
	net.cut()
	testenv.Within(t, 10*time.Second, "worker 1 notices", func() bool { return !one.nc.IsConnected() })
	if err := one.Ack(t.Context(), first); err == nil {
		t.Error("ack without a connection: nil")
	}
	two := f.source(t, f.config("g"))
	second := next(t, two)
	sent := f.answers(t)
	net.mend()
	testenv.Within(t, 10*time.Second, "worker 1 is back", func() bool { return one.nc.IsConnected() && one.nc.Flush() == nil })
	if n := sent(); n != 0 {
		t.Errorf("%d answers of worker 1 were sent after the reconnect", n)
	}
	if err := two.Return(t.Context(), second); err != nil {
		t.Fatal(err)
	}
}

// What is in hand, in the buffer or on the way when the source closes goes back
// at once, and does not wait for AckWait.
func TestCloseHandsBack(t *testing.T) {
	f := open(t, embedded(t))
	f.ackWait = time.Minute // whoever waits for it fails this test
	net := startProxy(t, f.url)
	far := *f
	far.url = net.url
	c := f.config("g")
	c.MaxInFlight = 3
	s := far.source(t, c)
	f.produce(t, 2)
	next(t, s)
	pending := func(n int) {
		t.Helper()
		testenv.Within(t, 10*time.Second, fmt.Sprint(n, " deliveries"), func() bool { return f.info(t, "g").NumAckPending == n })
	}
	pending(2)
	net.hold()
	f.produce(t, 1)
	pending(3)
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	<-s.ctx.Done()
	net.pass()
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	s = f.source(t, f.config("g"))
	seen := map[string]bool{}
	for len(seen) < 3 {
		d := next(t, s)
		if seen[d.Message.Position] = true; d.Attempt != 2 {
			t.Errorf("%s: attempt %d, want 2", d.Message.Position, d.Attempt)
		}
	}
}

// A message that looks like a word of the server is a message.
func TestStatusHeaderIsNoStatus(t *testing.T) {
	f := open(t, embedded(t))
	for _, code := range []string{"100", "404", "408", "409", "503"} {
		m := &envelope.Message{Topic: f.Topic(), Body: []byte{}}
		m.Header.Add("Status", []byte(code))
		m.Header.Add("Description", []byte("Consumer Deleted"))
		if err := f.Publisher(t).Publish(t.Context(), []*envelope.Message{m}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	s := f.source(t, f.config("g"))
	for i := range 5 {
		if d := next(t, s); d.Message.Position != fmt.Sprintf("%s/%d", f.stream, i+1) || s.Ack(t.Context(), d) != nil {
			t.Errorf("%d: received %s", i, d.Message.Position)
		}
	}
}

// A consumer that was deleted, while the client was connected or away, is made
// again, from the oldest message on, or ends the source.
func TestDeletedConsumer(t *testing.T) {
	for _, away := range []bool{false, true} {
		for _, strict := range []bool{false, true} {
			t.Run(fmt.Sprint("away ", away, ", strict ", strict), func(t *testing.T) { deletedConsumer(t, away, strict) })
		}
	}
}

func deletedConsumer(t *testing.T, away, strict bool) {
	f := open(t, embedded(t))
	f.produce(t, 1)
	net := startProxy(t, f.url)
	far := *f
	far.url = net.url
	c := f.config("g")
	c.FailIfDeleted = strict
	s := far.source(t, c)
	if err := s.Ack(t.Context(), next(t, s)); err != nil {
		t.Fatal(err)
	}
	if away {
		net.cut()
		testenv.Within(t, 10*time.Second, "the client notices", func() bool { return !s.nc.IsConnected() })
	}
	if err := f.js(t).DeleteConsumer(t.Context(), f.stream, "g"); err != nil {
		t.Fatal(err)
	}
	net.mend()
	if !strict {
		if d := next(t, s); d.Attempt != 1 {
			t.Errorf("attempt %d", d.Attempt)
		}
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := s.Receive(ctx); !errors.Is(err, ErrDeleted) {
		t.Errorf("receive from a deleted consumer: %v, want ErrDeleted", err)
	}
}

// A consumer that cannot keep the promises, and names that are none, end the
// source with an error that says why.
func TestRefusedConsumers(t *testing.T) {
	f := open(t, embedded(t))
	for what, c := range map[string]jetstream.ConsumerConfig{
		"BackOff":          {AckPolicy: jetstream.AckExplicitPolicy, BackOff: []time.Duration{time.Second}, MaxDeliver: 2},
		"ack policy":       {AckPolicy: jetstream.AckNonePolicy},
		"headers only":     {AckPolicy: jetstream.AckExplicitPolicy, HeadersOnly: true},
		"pull":             {AckPolicy: jetstream.AckExplicitPolicy, DeliverSubject: "push"},
		"invalid consumer": {},
	} {
		durable := strings.ReplaceAll(what, " ", "-")
		var err error
		switch {
		case c.DeliverSubject != "":
			c.Durable = durable
			_, err = f.js(t).CreatePushConsumer(t.Context(), f.stream, c)
		case what == "invalid consumer":
			durable = "a.b"
		default:
			c.Durable = durable
			_, err = f.js(t).CreateConsumer(t.Context(), f.stream, c)
		}
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		_, err = f.source(t, f.config(durable)).Receive(ctx)
		cancel()
		if err == nil || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: receive: %v", what, err)
		}
	}
}

// A consumer that is handed over keeps what is not ours to say, and loses what
// would make messages disappear.
func TestExistingConsumerIsAdjusted(t *testing.T) {
	f := open(t, embedded(t))
	f.produce(t, 3)
	_, err := f.js(t).CreateConsumer(t.Context(), f.stream, jetstream.ConsumerConfig{Durable: "g", Description: "ours",
		AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: 3, MaxDeliver: 2,
		Metadata: map[string]string{"team": "billing"}})
	if err != nil {
		t.Fatal(err)
	}
	over := f.config("g")
	over.Update = true
	s := f.source(t, over)
	for i := range 4 {
		d := next(t, s)
		if d.Message.Position != f.stream+"/3" || d.Attempt != i+1 {
			t.Errorf("received %s, attempt %d", d.Message.Position, d.Attempt)
		}
		if err := s.Return(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	if c := f.info(t, "g").Config; c.Description != "ours" || c.Metadata["team"] != "billing" || c.MaxDeliver != -1 || c.AckWait != f.ackWait {
		t.Errorf("the consumer has %+v", c)
	}
}

// Somebody limits the deliveries of a consumer that is at work: the message that the server
// gives up is told, and the limit is taken away again.
func TestGivenUpIsTold(t *testing.T) {
	f := open(t, embedded(t))
	told := make(chan error, 10)
	c := f.config("g")
	c.OnError = func(err error) { told <- err }
	s := f.source(t, c)
	f.produce(t, 1)
	d := next(t, s)
	limited := f.info(t, "g").Config
	limited.MaxDeliver = 1
	if _, err := f.js(t).UpdateConsumer(t.Context(), f.stream, limited); err != nil {
		t.Fatal(err)
	}
	if err := s.Return(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-told:
		if !errors.Is(err, ErrGivenUp) || !strings.Contains(err.Error(), "sequence 1 ") {
			t.Errorf("told %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("nothing is told")
	}
	within(t, func() bool { return f.info(t, "g").Config.MaxDeliver == -1 })
	f.produce(t, 1) // and what comes next has no limit
	for range 3 {
		d := next(t, s)
		if err := s.Return(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStreamThatAppearsLater(t *testing.T) {
	f := open(t, embedded(t))
	js := f.js(t)
	if err := js.DeleteStream(t.Context(), f.stream); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan struct{})
	var once sync.Once
	c := f.config("g")
	c.OnError = func(error) { once.Do(func() { close(waiting) }) }
	s := f.source(t, c)
	<-waiting
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: f.stream, Subjects: []string{f.stream + ".>"}}); err != nil {
		t.Fatal(err)
	}
	f.produce(t, 1)
	next(t, s)
}

// Close is bounded although the server is gone, and what was not acknowledged
// comes back.
func TestCloseWithoutAServer(t *testing.T) {
	server := proc.StartNATS(t)
	f := open(t, server.URL)
	f.produce(t, 3)
	s := f.source(t, f.config("g"))
	p := f.Publisher(t)
	d := next(t, s)
	server.Kill()
	testenv.Within(t, 10*time.Second, "the client notices", func() bool { return !s.nc.IsConnected() })
	if err := s.Ack(t.Context(), d); err == nil {
		t.Error("ack without a server: nil")
	}
	closesWithin(t, time.Second, s)
	closesWithin(t, time.Second, p)
	server.Restart()
	s = f.source(t, f.config("g"))
	seen := map[string]bool{}
	for len(seen) < 3 {
		seen[next(t, s).Message.Position] = true
	}
}

// A server that stands still answers no heartbeat: the claims are lost in time,
// Close is bounded, and all goes on when the server does.
func TestServerThatStandsStill(t *testing.T) {
	server := proc.StartNATS(t)
	f := open(t, server.URL)
	f.produce(t, 1)
	s, other := f.source(t, f.config("g")), f.source(t, f.config("h"))
	d := next(t, s)
	next(t, other)
	server.Stop()
	begin := time.Now()
	select {
	case <-d.Lost:
	case <-time.After(20 * time.Second):
		t.Fatal("Lost is not closed")
	}
	if took := time.Since(begin); took > f.ackWait+f.ackWait/2 {
		t.Errorf("lost after %v, AckWait is %v", took, f.ackWait)
	}
	if err := s.Ack(t.Context(), d); !errors.Is(err, brokers.ErrLost) {
		t.Errorf("ack of a lost delivery: %v, want ErrLost", err)
	}
	closesWithin(t, closeTimeout+pullHeartbeat+time.Second, other)
	server.Cont()
	if again := next(t, s); again.Attempt < 2 || s.Ack(t.Context(), again) != nil {
		t.Errorf("attempt %d", again.Attempt)
	}
}

func closesWithin(t testing.TB, d time.Duration, c interface{ Close() error }) {
	t.Helper()
	begin := time.Now()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took > d {
		t.Errorf("Close took %v, want at most %v", took, d)
	}
}
