package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/natsbroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/sqldedupe"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox/sqloutbox"
)

// This file is the world around the example: a database, a broker, and what
// goes wrong in it.

// openDatabase opens a database with the tables of the shop, of the outbox and
// of the keys.
func openDatabase(ctx context.Context, path string) (*sql.DB, error) {
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=journal_mode(wal)&_pragma=synchronous(full)&_pragma=busy_timeout(10000)&_txlock=immediate")
	if err != nil {
		return nil, err
	}
	// No unique constraint on shipments: it would hide a second one.
	_, err = db.ExecContext(ctx, "create table orders (id integer primary key); create table shipments (order_id text not null)")
	return db, errors.Join(err, sqloutbox.Migrate(ctx, db), sqldedupe.Migrate(ctx, db, sqldedupe.SQLite, nil))
}

// natsServer is a NATS server inside this process.
type natsServer struct {
	s       *server.Server
	nc      *nats.Conn
	js      jetstream.JetStream
	doubled int
}

const stream, durable = "SHOP", "shipping"

func startNATS(ctx context.Context, dir string) (*natsServer, error) {
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true})
	if err != nil {
		return nil, err
	}
	s.Start()
	n := &natsServer{s: s}
	if !s.ReadyForConnections(10 * time.Second) {
		n.stop()
		return nil, errors.New("the embedded NATS server does not start")
	}
	if n.nc, err = natsbroker.Connect(s.ClientURL()); err == nil {
		n.js, err = jetstream.New(n.nc)
	}
	if err == nil {
		_, err = n.js.CreateStream(ctx, jetstream.StreamConfig{Name: stream, Subjects: []string{"shop.>"}, MaxAge: 7 * 24 * time.Hour})
	}
	if err != nil {
		n.stop()
		return nil, err
	}
	return n, nil
}

func (n *natsServer) stop() {
	if n.nc != nil {
		n.nc.Close()
	}
	n.s.Shutdown()
	n.s.WaitForShutdown()
}

// source returns a source on a connection of its own, and what cuts that: a
// consumer that has died says nothing more to the broker.
func (n *natsServer) source() (src *natsbroker.Source, cut func(), err error) {
	nc, err := natsbroker.Connect(n.s.ClientURL())
	if err != nil {
		return nil, nil, err
	}
	src, err = natsbroker.NewSource(nc, natsbroker.Config{Stream: stream, Durable: durable, AckWait: time.Second})
	return src, nc.Close, err
}

// publisher is one that publishes every fifth message twice, as a producer
// does that has not heard the answer.
func (n *natsServer) publisher() brokers.Publisher {
	p, err := natsbroker.NewPublisher(n.nc, natsbroker.PublisherConfig{})
	if err != nil {
		panic(err) // the connection is not nil
	}
	return &doubling{Publisher: p, n: n, seen: make(map[string]bool)}
}

type doubling struct {
	brokers.Publisher
	n    *natsServer
	seen map[string]bool // ids of events that were published
}

func (d *doubling) Publish(ctx context.Context, msgs []*envelope.Message) brokers.Results {
	res := d.Publisher.Publish(ctx, msgs)
	for i, m := range msgs {
		if res[i] != nil || d.seen[m.ID] {
			continue
		}
		d.seen[m.ID] = true
		if len(d.seen)%5 != 0 {
			continue
		}
		if err := d.again(ctx, m); err == nil {
			d.n.doubled++
		}
	}
	return res
}

// again publishes past the server's own recognition of repeated publishes.
func (d *doubling) again(ctx context.Context, m *envelope.Message) error {
	wire, err := envelope.NATS.Encode(m, envelope.Binary)
	if err != nil {
		return err
	}
	msg := &nats.Msg{Subject: m.Topic, Data: wire.Body, Header: nats.Header{}}
	for _, f := range wire.Header {
		msg.Header[f.Name] = append(msg.Header[f.Name], string(f.Value))
	}
	_, err = d.n.js.PublishMsg(ctx, msg)
	return err
}

// waitSettled waits until every event was handled and the broker has no
// delivery left. It reports false if ctx ended before.
func (n *natsServer) waitSettled(ctx context.Context, c *counter) bool {
	for ctx.Err() == nil {
		time.Sleep(20 * time.Millisecond)
		cons, err := n.js.Consumer(ctx, stream, durable)
		if err != nil || c.effects() < orders {
			continue
		}
		if i := cons.CachedInfo(); i.NumPending == 0 && i.NumAckPending == 0 {
			return true
		}
	}
	return false
}

// counter counts what a consumer reports, over its lives.
type counter struct {
	crashAt int

	mu         sync.Mutex
	deliveries int
	processed  int
	duplicates int
	acks       int
	crashed    bool
}

// Observe implements consumer.Observer.
func (c *counter) Observe(_ context.Context, e consumer.Event) {
	if e.Step != consumer.StepDecide || e.Err != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deliveries++
	switch e.Outcome {
	case dedupe.Processed:
		c.processed++
	case dedupe.Duplicate:
		c.duplicates++
	default:
		fmt.Println("unexpected:", e.Outcome)
	}
}

func (c *counter) effects() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.processed
}

// dies reports whether it is time to.
func (c *counter) dies() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.acks++
	if c.crashed || c.acks < c.crashAt {
		return false
	}
	c.crashed = true
	return true
}
