package main

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/internal/proc"
	"github.com/unecho/unecho/internal/testenv"
)

func textFile(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// relays writes rows, runs a relay with these settings, and waits until all are
// published: none is held, and the window is through.
func relays(t *testing.T, topic string, env ...string) *proc.Process {
	t.Helper()
	d := openDB(t)
	d.cli(0, "migrate")
	d.write(events(topic, 20)...)
	p := start(t, append(d.env(), append(env, "UNECHO_RELAY_LOG_LEVEL=debug")...), "run")
	p.WaitFor(t, `"msg":"publish"`, 60*time.Second)
	testenv.Within(t, 60*time.Second, "all rows are published", func() bool {
		return d.count("select count(*) from unecho_outbox_held") == 0 && d.count("select count(*) from unecho_outbox_shard where cur is null") == 1
	})
	if err := p.Term(30 * time.Second); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	return p
}

// The relay logs in to a Kafka that wants TLS and a password, and to a NATS that wants
// TLS, a client's certificate and a key. No secret is in what it prints.
func TestSecureBrokers(t *testing.T) {
	t.Run("Kafka", func(t *testing.T) {
		k := proc.StartSecureKafka(t)
		if err := kafkabroker.CreateTopic(t.Context(), []string{k.Addr}, "secure", 2); err != nil {
			t.Fatal(err)
		}
		p := relays(t, "secure", "UNECHO_RELAY_BROKER=kafka", "UNECHO_RELAY_KAFKA_BROKERS="+k.Secure, "UNECHO_RELAY_KAFKA_CA_FILE="+k.CA,
			"UNECHO_RELAY_KAFKA_SASL=scram-sha-512", "UNECHO_RELAY_KAFKA_USERNAME="+k.User, "UNECHO_RELAY_KAFKA_PASSWORD_FILE="+textFile(t, k.Password+"\n"))
		if strings.Contains(p.Output(), k.Password) {
			t.Errorf("the password is in\n%s", p.Output())
		}
	})
	t.Run("NATS", func(t *testing.T) {
		a := proc.NewAuthority(t)
		pair, err := nkeys.CreateUser()
		if err != nil {
			t.Fatal(err)
		}
		public, err := pair.PublicKey()
		if err != nil {
			t.Fatal(err)
		}
		seed, err := pair.Seed()
		if err != nil {
			t.Fatal(err)
		}
		o, err := server.ProcessConfigFile(textFile(t, fmt.Sprintf("listen: \"127.0.0.1:-1\"\njetstream { store_dir: %q }\n"+
			"tls { cert_file: %q, key_file: %q, ca_file: %q, verify: true, handshake_first: true }\nauthorization { users: [ { nkey: %s } ] }\n", t.TempDir(), a.Cert, a.Key, a.CA, public)))
		if err != nil {
			t.Fatal(err)
		}
		o.NoLog, o.NoSigs = true, true
		s, err := server.NewServer(o)
		if err != nil {
			t.Fatal(err)
		}
		s.Start()
		t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
		if !s.ReadyForConnections(10 * time.Second) {
			t.Fatal("the server is not ready")
		}
		seedFile := textFile(t, string(seed))
		nkey, err := nats.NkeyOptionFromSeed(seedFile)
		if err != nil {
			t.Fatal(err)
		}
		addr := (&url.URL{Scheme: "nats", Host: s.Addr().String()}).String()
		nc, err := nats.Connect(addr, nkey, nats.RootCAs(a.CA), nats.ClientCert(a.Cert, a.Key), nats.TLSHandshakeFirst())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		js, err := nc.JetStream()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := js.AddStream(&nats.StreamConfig{Name: "S", Subjects: []string{"secure.>"}}); err != nil {
			t.Fatal(err)
		}
		relays(t, "secure.x", "UNECHO_RELAY_BROKER=nats", "UNECHO_RELAY_NATS_URL="+addr, "UNECHO_RELAY_NATS_CA_FILE="+a.CA, "UNECHO_RELAY_NATS_CERT_FILE="+a.Cert,
			"UNECHO_RELAY_NATS_KEY_FILE="+a.Key, "UNECHO_RELAY_NATS_NKEY_FILE="+seedFile, "UNECHO_RELAY_NATS_TLS_FIRST=on")
	})
}

// What cannot be right about the way to the broker is told at the start, by the key
// that is wrong, and before the database is waited for.
func TestBrokerSettings(t *testing.T) {
	empty, missing := textFile(t, ""), filepath.Join(t.TempDir(), "missing")
	kafka := []string{"--broker=kafka", "--kafka-brokers=127.0.0.1:1"}
	nats := []string{"--broker=nats", "--nats-url=nats://127.0.0.1:1"}
	for want, args := range map[string][]string{
		"kafka.ca_file (flag --kafka-ca-file)":             append(kafka, "--kafka-ca-file="+empty),
		"kafka.cert_file (flag --kafka-cert-file)":         append(kafka, "--kafka-cert-file="+empty, "--kafka-key-file="+empty),
		"kafka.password_file (flag --kafka-password-file)": append(kafka, "--kafka-tls=on", "--kafka-sasl=plain", "--kafka-username=u", "--kafka-password-file="+missing),
		"SASL PLAIN without TLS":                           append(kafka, "--kafka-sasl=plain", "--kafka-username=u", "--kafka-password-file="+empty),
		"set kafka.username and kafka.password_file":       append(kafka, "--kafka-sasl=scram-sha-256"),
		"kafka.sasl is none":                               append(kafka, "--kafka-username=u"),
		"kafka.sasl (flag --kafka-sasl)":                   append(kafka, "--kafka-sasl=kerberos"),
		"nats.nkey_file (flag --nats-nkey-file)":           append(nats, "--nats-nkey-file="+empty),
		"nats.cert_file and nats.key_file":                 append(nats, "--nats-cert-file="+empty),
	} {
		code, _, stderr := runCommand(t.Context(), []string{"UNECHO_RELAY_DATABASE_URL=postgres://127.0.0.1:1/x"}, append([]string{"run"}, args...)...)
		if code != 2 || !strings.Contains(stderr, want) {
			t.Errorf("%q: exit code %d, %q; want 2 and %q", args, code, stderr, want)
		}
	}
}
