package envelope

import "strings"

// mediaType returns the type and subtype of a content type, in lower case and
// without its parameters.
func mediaType(contentType string) string {
	t, _, _ := strings.Cut(contentType, ";")
	return lower(strings.TrimSpace(t))
}

// isJSON reports whether the payload of this content type is JSON.
func isJSON(contentType string) bool {
	t := mediaType(contentType)
	return strings.HasSuffix(t, "/json") || strings.HasSuffix(t, "+json")
}

// format is what a content type says about the message as a whole.
type format int

const (
	formatNone  format = iota // nothing: the message is in binary mode, if it is an event
	formatJSON                // one structured event
	formatBatch               // many structured events
	formatOther               // a structured event that we cannot read
)

func formatOf(contentType string) format {
	rest, ok := strings.CutPrefix(mediaType(contentType), "application/cloudevents")
	switch {
	case !ok:
		return formatNone
	case rest == "" || rest == "+json":
		return formatJSON
	case rest == "-batch" || strings.HasPrefix(rest, "-batch+"):
		return formatBatch
	case rest[0] == '+':
		return formatOther
	}
	return formatNone // another type whose name begins likewise
}
