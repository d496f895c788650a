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
