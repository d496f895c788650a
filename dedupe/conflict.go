package dedupe

import (
	"bytes"
	"time"
)

// ConflictReason says in what a claim differs from the one that came first.
type ConflictReason string

const (
	// ReasonContent: one identity, two contents. The producer reuses ids, or
	// changed what it sent the second time.
	ReasonContent ConflictReason = "content"
	// ReasonIdentity: two identities that share the 16 bytes in which stores
	// keep a key. It takes 2^40 ids that carry one millisecond, or 2^64 without
	// a time, to expect one; an attacker would have to make that many.
	ReasonIdentity ConflictReason = "identity"
)

// ConflictRecord is kept of a claim that met its key with another fingerprint.
type ConflictRecord struct {
	Key Key // of the claim; from an Admin, zero if the store keeps no readable parts
	// Fingerprint is the claim's, First that of the one before. Both are as the
	// store keeps them, see [Fingerprint].
	Fingerprint, First [32]byte
	Reason             ConflictReason
	// Fields are the JSON pointers of the fields that differ, without their
	// values, sorted: see [DiffFields]. Nil if the contents were not looked at
	// as JSON, or the first one's fields are not known.
	Fields []string
	// Retain is the claim's. It counts from the day that somebody settles the
	// conflict: age alone never deletes it.
	Retain time.Duration
	// SeenAt is when it was first recorded, by the store's clock. Only an
	// [Admin] fills it in.
	SeenAt time.Time
}

// NewConflictRecord compares a claim, as [Claim.Normal] returns it, with the
// record that it met. It is for those who build a store of their own.
func NewConflictRecord(c Claim, prior Record) ConflictRecord {
	r := ConflictRecord{Key: c.Key, Fingerprint: c.Fingerprint, First: prior.Fingerprint, Reason: ReasonContent, Retain: c.Retain}
	if !bytes.Equal(c.Fingerprint[:sealed], prior.Fingerprint[:sealed]) {
		r.Reason = ReasonIdentity
		return r
	}
	r.Fields = DiffFields(prior.Fields, c.Fields)
	return r
}
