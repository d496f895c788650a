// Package prune deletes in batches, for all drivers alike.
package prune

import "time"

const (
	// Batch is how many rows one transaction deletes at most.
	Batch = 1000
	// least is how many it deletes on a database that is slow.
	least = 10
	// Aim is how long one transaction, and with it its locks, should last at
	// most: the batch shrinks and grows towards it.
	Aim = 50 * time.Millisecond
)

// Run calls each of deletes, which deletes at most n rows in a transaction of
// its own and returns how many, until there is nothing left for it or limit
// rows are deleted in all. No limit if it is 0 or less. It returns how many
// were deleted, also beside an error.
func Run(limit int, deletes ...func(n int) (int, error)) (total int, err error) {
	batch := Batch
	for _, del := range deletes {
		for limit <= 0 || total < limit {
			n := batch
			if limit > 0 {
				n = min(n, limit-total)
			}
			start := time.Now()
			deleted, err := del(n)
			total += deleted
			if err != nil {
				return total, err
			}
			if deleted < n {
				break
			}
			batch = resize(batch, time.Since(start))
		}
	}
	return total, nil
}

// resize halves a batch that took too long, and doubles one that did not take
// half of that.
func resize(batch int, took time.Duration) int {
	switch {
	case took > Aim:
		return max(batch/2, least)
	case took < Aim/2:
		return min(batch*2, Batch)
	}
	return batch
}
