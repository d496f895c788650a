package consumerotel

import (
	"context"
	"errors"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/envelope"
)

// Trace is middleware: it makes a span around every delivery, which what the
// handler does is a child of, and which is linked to where the message was
// created. The name of the span has the topic, or the first token of a subject:
// the others may be identities. In a run that commits in groups the span lasts as
// long as the group, and one of a message that was not run then, because of
// another one, has the attribute unecho.not_run and no error.
func (t *Observer) Trace(h consumer.Handler) consumer.Handler {
	return consumer.Chain(h, func(h consumer.Handler) consumer.Handler {
		return consumer.HandlerFunc(func(ctx context.Context, m *envelope.Message) error { return t.handle(ctx, h, m) })
	})
}

func (t *Observer) handle(ctx context.Context, h consumer.Handler, m *envelope.Message) error {
	destination, _, _ := strings.Cut(m.Topic, ".")
	attrs := []attribute.KeyValue{
		t.system, attribute.String("messaging.operation.name", "process"), attribute.String("messaging.operation.type", "process"),
		attribute.String("messaging.destination.name", destination), attribute.Int("messaging.message.body.size", len(m.Body)),
	}
	if t.o.Group != "" {
		attrs = append(attrs, attribute.String("messaging.consumer.group.name", t.o.Group))
	}
	options := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(attrs...)}
	if from := trace.SpanContextFromContext(t.o.Propagator.Extract(context.Background(), carrier{m.Header})); from.IsValid() {
		// The ids name the place; tracestate is whatever a producer has put there.
		options = append(options, trace.WithLinks(trace.Link{SpanContext: from.WithTraceState(trace.TraceState{})}))
	}
	ctx, span := t.tracer.Start(ctx, "process "+destination, options...)
	ended := false
	defer func() {
		if !ended { // a panic goes on, and its text may be anything
			span.SetAttributes(attribute.String("error.type", "panic"))
			span.SetStatus(codes.Error, "")
		}
		span.End()
	}()
	err := h.Handle(ctx, m)
	ended = true
	switch {
	case errors.Is(err, consumer.ErrNotRun):
		span.SetAttributes(attribute.Bool("unecho.not_run", true))
	case err != nil:
		span.SetAttributes(attribute.String("error.type", string(consumer.Classify(err))))
		span.SetStatus(codes.Error, "")
	}
	return err
}

// carrier reads the headers of a message: those of the broker, and the trace
// context extension of CloudEvents.
type carrier struct{ header envelope.Header }

var _ propagation.TextMapCarrier = carrier{}

// Get implements propagation.TextMapCarrier.
func (c carrier) Get(key string) string {
	for _, name := range []string{"ce_" + key, "ce-" + key, key} {
		if v, ok := c.header.Get(name); ok {
			return string(v)
		}
	}
	return ""
}

// Set implements propagation.TextMapCarrier: nothing is written to a message
// that was received.
func (carrier) Set(string, string) {}

// Keys implements propagation.TextMapCarrier.
func (c carrier) Keys() (names []string) {
	for _, h := range c.header {
		names = append(names, h.Name)
	}
	return names
}
