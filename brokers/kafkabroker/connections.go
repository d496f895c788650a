package kafkabroker

import (
	"context"
	"net"
	"sync"
)

// connections are those that one source or publisher has made. kafka-go closes
// connections in the background, and those with a request under way when that is
// answered: whoever closes us wants them gone.
type connections struct {
	mu     sync.Mutex
	open   map[*connection]struct{}
	closed bool
}

type connection struct {
	net.Conn
	of *connections
}

// dial is the dial function of kafka-go's clients.
func (c *connections) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	nc, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	conn := &connection{nc, c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		_ = nc.Close()
		return nil, net.ErrClosed
	}
	if c.open == nil {
		c.open = make(map[*connection]struct{})
	}
	c.open[conn] = struct{}{}
	return conn, nil
}

// Close implements net.Conn.
func (c *connection) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// close closes all connections, and none is made any more.
func (c *connections) close() {
	c.mu.Lock()
	open := c.open
	c.open, c.closed = nil, true
	c.mu.Unlock()
	for conn := range open {
		_ = conn.Conn.Close()
	}
}
