package kafkabroker

import (
	"errors"
	"fmt"
	"net"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"

	"github.com/unecho/unecho/brokers"
)

// errRefusedDial marks an outage that is worth no retry here: nobody listens,
// and the caller waits better than we do.
var errRefusedDial = errors.New("no connection")

// classify says what an error of a produce request means.
func classify(err error) error {
	if err == nil {
		return nil
	}
	var code kafka.Error
	switch {
	case errors.As(err, &code):
		return fmt.Errorf("%w: %w", classOf(code), err)
	case errors.Is(err, protocol.ErrNoTopic), errors.Is(err, protocol.ErrNoPartition):
		return fmt.Errorf("%w: %w", brokers.ErrNoRoute, err)
	case errors.Is(err, protocol.ErrNoLeader):
		return fmt.Errorf("%w: %w", brokers.ErrUnavailable, err)
	case isDial(err):
		return fmt.Errorf("%w: %w: %w", brokers.ErrUnavailable, errRefusedDial, err)
	}
	// The request may have reached the broker: a time-out, a connection that
	// broke behind it, a context that ended.
	return fmt.Errorf("%w: %w", brokers.ErrUnknown, err)
}

// notSent says what an error of a request means that stores nothing.
func notSent(err error) error {
	c := classify(err)
	if errors.Is(c, brokers.ErrUnknown) {
		return fmt.Errorf("%w: %w", brokers.ErrUnavailable, err)
	}
	return c
}

func isDial(err error) bool {
	var op *net.OpError
	var dns *net.DNSError
	return errors.As(err, &op) && op.Op == "dial" || errors.As(err, &dns)
}

// classOf sorts the broker's error codes. Not enough replicas comes in two
// kinds: before the append, and after it, where the message is stored here and
// may yet be lost.
func classOf(code kafka.Error) error {
	switch code {
	case kafka.UnknownTopicOrPartition:
		return brokers.ErrNoRoute
	case kafka.MessageSizeTooLarge, kafka.RecordListTooLarge:
		return brokers.ErrTooLarge
	case kafka.RequestTimedOut, kafka.NotEnoughReplicasAfterAppend:
		return brokers.ErrUnknown
	case kafka.SASLAuthenticationFailed, kafka.UnsupportedSASLMechanism, kafka.IllegalSASLState, kafka.ClusterAuthorizationFailed:
		return brokers.ErrUnavailable // no fault of the message
	}
	if code.Temporary() {
		return brokers.ErrUnavailable
	}
	return brokers.ErrRejected
}
