package dedupe

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
)

// probeConsumer is that of the keys that probes claim. No consumer has it: names
// come from programs, and this one has a space and is nobody's.
const probeConsumer = "unecho probe"

func probeKey() Key { return Key{Consumer: probeConsumer, Source: "probe", ID: rand.Text()} }

// driverProber is a driver whose Begin asks nobody.
type driverProber interface {
	Probe(ctx context.Context) error
}

// Probe implements [Prober]: it claims a key that nobody has, and rolls back.
func (s *txStore[Tx]) Probe(ctx context.Context) error {
	if p, ok := any(s.driver).(driverProber); ok {
		if err := p.Probe(ctx); err != nil {
			return s.storeFault(ctx, "probe", err)
		}
		return nil
	}
	c, err := Claim{Key: probeKey()}.Normal()
	if err != nil {
		return err
	}
	tx, prior, err := s.driver.Begin(ctx, c)
	if err != nil {
		return s.storeFault(ctx, "probe", err)
	}
	if prior != nil { // nobody else has drawn it
		return fmt.Errorf("%w: probe: a random key is taken", ErrUnavailable)
	}
	if err := s.rollback(ctx, tx); err != nil {
		return fmt.Errorf("%w: probe: roll back: %w", ErrUnavailable, err)
	}
	return nil
}

// MaxConcurrent implements [Bounded].
func (s *txStore[Tx]) MaxConcurrent() int { return maxConcurrent(s.driver) }

func maxConcurrent(of any) int {
	if b, ok := of.(Bounded); ok {
		return b.MaxConcurrent()
	}
	return 0
}

// Probe implements [Prober]: it claims a key that nobody has, and releases it as free.
func (s *leaseStore) Probe(ctx context.Context) error {
	c, err := Claim{Key: probeKey()}.Normal()
	if err != nil {
		return err
	}
	h, prior, err := s.acquire(ctx, c)
	switch {
	case err != nil:
		return err
	case prior != nil:
		return fmt.Errorf("%w: probe: a random key is taken", ErrUnavailable)
	}
	if err := h.release(ctx, StateFree); err != nil {
		return fmt.Errorf("%w: probe: release: %w", ErrUnavailable, err)
	}
	return nil
}

// MaxConcurrent implements [Bounded].
func (s *leaseStore) MaxConcurrent() int { return maxConcurrent(s.driver) }

// Probe implements [Prober], if the store that is guarded does.
func (g *guard[S]) Probe(ctx context.Context) error {
	if p, ok := g.inner.(Prober); ok {
		return p.Probe(ctx)
	}
	return errNoProbe
}

// errNoProbe says nothing about the store.
var errNoProbe = errors.New("dedupe: the store that is guarded cannot be asked how it is")

// MaxConcurrent implements [Bounded].
func (g *guard[S]) MaxConcurrent() int { return maxConcurrent(g.inner) }
