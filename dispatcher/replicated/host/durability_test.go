package host

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// Servers that lack records cause one repair, as soon as the store is open, and each read that finds a gap counts.
func TestServersThatLackRecordsAreRepaired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type read struct {
			d      slots.Durability
			err    error
			isOpen bool
		}
		var w durability
		var next atomic.Pointer[read]
		next.Store(&read{})
		asked := 0
		go w.watch(t.Context(), func(context.Context) (slots.Durability, error) { return next.Load().d, next.Load().err }, func() bool {
			asked++
			return next.Load().isOpen
		}, slog.New(slog.DiscardHandler))
		gap := slots.Durability{Gaps: []string{"server n1 lacks 5 records"}, LacksRecords: true}
		for i, step := range []struct {
			read
			asked, gaps int
		}{
			{read{}, 0, 0},
			{read{d: gap}, 1, 1},
			{read{d: gap, isOpen: true}, 2, 2},
			{read{d: gap, isOpen: true}, 2, 3},
			{read{d: gap, err: errors.New("no answer"), isOpen: true}, 2, 3},
			{read{isOpen: true}, 2, 3},
			{read{d: slots.Durability{Gaps: []string{"an object store was deleted"}}, isOpen: true}, 2, 4},
			{read{d: slots.Durability{Disabled: []string{"JetStream is disabled in n1"}}, isOpen: true}, 2, 4},
			{read{d: gap, isOpen: true}, 3, 5},
		} {
			next.Store(&step.read)
			if i > 0 {
				time.Sleep(durabilityInterval)
			}
			synctest.Wait()
			if asked != step.asked || int(w.gaps.Load()) != step.gaps {
				t.Errorf("after read %d: got %d repairs and %d gaps, want %d and %d", i, asked, w.gaps.Load(), step.asked, step.gaps)
			}
		}
	})
}
