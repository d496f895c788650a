package sqldedupe

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/unecho/unecho/dedupe"
)

// One statement takes so many keys at most, and about so many bytes of
// arguments. That is within what the databases take: 32,766 parameters on
// SQLite, and on MySQL a packet, whose limit may be as low as a mebibyte. The
// statements of one batch share its transaction, however many they are.
const (
	maxRows  = 500
	maxBytes = 256 << 10
)

// perClaim is added, for each claim of a batch, to a bound that covers the
// insert as well as its wait for a lock: many rows take longer than one.
const perClaim = time.Millisecond

func (b *base) batchWait(claims int) time.Duration {
	return b.o.LockWait + time.Duration(claims)*perClaim
}

// batch are claims on their way into the table.
type batch struct {
	// rows are in the order of their ids. Two batches that share keys reach
	// them in the same order, so while one waits for the other, the other
	// never waits for it.
	rows []row
	done map[dedupe.KeyID]*dedupe.Record // of the winners
	ids  []dedupe.KeyID                  // in the order of the claims
}

// row is a claim with its id, which takes a hash to tell.
type row struct {
	id dedupe.KeyID
	dedupe.Claim
}

func newBatch(claims []dedupe.Claim) *batch {
	b := &batch{done: make(map[dedupe.KeyID]*dedupe.Record)}
	for _, c := range claims {
		id := c.Key.Stored()
		b.ids = append(b.ids, id)
		b.rows = append(b.rows, row{id, c})
	}
	slices.SortFunc(b.rows, func(x, y row) int { return cmp.Compare(string(x.id[:]), string(y.id[:])) })
	return b
}

// open are the rows without a winner, in order.
func (b *batch) open() []row {
	return b.without(func(id dedupe.KeyID) bool { return b.done[id] != nil })
}

// without are the rows but for some, in order.
func (b *batch) without(some func(dedupe.KeyID) bool) []row {
	return slices.DeleteFunc(slices.Clone(b.rows), func(r row) bool { return some(r.id) })
}

// priors are the records of the winners in the order of the claims; nil for a
// claim whose key has none.
func (b *batch) priors() []*dedupe.Record {
	priors := make([]*dedupe.Record, len(b.ids))
	for i, id := range b.ids {
		priors[i] = b.done[id]
	}
	return priors
}

// add notes winners.
func (b *batch) add(found []winner) {
	for _, w := range found {
		b.done[w.id] = &w.record
	}
}

// winner is who has done a key.
type winner struct {
	id     dedupe.KeyID
	record dedupe.Record
}

// chunks are rows in portions for one statement.
func chunks[T any](all []T, size func(T) int) iter.Seq[[]T] {
	return func(yield func([]T) bool) {
		for len(all) > 0 {
			n, bytes := 0, 0
			for n < min(len(all), maxRows) {
				if bytes += size(all[n]); n > 0 && bytes > maxBytes {
					break
				}
				n++
			}
			if !yield(all[:n]) {
				return
			}
			all = all[n:]
		}
	}
}

func (r row) size() int {
	return len(r.id) + len(r.Fingerprint) + len(r.Key.Tenant) + len(r.Key.Consumer) + len(r.Key.Source) + len(r.Key.ID) + len(r.Fields)
}

// args are those of one row of an insert: its id as the dialect takes it, the
// fingerprint, the retention in milliseconds, the readable parts, the fields.
func (b *base) args(r row) []any {
	args := append([]any{r.id[:], r.Fingerprint[:], milliseconds(r.Retain)}, b.readable(r.Key)...)
	return append(args, b.fields(r.Claim))
}

// allArgs are those of all rows of an insert.
func (b *base) allArgs(rows []row) []any {
	var args []any
	for _, r := range rows {
		args = append(args, b.args(r)...)
	}
	return args
}

func idArgs(rows []row) []any {
	args := make([]any, len(rows))
	for i, r := range rows {
		args[i] = r.id[:]
	}
	return args
}

// list is an item of a statement, n times.
func list(item string, n int) string {
	return strings.Repeat(item+", ", n-1) + item
}

// kept is a reply to be stored.
type kept struct {
	key   dedupe.Key
	reply []byte
}

func (k kept) size() int { return len(k.reply) + len(dedupe.KeyID{}) }

// storeReplies stores the replies that are not nil.
func storeReplies(ctx context.Context, in claimsIn, tx *sql.Tx, claims []dedupe.Claim, replies [][]byte) error {
	var all []kept
	for i, reply := range replies {
		if reply != nil {
			all = append(all, kept{claims[i].Key, reply})
		}
	}
	for some := range chunks(all, kept.size) {
		var err error
		if len(some) == 1 {
			_, err = in.replyIn(ctx, tx, some[0].key, some[0].reply)
		} else {
			err = in.repliesIn(ctx, tx, some)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// queryer is a transaction or a database.
type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// collect reads all rows of a statement.
func collect[T any](ctx context.Context, on queryer, scan func(func(...any) error) (T, error), statement string, args ...any) (all []T, err error) {
	rows, err := on.QueryContext(ctx, statement, args...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		v, err := scan(rows.Scan)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, rows.Err()
}
