// Package prune deletes in batches, for all drivers alike.
package prune

// Batch is how many rows one transaction deletes at most, so that none holds
// its locks for long.
const Batch = 1000

// Run calls each of deletes, which deletes at most n rows and returns how many,
// until there is nothing left for it or limit rows are deleted in all. No limit
// if it is 0 or less. It returns how many were deleted, also beside an error.
func Run(limit int, deletes ...func(n int) (int, error)) (total int, err error) {
	for _, del := range deletes {
		for limit <= 0 || total < limit {
			batch := Batch
			if limit > 0 {
				batch = min(batch, limit-total)
			}
			n, err := del(batch)
			total += n
			if err != nil {
				return total, err
			}
			if n < batch {
				break
			}
		}
	}
	return total, nil
}
