// Package envelope has the message, its identity, and the conventions by which
// a message on the wire says which event it carries.
//
// An adapter receives and publishes a [Message] in its wire form: header lines
// and a body. [Decode] makes of it the form that a handler wants, with the
// CloudEvents attributes in their fields and the payload in Body;
// [Binding.Encode] is the way back. An [Extractor] says which event a message
// carries: [CloudEvents] for those that follow the standard, [FromHeader] for
// those that have an id in a header, and anything else that implements the
// interface.
//
// # What is read
//
// CloudEvents 1.0 in binary mode as Kafka has it (ce_ lines, plain UTF-8,
// content-type) and as NATS has it (ce- lines, percent-encoded, with
// ce-datacontenttype), and in structured mode as JSON. Decode does not need to
// know which broker a message came from. It decides in this order:
//
//  1. The content-type header is application/cloudevents+json: structured.
//     Case and parameters do not matter. A batch is refused as a whole, and so
//     is every format but JSON.
//  2. There is a ce_specversion or ce-specversion line: binary.
//  3. The body is a JSON object with a string member specversion: structured.
//     The released NATS binding sends no header at all.
//  4. It is no CloudEvent. The verdict is that the id is missing, or whatever
//     else is missing where an id was found.
//
// # Tolerance
//
// What the identity and the payload depend on is read strictly. The rest never
// makes poison of a message: an extension attribute whose name no broker could
// carry, whose value is not text, or that is given twice with different values
// is left out, and one whose value is no legal attribute value (an object, a
// fraction) is kept as its JSON text. A percent sign in a NATS header that
// begins no escape is taken literally, since there are producers that do not
// escape.
//
// # Invariants
//
//   - One event has one verdict and one identity, whatever carries it: what
//     one binding would alter on the way is refused by all of them, when it is
//     written and when it is read. So an id, a source or a type never begins or
//     ends with white space and never has a control character in it.
//   - An id is never made up, trimmed, folded or normalised, and a source is
//     never treated as a URI: /a and /a/ are two sources.
//   - Two values for one thing are an error, not a choice. That goes for header
//     lines that differ in spelling or prefix, for JSON members, for data
//     beside data_base64, and for an id in the body beside another in a header.
//     A line that says the same again is fine.
//   - Decode(Encode(m)) is m, and whatever Decode accepts Encode accepts.
//   - The payload is never rewritten: JSON in a structured event is the bytes
//     between the colon and the comma. A tombstone (nil) is not an empty
//     payload, as far as this package can say.
//   - An error of this package is a function of the message alone, so it is
//     never worth a retry, and it never shows an attribute value or payload.
//   - Nothing here modifies its input. What is returned may share its slices.
package envelope
