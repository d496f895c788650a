package kafkabroker_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"

	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/envelope"
)

// A consumer group on a topic, with dead letters on another one.
func ExampleNewSource() {
	addrs := []string{"127.0.0.1:9092"}
	src, err := kafkabroker.NewSource(kafkabroker.Config{Brokers: addrs, GroupID: "billing", Topics: []string{"orders"},
		OnError: func(err error) { slog.Warn("kafka", "error", err) }})
	if err != nil {
		return
	}
	pub, err := kafkabroker.NewPublisher(kafkabroker.PublisherConfig{Brokers: addrs})
	if err != nil {
		return
	}
	defer func() { _ = pub.Close() }()
	handler := consumer.HandlerFunc(func(context.Context, *envelope.Message) error { return nil })
	_ = consumer.Run(context.Background(), src, handler, &consumer.RunOptions{DeadLetter: consumer.DeadLetterTo(pub, "orders.dead")})
}

// The answers are positional: what is not nil was not acknowledged.
func ExampleNewPublisher() {
	pub, err := kafkabroker.NewPublisher(kafkabroker.PublisherConfig{Brokers: []string{"127.0.0.1:9092"}})
	if err != nil {
		return
	}
	defer func() { _ = pub.Close() }()
	event := &envelope.Message{ID: envelope.NewID(), Source: "/shop", Type: "order.placed", Topic: "orders", Key: []byte("customer-1")}
	for _, err := range pub.Publish(context.Background(), []*envelope.Message{event}) {
		if err != nil {
			slog.Error("publish", "error", err)
		}
	}
}

// For development and tests.
func ExampleCreateTopic() {
	if err := kafkabroker.CreateTopic(context.Background(), []string{"127.0.0.1:9092"}, "orders", 6); err != nil {
		slog.Error("create topic", "error", err)
	}
}

// A token is asked for at each connection; whoever gives it out keeps it as long
// as it is valid.
func ExampleOAuthBearer() {
	var source func(ctx context.Context) (string, error) // such as of golang.org/x/oauth2
	c := kafkabroker.PublisherConfig{Brokers: []string{"broker:9093"}, TLS: &tls.Config{MinVersion: tls.VersionTLS12},
		SASL: kafkabroker.OAuthBearer(func(ctx context.Context) (string, error) { return source(ctx) })}
	p, err := kafkabroker.NewPublisher(c)
	fmt.Println(c.SASL.Name(), err)
	_ = p.Close()
	// Output: OAUTHBEARER <nil>
}
