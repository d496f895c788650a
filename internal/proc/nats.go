package proc

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/unecho/unecho/internal/testenv"
)

// StartNATS starts a nats-server with JetStream that syncs every write.
func StartNATS(t testing.TB) *Server {
	t.Helper()
	s := natsNode(t, freePort(t), "")
	s.Restart()
	return s
}

// StartNATSCluster starts three servers, on which streams can have three
// replicas. The URL of each names all of them.
func StartNATSCluster(t testing.TB) []*Server {
	t.Helper()
	const n = 3
	var ports, routes [n]int
	var urls, peers []string
	for i := range n {
		ports[i], routes[i] = freePort(t), freePort(t)
		urls = append(urls, fmt.Sprint("nats://127.0.0.1:", ports[i]))
		peers = append(peers, fmt.Sprint("nats://127.0.0.1:", routes[i]))
	}
	var nodes []*Server
	for i := range n {
		s := natsNode(t, ports[i], fmt.Sprintf("server_name: n%d\ncluster { name: unecho, listen: \"127.0.0.1:%d\", routes: [%s] }\n", i+1, routes[i], strings.Join(peers, ", ")))
		s.Boot()
		nodes = append(nodes, s)
	}
	for _, s := range nodes {
		s.Ready()
		s.URL = strings.Join(urls, ",")
	}
	return nodes
}

// natsNode is a server that is not started yet.
func natsNode(t testing.TB, port int, more string) *Server {
	t.Helper()
	program, dir := testenv.Get(t, "UNECHO_NATS_SERVER"), t.TempDir()
	conf := filepath.Join(dir, "nats.conf")
	write(t, conf, fmt.Sprintf("listen: \"127.0.0.1:%d\"\n%sjetstream { store_dir: %q, max_mem: 64M, max_file: 4G, sync_interval: always }\n", port, more, dir))
	s := &Server{t: t, Addr: fmt.Sprint("127.0.0.1:", port), URL: fmt.Sprint("nats://127.0.0.1:", port)}
	s.start = func() *Process { return Start(t, nil, program, "-c", conf) }
	s.probe = func(context.Context) error {
		nc, err := nats.Connect("nats://"+s.Addr, nats.Timeout(time.Second))
		if err != nil {
			return err
		}
		defer nc.Close()
		js, err := nc.JetStream(nats.MaxWait(time.Second))
		if err != nil {
			return err
		}
		_, err = js.AccountInfo()
		return err
	}
	return s
}
