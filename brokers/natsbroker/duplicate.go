package natsbroker

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

// verify looks at what the server holds instead of m. A duplicate is one only
// if the stored message is this event: an id that another event holds would
// otherwise drop ours and call that success. One that was deleted since had
// been stored. What could not be looked at is not known to be stored.
func (p *Publisher) verify(ctx context.Context, m *envelope.Message, ack *jetstream.PubAck) error {
	ctx, cancel := context.WithTimeout(ctx, p.c.Timeout)
	defer cancel()
	stored, err := p.stored(ctx, ack)
	if err != nil {
		return fmt.Errorf("%w: the server calls it a duplicate of sequence %d of stream %s, which could not be read: %w",
			brokers.ErrUnknown, ack.Sequence, ack.Stream, err)
	}
	if stored == nil {
		return nil
	}
	have, err := envelope.Decode(stored)
	if err != nil || have.ID != m.ID || have.Source != m.Source {
		return fmt.Errorf("%w: stream %s holds another message under this message id, at sequence %d", brokers.ErrRejected, ack.Stream, ack.Sequence)
	}
	return nil
}

// stored returns the message that ack names; nil if it was deleted. It asks the
// leader of the stream: a direct get could be answered by a replica that has
// not got the message yet, and that would look like one that was deleted.
func (p *Publisher) stored(ctx context.Context, ack *jetstream.PubAck) (*envelope.Message, error) {
	res, err := p.nc.RequestWithContext(ctx, "$JS.API.STREAM.MSG.GET."+ack.Stream, fmt.Appendf(nil, `{"seq":%d}`, ack.Sequence))
	if err != nil {
		return nil, err
	}
	var answer struct {
		Message *struct {
			Subject string `json:"subject"`
			Header  []byte `json:"hdrs"`
			Data    []byte `json:"data"`
		} `json:"message"`
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(res.Data, &answer); err != nil {
		return nil, err
	}
	switch {
	case answer.Error != nil && answer.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return nil, nil
	case answer.Error != nil:
		return nil, answer.Error
	case answer.Message == nil:
		return nil, fmt.Errorf("the answer has no message")
	}
	var header nats.Header
	if len(answer.Message.Header) > 0 {
		if header, err = nats.DecodeHeadersMsg(answer.Message.Header); err != nil {
			return nil, err
		}
	}
	return fromWire(answer.Message.Subject, answer.Message.Data, header), nil
}
