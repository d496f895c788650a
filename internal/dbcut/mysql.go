package dbcut

import (
	"io"
	"net"
	"strings"
	"sync/atomic"
)

// comQuery is the first byte of a text query.
const comQuery = 3

func speakMySQL(p *Proxy, client, server net.Conn) {
	// committing is set while the answer to a commit is due: a packet of the
	// server does not say what it answers.
	var committing atomic.Bool
	bothWays(client, server, func() {
		_ = pumpMySQL(client, server, func(body []byte) bool {
			if len(body) == 0 || body[0] != comQuery || !strings.EqualFold(strings.TrimSpace(string(body[1:])), "commit") {
				return false
			}
			committing.Store(true)
			return p.take(cutBefore)
		})
	}, func() {
		_ = pumpMySQL(server, client, func([]byte) bool {
			return committing.CompareAndSwap(true, false) && p.take(cutAfter)
		})
	})
}

// pumpMySQL passes on packets until stop says that one is not to be.
func pumpMySQL(from io.Reader, to io.Writer, stop func(body []byte) bool) error {
	head := make([]byte, 4)
	for {
		if _, err := io.ReadFull(from, head); err != nil {
			return err
		}
		packet := make([]byte, 4+(int(head[0])|int(head[1])<<8|int(head[2])<<16))
		copy(packet, head)
		if _, err := io.ReadFull(from, packet[4:]); err != nil {
			return err
		}
		if stop(packet[4:]) {
			return errCut
		}
		if _, err := to.Write(packet); err != nil {
			return err
		}
	}
}
