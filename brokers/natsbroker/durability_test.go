package natsbroker

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
)

// B45: what is acknowledged before it is on the disk can be lost. The server says so to
// who asks its monitoring endpoint.
func TestB45LazySyncIsTold(t *testing.T) {
	for name, c := range map[string]struct {
		always bool
		want   error
	}{"lazy": {false, ErrLazySync}, "always": {true, nil}} {
		t.Run(name, func(t *testing.T) {
			s := run(t, &server.Options{Host: "127.0.0.1", Port: -1, HTTPHost: "127.0.0.1", HTTPPort: -1, JetStream: true, StoreDir: t.TempDir(), SyncAlways: c.always, SyncInterval: 2 * time.Minute})
			if err := CheckSync(t.Context(), fmt.Sprint("http://", s.MonitorAddr(), "/")); !errors.Is(err, c.want) || c.want != nil && !strings.Contains(err.Error(), "2m0s") {
				t.Errorf("CheckSync: %v, want %v", err, c.want)
			}
		})
	}
	s := run(t, &server.Options{Host: "127.0.0.1", Port: -1, HTTPHost: "127.0.0.1", HTTPPort: -1})
	if err := CheckSync(t.Context(), fmt.Sprint("http://", s.MonitorAddr())); err == nil {
		t.Error("a server without JetStream is no error")
	}
	for _, url := range []string{"http://127.0.0.1:1", fmt.Sprintf("http://%s/nothing", s.MonitorAddr())} {
		if err := CheckSync(t.Context(), url); !errors.Is(err, brokers.ErrUnavailable) {
			t.Errorf("CheckSync of %s: %v", url, err)
		}
	}
}

// Subjects without a stream, and with one that keeps nothing, are told before
// anything is published.
func TestB45SubjectsAreChecked(t *testing.T) {
	f := open(t, embedded(t))
	nc := f.connect(t)
	js := f.js(t)
	for _, c := range []jetstream.StreamConfig{
		{Name: "MEM", Subjects: []string{"mem.>"}, Storage: jetstream.MemoryStorage},
		{Name: "NOACK", Subjects: []string{"noack.>"}, NoAck: true},
		{Name: "ASYNC", Subjects: []string{"async.>"}, PersistMode: jetstream.AsyncPersistMode},
	} {
		if _, err := js.CreateStream(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	if err := CheckSubjects(t.Context(), nc, f.Topic(), f.stream+".another"); err != nil {
		t.Errorf("of good subjects: %v", err)
	}
	for subject, want := range map[string]error{"nobody.x": brokers.ErrNoRoute, "mem.x": ErrVolatile, "noack.x": ErrVolatile, "async.x": ErrVolatile, "a..b": brokers.ErrRejected} {
		if err := CheckSubjects(t.Context(), nc, f.Topic(), subject); !errors.Is(err, want) || !strings.Contains(err.Error(), subject) || strings.Contains(err.Error(), f.Topic()) {
			t.Errorf("%s: %v, want %v", subject, err, want)
		}
	}
	nc.Close()
	if err := CheckSubjects(t.Context(), nc, f.Topic()); !errors.Is(err, brokers.ErrUnavailable) {
		t.Errorf("without a connection: %v", err)
	}
}

// B19: a durable says where it begins, and the server keeps it.
func TestB19NewestIsKeptByTheServer(t *testing.T) {
	f := open(t, embedded(t))
	f.produce(t, 3)
	c := f.config("new")
	c.Start = Newest
	s := f.source(t, c)
	within(t, func() bool { _, err := f.js(t).Consumer(t.Context(), f.stream, "new"); return err == nil })
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	f.produce(t, 2) // while it is down
	s = f.source(t, c)
	for i := range 2 {
		d := next(t, s)
		if want := fmt.Sprintf("%s/%d", f.stream, 4+i); d.Message.Position != want {
			t.Errorf("received %s, want %s", d.Message.Position, want)
		}
		if err := s.Ack(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	if got := f.info(t, "new").Config.DeliverPolicy; got != jetstream.DeliverNewPolicy {
		t.Errorf("the deliver policy is %v", got)
	}
	old := f.source(t, f.config("old"))
	if d := next(t, old); d.Message.Position != f.stream+"/1" {
		t.Errorf("by default the first is %s", d.Message.Position)
	}
}

// A consumer that an operator has paused on the server delivers nothing, is no error,
// and goes on when the pause is over.
func TestServerSidePause(t *testing.T) {
	f := open(t, embedded(t))
	c := f.config("g")
	c.OnError = func(err error) { t.Errorf("a pause is an error: %v", err) }
	s := f.source(t, c)
	f.produce(t, 1)
	d := next(t, s)
	if err := s.Ack(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	js := f.js(t)
	if _, err := js.PauseConsumer(t.Context(), f.stream, "g", time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	f.produce(t, 1)
	silence(t, s, 2*pullHeartbeat)
	if _, err := js.ResumeConsumer(t.Context(), f.stream, "g"); err != nil {
		t.Fatal(err)
	}
	next(t, s)
}
