package consumerotel_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/consumerotel"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// bench is an observer whose metrics and spans a test can read.
type bench struct {
	*consumerotel.Observer
	metrics *sdkmetric.ManualReader
	spans   *tracetest.InMemoryExporter
	control *consumer.Control
}

func open(t *testing.T) *bench {
	t.Helper()
	b := &bench{metrics: sdkmetric.NewManualReader(), spans: tracetest.NewInMemoryExporter(), control: &consumer.Control{}}
	var err error
	b.Observer, err = consumerotel.New(&consumerotel.Options{
		System: "test", Group: "g", Control: b.control,
		Meter:  sdkmetric.NewMeterProvider(sdkmetric.WithReader(b.metrics)),
		Tracer: sdktrace.NewTracerProvider(sdktrace.WithSyncer(b.spans)),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(b.Close(), b.Close()); err != nil {
			t.Error(err)
		}
	})
	return b
}

// read returns every data point as "name{labels}", with its value.
func (b *bench) read(t *testing.T) map[string]float64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := b.metrics.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	points := map[string]float64{}
	add := func(name string, set attribute.Set, v float64) {
		var labels []string
		for _, kv := range set.ToSlice() {
			labels = append(labels, string(kv.Key)+"="+kv.Value.String())
		}
		slices.Sort(labels)
		points[name+"{"+strings.Join(labels, ",")+"}"] = v
	}
	for _, s := range all.ScopeMetrics {
		for _, m := range s.Metrics {
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					add(m.Name, p.Attributes, float64(p.Value))
				}
			case metricdata.Gauge[int64]:
				for _, p := range d.DataPoints {
					add(m.Name, p.Attributes, float64(p.Value))
				}
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					add(m.Name, p.Attributes, float64(p.Count))
					if len(p.Bounds) != 14 || p.Bounds[0] != .005 {
						t.Errorf("%s has the buckets %v", m.Name, p.Bounds)
					}
				}
			default:
				t.Errorf("%s is a %T", m.Name, m.Data)
			}
		}
	}
	return points
}

// canaries stand wherever an event may carry something. None may come out.
var canaries = []string{"canary-tenant", "canary-id", "canary-source", "canary-body", "canary-key", "canary-subject", "canary-error", "canary-panic"}

// TestCountsAndLeaksNothing runs everything that can happen to a delivery, and
// looks for what must not be in any metric or span.
func TestCountsAndLeaksNothing(t *testing.T) {
	b := open(t)
	const topic = "orders.canary-subject"
	broker := membroker.New()
	broker.CreateTopic(topic, 1)
	parent := "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	send := func(id, body string) {
		m, err := envelope.Kafka.Encode(&envelope.Message{ID: "canary-id-" + id, Source: "/canary-source", Type: "t", Subject: "canary-subject",
			Topic: topic, Key: []byte("canary-key"), Body: []byte(body), Extensions: map[string]string{"traceparent": parent}}, envelope.Binary)
		if err != nil {
			t.Fatal(err)
		}
		if err := broker.Publisher().Publish(t.Context(), []*envelope.Message{m}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range []string{"1", "1", "2", "fails", "panics"} {
		send(id, "canary-body")
	}
	send("1", "canary-body other")
	if err := broker.Publisher().Publish(t.Context(), []*envelope.Message{{Topic: topic, Body: []byte("canary-body")}}).Err(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	settled := 0
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), func(ctx context.Context, _ *memdedupe.Tx, m *envelope.Message) error {
		if !trace.SpanContextFromContext(ctx).IsValid() {
			t.Error("the handler is in no span")
		}
		switch {
		case strings.HasSuffix(m.ID, "fails"):
			return fmt.Errorf("canary-error: %s", m.Body)
		case strings.HasSuffix(m.ID, "panics"):
			panic("canary-panic")
		}
		return nil
	}, &consumer.Options{Tenant: "canary-tenant"})
	err := consumer.Run(ctx, broker.Source(topic, "g"), b.Trace(h), &consumer.RunOptions{
		MaxAttempts: 2, Backoff: consumer.Backoff{Min: time.Millisecond}, DeadLetter: consumer.Discard, Control: b.control, Concurrency: 1,
		Observer: consumer.ObserverFunc(func(ctx context.Context, e consumer.Event) {
			b.Observe(ctx, e)
			if e.Step == consumer.StepAck {
				if settled++; settled == 7 {
					cancel()
				}
			}
		}),
	})
	if err != nil {
		t.Fatal(err)
	}
	points := b.read(t)
	for name, want := range map[string]float64{
		"unecho.consumer.decisions{consumer=billing,outcome=processed}":                                        2,
		"unecho.consumer.decisions{consumer=billing,outcome=duplicate}":                                        1,
		"unecho.consumer.decisions{consumer=billing,outcome=conflict}":                                         1,
		"unecho.consumer.decisions{consumer=billing,outcome=failed}":                                           2,
		"unecho.consumer.dead_letters{class=failed,outcome=ok}":                                                2,
		"unecho.consumer.dead_letters{class=malformed,outcome=ok}":                                             1,
		"unecho.consumer.acks{outcome=ok}":                                                                     7,
		"unecho.consumer.retries{class=failed}":                                                                2,
		"unecho.consumer.ready{}":                                                                              0,
		"unecho.consumer.live{}":                                                                               1,
		"messaging.process.duration{messaging.operation.name=process,messaging.system=test,outcome=duplicate}": 1,
	} {
		if points[name] != want {
			t.Errorf("%s is %v, want %v", name, points[name], want)
		}
	}
	var out strings.Builder
	for name := range points {
		fmt.Fprintln(&out, name)
	}
	linked := 0
	for _, s := range b.spans.GetSpans() {
		fmt.Fprintln(&out, s.Name, s.Attributes, s.Status, s.Events, s.SpanKind)
		for _, l := range s.Links {
			linked++
			if l.SpanContext.TraceID().String() != "0af7651916cd43dd8448eb211c80319c" {
				t.Errorf("a span is linked to %v", l.SpanContext.TraceID())
			}
		}
		if s.Name != "process orders" || s.SpanKind != trace.SpanKindConsumer || s.Parent.IsValid() {
			t.Errorf("the span %q of kind %v", s.Name, s.SpanKind)
		}
	}
	if linked != 8 { // six events, two of them twice
		t.Errorf("%d spans are linked to where their message was created, want 8", linked)
	}
	for _, c := range canaries {
		if strings.Contains(out.String(), c) {
			t.Errorf("%q came out:\n%s", c, out.String())
		}
	}
}

// An outage pauses and resumes, and the gauges tell.
func TestCountsOutages(t *testing.T) {
	b := open(t)
	ctx := t.Context()
	b.Observe(ctx, consumer.Event{Step: consumer.StepPause, Class: consumer.ClassUnavailable, Err: dedupe.ErrUnavailable})
	b.Observe(ctx, consumer.Event{Step: consumer.StepResume})
	b.Observe(ctx, consumer.Event{Step: consumer.StepReturn})
	b.Observe(ctx, consumer.Event{Step: consumer.StepIgnore})
	b.Observe(ctx, consumer.Event{Step: consumer.StepShadow, Consumer: "billing", Outcome: dedupe.Duplicate})
	b.Observe(ctx, consumer.Event{Step: consumer.StepAck, Err: errors.New("lost")})
	points := b.read(t)
	for _, name := range []string{"unecho.consumer.pauses{}", "unecho.consumer.resumes{}", "unecho.consumer.returned{}", "unecho.consumer.ignored{}", "unecho.consumer.shadowed{consumer=billing,outcome=duplicate}", "unecho.consumer.acks{outcome=failed}"} {
		if points[name] != 1 {
			t.Errorf("%s is %v, want 1", name, points[name])
		}
	}
}

// A message that was not run, because of another one in its group, is no error.
func TestNotRunIsNoError(t *testing.T) {
	b := open(t)
	for _, answer := range []error{consumer.ErrNotRun, errors.New("boom")} {
		h := b.Trace(consumer.HandlerFunc(func(context.Context, *envelope.Message) error { return answer }))
		if err := h.Handle(t.Context(), &envelope.Message{Topic: "orders"}); !errors.Is(err, answer) {
			t.Errorf("%v became %v", answer, err)
		}
	}
	var got []string
	for _, s := range b.spans.GetSpans() {
		got = append(got, s.Status.Code.String())
	}
	if want := []string{"Unset", "Error"}; !slices.Equal(got, want) {
		t.Errorf("the spans ended as %q, want %q", got, want)
	}
}

// Metrics of a run, and a span around every delivery.
func ExampleNew() {
	control := &consumer.Control{}
	tel, err := consumerotel.New(&consumerotel.Options{System: "kafka", Group: "billing", Control: control})
	if err != nil {
		return
	}
	defer func() { _ = tel.Close() }()
	h := consumer.Wrap("billing", memdedupe.NewStore(nil), func(context.Context, *memdedupe.Tx, *envelope.Message) error { return nil }, nil)
	_ = tel.Trace(h)
	_ = &consumer.RunOptions{Observer: tel, Control: control, DeadLetter: consumer.Discard}
	fmt.Println(control.Health().Started)
	// Output: false
}
