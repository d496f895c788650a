package kafkabroker

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"
)

// Start says where a group begins to read a partition for which it has no
// committed offset.
type Start int

const (
	// Oldest begins at the oldest message there is.
	Oldest Start = iota
	// Newest begins behind the newest message. The position is committed at
	// once, so that a crash before the first message does not move it.
	Newest
)

// OutOfRange says what happens when the committed offset is not in the log
// (any more): retention has deleted what was not consumed yet, or the topic was
// created anew.
type OutOfRange int

const (
	// Fail ends Receive with an error that matches ErrOutOfRange: messages are
	// lost, and a person should know.
	Fail OutOfRange = iota
	// ResetToOldest goes on at the oldest message there is.
	ResetToOldest
	// ResetToNewest goes on behind the newest message.
	ResetToNewest
)

// ErrOutOfRange: the group's offset of a partition is not in the log.
var ErrOutOfRange = errors.New("kafkabroker: the committed offset is out of range")

// Config are the settings of [NewSource]. Brokers, GroupID and one of Topics,
// Pattern and Partitions are mandatory, the zero value of everything else is the
// default.
type Config struct {
	// Brokers are addresses of brokers to start from, host:port.
	Brokers []string
	// GroupID is the consumer group.
	GroupID string
	// Topics are what the group consumes. A topic that does not exist yet is
	// picked up when it appears, and so are partitions that are added.
	Topics []string
	// Pattern matches the topics that the group consumes, those that appear
	// later included. It must match the whole name, and never does one that
	// begins with two underscores, as Kafka's own do. A change of the topics is a
	// rebalance. consumer.Run's proof of retention sees the topics that there are
	// at the start.
	Pattern *regexp.Regexp
	// Partitions are a fixed list, by topic, for those who share partitions out
	// by themselves. There is no membership and no rebalance: offsets are
	// committed for GroupID, which must have no members, and two sources with one
	// partition both get its messages. Take keys that all of them share, or
	// consumer.WrapWatermark.
	Partitions map[string][]int
	// RefreshInterval is how often it is looked for new topics and partitions.
	// Defaults to 5 s.
	RefreshInterval time.Duration
	// TLS is used for all connections. Defaults to none.
	TLS *tls.Config
	// SASL authenticates all connections: kafka-go's plain.Mechanism or
	// scram.Mechanism, or OAuthBearer. PLAIN and OAUTHBEARER are refused without
	// TLS. Defaults to none.
	SASL sasl.Mechanism
	// ClientID is shown by the broker. Defaults to "unecho".
	ClientID string
	// Start defaults to Oldest.
	Start Start
	// OutOfRange defaults to Fail.
	OutOfRange OutOfRange
	// Uncommitted also hands out what transactions of producers have written
	// that are open, or were aborted. By default a message is handed out when
	// its transaction was committed, and what is behind it in its partition waits
	// with it.
	Uncommitted bool
	// SessionTimeout is after how long without a heartbeat the group gives
	// our partitions to others. Defaults to 10 s.
	SessionTimeout time.Duration
	// HeartbeatInterval defaults to a fifth of SessionTimeout.
	HeartbeatInterval time.Duration
	// RebalanceTimeout is how long the group waits for a member that has to
	// give partitions back. Defaults to 30 s.
	RebalanceTimeout time.Duration
	// CommitInterval is how long progress may wait to be committed. Defaults
	// to 200 ms.
	CommitInterval time.Duration
	// Window bounds how much of a partition is delivered again after a crash: the
	// messages that were handed out from the lowest one on that is not settled,
	// itself included. When it is full, the partition waits for that one. What is
	// settled in it takes no memory. Defaults to 65,536.
	Window int
	// WindowBytes bounds what is in hand, in bytes over all partitions: messages
	// that were handed out and are not settled, and those that were fetched and not
	// handed out. A message counts with its key, body and headers, and with what it
	// takes beside them, some 600 bytes. Half of the bound is divided equally among
	// the partitions, the other half is for those that need more, so that one that
	// settles nothing leaves the others room. One message of each partition always
	// passes. What the client holds while it reads an answer, of FetchBytes or one
	// batch, is not counted. Defaults to 64 MiB.
	WindowBytes int
	// StuckAfter is how long a partition may wait for one message before Stuck
	// tells. Defaults to a minute.
	StuckAfter time.Duration
	// DeadLetterTopics are those that dead letters of what is consumed go to, if they
	// are on the same cluster. When the source starts, their limits are compared
	// with those of the topics that are consumed, and OnError is told of each that
	// takes less than it may have to: the error matches ErrDeadLetterLimit. It needs
	// the right to describe the topics' configuration. Defaults to none.
	DeadLetterTopics []string
	// FetchBytes is how much of a partition is fetched at once, less when there is
	// no room for that. A larger message passes. Defaults to 1 MiB.
	FetchBytes int
	// OnError is told of errors that the source waits out: a broker that is
	// away, a join that failed, a topic that is not there. It must not block, and
	// may be called by several goroutines at once. Defaults to none.
	OnError func(error)
}

func (c Config) normal() (Config, error) {
	switch {
	case len(c.Brokers) == 0:
		return c, errors.New("kafkabroker: Config.Brokers is empty")
	case c.GroupID == "":
		return c, errors.New("kafkabroker: Config.GroupID is empty")
	}
	if err := c.checkSubscription(); err != nil {
		return c, err
	}
	if err := checkSecurity(c.SASL, c.TLS); err != nil {
		return c, err
	}
	duration := func(d *time.Duration, def time.Duration) {
		if *d <= 0 {
			*d = def
		}
	}
	number := func(n *int, def int) {
		if *n <= 0 {
			*n = def
		}
	}
	duration(&c.SessionTimeout, 10*time.Second)
	duration(&c.HeartbeatInterval, c.SessionTimeout/5)
	duration(&c.RebalanceTimeout, 30*time.Second)
	duration(&c.CommitInterval, 200*time.Millisecond)
	duration(&c.RefreshInterval, 5*time.Second)
	duration(&c.StuckAfter, time.Minute)
	number(&c.Window, 1<<16)
	number(&c.WindowBytes, 64<<20)
	number(&c.FetchBytes, 1<<20)
	if c.ClientID == "" {
		c.ClientID = "unecho"
	}
	if c.OnError == nil {
		c.OnError = func(error) {}
	}
	if c.HeartbeatInterval >= c.SessionTimeout {
		return c, fmt.Errorf("kafkabroker: HeartbeatInterval %v must be less than SessionTimeout %v", c.HeartbeatInterval, c.SessionTimeout)
	}
	return c, nil
}

func (c Config) isolation() kafka.IsolationLevel {
	if c.Uncommitted {
		return kafka.ReadUncommitted
	}
	return kafka.ReadCommitted
}

// drain is how long handlers may go on when a generation has ended. No
// heartbeats are sent by then, so the session runs out as well.
func (c Config) drain() time.Duration {
	d := min(c.SessionTimeout, c.RebalanceTimeout)
	return d - d/5
}

// dialTimeout bounds making a connection.
const dialTimeout = 5 * time.Second

// transport is for fetches, produces and everything else but group membership.
// Its metadata must be young: it is what finds a new leader. It knows of the topics
// given, or of all if there are none.
func (c *connections) transport(clientID string, t *tls.Config, s sasl.Mechanism, topics ...string) *kafka.Transport {
	return &kafka.Transport{ClientID: clientID, TLS: t, SASL: s, Dial: c.dial, DialTimeout: dialTimeout,
		MetadataTTL: time.Second, MetadataTopics: topics, IdleTimeout: 30 * time.Second}
}

func (c Config) dialer(conns *connections) *kafka.Dialer {
	return &kafka.Dialer{ClientID: c.ClientID, TLS: c.TLS, SASLMechanism: c.SASL, Timeout: dialTimeout, DialFunc: conns.dial}
}

// CreateTopic creates a topic with one replica and waits until the broker has
// taken note. It is for development and tests: production topics want
// replicas, retention and an owner. A topic that exists is no error.
func CreateTopic(ctx context.Context, brokers []string, topic string, partitions int) error {
	var conns connections
	defer conns.close()
	tr := conns.transport("unecho", nil, nil)
	defer tr.CloseIdleConnections()
	c := &kafka.Client{Addr: kafka.TCP(brokers...), Transport: tr, Timeout: 10 * time.Second}
	res, err := c.CreateTopics(ctx, &kafka.CreateTopicsRequest{
		Topics: []kafka.TopicConfig{{Topic: topic, NumPartitions: partitions, ReplicationFactor: 1}}})
	if err == nil {
		err = res.Errors[topic]
	}
	if err != nil && !errors.Is(err, kafka.TopicAlreadyExists) {
		return fmt.Errorf("kafkabroker: create topic %s: %w", topic, err)
	}
	return nil
}
