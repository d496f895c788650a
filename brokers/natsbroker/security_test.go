package natsbroker

import (
	"context"
	"crypto/tls"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

// run starts a server inside the test process.
func run(t testing.TB, o *server.Options) *server.Server {
	t.Helper()
	o.NoSigs, o.NoLog = true, true
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("the embedded server is not ready")
	}
	return s
}

func within(t testing.TB, ok func() bool) {
	t.Helper()
	testenv.Within(t, 20*time.Second, "it is so", ok)
}

// silence demands that nothing comes for d.
func silence(t testing.TB, s *Source, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	if got, err := s.Receive(ctx); err == nil {
		t.Errorf("received %s", got.Message.Position)
	}
}

// seed is a key pair and a file with its seed.
func seed(t testing.TB, make func() (nkeys.KeyPair, error)) (pair nkeys.KeyPair, public, file string) {
	t.Helper()
	pair, err := make()
	if err != nil {
		t.Fatal(err)
	}
	public, err = pair.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	text, err := pair.Seed()
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "seed")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return pair, public, file
}

// credentials is a file as `nsc` writes it, for a user of an account that operator has
// signed, and the resolver that a server needs for it.
func credentials(t testing.TB) (o server.Options, file string) {
	t.Helper()
	operator, operatorKey, _ := seed(t, nkeys.CreateOperator)
	account, accountKey, _ := seed(t, nkeys.CreateAccount)
	user, userKey, _ := seed(t, nkeys.CreateUser)
	encode := func(c interface {
		Encode(nkeys.KeyPair) (string, error)
	}, by nkeys.KeyPair) string {
		text, err := c.Encode(by)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	oc := jwt.NewOperatorClaims(operatorKey)
	ac := jwt.NewAccountClaims(accountKey)
	token := encode(jwt.NewUserClaims(userKey), account)
	text, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	creds, err := jwt.FormatUserConfig(token, text)
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "user.creds")
	if err := os.WriteFile(file, creds, 0o600); err != nil {
		t.Fatal(err)
	}
	resolver := &server.MemAccResolver{}
	if err := resolver.Store(accountKey, encode(ac, operator)); err != nil {
		t.Fatal(err)
	}
	claims, err := jwt.DecodeOperatorClaims(encode(oc, operator))
	if err != nil {
		t.Fatal(err)
	}
	return server.Options{TrustedOperators: []*jwt.OperatorClaims{claims}, AccountResolver: resolver}, file
}

// Each way to connect that a service may need works, and who is refused is told so,
// without a secret.
func TestSecurity(t *testing.T) {
	a := proc.NewAuthority(t)
	secure := &tls.Config{Certificates: []tls.Certificate{a.TLS}, ClientCAs: a.Pool, MinVersion: tls.VersionTLS12}
	mutual := secure.Clone()
	mutual.ClientAuth = tls.RequireAndVerifyClientCert
	_, userKey, seedFile := seed(t, nkeys.CreateUser)
	_, _, otherSeed := seed(t, nkeys.CreateUser)
	nkey := func(file string) nats.Option {
		o, err := nats.NkeyOptionFromSeed(file)
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	withCreds, creds := credentials(t)
	_, otherCreds := credentials(t)
	for name, c := range map[string]struct {
		server    server.Options
		good, bad []nats.Option
	}{
		"TLS":                {server.Options{TLSConfig: secure}, []nats.Option{nats.RootCAs(a.CA)}, []nats.Option{nats.Secure()}},
		"client certificate": {server.Options{TLSConfig: mutual, TLSVerify: true}, []nats.Option{nats.RootCAs(a.CA), nats.ClientCert(a.Cert, a.Key)}, []nats.Option{nats.RootCAs(a.CA)}},
		"TLS first":          {server.Options{TLSConfig: secure, TLSHandshakeFirst: true}, []nats.Option{nats.RootCAs(a.CA), nats.TLSHandshakeFirst()}, []nats.Option{nats.Secure(), nats.TLSHandshakeFirst()}},
		"password":           {server.Options{Username: "alice", Password: "canary"}, []nats.Option{nats.UserInfo("alice", "canary")}, []nats.Option{nats.UserInfo("alice", "canary-wrong")}},
		"nkey":               {server.Options{Nkeys: []*server.NkeyUser{{Nkey: userKey}}}, []nats.Option{nkey(seedFile)}, []nats.Option{nkey(otherSeed)}},
		"credentials":        {withCreds, []nats.Option{nats.UserCredentials(creds)}, []nats.Option{nats.UserCredentials(otherCreds)}},
	} {
		t.Run(name, func(t *testing.T) {
			c.server.Host, c.server.Port = "127.0.0.1", -1
			if c.server.TLSConfig != nil {
				c.server.TLS, c.server.TLSTimeout = true, 5
			}
			s := run(t, &c.server)
			nc, err := Connect(fmt.Sprint("nats://", s.Addr()), c.good...)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			within(t, nc.IsConnected)
			if _, err := NewPublisher(nc, PublisherConfig{}); err != nil {
				t.Error(err)
			}
			refused, err := Connect(fmt.Sprint("nats://", s.Addr()), append(c.bad, nats.RetryOnFailedConnect(false))...)
			if err == nil {
				refused.Close()
				t.Fatal("who should be refused is not")
			}
			if strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "SU") && strings.Contains(err.Error(), "seed") {
				t.Errorf("a secret is in %q", err)
			}
		})
	}
}
