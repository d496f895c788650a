package consumer

import "context"

// StartCounter counts, durably and before a handler starts, how often it was
// started on a delivery without coming to an end: what counts is left by
// processes that died. All methods may be called concurrently.
type StartCounter interface {
	// Start counts a start at each place, durably, and returns how many starts
	// there have no end, this one included. places are distinct and not empty
	// strings, such as "consumer\x00topic/3/42".
	Start(ctx context.Context, places []string) ([]int, error)
	// End forgets the starts at places: the handler has come to an end there,
	// whichever.
	End(ctx context.Context, places []string) error
}
