package logs

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// Each message is logged at most logBurst times in logPeriod; the number of suppressed messages is
// logged at the end of the period. Messages are constant texts, so a storm of one message
// suppresses no other.
const (
	logBurst  = 100
	logPeriod = 10 * time.Second
	// maxSampled bounds how many distinct messages are counted at the same time.
	maxSampled = 1000
)

// auditPrefix begins the messages of the audit log, all of which are written.
const auditPrefix = "audit: "

// sampler limits the log rate per message.
type sampler struct {
	slog.Handler
	*sampled
}

type sampled struct {
	// root logs the suppressed counts.
	root slog.Handler
	mu   sync.Mutex
	// lines holds the counts by message.
	lines map[string]*lines
}

type lines struct {
	until        time.Time
	written, out int
}

func newSampler(h slog.Handler) slog.Handler {
	return &sampler{h, &sampled{root: h, lines: map[string]*lines{}}}
}

// Handle implements slog.Handler.
func (s *sampler) Handle(ctx context.Context, r slog.Record) error {
	if !strings.HasPrefix(r.Message, auditPrefix) && !s.admit(r.Message) {
		return nil
	}
	return s.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (s *sampler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &sampler{s.Handler.WithAttrs(attrs), s.sampled}
}

// WithGroup implements slog.Handler.
func (s *sampler) WithGroup(name string) slog.Handler {
	return &sampler{s.Handler.WithGroup(name), s.sampled}
}

func (s *sampled) admit(message string) bool {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.lines[message]
	if l == nil || !now.Before(l.until) {
		if len(s.lines) >= maxSampled {
			for m, old := range s.lines {
				if old.out == 0 {
					delete(s.lines, m)
				}
			}
		}
		if l == nil || l.out == 0 { // Otherwise its timer is about to log the count.
			l = &lines{until: now.Add(logPeriod)}
			s.lines[message] = l
		}
	}
	if l.written < logBurst {
		l.written++
		return true
	}
	if l.out++; l.out == 1 {
		time.AfterFunc(l.until.Sub(now), func() { s.logSuppressed(message) })
	}
	return false
}

// logSuppressed logs how many lines of a message were suppressed.
func (s *sampled) logSuppressed(message string) {
	s.mu.Lock()
	out := s.lines[message].out
	delete(s.lines, message)
	s.mu.Unlock()
	r := slog.NewRecord(time.Now(), slog.LevelWarn, "log messages suppressed", 0)
	r.AddAttrs(slog.String("of", message), slog.Int("suppressed", out), slog.Duration("period", logPeriod))
	_ = s.root.Handle(context.Background(), r)
}
