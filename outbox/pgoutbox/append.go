package pgoutbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/unecho/unecho/envelope"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/internal/rows"
)

// NewAppender returns the writing side of an outbox for transactions of pgx.
// o may be nil. It panics if o names no usable schema. It needs no pool: every
// statement runs in the caller's transaction, in one round trip a call.
func NewAppender(o *Options) outbox.Appender[pgx.Tx] {
	return appender{sql: "insert into " + o.names().outbox + " (" + writtenColumns + ") " +
		"select t.topic, t.key, t.event_id, t.source, t.type, t.subject, t.content_type, t.data_schema, t.time, t.meta, t.body " +
		"from unnest($1::text[], $2::bytea[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::timestamptz[], $10::bytea[], $11::bytea[]) " +
		"with ordinality as t(topic, key, event_id, source, type, subject, content_type, data_schema, time, meta, body, n) order by t.n"}
}

// NewWriter is outbox.NewWriter with the appender for pgx. Both options may be nil.
func NewWriter(o *Options, w *outbox.WriterOptions) *outbox.Writer[pgx.Tx] {
	return outbox.NewWriter(NewAppender(o), w)
}

type appender struct{ sql string }

// Append implements [outbox.Appender]. Ids are given in the order of the rows,
// because the sequence is drawn on for each row as the sorted select yields it.
func (a appender) Append(ctx context.Context, tx pgx.Tx, msgs []*envelope.Message) error {
	var c columns
	for _, m := range msgs {
		c.add(m)
	}
	_, err := tx.Exec(ctx, a.sql, c.topic, c.key, c.id, c.source, c.typ, c.subject, c.contentType, c.dataSchema, c.time, c.meta, c.body)
	if err != nil {
		return fmt.Errorf("pgoutbox: append: %w", err)
	}
	return nil
}

// columns are the rows of one insert, turned on their side.
type columns struct {
	topic, id, source, typ, subject, contentType, dataSchema []string
	key, meta, body                                          [][]byte
	time                                                     []time.Time
}

func (c *columns) add(m *envelope.Message) {
	c.topic = append(c.topic, m.Topic)
	c.key = append(c.key, m.Key)
	c.id = append(c.id, m.ID)
	c.source = append(c.source, m.Source)
	c.typ = append(c.typ, m.Type)
	c.subject = append(c.subject, m.Subject)
	c.contentType = append(c.contentType, m.ContentType)
	c.dataSchema = append(c.dataSchema, m.DataSchema)
	c.time = append(c.time, m.Time)
	c.meta = append(c.meta, rows.EncodeMeta(m))
	c.body = append(c.body, m.Body)
}
