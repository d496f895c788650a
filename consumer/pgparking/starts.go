package pgparking

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/unecho/unecho/consumer"
)

// NewStartCounter returns the counter in the database of pool, which stays the
// caller's. A batch of places is one statement. o may be nil. It panics if pool
// is nil, or with [Options.Check]'s error.
//
// Errors match dedupe.ErrUnavailable for an outage, dedupe.ErrContention if the
// statement lost against others, and dedupe.ErrUnknownOutcome if its answer was
// lost: then a start may have been counted that never was one. It has no end, so
// Prune forgets it.
func NewStartCounter(pool *pgxpool.Pool, o *Options) consumer.StartCounter {
	if pool == nil {
		panic("pgparking: NewStartCounter: the pool is nil")
	}
	return &starts{newDB(pool, o)}
}

type starts struct{ db db }

// places are those of one call, in the order in which their rows are locked.
type places struct {
	hashes   [][]byte
	readable []string
	at       map[string]int // by hash: where the caller has it
}

// errPlaces is a mistake of the caller.
var errPlaces = errors.New("pgparking: the places must be distinct and not empty")

func placesOf(names []string) (places, error) {
	p := places{at: make(map[string]int, len(names))}
	for i, name := range names {
		sum := sha256.Sum256([]byte(name))
		if _, twice := p.at[string(sum[:])]; twice || name == "" {
			return places{}, errPlaces
		}
		p.at[string(sum[:])] = i
		p.hashes = append(p.hashes, sum[:])
	}
	slices.SortFunc(p.hashes, bytes.Compare)
	for _, h := range p.hashes {
		p.readable = append(p.readable, text(names[p.at[string(h)]]))
	}
	return p, nil
}

// Start implements [consumer.StartCounter].
func (s *starts) Start(ctx context.Context, names []string, most int) ([]int, error) {
	if len(names) == 0 {
		return nil, nil
	}
	p, err := placesOf(names)
	if err != nil {
		return nil, err
	}
	answer := make([]int, len(names))
	_, err = rows(ctx, s.db, "start", true, func(row pgx.CollectableRow) (struct{}, error) {
		var place []byte
		var n int
		err := row.Scan(&place, &n)
		if err == nil {
			answer[p.at[string(place)]] = n
		}
		return struct{}{}, err
	}, s.db.sql.start, p.hashes, p.readable, most)
	if err != nil {
		return nil, err
	}
	return answer, nil
}

// End implements [consumer.StartCounter].
func (s *starts) End(ctx context.Context, names []string) error {
	if len(names) == 0 {
		return nil
	}
	p, err := placesOf(names)
	if err == nil {
		_, err = s.db.change(ctx, "end", s.db.sql.end, p.hashes)
	}
	return err
}
