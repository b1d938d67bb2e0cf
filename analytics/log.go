package analytics

import (
	"log"
	"log/slog"
	"os"
	"path"
	"strings"
	"sync"
	"time"
)

func (c *Client) prepareLog() {
	c.diagnosis = slog.LevelDebug
	if c.Verbose || debugEnabled(os.Getenv("DEBUG")) {
		c.diagnosis = slog.LevelInfo
	}
	switch {
	case c.slog != nil:
		c.log = c.slog
	case c.Logger != nil:
		c.log = slog.New(slog.NewTextHandler(lineWriter{c.Logger}, &slog.HandlerOptions{
			ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
				if len(groups) == 0 && a.Key == slog.TimeKey {
					return slog.Attr{} // the logger writes its own time
				}
				return a
			},
		}))
	default:
		c.log = slog.New(slog.DiscardHandler)
	}
}

// debugEnabled parses the environment variable DEBUG: names, separated by commas or spaces, with *
// as a wildcard.
func debugEnabled(value string) bool {
	for _, name := range strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == ' ' }) {
		if ok, _ := path.Match(name, "analytics"); ok {
			return true
		}
	}
	return false
}

// lineWriter writes each line to a logger.
type lineWriter struct{ to *log.Logger }

func (w lineWriter) Write(line []byte) (int, error) {
	return len(line), w.to.Output(0, strings.TrimSuffix(string(line), "\n"))
}

// health limits the log during an outage: it logs the start and the end, and a sum of the lost
// calls.
type health struct {
	mu       sync.Mutex
	failures int // consecutive temporary failures
	losses   int // lost calls that are not logged yet
	cause    error
	logged   time.Time
}

const (
	outageAfter  = 3 // consecutive failed attempts
	lossesPeriod = 10 * time.Second
)

// attempted records the outcome of a request.
func (h *health) attempted(l *slog.Logger, out outcome) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case out.again:
		if h.failures++; h.failures == outageAfter {
			l.Warn("the server does not accept calls; retrying", "error", out.err)
		}
	case out.err == nil:
		if h.failures >= outageAfter {
			l.Warn("the server accepts calls again", "failedAttempts", h.failures)
		}
		h.failures = 0
	}
}

// lost records calls that failed.
func (h *health) lost(l *slog.Logger, calls int, cause error) {
	h.mu.Lock()
	h.losses += calls
	h.cause = cause
	h.mu.Unlock()
	h.logLosses(l, lossesPeriod)
}

// logLosses logs the calls lost since its last log line, at most once per period.
func (h *health) logLosses(l *slog.Logger, period time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.losses == 0 || !h.logged.IsZero() && time.Since(h.logged) < period {
		return
	}
	l.Error("calls were not delivered", "calls", h.losses, "lastError", h.cause)
	h.losses, h.logged = 0, time.Now()
}
