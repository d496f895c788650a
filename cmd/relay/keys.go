package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/unecho/unecho/dedupe"
	"github.com/unecho/unecho/dedupe/pgdedupe"
)

// keysCommand is for whoever has to find out what became of an event.
func keysCommand(with withConfig) *cobra.Command {
	keys := &cobra.Command{Use: "keys", Short: "A consumer's keys in PostgreSQL: explain, list, release, settle, forget", Args: noSuchCommand, RunE: whichCommand}
	keys.AddCommand(showKey(with), listKeys(with), countKeys(with), pruneKeys(with),
		&cobra.Command{Use: "release KEY...", Short: "Let keys be handled again whose outcome is unknown, or that are parked", Args: keyIDs,
			RunE: with(admin(eachKey("released", dedupe.Admin.Release)))},
		&cobra.Command{Use: "settle KEY...", Short: "Forget the conflicts of keys; the keys stay as long as their retention says", Args: keyIDs,
			RunE: with(admin(eachKey("settled", dedupe.Admin.Settle)))},
		&cobra.Command{Use: "forget KEY...", Short: "Forget keys altogether: what is delivered again is handled again", Args: keyIDs,
			RunE: with(admin(eachKey("forgot", dedupe.Admin.Evict)))})
	return keys
}

// keyStore runs f on the pool of a database whose tables are right.
func keyStore(f func(cmd *cobra.Command, pool *pgxpool.Pool, o *pgdedupe.Options, args []string) error) func(*cobra.Command, *config, []string) error {
	return onTables(func(schema string) *pgdedupe.Options { return &pgdedupe.Options{Schema: schema} }, pgdedupe.Validate, "relay migrate dedupe", f)
}

func admin(f func(cmd *cobra.Command, a dedupe.Admin, args []string) error) func(*cobra.Command, *config, []string) error {
	return keyStore(func(cmd *cobra.Command, pool *pgxpool.Pool, o *pgdedupe.Options, args []string) error {
		return f(cmd, pgdedupe.NewAdmin(pool, o), args)
	})
}

func keyIDs(_ *cobra.Command, args []string) error {
	if len(args) == 0 {
		return &usageError{errors.New("give at least one key, as `relay keys list` shows them")}
	}
	for _, a := range args {
		if _, err := dedupe.ParseKeyID(a); err != nil {
			return &usageError{err}
		}
	}
	return nil
}

// eachKey does something to each key, and fails at the end if it did not work
// for one.
func eachKey(done string, do func(dedupe.Admin, context.Context, dedupe.KeyID) error) func(*cobra.Command, dedupe.Admin, []string) error {
	return func(cmd *cobra.Command, a dedupe.Admin, args []string) error {
		return eachArg(cmd, done, args, func(arg string) (own bool, err error) {
			id, _ := dedupe.ParseKeyID(arg) // checked by keyIDs
			err = do(a, cmd.Context(), id)
			if own = errors.Is(err, dedupe.ErrNotFound) || errors.Is(err, dedupe.ErrWrongState); own {
				err = fmt.Errorf("%v: %w", id, err)
			}
			return own, err
		})
	}
}

// eachArg does something to each argument, and fails at the end if that met an
// error that is this argument's own.
func eachArg(cmd *cobra.Command, done string, args []string, do func(arg string) (own bool, err error)) error {
	var failed error
	for _, arg := range args {
		own, err := do(arg)
		switch {
		case own:
			failed = errors.Join(failed, err)
		case err != nil:
			return err
		default:
			if _, err := fmt.Fprintln(cmd.OutOrStdout(), done, arg); err != nil {
				return err
			}
		}
	}
	return failed
}

// hintMore says how a list goes on that has a next page.
func hintMore(hints io.Writer, next string) error {
	if next == "" {
		return nil
	}
	_, err := fmt.Fprintf(hints, "there may be more: --after %s\n", next)
	return err
}

func showKey(with withConfig) *cobra.Command {
	var k dedupe.Key
	cmd := &cobra.Command{Use: "show [KEY]", Short: "Explain a key, by its id or by the event's identity",
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) > 1:
				return &usageError{errors.New("give one key")}
			case len(args) == 1:
				return keyIDs(nil, args)
			}
			if err := k.Validate(); err != nil {
				return &usageError{fmt.Errorf("give a key, or --consumer and --id (and --source and --tenant, if there are any): %w", err)}
			}
			return nil
		},
		RunE: with(admin(func(cmd *cobra.Command, a dedupe.Admin, args []string) error {
			id := k.Stored()
			if len(args) == 1 {
				id, _ = dedupe.ParseKeyID(args[0]) // checked
			}
			e, err := a.Find(cmd.Context(), id)
			if err != nil {
				return err
			}
			conflicts, err := a.Conflicts(cmd.Context(), id)
			if err != nil {
				return err
			}
			return printKey(cmd.OutOrStdout(), e, conflicts)
		}))}
	cmd.Flags().StringVar(&k.Tenant, "tenant", "", "the tenant of the key")
	cmd.Flags().StringVar(&k.Consumer, "consumer", "", "the name that the consumer was wrapped with")
	cmd.Flags().StringVar(&k.Source, "source", "", "the source of the event")
	cmd.Flags().StringVar(&k.ID, "id", "", "the id of the event")
	return cmd
}

func printKey(w io.Writer, e dedupe.Entry, conflicts []dedupe.ConflictRecord) error {
	var b strings.Builder
	for line := range strings.Lines(e.Explain()) {
		b.WriteString(printable(strings.TrimSuffix(line, "\n")) + "\n")
	}
	for _, c := range conflicts {
		what := "the fields are not known"
		if c.Fields != nil {
			what = "differs in " + strings.Join(c.Fields, " ")
		}
		fmt.Fprintf(&b, "conflict   %s, seen %s, fingerprint %s: %s\n", c.Reason, c.SeenAt.UTC().Format(time.RFC3339), hex.EncodeToString(c.Fingerprint[:8]), printable(what))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func listKeys(with withConfig) *cobra.Command {
	var f dedupe.Filter
	var state string
	var asJSON bool
	cmd := &cobra.Command{Use: "list", Short: "List keys in a state (running, free, unknown, parked, done), or in conflict",
		Args: func(cmd *cobra.Command, args []string) error {
			if state != "" {
				var err error
				if f.State, err = dedupe.ParseState(state); err != nil {
					return &usageError{err}
				}
			}
			if err := f.Check(); err != nil {
				return &usageError{fmt.Errorf("give --state, or --in-conflict: %w", err)}
			}
			return noArgs(cmd, args)
		},
		RunE: with(admin(func(cmd *cobra.Command, a dedupe.Admin, _ []string) error {
			page, err := a.List(cmd.Context(), f)
			if err != nil {
				return err
			}
			return printKeys(cmd.OutOrStdout(), cmd.ErrOrStderr(), page, asJSON)
		}))}
	cmd.Flags().StringVar(&state, "state", "", "the state of the keys")
	cmd.Flags().BoolVar(&f.InConflict, "in-conflict", false, "keys with conflicts that nobody has settled, whatever their state")
	cmd.Flags().StringVar(&f.After, "after", "", "go on where a list has ended")
	cmd.Flags().IntVar(&f.Limit, "limit", 100, "at most so many keys, up to 1000")
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON object a line")
	return cmd
}

func printKeys(out, hints io.Writer, page dedupe.Page, asJSON bool) error {
	err := printList(out, page.Entries, asJSON, func(e dedupe.Entry) map[string]any {
		return map[string]any{"key": e.ID.String(), "state": e.State.String(), "tenant": e.Key.Tenant, "consumer": e.Key.Consumer,
			"source": e.Key.Source, "id": e.Key.ID, "attempt": e.Attempt, "holder": e.Holder, "conflicts": e.Conflicts}
	}, "KEY\tSTATE\tCONSUMER\tSOURCE\tID\tATTEMPT\tCONFLICTS", func(e dedupe.Entry) string {
		return fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%d\t%d", e.ID, e.State, printable(e.Key.Consumer), printable(e.Key.Source), printable(e.Key.ID), e.Attempt, e.Conflicts)
	})
	if err != nil {
		return err
	}
	return hintMore(hints, page.Next)
}

func countKeys(with withConfig) *cobra.Command {
	return &cobra.Command{Use: "count", Short: "How many keys are in which state, at a glance", Args: noArgs,
		RunE: with(admin(func(cmd *cobra.Command, a dedupe.Admin, _ []string) error {
			c, err := a.Counts(cmd.Context())
			if err != nil {
				return err
			}
			t := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 2, ' ', 0)
			for _, row := range []struct {
				name string
				n    int64
			}{{"done (estimate)", c.Done}, {"running", c.Running}, {"free", c.Free}, {"unknown", c.Unknown}, {"parked", c.Parked}, {"conflicts", c.Conflicts}} {
				fmt.Fprintf(t, "%s\t%s\n", row.name, count(row.n))
			}
			return t.Flush()
		}))}
}

// count writes a number as far as it is known.
func count(n int64) string {
	switch {
	case n < 0:
		return "not known"
	case n == dedupe.CountCap:
		return fmt.Sprintf("%d or more", n)
	}
	return fmt.Sprint(n)
}

func pruneKeys(with withConfig) *cobra.Command {
	var limit int
	cmd := &cobra.Command{Use: "prune", Short: "Delete keys whose retention is over; not soon after a downtime of the consumer", Args: noArgs,
		RunE: with(keyStore(func(cmd *cobra.Command, pool *pgxpool.Pool, o *pgdedupe.Options, _ []string) error {
			return prunes(cmd, limit, func(ctx context.Context, limit int) (int, error) { return pgdedupe.Prune(ctx, pool, o, limit) })
		}))}
	cmd.Flags().IntVar(&limit, "limit", 0, "at most so many; 0 is all")
	return cmd
}

// prunes says how many rows were deleted.
func prunes(cmd *cobra.Command, limit int, prune func(ctx context.Context, limit int) (int, error)) error {
	n, err := prune(cmd.Context(), limit)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), "pruned", n)
	return err
}
