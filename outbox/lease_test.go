package outbox

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/envelope"
)

const lease = 3 * time.Second

// A publish that takes much longer than the lease, and a read that does, keep it.
func TestLeaseIsRenewedWhileABatchTakes(t *testing.T) {
	for name, slow := range map[string]struct {
		read, publish time.Duration
	}{"publish": {0, 20 * lease}, "read": {20 * lease, 0}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newMemory()
				s.add("a")
				s.set(func(ctx context.Context, op string) error {
					if op == "read" {
						time.Sleep(slow.read)
					}
					return ctx.Err()
				})
				r := NewRelay(s, takes(slow.publish), &RelayOptions{PublishTimeout: time.Hour, StoreTimeout: time.Hour})
				done := make(chan struct{})
				go func() {
					defer close(done)
					if n, err := r.Step(t.Context()); n != 1 || err != nil {
						t.Errorf("step: %d, %v", n, err)
					}
				}()
				synctest.Wait()
				for {
					select {
					case <-done:
						if n := s.count("renew"); n > 70 {
							t.Errorf("%d renewals in 20 leases", n)
						}
						return
					case <-time.After(100 * time.Millisecond):
						if s.rival() {
							t.Fatal("another relay could have taken over in the middle of a batch")
						}
					}
				}
			})
		})
	}
}

// R9: renewals fail, or get no answer. The publish ends before anybody else
// can have the lease, and nothing is settled.
func TestR9PublishEndsBeforeTheLease(t *testing.T) {
	for name, before := range map[string]func(context.Context, string) error{"fails": failing("renew"), "hangs": hanging("renew")} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newMemory()
				s.add("a")
				s.set(before)
				ended := time.Time{}
				r := NewRelay(s, publisher(func(ctx context.Context, msgs []*envelope.Message) brokers.Results {
					<-ctx.Done()
					ended = time.Now()
					if s.rival() {
						t.Error("the publish went on when another relay could have taken over")
					}
					if !errors.Is(context.Cause(ctx), ErrFenced) {
						t.Errorf("the cause is %v", context.Cause(ctx))
					}
					return brokers.Fill(len(msgs), brokers.ErrUnknown)
				}), &RelayOptions{PublishTimeout: time.Hour})
				begun := time.Now()
				if n, err := r.Step(t.Context()); n != 0 || !errors.Is(err, ErrFenced) {
					t.Fatalf("step: %d, %v, want ErrFenced", n, err)
				}
				if took := ended.Sub(begun); took < lease/2 || took >= lease {
					t.Errorf("the publish was ended after %v of a lease of %v", took, lease)
				}
				if s.count("settle") != 0 {
					t.Error("something was settled")
				}
				// Nobody has taken over: the relay goes on under the same epoch,
				// and does not wait for its own lease to run out.
				s.set(nil)
				r.pub = takes(0)
				if n, err := r.Step(t.Context()); n != 1 || err != nil {
					t.Errorf("the next step: %d, %v", n, err)
				}
				if s.epoch != 1 {
					t.Errorf("epoch %d", s.epoch)
				}
			})
		})
	}
}

// R8: the relay is stopped for longer than its lease, in the middle of a
// publish, and another has taken over when it goes on.
func TestR8TakenOverInTheMiddleOfAPublish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, ev := newMemory(), &events{}
		s.add("a")
		r := NewRelay(s, publisher(func(ctx context.Context, msgs []*envelope.Message) brokers.Results {
			s.mu.Lock()
			s.epoch++
			s.until = time.Now().Add(time.Minute)
			s.mu.Unlock()
			return takes(time.Hour)(ctx, msgs)
		}), &RelayOptions{PublishTimeout: time.Hour, Observer: ev})
		begun := time.Now()
		if n, err := r.Step(t.Context()); n != 0 || !errors.Is(err, ErrFenced) {
			t.Fatalf("step: %d, %v, want ErrFenced", n, err)
		}
		if took := time.Since(begun); took > lease/2 {
			t.Errorf("it published for %v after it was fenced", took)
		}
		if _, err := r.Step(t.Context()); !errors.Is(err, ErrHeld) {
			t.Errorf("the next step: %v, want ErrHeld", err)
		}
		if len(s.settled) != 0 || ev.of(StepFenced) != 1 {
			t.Errorf("%d settled, %d events", len(s.settled), ev.of(StepFenced))
		}
	})
}

// The publish was done in time, and only its settlement is late: whether that
// counts is for the store to say, which knows if somebody has taken over.
func TestLateSettlementIsForTheStoreToJudge(t *testing.T) {
	for _, takenOver := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s := newMemory()
			s.add("a")
			s.set(func(_ context.Context, op string) error {
				if op == "settle" {
					time.Sleep(2 * lease)
					if takenOver {
						_, err := s.Acquire(t.Context(), "other", lease)
						return err
					}
				}
				return nil
			})
			n, err := NewRelay(s, takes(0), nil).Step(t.Context())
			if takenOver && !errors.Is(err, ErrFenced) || !takenOver && (n != 1 || err != nil) {
				t.Errorf("taken over %v: %d, %v", takenOver, n, err)
			}
		})
	}
}

func TestStandByAndTakeOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMemory()
		s.add("a")
		dead, err := s.Acquire(t.Context(), "dead", lease)
		if err != nil {
			t.Fatal(err)
		}
		for range 10 { // it lives for a while
			time.Sleep(lease / 3)
			if err := s.Renew(t.Context(), dead); err != nil {
				t.Fatal(err)
			}
		}
		died := time.Now()
		var took time.Duration
		r := NewRelay(s, publisher(func(_ context.Context, msgs []*envelope.Message) brokers.Results {
			took = time.Since(died)
			return make(brokers.Results, len(msgs))
		}), nil)
		stop := start(t, r)
		for range 1000 {
			r.Wake() // wakes nobody who stands by
			time.Sleep(5 * time.Millisecond)
		}
		stop()
		if took < lease || took > lease+lease/3+100*time.Millisecond {
			t.Errorf("taken over %v after the end of the holder, whose lease was %v", took, lease)
		}
		if n := s.count("acquire"); n > 10 {
			t.Errorf("asked %d times for a lease that is held", n)
		}
		if !slices.Equal(s.sent(), []string{"a"}) || !s.rival() {
			t.Errorf("sent %q, lease free %v", s.sent(), s.rival())
		}
	})
}

// An idle relay keeps its lease for any length and any settings.
func TestIdleRelayKeepsItsLease(t *testing.T) {
	for _, o := range []RelayOptions{{}, {Lease: time.Millisecond}, {MaxPoll: time.Hour}, {Poll: time.Hour, Lease: time.Second}} {
		synctest.Test(t, func(t *testing.T) {
			s := newMemory()
			stop := start(t, NewRelay(s, takes(0), &o))
			synctest.Wait()
			for range 1000 {
				if s.rival() {
					t.Fatalf("%+v: the lease ran out", o)
				}
				time.Sleep(37 * time.Millisecond)
			}
			stop()
			if s.epoch != 1 {
				t.Errorf("%+v: epoch %d", o, s.epoch)
			}
		})
	}
}
