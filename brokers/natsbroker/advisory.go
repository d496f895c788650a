package natsbroker

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
)

// ErrGivenUp: the server will not deliver a message any more, although nobody has
// acknowledged it: somebody has limited the consumer's deliveries while the source
// was running, or has terminated the message. It is told to Config.OnError, with
// the message's sequence. The message stays in the stream (unless that is a work
// queue): publish it again.
var ErrGivenUp = errors.New("natsbroker: the server has given a message up")

// The server's advisories, which are core messages: at most once.
const (
	advisoryMaxDeliveries = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES."
	advisoryTerminated    = "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED."
)

// advisories is the net below the settings: a consumer of ours has no limit of
// deliveries, and terminates nothing. It needs the permission to subscribe, and is
// without use where it has none.
func (s *Source) advisories() {
	heard := make(chan *nats.Msg, 64) // what does not fit is dropped, as any advisory may be
	for _, prefix := range []string{advisoryMaxDeliveries, advisoryTerminated} {
		sub, err := s.nc.ChanSubscribe(prefix+s.c.Stream+"."+s.c.Durable, heard)
		if err != nil {
			return // the connection is closed, which the puller finds out
		}
		defer func() { _ = sub.Unsubscribe() }()
	}
	for {
		select {
		case m := <-heard:
			s.givenUp(m)
		case <-s.ctx.Done():
			return
		}
	}
}

func (s *Source) givenUp(m *nats.Msg) {
	var a struct {
		Sequence   uint64 `json:"stream_seq"`
		Deliveries int    `json:"deliveries"`
	}
	if json.Unmarshal(m.Data, &a) != nil || a.Sequence == 0 {
		return
	}
	s.stale.Store(true) // the consumer is looked at before the next pull, and its limit is taken away
	s.c.OnError(fmt.Errorf("%w: sequence %d of stream %s, after %d deliveries to consumer %s", ErrGivenUp, a.Sequence, s.c.Stream, a.Deliveries, s.c.Durable))
}
