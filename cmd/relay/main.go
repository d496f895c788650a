// Command relay publishes the rows of a transactional outbox to Kafka or NATS.
//
//	relay migrate    create or update the tables
//	relay run        publish until SIGTERM
//	relay parked     list, requeue or drop rows that were given up
//	relay version
//
// Settings come from a YAML file, UNECHO_RELAY_ environment variables and
// flags, the later ones winning. Exit code 2 means that the command line or the
// configuration makes no sense, 1 that something failed, 0 success.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	// The first signal ends the context, and gives signals their default
	// meaning back: a second one ends the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(execute(ctx, os.Environ(), os.Args[1:], os.Stdout, os.Stderr))
}

// execute runs a command line and returns the exit code.
func execute(ctx context.Context, environ, args []string, stdout, stderr io.Writer) int {
	cmd := rootCommand(environ)
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	err := cmd.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	_, _ = fmt.Fprintln(stderr, "relay:", err)
	return exitCode(err)
}

// usageError is an error of whoever wrote the command line or the
// configuration.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func exitCode(err error) int {
	var u *usageError
	if errors.As(err, &u) {
		return 2
	}
	return 1
}
