package sqldedupe

import (
	"slices"
	"testing"
)

// A statement has a bounded number of rows and of bytes; what is too large for
// any goes alone.
func TestChunks(t *testing.T) {
	for _, tc := range []struct {
		sizes []int
		want  []int // how many are in each
	}{
		{nil, nil},
		{[]int{1}, []int{1}},
		{slices.Repeat([]int{1}, 2*maxRows+1), []int{maxRows, maxRows, 1}},
		{slices.Repeat([]int{maxBytes / 2}, 5), []int{2, 2, 1}},
		{[]int{1, 2 * maxBytes, 2 * maxBytes, 1, 1}, []int{1, 1, 1, 2}},
	} {
		var got, all []int
		for some := range chunks(tc.sizes, func(n int) int { return n }) {
			got, all = append(got, len(some)), append(all, some...)
		}
		if !slices.Equal(got, tc.want) || !slices.Equal(all, tc.sizes) {
			t.Errorf("%d items are divided into %v, want %v", len(tc.sizes), got, tc.want)
		}
	}
}
