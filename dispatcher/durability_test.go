package dispatcher

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue/slots"
)

// Servers that lack records cause one repair, as soon as the store is open, and each read that finds a gap counts.
func TestServersThatLackRecordsAreRepaired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w durability
		var d slots.Durability
		var failed error
		asked, isOpen := 0, false
		go w.watch(t.Context(), func(context.Context) (slots.Durability, error) { return d, failed }, func() bool {
			asked++
			return isOpen
		}, slog.New(slog.DiscardHandler))
		gap := slots.Durability{Gaps: []string{"server n1 lacks 5 records"}, LacksRecords: true}
		for i, step := range []struct {
			d           slots.Durability
			err         error
			isOpen      bool
			asked, gaps int
		}{
			{asked: 0, gaps: 0},
			{d: gap, asked: 1, gaps: 1},
			{d: gap, isOpen: true, asked: 2, gaps: 2},
			{d: gap, isOpen: true, asked: 2, gaps: 3},
			{d: gap, err: errors.New("no answer"), isOpen: true, asked: 2, gaps: 3},
			{isOpen: true, asked: 2, gaps: 3},
			{d: slots.Durability{Gaps: []string{"an object store was deleted"}}, isOpen: true, asked: 2, gaps: 4},
			{d: gap, isOpen: true, asked: 3, gaps: 5},
		} {
			d, failed, isOpen = step.d, step.err, step.isOpen
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
