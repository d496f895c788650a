package dedupe

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// PrunerOptions are the settings of [RunPruner]. The zero value, and nil, is
// the default.
type PrunerOptions struct {
	// Delay is how long nothing is deleted after the start. What the broker
	// redelivers after a downtime may be older than any retention, and must
	// meet its keys: the delay has to outlast the first deliveries. Defaults
	// to 15 minutes.
	Delay time.Duration
	// Every is the time between two runs, give or take a tenth. Defaults to a
	// minute.
	Every time.Duration
	// Limit is how many keys a run deletes at most, so that it ends. Defaults
	// to 100,000.
	Limit int
	// Timeout bounds one run. Defaults to Every, at least a minute.
	Timeout time.Duration
	// Report, if it is not nil, is told of every run: how many keys it has
	// deleted, and its error. A run that fails is followed by the next one.
	Report func(deleted int, err error)
}

// RunPruner deletes what has expired by calling prune, such as a closure over
// the Prune of package pgdedupe, now and then until ctx is done. It returns nil
// then, or an error at once if prune is nil or a setting is negative. Every
// replica may run one.
func RunPruner(ctx context.Context, prune func(ctx context.Context, limit int) (int, error), o *PrunerOptions) error {
	if prune == nil {
		return errors.New("dedupe: RunPruner: prune is nil")
	}
	n, err := o.normal()
	if err != nil {
		return err
	}
	for wait := n.Delay; sleep(ctx, wait) == nil; wait = n.Every - n.Every/10 + rand.N(n.Every/5+1) {
		n.run(ctx, prune)
	}
	return nil
}

func (o *PrunerOptions) normal() (n PrunerOptions, err error) {
	if o != nil {
		n = *o
	}
	if n.Delay < 0 || n.Every < 0 || n.Limit < 0 || n.Timeout < 0 {
		return n, fmt.Errorf("dedupe: RunPruner: a negative setting: delay %v, every %v, limit %d, timeout %v", n.Delay, n.Every, n.Limit, n.Timeout)
	}
	if n.Delay == 0 {
		n.Delay = 15 * time.Minute
	}
	if n.Every == 0 {
		n.Every = time.Minute
	}
	if n.Limit == 0 {
		n.Limit = 100_000
	}
	if n.Timeout == 0 {
		n.Timeout = max(n.Every, time.Minute)
	}
	return n, nil
}

func (o *PrunerOptions) run(ctx context.Context, prune func(ctx context.Context, limit int) (int, error)) {
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	deleted, err := prune(ctx, o.Limit)
	if o.Report != nil {
		o.Report(deleted, err)
	}
}
