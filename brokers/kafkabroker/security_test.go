package kafkabroker

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/brokertest"
	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/internal/proc"
)

func scramOf(t testing.TB, a scram.Algorithm, user, password string) sasl.Mechanism {
	t.Helper()
	m, err := scram.Mechanism(a, user, password)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// unsecured is a token as the broker's validator for tests takes it.
func unsecured(subject string, valid time.Duration) string {
	part := func(format string, args ...any) string {
		return base64.RawURLEncoding.EncodeToString([]byte(fmt.Sprintf(format, args...)))
	}
	now := time.Now().Unix()
	return part(`{"alg":"none"}`) + "." + part(`{"sub":%q,"iat":%d,"exp":%d}`, subject, now-10, now+int64(valid/time.Second)) + "."
}

func bearerOf(token string) sasl.Mechanism {
	return OAuthBearer(func(context.Context) (string, error) { return token, nil })
}

// Every mechanism works over TLS on a real Kafka, for both sides; whoever is refused is
// told why, without a secret, and no row is to blame for it.
func TestSecurity(t *testing.T) {
	k := proc.StartSecureKafka(t)
	good := &tls.Config{RootCAs: k.Pool, MinVersion: tls.VersionTLS12}
	f := &fixture{brokers: []string{k.Addr}, topic: "secure"}
	if err := CreateTopic(t.Context(), f.brokers, f.topic, 1); err != nil {
		t.Fatal(err)
	}
	for name, m := range map[string]sasl.Mechanism{
		"PLAIN":         plain.Mechanism{Username: k.User, Password: k.Password},
		"SCRAM-SHA-256": scramOf(t, scram.SHA256, k.User, k.Password),
		"SCRAM-SHA-512": scramOf(t, scram.SHA512, k.User, k.Password),
		"OAUTHBEARER":   bearerOf(unsecured("alice", time.Hour)),
	} {
		t.Run(name, func(t *testing.T) {
			p := publisherAt(t, k.Secure, good, m)
			if err := p.Publish(t.Context(), []*envelope.Message{brokertest.Event(f.topic, "k", 1)}).Err(); err != nil {
				t.Fatal(err)
			}
			d := next(t, sourceAt(t, k.Secure, f.topic, good, m))
			if d.Message.Topic != f.topic {
				t.Errorf("received %+v", d.Message)
			}
		})
	}
	for name, c := range map[string]struct {
		tls *tls.Config
		m   sasl.Mechanism
	}{
		"wrong password":    {good, plain.Mechanism{Username: k.User, Password: "canary-wrong"}},
		"wrong SCRAM":       {good, scramOf(t, scram.SHA256, k.User, "canary-wrong")},
		"expired token":     {good, bearerOf(unsecured("canary-token", -time.Hour))},
		"unknown authority": {&tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}, plain.Mechanism{Username: k.User, Password: k.Password}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			err := publisherAt(t, k.Secure, c.tls, c.m).Publish(ctx, []*envelope.Message{brokertest.Event(f.topic, "k", 1)}).Err()
			if !errors.Is(err, brokers.ErrUnavailable) || errors.Is(err, brokers.ErrUnknown) {
				t.Errorf("Publish: %v, want ErrUnavailable", err)
			}
			told := refusal(t, k.Secure, f.topic, c.tls, c.m)
			for _, text := range []string{fmt.Sprint(err), told} {
				if strings.Contains(text, "canary") || strings.Contains(text, base64.RawURLEncoding.EncodeToString([]byte("canary"))[:7]) {
					t.Errorf("a secret is in %q", text)
				}
				if !strings.Contains(text, "SASL") && !strings.Contains(text, "certificate") && !strings.Contains(text, "token") {
					t.Errorf("%q does not say why", text)
				}
			}
		})
	}
}

func publisherAt(t testing.TB, addr string, c *tls.Config, m sasl.Mechanism) *Publisher {
	t.Helper()
	p, err := NewPublisher(PublisherConfig{Brokers: []string{addr}, TLS: c, SASL: m, RetryTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func sourceAt(t testing.TB, addr, topic string, c *tls.Config, m sasl.Mechanism) *Source {
	t.Helper()
	return (&fixture{}).source(t, Config{Brokers: []string{addr}, GroupID: t.Name(), Topics: []string{topic}, TLS: c, SASL: m})
}

// refusal is what a source says that is refused: as its end, or to OnError.
func refusal(t testing.TB, addr, topic string, c *tls.Config, m sasl.Mechanism) string {
	t.Helper()
	told := make(chan error, 100)
	s := (&fixture{}).source(t, Config{Brokers: []string{addr}, GroupID: t.Name(), Topics: []string{topic}, TLS: c, SASL: m, OnError: func(err error) {
		select {
		case told <- err:
		default:
		}
	}})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ended := make(chan error, 1)
	go func() { _, err := s.Receive(ctx); ended <- err }()
	select {
	case err := <-told:
		return err.Error()
	case err := <-ended:
		return err.Error()
	}
}

// A password is not sent in clear.
func TestSecretsWantTLS(t *testing.T) {
	for _, m := range []sasl.Mechanism{plain.Mechanism{Username: "u", Password: "canary"}, bearerOf("canary")} {
		_, source := NewSource(Config{Brokers: []string{"x"}, GroupID: "g", Topics: []string{"t"}, SASL: m})
		_, publisher := NewPublisher(PublisherConfig{Brokers: []string{"x"}, SASL: m})
		for _, err := range []error{source, publisher} {
			if err == nil || !strings.Contains(err.Error(), "TLS") || strings.Contains(err.Error(), "canary") {
				t.Errorf("%s without TLS: %v, want an error that says what to do", m.Name(), err)
			}
		}
	}
	s := sourceAt(t, "127.0.0.1:1", "t", nil, scramOf(t, scram.SHA512, "u", "p")) // which keeps it secret
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// The initial response is that of RFC 7628, section 4.1; a token that would add
// to it is refused.
func TestOAuthBearer(t *testing.T) {
	_, first, err := bearerOf("vF9dft4qmTc2Nvb3RlckBhbHRhdmlzdGEuY29tCg==").Start(t.Context())
	if want := "n,,\x01auth=Bearer vF9dft4qmTc2Nvb3RlckBhbHRhdmlzdGEuY29tCg==\x01\x01"; err != nil || string(first) != want {
		t.Errorf("%q, %v; want %q", first, err, want)
	}
	for _, token := range []string{"", "a\x01auth=x", "a\n"} {
		if _, _, err := bearerOf(token).Start(t.Context()); err == nil {
			t.Errorf("%q is no error", token)
		}
	}
	boom := errors.New("boom")
	if _, _, err := OAuthBearer(func(context.Context) (string, error) { return "", boom }).Start(t.Context()); !errors.Is(err, boom) {
		t.Errorf("%v, want the function's error", err)
	}
}
