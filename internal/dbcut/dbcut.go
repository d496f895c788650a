// Package dbcut is a proxy in front of a PostgreSQL or MySQL server, for tests:
// it can lose a COMMIT, or the answer to one, and cut everything.
//
// It reads the wire protocol as far as that takes, so connections through it
// must not be encrypted.
package dbcut

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
)

// Proxy is a listening proxy. Its methods may be called at any time.
type Proxy struct {
	target string
	speak  func(p *Proxy, client, server net.Conn) // passes on until one side ends
	ln     net.Listener
	wg     sync.WaitGroup

	mu     sync.Mutex
	down   bool
	conns  map[net.Conn]bool
	cut    cut
	closed bool

	implicit bool // transactions without a COMMIT count
	turns    int
}

// cut is what happens to the next commit.
type cut int

const (
	cutNone   cut = iota
	cutBefore     // the commit does not reach the server
	cutAfter      // the answer does not reach the client
)

// Start listens in front of the server that the URL names, and returns the URL
// that leads through the proxy. Both sides' connections end with the test.
func Start(tb testing.TB, server string) (*Proxy, string) {
	tb.Helper()
	u, err := url.Parse(server)
	if err != nil {
		tb.Fatal(err)
	}
	p, addr := start(tb, u.Host, speakPostgres)
	u.Host = addr
	return p, u.String()
}

// StartMySQL listens in front of the MySQL server at addr, and returns the
// address of the proxy. Both sides' connections end with the test.
func StartMySQL(tb testing.TB, addr string) (*Proxy, string) {
	tb.Helper()
	return start(tb, addr, speakMySQL)
}

func start(tb testing.TB, target string, speak func(p *Proxy, client, server net.Conn)) (*Proxy, string) {
	tb.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	p := &Proxy{target: target, speak: speak, ln: ln, conns: make(map[net.Conn]bool)}
	p.wg.Go(p.accept)
	tb.Cleanup(p.stop)
	return p, ln.Addr().String()
}

// CutCommit loses the next commit: its answer, if applied, or the commit
// itself. The connection is cut in both cases.
func (p *Proxy) CutCommit(applied bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cutBefore
	if applied {
		p.cut = cutAfter
	}
}

// Implicit makes CutCommit mean transactions without a COMMIT as well: the
// statements of one round trip, which the server commits at its end.
func (p *Proxy) Implicit() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.implicit = true
}

// Turns returns how often a client has waited for the server to be ready again.
func (p *Proxy) Turns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.turns
}

// turn counts one, and reports whether its end is a commit.
func (p *Proxy) turn(executed bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.turns++
	return p.implicit && executed
}

func (p *Proxy) isImplicit() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.implicit
}

// Break cuts all connections and every new one, until Mend.
func (p *Proxy) Break() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = true
	for c := range p.conns {
		_ = c.Close()
	}
}

// Mend lets connections through again.
func (p *Proxy) Mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = false
}

func (p *Proxy) stop() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	_ = p.ln.Close()
	p.Break()
	p.wg.Wait()
}

func (p *Proxy) accept() {
	for {
		client, err := p.ln.Accept()
		if err != nil {
			return
		}
		if !p.add(client) {
			_ = client.Close()
			continue
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

// add registers a connection, unless everything is cut.
func (p *Proxy) add(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down || p.closed {
		return false
	}
	p.conns[c] = true
	return true
}

func (p *Proxy) drop(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
	_ = c.Close()
}

func (p *Proxy) serve(client net.Conn) {
	defer p.drop(client)
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	if !p.add(server) {
		_ = server.Close()
		return
	}
	defer p.drop(server)
	p.speak(p, client, server)
}

func speakPostgres(p *Proxy, client, server net.Conn) {
	bothWays(client, server, func() { _ = p.requests(client, server) }, func() { _ = p.answers(server, client) })
}

// bothWays runs there and back until one of them ends, and cuts the other.
func bothWays(client, server net.Conn, there, back func()) {
	var wg sync.WaitGroup
	defer wg.Wait()
	end := func() {
		_ = client.Close()
		_ = server.Close()
	}
	wg.Go(func() {
		defer end()
		back()
	})
	defer end()
	there()
}

var errCut = errors.New("dbcut: cut")

// requests passes on what the client sends.
func (p *Proxy) requests(client, server net.Conn) error {
	if err := startup(client, server); err != nil {
		return err
	}
	commits := map[string]bool{} // names of prepared statements that commit
	executed := false
	return pump(client, server, func(kind byte, body []byte) bool {
		commit := isCommit(kind, body, commits)
		switch kind {
		case 'E':
			executed = true
		case 'S', 'Q':
			commit = p.turn(executed || kind == 'Q') || commit
			executed = false
		}
		return commit && p.take(cutBefore)
	})
}

// answers passes on what the server sends.
func (p *Proxy) answers(server, client net.Conn) error {
	executed := false
	return pump(server, client, func(kind byte, body []byte) bool {
		commit := kind == 'C' && cstring(body) == "COMMIT"
		switch kind {
		case 'C':
			executed = true
		case 'Z':
			commit = executed && p.isImplicit()
			executed = false
		}
		return commit && p.take(cutAfter)
	})
}

// take reports whether the next commit is to be cut in this way, once.
func (p *Proxy) take(c cut) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut != c {
		return false
	}
	p.cut = cutNone
	return true
}

// startup passes on the client's first message, which has no kind.
func startup(client io.Reader, server io.Writer) error {
	var length [4]byte
	if _, err := io.ReadFull(client, length[:]); err != nil {
		return err
	}
	_, err := server.Write(length[:])
	if err == nil {
		_, err = io.CopyN(server, client, int64(binary.BigEndian.Uint32(length[:]))-4)
	}
	return err
}

// pump passes on messages until stop says that one is not to be.
func pump(from io.Reader, to io.Writer, stop func(kind byte, body []byte) bool) error {
	head := make([]byte, 5)
	for {
		if _, err := io.ReadFull(from, head); err != nil {
			return err
		}
		msg := make([]byte, 1+binary.BigEndian.Uint32(head[1:]))
		copy(msg, head)
		if _, err := io.ReadFull(from, msg[5:]); err != nil {
			return err
		}
		if stop(msg[0], msg[5:]) {
			return errCut
		}
		if _, err := to.Write(msg); err != nil {
			return err
		}
	}
}

// isCommit reports whether a message makes the server commit. It notes in
// commits which prepared statements do.
func isCommit(kind byte, body []byte, commits map[string]bool) bool {
	switch kind {
	case 'Q': // a query, perhaps the last of several
		text := cstring(body)
		return isCommitText(text[strings.LastIndexByte(text, ';')+1:])
	case 'P': // parse: name, text
		name := cstring(body)
		commits[name] = isCommitText(cstring(body[len(name)+1:]))
	case 'B': // bind: portal, name
		portal := cstring(body)
		return commits[cstring(body[len(portal)+1:])]
	}
	return false
}

func isCommitText(s string) bool { return strings.EqualFold(strings.TrimSpace(s), "commit") }

func cstring(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}
