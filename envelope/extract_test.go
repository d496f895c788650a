package envelope_test

import (
	"fmt"
	"testing"

	"github.com/unecho/unecho/envelope"
)

func TestCloudEventsDecodes(t *testing.T) {
	t.Parallel()
	d, ok := envelope.CloudEvents().(envelope.Decoder)
	if !ok {
		t.Fatal("CloudEvents is no Decoder")
	}
	if m, err := d.Decode(sample().nats()); err != nil || m.ID != "e-1" || m.Type != "com.example.order.placed" {
		t.Errorf("Decode = %+v, %v", m, err)
	}
	if _, ok := envelope.FromHeader("id", "").(envelope.Decoder); ok {
		t.Error("FromHeader is a Decoder; its messages have no envelope")
	}
}

func withLines(lines ...string) *envelope.Message {
	m := &envelope.Message{Topic: "orders"}
	for i := 0; i < len(lines); i += 2 {
		m.Header.Add(lines[i], []byte(lines[i+1]))
	}
	return m
}

func TestFromHeader(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, source string
		m            *envelope.Message
		want         envelope.Identity
	}{
		{"message-id", "shop", withLines("message-id", "7"), envelope.Identity{Source: "shop", ID: "7"}},
		{"message-id", "", withLines("Message-ID", "7"), envelope.Identity{Source: "orders", ID: "7"}},
		{"ID", "", withLines("x-id", "1", "id", "%41 é\"", "id2", "2", "\u0131d", "3"), envelope.Identity{Source: "orders", ID: `%41 é"`}},
		{"id", "", withLines("id", "7", "ID", "7"), envelope.Identity{Source: "orders", ID: "7"}},
	} {
		if id, err := envelope.FromHeader(c.name, c.source).Identify(c.m); err != nil || id != c.want {
			t.Errorf("%q in %q: %q, %v; want %q", c.name, c.m.Header, id, err, c.want)
		}
	}
}

func TestFromHeaderRefuses(t *testing.T) {
	t.Parallel()
	x := envelope.FromHeader("id", "")
	noTopic := withLines("id", "7")
	noTopic.Topic = ""
	oddTopic := withLines("id", "7")
	oddTopic.Topic = "a\nb"
	for _, c := range []struct {
		m      *envelope.Message
		reason string
	}{
		{withLines(), envelope.ReasonMissingID},
		{withLines("id2", "7", "x-id", "7"), envelope.ReasonMissingID},
		{withLines("id", ""), envelope.ReasonMissingID},
		{withLines("id", " \t"), envelope.ReasonMissingID},
		{&envelope.Message{Topic: "t", Header: envelope.Header{{Name: "id"}}}, envelope.ReasonMissingID},
		{withLines("id", "7", "Id", "8"), envelope.ReasonConflictingID},
		{withLines("id", "7", "id", ""), envelope.ReasonConflictingID},
		{withLines("id", "\xff"), envelope.ReasonBadEncoding},
		{noTopic, envelope.ReasonMissingSource},
		{oddTopic, envelope.ReasonControlCharacter},
	} {
		id, err := x.Identify(c.m)
		if err == nil {
			t.Errorf("%q gave %q", c.m.Header, id)
			continue
		}
		checkError(t, err, c.reason)
	}
}

func TestB13FromHeaderHasTheSameVerdict(t *testing.T) {
	t.Parallel()
	for text, reason := range identityCases {
		id, err := envelope.FromHeader("id", "s").Identify(withLines("id", text))
		if envelope.Reason(err) != reason || reason == "" && id.ID != text {
			t.Errorf("%q: %q, %v; want reason %q", text, id, err, reason)
		}
	}
}

func TestFromHeaderPanicsOnAProgrammersError(t *testing.T) {
	t.Parallel()
	for _, c := range [][2]string{{"", "s"}, {"id", " "}, {"id", "s "}, {"id", "a\nb"}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("FromHeader(%q, %q) did not panic", c[0], c[1])
				}
			}()
			envelope.FromHeader(c[0], c[1])
		}()
	}
}

func BenchmarkDecode(b *testing.B) {
	m := full()
	m.ContentType, m.Body = "application/json", fmt.Appendf(nil, `{"items":[%0900d]}`, 1)
	for _, w := range allWires {
		e := encode(b, w, m)
		b.Run(w.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := envelope.Decode(e); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
