// Package proc runs child processes that tests kill, stop and start again.
package proc

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Process is one child. It never outlives the test process.
type Process struct {
	Name string
	cmd  *exec.Cmd
	done chan struct{} // closed when it was reaped
	err  error         // of Wait, valid when done is closed
	out  *output
}

// Start runs the program. env is added to the environment of the test. The
// child is killed with the test; what it printed last is logged if the test failed.
func Start(t testing.TB, env []string, program string, args ...string) *Process {
	t.Helper()
	p := &Process{Name: program, done: make(chan struct{}), out: &output{}}
	p.cmd = exec.Command(program, args...)
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error, 1)
	go p.own(started)
	if err := <-started; err != nil {
		t.Fatalf("start %s: %v", program, err)
	}
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("last output of %s:\n%s", program, p.out.tail(4000))
		}
	})
	return p
}

// own starts the child and waits for it on one thread that is never shared:
// the kernel kills the child when the thread that started it ends, and a
// thread of the scheduler may end while the test goes on.
func (p *Process) own(started chan<- error) {
	runtime.LockOSThread()
	err := p.cmd.Start()
	started <- err
	if err != nil {
		return
	}
	p.err = p.cmd.Wait()
	close(p.done)
}

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.done }

// Kill ends the process and its group with SIGKILL, and reaps it. Killing an
// ended process does nothing.
func (p *Process) Kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// Signal sends s to the process.
func (p *Process) Signal(s syscall.Signal) { p.signal(s) }

func (p *Process) signal(s syscall.Signal) {
	select {
	case <-p.done:
	default:
		_ = syscall.Kill(-p.cmd.Process.Pid, s)
	}
}

// Stop freezes the process, Cont lets it go on.
func (p *Process) Stop() { p.signal(syscall.SIGSTOP) }

// Cont lets a stopped process go on.
func (p *Process) Cont() { p.signal(syscall.SIGCONT) }

// Term sends SIGTERM and waits for the end: nil for exit code 0.
func (p *Process) Term(within time.Duration) error {
	p.signal(syscall.SIGTERM)
	return p.Wait(within)
}

// Wait waits for the end: nil for exit code 0.
func (p *Process) Wait(within time.Duration) error {
	select {
	case <-p.done:
		return p.err
	case <-time.After(within):
		return fmt.Errorf("proc: %s did not end within %v", p.Name, within)
	}
}

// Output is what the process printed so far, at most the last 256 KiB.
func (p *Process) Output() string { return p.out.tail(maxOutput) }

// WaitFor waits until the output has a match of pattern, and fails the test
// if it has none within d or the process ends before.
func (p *Process) WaitFor(t testing.TB, pattern string, d time.Duration) {
	t.Helper()
	re := regexp.MustCompile(pattern)
	deadline := time.Now().Add(d)
	for !re.MatchString(p.Output()) {
		select {
		case <-p.done:
			if !re.MatchString(p.Output()) {
				t.Fatalf("%s ended before it printed %q: %v\n%s", p.Name, pattern, p.err, p.out.tail(2000))
			}
			return
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s did not print %q within %v", p.Name, pattern, d)
		}
	}
}

const maxOutput = 256 << 10

// output keeps the end of what a process prints.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.buf.Len() > 2*maxOutput {
		o.buf.Next(o.buf.Len() - maxOutput)
	}
	return o.buf.Write(b)
}

func (o *output) tail(n int) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	b := o.buf.Bytes()
	return string(b[max(0, len(b)-n):])
}

// ready asks until probe succeeds, and fails the test if it does not within d
// or p ends before.
func ready(t testing.TB, p *Process, d time.Duration, probe func(context.Context) error) {
	t.Helper()
	deadline := time.Now().Add(d)
	for {
		ctx, cancel := context.WithDeadline(context.Background(), deadline)
		err := probe(ctx)
		cancel()
		if err == nil {
			return
		}
		select {
		case <-p.done:
			t.Fatalf("%s ended: %v\n%s", p.Name, p.err, p.out.tail(4000))
		case <-time.After(10 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is not ready within %v: %v", p.Name, d, err)
		}
	}
}
