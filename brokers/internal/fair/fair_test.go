package fair

import (
	"testing"

	"pgregory.net/rapid"
)

// However lanes take and give back: the bound is kept, and a lane that holds
// nothing may always take its share.
func TestBudget(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lanes := rapid.IntRange(1, 300).Draw(t, "lanes")
		total := rapid.IntRange(1, 5000).Draw(t, "total")
		b, held := New(total, lanes), make([]int, lanes)
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			i := rapid.IntRange(0, lanes-1).Draw(t, "lane")
			to := rapid.IntRange(0, held[i]+b.Left(held[i])).Draw(t, "to")
			b.Move(held[i], to)
			held[i] = to
			sum := 0
			for _, n := range held {
				sum += n
			}
			if sum > total {
				t.Fatalf("%d are held of %d", sum, total)
			}
			for j, n := range held {
				if lanes <= total && n == 0 && b.Left(0) < b.Share() {
					t.Fatalf("lane %d may take %d of its share of %d", j, b.Left(0), b.Share())
				}
			}
		}
	})
}

// Lanes that take what they can and give nothing back leave the rest their shares.
func TestStuckLanes(t *testing.T) {
	for _, c := range []struct{ total, lanes, stuck int }{{4096, 200, 150}, {4096, 2, 1}, {64, 4, 3}, {64 << 20, 1000, 999}, {16, 16, 15}} {
		b, most := New(c.total, c.lanes), 0
		for range c.stuck {
			held := 0
			for b.Left(held) > 0 {
				b.Move(held, held+1+b.Left(held)/1000)
				held += 1 + b.Left(held)/1000
			}
			most = max(most, held)
		}
		if left := b.Left(0); left < c.total/(2*c.lanes) || left < 1 {
			t.Errorf("%+v: %d are left for each of the others", c, left)
		}
		if most > c.total/2+1 {
			t.Errorf("%+v: one lane holds %d", c, most)
		}
	}
}

func TestWithoutBound(t *testing.T) {
	var b Budget
	if b.Move(0, 1000); b.Left(1000) < 1<<30 || b.Share() < 1<<30 {
		t.Error("the zero budget has a bound")
	}
	if alone := New(10, 1); alone.Left(0) != 10 {
		t.Errorf("a lane that is alone may take %d of 10", alone.Left(0))
	}
}
