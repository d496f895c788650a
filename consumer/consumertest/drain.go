package consumertest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/consumer"
)

// DrainOptions are the settings of [Drain]. The zero value, and nil, is the
// default.
type DrainOptions struct {
	// Run are the options of the run. A DeadLetter is optional here. Backoff
	// defaults to 1 ms at least and 50 ms at most, Grace to 5 s.
	Run consumer.RunOptions
	// Within is the deadline. Defaults to 1 minute.
	Within time.Duration
}

const (
	drainWithin = time.Minute
	drainGrace  = 5 * time.Second
)

// Drain runs h over a topic as a member of group until everything is settled
// that the topic holds, what h publishes to it meanwhile included, and returns
// the dead letters in the order in which they were taken. It fails tb if that
// takes longer than the deadline, or if consumer.Run returns an error. In either
// case Run has returned, and with it all its goroutines, but for those of
// handlers that do not end with their context.
//
// It works in a testing/synctest bubble, where back-off and delays take no time.
func Drain(tb testing.TB, b *membroker.Broker, topic, group string, h consumer.Handler, o *DrainOptions) []*consumer.Failure {
	tb.Helper()
	if o == nil {
		o = &DrainOptions{}
	}
	within := o.Within
	if within <= 0 {
		within = drainWithin
	}
	letters := &letters{next: o.Run.DeadLetter}
	run := drainRun(o.Run)
	run.DeadLetter = letters.take
	ctx, cancel := context.WithTimeout(tb.Context(), within)
	defer cancel()
	src := b.Source(topic, group)
	ran := make(chan error, 1)
	go func() {
		defer cancel() // a run that cannot go on ends the wait
		ran <- consumer.Run(ctx, src, h, &run)
	}()
	unsettled := b.WaitSettled(ctx, topic, group)
	cancel()
	err := <-ran
	switch {
	case err != nil:
		tb.Errorf("consumertest: Drain: %v", err)
	case unsettled != nil:
		tb.Errorf("consumertest: Drain: not everything is settled within %v: the partitions are committed up to %v, and hold %d messages",
			within, b.Committed(topic, group), b.Len(topic))
	}
	return letters.all()
}

// drainRun fills in what suits a test better than a service.
func drainRun(o consumer.RunOptions) consumer.RunOptions {
	if o.Backoff == (consumer.Backoff{}) {
		o.Backoff = consumer.Backoff{Min: time.Millisecond, Max: 50 * time.Millisecond}
	}
	if o.Grace <= 0 {
		o.Grace = drainGrace
	}
	return o
}

// letters collects dead letters, behind the hook of the options.
type letters struct {
	next  consumer.DeadLetter // may be nil
	mu    sync.Mutex
	taken []*consumer.Failure
}

func (l *letters) take(ctx context.Context, f *consumer.Failure) error {
	if l.next != nil {
		if err := l.next(ctx, f); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.taken = append(l.taken, f)
	return nil
}

func (l *letters) all() []*consumer.Failure {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.taken
}
