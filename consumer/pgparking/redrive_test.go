package pgparking_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/envelope"
)

type handle = func(ctx context.Context, tx pgx.Tx, m *envelope.Message) error

// effect is a handler that leaves a row.
func effect(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
	_, err := tx.Exec(ctx, "insert into effect values ($1, $2)", m.ID, string(m.Body))
	return err
}

func fails(context.Context, pgx.Tx, *envelope.Message) error { return errBoom }

// withEffects also has keys and a table for effects.
func withEffects(t *testing.T) *fixture {
	t.Helper()
	f := newFixture(t)
	if err := pgdedupe.Migrate(t.Context(), f.pool, nil); err != nil {
		t.Fatal(err)
	}
	f.exec("create table effect (id text, body text)")
	return f
}

func (f *fixture) wrap(h handle) consumer.Handler {
	return consumer.Wrap("billing", pgdedupe.NewStore(f.pool, nil), h, nil)
}

// redrive redrives and wants this outcome of each.
func (f *fixture) redrive(h consumer.Handler, o *consumer.RedriveOptions, want consumer.RedriveOutcome, ids ...string) []consumer.Redelivery {
	f.t.Helper()
	answers, err := consumer.Redrive(f.t.Context(), f.lot, h, o, ids...)
	if err != nil {
		f.t.Fatal(err)
	}
	for i, a := range answers {
		if a.Outcome != want || a.ID != ids[i] {
			f.t.Errorf("%s: %s, %v; want %s", a.ID, a.Outcome, a.Err, want)
		}
	}
	return answers
}

func (f *fixture) wantState(id string, state consumer.ParkedState, attempts int) *consumer.Parked {
	f.t.Helper()
	p := f.find(id)
	if p.State != state || p.Attempts != attempts || p.SettledAt.IsZero() != (state == consumer.ParkedWaiting) {
		f.t.Errorf("it is %s after %d attempts, settled %v; want %s, %d", p.State, p.Attempts, p.SettledAt, state, attempts)
	}
	return p
}

func TestRedriveRunsWhatFailed(t *testing.T) {
	f := withEffects(t)
	p := f.park(wire(t, "1", "x"))
	f.redrive(f.wrap(func(context.Context, pgx.Tx, *envelope.Message) error { return errors.New("still broken") }), nil, consumer.RedriveFailed, p.ID)
	if p := f.wantState(p.ID, consumer.ParkedWaiting, 11); p.Error != "still broken" || p.Class != consumer.ClassFailed {
		t.Errorf("after a failure it is %+v", p)
	}
	f.redrive(f.wrap(func(context.Context, pgx.Tx, *envelope.Message) error { return consumer.Permanent(errBoom) }), nil, consumer.RedriveFailed, p.ID)
	if p := f.wantState(p.ID, consumer.ParkedWaiting, 12); p.Class != consumer.ClassPermanent || p.Reason != "permanent" {
		t.Errorf("after a permanent failure it is %+v", p)
	}
	f.redrive(f.wrap(func(context.Context, pgx.Tx, *envelope.Message) error { panic("boom") }), nil, consumer.RedriveFailed, p.ID)
	f.redrive(f.wrap(effect), nil, consumer.RedriveDone, p.ID)
	f.wantState(p.ID, consumer.ParkedRedriven, 13)
	f.wantInt(1, "select count(*) from effect where id = '1' and body = 'x'")
	answers := f.redrive(f.wrap(effect), nil, consumer.RedriveRefused, p.ID, strings.Repeat("0", 32))
	if !errors.Is(answers[0].Err, consumer.ErrParkedChanged) || !errors.Is(answers[1].Err, consumer.ErrNotParked) {
		t.Errorf("refused with %v and %v", answers[0].Err, answers[1].Err)
	}
	// And a redelivery of it finds the key.
	if err := f.wrap(effect).Handle(t.Context(), wire(t, "1", "x")); err != nil {
		t.Error(err)
	}
	f.wantInt(1, "select count(*) from effect")
}

// The crash between the effect and the note of it: what was done is skipped.
func TestRedriveSkipsWhatIsDone(t *testing.T) {
	f := withEffects(t)
	p := f.park(wire(t, "1", "x"))
	if err := f.wrap(effect).Handle(t.Context(), wire(t, "1", "x")); err != nil {
		t.Fatal(err)
	}
	f.redrive(f.wrap(effect), nil, consumer.RedriveSkipped, p.ID)
	f.wantState(p.ID, consumer.ParkedSkipped, 10)
	f.wantInt(1, "select count(*) from effect")
}

// What is suppressed by a redrive is suppressed in shadow mode, too.
func TestRedriveIsNotInShadow(t *testing.T) {
	f := withEffects(t)
	h := consumer.Wrap("billing", pgdedupe.NewStore(f.pool, nil), effect, &consumer.Options{Shadow: true})
	p := f.park(wire(t, "1", "x"))
	if err := h.Handle(t.Context(), wire(t, "1", "x")); err != nil {
		t.Fatal(err)
	}
	f.redrive(h, nil, consumer.RedriveSkipped, p.ID)
	f.wantInt(1, "select count(*) from effect")
}

func TestRedriveReportsConflicts(t *testing.T) {
	f := withEffects(t)
	p := f.park(wire(t, "1", "x"))
	if err := f.wrap(effect).Handle(t.Context(), wire(t, "1", "another content")); err != nil {
		t.Fatal(err)
	}
	f.redrive(f.wrap(effect), nil, consumer.RedriveConflict, p.ID)
	if p := f.wantState(p.ID, consumer.ParkedWaiting, 10); p.Reason != consumer.ReasonConflict {
		t.Errorf("it is %+v", p)
	}
	f.wantInt(1, "select count(*) from effect")
	f.wantInt(1, "select count(*) from unecho_conflict")
}

// B48: the key of what was parked for longer than keys are kept may be pruned, and
// the effect may be there.
func TestB48LateRedrivesAreRefused(t *testing.T) {
	f := withEffects(t)
	p := f.park(wire(t, "1", "x"))
	h := consumer.Wrap("billing", pgdedupe.NewStore(f.pool, nil), effect, &consumer.Options{Retain: time.Hour})
	f.exec("update unecho_parked set parked_at = now() - interval '59 minutes'")
	f.redrive(h, nil, consumer.RedriveDone, p.ID)

	late := f.park(wire(t, "2", "x"))
	f.exec("update unecho_parked set parked_at = now() - interval '61 minutes', last_at = now() where id = $1", late.ID)
	routed := consumer.Route(map[string]consumer.Handler{"placed": consumer.Chain(h)}, nil)
	for _, h := range []consumer.Handler{h, consumer.Chain(h, func(h consumer.Handler) consumer.Handler { return consumer.HandlerFunc(h.Handle) }), routed} {
		a := f.redrive(h, nil, consumer.RedriveRefused, late.ID)[0]
		if !errors.Is(a.Err, consumer.ErrLateRedrive) || !strings.Contains(a.Err.Error(), "1h1m0") || !strings.Contains(a.Err.Error(), "kept for 1h0m0s") {
			t.Errorf("the refusal does not name both durations: %v", a.Err)
		}
	}
	f.wantInt(1, "select count(*) from effect")
	f.wantState(late.ID, consumer.ParkedWaiting, 10)
	f.redrive(h, &consumer.RedriveOptions{AcceptLate: true}, consumer.RedriveDone, late.ID)
	f.wantInt(2, "select count(*) from effect")
}

// Two people redrive one message at once, on two sides of the lock on its key.
func TestConcurrentRedrivesHaveOneEffect(t *testing.T) {
	f := withEffects(t)
	const people, messages = 6, 5
	var ids []string
	for i := range messages {
		ids = append(ids, f.park(wire(t, fmt.Sprint(i), "x")).ID)
	}
	var done, other atomic.Int64
	var wg sync.WaitGroup
	for range people {
		wg.Go(func() {
			answers, err := consumer.Redrive(context.Background(), f.lot, f.wrap(effect), nil, ids...)
			if err != nil {
				t.Error(err)
			}
			for _, a := range answers {
				switch a.Outcome {
				case consumer.RedriveDone:
					done.Add(1)
				case consumer.RedriveSkipped, consumer.RedriveRefused:
					other.Add(1)
				default:
					t.Errorf("%s, %v", a.Outcome, a.Err)
				}
			}
		})
	}
	wg.Wait()
	if done.Load() != messages || other.Load() != messages*(people-1) {
		t.Errorf("%d were redriven and %d not; want %d and %d", done.Load(), other.Load(), messages, messages*(people-1))
	}
	f.wantInt(messages, "select count(*) from effect")
	for _, id := range ids {
		f.wantState(id, consumer.ParkedRedriven, 10)
	}
}

// slow is a lot whose first Update waits until it may.
type slow struct {
	*pgparking.Lot
	once    sync.Once
	arrived chan struct{}
	may     chan struct{}
}

func (s *slow) Update(ctx context.Context, p *consumer.Parked) error {
	s.once.Do(func() {
		close(s.arrived)
		<-s.may
	})
	return s.Lot.Update(ctx, p)
}

// What a redrive found out is written down late, after what another one, or a
// person, has decided meanwhile.
func TestLateNotesDoNotUndo(t *testing.T) {
	for name, c := range map[string]struct {
		first     handle
		meanwhile func(f *fixture, id string)
		state     consumer.ParkedState
		attempts  int
		effects   int
	}{
		"a failure after a success":  {fails, func(f *fixture, id string) { f.redrive(f.wrap(effect), nil, consumer.RedriveDone, id) }, consumer.ParkedRedriven, 10, 1},
		"a success after a skip":     {effect, func(f *fixture, id string) { f.redrive(f.wrap(effect), nil, consumer.RedriveSkipped, id) }, consumer.ParkedRedriven, 10, 1},
		"two failures":               {fails, func(f *fixture, id string) { f.redrive(f.wrap(fails), nil, consumer.RedriveFailed, id) }, consumer.ParkedWaiting, 12, 0},
		"a failure after a decision": {fails, func(f *fixture, id string) { f.discard(id) }, consumer.ParkedDiscarded, 10, 0},
		"a success after a decision": {effect, func(f *fixture, id string) { f.discard(id) }, consumer.ParkedRedriven, 10, 1},
		"a success after a redelivery": {effect, func(f *fixture, id string) {
			f.park(f.find(id).Message)
		}, consumer.ParkedRedriven, 10, 1},
	} {
		t.Run(name, func(t *testing.T) {
			f := withEffects(t)
			p := f.park(wire(t, "1", "x"))
			lot := &slow{Lot: f.lot, arrived: make(chan struct{}), may: make(chan struct{})}
			end := make(chan error, 1)
			go func() {
				_, err := consumer.Redrive(context.Background(), lot, f.wrap(c.first), nil, p.ID)
				end <- err
			}()
			<-lot.arrived
			c.meanwhile(f, p.ID)
			close(lot.may)
			if err := <-end; err != nil {
				t.Error(err)
			}
			f.wantState(p.ID, c.state, c.attempts)
			f.wantInt(c.effects, "select count(*) from effect")
		})
	}
}

func (f *fixture) discard(id string) {
	f.t.Helper()
	if err := consumer.DiscardParked(f.t.Context(), f.lot, id); err != nil {
		f.t.Fatal(err)
	}
}

// An edit while the handler runs cannot be undone, and the person is told.
func TestRedriveOfWhatIsEditedMeanwhile(t *testing.T) {
	f := withEffects(t)
	p := f.park(wire(t, "1", "x"))
	var into string
	a := f.redrive(f.wrap(func(ctx context.Context, tx pgx.Tx, m *envelope.Message) (err error) {
		into, err = consumer.Edit(ctx, f.lot, p.ID, func(m *envelope.Message) error { m.Body = []byte("y"); return nil }, nil)
		return errors.Join(err, effect(ctx, tx, m))
	}), nil, consumer.RedriveDone, p.ID)[0]
	if !errors.Is(a.Err, consumer.ErrParkedChanged) || !strings.Contains(a.Err.Error(), into) {
		t.Errorf("told %v, want ErrParkedChanged and the id of the copy", a.Err)
	}
	f.wantState(p.ID, consumer.ParkedEdited, 10)
}

// says is a store that answers every claim with err.
type says struct{ err error }

func (s says) Once(context.Context, dedupe.Claim, func(context.Context, pgx.Tx) ([]byte, error)) (dedupe.Result, error) {
	return dedupe.Result{}, s.err
}

// What is no fault of the message leaves it as it was.
func TestRedriveSpendsNothingOnOutages(t *testing.T) {
	f := withEffects(t)
	first, second := f.park(wire(t, "1", "x")), f.park(wire(t, "2", "x"))
	for _, err := range []error{dedupe.ErrUnknownOutcome, dedupe.ErrInProgress, dedupe.ErrContention} {
		h := consumer.Wrap("billing", says{fmt.Errorf("x: %w", err)}, func(context.Context, pgx.Tx, *envelope.Message) error { return nil }, nil)
		f.redrive(h, nil, consumer.RedriveUndecided, first.ID, second.ID)
	}
	ctx, cancel := context.WithCancel(t.Context())
	for name, c := range map[string]struct {
		ctx context.Context
		h   handle
	}{
		"an outage": {t.Context(), func(context.Context, pgx.Tx, *envelope.Message) error { return consumer.Unavailable(errBoom) }},
		"the end": {ctx, func(ctx context.Context, _ pgx.Tx, _ *envelope.Message) error {
			cancel()
			return ctx.Err()
		}},
	} {
		runs := 0
		answers, err := consumer.Redrive(c.ctx, f.lot, f.wrap(func(ctx context.Context, tx pgx.Tx, m *envelope.Message) error {
			runs++
			return c.h(ctx, tx, m)
		}), nil, first.ID, second.ID)
		if err == nil || len(answers) != 2 || answers[0].Outcome != consumer.RedriveNotRun || answers[1].Outcome != consumer.RedriveNotRun || runs != 1 {
			t.Errorf("%s: %v, %v after %d runs", name, answers, err, runs)
		}
	}
	for _, p := range []*consumer.Parked{first, second} {
		if now := f.find(p.ID); now.Version != 1 || now.Error != "boom" {
			t.Errorf("it is %+v", now)
		}
	}
}

func TestRedriveRefusesOtherHandlers(t *testing.T) {
	f := withEffects(t)
	p := f.park(wire(t, "1", "x"))
	email := consumer.Wrap("email", pgdedupe.NewStore(f.pool, nil), effect, nil)
	if a := f.redrive(email, nil, consumer.RedriveRefused, p.ID)[0]; !errors.Is(a.Err, consumer.ErrOtherConsumer) {
		t.Errorf("another consumer: %v", a.Err)
	}
	naked := consumer.HandlerFunc(func(context.Context, *envelope.Message) error { t.Error("it ran without a key"); return nil })
	if answers, err := consumer.Redrive(t.Context(), f.lot, naked, nil, p.ID); err == nil || answers != nil {
		t.Errorf("without Wrap: %v, %v; want an error", answers, err)
	}
	deaf := consumer.Chain(f.wrap(effect), func(consumer.Handler) consumer.Handler {
		return consumer.HandlerFunc(func(context.Context, *envelope.Message) error { return nil })
	})
	ignores := consumer.Route(map[string]consumer.Handler{"other": f.wrap(effect)}, &consumer.RouteOptions{Ignore: []string{"placed"}})
	for _, h := range []consumer.Handler{deaf, ignores} {
		if a := f.redrive(h, nil, consumer.RedriveRefused, p.ID)[0]; !errors.Is(a.Err, consumer.ErrUndeduplicated) {
			t.Errorf("nobody asked the store: %v", a.Err)
		}
	}
	f.wantState(p.ID, consumer.ParkedWaiting, 10)
	f.redrive(consumer.Route(map[string]consumer.Handler{"placed": email, "other": f.wrap(effect)}, nil), nil, consumer.RedriveDone, p.ID)
}

// A key that is parked in a store of leases has to be released first.
func TestRedriveOfAParkedKey(t *testing.T) {
	f := withEffects(t)
	o := &pgdedupe.LeaseOptions{Lease: dedupe.LeaseOptions{Unknown: dedupe.Park}}
	runs := 0
	h := consumer.Wrap("billing", pgdedupe.NewLeaseStore(f.pool, o), func(context.Context, *dedupe.Lease, *envelope.Message) error { runs++; return nil }, nil)
	key := dedupe.Key{Consumer: "billing", Source: "/shop", ID: "1"}
	m := wire(t, "1", "x")
	c, err := dedupe.Claim{Key: key, Fingerprint: dedupe.Fingerprint(key, []byte("placed"), m.Body)}.Normal()
	if err != nil {
		t.Fatal(err)
	}
	driver := pgdedupe.NewLeaseDriver(f.pool, nil)
	g, _, err := driver.Acquire(t.Context(), c, "a", time.Minute)
	if err := errors.Join(err, driver.Release(t.Context(), key, "a", g.Token, dedupe.StateParked)); err != nil {
		t.Fatal(err)
	}
	p := f.park(m)
	a := f.redrive(h, nil, consumer.RedriveRefused, p.ID)[0]
	if !errors.Is(a.Err, dedupe.ErrParked) || !strings.Contains(a.Err.Error(), "Release") || runs != 0 {
		t.Errorf("%v after %d runs", a.Err, runs)
	}
	f.wantState(p.ID, consumer.ParkedWaiting, 10)
	if err := pgdedupe.NewAdmin(f.pool, nil).Release(t.Context(), key.Stored()); err != nil {
		t.Fatal(err)
	}
	f.redrive(h, nil, consumer.RedriveDone, p.ID)
	if runs != 1 {
		t.Errorf("%d runs", runs)
	}
}

// An edited message is another event, which says of which one it is a copy.
func TestEdit(t *testing.T) {
	f := withEffects(t)
	original := wire(t, "1", "x")
	original.Header.Add("ce_correlationid", []byte("order-7"))
	original.Header.Add("trace", []byte{0, 0xff})
	p := f.park(original)
	if _, err := consumer.Edit(t.Context(), f.lot, p.ID, func(*envelope.Message) error { return errBoom }, nil); !errors.Is(err, errBoom) {
		t.Errorf("an error of change: %v", err)
	}
	if _, err := consumer.Edit(t.Context(), f.lot, p.ID, func(m *envelope.Message) error { m.ID = "1"; return nil }, nil); !errors.Is(err, consumer.ErrSameIdentity) {
		t.Errorf("the old identity: %v, want ErrSameIdentity", err)
	}
	if now := f.find(p.ID); now.Version != 1 {
		t.Fatalf("an edit that failed changed %+v", now)
	}
	into, err := consumer.Edit(t.Context(), f.lot, p.ID, func(m *envelope.Message) error { m.Body = []byte("mended"); return nil }, nil)
	if err != nil {
		t.Fatal(err)
	}
	if now := f.wantState(p.ID, consumer.ParkedEdited, 10); now.EditedInto != into || string(now.Message.Body) != "x" {
		t.Errorf("the original is %+v", now)
	}
	next := f.wantState(into, consumer.ParkedWaiting, 0)
	m, err := envelope.Decode(next.Message)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"unechoeditof": "1", "unechoeditofsource": "/shop", "causationid": "1", "correlationid": "order-7"}
	if next.EditOf != p.ID || m.ID == "1" || m.ID == "" || m.Source != "/shop" || string(m.Body) != "mended" || m.Topic != "orders" || !maps.Equal(m.Extensions, want) {
		t.Errorf("the copy is %+v with %+v", next, m)
	}
	if v, _ := m.Header.Get("trace"); !slices.Equal(v, []byte{0, 0xff}) {
		t.Errorf("the header came out as %v", m.Header)
	}
	if _, err := consumer.Edit(t.Context(), f.lot, p.ID, func(*envelope.Message) error { return nil }, nil); !errors.Is(err, consumer.ErrParkedChanged) {
		t.Errorf("a second edit: %v, want ErrParkedChanged", err)
	}
	f.redrive(f.wrap(effect), nil, consumer.RedriveRefused, p.ID)
	f.redrive(f.wrap(effect), nil, consumer.RedriveDone, into)
	f.wantInt(1, "select count(*) from effect where body = 'mended'")
	f.wantInt(1, "select count(*) from effect")
}

// What cannot be read can be mended, and what is no CloudEvent can be edited.
func TestEditOfOtherMessages(t *testing.T) {
	f := withEffects(t)
	broken := wire(t, "1", "x")
	broken.Header.Del("ce_id")
	p := f.park(broken)
	into, err := consumer.Edit(t.Context(), f.lot, p.ID, func(m *envelope.Message) error { m.Source, m.Type = "/shop", "placed"; return nil }, nil)
	if err != nil {
		t.Fatal(err)
	}
	f.redrive(f.wrap(effect), nil, consumer.RedriveDone, into)

	plain := f.park(&envelope.Message{Topic: "orders", Position: "orders/0/2", Header: envelope.Header{{Name: "x-id", Value: []byte("7")}}, Body: []byte("x")})
	o := &consumer.EditOptions{Extractor: envelope.FromHeader("x-id", "")}
	if _, err := consumer.Edit(t.Context(), f.lot, plain.ID, func(m *envelope.Message) error { m.Body = []byte("y"); return nil }, o); !errors.Is(err, consumer.ErrSameIdentity) {
		t.Errorf("the old identity: %v, want ErrSameIdentity", err)
	}
	into, err = consumer.Edit(t.Context(), f.lot, plain.ID, func(m *envelope.Message) error { m.Header.Set("x-id", []byte("8")); return nil }, o)
	if err != nil {
		t.Fatal(err)
	}
	if v := f.find(into).Message.Header.Values("x-id"); len(v) != 1 || string(v[0]) != "8" {
		t.Errorf("the copy has the ids %q", v)
	}
}

// kept is a publisher that keeps what it is given.
type kept struct{ last *envelope.Message }

func (k *kept) Publish(_ context.Context, ms []*envelope.Message) brokers.Results {
	k.last = ms[len(ms)-1]
	return make(brokers.Results, len(ms))
}
func (k *kept) Close() error { return nil }

// A message hops: dead letter, taken by a consumer of dead letters, parked,
// redriven, a dead letter again. Each header of ours is there once.
func TestHeadersOccurOnceOverHops(t *testing.T) {
	f := withEffects(t)
	pub := &kept{}
	dead := consumer.DeadLetterTo(pub, "orders.dead")
	if err := dead(t.Context(), failure(wire(t, "1", "x"), 10, errBoom)); err != nil {
		t.Fatal(err)
	}
	for hop := range 3 {
		m := pub.last
		m.Position = fmt.Sprintf("orders.dead/0/%d", hop)
		p := f.park(m)
		f.redrive(f.wrap(func(ctx context.Context, _ pgx.Tx, m *envelope.Message) error {
			return errors.Join(errBoom, dead(ctx, failure(m, 11+hop, errBoom)))
		}), nil, consumer.RedriveFailed, p.ID)
		if err := dead(t.Context(), failure(f.find(p.ID).Message, 11+hop, errBoom)); err != nil {
			t.Fatal(err)
		}
		seen := map[string]int{}
		for _, h := range pub.last.Header {
			seen[strings.ToLower(h.Name)]++
		}
		for name, n := range seen {
			if n != 1 {
				t.Errorf("hop %d: %s occurs %d times", hop, name, n)
			}
		}
		if from, _ := pub.last.Header.Get(consumer.HeaderDeadFrom); string(from) != m.Position || seen[consumer.HeaderDeadID] != 1 || seen["ce_id"] != 1 {
			t.Errorf("hop %d: the header is %v", hop, pub.last.Header)
		}
	}
}
