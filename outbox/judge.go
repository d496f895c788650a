package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/unecho/unecho/brokers"
)

// judge turns the publisher's answers into settlements. It returns an error in an
// outage of the broker: nobody's attempts are spent then, and the rows stay where
// they are instead of moving aside one by one.
func (r *Relay) judge(ctx context.Context, b []entry) ([]Settlement, error) {
	if err := r.outage(ctx, b); err != nil {
		return nil, fmt.Errorf("outbox: publish: %w", err)
	}
	r.learn(ctx, b)
	ss := make([]Settlement, len(b))
	for i, e := range b {
		switch {
		case e.row.Blocked:
			ss[i] = Settlement{Row: e.row, Action: Hold, Reason: behind}
		case e.row.Err != nil:
			ss[i] = Settlement{Row: e.row, Action: r.park(), Reason: reason(e.row.Err)}
		case e.fate == waiting:
			ss[i] = Settlement{Row: e.row, Action: Hold, Reason: unserved} // due at once, if the probe went
			if d := r.down[e.to]; d != nil {
				ss[i].After = r.aside(d)
			}
		default:
			ss[i] = r.one(e)
		}
	}
	return ss, nil
}

// goes reports whether the row is to be published.
func (r *Row) goes() bool { return !r.Blocked && r.Err == nil }

// block marks what stands behind a row in the same batch that will be parked.
func block(rows []Row) {
	type orderKey struct{ topic, key string }
	var parked map[orderKey]bool
	for i := range rows {
		row := &rows[i]
		if row.Message.Key == nil {
			continue
		}
		k := orderKey{row.Message.Topic, string(row.Message.Key)}
		switch {
		case parked[k]:
			row.Blocked = true
		case row.Err != nil:
			if parked == nil {
				parked = make(map[orderKey]bool)
			}
			parked[k] = true
		}
	}
}

// Reasons of rows that were not published.
const (
	behind   = "behind a held row of the same key"
	unserved = "the topic or partition does not serve"
)

// answered reports whether an answer can only come from the broker.
func answered(err error) bool {
	return !isOutage(err) && !errors.Is(err, brokers.ErrBlocked) && !errors.Is(err, brokers.ErrRejected)
}

// one is the settlement of one row by the publisher's answer.
func (r *Relay) one(e entry) Settlement {
	s, row, err := Settlement{Row: e.row, Action: Hold}, e.row, e.err
	switch {
	case err == nil:
		s.Action = Sent
		return s
	case errors.Is(err, brokers.ErrBlocked):
		s.Reason = behind
		return s
	case isOutage(err), errors.Is(err, brokers.ErrNoRoute):
		s.After = r.o.Backoff
		if d := r.down[e.to]; d != nil {
			s.After = r.aside(d)
		}
	case errors.Is(err, brokers.ErrRejected):
		s.Action, s.Counted = r.park(), true
	default:
		s.Counted = true
		s.After = r.backoff(row.Attempts + 1)
		if r.o.MaxAttempts > 0 && row.Attempts+1 >= r.o.MaxAttempts {
			s.Action = r.park()
		}
	}
	s.Reason = reason(err)
	return s
}

func (r *Relay) park() Action {
	if r.o.SkipParked {
		return Skip
	}
	return Park
}

// isOutage reports whether the message was not to blame, and nothing but
// waiting helps.
func isOutage(err error) bool {
	return errors.Is(err, brokers.ErrUnavailable) || errors.Is(err, brokers.ErrUnknown) || errors.Is(err, brokers.ErrClosed)
}

// backoff is the wait after the nth refusal.
func (r *Relay) backoff(n int) time.Duration {
	d := r.o.Backoff
	for ; n > 1 && d < r.o.MaxBackoff; n-- {
		d *= 2
	}
	return min(d, r.o.MaxBackoff)
}

const maxReason = 1024

func reason(err error) string {
	s := err.Error()
	return strings.ToValidUTF8(s[:min(len(s), maxReason)], "")
}
