package outbox

import (
	"errors"
	"strings"
	"time"

	"github.com/unecho/unecho/brokers"
)

// judge turns the publisher's answers into settlements. It returns nil in an
// outage: nobody's attempts are spent then, and the rows stay where they are
// instead of moving aside one by one.
func (r *Relay) judge(rows []Row, results brokers.Results) []Settlement {
	if down(results) {
		return nil
	}
	ss := make([]Settlement, len(rows))
	next := 0
	for i, row := range rows {
		switch {
		case row.Blocked:
			ss[i] = Settlement{Row: row, Action: Hold, Reason: behind}
		case row.Err != nil:
			ss[i] = Settlement{Row: row, Action: r.park(), Reason: reason(row.Err)}
		default:
			ss[i] = r.one(row, results[next])
			next++
		}
	}
	return ss
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

const behind = "behind a held row of the same key"

// down reports whether the broker was out of reach: some messages say so, and
// none has an answer that only the broker can give. A rejection may come from
// the adapter, which knows the limits.
func down(results brokers.Results) bool {
	out := false
	for _, err := range results {
		switch {
		case isOutage(err):
			out = true
		case !errors.Is(err, brokers.ErrBlocked) && !errors.Is(err, brokers.ErrRejected):
			return false // nil, too
		}
	}
	return out
}

// one is the settlement of one row by the publisher's answer.
func (r *Relay) one(row Row, err error) Settlement {
	s := Settlement{Row: row, Action: Hold}
	switch {
	case err == nil:
		s.Action = Sent
		return s
	case errors.Is(err, brokers.ErrBlocked):
		s.Reason = behind
		return s
	case isOutage(err):
		s.After = r.o.Backoff
	case errors.Is(err, brokers.ErrNoRoute):
		s.After = r.backoff(5)
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

// outage returns the first result that says why nothing went.
func outage(results brokers.Results) error {
	for _, err := range results {
		if isOutage(err) {
			return err
		}
	}
	return results.Err()
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
