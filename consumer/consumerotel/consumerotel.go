package consumerotel

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/dedupe"
)

// Options are the settings of [New]. The zero value, and nil, is the default.
type Options struct {
	// System is the broker's kind, messaging.system: "kafka", "nats". Defaults
	// to "unknown".
	System string
	// Group is the consumer group or the durable, as messaging.consumer.group.name
	// of spans. Defaults to none.
	Group string
	// Control, if there is one, is asked for the gauges.
	Control *consumer.Control
	// Meter and Tracer provide. Default to the global ones.
	Meter  metric.MeterProvider
	Tracer trace.TracerProvider
	// Propagator reads where a message was created from its headers. Defaults
	// to W3C Trace Context.
	Propagator propagation.TextMapPropagator
}

const scope = "github.com/unecho/unecho/consumer/consumerotel"

// buckets are those that the semantic conventions advise for durations.
var buckets = []float64{.005, .01, .025, .05, .075, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10}

// Observer implements consumer.Observer. It is safe for concurrent use.
type Observer struct {
	o      Options
	tracer trace.Tracer
	system attribute.KeyValue

	duration                                                                     metric.Float64Histogram
	decisions, shadowed, retries, dead, acks, returned, ignored, pauses, resumes metric.Int64Counter
	gauges                                                                       metric.Registration // nil without a Control
}

// New returns an observer. o may be nil. An error is one of the meter's, such as
// an instrument that exists as another kind.
func New(o *Options) (*Observer, error) {
	t := &Observer{}
	if o != nil {
		t.o = *o
	}
	t.defaults()
	m := t.o.Meter.Meter(scope)
	var errs []error
	counter := func(name, what string) metric.Int64Counter {
		c, err := m.Int64Counter("unecho.consumer."+name, metric.WithDescription(what))
		errs = append(errs, err)
		return c
	}
	t.decisions = counter("decisions", "What the store has decided about deliveries.")
	t.retries = counter("retries", "Deliveries that are tried again later.")
	t.dead = counter("dead_letters", "Calls of the dead-letter hook.")
	t.acks = counter("acks", "Acknowledgements.")
	t.returned = counter("returned", "Deliveries that were handed back, not started or cut short.")
	t.shadowed = counter("shadowed", "Deliveries that were handled in shadow mode, and would have been suppressed.")
	t.ignored = counter("ignored", "Events of a type that was declared to be ignored.")
	t.pauses = counter("pauses", "How often consumption was held up by an outage.")
	t.resumes = counter("resumes", "How often it has gone on.")
	var err error
	t.duration, err = m.Float64Histogram("messaging.process.duration", metric.WithUnit("s"),
		metric.WithDescription("From the claim of a key to the decision."), metric.WithExplicitBucketBoundaries(buckets...))
	errs = append(errs, err)
	if t.o.Control != nil {
		errs = append(errs, t.watch(m))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("consumerotel: %w", err)
	}
	return t, nil
}

func (t *Observer) defaults() {
	if t.o.System == "" {
		t.o.System = "unknown"
	}
	if t.o.Meter == nil {
		t.o.Meter = otel.GetMeterProvider()
	}
	if t.o.Tracer == nil {
		t.o.Tracer = otel.GetTracerProvider()
	}
	if t.o.Propagator == nil {
		t.o.Propagator = propagation.TraceContext{}
	}
	t.tracer = t.o.Tracer.Tracer(scope)
	t.system = attribute.String("messaging.system", t.o.System)
}

// watch registers the gauges.
func (t *Observer) watch(m metric.Meter) error {
	var errs []error
	gauge := func(name, what string) metric.Int64ObservableGauge {
		g, err := m.Int64ObservableGauge("unecho.consumer."+name, metric.WithDescription(what))
		errs = append(errs, err)
		return g
	}
	inFlight, running := gauge("in_flight", "Deliveries that are not settled."), gauge("running", "Handlers that run.")
	stuck := gauge("stuck", "Partitions that wait for one message.")
	ready, live := gauge("ready", "1 if messages are being consumed."), gauge("live", "0 if a handler does not return.")
	if err := errors.Join(errs...); err != nil {
		return err
	}
	var err error
	t.gauges, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		h := t.o.Control.Health()
		o.ObserveInt64(inFlight, int64(h.InFlight))
		o.ObserveInt64(running, int64(h.Running))
		o.ObserveInt64(stuck, int64(len(h.Stuck)))
		o.ObserveInt64(ready, isNil(h.Ready()))
		o.ObserveInt64(live, isNil(h.Live()))
		return nil
	}, inFlight, running, stuck, ready, live)
	return err
}

func isNil(err error) int64 {
	if err == nil {
		return 1
	}
	return 0
}

// Close stops the gauges. A second Close does nothing.
func (t *Observer) Close() error {
	if t.gauges == nil {
		return nil
	}
	return t.gauges.Unregister()
}

// Observe implements consumer.Observer.
func (t *Observer) Observe(ctx context.Context, e consumer.Event) {
	class := attribute.String("class", string(e.Class))
	switch e.Step {
	case consumer.StepDecide:
		t.decided(ctx, e)
	case consumer.StepShadow:
		t.shadowed.Add(ctx, 1, metric.WithAttributes(attribute.String("consumer", e.Consumer), attribute.String("outcome", decision(e.Outcome, e.Err))))
	case consumer.StepRetry:
		t.retries.Add(ctx, 1, metric.WithAttributes(class))
	case consumer.StepDeadLetter:
		t.dead.Add(ctx, 1, metric.WithAttributes(class, outcome(e.Err)))
	case consumer.StepAck:
		t.acks.Add(ctx, 1, metric.WithAttributes(outcome(e.Err)))
	case consumer.StepReturn:
		t.returned.Add(ctx, 1)
	case consumer.StepIgnore:
		t.ignored.Add(ctx, 1)
	case consumer.StepPause:
		t.pauses.Add(ctx, 1)
	case consumer.StepResume:
		t.resumes.Add(ctx, 1)
	}
}

func outcome(err error) attribute.KeyValue {
	if err != nil {
		return attribute.String("outcome", "failed")
	}
	return attribute.String("outcome", "ok")
}

// decided counts a decision. The name of the consumer is the program's.
func (t *Observer) decided(ctx context.Context, e consumer.Event) {
	word := decision(e.Outcome, e.Err)
	t.decisions.Add(ctx, 1, metric.WithAttributes(attribute.String("consumer", e.Consumer), attribute.String("outcome", word)))
	attrs := []attribute.KeyValue{t.system, attribute.String("messaging.operation.name", "process"), attribute.String("outcome", word)}
	if e.Err != nil {
		attrs = append(attrs, attribute.String("error.type", word))
	}
	t.duration.Record(ctx, e.Took.Seconds(), metric.WithAttributes(attrs...))
}

// decision is a word for what became of a delivery.
func decision(o dedupe.Outcome, err error) string {
	if err != nil {
		return string(consumer.Classify(err))
	}
	return o.String()
}
