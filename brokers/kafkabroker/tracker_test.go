package kafkabroker

import (
	"testing"

	"pgregory.net/rapid"
)

// The model is a list of all that was handed out, with what became of it. Whatever
// happens, the position is the lowest offset that is handed out and not done, and
// what follows the last one if there is none.
func TestTrackerAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var tr tracker
		var all []*entry // the model: handed out, not forgotten
		next := int64(0)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 4).Draw(t, "op") {
			case 0: // offsets have gaps
				next += rapid.Int64Range(0, 3).Draw(t, "gap")
				all = append(all, tr.deliver(next, 10))
				next++
			case 1:
				if e := pick(t, all); e != nil {
					tr.done(e)
				}
			case 2:
				if e := pick(t, all); e != nil {
					tr.rewind(e)
					for i, o := range all {
						if o == e {
							all = all[:i]
							break
						}
					}
					next = e.offset
				}
			case 3:
				if tr.open == 0 {
					next += rapid.Int64Range(0, 3).Draw(t, "control records")
					tr.skip(next)
				}
			case 4:
				if e := pick(t, all); e != nil {
					tr.giveUp(e)
				}
			}
			checkTracker(t, &tr, all, next)
		}
	})
}

func checkTracker(t *rapid.T, tr *tracker, all []*entry, next int64) {
	want, open, worked, behind := next, 0, 0, 0
	for i := len(all) - 1; i >= 0; i-- {
		if e := all[i]; e.settled != done {
			want, behind = e.offset, len(all)-1-i
			open++
			if e.settled == running {
				worked++
			}
		}
	}
	if got := tr.position(); got != want {
		t.Fatalf("position %d, want %d", got, want)
	}
	if tr.open != open || tr.bytes != 10*open || tr.behind() != behind || tr.idle() != (worked == 0) {
		t.Fatalf("%d open of %d bytes, %d behind, idle %v; want %d, %d behind, %d being worked on", tr.open, tr.bytes, tr.behind(), tr.idle(), open, behind, worked)
	}
	n := 0
	for e := tr.first; e != nil; e = e.next {
		if n++; e.settled == done {
			t.Fatalf("offset %d is done and still kept", e.offset)
		}
	}
	if n != open {
		t.Fatalf("%d deliveries are kept, %d are open", n, open)
	}
}

// pick draws one that runs, nil if there is none.
func pick(t *rapid.T, all []*entry) *entry {
	var running_ []*entry
	for _, e := range all {
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
	tr.giveUp(a)
	if !tr.idle() || tr.position() != 0 {
		t.Errorf("idle %v, position %d; a returned delivery is waited for by nobody, and not done", tr.idle(), tr.position())
	}
}
