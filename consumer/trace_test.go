package consumer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/memdedupe"
	"github.com/unecho/unecho/envelope"
)

// TestTraces plays the scripts in testdata/traces: what is delivered, what the
// handler and the store do, and what must have become of it. A line is one of
//
//	options  batch=8 order=key attempts=3 shadow timeout=1m grace=5s crashloop
//	         set                the handler takes sets
//	         watermark          by positions alone, watermark=keys with keys
//	         route              type t has a handler, ignored is, others are unknown
//	         replay=240h keep=24h
//	handler  A fail ok          what the runs for event A do, the last one for ever;
//	                            ok, fail, permanent, panic, hang, crash, emit (an
//	                            event into an outbox), emit-fail
//	commit   A lost-after ok    what its commits do: ok, lost-before, lost-after
//	held     A 30s              another one has the key, under a lease, for so long
//	deliver  A [body=x] [key=k] [type=t]
//	                            a message, in one lane; "nameless" names no event
//	revoke                      a rebalance: all that is not settled is lost, and
//	                            delivered again
//	lane     m                  that of what is delivered from here on
//	run      1m                 time passes
//	store    down | up
//	pause | resume | drain
//	crash                       the process ends: what was not acknowledged is
//	                            delivered to a new one
//	expect   effects A B        that are committed, in order
//	expect   settled ack:A …    by this process: ack, return
//	expect   dead A:failed …    dead letters
//	expect   runs A=3           of the handler
//	expect   conflicts 1
//	expect   told shadow=2      how often a step was observed
//	expect   emitted 1          different events, over all runs
//	expect   ready | unready
//	expect   refused            Run has not begun
func TestTraces(t *testing.T) {
	files, err := filepath.Glob("testdata/traces/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			lines := readScript(t, file)
			bubble(t, func(t *testing.T) { newTrace(t).play(lines) })
		})
	}
}

type scriptLine struct {
	at    string
	words []string
}

func readScript(t *testing.T, file string) (lines []scriptLine) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	sc := bufio.NewScanner(f)
	for n := 1; sc.Scan(); n++ {
		text, _, _ := strings.Cut(sc.Text(), "#")
		if words := strings.Fields(text); len(words) > 0 {
			lines = append(lines, scriptLine{fmt.Sprintf("%s:%d", file, n), words})
		}
	}
	if err := sc.Err(); err != nil {
		t.Fatal(err)
	}
	return lines
}

// trace is one script that is played.
type trace struct {
	t       *testing.T
	o       RunOptions
	wrap    Options
	how     string // the handler's kind: "", set, watermark, watermark=keys
	route   bool
	d       *traceDriver
	control *Control
	counter *counter
	process *traceProcess

	lane      string
	names     []string                 // of the messages, by offset
	delivered []*brokers.Delivery      // in order, all of them
	claims    map[string]chan struct{} // by position: closed when the claim is lost

	mu      sync.Mutex
	acked   map[string]bool // by position, over all processes
	does    map[string][]string
	runs    map[string]int
	told    map[Step]int
	effects []string
	dead    []string
	emitted map[string]bool
}

// traceProcess is one process of the consumer. When it has died nothing it does
// is seen any more.
type traceProcess struct {
	process
	src    *scripted
	cancel context.CancelFunc
	done   chan error
}

func newTrace(t *testing.T) *trace {
	return &trace{t: t, lane: "l", d: &traceDriver{Driver: memdedupe.NewDriver(nil), does: map[string][]string{}, held: map[string]time.Time{}}, counter: &counter{starts: map[string]int{}},
		acked: map[string]bool{}, does: map[string][]string{}, runs: map[string]int{}, told: map[Step]int{}, emitted: map[string]bool{}, claims: map[string]chan struct{}{}}
}

func (x *trace) play(lines []scriptLine) {
	for _, l := range lines {
		if why := x.step(l.words); why != "" {
			x.t.Errorf("%s: %s: %s", l.at, strings.Join(l.words, " "), why)
		}
	}
	if x.process != nil {
		x.end()
	}
}

func (x *trace) step(w []string) (why string) {
	args := w[1:]
	switch w[0] {
	case "options":
		return x.options(args)
	case "handler":
		x.mu.Lock()
		defer x.mu.Unlock()
		x.does[args[0]] = args[1:]
	case "commit":
		x.d.set(func() { x.d.does[args[0]] = args[1:] })
	case "held":
		d, err := time.ParseDuration(args[1])
		if err != nil {
			return err.Error()
		}
		x.d.set(func() { x.d.held[args[0]] = time.Now().Add(d) })
	case "revoke":
		x.revoke()
	case "lane":
		x.lane = args[0]
	case "deliver":
		x.deliver(args)
	case "run":
		x.start()
		d, err := time.ParseDuration(args[0])
		if err != nil {
			return err.Error()
		}
		time.Sleep(d)
		synctest.Wait()
	case "store":
		x.d.set(func() { x.d.down = args[0] == "down" })
	case "pause":
		x.start()
		x.control.Pause()
	case "resume":
		x.control.Resume()
	case "drain":
		x.end()
	case "crash":
		x.crash()
	case "expect":
		return x.expect(args[0], args[1:])
	default:
		return "no such line"
	}
	return ""
}

func (x *trace) options(args []string) string {
	x.o.Backoff = Backoff{Min: time.Second, Max: 10 * time.Second}
	for _, a := range args {
		name, value, _ := strings.Cut(a, "=")
		d, _ := time.ParseDuration(value)
		n := 0
		_, _ = fmt.Sscan(value, &n)
		switch name {
		case "batch":
			x.o.Batch = Batch{Max: n, Wait: 10 * time.Millisecond}
		case "order":
			x.o.Order = map[string]Order{"lane": OrderByLane, "key": OrderByKey, "none": Unordered}[value]
		case "attempts":
			x.o.MaxAttempts = n
		case "timeout":
			x.o.HandlerTimeout = d
		case "grace":
			x.o.Grace = d
		case "shadow":
			x.wrap.Shadow = true
		case "set", "watermark":
			x.how = a
		case "route":
			x.route = true
		case "replay":
			x.o.Redelivery = d
		case "keep":
			x.wrap.Retain = d
		case "crashloop":
			x.o.CrashLoop = CrashLoop{Consumer: "c"}
		default:
			return "no option " + name
		}
	}
	return ""
}

func (x *trace) deliver(args []string) {
	m := &envelope.Message{ID: args[0], Source: "/s", Type: "t", Topic: "t", Body: []byte("body")}
	for _, a := range args[1:] {
		name, value, _ := strings.Cut(a, "=")
		switch name {
		case "body":
			m.Body = []byte(value)
		case "key":
			m.Key = []byte(value)
		case "type":
			m.Type = value
		}
	}
	wire := m
	if args[0] != "nameless" {
		var err error
		if wire, err = envelope.Kafka.Encode(m, envelope.Binary); err != nil {
			x.t.Fatal(err)
		}
	} else {
		wire.ID, wire.Source, wire.Type = "", "", ""
	}
	wire.Position = fmt.Sprintf("t/0/%d", len(x.names))
	x.mu.Lock()
	x.names = append(x.names, args[0])
	x.mu.Unlock()
	x.delivered = append(x.delivered, &brokers.Delivery{Message: wire, Lane: x.lane})
	if x.process != nil {
		x.hand(len(x.delivered) - 1)
	}
}

// hand gives a message to the process, as a delivery of its own.
func (x *trace) hand(i int) {
	d, lost := *x.delivered[i], make(chan struct{})
	d.Stopping, d.Lost = make(chan struct{}), lost
	x.claims[d.Message.Position] = lost
	x.process.src.feed <- &d
}

// revoke takes what is not settled away, and delivers it again.
func (x *trace) revoke() {
	for _, d := range slices.Backward(x.delivered) { // or what is behind the first one would run
		if !x.settled(d) {
			close(x.claims[d.Message.Position])
		}
	}
	synctest.Wait()
	for i, d := range x.delivered {
		if !x.settled(d) {
			x.hand(i)
		}
	}
}

func (x *trace) settled(d *brokers.Delivery) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.acked[d.Message.Position]
}

// start starts a process, if there is none, and delivers what is not acknowledged.
func (x *trace) start() {
	if x.process != nil {
		return
	}
	p := &traceProcess{process: process{counter: x.counter, died: make(chan struct{})}, src: newScripted(), done: make(chan error, 1)}
	x.process, x.control = p, &Control{}
	x.d.set(func() { x.d.died = p.died })
	for i, d := range x.delivered {
		if !x.settled(d) {
			x.hand(i)
		}
	}
	o, wrap := x.o, x.wrap
	o.DeadLetter, o.Control, o.Observer = x.letter(p), x.control, x.observer(p)
	if o.CrashLoop.Consumer != "" {
		o.CrashLoop.Counter = &p.process
	}
	h := x.wrapped(p, &wrap)
	ctx, cancel := context.WithCancel(x.t.Context())
	p.cancel = cancel
	go func() { p.done <- Run(ctx, p.src, h, &o) }()
	synctest.Wait()
}

// wrapped is the handler of its kind.
func (x *trace) wrapped(p *traceProcess, o *Options) (h Handler) {
	st, one := dedupe.NewTxStore(x.d, nil), x.handler(p)
	switch x.how {
	case "watermark":
		return WrapWatermark("c", st, one, nil)
	case "watermark=keys":
		o.Extractor = envelope.CloudEvents()
		return WrapWatermark("c", st, one, o)
	case "set":
		h = WrapBatch("c", st, func(ctx context.Context, tx *memdedupe.Tx, ms []*envelope.Message) error {
			for _, m := range ms {
				if err := one(ctx, tx, m); err != nil {
					return err
				}
			}
			return nil
		}, o)
	default:
		h = Wrap("c", st, one, o)
	}
	if x.route {
		return Route(map[string]Handler{"t": h}, &RouteOptions{Ignore: []string{"ignored"}})
	}
	return h
}

func (x *trace) observer(p *traceProcess) Observer {
	return ObserverFunc(func(_ context.Context, e Event) {
		x.mu.Lock()
		defer x.mu.Unlock()
		if closed(p.died) {
			return
		}
		x.told[e.Step]++
		if e.Step == StepAck && e.Err == nil {
			x.acked[e.Position] = true
		}
	})
}

func (x *trace) letter(p *traceProcess) DeadLetter {
	return func(_ context.Context, f *Failure) error {
		name := x.nameOf(f.Message.Position)
		x.mu.Lock()
		defer x.mu.Unlock()
		if closed(p.died) {
			return errBoom
		}
		x.dead = append(x.dead, name+":"+f.Reason)
		return nil
	}
}

func (x *trace) nameOf(position string) string {
	x.mu.Lock()
	defer x.mu.Unlock()
	n, err := strconv.Atoi(strings.TrimPrefix(position, "t/0/"))
	if err != nil {
		x.t.Error(err)
		return position
	}
	return x.names[n]
}

// next takes what is to happen next; the last one stays.
func next(does map[string][]string, name string) string {
	list := does[name]
	if len(list) == 0 {
		return "ok"
	}
	if len(list) > 1 {
		does[name] = list[1:]
	}
	return list[0]
}

func (x *trace) handler(p *traceProcess) func(context.Context, *memdedupe.Tx, *envelope.Message) error {
	return func(ctx context.Context, tx *memdedupe.Tx, m *envelope.Message) error {
		if closed(p.died) {
			return errBoom
		}
		name := x.nameOf(m.Position)
		x.mu.Lock()
		x.runs[name]++
		does := next(x.does, name)
		x.mu.Unlock()
		if err := tx.OnCommit(func() { x.mu.Lock(); defer x.mu.Unlock(); x.effects = append(x.effects, name) }); err != nil {
			return err
		}
		switch does {
		case "emit", "emit-fail":
			return x.emit(ctx, m, does)
		case "fail":
			return errBoom
		case "permanent":
			return Permanent(errBoom)
		case "panic":
			panic("boom")
		case "hang":
			<-ctx.Done()
			return ctx.Err()
		case "crash":
			p.die()
			return errBoom
		}
		return nil
	}
}

// emit makes an event that the handler would write into an outbox.
func (x *trace) emit(ctx context.Context, m *envelope.Message, does string) error {
	out, err := Caused(ctx, m, &envelope.Message{Source: "/c", Type: "caused"}, 0)
	if err != nil {
		return err
	}
	x.mu.Lock()
	x.emitted[out.ID+" of "+out.Extensions["causationid"]] = true
	x.mu.Unlock()
	if does == "emit-fail" {
		return errBoom
	}
	return nil
}

// end drains the process.
func (x *trace) end() {
	x.process.cancel()
	if err := <-x.process.done; err != nil {
		x.t.Errorf("Run: %v", err)
	}
	x.process = nil
}

// crash ends the process, which may have died already, and starts another one.
func (x *trace) crash() {
	x.process.die()
	x.end()
	x.mu.Lock()
	x.told = map[Step]int{}
	x.mu.Unlock()
	x.start()
}

func (x *trace) expect(what string, want []string) string {
	synctest.Wait()
	var settled []string
	if x.process != nil && what == "settled" {
		for _, note := range x.process.src.notes() {
			verb, position, _ := strings.Cut(note, " ")
			settled = append(settled, verb+":"+x.nameOf(position))
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	var got []string
	switch what {
	case "effects":
		got = x.effects
	case "dead":
		got = x.dead
	case "settled":
		if x.process == nil {
			return "there is no process"
		}
		got = settled
	case "runs":
		for _, w := range want {
			name, _, _ := strings.Cut(w, "=")
			got = append(got, fmt.Sprint(name, "=", x.runs[name]))
		}
	case "told":
		for _, w := range want {
			name, _, _ := strings.Cut(w, "=")
			got = append(got, fmt.Sprint(name, "=", x.told[Step(name)]))
		}
	case "conflicts":
		got = []string{fmt.Sprint(len(x.d.Conflicts()))}
	case "emitted":
		got = []string{fmt.Sprint(len(x.emitted))}
	case "refused":
		return x.refused()
	case "ready", "unready":
		if err := x.control.Health().Ready(); (err == nil) != (what == "ready") {
			return fmt.Sprintf("Ready: %v", err)
		}
		return ""
	default:
		return "nothing is known of " + what
	}
	if !slices.Equal(got, want) {
		return fmt.Sprintf("got %s", strings.Join(got, " "))
	}
	return ""
}

// refused demands that Run has ended before anything was received.
func (x *trace) refused() string {
	select {
	case err := <-x.process.done:
		if x.process = nil; !errors.Is(err, ErrShortRetention) {
			return fmt.Sprintf("Run: %v", err)
		}
		return ""
	default:
		return "it runs"
	}
}

// traceDriver is memdedupe with faults.
type traceDriver struct {
	*memdedupe.Driver
	mu   sync.Mutex
	down bool
	died chan struct{}        // of the process that runs: its transactions are rolled back
	does map[string][]string  // commits, by event
	held map[string]time.Time // until when another one has an event's key
}

func (d *traceDriver) set(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

func (d *traceDriver) fault(cs ...dedupe.Claim) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.down {
		return dedupe.ErrUnavailable
	}
	for _, c := range cs {
		if left := time.Until(d.held[c.Key.ID]); left > 0 {
			return &dedupe.HeldError{Left: left}
		}
	}
	return nil
}

func (d *traceDriver) Begin(ctx context.Context, c dedupe.Claim) (*memdedupe.Tx, *dedupe.Record, error) {
	if err := d.fault(c); err != nil {
		return nil, nil, err
	}
	return d.Driver.Begin(ctx, c)
}

func (d *traceDriver) BeginBatch(ctx context.Context, cs []dedupe.Claim) (*memdedupe.Tx, []*dedupe.Record, error) {
	if err := d.fault(cs...); err != nil {
		return nil, nil, err
	}
	return d.Driver.BeginBatch(ctx, cs)
}

func (d *traceDriver) Commit(ctx context.Context, tx *memdedupe.Tx, c dedupe.Claim, reply []byte) error {
	return d.CommitBatch(ctx, tx, []dedupe.Claim{c}, [][]byte{reply})
}

func (d *traceDriver) CommitBatch(ctx context.Context, tx *memdedupe.Tx, cs []dedupe.Claim, replies [][]byte) error {
	does := "ok"
	d.set(func() {
		if closed(d.died) {
			does = "lost-before"
			return
		}
		for _, c := range cs {
			if next := next(d.does, c.Key.ID); next != "ok" {
				does = next
			}
		}
	})
	if does == "lost-before" {
		return errors.Join(dedupe.ErrUnknownOutcome, d.Rollback(ctx, tx))
	}
	err := d.Driver.CommitBatch(ctx, tx, cs, replies)
	if does == "lost-after" && err == nil {
		return dedupe.ErrUnknownOutcome
	}
	return err
}
