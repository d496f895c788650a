package kafkabroker

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"
)

// Mechanisms whose secret is on the wire as it is.
const (
	mechanismPlain  = "PLAIN"
	mechanismBearer = "OAUTHBEARER"
)

// checkSecurity refuses to send a password or a token in clear.
func checkSecurity(m sasl.Mechanism, t *tls.Config) error {
	if m == nil || t != nil {
		return nil
	}
	switch name := m.Name(); name {
	case mechanismPlain:
		return errors.New("kafkabroker: SASL PLAIN without TLS sends the password in clear: set TLS, or use SCRAM (sasl/scram of kafka-go)")
	case mechanismBearer:
		return errors.New("kafkabroker: SASL OAUTHBEARER without TLS sends the token in clear: set TLS")
	}
	return nil
}

// OAuthBearer returns the SASL mechanism OAUTHBEARER (RFC 7628). token is called for each
// connection that is made, possibly by several at once, and is bounded by ctx; it returns a token that is
// valid now, and should keep one until it is not. It works over TLS only, and
// panics if token is nil.
//
// For PLAIN and SCRAM take kafka-go's packages sasl/plain and sasl/scram.
func OAuthBearer(token func(ctx context.Context) (string, error)) sasl.Mechanism {
	if token == nil {
		panic("kafkabroker: OAuthBearer: the function is nil")
	}
	return bearer{token}
}

type bearer struct {
	token func(ctx context.Context) (string, error)
}

// Name implements sasl.Mechanism.
func (bearer) Name() string { return mechanismBearer }

// Start implements sasl.Mechanism.
func (b bearer) Start(ctx context.Context) (sasl.StateMachine, []byte, error) {
	token, err := b.token(ctx)
	switch {
	case err != nil:
		return nil, nil, fmt.Errorf("kafkabroker: get a token: %w", err)
	case token == "" || strings.ContainsAny(token, "\x00\x01\r\n"):
		return nil, nil, errors.New("kafkabroker: the token is empty, or has control characters")
	}
	return b, []byte("n,,\x01auth=Bearer " + token + "\x01\x01"), nil
}

// Next implements sasl.StateMachine. The broker says nothing, or why it refuses
// the token (RFC 7628, section 3.2.2).
func (bearer) Next(_ context.Context, challenge []byte) (done bool, response []byte, err error) {
	if len(challenge) == 0 {
		return true, nil, nil
	}
	var why struct {
		Status string `json:"status"`
	}
	_ = json.Unmarshal(challenge, &why)
	return false, nil, fmt.Errorf("kafkabroker: the broker refuses the token (status %.40q): %w", why.Status, kafka.SASLAuthenticationFailed)
}
