package kafkabroker

import (
	"context"
	"errors"
	"fmt"
	"io"
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
}

// fetch asks the leader of a partition for messages from offset on.
func (s *Source) fetch(ctx context.Context, topic string, partition int, offset int64) (page, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchWait+10*time.Second)
	defer cancel()
	req := &fetch.Request{ReplicaID: -1, MaxWaitTime: int32(fetchWait.Milliseconds()), MinBytes: 1, MaxBytes: int32(s.c.FetchBytes), SessionEpoch: -1,
		Topics: []fetch.RequestTopic{{Topic: topic, Partitions: []fetch.RequestPartition{{
			Partition: int32(partition), CurrentLeaderEpoch: -1, FetchOffset: offset, LogStartOffset: -1, PartitionMaxBytes: int32(s.c.FetchBytes)}}}}}
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
	return readPage(p.RecordSet.Records, topic, partition, offset)
}

// readPage reads the batches of an answer. Control batches, which end
// transactions, are passed over; a batch may begin below the offset that was
// asked for, because the broker returns whole batches.
func readPage(rs protocol.RecordReader, topic string, partition int, offset int64) (page, error) {
	p := page{next: offset}
	batches := []protocol.RecordReader{rs}
	if s, ok := rs.(*protocol.RecordStream); ok {
		batches = s.Records
	}
	for _, b := range batches {
		if b == nil {
			continue
		}
		if err := readBatch(b, topic, partition, &p); err != nil {
			return page{}, err
		}
	}
	return p, nil
}

func readBatch(b protocol.RecordReader, topic string, partition int, p *page) error {
	if c, ok := b.(*protocol.ControlBatch); ok {
		return readControl(c, p)
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
		if r.Offset >= p.next {
			p.records = append(p.records, rec)
			p.next = r.Offset + 1
		}
	}
}

func readControl(c *protocol.ControlBatch, p *page) error {
	for {
		r, err := c.ReadControlRecord()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("kafkabroker: read a control record: %w", err)
		}
		p.next = max(p.next, r.Offset+1)
	}
}

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
	m := &envelope.Message{Topic: topic, Key: key, Body: body, Time: r.Time, Position: fmt.Sprintf("%s/%d/%d", topic, partition, r.Offset)}
	size := len(key) + len(body)
	for _, h := range r.Headers {
		m.Header.Add(h.Key, h.Value)
		size += len(h.Key) + len(h.Value)
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
	c := &kafka.Client{Addr: s.addr, Transport: s.transport, Timeout: 10 * time.Second}
	res, err := c.ListOffsets(ctx, &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{topic: {req}}})
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
