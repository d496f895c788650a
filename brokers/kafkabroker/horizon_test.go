package kafkabroker_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/kafkabroker"
	"github.com/unecho/unecho/internal/testenv"
)

// B48: the source says for how long its topics can deliver again, and why: the
// one that keeps its records for longest decides.
func TestHorizon(t *testing.T) {
	addrs := testenv.Kafka(t)
	topic := func(settings ...string) string {
		name := testenv.Topic(t, 1)
		transport := &kafka.Transport{}
		defer transport.CloseIdleConnections()
		client := &kafka.Client{Addr: kafka.TCP(addrs...), Transport: transport}
		for i := 0; i+1 < len(settings); i += 2 {
			res, err := client.IncrementalAlterConfigs(t.Context(), &kafka.IncrementalAlterConfigsRequest{Resources: []kafka.IncrementalAlterConfigsRequestResource{{
				ResourceType: kafka.ResourceTypeTopic, ResourceName: name,
				Configs: []kafka.IncrementalAlterConfigsRequestConfig{{Name: settings[i], Value: settings[i+1], ConfigOperation: kafka.ConfigOperationSet}},
			}}})
			if err != nil || res.Resources[0].Error != nil {
				t.Fatal(err, res)
			}
		}
		return name
	}
	short, compacted := topic("retention.ms", "3600000"), topic("cleanup.policy", "compact")
	endless, both := topic("retention.ms", "-1"), topic("cleanup.policy", "compact,delete", "retention.ms", "7200000")
	for name, tc := range map[string]struct {
		topics []string
		want   time.Duration
		says   []string
	}{
		"default":             {[]string{topic()}, 7 * 24 * time.Hour, []string{"168h0m0s"}},
		"short":               {[]string{short}, time.Hour, []string{short, "1h0m0s", "retention.ms"}},
		"the longest":         {[]string{short, both}, 2 * time.Hour, []string{both}},
		"compacted":           {[]string{short, compacted}, brokers.Forever, []string{compacted, "compact"}},
		"without an end":      {[]string{endless}, brokers.Forever, []string{endless, "-1"}},
		"one that is no more": {[]string{short, testenv.Name("none")}, 0, nil},
	} {
		src, err := kafkabroker.NewSource(kafkabroker.Config{Brokers: addrs, GroupID: testenv.Name("g"), Topics: tc.topics})
		if err != nil {
			t.Fatal(err)
		}
		h, err := src.Horizon(t.Context())
		if tc.want == 0 && !errors.Is(err, brokers.ErrUnavailable) || tc.want > 0 && (err != nil || h.For != tc.want) {
			t.Errorf("%s: %+v, %v; want %v", name, h, err, tc.want)
		}
		for _, s := range tc.says {
			if !strings.Contains(h.Why, s) {
				t.Errorf("%s: %q does not say %q", name, h.Why, s)
			}
		}
		if err := src.Close(); err != nil {
			t.Error(err)
		}
	}
}
