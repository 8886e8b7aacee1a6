//go:build unix

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// asCommand in the environment makes the test binary be the command.
const asCommand = "TRAINERRANK_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
	}
	// Whoever runs the tests may ignore SIGHUP (nohup does). A signal that is caught here has its default in the processes started from here.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	os.Exit(m.Run())
}

// command is a process of the command.
func command(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	c := exec.CommandContext(t.Context(), self, args...)
	c.Env = append(os.Environ(), asCommand+"=1")
	return c
}

// long is a request file that takes the generic kernel many seconds.
func long(t testing.TB) string {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 2))
	var lines []string
	for i := range 300 {
		tokens := make([]string, 256)
		for j := range tokens {
			tokens[j] = fmt.Sprint(rng.IntN(32))
		}
		lines = append(lines, fmt.Sprintf(`{"id": %d, "input_tokens": [%s]}`, i, strings.Join(tokens, ",")))
	}
	return writeLines(t, lines)
}

// The first signal stops a long run where it is: exit 1, the place on standard error, no file. So does that of a terminal that goes away.
func TestSignalsStopALongRun(t *testing.T) {
	requests := long(t)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) {
			dir := t.TempDir()
			c := command(t, "score", "--requests", requests, "--threads", "1", "--out", filepath.Join(dir, "answers.jsonl"), "--summary", filepath.Join(dir, "summary.json"))
			c.Env = append(c.Env, "TRAINERRANK_KERNEL=generic")
			c.Dir = dir
			pipe, err := c.StderrPipe()
			must(t, err)
			must(t, c.Start())
			stderr := bufio.NewReader(pipe)
			said := ""
			for !strings.Contains(said, "plan: ") {
				line, err := stderr.ReadString('\n')
				if said += line; err != nil {
					t.Fatalf("%v: %s", err, said)
				}
			}
			time.Sleep(300 * time.Millisecond) // into the layers
			sent := time.Now()
			must(t, c.Process.Signal(sig))
			rest, err := io.ReadAll(stderr)
			must(t, err)
			c.Wait()
			said += string(rest)
			if d := time.Since(sent); d > 5*time.Second {
				t.Errorf("it took %v to stop", d)
			}
			if c.ProcessState.ExitCode() != exitFailed || !regexp.MustCompile(`trainerrank: interrupted: .*layer \d+ of 4.*\nhint: `).MatchString(said) {
				t.Errorf("%v\n%s", c.ProcessState, said)
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
				t.Errorf("left %v", left)
			}
		})
	}
}

// A process that waits for somebody else ends with the first signal too.
func TestSignalsStopAProcessThatIsStuck(t *testing.T) {
	dir := t.TempDir()
	must(t, syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
	for name, args := range map[string][]string{
		"requests from a pipe": {"score", "--requests", "pipe"},
		"answers to a pipe":    {"score", "--out", "pipe"},
		"summary to a pipe":    {"score", "--summary", "pipe", "--out", "/dev/null"},
		"answers nobody reads": {"score"},
	} {
		c := command(t, args...)
		c.Dir = dir
		r, w := fullPipe(t)
		defer r.Close()
		defer w.Close()
		c.Stdout = w
		var stderr bytes.Buffer
		c.Stderr = &stderr
		must(t, c.Start())
		time.Sleep(200 * time.Millisecond)
		must(t, c.Process.Signal(syscall.SIGINT))
		ended := make(chan error, 1)
		go func() { ended <- c.Wait() }()
		select {
		case <-ended:
			if c.ProcessState.ExitCode() != exitFailed || !strings.Contains(stderr.String(), "interrupted: ") {
				t.Errorf("%s: %v\n%s", name, c.ProcessState, stderr.String())
			}
		case <-time.After(3 * time.Second):
			c.Process.Kill()
			<-ended
			t.Errorf("%s: still there after a signal\n%s", name, stderr.String())
		}
	}
}

// fullPipe is a pipe that takes nothing more, and that nobody reads.
func fullPipe(t testing.TB) (r, w *os.File) {
	t.Helper()
	var fd [2]int
	must(t, syscall.Pipe(fd[:]))
	must(t, syscall.SetNonblock(fd[1], true))
	var err error
	for block := make([]byte, 4096); err == nil; {
		_, err = syscall.Write(fd[1], block)
	}
	must(t, syscall.SetNonblock(fd[1], false))
	return os.NewFile(uintptr(fd[0]), "pipe"), os.NewFile(uintptr(fd[1]), "pipe")
}

// A second signal ends the process whatever it is doing: here it cannot even say what it is doing. Shells start what runs in the background
// with interrupts ignored; that does not matter.
func TestASecondSignalEndsTheProcess(t *testing.T) {
	signal.Ignore(syscall.SIGINT)
	defer signal.Reset(syscall.SIGINT)
	c := command(t, "score")
	r, w := fullPipe(t)
	defer r.Close()
	c.Stderr = w
	must(t, c.Start())
	w.Close()
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	time.Sleep(200 * time.Millisecond)
	must(t, c.Process.Signal(syscall.SIGINT))
	select {
	case <-ended:
		t.Fatalf("the first signal: %v", c.ProcessState)
	case <-time.After(200 * time.Millisecond):
	}
	must(t, c.Process.Signal(syscall.SIGINT))
	select {
	case <-ended:
		if c.ProcessState.ExitCode() != exitFailed {
			t.Errorf("%v", c.ProcessState)
		}
	case <-time.After(3 * time.Second):
		c.Process.Kill()
		<-ended
		t.Error("still there after two signals")
	}
}

// A reader that has seen enough ends the command: not with a panic, and not with exit 0.
func TestABrokenPipeEndsTheCommand(t *testing.T) {
	requests := writeLines(t, []string{strings.Replace(bundled(t)[0], `"id"`, `"logits": true, "id"`, 1), bundled(t)[1], bundled(t)[2]})
	c := command(t, "score", "--requests", requests)
	r, w, err := os.Pipe()
	must(t, err)
	var stderr bytes.Buffer
	c.Stdout, c.Stderr = w, &stderr
	r.Close()
	must(t, c.Start())
	w.Close()
	c.Wait()
	status := c.ProcessState.Sys().(syscall.WaitStatus)
	if !(status.Signaled() && status.Signal() == syscall.SIGPIPE || status.ExitStatus() == exitFailed) {
		t.Errorf("%v\n%s", c.ProcessState, stderr.String())
	}
	if s := stderr.String(); strings.Contains(s, "panic") || strings.Contains(s, "goroutine") || strings.Contains(s, "done:") {
		t.Errorf("%s", s)
	}
}

// --out may name what is open already, as shells do with >( ), and must not replace it.
func TestOutToAnOpenFile(t *testing.T) {
	want, err := command(t, "score").Output()
	must(t, err)
	for _, path := range []string{"/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"} {
		if _, err := os.Stat(path); err != nil {
			continue
		}
		got, err := command(t, "score", "--out", path).Output() // a pipe
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s as a pipe: %v, %d bytes, want %d", path, err, len(got), len(want))
		}
		file := filepath.Join(t.TempDir(), "file")
		f, err := os.Create(file)
		must(t, err)
		f.WriteString("before\n")
		c := command(t, "score", "--out", path)
		c.Stdout = f
		must(t, c.Run())
		f.Close()
		data, err := os.ReadFile(file)
		must(t, err)
		if string(data) != "before\n"+string(want) {
			t.Errorf("%s as a file: %d bytes, want %d", path, len(data), len(want)+7)
		}
	}
}

// TestTheBinary builds the command as a user does, and runs the README's first line and a few that fail.
func TestTheBinary(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: -short: it builds the command")
	}
	bin := filepath.Join(t.TempDir(), "trainerrank")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, c := range []struct {
		args   []string
		code   int
		stdout int // lines
	}{
		{[]string{"score"}, exitDone, 32},
		{[]string{"plan"}, exitDone, -1},
		{[]string{"help"}, exitDone, -1},
		{[]string{}, exitUsage, 0},
		{[]string{"score", "--nope"}, exitUsage, 0},
		{[]string{"score", "--requests", "nothing"}, exitFailed, 0},
		{[]string{"score", "--budget", "1MB"}, exitRefused, 0},
		{[]string{"inspect", "."}, exitFailed, 0},
	} {
		cmd := exec.Command(bin, c.args...)
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		cmd.Dir = t.TempDir()
		cmd.Run()
		if cmd.ProcessState.ExitCode() != c.code || c.stdout >= 0 && strings.Count(stdout.String(), "\n") != c.stdout || strings.Contains(stderr.String(), "panic") {
			t.Errorf("%q: %v, %d bytes on standard output\n%s", c.args, cmd.ProcessState, stdout.Len(), stderr.String())
		}
	}
	if out, err := exec.Command("sh", "-c", "'"+bin+"' score 2>&1 >/dev/full").CombinedOutput(); err == nil || !strings.Contains(string(out), "no space left") {
		t.Errorf("to a full disk: %v: %s", err, out)
	}
}
