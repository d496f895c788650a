package consumerotel_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/brokers/membroker"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/consumertest"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// What a message carries. None of it may be in any word of the framework's own.
var carried = []string{"canary-body", "canary-id", "canary-source", "canary-subject", "canary-key", "canary-header", "canary-extension",
	"canary-state", "canary-baggage", "canary-tenant"}

// What others say: a handler, a panic, a driver, a hook. An error that passes it
// on may show it, and telemetry may not.
var said = []string{"canary-error", "canary-panic", "canary-driver", "canary-hook"}

// leaks are the canaries that are in a text, in any form in which one gets there:
// as it is, as bytes in hexadecimal or decimal, or in base64.
func leaks(text string, canaries ...string) (found []string) {
	lower := strings.ToLower(text)
	for _, c := range canaries {
		decimal := strings.Trim(fmt.Sprintf("%d", []byte(c)), "[]")
		encoded := base64.RawStdEncoding.EncodeToString([]byte(c))
		// The last characters depend on what comes behind.
		encoded = encoded[:len(encoded)/4*4]
		if strings.Contains(lower, c) || strings.Contains(lower, hex.EncodeToString([]byte(c))) ||
			strings.Contains(text, decimal) || strings.Contains(text, encoded) {
			found = append(found, c)
		}
	}
	return found
}

// wayward is a store that fails where an id says so: a commit whose answer is lost
// once, a key that is parked always, and what else it refuses so often that a group
// has been divided, and the culprit met it alone.
type wayward struct {
	dedupe.Store[*memdedupe.Tx]
	dedupe.Batcher[*memdedupe.Tx]
	mu   sync.Mutex
	seen map[string]int
}

// refusals are more than a group of 4 takes to be divided.
const refusals = 6

func newWayward() *wayward {
	st := memdedupe.NewStore(nil)
	return &wayward{Store: st, Batcher: st.(dedupe.Batcher[*memdedupe.Tx]), seen: map[string]int{}}
}

// refuse is why a claim is not even tried, if it is not.
func (w *wayward) refuse(c dedupe.Claim) error {
	return w.fault(c, refusals, map[string]error{"outage": dedupe.ErrUnavailable, "contended": dedupe.ErrContention,
		"busy": dedupe.ErrInProgress, "parked": dedupe.ErrParked, "reply": dedupe.ErrReplyTooLarge})
}

// Probe is out for as long as the claim of the outage is.
func (w *wayward) Probe(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := w.seen["outage"]; n > 0 && n < refusals {
		return fmt.Errorf("%w: canary-driver", dedupe.ErrUnavailable)
	}
	return nil
}

// lose is that the answer to a commit is lost, if it is.
func (w *wayward) lose(c dedupe.Claim) error {
	return w.fault(c, 1, map[string]error{"unknown": dedupe.ErrUnknownOutcome})
}

func (w *wayward) fault(c dedupe.Claim, times int, kinds map[string]error) error {
	name := strings.TrimPrefix(c.Key.ID, "canary-id-")
	w.mu.Lock()
	defer w.mu.Unlock()
	if kinds[name] == nil || w.seen[name] >= times && name != "parked" {
		return nil
	}
	w.seen[name]++
	return fmt.Errorf("%w: canary-driver", kinds[name])
}

func (w *wayward) Once(ctx context.Context, c dedupe.Claim, fn func(context.Context, *memdedupe.Tx) ([]byte, error)) (dedupe.Result, error) {
	if err := w.refuse(c); err != nil {
		return dedupe.Result{}, err
	}
	res, err := w.Store.Once(ctx, c, fn)
	if err == nil {
		err = w.lose(c)
	}
	return res, err
}

func (w *wayward) OnceEach(ctx context.Context, cs []dedupe.Claim, fn func(context.Context, *memdedupe.Tx, []int) ([][]byte, error)) ([]dedupe.Answer, error) {
	for _, c := range cs {
		if err := w.refuse(c); err != nil {
			return nil, err
		}
	}
	answers, err := w.Batcher.OnceEach(ctx, cs, fn)
	for _, c := range cs {
		if err == nil {
			err = w.lose(c)
		}
	}
	return answers, err
}

// scene is one run that meets every step, and all that came of it.
type scene struct {
	*bench
	broker *membroker.Broker
	mode   mode
	sent   int

	mu      sync.Mutex
	steps   map[consumer.Step]int
	classes map[consumer.Class]int
	hashes  []string        // of keys
	words   strings.Builder // of the framework: events and errors
	hooked  int
	runs    map[string]int
	cut     bool
}

const leakTopic = "orders"

// mode is how a run handles.
type mode struct {
	batch  consumer.Batch
	shadow bool
}

// fatal is a counter of starts that has seen the process end at one place.
type fatal struct{ place string }

func (c fatal) Start(_ context.Context, places []string, most int) ([]int, error) {
	n := make([]int, len(places))
	for i, p := range places {
		if n[i] = 1; p == c.place {
			n[i] = most + 1
		}
	}
	return n, nil
}

func (fatal) End(context.Context, []string) error { return nil }

// send publishes an event that is made of canaries.
func (s *scene) send(t *testing.T, name, typ, body string) {
	t.Helper()
	m := &envelope.Message{ID: "canary-id-" + name, Source: "/canary-source", Type: typ, Subject: "canary-subject", ContentType: "application/json",
		Topic: leakTopic, Key: []byte("canary-key"), Body: []byte(body), Extensions: map[string]string{"note": "canary-extension"}}
	m.Header.Add("x-secret", []byte("canary-header"))
	m.Header.Add("traceparent", []byte("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
	m.Header.Add("tracestate", []byte("vendor=canary-state"))
	m.Header.Add("baggage", []byte("user=canary-baggage"))
	s.raw(t, m)
}

func (s *scene) raw(t *testing.T, m *envelope.Message) {
	t.Helper()
	s.sent++
	if err := s.broker.Publisher().Publish(t.Context(), []*envelope.Message{m}).Err(); err != nil {
		t.Fatal(err)
	}
}

// sendEverything sends one message for each thing that can happen to one.
func (s *scene) sendEverything(t *testing.T) {
	t.Helper()
	const good, other = `{"name":"canary-body"}`, `{"name":"canary-body","more":1}`
	for _, name := range []string{"new", "new", "flaky", "fails", "permanent", "panics", "breaks", "slow", "down", "cut",
		"unknown", "outage", "contended", "busy", "parked", "reply"} {
		s.send(t, name, "order.placed", good)
	}
	s.send(t, "new", "order.placed", other) // a conflict
	s.send(t, "ignored", "order.seen", good)
	for _, body := range []string{`canary-body`, `{"name":7,"canary-body":1}`, `{"name":["canary-body"]}`, `{"name":"x"} "canary-body"`, `{"n":{"canary-body":"x"}}`} {
		s.send(t, "unreadable "+body[:3]+fmt.Sprint(len(body)), "order.placed", body)
	}
	s.send(t, strings.Repeat("long", 600), "order.placed", good)
	for _, m := range broken() {
		m.Topic, m.Key = leakTopic, []byte("canary-key")
		s.raw(t, m)
	}
	s.send(t, "fatal", "order.placed", good)
}

// broken are envelopes that cannot be read, and canaries wherever they are wrong.
func broken() (ms []*envelope.Message) {
	const id, src, typ, version = "canary-id", "/canary-source", "order.placed", "1.0"
	lines := func(pairs ...string) *envelope.Message {
		m := &envelope.Message{Body: []byte("canary-body")}
		for i := 0; i < len(pairs); i += 2 {
			m.Header.Add(pairs[i], []byte(pairs[i+1]))
		}
		return m
	}
	structured := func(body string) *envelope.Message {
		m := lines("content-type", "application/cloudevents+json")
		m.Body = []byte(body)
		return m
	}
	return append(ms,
		lines(),
		lines("x-secret", "canary-header"),
		lines("ce_specversion", version, "ce_id", id, "ce_type", typ),
		lines("ce_specversion", version, "ce_source", src, "ce_type", typ, "ce_subject", "canary-subject"),
		lines("ce_specversion", "canary-header", "ce_id", id, "ce_source", src, "ce_type", typ),
		lines("ce_specversion", version, "ce_id", id, "ce_source", src, "ce_type", typ, "ce_time", "canary-header"),
		lines("ce_specversion", version, "ce_id", id, "ce_id", id+" another", "ce_source", src, "ce_type", typ),
		lines("ce_specversion", version, "ce_id", id+"\x01", "ce_source", src, "ce_type", typ),
		lines("ce_specversion", version, "ce_id", id, "ce_source", src+" ", "ce_type", typ, "ce_note", "canary-extension\xff"),
		lines("ce_specversion", version, "ce_id", id, "ce_source", src, "ce_type", typ, "ce_Canary-Header", "canary-header"),
		lines("content-type", "application/cloudevents-batch+json"),
		lines("content-type", "application/cloudevents+canary-header"),
		lines("content-type", "canary-header;;=", "ce_id", id),
		structured(`{"specversion":"1.0","id":"canary-id","source":"/canary-source"`),
		structured(`["canary-body"]`),
		structured(`{"specversion":"1.0","id":{"canary-id":1},"source":"/canary-source","type":"t"}`),
		structured(`{"specversion":"1.0","id":"canary-id","id":"canary-id 2","source":"/canary-source","type":"t"}`),
		structured(`{"specversion":"1.0","id":"canary-id","source":"/canary-source","type":"t","data_base64":"canary-body!"}`),
		structured(`{"specversion":"1.0","id":"canary-id","source":"/canary-source","type":"t","canary-extension":{"canary-extension":1}}`),
		structured(`{"specversion":"1.0","id":"canary-id","source":"/canary-source","type":"t","data":1,"data_base64":"Y2FuYXJ5"}`),
	)
}

// payload is what bodies should be.
type payload struct {
	Name string         `json:"name"`
	N    map[string]int `json:"n"`
}

// handle does what the id says, and fails in the words of a handler.
func (s *scene) handle(ctx context.Context, _ *memdedupe.Tx, m *envelope.Message, _ payload) error {
	name := strings.TrimPrefix(m.ID, "canary-id-")
	s.mu.Lock()
	s.runs[name]++
	first := s.runs[name] == 1
	s.mu.Unlock()
	switch name {
	case "flaky":
		if first {
			return errors.New("canary-error")
		}
	case "fails":
		return errors.New("canary-error")
	case "permanent":
		return consumer.Permanent(errors.New("canary-error"))
	case "panics":
		panic("canary-panic")
	case "breaks":
		panic(errors.New("canary-panic"))
	case "slow":
		<-ctx.Done()
		return ctx.Err()
	case "down":
		if first {
			return consumer.Unavailable(errors.New("canary-error"))
		}
	case "cut":
		if first { // the claim is taken away while it runs
			s.broker.Rebalance(leakTopic, "g")
			<-ctx.Done()
			return ctx.Err()
		}
	}
	return nil
}

// Observe implements consumer.Observer.
func (s *scene) Observe(ctx context.Context, e consumer.Event) {
	s.bench.Observe(ctx, e)
	h := s.control.Health()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.steps[e.Step]++
	s.classes[e.Class]++
	if e.KeyHash != "" {
		s.hashes = append(s.hashes, e.KeyHash[strings.LastIndexByte(e.KeyHash, '/')+1:])
	}
	fmt.Fprintf(&s.words, "%+v\n", e)
	for _, err := range []error{e.Err, h.Ready(), h.Live(), h.ShortRetention} {
		if err != nil {
			fmt.Fprintf(&s.words, "%v: %v\n%+v\n", e.Step, err, err)
		}
	}
}

// deadLetter fails once, and writes down what a person is told.
func (s *scene) deadLetter(_ context.Context, f *consumer.Failure) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(&s.words, "dead letter: %s %s %d %v\n", f.Class, f.Reason, f.Attempts, f.Err)
	if s.hooked++; s.hooked == 1 {
		return errors.New("canary-hook")
	}
	return nil
}

// play runs it all.
func play(t *testing.T, how mode) *scene {
	t.Helper()
	s := &scene{bench: open(t), broker: membroker.New(), mode: how, steps: map[consumer.Step]int{}, classes: map[consumer.Class]int{}, runs: map[string]int{}}
	s.broker.CreateTopic(leakTopic, 1)
	s.broker.SetFaults(membroker.Faults{Crash: func(d *brokers.Delivery, acking bool) (bool, int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		crash := acking && !s.cut // the acknowledgement of the first one is lost with its claim
		s.cut = s.cut || acking
		return crash, 0
	}})
	s.sendEverything(t)
	var store dedupe.Store[*memdedupe.Tx] = newWayward()
	h := consumer.Wrap("billing", store, consumer.Typed(consumer.StrictJSON, s.handle),
		&consumer.Options{Tenant: "canary-tenant", Retain: time.Hour, Content: consumer.JSONContent, Shadow: how.shadow})
	if how.batch.Max == 0 {
		h = s.Trace(consumer.Route(map[string]consumer.Handler{"order.placed": h}, &consumer.RouteOptions{Ignore: []string{"order.seen"}}))
	}
	consumertest.Drain(t, s.broker, leakTopic, "g", h, &consumertest.DrainOptions{Run: consumer.RunOptions{
		Observer: s, Control: s.control, DeadLetter: s.deadLetter, Batch: how.batch,
		CrashLoop:   consumer.CrashLoop{Counter: fatal{fmt.Sprintf("billing\x00%s/0/%d", leakTopic, s.sent-1)}, Consumer: "billing"},
		MaxAttempts: 2, HandlerTimeout: 30 * time.Millisecond, Redelivery: 2 * time.Hour, AcceptShortRetention: true}})
	return s
}

// telemetry is every word that leaves the process: all of metrics, and of spans.
func (s *scene) telemetry(t *testing.T) string {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := s.metrics.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	metrics, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%s\n%+v\n", metrics, all)
	for _, span := range s.spans.GetSpans() {
		fmt.Fprintf(&out, "%s %+v\n", span.Name, span)
		for _, l := range span.Links {
			fmt.Fprintln(&out, l.SpanContext.TraceState().String(), l.Attributes)
		}
		for _, e := range span.Events {
			fmt.Fprintln(&out, e.Name, e.Attributes)
		}
		for _, kv := range append(span.Attributes, span.Resource.Attributes()...) {
			fmt.Fprintln(&out, kv.Key, kv.Value.String())
		}
	}
	return out.String()
}

// captureLogs makes the default logger, of slog and of log, write to the buffer
// that it returns, at every level.
func captureLogs(t *testing.T) *bytes.Buffer {
	t.Helper()
	buf, before := &bytes.Buffer{}, slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(buf, &slog.HandlerOptions{Level: slog.LevelDebug - 10})))
	t.Cleanup(func() { slog.SetDefault(before) })
	return buf
}

// Every step of every delivery is met, and nothing of a message, of an error or
// of a key is in a metric, a span or a log; and nothing of a message is in what
// the framework says itself, to an observer, to a dead letter or to a probe.
func TestNothingLeaks(t *testing.T) {
	for name, how := range map[string]mode{"one by one": {}, "in groups": {batch: consumer.Batch{Max: 4, Wait: time.Millisecond}}, "in shadow": {shadow: true}} {
		t.Run(name, func(t *testing.T) {
			logs := captureLogs(t)
			s := play(t, how)
			s.wantEverything(t)
			out := s.telemetry(t)
			for _, c := range leaks(out, append(slices.Clone(carried), said...)...) {
				t.Errorf("telemetry has %q: %s", c, around(out, c))
			}
			for _, hash := range s.hashes {
				if strings.Contains(out, hash) {
					t.Fatalf("telemetry has the hash of a key: %s", around(out, hash))
				}
			}
			if strings.Contains(out, leakTopic+"/0") {
				t.Errorf("telemetry has a position: %s", around(out, leakTopic+"/0"))
			}
			words := s.words.String()
			for _, c := range leaks(words, carried...) {
				t.Errorf("the framework says %q: %s", c, around(words, c))
			}
			if leaks(words, said...) == nil {
				t.Error("no error of others was passed on: the canaries are not where they should be")
			}
			if logs.Len() > 0 {
				t.Errorf("the library logs: %s", logs)
			}
		})
	}
}

// around is where a text has a canary.
func around(text, c string) string {
	i := strings.Index(strings.ToLower(text), c)
	if i < 0 {
		return "encoded"
	}
	return "…" + text[max(0, i-150):min(len(text), i+len(c)+80)] + "…"
}

// wantEverything demands that the run has met all there is, or it shows nothing.
func (s *scene) wantEverything(t *testing.T) {
	t.Helper()
	steps := []consumer.Step{consumer.StepRetention, consumer.StepReceive, consumer.StepIdentify, consumer.StepHandle, consumer.StepDecide,
		consumer.StepRetry, consumer.StepPause, consumer.StepResume, consumer.StepDeadLetter, consumer.StepAck, consumer.StepReturn}
	if s.mode.batch.Max == 0 {
		steps = append(steps, consumer.StepIgnore)
		if len(s.spans.GetSpans()) == 0 {
			t.Error("there are no spans")
		}
	}
	if s.mode.shadow {
		steps = append(steps, consumer.StepShadow)
	}
	for _, step := range steps {
		if s.steps[step] == 0 {
			t.Errorf("the run has not met the step %q", step)
		}
	}
	for _, class := range []consumer.Class{consumer.ClassFailed, consumer.ClassPermanent, consumer.ClassMalformed, consumer.ClassUncertain,
		consumer.ClassInProgress, consumer.ClassContention, consumer.ClassUnknown, consumer.ClassUnavailable, consumer.ClassCrashLoop} {
		if s.classes[class] == 0 {
			t.Errorf("the run has not met the class %q", class)
		}
	}
	for _, outcome := range []string{"processed", "duplicate", "conflict"} {
		if !strings.Contains(s.telemetry(t), outcome) {
			t.Errorf("the run has no outcome %q", outcome)
		}
	}
	if !strings.Contains(s.words.String(), brokers.ErrLost.Error()) {
		t.Error("no acknowledgement was lost")
	}
}

// What looks for leaks finds them, in whatever form they come.
func TestLeaksAreFound(t *testing.T) {
	const c = "canary-body"
	for _, text := range []string{
		"x canary-body y", "CANARY-BODY", fmt.Sprintf("%x", []byte(c)), fmt.Sprintf("%X", c), fmt.Sprintf("%d", []byte("a "+c)), fmt.Sprintf("%+v", struct{ B []byte }{[]byte(c)}),
		base64.StdEncoding.EncodeToString([]byte(c + " and more")),
	} {
		if !slices.Equal(leaks(text, carried...), []string{c}) {
			t.Errorf("%q shows %q", text, leaks(text, carried...))
		}
	}
	if found := leaks("canary canary-bod", carried...); found != nil {
		t.Errorf("found %q", found)
	}
}
