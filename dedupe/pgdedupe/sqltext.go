package pgdedupe

import "strings"

// endsTransaction returns the words of the first statement in a text that would
// end or begin a transaction, or "". It knows comments, quotes and several
// statements in one text.
//
// It is a courtesy: the error comes at the statement that is wrong, while the
// guard at the commit finds out whatever passes here.
func endsTransaction(sql string) string {
	l := lexer{sql: sql}
	for l.more() {
		if word := l.statement(); word != "" {
			return word
		}
		l.skip()
	}
	return ""
}

type lexer struct {
	sql string
	pos int
}

// more skips to the next statement and reports whether there is one.
func (l *lexer) more() bool {
	for l.space(); l.pos < len(l.sql) && l.sql[l.pos] == ';'; l.space() {
		l.pos++
	}
	return l.pos < len(l.sql)
}

// statement reads the first words of a statement, as many as it takes.
func (l *lexer) statement() string {
	first := l.word()
	switch first {
	case "begin", "commit", "end", "abort":
		return first
	case "start", "prepare":
		if l.word() == "transaction" {
			return first + " transaction"
		}
	case "rollback":
		next := l.word()
		if next == "work" || next == "transaction" {
			next = l.word()
		}
		if next != "to" {
			return first
		}
	case "create":
		// The body of a function may be statements, up to an END of its own.
		if strings.Contains(strings.ToLower(l.sql[l.pos:]), "atomic") {
			l.pos = len(l.sql)
		}
	}
	return ""
}

// word reads a word, in lower case, and the space before it.
func (l *lexer) word() string {
	l.space()
	start := l.pos
	for l.pos < len(l.sql) && isLetter(l.sql[l.pos]) {
		l.pos++
	}
	return strings.ToLower(l.sql[start:l.pos])
}

func isLetter(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c >= '0' && c <= '9' || c >= 0x80
}

// space skips white space and comments.
func (l *lexer) space() {
	for l.pos < len(l.sql) {
		switch rest := l.sql[l.pos:]; {
		case strings.IndexByte(" \t\r\n\f\v", rest[0]) >= 0:
			l.pos++
		case strings.HasPrefix(rest, "--"):
			l.until("\n")
		case strings.HasPrefix(rest, "/*"):
			l.comment()
		default:
			return
		}
	}
}

// comment skips a comment, in which there may be others.
func (l *lexer) comment() {
	depth := 0
	for l.pos < len(l.sql) {
		switch rest := l.sql[l.pos:]; {
		case strings.HasPrefix(rest, "/*"):
			depth++
			l.pos += 2
		case strings.HasPrefix(rest, "*/"):
			depth--
			l.pos += 2
			if depth == 0 {
				return
			}
		default:
			l.pos++
		}
	}
}

// until skips what is before the next end, and end.
func (l *lexer) until(end string) {
	if i := strings.Index(l.sql[l.pos:], end); i >= 0 {
		l.pos += i + len(end)
	} else {
		l.pos = len(l.sql)
	}
}

// skip goes to the semicolon that ends the statement.
func (l *lexer) skip() {
	if strings.IndexByte(l.sql[l.pos:], ';') < 0 {
		l.pos = len(l.sql)
		return
	}
	for l.pos < len(l.sql) {
		switch c := l.sql[l.pos]; {
		case c == ';':
			return
		case c == '\'':
			l.quoted(l.escapes())
		case c == '"':
			l.pos++
			l.until(`"`)
		case c == '$':
			l.dollar()
		case isLetter(c):
			l.name()
		case c == '-' || c == '/':
			before := l.pos
			if l.space(); l.pos == before {
				l.pos++
			}
		default:
			l.pos++
		}
	}
}

// name skips a word, in which a dollar sign quotes nothing.
func (l *lexer) name() {
	for l.pos < len(l.sql) && (isLetter(l.sql[l.pos]) || l.sql[l.pos] == '$') {
		l.pos++
	}
}

// escapes reports whether the quote at hand begins an E'string'.
func (l *lexer) escapes() bool {
	before := l.sql[:l.pos]
	n := len(before)
	return n > 0 && before[n-1]|0x20 == 'e' && (n == 1 || !isLetter(before[n-2]))
}

// quoted skips a string. Two quotes in it are one, which reads as two strings.
func (l *lexer) quoted(backslash bool) {
	for l.pos++; l.pos < len(l.sql); l.pos++ {
		switch l.sql[l.pos] {
		case '\\':
			if backslash {
				l.pos++
			}
		case '\'':
			l.pos++
			return
		}
	}
	l.pos = len(l.sql)
}

// dollar skips a string between two $tag$, or the sign of a parameter.
func (l *lexer) dollar() {
	end := l.pos + 1
	for end < len(l.sql) && isLetter(l.sql[end]) {
		end++
	}
	if end == len(l.sql) || l.sql[end] != '$' || end > l.pos+1 && l.sql[l.pos+1] <= '9' {
		l.pos++
		return
	}
	tag := l.sql[l.pos : end+1]
	l.pos = end + 1
	l.until(tag)
}
