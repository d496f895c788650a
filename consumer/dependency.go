package consumer

import (
	"errors"
	"fmt"
)

// Dependency names something that some messages need and others do not, such as
// the service of one customer: Dependency("billing-api"). Its outage holds those
// messages that have met it, and nobody else.
//
// When different messages have met it, one of them at a time tries again, and the
// others wait; no attempt is spent. When one gets through, all go on. One message
// that meets it again and again while others that have met it get through has
// failed, as any other message that fails.
type Dependency string

// Unavailable marks an error as the outage of d. Unavailable of nil is nil.
func (d Dependency) Unavailable(err error) error {
	if err == nil {
		return nil
	}
	return &unavailableError{err: fmt.Errorf("%s: %w", string(d), err), of: d}
}

// The keys of subjects that are no store.
type (
	markedKey struct{} // what handlers have marked by Unavailable
	brokerKey struct{}
)

// subjectOf returns what is out of reach when a try has ended with err.
func (j *job) subjectOf(err error) *subject {
	var marked *unavailableError
	switch {
	case errors.As(err, &marked) && marked.of != "":
		return j.gate.subject(marked.of, false)
	case isStores(err):
		return j.gate.subject(j.trail.store(), len(j.stores) < 2)
	case isBrokers(err):
		return j.gate.subject(brokerKey{}, true)
	}
	return j.gate.subject(markedKey{}, true)
}
