package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/unecho/unecho/consumer/pgparking"
	"github.com/unecho/unecho/dedupe/pgdedupe"
	"github.com/unecho/unecho/internal/migrate"
	"github.com/unecho/unecho/outbox"
	"github.com/unecho/unecho/outbox/pgoutbox"
)

// rootCommand builds the command tree. environ is the process's environment.
func rootCommand(environ []string) *cobra.Command {
	root := &cobra.Command{Use: "relay", Short: "Publish a transactional outbox to Kafka or NATS", Long: longHelp(),
		Version: version(), SilenceUsage: true, SilenceErrors: true, Args: noSuchCommand, RunE: whichCommand}
	root.CompletionOptions.DisableDefaultCmd = true
	addFlags(root.PersistentFlags())
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	with := func(f func(cmd *cobra.Command, c *config, args []string) error) func(*cobra.Command, []string) error {
		return func(cmd *cobra.Command, args []string) error {
			c, err := load(cmd.Flags(), environ)
			if err != nil {
				return err
			}
			return f(cmd, c, args)
		}
	}
	root.AddCommand(
		&cobra.Command{Use: "run", Short: "Publish until SIGTERM; a second one ends at once", Args: noArgs,
			RunE: with(func(cmd *cobra.Command, c *config, _ []string) error { return run(cmd.Context(), c, cmd.ErrOrStderr()) })},
		migrateCommand(with), parkedCommand(with), keysCommand(with), deadCommand(with),
		&cobra.Command{Use: "version", Short: "Print the version", Args: noArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version())
			return err
		}},
	)
	return root
}

// longHelp says what the list of flags does not.
func longHelp() string {
	var b strings.Builder
	b.WriteString("Publish a transactional outbox to Kafka or NATS.\n\n" +
		"Settings come from a YAML file (--config), from environment variables, and from flags, the later ones\n" +
		"winning. The key relay.max_poll is relay: {max_poll: ...} in the file, " + setting{key: "relay.max_poll"}.envName() + " in\n" +
		"the environment and --relay-max-poll as a flag. An empty variable counts as not set.\n\nThere is no flag for a secret:\n")
	for _, s := range settings {
		if s.secret {
			fmt.Fprintf(&b, "  %s, %s: %s\n", s.key, s.envName(), s.help)
		}
	}
	b.WriteString("\nExit codes: 0 success, 1 something failed, 2 the command line or the configuration makes no sense.")
	return b.String()
}

// noSuchCommand and whichCommand answer for a command that only has others
// below it.
func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return &usageError{fmt.Errorf("there is no command %q; see %s --help", args[0], cmd.CommandPath())}
	}
	return nil
}

func whichCommand(cmd *cobra.Command, _ []string) error {
	return &usageError{fmt.Errorf("which command? See %s --help", cmd.CommandPath())}
}

func noArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return &usageError{err}
	}
	return nil
}

// version is that of the module, and of the commit it was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			v += " " + s.Value
		}
	}
	return v
}

type withConfig func(func(*cobra.Command, *config, []string) error) func(*cobra.Command, []string) error

// tables are what migrate knows: the outbox for the producer's database, the
// keys and the parked messages for a consumer's.
var tables = map[string]struct {
	migrate func(ctx context.Context, pool *pgxpool.Pool, schema string) error
	sql     func(schema string) (string, error)
}{
	"outbox": {
		func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
			return pgoutbox.Migrate(ctx, pool, &pgoutbox.Options{Schema: schema})
		},
		func(schema string) (string, error) { return pgoutbox.SQL(&pgoutbox.Options{Schema: schema}) },
	},
	"dedupe": {
		func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
			return pgdedupe.Migrate(ctx, pool, &pgdedupe.Options{Schema: schema})
		},
		func(schema string) (string, error) {
			o := &pgdedupe.Options{Schema: schema}
			if err := o.Check(); err != nil {
				return "", err
			}
			return pgdedupe.SQL(o), nil
		},
	},
	"parking": {
		func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
			return pgparking.Migrate(ctx, pool, &pgparking.Options{Schema: schema})
		},
		func(schema string) (string, error) {
			o := &pgparking.Options{Schema: schema}
			if err := o.Check(); err != nil {
				return "", err
			}
			return pgparking.SQL(o), nil
		},
	},
}

func migrateCommand(with withConfig) *cobra.Command {
	var sql bool
	cmd := &cobra.Command{Use: "migrate [outbox|dedupe|parking]", Short: "Create tables, or bring them to this version: the relay's outbox, a consumer's keys, or its parked messages",
		ValidArgs: []string{"outbox", "dedupe", "parking"},
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.MatchAll(cobra.MaximumNArgs(1), cobra.OnlyValidArgs)(cmd, args); err != nil {
				return &usageError{err}
			}
			return nil
		},
		RunE: with(func(cmd *cobra.Command, c *config, args []string) error {
			which := tables["outbox"]
			if len(args) == 1 {
				which = tables[args[0]]
			}
			if sql {
				text, err := which.sql(c.Database.Schema)
				if err == nil {
					_, err = io.WriteString(cmd.OutOrStdout(), text)
				}
				return err
			}
			pool, err := connect(cmd.Context(), c)
			if err != nil {
				return err
			}
			defer pool.Close()
			return which.migrate(cmd.Context(), pool, c.Database.Schema)
		})}
	cmd.Flags().BoolVar(&sql, "sql", false, "print the statements for an empty database, and change nothing")
	return cmd
}

// connectTimeout bounds a connection attempt unless the URL does.
const connectTimeout = 10 * time.Second

func connect(ctx context.Context, c *config) (*pgxpool.Pool, error) {
	text, key, err := c.databaseURL()
	if err != nil {
		return nil, err
	}
	cfg, err := pgxpool.ParseConfig(text)
	if err != nil {
		// pgx's own text masks a password it can find, but not one in a
		// malformed URL.
		return nil, &usageError{fmt.Errorf("configuration: %w", c.wrong(key, errors.New("it is not a valid PostgreSQL URL or DSN")))}
	}
	if cfg.ConnConfig.RuntimeParams["application_name"] == "" {
		cfg.ConnConfig.RuntimeParams["application_name"] = "unecho-relay"
	}
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = connectTimeout
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to the database: %w", err)
	}
	return pool, nil
}

// hint adds the command to run to an error about the version of the tables.
func hint(err error, command string) error {
	if errors.Is(err, migrate.ErrOld) {
		return fmt.Errorf("%w: run `%s`", err, command)
	}
	return err
}

// onPool runs f on a pool of the configured database.
func onPool(f func(cmd *cobra.Command, pool *pgxpool.Pool, c *config, args []string) error) func(*cobra.Command, *config, []string) error {
	return func(cmd *cobra.Command, c *config, args []string) error {
		pool, err := connect(cmd.Context(), c)
		if err != nil {
			return err
		}
		defer pool.Close()
		return f(cmd, pool, c, args)
	}
}

// onTables is onPool for tables that are right; command is what mends them.
func onTables[O any](options func(schema string) *O, validate func(context.Context, *pgxpool.Pool, *O) error, command string,
	f func(cmd *cobra.Command, pool *pgxpool.Pool, o *O, args []string) error) func(*cobra.Command, *config, []string) error {
	return onPool(func(cmd *cobra.Command, pool *pgxpool.Pool, c *config, args []string) error {
		o := options(c.Database.Schema)
		if err := validate(cmd.Context(), pool, o); err != nil {
			return hint(err, command)
		}
		return f(cmd, pool, o, args)
	})
}

// parker runs f on the store.
func parker(f func(cmd *cobra.Command, p outbox.Parker, args []string) error) func(*cobra.Command, *config, []string) error {
	return onTables(func(schema string) *pgoutbox.Options { return &pgoutbox.Options{Schema: schema} }, pgoutbox.Validate, "relay migrate",
		func(cmd *cobra.Command, pool *pgxpool.Pool, o *pgoutbox.Options, args []string) error {
			return f(cmd, pgoutbox.NewStore(pool, o), args)
		})
}

func parkedCommand(with withConfig) *cobra.Command {
	parked := &cobra.Command{Use: "parked", Short: "Rows that were given up: list, requeue or drop them", Args: noSuchCommand, RunE: whichCommand}
	var asJSON bool
	var after int64
	var limit int
	args := func(cmd *cobra.Command, args []string) error {
		if limit < 1 {
			return &usageError{fmt.Errorf("--limit is %d, it must be 1 or more", limit)}
		}
		return noArgs(cmd, args)
	}
	list := &cobra.Command{Use: "list", Short: "List parked rows, without their payloads", Args: args,
		RunE: with(parker(func(cmd *cobra.Command, p outbox.Parker, _ []string) error {
			rows, err := p.Parked(cmd.Context(), after, limit)
			if err != nil {
				return err
			}
			return printParked(cmd.OutOrStdout(), rows, asJSON)
		}))}
	list.Flags().BoolVar(&asJSON, "json", false, "one JSON object a line")
	list.Flags().Int64Var(&after, "after", 0, "only rows with a greater id")
	list.Flags().IntVar(&limit, "limit", 100, "at most so many rows")
	parked.AddCommand(list,
		&cobra.Command{Use: "requeue ID...", Short: "Try parked rows again, in their place", Args: ids,
			RunE: with(parker(each("requeued", outbox.Parker.Requeue)))},
		&cobra.Command{Use: "drop ID...", Short: "Delete parked rows; they are never published", Args: ids,
			RunE: with(parker(each("dropped", outbox.Parker.Drop)))})
	return parked
}

func ids(_ *cobra.Command, args []string) error {
	if len(args) == 0 {
		return &usageError{errors.New("give at least one row id")}
	}
	for _, a := range args {
		if _, err := strconv.ParseInt(a, 10, 64); err != nil {
			return &usageError{fmt.Errorf("%q is not a row id", a)}
		}
	}
	return nil
}

// each does something to each row, and fails at the end if one was not parked.
func each(done string, do func(outbox.Parker, context.Context, int64) (bool, error)) func(*cobra.Command, outbox.Parker, []string) error {
	return func(cmd *cobra.Command, p outbox.Parker, args []string) error {
		rows := make(map[string]int64, len(args))
		for i, a := range args {
			id, _ := strconv.ParseInt(a, 10, 64) // checked by ids
			args[i] = strconv.FormatInt(id, 10)
			rows[args[i]] = id
		}
		return eachArg(cmd, done, args, func(arg string) (own bool, err error) {
			ok, err := do(p, cmd.Context(), rows[arg])
			if err == nil && !ok {
				return true, fmt.Errorf("row %s is not parked", arg)
			}
			return false, err
		})
	}
}

func printParked(w io.Writer, rows []outbox.Parked, asJSON bool) error {
	return printList(w, rows, asJSON, func(r outbox.Parked) map[string]any {
		return map[string]any{"id": r.ID, "topic": r.Topic, "type": r.Type, "attempts": r.Attempts, "bytes": r.Size, "reason": r.Reason}
	}, "ID\tTOPIC\tTYPE\tATTEMPTS\tBYTES\tREASON", func(r outbox.Parked) string {
		return fmt.Sprintf("%d\t%s\t%s\t%d\t%d\t%s", r.ID, printable(r.Topic), printable(r.Type), r.Attempts, r.Size, printable(r.Reason))
	})
}

// printList prints rows as a table with a head, or as one JSON object a line.
func printList[T any](w io.Writer, rows []T, asJSON bool, object func(T) map[string]any, head string, line func(T) string) error {
	if asJSON {
		enc := json.NewEncoder(w)
		for _, r := range rows {
			if err := enc.Encode(object(r)); err != nil {
				return err
			}
		}
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, head)
	for _, r := range rows {
		fmt.Fprintln(t, line(r))
	}
	return t.Flush()
}

// printable keeps a row that somebody else has written from talking to the
// terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}
