package slots_test

import (
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// A pod that follows the slot has caught up once.
func TestCaughtUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := slotstest.NewLog(slotstest.NewStream(0))
		o := slots.Options{Logger: slog.New(slog.DiscardHandler), Now: time.Now}
		owner, err := slots.Claim(t.Context(), log, &copied{}, o)
		if err != nil {
			t.Fatal(err)
		}
		caughtUp := 0
		following := o
		following.CaughtUp = func() { caughtUp++ }
		next := copyAndFollow(t, log, following)
		for n := range 20 {
			if err := owner.Append(uint64(n)+1, []byte(fmt.Sprint("batch ", n))); err != nil {
				t.Fatal(err)
			}
			if err := owner.Wait(uint64(n) + 1); err != nil {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if err := owner.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		writer := <-next
		defer writer.Close()
		if caughtUp != 1 {
			t.Errorf("caught up: got %d times, want 1", caughtUp)
		}
	})
}
