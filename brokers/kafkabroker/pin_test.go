package kafkabroker

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/unecho/unecho/internal/testenv"
)

// What kafka-go does that this package works around. A test here that fails after an
// upgrade says that the way around may go.

// The answer to LeaveGroup is read as if the error came in front of the throttle time.
func TestPinLeaveGroup(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		f.produce(t, 1)
		bodies(t, f.source(t, f.config("g")), 1)
		tr := &kafka.Transport{}
		defer tr.CloseIdleConnections()
		c := &kafka.Client{Addr: kafka.TCP(f.brokers...), Transport: tr, Timeout: 10 * time.Second}
		res, err := c.LeaveGroup(t.Context(), &kafka.LeaveGroupRequest{GroupID: f.topic + "g", Members: []kafka.LeaveGroupRequestMember{{ID: "nobody"}}})
		if err != nil {
			t.Fatal(err)
		}
		named := len(res.Members) > 0 && res.Members[0].Error != nil // of version 3 and later
		if code := kafka.Error(int16(res.Throttle.Milliseconds())); res.Error != nil || code != kafka.UnknownMemberId && !named {
			t.Errorf("Error %v, Throttle %v, members %+v: kafka-go decodes this otherwise now; look at Source.leave", res.Error, res.Throttle, res.Members)
		}
	})
}

// A produce with a transaction's id is appended outside the transaction, and is visible
// after an abort: a Publisher cannot have transactions.
func TestPinTransactions(t *testing.T) {
	f := openReal(t, 1)
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	c := &kafka.Client{Addr: kafka.TCP(f.brokers...), Transport: tr, Timeout: 10 * time.Second}
	var producer *kafka.ProducerSession
	testenv.Within(t, 30*time.Second, "there is a transaction coordinator", func() bool {
		res, err := c.InitProducerID(t.Context(), &kafka.InitProducerIDRequest{TransactionalID: f.topic, TransactionTimeoutMs: 10_000, ProducerID: -1, ProducerEpoch: -1})
		if err == nil && res.Error == nil {
			producer = res.Producer
		}
		return producer != nil
	})
	added, err := c.AddPartitionsToTxn(t.Context(), &kafka.AddPartitionsToTxnRequest{TransactionalID: f.topic, ProducerID: producer.ProducerID, ProducerEpoch: producer.ProducerEpoch,
		Topics: map[string][]kafka.AddPartitionToTxn{f.topic: {{Partition: 0}}}})
	if err != nil || added.Topics[f.topic][0].Error != nil {
		t.Fatal(err, added)
	}
	res, err := c.Produce(t.Context(), &kafka.ProduceRequest{Topic: f.topic, RequiredAcks: kafka.RequireAll, TransactionalID: f.topic,
		Records: kafka.NewRecordReader(kafka.Record{Value: kafka.NewBytes([]byte("aborted"))})})
	if err := errors.Join(err, res.Error); err != nil {
		t.Fatal(err)
	}
	end, err := c.EndTxn(t.Context(), &kafka.EndTxnRequest{TransactionalID: f.topic, ProducerID: producer.ProducerID, ProducerEpoch: producer.ProducerEpoch, Committed: false})
	if err := errors.Join(err, end.Error); err != nil {
		t.Fatal(err)
	}
	if got := bodies(t, f.source(t, f.config("g")), 1); got[0] != "aborted" {
		t.Errorf("received %q", got)
	}
}

// A topic that is not there yet is picked up when it appears.
func TestTopicThatAppearsLater(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		later := testenv.Name("later-")
		c := f.config("g")
		c.Topics, c.RefreshInterval = []string{later}, 200*time.Millisecond
		s := f.source(t, c)
		nothing(t, s)
		f.create(t, later)
		f.put(t, later, 0, "x")
		if got := bodies(t, s, 1); got[0] != "x" {
			t.Errorf("received %q", got)
		}
	})
}

// A message that is larger than what is fetched at once passes, and what is behind it.
func TestLargerThanAFetch(t *testing.T) {
	both(t, 1, func(t *testing.T, f *fixture) {
		c := f.config("g")
		c.FetchBytes = 1000
		large := strings.Repeat("x", 100_000)
		f.put(t, f.topic, 0, "a", large, "b", large, "c")
		got := bodies(t, f.source(t, c), 5)
		if got[0] != "a" || got[1] != large || got[2] != "b" || got[3] != large || got[4] != "c" {
			t.Errorf("received %d, %d, %d, %d and %d bytes", len(got[0]), len(got[1]), len(got[2]), len(got[3]), len(got[4]))
		}
	})
}
