package consumer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"testing"

	"github.com/unecho/unecho/brokers"
	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/envelope"
)

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		err  error
		want Class
	}{
		{nil, ClassNone},
		{errBoom, ClassFailed},
		{context.DeadlineExceeded, ClassFailed},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, ClassUnavailable},
		{&net.DNSError{IsTemporary: true}, ClassUnavailable},
		{&net.DNSError{IsNotFound: true}, ClassFailed},
		{fmt.Errorf("x: %w", brokers.ErrUnavailable), ClassUnavailable},
		{fmt.Errorf("x: %w", dedupe.ErrLogReplaced), ClassUnavailable},
		// An outage is one however it is wrapped.
		{Permanent(fmt.Errorf("x: %w", dedupe.ErrUnavailable)), ClassUnavailable},
		{fmt.Errorf("%w: %w", dedupe.ErrUnavailable, Permanent(errBoom)), ClassUnavailable},
		{fmt.Errorf("%w: %w", dedupe.ErrUnknownOutcome, syscall.ECONNRESET), ClassUnknown},
		{fmt.Errorf("x: %w", Unavailable(errBoom)), ClassUnavailable},
		{dedupe.ErrInProgress, ClassInProgress},
		{fmt.Errorf("complete: %w", dedupe.ErrLeaseLost), ClassInProgress},
		{fmt.Errorf("%w: %w", dedupe.ErrContention, errBoom), ClassContention},
		{dedupe.ErrScope, ClassFailed},
		{fmt.Errorf("x: %w", dedupe.ErrParked), ClassUncertain},
		{fmt.Errorf("x: %w", dedupe.ErrReplyTooLarge), ClassPermanent},
		{fmt.Errorf("x: %w", dedupe.ErrRateLimited), ClassContention},
		{fmt.Errorf("x: %w", dedupe.ErrWeakKey), ClassMalformed},
		{Permanent(errBoom), ClassPermanent},
		{envelope.ErrNoID, ClassMalformed},
		{&PanicError{Value: "x"}, ClassFailed},
	} {
		if got := Classify(c.err); got != c.want {
			t.Errorf("Classify(%v) = %q, want %q", c.err, got, c.want)
		}
	}
	if Permanent(nil) != nil || Unavailable(nil) != nil {
		t.Error("no error became one")
	}
	if !errors.Is(Permanent(errBoom), errBoom) {
		t.Error("Permanent hides the error")
	}
}
