package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// progress shows how far something is: a bar on a terminal, and otherwise a plain line now and then.
type progress struct {
	mu    sync.Mutex
	w     io.Writer
	tty   bool
	what  string
	start time.Time
	shown time.Time
	drawn bool
}

func newProgress(w io.Writer, what string) *progress {
	p := &progress{w: w, what: what, start: time.Now(), shown: time.Now()}
	if f, ok := w.(*os.File); ok {
		fi, err := f.Stat()
		p.tty = err == nil && fi.Mode()&os.ModeCharDevice != 0
	}
	return p
}

// at shows that done of total is done. unit formats a count with its rate. It may be called often and from several goroutines.
func (p *progress) at(done, total int64, unit string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	every := 5 * time.Second
	if p.tty {
		every = 100 * time.Millisecond
	}
	now := time.Now()
	if now.Sub(p.shown) < every || total <= 0 {
		return
	}
	p.shown = now
	spent := now.Sub(p.start).Seconds()
	left := "?"
	if done > 0 {
		left = fmt.Sprintf("%.0f s", spent*float64(total-done)/float64(done))
	}
	text := fmt.Sprintf("%s: %d of %d %s (%.0f %%), %.0f s, %s left", p.what, done, total, unit, 100*float64(done)/float64(total), spent, left)
	if !p.tty {
		fmt.Fprintln(p.w, text)
		return
	}
	const width = 24
	n := int(width * done / total)
	fmt.Fprintf(p.w, "\r[%s%s] %s\x1b[K", strings.Repeat("#", n), strings.Repeat(".", width-n), text)
	p.drawn = true
}

// end removes the bar.
func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.drawn {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}
