// Package sqlstate says what PostgreSQL's error codes mean for a connection and
// for a commit, whichever driver they came by.
package sqlstate

import "strings"

// Outage reports whether a code says that the server does not serve, and that no
// statement is to blame.
func Outage(code string) bool {
	// 53: out of connections, memory, disk. 25006: read-only, what was the primary is a standby now.
	return lost(code) || strings.HasPrefix(code, "53") || code == "25006"
}

// lost: connection exceptions, the end of the server, its own I/O errors.
func lost(code string) bool {
	for _, class := range [...]string{"08", "57P", "58"} {
		if strings.HasPrefix(code, class) {
			return true
		}
	}
	return false
}

// LockTimeout is the code of a statement that waited for a lock until
// lock_timeout was over.
const LockTimeout = "55P03"

// Contention reports whether a code says that a transaction lost against others,
// and that no statement is to blame: a serialization failure, a deadlock, or
// LockTimeout.
func Contention(code string) bool {
	return code == "40001" || code == "40P01" || code == LockTimeout
}

// Data reports whether a code says that a statement failed for the values it was
// given, and will whenever it is run with them: they are not valid, break a
// constraint, or are larger than the server can store.
func Data(code string) bool {
	return strings.HasPrefix(code, "22") || strings.HasPrefix(code, "23") || strings.HasPrefix(code, "54")
}

// Verdict reports whether an error is the server's own verdict on a statement,
// which says that the statement, or the commit, has changed nothing. severity is
// the localized one, for servers that send no other. Of any other error nobody
// knows.
func Verdict(severity, unlocalized, code string) bool {
	if unlocalized == "" {
		unlocalized = severity
	}
	return unlocalized == "ERROR" && Refused(code)
}

// Refused reports whether an error with this code, in answer to a commit, says
// that there was no commit. A server that says so says it as the verdict on the
// statement; what a proxy or a dying server says is about the connection, and
// the commit may have happened.
func Refused(code string) bool {
	switch code {
	case "25P03", "25P04", "40003": // idle or transaction time-out, completion unknown
		return false
	}
	return len(code) == 5 && !lost(code) && !strings.HasPrefix(code, "XX")
}
