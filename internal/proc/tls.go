package proc

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority signs certificates for 127.0.0.1, in files of a test's own.
type Authority struct {
	Pool *x509.CertPool
	// CA, Cert and Key are files in PEM: the authority's certificate, one for
	// both sides of a connection, and its key. Pair is a file with the last two.
	CA, Cert, Key, Pair string
	TLS                 tls.Certificate
}

// NewAuthority makes one.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	dir := t.TempDir()
	a := &Authority{Pool: x509.NewCertPool(), CA: filepath.Join(dir, "ca.pem"), Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), Pair: filepath.Join(dir, "pair.pem")}
	root := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "test"}, NotBefore: root.NotBefore, NotAfter: root.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	rootKey, leafKey := newKey(t), newKey(t)
	rootDER, leafDER := sign(t, root, root, rootKey, rootKey), sign(t, leaf, root, leafKey, rootKey)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(leafKey)
	if err != nil {
		t.Fatal(err)
	}
	ca, cert, key := block("CERTIFICATE", rootDER), block("CERTIFICATE", leafDER), block("PRIVATE KEY", pkcs8)
	for file, text := range map[string]string{a.CA: ca, a.Cert: cert, a.Key: key, a.Pair: key + cert + ca} {
		write(t, file, text)
	}
	a.Pool.AppendCertsFromPEM([]byte(ca))
	if a.TLS, err = tls.X509KeyPair([]byte(cert), []byte(key)); err != nil {
		t.Fatal(err)
	}
	return a
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func sign(t testing.TB, c, parent *x509.Certificate, key, by *ecdsa.PrivateKey) []byte {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, by)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func block(kind string, der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}

// SecureKafka is a node with a listener that wants TLS and SASL.
type SecureKafka struct {
	*Server
	*Authority
	// Secure is the address of that listener.
	Secure string
	// User and Password authenticate by PLAIN, SCRAM-SHA-256 and SCRAM-SHA-512.
	User, Password string
}

// StartSecureKafka starts a node whose second listener wants TLS and SASL: PLAIN,
// SCRAM, or OAUTHBEARER by unsigned tokens.
func StartSecureKafka(t testing.TB) *SecureKafka {
	t.Helper()
	k := &SecureKafka{Authority: NewAuthority(t), User: "alice", Password: "canary-password"}
	sec := &kafkaSecurity{k: k, port: freePort(t)}
	k.Secure = fmt.Sprint("127.0.0.1:", sec.port)
	k.Server = kafkaNodes(t, 1, sec)[0]
	k.Ready()
	return k
}

type kafkaSecurity struct {
	k    *SecureKafka
	port int
}

// users are words for the command that formats the node.
func (s *kafkaSecurity) users() (words []string) {
	if s == nil {
		return nil
	}
	for _, m := range []string{"SCRAM-SHA-256", "SCRAM-SHA-512"} {
		words = append(words, "--add-scram", fmt.Sprintf("%s=[name=%s,password=%s]", m, s.k.User, s.k.Password))
	}
	return words
}

// listen adds the listener to a configuration: what comes later in the file wins.
func (s *kafkaSecurity) listen(t testing.TB, conf string, port, controller int) {
	t.Helper()
	if s == nil {
		return
	}
	const modules, prefix = "org.apache.kafka.common.security.", "listener.name.secure."
	text := fmt.Sprintf(`
listeners=PLAINTEXT://127.0.0.1:%[1]d,CONTROLLER://127.0.0.1:%[2]d,SECURE://127.0.0.1:%[3]d
advertised.listeners=PLAINTEXT://127.0.0.1:%[1]d,SECURE://127.0.0.1:%[3]d
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SECURE:SASL_SSL
%[4]sssl.keystore.type=PEM
%[4]sssl.keystore.location=%[5]s
%[4]ssasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER
%[4]splain.sasl.jaas.config=%[6]splain.PlainLoginModule required user_%[7]s="%[8]s";
%[4]sscram-sha-256.sasl.jaas.config=%[6]sscram.ScramLoginModule required;
%[4]sscram-sha-512.sasl.jaas.config=%[6]sscram.ScramLoginModule required;
%[4]soauthbearer.sasl.jaas.config=%[6]soauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";
`, port, controller, s.port, prefix, s.k.Pair, modules, s.k.User, s.k.Password)
	f, err := os.OpenFile(conf, os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString(text)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}
