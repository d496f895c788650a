package envelope_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/unecho/unecho/envelope"
)

// Errors end up in logs and in the headers of dead letters.
func TestErrorsShowNoValue(t *testing.T) {
	t.Parallel()
	const secret = "CANARY"
	messages := []*envelope.Message{
		structured(`{"id":"` + secret), structured(secret), structured(`{"a":` + secret + `}`), structured(`["` + secret + `"]`),
		withMembers(`,"id":"` + secret + `"`), withMembers(`,"time":"` + secret + `"`), withMembers(`,"subject":["` + secret + `"]`),
		withMembers(`,"data":"` + secret + `","data_base64":"` + secret + `"`), withMembers(`,"data_base64":"` + secret + `*"`),
		withLines("ce_id", secret, "ce_id", secret+"2"), withLines("content-type", "application/cloudevents+"+secret),
		withLines("content-type", secret, "Content-Type", "x"), {ID: secret}, {ID: secret, Source: secret, Type: "\n" + secret},
	}
	for _, change := range []string{"id", "source", "type", "time", "specversion", "subject"} {
		for _, value := range []string{secret + "\n", " " + secret, secret + "\x00", secret + "\xff"} {
			messages = append(messages, sample(change, value).kafka(), sample(change, value).nats())
		}
	}
	for _, m := range messages {
		for _, decode := range []func(*envelope.Message) error{
			func(m *envelope.Message) error { _, err := envelope.Decode(m); return err },
			func(m *envelope.Message) error { _, err := envelope.NATS.Encode(m, envelope.Structured); return err },
			func(m *envelope.Message) error { _, err := envelope.FromHeader("ce_id", "s").Identify(m); return err },
		} {
			if err := decode(m); err != nil && strings.Contains(strings.ToUpper(err.Error()), secret) {
				t.Errorf("the error of %q shows its content: %v", m.Header, err)
			}
		}
	}
}

func TestReason(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		"":                       errors.New("envelope: malformed"),
		envelope.ReasonMissingID: fmt.Errorf("mine: %w", envelope.ErrNoID),
		"malformed":              fmt.Errorf("mine: %w", envelope.ErrMalformed),
		envelope.ReasonBatch:     fmt.Errorf("mine: %w", errors.Join(errors.New("x"), &envelope.FormatError{Reason: envelope.ReasonBatch})),
	} {
		if got := envelope.Reason(err); got != want {
			t.Errorf("Reason(%v) = %q, want %q", err, got, want)
		}
	}
	if got := envelope.Reason(nil); got != "" {
		t.Errorf("Reason(nil) = %q", got)
	}
}

func TestFormatErrorText(t *testing.T) {
	t.Parallel()
	_, err := envelope.Decode(structured(`{"id":}`))
	if got, want := err.Error(), "envelope: the structured event is not valid JSON, or is nested too deeply (at byte 7); the producer must write one JSON object in UTF-8"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	err = &envelope.FormatError{Reason: "of_a_later_version", Field: "f", Detail: "d"}
	if got, want := err.Error(), "envelope: f: of_a_later_version (d)"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if !errors.Is(err, envelope.ErrMalformed) {
		t.Error("a reason of a later version is not malformed")
	}
}
