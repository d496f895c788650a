package proc

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/unecho/unecho/internal/testenv"
)

// StartKafka starts one combined KRaft node.
func StartKafka(t testing.TB) *Server {
	t.Helper()
	s := kafkaNodes(t, 1, nil)[0]
	s.Ready()
	return s
}

// StartKafkaCluster starts three combined KRaft nodes. Internal topics have three
// replicas; a node that was killed is replaced by the others.
func StartKafkaCluster(t testing.TB) []*Server {
	t.Helper()
	nodes := kafkaNodes(t, 3, nil)
	for _, n := range nodes {
		n.Ready()
	}
	return nodes
}

// Addrs are the addresses of servers.
func Addrs(nodes []*Server) (addrs []string) {
	for _, n := range nodes {
		addrs = append(addrs, n.Addr)
	}
	return addrs
}

// kafkaNodes starts n nodes of one cluster, and does not wait until they serve.
func kafkaNodes(t testing.TB, n int, with *kafkaSecurity) (nodes []*Server) {
	t.Helper()
	libs := testenv.Get(t, "UNECHO_KAFKA_LIBS") + "/*"
	ports, controllers, voters := make([]int, n), make([]int, n), make([]string, n)
	for i := range n {
		ports[i], controllers[i] = freePort(t), freePort(t)
		voters[i] = fmt.Sprintf("%d@127.0.0.1:%d", i+1, controllers[i])
	}
	lines := strings.Fields(run(t, "java", "-cp", libs, "kafka.tools.StorageTool", "random-uuid"))
	id := lines[len(lines)-1]
	for i := range n {
		dir := t.TempDir()
		conf, log := filepath.Join(dir, "server.properties"), filepath.Join(dir, "log4j2.properties")
		runIn(t, []string{fmt.Sprint("NODE_ID=", i+1), "VOTERS=" + strings.Join(voters, ","), fmt.Sprint("REPLICAS=", n)},
			filepath.Join(testenv.Root(), "internal/services/kafka/config.sh"), filepath.Join(dir, "data"), "127.0.0.1",
			strconv.Itoa(ports[i]), strconv.Itoa(controllers[i]), conf, log)
		run(t, "java", append([]string{"-cp", libs, "kafka.tools.StorageTool", "format", "-t", id, "-c", conf}, with.users()...)...)
		with.listen(t, conf, ports[i], controllers[i])
		s := &Server{t: t, Addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(ports[i]))}
		s.URL = s.Addr
		s.start = func() *Process {
			return Start(t, nil, "java", "-Xms128m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
				"-Dlog4j2.configurationFile="+log, "-cp", libs, "kafka.Kafka", conf)
		}
		s.probe = func(ctx context.Context) error { return kafkaServes(ctx, s.Addr, n) }
		s.Boot()
		nodes = append(nodes, s)
	}
	return nodes
}

// kafkaServes is content when a produce over new connections went through that
// started at addr.
func kafkaServes(ctx context.Context, addr string, replicas int) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	tr := &kafka.Transport{DialTimeout: time.Second, MetadataTTL: time.Second}
	defer tr.CloseIdleConnections()
	c := &kafka.Client{Addr: kafka.TCP(addr), Transport: tr, Timeout: time.Second}
	_, err := c.CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{{Topic: "probe", NumPartitions: 1, ReplicationFactor: replicas}}})
	if err != nil {
		return err
	}
	res, err := c.Produce(ctx, &kafka.ProduceRequest{Topic: "probe", RequiredAcks: kafka.RequireAll,
		Records: kafka.NewRecordReader(kafka.Record{Value: kafka.NewBytes([]byte("x"))})})
	if err != nil {
		return err
	}
	return res.Error
}
