package slots_test

import (
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// announced has the last announcement that a follower has read.
type announced struct {
	mu   sync.Mutex
	text string
	n    int
}

func (a *announced) set(text []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.text = string(text)
	a.n++
}

func (a *announced) want(t *testing.T, text string) (n int) {
	t.Helper()
	synctest.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.text != text {
		t.Errorf("announcement: got %q, want %q", a.text, text)
	}
	return a.n
}

// A pod that follows the slot knows its owner: from the claim, from an owner that writes all the time,
// also if the claim was trimmed, and after a takeover. It has caught up once.
func TestAnnouncements(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := slotstest.NewLog(slotstest.NewStream(0))
		o := slots.Options{Logger: slog.New(slog.DiscardHandler), Now: time.Now}
		of := func(name string, heard *announced) slots.Options {
			o := o
			o.Announcement, o.Announced = []byte(name), heard.set
			return o
		}
		var first, second announced
		owner, err := slots.Claim(t.Context(), log, &copied{}, of("first", &first))
		if err != nil {
			t.Fatal(err)
		}
		first.want(t, "first")
		caughtUp := 0
		following := of("second", &second)
		following.CaughtUp = func() { caughtUp++ }
		next := copyAndFollow(t, log, following)
		before := second.want(t, "first")
		for n := range 120 { // A busy owner has no time for heartbeats.
			if err := owner.Append(uint64(n)+1, []byte(fmt.Sprint("batch ", n))); err != nil {
				t.Fatal(err)
			}
			if err := owner.Wait(uint64(n) + 1); err != nil {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if n := second.want(t, "first") - before; n != 2 {
			t.Errorf("announcements in 12 s: got %d, want 2", n)
		}
		if err := owner.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		writer := <-next
		defer writer.Close()
		second.want(t, "second")
		if caughtUp != 1 {
			t.Errorf("caught up: got %d times, want 1", caughtUp)
		}
	})
}
