package kafkabroker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"

	"github.com/unecho/unecho/envelope"
)

// fetchWait is how long the broker may hold a fetch that has nothing to return.
const fetchWait = 500 * time.Millisecond

// record is a message that was fetched and not handed out yet.
type record struct {
	offset int64
	size   int
	msg    *envelope.Message
}

// page is the answer to one fetch.
type page struct {
	records []record
	next    int64 // where to fetch on; above the last record where that was none of ours
	first   int64 // the base offset of the first batch; noBatch if there is none
	size    int   // bytes of records
	cut     bool  // there was more than was wanted
}

const noBatch = -1

// fetch asks the leader of a partition for messages. The broker answers with a whole
// batch at least, of which those are kept for which there is room, and one in any
// case.
func (s *Source) fetch(ctx context.Context, topic string, partition int, want portion) (page, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchWait+10*time.Second)
	defer cancel()
	req := &fetch.Request{ReplicaID: -1, MaxWaitTime: int32(fetchWait.Milliseconds()), MinBytes: 1, MaxBytes: int32(want.wire), SessionEpoch: -1,
		IsolationLevel: int8(s.c.isolation()),
		Topics: []fetch.RequestTopic{{Topic: topic, Partitions: []fetch.RequestPartition{{
			Partition: int32(partition), CurrentLeaderEpoch: -1, FetchOffset: want.at, LogStartOffset: -1, PartitionMaxBytes: int32(want.wire)}}}}}
	m, err := s.transport.RoundTrip(ctx, s.addr, req)
	if err != nil {
		return page{}, err
	}
	res := m.(*fetch.Response)
	if len(res.Topics) != 1 || len(res.Topics[0].Partitions) != 1 {
		return page{}, errors.New("kafkabroker: the broker's answer to a fetch has no partition")
	}
	p := res.Topics[0].Partitions[0]
	for _, code := range []int16{res.ErrorCode, p.ErrorCode} {
		if code != 0 {
			return page{}, kafka.Error(code)
		}
	}
	return readPage(p.RecordSet.Records, newAborts(p.AbortedTransactions), topic, partition, want)
}

// readPage reads the batches of an answer. Control batches, which end
// transactions, and what was written by a transaction that was aborted are passed
// over; a batch may begin below the offset that was asked for, because the broker
// returns whole batches.
func readPage(rs protocol.RecordReader, aborted *aborts, topic string, partition int, want portion) (page, error) {
	p := page{next: want.at, first: noBatch}
	batches := []protocol.RecordReader{rs}
	if s, ok := rs.(*protocol.RecordStream); ok {
		batches = s.Records
	}
	for _, b := range batches {
		if b == nil || p.cut {
			continue
		}
		if err := readBatch(b, aborted, topic, partition, want.size, &p); err != nil {
			return page{}, err
		}
	}
	return p, nil
}

func readBatch(b protocol.RecordReader, aborted *aborts, topic string, partition, most int, p *page) error {
	if at, ok := b.(interface{ Offset() int64 }); ok && p.first == noBatch {
		p.first = at.Offset()
	}
	hidden := false
	switch b := b.(type) {
	case *protocol.ControlBatch:
		return readControl(b, aborted, p)
	case *protocol.RecordBatch:
		hidden = aborted.cover(b)
	}
	for {
		r, err := b.ReadRecord()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("kafkabroker: read a record: %w", err)
		}
		rec, err := convert(r, topic, partition)
		if err != nil {
			return err
		}
		if r.Offset < p.next {
			continue
		}
		if !hidden && len(p.records) > 0 && p.size+rec.size > most {
			p.cut = true
			return nil
		}
		p.next = r.Offset + 1
		if !hidden {
			p.records = append(p.records, rec)
			p.size += rec.size
		}
	}
}

// aborts are the transactions that were aborted, as the broker names them with what it
// returns to those who read what is committed. It returns what they wrote as
// well: to leave that out is left to the client.
type aborts struct {
	ahead []fetch.ResponseTransaction // in the order of their first offsets
	open  map[int64]bool              // by producer
}

func newAborts(all []fetch.ResponseTransaction) *aborts {
	slices.SortFunc(all, func(a, b fetch.ResponseTransaction) int { return cmp.Compare(a.FirstOffset, b.FirstOffset) })
	return &aborts{ahead: all, open: make(map[int64]bool)}
}

// reach takes note of the transactions that began up to offset. Batches come in
// the order of their offsets.
func (a *aborts) reach(offset int64) {
	for len(a.ahead) > 0 && a.ahead[0].FirstOffset <= offset {
		a.open[a.ahead[0].ProducerID] = true
		a.ahead = a.ahead[1:]
	}
}

// cover reports whether b was written by a transaction that was aborted.
func (a *aborts) cover(b *protocol.RecordBatch) bool {
	a.reach(b.BaseOffset)
	return b.Attributes.Transactional() && a.open[b.ProducerID]
}

// abortMarker is the type of the control record that ends an aborted transaction.
const abortMarker = 0

// end takes note of the end of a transaction. An answer may begin with it: the
// transaction has to be known by then, or its producer's next one would be taken
// for it.
func (a *aborts) end(c *protocol.ControlBatch, kind int16) {
	a.reach(c.BaseOffset)
	if kind == abortMarker {
		delete(a.open, c.ProducerID)
	}
}

func readControl(c *protocol.ControlBatch, aborted *aborts, p *page) error {
	for {
		r, err := c.ReadControlRecord()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("kafkabroker: read a control record: %w", err)
		}
		p.next = max(p.next, r.Offset+1)
		aborted.end(c, r.Type)
	}
}

// pass returns the offset behind a batch of which nothing from offset at on is
// left: compaction takes records out of a batch, also its last ones, and leaves the
// range of offsets that it stands for. At the end of a segment of the log the
// broker returns such a batch, and nothing behind it, to whoever asks for an
// offset in that range, for ever. The batch says how far it goes, but kafka-go
// does not pass that on. So the end is searched for, by what is returned from a
// higher offset.
func (p *partition) pass(ctx context.Context, at, batch int64) (int64, error) {
	within := func(offset int64) (bool, error) {
		pg, err := p.gen.s.fetch(ctx, p.topic, p.id, portion{at: offset, wire: 1, size: 1})
		if errors.Is(err, kafka.OffsetOutOfRange) {
			return false, nil // behind the end of the log
		}
		return pg.first == batch, err
	}
	in, out := at, at+1 // in is within the batch
	for step := int64(1); ; step *= 2 {
		ok, err := within(out)
		if err != nil {
			return 0, err
		}
		if !ok {
			break
		}
		in, out = out, out+step
	}
	for out-in > 1 {
		mid := in + (out-in)/2
		ok, err := within(mid)
		switch {
		case err != nil:
			return 0, err
		case ok:
			in = mid
		default:
			out = mid
		}
	}
	return out, nil
}

// messageCost is what a message takes in memory beside its key, body and headers,
// with what is kept about its delivery; headerCost what a header takes beside its
// name and value.
const (
	messageCost = 512
	headerCost  = 64
)

// convert copies a record out of the response's memory. It keeps null and
// empty apart.
func convert(r *protocol.Record, topic string, partition int) (record, error) {
	key, err := readBytes(r.Key)
	if err != nil {
		return record{}, err
	}
	body, err := readBytes(r.Value)
	if err != nil {
		return record{}, err
	}
	m := &envelope.Message{Topic: topic, Key: key, Body: body, Time: r.Time, Position: topic + "/" + strconv.Itoa(partition) + "/" + strconv.FormatInt(r.Offset, 10)}
	size := messageCost + len(key) + len(body)
	for _, h := range r.Headers {
		m.Header.Add(h.Key, h.Value)
		size += headerCost + len(h.Key) + len(h.Value)
	}
	return record{offset: r.Offset, size: size, msg: m}, nil
}

func readBytes(b protocol.Bytes) ([]byte, error) {
	if b == nil {
		return nil, nil
	}
	defer func() { _ = b.Close() }()
	v, err := protocol.ReadAll(b)
	if v == nil {
		v = []byte{}
	}
	if err != nil {
		return nil, fmt.Errorf("kafkabroker: read a record: %w", err)
	}
	return v, nil
}

// offsetOf asks for the first or last offset of a partition.
func (s *Source) offsetOf(ctx context.Context, topic string, partition int, start Start) (int64, error) {
	req := kafka.FirstOffsetOf(partition)
	if start == Newest {
		req = kafka.LastOffsetOf(partition)
	}
	res, err := s.client().ListOffsets(ctx, &kafka.ListOffsetsRequest{IsolationLevel: s.c.isolation(), Topics: map[string][]kafka.OffsetRequest{topic: {req}}})
	if err != nil {
		return 0, err
	}
	ps := res.Topics[topic]
	switch {
	case len(ps) != 1:
		return 0, errors.New("kafkabroker: the broker's answer about offsets has no partition")
	case ps[0].Error != nil:
		return 0, ps[0].Error
	case start == Newest:
		return ps[0].LastOffset, nil
	}
	return ps[0].FirstOffset, nil
}
