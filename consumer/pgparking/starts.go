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

type place struct {
	hash [sha256.Size]byte
	name string
}

// errPlaces is a mistake of the caller.
var errPlaces = errors.New("pgparking: the places must be distinct and not empty")

// placesOf returns the places in the order in which their rows are locked.
func placesOf(names []string) (hashes [][]byte, readable []string, err error) {
	places := make([]place, len(names))
	for i, n := range names {
		places[i] = place{sha256.Sum256([]byte(n)), n}
	}
	slices.SortFunc(places, func(a, b place) int { return bytes.Compare(a.hash[:], b.hash[:]) })
	for i := range places {
		if places[i].name == "" || i > 0 && places[i].hash == places[i-1].hash {
			return nil, nil, errPlaces
		}
		hashes = append(hashes, places[i].hash[:])
		readable = append(readable, text(places[i].name))
	}
	return hashes, readable, nil
}

// Start implements [consumer.StartCounter].
func (s *starts) Start(ctx context.Context, places []string, most int) ([]int, error) {
	if len(places) == 0 {
		return nil, nil
	}
	hashes, readable, err := placesOf(places)
	if err != nil {
		return nil, err
	}
	type count struct {
		place []byte
		n     int
	}
	counted, err := rows(ctx, s.db, "start", true, func(row pgx.CollectableRow) (c count, err error) {
		err = row.Scan(&c.place, &c.n)
		return c, err
	}, s.db.sql.start, hashes, readable, most)
	if err != nil {
		return nil, err
	}
	byPlace := make(map[string]int, len(counted))
	for _, c := range counted {
		byPlace[string(c.place)] = c.n
	}
	answer := make([]int, len(places))
	for i, name := range places {
		sum := sha256.Sum256([]byte(name))
		answer[i] = byPlace[string(sum[:])]
	}
	return answer, nil
}

// End implements [consumer.StartCounter].
func (s *starts) End(ctx context.Context, places []string) error {
	if len(places) == 0 {
		return nil
	}
	hashes, _, err := placesOf(places)
	if err == nil {
		_, err = s.db.change(ctx, "end", s.db.sql.end, hashes)
	}
	return err
}
