package host

import (
	"context"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// durabilityInterval is the time between two reads of the servers' settings.
const durabilityInterval = 15 * time.Second

// durability is what the owner of a slot knows about the servers' settings.
type durability struct {
	last atomic.Pointer[slots.Durability]
	// gaps counts the reads that found missing records or objects.
	gaps atomic.Int64
}

// watch reads the settings until ctx is done, and logs changes. While the servers do not answer, it
// keeps the last settings. When servers begin to lack records, it calls repair until it returns true. read
// may be nil.
func (w *durability) watch(ctx context.Context, read func(context.Context) (slots.Durability, error), repair func() bool,
	logger *slog.Logger) {
	if read == nil {
		return
	}
	tick := time.NewTicker(durabilityInterval)
	defer tick.Stop()
	asked := false
	for {
		if d, err := read(ctx); err == nil {
			asked = d.LacksRecords && (asked || repair())
			w.note(d, logger)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// note keeps the settings, and logs what has changed.
func (w *durability) note(d slots.Durability, logger *slog.Logger) {
	before := w.known()
	w.last.Store(&d)
	for _, problem := range d.Weak {
		if !slices.Contains(before.Weak, problem) {
			logger.Error("a setting of the log can lose calls", "problem", problem)
		}
	}
	if len(d.Weak) == 0 && len(before.Weak) > 0 {
		logger.Info("the settings of the log are safe again")
	}
	for _, problem := range d.Disabled {
		if !slices.Contains(before.Disabled, problem) {
			logger.Error("a server of the log stores no records", "problem", problem)
		}
	}
	if len(d.Gaps) > 0 {
		w.gaps.Add(1)
	}
	for _, problem := range d.Gaps {
		if !slices.Contains(before.Gaps, problem) {
			logger.Error("the log lacks records or objects", "problem", problem)
		}
	}
	switch {
	case d.Current < d.Replicas && before.Current != d.Current:
		logger.Warn("servers of the log lack records, or do not answer", "copies", d.Current, "replicas", d.Replicas)
	case d.Current >= d.Replicas && before.Current < before.Replicas:
		logger.Info("all servers of the log have all records again", "replicas", d.Replicas)
	}
}

// known returns the last settings; zero before the first read.
func (w *durability) known() slots.Durability {
	if d := w.last.Load(); d != nil {
		return *d
	}
	return slots.Durability{}
}

// describe adds the settings to the state of an owner.
func (w *durability) describe(s *adminapi.ReplicationState) {
	d := w.known()
	s.Sync, s.Replicas, s.CurrentReplicas, s.Weak, s.Disabled = string(d.Sync), d.Replicas, d.Current, d.Weak, d.Disabled
}
