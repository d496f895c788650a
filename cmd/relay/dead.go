package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/unecho/unecho/consumer"
	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/envelope"
)

// deadCommand is for whoever decides about messages that a consumer could not
// handle.
func deadCommand(with withConfig) *cobra.Command {
	dead := &cobra.Command{Use: "dead", Short: "Messages that a consumer has parked in PostgreSQL: list, show, discard, count", Args: noSuchCommand, RunE: whichCommand}
	dead.AddCommand(listDead(with), showDead(with), countDead(with), pruneDead(with),
		&cobra.Command{Use: "discard ID...", Short: "Decide that parked messages have no effect", Args: deadIDs,
			RunE: with(parkingLot(discardDead))})
	return dead
}

// parkingTables runs f on the pool of a database whose tables are right.
func parkingTables(f func(cmd *cobra.Command, pool *pgxpool.Pool, o *pgparking.Options, args []string) error) func(*cobra.Command, *config, []string) error {
	return onTables(func(schema string) *pgparking.Options { return &pgparking.Options{Schema: schema} }, pgparking.Validate, "relay migrate parking", f)
}

func parkingLot(f func(cmd *cobra.Command, lot *pgparking.Lot, args []string) error) func(*cobra.Command, *config, []string) error {
	return parkingTables(func(cmd *cobra.Command, pool *pgxpool.Pool, o *pgparking.Options, args []string) error {
		return f(cmd, pgparking.NewLot(pool, o), args)
	})
}

func deadIDs(_ *cobra.Command, args []string) error {
	if len(args) == 0 {
		return &usageError{errors.New("give at least one id, as `relay dead list` shows them")}
	}
	for _, a := range args {
		if b, err := hex.DecodeString(a); err != nil || len(b) != 16 {
			return &usageError{fmt.Errorf("%q is not the id of a parked message, which has 32 hexadecimal digits", a)}
		}
	}
	return nil
}

func discardDead(cmd *cobra.Command, lot *pgparking.Lot, args []string) error {
	return eachArg(cmd, "discarded", args, func(id string) (own bool, err error) {
		err = consumer.DiscardParked(cmd.Context(), lot, id)
		return errors.Is(err, consumer.ErrNotParked) || errors.Is(err, consumer.ErrParkedChanged), err
	})
}

func listDead(with withConfig) *cobra.Command {
	var f consumer.ParkedFilter
	var state string
	var asJSON bool
	cmd := &cobra.Command{Use: "list", Short: "List parked messages, without their payloads",
		Args: func(cmd *cobra.Command, args []string) error {
			f.State = consumer.ParkedState(state)
			if !slices.Contains(consumer.ParkedStates(), f.State) {
				return &usageError{fmt.Errorf("there is no state %q; there are %v", state, consumer.ParkedStates())}
			}
			if f.Limit < 1 {
				return &usageError{fmt.Errorf("--limit is %d, it must be 1 or more", f.Limit)}
			}
			return noArgs(cmd, args)
		},
		RunE: with(parkingLot(func(cmd *cobra.Command, lot *pgparking.Lot, _ []string) error {
			page, err := lot.List(cmd.Context(), f)
			if err != nil {
				return err
			}
			return printDead(cmd.OutOrStdout(), cmd.ErrOrStderr(), page, asJSON)
		}))}
	cmd.Flags().StringVar(&state, "state", string(consumer.ParkedWaiting), "the state: parked, redriven, skipped, discarded or edited")
	cmd.Flags().StringVar(&f.Consumer, "consumer", "", "only those of this consumer")
	cmd.Flags().StringVar(&f.After, "after", "", "go on where a list has ended")
	cmd.Flags().IntVar(&f.Limit, "limit", 100, "at most so many messages, up to 1000")
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON object a line")
	return cmd
}

func printDead(out, hints io.Writer, page consumer.ParkedPage, asJSON bool) error {
	err := printList(out, page.Records, asJSON, deadJSON,
		"ID\tCONSUMER\tPOSITION\tPARKED\tATTEMPTS\tBYTES\tREASON\tERROR", func(p *consumer.Parked) string {
			return fmt.Sprintf("%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s", p.ID, printable(p.Consumer), printable(place(p)),
				p.ParkedAt.UTC().Format(time.RFC3339), p.Attempts, max(p.Size, 0), printable(p.Reason), printable(p.Error))
		})
	if err != nil {
		return err
	}
	return hintMore(hints, page.Next)
}

// place is where the message was taken from, or its topic if that is not known.
func place(p *consumer.Parked) string {
	if p.Message.Position == "" {
		return p.Message.Topic
	}
	return p.Message.Position
}

// deadJSON is a record without its header and its payload.
func deadJSON(p *consumer.Parked) map[string]any {
	return map[string]any{"id": p.ID, "consumer": p.Consumer, "state": p.State, "class": p.Class, "reason": p.Reason, "attempts": p.Attempts,
		"error": p.Error, "topic": p.Message.Topic, "position": p.Message.Position, "bytes": p.Size, "edit_of": p.EditOf, "edited_into": p.EditedInto,
		"parked_at": p.ParkedAt.UTC(), "last_at": p.LastAt.UTC(), "age_seconds": int64(p.Age / time.Second)}
}

func showDead(with withConfig) *cobra.Command {
	var body, asJSON bool
	cmd := &cobra.Command{Use: "show ID", Short: "Explain a parked message; with --body, also what is in it",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return &usageError{errors.New("give one id")}
			}
			return deadIDs(nil, args)
		},
		RunE: with(parkingLot(func(cmd *cobra.Command, lot *pgparking.Lot, args []string) error {
			p, err := lot.Find(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(wholeJSON(p, body))
			}
			_, err = io.WriteString(cmd.OutOrStdout(), explainDead(p, body))
			return err
		}))}
	cmd.Flags().BoolVar(&body, "body", false, "also show the key, the values of the header, and the body")
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON object, bytes as base64")
	return cmd
}

// wholeJSON is a record with its event's identity, and its bytes if they are asked
// for: null for what is null on the wire.
func wholeJSON(p *consumer.Parked, body bool) map[string]any {
	j := deadJSON(p)
	if e, err := envelope.Decode(p.Message); err == nil {
		j["event"] = map[string]string{"source": e.Source, "id": e.ID, "type": e.Type}
	}
	if body {
		type line struct {
			Name  string `json:"name"`
			Value []byte `json:"value"`
		}
		header := make([]line, len(p.Message.Header))
		for i, f := range p.Message.Header {
			header[i] = line{f.Name, f.Value}
		}
		j["key"], j["header"], j["body"] = p.Message.Key, header, p.Message.Body
	}
	return j
}

// explainDead says what a record is, what was decided, and what can be done.
func explainDead(p *consumer.Parked, body bool) string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-10s %s\n", name, printable(fmt.Sprintf(format, args...)))
	}
	m := p.Message
	line("id", "%s", p.ID)
	line("consumer", "%s", p.Consumer)
	line("state", "%s", p.State)
	line("topic", "%s", m.Topic)
	line("position", "%s", m.Position)
	if e, err := envelope.Decode(m); err == nil {
		line("event", "source %q, id %q, type %q", e.Source, e.ID, e.Type)
	}
	line("reason", "%s (%s), %d attempts", p.Reason, p.Class, p.Attempts)
	line("error", "%s", p.Error)
	line("parked", "%s, %v ago; last %s", p.ParkedAt.UTC().Format(time.RFC3339), p.Age.Round(time.Second), p.LastAt.UTC().Format(time.RFC3339))
	if p.EditOf != "" {
		line("edit of", "%s", p.EditOf)
	}
	if p.EditedInto != "" {
		line("edited", "into %s", p.EditedInto)
	}
	line("key", "%s", content(m.Key, body))
	for _, f := range m.Header {
		line("header", "%s: %s", f.Name, content(f.Value, body))
	}
	line("body", "%s", content(m.Body, body))
	if p.State == consumer.ParkedWaiting {
		line("next", "redrive it where its handler is: consumer.Redrive(ctx, lot, handler, nil, %q), with the handler of %q", p.ID, p.Consumer)
		line("", "or change it first: consumer.Edit; or give it up: relay dead discard %s", p.ID)
	}
	return b.String()
}

// content is bytes for a terminal, or how many there are.
func content(b []byte, show bool) string {
	switch {
	case b == nil:
		return "null"
	case !show:
		return fmt.Sprintf("%d bytes", len(b))
	case utf8.Valid(b):
		return string(b)
	}
	return "0x" + hex.EncodeToString(b)
}

func countDead(with withConfig) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{Use: "count", Short: "How many messages are in which state, and since when the oldest waits", Args: noArgs,
		RunE: with(parkingLot(func(cmd *cobra.Command, lot *pgparking.Lot, _ []string) error {
			c, err := lot.Counts(cmd.Context())
			if err != nil {
				return err
			}
			return printDeadCounts(cmd.OutOrStdout(), c, asJSON)
		}))}
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON object")
	return cmd
}

func printDeadCounts(out io.Writer, c pgparking.Counts, asJSON bool) error {
	if asJSON {
		j := map[string]any{"oldest": nil}
		for state, n := range c.States {
			j[string(state)] = n
		}
		if !c.Oldest.IsZero() {
			j["oldest"] = c.Oldest.UTC()
		}
		return json.NewEncoder(out).Encode(j)
	}
	t := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	for _, state := range consumer.ParkedStates() {
		fmt.Fprintf(t, "%s\t%s\n", state, count(c.States[state]))
	}
	if !c.Oldest.IsZero() {
		fmt.Fprintf(t, "oldest parked\t%s\n", c.Oldest.UTC().Format(time.RFC3339))
	}
	return t.Flush()
}

func pruneDead(with withConfig) *cobra.Command {
	var limit int
	o := pgparking.Options{}
	cmd := &cobra.Command{Use: "prune", Short: "Delete messages that were settled long ago; never those that wait", Args: noArgs,
		RunE: with(parkingTables(func(cmd *cobra.Command, pool *pgxpool.Pool, tables *pgparking.Options, _ []string) error {
			o.Schema = tables.Schema
			return prunes(cmd, limit, func(ctx context.Context, limit int) (int, error) { return pgparking.Prune(ctx, pool, &o, limit) })
		}))}
	cmd.Flags().IntVar(&limit, "limit", 0, "at most so many; 0 is all")
	cmd.Flags().DurationVar(&o.Keep, "keep", 0, "for how long after they were settled; 0 is 30 days")
	return cmd
}
