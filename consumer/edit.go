package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/unecho/unecho/envelope"
)

// Attributes of an edited event: the identity of the one that it is an edited
// copy of. It also has causationid, correlationid and the trace of that one.
const (
	attrEditOf       = "unechoeditof"
	attrEditOfSource = "unechoeditofsource"
)

// ErrSameIdentity: the edited message would have the identity of the original
// one, so it would be a conflict with it, or a duplicate.
var ErrSameIdentity = errors.New("consumer: the edited message needs an identity of its own")

// EditOptions are the settings of [Edit]. The zero value, and nil, is the default.
type EditOptions struct {
	// Extractor is that of the handler. Defaults to envelope.CloudEvents.
	Extractor envelope.Extractor
}

// Edit replaces a parked message by a changed copy that is an event of its own,
// and returns the id of the copy's record, which is parked to be redriven. The
// original stays as it was, in the state ParkedEdited: it will not be redriven.
// The error matches ErrNotParked or ErrParkedChanged if there is no such message
// that waits.
//
// change gets a copy that it may alter as it likes. Where the extractor reads
// CloudEvents, that copy is decoded, has a new ID already, and names the original
// one: in unechoeditof and unechoeditofsource, and in causationid and
// correlationid as [Caused] does. If the original cannot be decoded, the copy has
// no attributes, and change sets at least Source and Type. With any other
// extractor the copy is as it was on the wire, and change gives it a new identity,
// wherever that is. The error matches ErrSameIdentity if it has not, and
// envelope.ErrNoID or envelope.ErrMalformed if the result cannot be read. An error
// of change is returned, and nothing is changed.
//
// If the answer of the lot was lost (dedupe.ErrUnknownOutcome), look at the
// original before you edit it again: EditedInto says whether it was done. Do not
// edit what somebody redrives: both may have their effect.
func Edit(ctx context.Context, lot ParkingLot, id string, change func(m *envelope.Message) error, o *EditOptions) (string, error) {
	p, err := findWaiting(ctx, lot, id)
	if err != nil {
		return "", err
	}
	var x = envelope.CloudEvents()
	if o != nil && o.Extractor != nil {
		x = o.Extractor
	}
	m, err := edited(x, p.Message, change)
	if err != nil {
		return "", fmt.Errorf("consumer: edit %s: %w", id, err)
	}
	next := &Parked{ID: parkedID(p.Consumer, m), Consumer: p.Consumer, Message: m, State: ParkedWaiting, EditOf: p.ID,
		Class: p.Class, Reason: p.Reason, Error: p.Error}
	if err := lot.Replace(ctx, p, next); err != nil {
		return "", fmt.Errorf("consumer: edit %s: %w", id, err)
	}
	return next.ID, nil
}

// edited is the changed copy, as it is on the wire. It has no position: nobody
// keeps it but the lot.
func edited(x envelope.Extractor, original *envelope.Message, change func(m *envelope.Message) error) (*envelope.Message, error) {
	m := original.Clone()
	if d, ok := x.(envelope.Decoder); ok {
		m = copyOf(d, m)
	}
	if err := change(m); err != nil {
		return nil, err
	}
	m.Topic, m.Position = original.Topic, ""
	m, err := envelope.Kafka.Encode(m, envelope.Binary)
	if err != nil {
		return nil, err
	}
	now, err := x.Identify(m)
	if err != nil {
		return nil, err
	}
	if before, err := x.Identify(original); err == nil && now == before {
		return nil, ErrSameIdentity
	}
	return m, nil
}

// copyOf is a new event made of raw.
func copyOf(d envelope.Decoder, raw *envelope.Message) *envelope.Message {
	old, err := d.Decode(raw)
	if err != nil {
		c := *raw
		c.ID = envelope.NewID()
		return &c
	}
	c := old.Clone()
	c.ID = envelope.NewID()
	ext := maps.Clone(old.Extensions)
	if ext == nil {
		ext = make(map[string]string)
	}
	maps.Copy(ext, lineage(old))
	ext[attrEditOf], ext[attrEditOfSource] = old.ID, old.Source
	c.Extensions = ext
	return c
}
