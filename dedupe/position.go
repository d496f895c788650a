package dedupe

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"
)

// Partition names a log whose order is its identity, as one consumer reads it:
// a partition of a Kafka topic. All four fields take part in equality.
type Partition struct {
	// Tenant separates customers; empty when there is one.
	Tenant string
	// Consumer is the logical name of the handler. Mandatory.
	Consumer string
	// Topic is mandatory. Number counts from 0.
	Topic  string
	Number int
}

// Validate returns nil or an error that matches ErrInvalidClaim and names the
// field. The texts are held to the rules of the parts of a [Key].
func (p Partition) Validate() error {
	switch {
	case p.Consumer == "":
		return fmt.Errorf("%w: the consumer is empty", ErrInvalidClaim)
	case p.Topic == "":
		return fmt.Errorf("%w: the topic is empty", ErrInvalidClaim)
	case p.Number < 0 || p.Number > math.MaxInt32:
		return fmt.Errorf("%w: the partition is %d, it must be from 0 to %d", ErrInvalidClaim, p.Number, math.MaxInt32)
	}
	for _, f := range [...]part{{"tenant", p.Tenant}, {"consumer", p.Consumer}, {"topic", p.Topic}} {
		if err := validatePart(f.value); err != nil {
			return fmt.Errorf("%w: the %s %w", ErrInvalidClaim, f.name, err)
		}
	}
	return nil
}

// Stored is the form in which stores keep p: 16 bytes of a SHA-256 of all fields.
func (p Partition) Stored() KeyID {
	k := Key{Tenant: p.Tenant, Consumer: p.Consumer, Source: p.Topic, ID: strconv.Itoa(p.Number)}
	sum := sha256.Sum256(append([]byte{storedVersion}, k.Encode()...))
	return KeyID(sum[:16])
}

// Place is where a log holds a record.
type Place struct {
	// Offset rises within a partition. Gaps are normal: a log that is compacted
	// has them, transactions leave some, and not every record is handled.
	Offset int64
	// Time is the timestamp of the record in the log, by whatever clock, and the
	// same at every delivery. It counts to the microsecond. Zero, or before
	// 1970, if there is none.
	Time time.Time
	// Fingerprint digests what the log holds there, and is the same at every
	// delivery. Zero is not compared.
	Fingerprint [32]byte
}

// Position is how far the effects of a consumer have come in a partition.
type Position struct {
	// Partition is zero in a list if the store keeps no readable parts.
	Partition Partition
	// Next is one more than the greatest offset that is done. Whatever is below
	// is done, and nothing from there on is.
	Next int64
	// MaxTime is the greatest Place.Time of what is done, to the microsecond;
	// zero if none had one.
	MaxTime time.Time
	// Last is Place.Fingerprint of what was done last, at Next-1; zero if it is
	// not known.
	Last [32]byte
	// MovedAt is when Next was changed, by the store's clock. Only a
	// [PositionAdmin] fills it in.
	MovedAt time.Time
}

// Advance is what a [PlaceDriver] makes durable together with the effect.
type Advance struct {
	// To is where the partition is from now on. It is never behind.
	To Position
	// Claims are those whose keys the transaction owns; Replies has one for
	// each, nil for none.
	Claims  []Claim
	Replies [][]byte
	// Conflicts are to be recorded as [TxDriver] Conflict does it.
	Conflicts []ConflictRecord
}

// PositionAdmin is an optional power of an [Admin] whose store is a [Placer]. It
// is safe for concurrent use.
type PositionAdmin interface {
	// Positions returns the positions of all partitions, by consumer, topic,
	// number and tenant, CountCap of them at most.
	Positions(ctx context.Context) ([]Position, error)
	// ResetPosition declares that of a partition everything below next is done
	// and nothing from next on, whatever was known before: 0 begins anew, as for
	// a topic that was deleted and made again. Times and fingerprint are
	// forgotten with it. It waits for a transaction that is at work on the
	// partition. An error that matches ErrInvalidClaim says what is wrong with
	// the arguments.
	ResetPosition(ctx context.Context, p Partition, next int64) error
}

// CheckReset returns nil, or what is wrong with the arguments of ResetPosition.
func CheckReset(p Partition, next int64) error {
	if next < 0 {
		return fmt.Errorf("%w: the next offset is %d", ErrInvalidClaim, next)
	}
	return p.Validate()
}

// ErrLogReplaced: the partition is not the log that it was. A record came that is
// later than everything that is done, at an offset that is done; or another one
// than was done last, at its offset. The topic was deleted and made anew, or an
// election of a leader that was not in sync has cut it off. To take its records
// for duplicates would lose them. Nothing is committed, and every delivery is
// answered so until somebody has found out, and has said by
// [PositionAdmin] ResetPosition from which offset on nothing is done.
var ErrLogReplaced = errors.New("dedupe: the log was replaced")

// normal drops what is more precise than stores are, or out of what they hold.
func (p Place) normal() Place {
	switch {
	case !p.Time.After(time.Unix(0, 0)):
		p.Time = time.Time{}
	case p.Time.After(maxTime):
		p.Time = maxTime
	default:
		p.Time = time.UnixMicro(p.Time.UnixMicro())
	}
	return p
}

// maxTime is the greatest time that counts. Kafka lets a producer send any.
var maxTime = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

// checkPlaces returns places as they are compared, or what is wrong with them.
func checkPlaces(places []Place) ([]Place, error) {
	normal := make([]Place, len(places))
	for i, p := range places {
		switch {
		case p.Offset < 0 || p.Offset == math.MaxInt64:
			return nil, fmt.Errorf("%w: the offset is %d", ErrInvalidClaim, p.Offset)
		case i > 0 && p.Offset <= places[i-1].Offset:
			return nil, fmt.Errorf("%w: offset %d comes behind %d", ErrInvalidClaim, p.Offset, places[i-1].Offset)
		}
		normal[i] = p.normal()
	}
	return normal, nil
}

// split returns how many of places are done. A record that is below Next and
// later than everything that is done cannot be among what is done.
func (p Position) split(places []Place) (done int, err error) {
	for _, at := range places {
		switch {
		case at.Offset >= p.Next:
			return done, nil
		case !p.MaxTime.IsZero() && at.Time.After(p.MaxTime):
			return 0, fmt.Errorf("%w: %s holds a record of %s at offset %d, but everything below offset %d was done by then, up to %s; "+
				"find out where this log begins, and reset the position to the first offset that is not done",
				ErrLogReplaced, p.name(), stamp(at.Time), at.Offset, p.Next, stamp(p.MaxTime))
		case at.Offset == p.Next-1 && p.Last != [32]byte{} && at.Fingerprint != [32]byte{} && at.Fingerprint != p.Last:
			return 0, fmt.Errorf("%w: %s holds another record at offset %d, of %s, than was done last, before offset %d, up to %s; "+
				"find out where this log begins, and reset the position to the first offset that is not done",
				ErrLogReplaced, p.name(), at.Offset, stamp(at.Time), p.Next, stamp(p.MaxTime))
		}
		done++
	}
	return done, nil
}

func (p Position) name() string {
	return fmt.Sprintf("partition %d of topic %s", p.Partition.Number, p.Partition.Topic)
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return "an unknown time"
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// past is the position behind places, which are not empty.
func (p Position) past(places []Place) Position {
	last := places[len(places)-1]
	p.Next, p.Last = last.Offset+1, last.Fingerprint
	for _, at := range places {
		if at.Time.After(p.MaxTime) {
			p.MaxTime = at.Time
		}
	}
	return p
}
