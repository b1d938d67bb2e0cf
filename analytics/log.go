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
	c.chatter = slog.LevelDebug
	if c.Verbose || debugEnabled(os.Getenv("DEBUG")) {
		c.chatter = slog.LevelInfo
	}
	switch {
	case c.slog != nil:
		c.log = c.slog
	case c.Logger != nil:
		c.log = slog.New(slog.NewTextHandler(lineWriter{c.Logger}, &slog.HandlerOptions{
			ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
				if len(groups) == 0 && a.Key == slog.TimeKey {
					return slog.Attr{} // the logger writes its own
				}
				return a
			},
		}))
	default:
		c.log = slog.New(slog.DiscardHandler)
	}
}

// debugEnabled reads the environment variable DEBUG: names, separated by commas
// or spaces, in which * stands for anything.
func debugEnabled(value string) bool {
	for _, name := range strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == ' ' }) {
		if ok, _ := path.Match(name, "analytics"); ok {
			return true
		}
	}
	return false
}

// lineWriter hands each line to a logger.
type lineWriter struct{ to *log.Logger }

func (w lineWriter) Write(line []byte) (int, error) {
	return len(line), w.to.Output(0, strings.TrimSuffix(string(line), "\n"))
}

// health keeps an outage from filling the log: its begin and its end are
// logged, and the calls lost in it are summed up.
type health struct {
	mu       sync.Mutex
	failures int // attempts in a row that may pass
	losses   int // calls not yet logged
	cause    error
	logged   time.Time
}

const (
	outageAfter  = 3 // failed attempts in a row
	lossesPeriod = 10 * time.Second
)

// attempted takes note of how a request went.
func (h *health) attempted(l *slog.Logger, out outcome) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case out.again:
		if h.failures++; h.failures == outageAfter {
			l.Warn("the server takes no calls; they are kept and sent again", "error", out.err)
		}
	case out.err == nil:
		if h.failures >= outageAfter {
			l.Warn("the server takes calls again", "failedAttempts", h.failures)
		}
		h.failures = 0
	}
}

// lost takes note of calls that were given up.
func (h *health) lost(l *slog.Logger, calls int, cause error) {
	h.mu.Lock()
	h.losses += calls
	h.cause = cause
	h.mu.Unlock()
	h.logLosses(l, lossesPeriod)
}

// logLosses logs what was lost since it last did, if that is long enough ago.
func (h *health) logLosses(l *slog.Logger, period time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.losses == 0 || !h.logged.IsZero() && time.Since(h.logged) < period {
		return
	}
	l.Error("calls were not delivered", "calls", h.losses, "lastError", h.cause)
	h.losses, h.logged = 0, time.Now()
}
