package natsbroker_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/natsbroker"
	"github.com/unecho/unecho/internal/testenv"
)

// B48: the source says for how long its stream can deliver again, and why.
func TestHorizon(t *testing.T) {
	nc, err := natsbroker.Connect(testenv.NATS(t))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for age, want := range map[time.Duration]time.Duration{0: brokers.Forever, 36 * time.Hour: 36 * time.Hour} {
		name := testenv.Name("S")
		if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}, MaxAge: age}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = js.DeleteStream(t.Context(), name) })
		src, err := natsbroker.NewSource(nc, natsbroker.Config{Stream: name, Durable: "d"})
		if err != nil {
			t.Fatal(err)
		}
		h, err := src.Horizon(t.Context())
		if err != nil || h.For != want || !strings.Contains(h.Why, name) || !strings.Contains(h.Why, "MaxAge") {
			t.Errorf("MaxAge %v: %+v, %v", age, h, err)
		}
		if err := src.Close(); err != nil {
			t.Error(err)
		}
	}
	src, err := natsbroker.NewSource(nc, natsbroker.Config{Stream: testenv.Name("none"), Durable: "d"})
	if err != nil {
		t.Fatal(err)
	}
	if h, err := src.Horizon(t.Context()); !errors.Is(err, brokers.ErrUnavailable) {
		t.Errorf("a stream that is not there yet: %+v, %v; want ErrUnavailable", h, err)
	}
	if err := src.Close(); err != nil {
		t.Error(err)
	}
}
