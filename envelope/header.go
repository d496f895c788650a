package envelope

// Field is one header line.
type Field struct {
	Name  string
	Value []byte
}

// Header is an ordered list of header lines. A name may occur more than once
// and keeps its spelling; lookup ignores the case of ASCII letters, because
// producers on both brokers spell known names in every way there is.
// The zero value is an empty header ready to use.
type Header []Field

// Get returns the first value of name and whether there is one.
// The bytes belong to the header.
func (h Header) Get(name string) ([]byte, bool) {
	for i := range h {
		if equalFold(h[i].Name, name) {
			return h[i].Value, true
		}
	}
	return nil, false
}

// Values returns every value of name in order; nil when there is none.
func (h Header) Values(name string) [][]byte {
	var vs [][]byte
	for i := range h {
		if equalFold(h[i].Name, name) {
			vs = append(vs, h[i].Value)
		}
	}
	return vs
}

// Add appends a line. The header keeps value.
func (h *Header) Add(name string, value []byte) {
	*h = append(*h, Field{Name: name, Value: value})
}

// Set replaces every line of name, whatever its spelling, by one at the place
// of the first, or appends it. The header keeps value.
func (h *Header) Set(name string, value []byte) {
	kept := (*h)[:0:0]
	done := false
	for _, f := range *h {
		switch {
		case !equalFold(f.Name, name):
			kept = append(kept, f)
		case !done:
			kept = append(kept, Field{Name: name, Value: value})
			done = true
		}
	}
	if !done {
		kept = append(kept, Field{Name: name, Value: value})
	}
	*h = kept
}

// Del removes every line of name.
func (h *Header) Del(name string) {
	kept := (*h)[:0:0]
	for _, f := range *h {
		if !equalFold(f.Name, name) {
			kept = append(kept, f)
		}
	}
	*h = kept
}

// Clone returns a deep copy; nil stays nil.
func (h Header) Clone() Header {
	if h == nil {
		return nil
	}
	c := make(Header, len(h))
	for i, f := range h {
		c[i] = Field{Name: f.Name, Value: cloneBytes(f.Value)}
	}
	return c
}

// equalFold compares names without the case of ASCII letters. Unicode folding
// would take the Kelvin sign for a k and the long s for an s, and let a
// look-alike name speak for a known one.
func equalFold(a, b string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := 0; i < len(a); i++ {
		if lowerByte(a[i]) != lowerByte(b[i]) {
			return false
		}
	}
	return true
}

func lowerByte(c byte) byte {
	if c >= 'A' && c <= 'Z' {
		return c + ('a' - 'A')
	}
	return c
}

// lower returns s with its ASCII letters in lower case and the rest as it is.
func lower(s string) string {
	for i := 0; i < len(s); i++ {
		if lowerByte(s[i]) != s[i] {
			b := []byte(s)
			for ; i < len(b); i++ {
				b[i] = lowerByte(b[i])
			}
			return string(b)
		}
	}
	return s
}
