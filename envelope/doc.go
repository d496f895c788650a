// Package envelope is the message and the conventions by which it says which
// event it carries.
//
// A producer fills a [Message] and an adapter writes it in its broker's
// [Binding]; a consumer's adapter hands over the message as it was on the
// wire, an [Extractor] tells the event's [Identity], and [Decode] gives the
// form that a handler wants. CloudEvents 1.0 is the convention by default;
// [FromHeader] serves those who have another.
//
// # Invariants
//
//   - Source and id together are the identity. Nothing is trimmed, folded or
//     normalised: two identities are equal if their bytes are.
//   - The same event has the same identity whichever broker and mode carried
//     it. What one of them would change is refused by all of them, when it is
//     written and when it is read: white space around an id, and control
//     characters. (NATS trims header values and turns line breaks into spaces.)
//   - A missing id is never an empty id: no two messages without one are
//     copies of each other.
//   - Known header names are found in any case; a name that merely ends in a
//     known one is another name; two values for one name are malformed, because
//     choosing one of them would choose whose message is dropped.
//   - Reading never modifies the message: a dead letter holds the original bytes.
//   - A null body and an empty body are two things where the broker has both.
package envelope
