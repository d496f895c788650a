package kafkabroker

import (
	"testing"

	"pgregory.net/rapid"
)

// The model is a list of offsets with what became of them. Whatever happens,
// the position is the lowest offset that is handed out and not done, and what
// follows the last one if there is none.
func TestTrackerAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var tr tracker
		var open []*entry // the model: handed out, not forgotten
		next := int64(0)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 3).Draw(t, "op") {
			case 0: // offsets have gaps
				next += rapid.Int64Range(0, 3).Draw(t, "gap")
				open = append(open, tr.deliver(next, 10))
				next++
			case 1:
				if e := pick(t, open); e != nil {
					tr.done(e)
				}
			case 2:
				if e := pick(t, open); e != nil {
					tr.rewind(e)
					for i, o := range open {
						if o == e {
							open = open[:i]
							break
						}
					}
					next = e.offset
				}
			case 3:
				if len(tr.open) == 0 {
					next += rapid.Int64Range(0, 3).Draw(t, "control records")
					tr.skip(next)
				}
			}
			want := next
			for i := len(open) - 1; i >= 0; i-- {
				if open[i].settled != done {
					want = open[i].offset
				}
			}
			if got := tr.position(); got != want {
				t.Fatalf("position %d, want %d", got, want)
			}
			if tr.bytes != 10*len(tr.open) {
				t.Fatalf("%d bytes for %d deliveries", tr.bytes, len(tr.open))
			}
		}
	})
}

// pick draws one that runs, nil if there is none.
func pick(t *rapid.T, open []*entry) *entry {
	var running_ []*entry
	for _, e := range open {
		if e.settled == running {
			running_ = append(running_, e)
		}
	}
	if len(running_) == 0 {
		return nil
	}
	return rapid.SampledFrom(running_).Draw(t, "entry")
}

func TestTrackerIdle(t *testing.T) {
	var tr tracker
	a, b := tr.deliver(0, 1), tr.deliver(1, 1)
	tr.done(b)
	if tr.idle() {
		t.Error("idle with a delivery that runs")
	}
	a.settled = returned
	if !tr.idle() || tr.position() != 0 {
		t.Errorf("idle %v, position %d; a returned delivery is waited for by nobody, and not done", tr.idle(), tr.position())
	}
}
