// Package planted shows that a test suite can fail: it runs a part of the
// suite against something that was broken on purpose, and demands a failure.
package planted

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/unecho/unecho/internal/testenv"
)

// patience bounds one run against a broken implementation. A case that hangs
// has noticed something too, but no suite should rely on that.
const patience = 60 * time.Second

// Caught runs a suite, or a case of one, with a recording testing.TB and fails
// t unless run has failed. It logs one line, "PLANTED suite/bug caught", that
// `make planted` counts.
//
// Several runs are the cases of a suite: the first that fails ends it.
func Caught(t *testing.T, name string, runs ...func(tb testing.TB)) {
	t.Helper()
	for _, run := range runs {
		r := &recorder{TB: t}
		if !r.run(run) {
			t.Fatalf("PLANTED %s: a case neither passed nor failed within %v", name, patience)
		}
		if r.missing != "" {
			t.Skip(r.missing)
		}
		if r.Failed() {
			t.Logf("PLANTED %s caught: %s", name, r.first())
			return
		}
	}
	t.Errorf("PLANTED %s missed: the suite passes with this bug", name)
}

// recorder is a testing.TB whose failures stay with it.
type recorder struct {
	testing.TB // for what it does not answer itself, and for the unexported method

	mu       sync.Mutex
	failed   bool
	messages []string
	cleanups []func()
	dirs     int
	missing  string // the service for which a case was skipped
}

// run reports whether f ended. Cleanups run in any case.
func (r *recorder) run(f func(tb testing.TB)) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer r.clean()
		defer func() {
			if v := recover(); v != nil {
				r.fail(fmt.Sprintf("panic: %v", v))
			}
		}()
		f(r)
	}()
	select {
	case <-done:
		return true
	case <-time.After(patience):
		return false
	}
}

func (r *recorder) clean() {
	r.mu.Lock()
	fs := r.cleanups
	r.cleanups = nil
	r.mu.Unlock()
	for _, f := range slices.Backward(fs) {
		f()
	}
}

func (r *recorder) fail(msg string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = true
	r.messages = append(r.messages, msg)
}

func (r *recorder) first() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.messages) == 0 {
		return "(no message)"
	}
	return r.messages[0]
}

func (r *recorder) Failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed
}

func (r *recorder) Cleanup(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cleanups = append(r.cleanups, f)
}

func (r *recorder) TempDir() string {
	r.mu.Lock()
	r.dirs++
	dir := filepath.Join(r.TB.TempDir(), fmt.Sprint("planted", r.dirs))
	r.mu.Unlock()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		r.Fatal(err)
	}
	return dir
}

// A case that is skipped has seen nothing. If that is for want of a service, the
// whole is: without it, nothing is shown about the bug.
func (r *recorder) Skip(args ...any)                 { r.skip(fmt.Sprint(args...)) }
func (r *recorder) Skipf(format string, args ...any) { r.skip(fmt.Sprintf(format, args...)) }
func (r *recorder) SkipNow()                         { r.skip("") }

func (r *recorder) skip(why string) {
	r.mu.Lock()
	if strings.Contains(why, testenv.NeedsServices) {
		r.missing = why
	}
	r.mu.Unlock()
	runtime.Goexit()
}

func (r *recorder) Context() context.Context          { return r.TB.Context() }
func (r *recorder) Helper()                           {}
func (r *recorder) Log(...any)                        {}
func (r *recorder) Logf(string, ...any)               {}
func (r *recorder) Error(args ...any)                 { r.fail(fmt.Sprint(args...)) }
func (r *recorder) Errorf(format string, args ...any) { r.fail(fmt.Sprintf(format, args...)) }
func (r *recorder) Fail()                             { r.fail("Fail") }
func (r *recorder) FailNow()                          { r.fail("FailNow"); runtime.Goexit() }
func (r *recorder) Fatal(args ...any)                 { r.fail(fmt.Sprint(args...)); runtime.Goexit() }
func (r *recorder) Fatalf(format string, args ...any) {
	r.fail(fmt.Sprintf(format, args...))
	runtime.Goexit()
}
