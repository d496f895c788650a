package outbox

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/unecho/unecho/envelope"
)

// table is an Appender that remembers.
type table struct {
	got []*envelope.Message
	err error
}

func (a *table) Append(_ context.Context, tx string, msgs []*envelope.Message) error {
	if tx != "tx" {
		return errors.New("not the caller's transaction")
	}
	a.got = append(a.got, msgs...)
	return a.err
}

func valid() *envelope.Message {
	return &envelope.Message{ID: "1", Source: "/s", Type: "t", Topic: "orders.v1", Body: []byte("{}")}
}

func TestWriterRefuses(t *testing.T) {
	with := func(f func(m *envelope.Message)) *envelope.Message {
		m := valid()
		f(m)
		return m
	}
	for name, c := range map[string]struct {
		m    *envelope.Message
		says string
	}{
		"nil":                {nil, "nil"},
		"empty topic":        {with(func(m *envelope.Message) { m.Topic = "" }), "topic is empty"},
		"space in topic":     {with(func(m *envelope.Message) { m.Topic = "a b" }), "white space"},
		"other white space":  {with(func(m *envelope.Message) { m.Topic = "a\u00a0b" }), "white space"},
		"control in topic":   {with(func(m *envelope.Message) { m.Topic = "a\x00" }), "control"},
		"topic not UTF-8":    {with(func(m *envelope.Message) { m.Topic = "a\xff" }), "UTF-8"},
		"no type":            {with(func(m *envelope.Message) { m.Type = "" }), "type"},
		"no source":          {with(func(m *envelope.Message) { m.Source = "" }), "source"},
		"blank source":       {with(func(m *envelope.Message) { m.Source = " " }), "source"},
		"blank id":           {with(func(m *envelope.Message) { m.ID = " " }), "id"},
		"id with space":      {with(func(m *envelope.Message) { m.ID = "1 " }), "id"},
		"id with control":    {with(func(m *envelope.Message) { m.ID = "1\n2" }), "id"},
		"id not UTF-8":       {with(func(m *envelope.Message) { m.ID = "\xc3" }), "id"},
		"subject not UTF-8":  {with(func(m *envelope.Message) { m.Subject = "\xc3" }), "subject"},
		"NUL in subject":     {with(func(m *envelope.Message) { m.Subject = "a\x00" }), "subject"},
		"NUL in schema":      {with(func(m *envelope.Message) { m.DataSchema = "a\x00" }), "data schema"},
		"NUL in type":        {with(func(m *envelope.Message) { m.Type = "a\x00" }), "type"},
		"year 10000":         {with(func(m *envelope.Message) { m.Time = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) }), "time"},
		"bad extension":      {with(func(m *envelope.Message) { m.Extensions = map[string]string{"Bad-Name": "x"} }), "Bad-Name"},
		"too large body":     {with(func(m *envelope.Message) { m.Body = make([]byte, defaultMaxBytes+1) }), "MaxBytes"},
		"too large together": {with(func(m *envelope.Message) { m.Body, m.Key = make([]byte, defaultMaxBytes), []byte("k") }), "MaxBytes"},
		"too large headers": {with(func(m *envelope.Message) {
			m.Header = envelope.Header{{Name: "h", Value: make([]byte, defaultMaxBytes)}}
		}), "MaxBytes"},
	} {
		to := &table{}
		err := NewWriter[string](to, nil).Write(t.Context(), "tx", valid(), c.m, valid())
		if !errors.Is(err, ErrInvalidMessage) {
			t.Errorf("%s: %v, want ErrInvalidMessage", name, err)
			continue
		}
		if !strings.Contains(err.Error(), "message 1") || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %q, want it to say message 1 and %q", name, err, c.says)
		}
		if len(to.got) != 0 {
			t.Errorf("%s: %d messages were written", name, len(to.got))
		}
	}
}

// An error says what is wrong, never what the message holds.
func TestWriterErrorsHoldNoPayload(t *testing.T) {
	m := valid()
	m.Key, m.Body, m.Topic = []byte("canary"), []byte("canary"), "bad topic canary"
	m.Header = envelope.Header{{Name: "h", Value: []byte("canary")}}
	err := NewWriter[string](&table{}, nil).Write(t.Context(), "tx", m)
	if err == nil || strings.Contains(err.Error(), "canary") {
		t.Errorf("error: %v", err)
	}
}

func TestWriterFillsIn(t *testing.T) {
	to, before := &table{}, time.Now()
	w := NewWriter[string](to, &WriterOptions{Source: "/shop"})
	a, b := &envelope.Message{Type: "t", Topic: "x"}, &envelope.Message{Type: "t", Topic: "x"}
	if err := w.Write(t.Context(), "tx", a, b); err != nil {
		t.Fatal(err)
	}
	for _, m := range []*envelope.Message{a, b} {
		if m.ID == "" || m.Source != "/shop" || m.Time.Before(before) || m.Time.After(time.Now()) {
			t.Errorf("filled in: id %q, source %q, time %v", m.ID, m.Source, m.Time)
		}
	}
	if a.ID == b.ID {
		t.Error("two messages have one id")
	}
	if len(to.got) != 2 || to.got[0] != a || to.got[1] != b {
		t.Errorf("written: %v", to.got)
	}
	set := valid()
	set.Time = time.Unix(1, 0)
	if err := w.Write(t.Context(), "tx", set); err != nil {
		t.Fatal(err)
	}
	if set.ID != "1" || set.Source != "/s" || !set.Time.Equal(time.Unix(1, 0)) {
		t.Errorf("what was set is now %q, %q, %v", set.ID, set.Source, set.Time)
	}
}

func TestWriterLimits(t *testing.T) {
	m := valid()
	m.Body = make([]byte, defaultMaxBytes)
	if err := NewWriter[string](&table{}, nil).Write(t.Context(), "tx", m); err != nil {
		t.Errorf("a body of exactly the limit: %v", err)
	}
	w := NewWriter[string](&table{}, &WriterOptions{MaxBytes: 10})
	m.Body = make([]byte, 11)
	if err := w.Write(t.Context(), "tx", m); !errors.Is(err, ErrInvalidMessage) {
		t.Errorf("11 bytes of 10: %v", err)
	}
}

func TestWriterPassesErrorsOn(t *testing.T) {
	to := &table{err: errors.New("the database says no")}
	w := NewWriter[string](to, nil)
	if err := w.Write(t.Context(), "tx", valid()); !errors.Is(err, to.err) || errors.Is(err, ErrInvalidMessage) {
		t.Errorf("write: %v", err)
	}
	to.got = nil
	if err := w.Write(t.Context(), "tx"); err != nil || to.got != nil {
		t.Errorf("write of nothing: %v", err)
	}
	defer func() {
		if recover() == nil {
			t.Error("no panic without an appender")
		}
	}()
	NewWriter[string](nil, nil)
}
