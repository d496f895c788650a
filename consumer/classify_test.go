package consumer

import (
	"context"
	"errors"
	"fmt"
	"io"
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
		// What a handler meets is about its message, whatever the network says.
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, ClassFailed},
		{&net.OpError{Op: "read", Err: syscall.ECONNRESET}, ClassFailed},
		{io.ErrUnexpectedEOF, ClassFailed},
		{net.ErrClosed, ClassFailed},
		{&net.DNSError{IsTemporary: true}, ClassFailed},
		{fmt.Errorf("once: %w", ofHandler(fmt.Errorf("other store: %w", dedupe.ErrUnavailable))), ClassFailed},
		{fmt.Errorf("once: %w", ofHandler(brokers.ErrUnavailable)), ClassFailed},
		{fmt.Errorf("once: %w", ofHandler(dedupe.ErrInProgress)), ClassFailed},
		{fmt.Errorf("once: %w", ofHandler(dedupe.ErrUnknownOutcome)), ClassFailed},
		{fmt.Errorf("once: %w", ofHandler(dedupe.ErrContention)), ClassFailed},
		{fmt.Errorf("once: %w", ofHandler(Permanent(errBoom))), ClassPermanent},
		{fmt.Errorf("once: %w", ofHandler(Unavailable(errBoom))), ClassUnavailable},
		{fmt.Errorf("%w: the connection went: %w", dedupe.ErrUnavailable, ofHandler(errBoom)), ClassUnavailable},
		{errors.Join(ofHandler(errBoom), dedupe.ErrInProgress), ClassInProgress},
		{&dedupe.HeldError{}, ClassInProgress},
		{fmt.Errorf("x: %w", dedupe.ErrBusy), ClassContention},
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
