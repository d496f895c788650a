package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/brokers/natsbroker"
	"github.com/unecho/unecho/envelope"
)

// publisher connects to the broker. done closes the publisher and what it
// stands on.
func publisher(c *config) (pub brokers.Publisher, done func(), err error) {
	mode := envelope.Binary
	if c.Mode == "structured" {
		mode = envelope.Structured
	}
	if c.Broker == "kafka" {
		return kafkaPublisher(c, mode)
	}
	return natsPublisher(c, mode)
}

func kafkaPublisher(c *config, mode envelope.Mode) (brokers.Publisher, func(), error) {
	o := kafkabroker.PublisherConfig{Brokers: c.Kafka.Brokers, MaxMessageBytes: c.Kafka.MaxMessageBytes, Mode: mode, ClientID: "unecho-relay"}
	var err error
	if o.TLS, err = c.kafkaTLS(); err != nil {
		return nil, nil, err
	}
	if o.SASL, err = c.kafkaSASL(); err != nil {
		return nil, nil, err
	}
	p, err := kafkabroker.NewPublisher(o)
	if err != nil {
		return nil, nil, err
	}
	return p, func() { _ = p.Close() }, nil
}

// kafkaTLS is nil if connections are to be in clear.
func (c *config) kafkaTLS() (*tls.Config, error) {
	k := c.Kafka
	if k.TLS != "on" && k.CAFile == "" && k.CertFile == "" && k.KeyFile == "" {
		return nil, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if k.CAFile != "" {
		text, err := os.ReadFile(k.CAFile)
		if err != nil {
			return nil, c.wrong("kafka.ca_file", err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(text) {
			return nil, c.wrong("kafka.ca_file", errors.New("there is no certificate in it"))
		}
	}
	if k.CertFile != "" || k.KeyFile != "" {
		pair, err := tls.LoadX509KeyPair(k.CertFile, k.KeyFile)
		if err != nil {
			return nil, c.wrong("kafka.cert_file", fmt.Errorf("with kafka.key_file: %w", err))
		}
		t.Certificates = []tls.Certificate{pair}
	}
	return t, nil
}

// kafkaSASL is nil if nobody is to log in.
func (c *config) kafkaSASL() (sasl.Mechanism, error) {
	k := c.Kafka
	if k.SASL == "" || k.SASL == "none" {
		if k.Username != "" || k.PasswordFile != "" {
			return nil, errors.New("kafka.username or kafka.password_file is set, and kafka.sasl is none: say by which mechanism to log in")
		}
		return nil, nil
	}
	if k.Username == "" || k.PasswordFile == "" {
		return nil, fmt.Errorf("kafka.sasl is %s: set kafka.username and kafka.password_file", k.SASL)
	}
	text, err := os.ReadFile(k.PasswordFile)
	if err != nil {
		return nil, c.wrong("kafka.password_file", err)
	}
	password := strings.TrimRight(string(text), "\r\n")
	switch k.SASL {
	case "scram-sha-256":
		return scram.Mechanism(scram.SHA256, k.Username, password)
	case "scram-sha-512":
		return scram.Mechanism(scram.SHA512, k.Username, password)
	}
	return plain.Mechanism{Username: k.Username, Password: password}, nil
}

func natsPublisher(c *config, mode envelope.Mode) (brokers.Publisher, func(), error) {
	opts, err := c.natsOptions()
	if err != nil {
		return nil, nil, err
	}
	nc, err := natsbroker.Connect(c.NATS.URL, opts...)
	if err != nil {
		return nil, nil, err
	}
	p, err := natsbroker.NewPublisher(nc, natsbroker.PublisherConfig{Mode: mode})
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	return p, func() { _ = p.Close(); nc.Close() }, nil
}

func (c *config) natsOptions() ([]nats.Option, error) {
	n, opts := c.NATS, []nats.Option{nats.Name("unecho-relay")}
	if n.Credentials != "" {
		opts = append(opts, nats.UserCredentials(n.Credentials))
	}
	if n.NKeyFile != "" {
		o, err := nats.NkeyOptionFromSeed(n.NKeyFile)
		if err != nil {
			return nil, c.wrong("nats.nkey_file", errors.New("it does not hold an NKEY seed, or cannot be read"))
		}
		opts = append(opts, o)
	}
	if n.CAFile != "" {
		opts = append(opts, nats.RootCAs(n.CAFile))
	}
	switch {
	case (n.CertFile == "") != (n.KeyFile == ""):
		return nil, errors.New("nats.cert_file and nats.key_file go together: one of them is not set")
	case n.CertFile != "":
		opts = append(opts, nats.ClientCert(n.CertFile, n.KeyFile))
	}
	if n.TLSFirst == "on" {
		opts = append(opts, nats.TLSHandshakeFirst())
	}
	return opts, nil
}
