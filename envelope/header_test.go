package envelope_test

import (
	"reflect"
	"testing"

	"github.com/unecho/unecho/envelope"
)

func header(lines ...string) envelope.Header { return withLines(lines...).Header }

func TestHeaderLookup(t *testing.T) {
	t.Parallel()
	h := header("Key", "1", "KEY", "2", "\u212aey", "kelvin", "ke", "short", "Keys", "long")
	if v, ok := h.Get("key"); !ok || string(v) != "1" {
		t.Errorf("Get = %q, %v", v, ok)
	}
	if vs := h.Values("kEY"); len(vs) != 2 || string(vs[1]) != "2" {
		t.Errorf("Values = %q", vs)
	}
	if v, ok := h.Get("missing"); ok || v != nil || h.Values("missing") != nil {
		t.Errorf("Get of a missing line = %q, %v", v, ok)
	}
}

func TestHeaderChangesShareNothing(t *testing.T) {
	t.Parallel()
	h := header("a", "1", "b", "2", "A", "3")
	for name, c := range map[string]struct {
		change func(h *envelope.Header)
		want   envelope.Header
	}{
		"set":     {func(h *envelope.Header) { h.Set("A", []byte("9")) }, header("A", "9", "b", "2")},
		"set new": {func(h *envelope.Header) { h.Set("c", []byte("9")) }, header("a", "1", "b", "2", "A", "3", "c", "9")},
		"delete":  {func(h *envelope.Header) { h.Del("a") }, header("b", "2")},
	} {
		mine := h
		c.change(&mine)
		if !reflect.DeepEqual(mine, c.want) {
			t.Errorf("%s: %q, want %q", name, mine, c.want)
		}
		if !reflect.DeepEqual(h, header("a", "1", "b", "2", "A", "3")) {
			t.Fatalf("%s changed the header it was made from: %q", name, h)
		}
	}
}

func TestCloneSharesNothing(t *testing.T) {
	t.Parallel()
	m := full()
	c := m.Clone()
	c.Key[0], c.Body[0], c.Header[0].Value[0] = 'x', 'x', 'x'
	c.Header[0].Name, c.Extensions["a"] = "x", "x"
	if !reflect.DeepEqual(m, full()) {
		t.Errorf("a change of the clone changed the message: %+v", m)
	}
	if c := (&envelope.Message{Body: []byte{}}).Clone(); c.Body == nil || c.Key != nil || c.Header != nil || c.Extensions != nil {
		t.Errorf("nil and empty were mixed up: %#v", c)
	}
	if (*envelope.Message)(nil).Clone() != nil {
		t.Error("the clone of nil is a message")
	}
}
