package natsbroker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// ErrForeign: the consumer was made by others, and its settings are not those
// that Config asks for. Nothing was changed, and nothing was received.
var ErrForeign = errors.New("natsbroker: the consumer was made by others")

// ours marks a consumer that was made here, or that Config.Update has handed over.
// Servers before NATS 2.10 do not keep it: there, every consumer is of others.
const ours = "unecho.managed"

// consumer makes sure that the consumer is there and as we want it.
//
// Two members that start together both find none, and both create it: the second
// one is told that it exists if it was to be another one, looks again, and finds
// what the first one has made. Nobody overwrites what came in between.
func (s *Source) consumer(existed bool) error {
	ctx, cancel := context.WithTimeout(s.ctx, requestTimeout)
	defer cancel()
	cons, err := s.look(ctx)
	switch {
	case err == nil:
		return s.adopt(ctx, cons.CachedInfo().Config)
	case errors.Is(err, jetstream.ErrConsumerNotFound) && existed && s.c.FailIfDeleted:
		return fmt.Errorf("%w: %s of stream %s", ErrDeleted, s.c.Durable, s.c.Stream)
	case errors.Is(err, jetstream.ErrConsumerNotFound):
		return s.create(ctx, existed)
	}
	return fmt.Errorf("natsbroker: consumer %s of stream %s: %w", s.c.Durable, s.c.Stream, err)
}

// look asks for the consumer. It asks briefly: while nobody leads nobody answers,
// and who comes to lead has not heard the question.
func (s *Source) look(ctx context.Context) (jetstream.Consumer, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	return s.js.Consumer(ctx, s.c.Stream, s.c.Durable)
}

func (s *Source) create(ctx context.Context, existed bool) error {
	var c jetstream.ConsumerConfig
	s.ask(&c)
	c.DeliverPolicy = s.deliver(existed)
	_, err := s.js.CreateConsumer(ctx, s.c.Stream, c)
	if !errors.Is(err, jetstream.ErrConsumerExists) {
		return s.told("create", err)
	}
	cons, err := s.look(ctx)
	if err != nil {
		return s.told("create", err)
	}
	return s.adopt(ctx, cons.CachedInfo().Config)
}

// adopt takes a consumer that is there. What we have made is brought up to date;
// what others have made is used if it is as we want it, and else left alone.
func (s *Source) adopt(ctx context.Context, have jetstream.ConsumerConfig) error {
	if err := s.refuse(have); err != nil {
		return err
	}
	differs := s.differences(have)
	if len(differs) == 0 {
		return nil
	}
	if have.Metadata[ours] == "" && !s.c.Update {
		return s.foreign(differs)
	}
	s.ask(&have)
	_, err := s.js.UpdateConsumer(ctx, s.c.Stream, have)
	return s.told("update", err)
}

func (s *Source) told(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("natsbroker: %s consumer %s of stream %s: %w", what, s.c.Durable, s.c.Stream, err)
}

// ask puts into c what we want. What is not ours to say stays: where the consumer
// starts, its description, its limits, the rest of its metadata.
func (s *Source) ask(c *jetstream.ConsumerConfig) {
	c.Durable, c.AckPolicy, c.AckWait = s.c.Durable, jetstream.AckExplicitPolicy, s.c.AckWait
	c.MaxDeliver, c.MaxAckPending = unlimited, s.c.MaxAckPending
	c.FilterSubject, c.FilterSubjects = "", s.c.Subjects
	c.Metadata = maps.Clone(c.Metadata)
	if c.Metadata == nil {
		c.Metadata = make(map[string]string)
	}
	c.Metadata[ours] = "true"
}

const unlimited = -1

// deliver is where a consumer that is made begins. One that somebody has deleted
// begins with the oldest message: where it was is not known any more, and what is
// done is recognised.
func (s *Source) deliver(existed bool) jetstream.DeliverPolicy {
	if s.c.Start == Newest && !existed {
		return jetstream.DeliverNewPolicy
	}
	return jetstream.DeliverAllPolicy
}

// refuse answers for a consumer that cannot keep our promises and cannot be
// changed so that it does.
func (s *Source) refuse(have jetstream.ConsumerConfig) error {
	why := ""
	switch {
	case len(have.BackOff) > 0:
		why = "has a BackOff, which overrides AckWait"
	case have.AckPolicy != jetstream.AckExplicitPolicy:
		why = fmt.Sprintf("has the ack policy %s, not explicit", have.AckPolicy)
	case have.HeadersOnly:
		why = "delivers headers only"
	default:
		return nil
	}
	return fmt.Errorf("natsbroker: consumer %s of stream %s %s: %w", s.c.Durable, s.c.Stream, why, errRefused)
}

// errRefused marks settings that waiting does not mend.
var errRefused = errors.New("refused")

// difference is a setting of a consumer that is not as we want it.
type difference struct {
	setting, have, want string
	write               string // what to write into Config to keep it; empty: that cannot be
}

// differences compares a consumer with what we want. A MaxDeliver would end in a
// message that nobody gets any more and nobody has parked.
func (s *Source) differences(have jetstream.ConsumerConfig) (out []difference) {
	add := func(setting string, same bool, has, want any, write string) {
		if !same {
			out = append(out, difference{setting, fmt.Sprint(has), fmt.Sprint(want), write})
		}
	}
	filter := filters(have)
	add("AckWait", have.AckWait == s.c.AckWait, have.AckWait, s.c.AckWait, "AckWait: "+duration(have.AckWait))
	add("MaxAckPending", have.MaxAckPending == s.c.MaxAckPending, limit(have.MaxAckPending), limit(s.c.MaxAckPending), fmt.Sprint("MaxAckPending: ", have.MaxAckPending))
	add("MaxDeliver", have.MaxDeliver == unlimited, limit(have.MaxDeliver), limit(unlimited), "")
	add("the filter", sameSet(filter, s.c.Subjects), subjects(filter), subjects(s.c.Subjects), writeFilter(filter))
	return out
}

func sameSet(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

func filters(c jetstream.ConsumerConfig) []string {
	if c.FilterSubject != "" {
		return []string{c.FilterSubject}
	}
	return c.FilterSubjects
}

func limit(n int) string {
	if n <= 0 {
		return "without limit"
	}
	return fmt.Sprint(n)
}

func subjects(filter []string) string {
	if len(filter) == 0 {
		return "all subjects"
	}
	return strings.Join(filter, ", ")
}

func writeFilter(filter []string) string {
	if len(filter) == 0 {
		return "no Subjects"
	}
	return fmt.Sprintf("Subjects: %#v", filter)
}

// duration is d as one writes it in Go.
func duration(d time.Duration) string {
	for _, unit := range [...]struct {
		of   time.Duration
		name string
	}{{time.Minute, "Minute"}, {time.Second, "Second"}, {time.Millisecond, "Millisecond"}} {
		if d%unit.of == 0 {
			return fmt.Sprintf("%d*time.%s", d/unit.of, unit.name)
		}
	}
	return fmt.Sprint(int64(d))
}

// foreign is the error for a consumer of others that is not as we want it. It
// names every difference, and the ways on.
func (s *Source) foreign(differs []difference) error {
	var found, write, must []string
	for _, d := range differs {
		found = append(found, fmt.Sprintf("%s is %s and not %s", d.setting, d.have, d.want))
		if d.write == "" {
			must = append(must, d.setting)
			continue
		}
		write = append(write, d.write)
	}
	ways := "set Config.Update to have it changed and managed here from now on"
	if len(write) > 0 {
		ways += ", or keep it by writing into Config: " + strings.Join(write, ", ")
	}
	if len(must) > 0 {
		ways += fmt.Sprintf("; %s has to be changed in any case, since what was delivered so often would be lost", strings.Join(must, ", "))
	}
	return fmt.Errorf("%w: of %s of stream %s, %s; %s", ErrForeign, s.c.Durable, s.c.Stream, strings.Join(found, ", "), ways)
}
