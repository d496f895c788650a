package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// StartCounter counts, durably and before a handler starts, how often it was
// started on a delivery without coming to an end: what counts is left by
// processes that died. All methods may be called concurrently.
type StartCounter interface {
	// Start counts a start, durably, at each place where fewer than most starts
	// have no end, and returns for each how many have none, this one included.
	// An answer above most says that it was not counted. places are distinct and
	// not empty strings, such as "consumer\x00topic/3/42".
	Start(ctx context.Context, places []string, most int) ([]int, error)
	// End forgets the starts at places: the handler has come to an end there,
	// whichever.
	End(ctx context.Context, places []string) error
}

// CrashLoop dead-letters a message whose handler ends the process, such as by
// running out of memory, which no other count survives: after Max starts
// that have not come to an end. The zero value does not.
//
// A message that was started before and has no end is a suspect: it runs
// alone, outside groups and with no other suspect at its side, so that those who
// died with the culprit get through, and the culprit alone is counted.
type CrashLoop struct {
	// Counter is where starts are counted, such as that of
	// pgparking.NewStartCounter. Each delivery costs two statements more.
	Counter StartCounter
	// Consumer is the logical consumer: two that read one topic count apart.
	// Mandatory with a Counter.
	Consumer string
	// Max is how many starts may have no end. Defaults to 3.
	Max int
}

// ErrCrashLoop: the process has ended during every one of the starts that
// CrashLoop allows. The message is dead-lettered, with ReasonCrashLoop.
var ErrCrashLoop = errors.New("consumer: the process ends whenever this message is handled")

// ReasonCrashLoop is the reason of a dead letter whose handler ended the process.
const ReasonCrashLoop = "crash_loop"

func (c *CrashLoop) check() error {
	if c.Counter != nil && c.Consumer == "" {
		return errors.New("consumer: Run: CrashLoop.Consumer is empty: name the consumer whose starts are counted")
	}
	if c.Max <= 0 {
		c.Max = 3
	}
	return nil
}

// place is where the starts on j are counted; "" if they are not.
func (j *job) place() string {
	if j.o.CrashLoop.Counter == nil || j.d.Message.Position == "" {
		return ""
	}
	return j.o.CrashLoop.Consumer + "\x00" + j.d.Message.Position
}

// countStart counts one start.
func (r *runner) countStart(ctx context.Context, places []string, most int) ([]int, error) {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	n, err := r.o.CrashLoop.Counter.Start(ctx, places, most)
	if err != nil {
		return nil, fmt.Errorf("consumer: count the start of the handler: %w", err)
	}
	if len(n) != len(places) {
		return nil, fmt.Errorf("consumer: count the start of the handler: %d answers for %d places", len(n), len(places))
	}
	return n, nil
}

// countEnd forgets starts. If it fails they are suspects when they come again,
// which costs them time and nothing else.
func (r *runner) countEnd(ctx context.Context, places ...string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	_ = r.o.CrashLoop.Counter.End(ctx, places)
}

// counted runs f, the handler, between its start and its end.
func (j *job) counted(f func() error) (ran bool, err error) {
	place := j.place()
	if place == "" {
		return true, f()
	}
	n, err := j.countStart(j.ctx, []string{place}, 1)
	switch {
	case err != nil:
		return true, err
	case n[0] > 1:
		return j.suspect(place, f)
	}
	defer j.countEnd(j.ctx, place)
	return true, f()
}

// suspect runs f for a message that was started before and has no end. Only now
// is this start counted: had it been before, a process that dies with one suspect
// would count against all that wait for it.
func (j *job) suspect(place string, f func() error) (ran bool, err error) {
	if !j.take(j.suspects) {
		return false, nil
	}
	defer func() { <-j.suspects }()
	most := j.o.CrashLoop.Max
	n, err := j.countStart(j.ctx, []string{place}, most)
	switch {
	case err != nil:
		return true, err
	case n[0] > most:
		return true, fmt.Errorf("%w: %d starts of the handler have no end", ErrCrashLoop, n[0]-1)
	}
	defer j.countEnd(j.ctx, place)
	return true, f()
}

// countedGroup runs f for as many of a group as may be handled together: those
// before the first suspect, or that one alone. The answers for the others are
// ErrNotRun.
func (r *runner) countedGroup(ctx context.Context, jobs []*job, f func(jobs []*job) []error) []error {
	if r.o.CrashLoop.Counter == nil {
		return f(jobs)
	}
	errs := notRun(len(jobs))
	var places []string
	at := make(map[string]int)
	for i, j := range jobs {
		p := j.place()
		if _, twice := at[p]; twice || p == "" {
			continue
		}
		at[p] = i
		places = append(places, p)
	}
	n, err := r.countStart(ctx, places, 1)
	if err != nil {
		return slices.Repeat([]error{err}, len(jobs))
	}
	first, started := len(jobs), places[:0:0]
	for k, p := range places {
		if n[k] > 1 {
			first = min(first, at[p])
		} else {
			started = append(started, p)
		}
	}
	defer func() { r.countEnd(ctx, started...) }()
	if first > 0 {
		copy(errs, f(jobs[:first]))
		return errs
	}
	ran, err := jobs[0].suspect(jobs[0].place(), jobs[0].handle)
	if !ran {
		return nil
	}
	errs[0] = err
	return errs
}
