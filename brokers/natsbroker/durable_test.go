package natsbroker

import (
	"context"
	"errors"
	"maps"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// A consumer that others made is not changed, and nothing of it is received, when
// it is not as Config asks for. The error names what differs, and what to write to
// keep it.
func TestForeignConsumerIsLeftAlone(t *testing.T) {
	f := open(t, embedded(t))
	f.produce(t, 1)
	as := jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy, AckWait: f.ackWait, MaxAckPending: -1, MaxDeliver: -1}
	for name, c := range map[string]struct {
		change func(*jetstream.ConsumerConfig)
		says   []string
	}{
		"AckWait":       {func(c *jetstream.ConsumerConfig) { c.AckWait = 2 * time.Minute }, []string{"AckWait is 2m0s and not", "AckWait: 2*time.Minute"}},
		"MaxAckPending": {func(c *jetstream.ConsumerConfig) { c.MaxAckPending = 50 }, []string{"MaxAckPending is 50 and not without limit", "MaxAckPending: 50"}},
		"MaxDeliver":    {func(c *jetstream.ConsumerConfig) { c.MaxDeliver = 7 }, []string{"MaxDeliver is 7 and not without limit", "MaxDeliver has to be changed"}},
		"filter":        {func(c *jetstream.ConsumerConfig) { c.FilterSubject = f.stream + ".x" }, []string{"the filter is " + f.stream + ".x and not all subjects", `Subjects: []string{"` + f.stream + `.x"}`}},
		"filters":       {func(c *jetstream.ConsumerConfig) { c.FilterSubjects = []string{f.stream + ".x", f.stream + ".y"} }, []string{f.stream + ".x, " + f.stream + ".y and not all subjects"}},
		"all": {func(c *jetstream.ConsumerConfig) {
			c.AckWait, c.MaxAckPending, c.MaxDeliver, c.FilterSubject = time.Hour, 1000, 2, f.stream+".>"
		}, []string{"AckWait", "MaxAckPending", "MaxDeliver", "the filter", "Config.Update"}},
	} {
		made := as
		made.Durable = name
		c.change(&made)
		if _, err := f.js(t).CreateConsumer(t.Context(), f.stream, made); err != nil {
			t.Fatal(err)
		}
		before := f.info(t, name).Config
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		_, err := f.source(t, f.config(name)).Receive(ctx)
		cancel()
		if !errors.Is(err, ErrForeign) {
			t.Errorf("%s: receive: %v, want ErrForeign", name, err)
			continue
		}
		for _, want := range append(c.says, name+" of stream "+f.stream) {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: the error does not say %q: %v", name, want, err)
			}
		}
		info := f.info(t, name)
		if after := info.Config; !reflect.DeepEqual(after, before) {
			t.Errorf("%s: was\n%+v, is\n%+v", name, before, after)
		}
		if info.Delivered.Consumer != 0 {
			t.Errorf("%s: %d messages were delivered", name, info.Delivered.Consumer)
		}
	}
}

// What the error says to write down is what keeps it.
func TestForeignConsumerThatIsAsWanted(t *testing.T) {
	f := open(t, embedded(t))
	f.produce(t, 1)
	if _, err := f.js(t).CreateConsumer(t.Context(), f.stream, jetstream.ConsumerConfig{Durable: "g", AckPolicy: jetstream.AckExplicitPolicy,
		AckWait: 2 * time.Minute, MaxAckPending: 50, FilterSubjects: []string{f.stream + ".b", f.stream + ".>"}[1:]}); err != nil {
		t.Fatal(err)
	}
	before := f.info(t, "g").Config
	c := f.config("g")
	c.AckWait, c.MaxAckPending, c.Subjects = 2*time.Minute, 50, []string{f.stream + ".>"}
	s := f.source(t, c)
	if err := s.Ack(t.Context(), next(t, s)); err != nil {
		t.Fatal(err)
	}
	if after := f.info(t, "g").Config; !reflect.DeepEqual(after, before) {
		t.Errorf("was\n%+v, is\n%+v", before, after)
	}
}

// What we have made follows its Config, and what Config.Update was once set for.
func TestOurConsumerIsBroughtUpToDate(t *testing.T) {
	f := open(t, embedded(t))
	if _, err := f.js(t).CreateConsumer(t.Context(), f.stream, jetstream.ConsumerConfig{Durable: "theirs", AckPolicy: jetstream.AckExplicitPolicy, MaxDeliver: 7}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ours", "theirs"} {
		for i, pending := range []int{3, 5} {
			f.produce(t, 1)
			c := f.config(name)
			c.MaxAckPending, c.Update = pending, name == "theirs" && i == 0
			s := f.source(t, c)
			if err := s.Ack(t.Context(), next(t, s)); err != nil {
				t.Fatal(err)
			}
			_ = s.Close()
			if got := f.info(t, name).Config; got.MaxAckPending != pending || got.MaxDeliver != -1 {
				t.Errorf("%s: %+v, want MaxAckPending %d", name, got, pending)
			}
		}
	}
}

// Members that start together make one consumer, and one that somebody makes in
// between is not overwritten.
func TestMembersThatStartTogether(t *testing.T) {
	f := open(t, embedded(t))
	for range 20 {
		name := f.stream + "-" + strings.ReplaceAll(time.Now().Format("150405.000000000"), ".", "")
		var wg sync.WaitGroup
		for range 4 {
			s := f.source(t, f.config(name))
			wg.Go(func() {
				if err := s.consumer(false); err != nil {
					t.Errorf("a member: %v", err)
				}
			})
		}
		wg.Wait()
	}
	s := f.source(t, f.config("late"))
	within(t, func() bool { _, err := f.js(t).Consumer(t.Context(), f.stream, "late"); return err == nil })
	theirs := f.info(t, "late").Config
	if err := f.js(t).DeleteConsumer(t.Context(), f.stream, "late"); err != nil {
		t.Fatal(err)
	}
	theirs.Metadata, theirs.MaxDeliver = maps.Clone(theirs.Metadata), 7
	clear(theirs.Metadata)
	if _, err := f.js(t).CreateConsumer(t.Context(), f.stream, theirs); err != nil {
		t.Fatal(err)
	}
	if err := s.create(t.Context(), false); !errors.Is(err, ErrForeign) { // it had looked before
		t.Errorf("create over another one: %v, want ErrForeign", err)
	}
	if got := f.info(t, "late").Config.MaxDeliver; got != 7 {
		t.Errorf("MaxDeliver is %d, want what they have set", got)
	}
}
