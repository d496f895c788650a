package envelope

import (
	"bytes"
	"strings"
)

const upperHex = "0123456789ABCDEF"

// percentEncode writes s as the HTTP binding writes a header value: everything
// but printable ASCII, and space, quote and percent, as escapes of its bytes.
func percentEncode(s string) []byte {
	return appendEscaped(make([]byte, 0, len(s)), s, func(c byte) bool {
		return c > ' ' && c < 0x7f && c != '"' && c != '%'
	})
}

// appendEscaped appends s with the bytes escaped that keep does not want.
func appendEscaped(b []byte, s string, keep func(c byte) bool) []byte {
	for i := 0; i < len(s); i++ {
		if c := s[i]; keep(c) {
			b = append(b, c)
		} else {
			b = append(b, '%', upperHex[c>>4], upperHex[c&15])
		}
	}
	return b
}

// percentDecode undoes percentEncode: a quoted string first, then one round of
// escapes. What is no escape stands for itself.
func percentDecode(v []byte) string {
	s := dequote(string(v))
	if strings.IndexByte(s, '%') < 0 {
		return s
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c == '%' && i+2 < len(s) {
			if hi, lo := hexValue(s[i+1]), hexValue(s[i+2]); hi >= 0 && lo >= 0 {
				c = byte(hi<<4 | lo)
				i += 2
			}
		}
		b = append(b, c)
	}
	return string(b)
}

// dequote returns what a quoted string of HTTP stands for, and anything else
// as it is.
func dequote(s string) string {
	if len(s) < 2 || s[0] != '"' || s[len(s)-1] != '"' {
		return s
	}
	b := make([]byte, 0, len(s)-2)
	for i := 1; i < len(s)-1; i++ {
		switch s[i] {
		case '"':
			return s
		case '\\':
			if i++; i == len(s)-1 { // what looked like the end is escaped
				return s
			}
		}
		b = append(b, s[i])
	}
	return string(b)
}

func hexValue(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'a' && c <= 'f':
		return int(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// isToken reports whether c can be in the name of a header line on every
// broker: the token characters of HTTP, to which NATS clients hold.
func isToken(c byte) bool {
	switch {
	case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		return true
	}
	return strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}

// carryNATS returns h as NATS can carry it. A client refuses a line with
// another name and alters a value with line breaks or white space around it,
// so what would not arrive is escaped: it can begin no line of its own, it
// cannot make a dead letter undeliverable, and nobody takes it for the
// original. A line without a name is left out. h is shared if nothing changes.
func carryNATS(h Header) Header {
	for i := range h {
		if !carriesName(h[i].Name) || !carriesValue(h[i].Value) {
			return escapeLines(h)
		}
	}
	return h
}

func carriesName(name string) bool {
	for i := 0; i < len(name); i++ {
		if !isToken(name[i]) {
			return false
		}
	}
	return name != ""
}

func carriesValue(v []byte) bool {
	return !bytes.ContainsAny(v, "\r\n") && len(bytes.TrimSpace(v)) == len(v)
}

func escapeLines(h Header) Header {
	out := make(Header, 0, len(h))
	for _, f := range h {
		if f.Name == "" {
			continue
		}
		f.Name = string(appendEscaped(nil, f.Name, isToken))
		if !carriesValue(f.Value) {
			f.Value = percentEncode(string(f.Value))
		}
		out = append(out, f)
	}
	return out
}
