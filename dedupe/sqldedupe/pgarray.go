package sqldedupe

import (
	"encoding/hex"
	"strconv"
	"strings"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/internal/pgkeys"
)

// array is a PostgreSQL array as text, because each driver of database/sql has
// another idea of what an array is, and all pass on a text. A nil element is a
// NULL.
func array[T any](items []T, element func(T) *string) string {
	var b strings.Builder
	b.WriteByte('{')
	for i, item := range items {
		if i > 0 {
			b.WriteByte(',')
		}
		e := element(item)
		if e == nil {
			b.WriteString("NULL")
			continue
		}
		b.WriteByte('"')
		_, _ = escapes.WriteString(&b, *e) // a Builder never fails
		b.WriteByte('"')
	}
	b.WriteByte('}')
	return b.String()
}

// escapes are what means something between the quotes of an element.
var escapes = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

func (r row) uuid() *string { return hexText(r.id) }

func hexText(id dedupe.KeyID) *string {
	s := hex.EncodeToString(id[:])
	return &s
}

// byteaText is b as PostgreSQL reads it; nil for nil.
func byteaText(b []byte) *string {
	if b == nil {
		return nil
	}
	s := `\x` + hex.EncodeToString(b)
	return &s
}

// eachArgs are the arguments of pgkeys.Statements.ClaimEach.
func (p *postgres) eachArgs(rows []row) []any {
	text := func(part func(dedupe.Key) string) string {
		return array(rows, func(r row) *string {
			if p.o.Anonymous {
				return nil
			}
			s := part(r.Key)
			return &s
		})
	}
	return []any{
		array(rows, row.uuid),
		array(rows, func(r row) *string { return byteaText(r.Fingerprint[:]) }),
		array(rows, func(r row) *string {
			s := strconv.FormatInt(pgkeys.Microseconds(r.Retain), 10)
			return &s
		}),
		strconv.FormatInt(pgkeys.Milliseconds(p.o.LockWait), 10),
		text(func(k dedupe.Key) string { return k.Tenant }),
		text(func(k dedupe.Key) string { return k.Consumer }),
		text(func(k dedupe.Key) string { return k.Source }),
		text(func(k dedupe.Key) string { return k.ID }),
		array(rows, func(r row) *string { return byteaText(p.fields(r.Claim)) }),
	}
}
