package slots_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// unstableLog is a Log that does not answer while it is down.
type unstableLog struct {
	slots.Log
	down atomic.Bool
}

func (l *unstableLog) Publish(ctx context.Context, expected uint64, id string, record []byte) (uint64, error) {
	if l.down.Load() {
		<-ctx.Done()
		return 0, ctx.Err()
	}
	return l.Log.Publish(ctx, expected, id, record)
}

// withWriter runs a test in virtual time with the writer of a new slot.
func withWriter(t *testing.T, test func(*testing.T, *unstableLog, *slots.Writer)) {
	synctest.Test(t, func(t *testing.T) {
		log := &unstableLog{Log: slotstest.NewLog(slotstest.NewStream(0))}
		w, err := slots.Claim(t.Context(), log, &copied{}, slots.Options{Logger: slog.New(slog.DiscardHandler), Now: time.Now})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		test(t, log, w)
	})
}

// While the log does not answer, new calls are refused after two seconds, and waiting ones wait.
// They are durable when the log is back.
func TestLogIsDown(t *testing.T) {
	withWriter(t, func(t *testing.T, log *unstableLog, w *slots.Writer) {
		log.down.Store(true)
		if err := w.Append(1, []byte("a")); err != nil {
			t.Fatal(err)
		}
		durable := make(chan error, 1)
		go func() { durable <- w.Wait(1) }()
		time.Sleep(1900 * time.Millisecond)
		if err := w.Ready(); err != nil {
			t.Errorf("ready before 2 s: got error %v, want none", err)
		}
		time.Sleep(200 * time.Millisecond)
		if err := w.Ready(); !errors.Is(err, queue.ErrUnavailable) {
			t.Errorf("ready after 2 s: got error %v, want %v", err, queue.ErrUnavailable)
		}
		log.down.Store(false)
		if err := <-durable; err != nil {
			t.Errorf("wait: got error %v, want none", err)
		}
		if err := w.Ready(); err != nil {
			t.Errorf("ready when the log is back: got error %v, want none", err)
		}
		if n := w.Acknowledged(); n != 1 {
			t.Errorf("acknowledged batch: got %d, want 1", n)
		}
	})
}

// At most about 64 MB are unpublished; then writers wait.
func TestWritersWait(t *testing.T) {
	withWriter(t, func(t *testing.T, log *unstableLog, w *slots.Writer) {
		log.down.Store(true)
		const batch, batches = 1 << 20, 100
		var appended atomic.Int64
		go func() {
			for i := range uint64(batches) {
				if w.Append(i+1, make([]byte, batch)) == nil {
					appended.Add(1)
				}
			}
		}()
		time.Sleep(time.Second)
		synctest.Wait()
		if n := appended.Load(); n < 60 || n > 70 {
			t.Errorf("appended batches of 1 MB while the log is down: got %d, want about 64", n)
		}
		log.down.Store(false)
		time.Sleep(10 * time.Second)
		if n := appended.Load(); n != batches {
			t.Errorf("appended batches when the log is back: got %d, want %d", n, batches)
		}
	})
}

func TestCloseEndsAllCalls(t *testing.T) {
	withWriter(t, func(t *testing.T, log *unstableLog, w *slots.Writer) {
		log.down.Store(true)
		if err := w.Append(1, []byte("a")); err != nil {
			t.Fatal(err)
		}
		durable := make(chan error, 1)
		go func() { durable <- w.Wait(1) }()
		synctest.Wait()
		w.Close()
		if err := <-durable; !errors.Is(err, slots.ErrSessionEnded) {
			t.Errorf("wait: got error %v, want %v", err, slots.ErrSessionEnded)
		}
		if err := w.Append(2, []byte("b")); !errors.Is(err, slots.ErrSessionEnded) {
			t.Errorf("append: got error %v, want %v", err, slots.ErrSessionEnded)
		}
	})
}

// An idle session writes a record every second, so that other pods know that it lives.
func TestHeartbeats(t *testing.T) {
	withWriter(t, func(t *testing.T, log *unstableLog, w *slots.Writer) {
		before, err := log.State(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(10*time.Second + time.Millisecond)
		after, err := log.State(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if n := after.Last - before.Last; n != 10 {
			t.Errorf("records of an idle session in 10 s: got %d, want 10", n)
		}
	})
}

// copyAndFollow follows a slot in the background; the channel returns its session, as soon as it has
// one.
func copyAndFollow(t *testing.T, log slots.Log, o slots.Options) <-chan *slots.Writer {
	t.Helper()
	session := make(chan *slots.Writer, 1)
	o.Logger, o.Now = slog.New(slog.DiscardHandler), time.Now
	go func() {
		w, err := slots.Follow(t.Context(), log, &copied{}, o)
		if err != nil && t.Context().Err() == nil {
			t.Errorf("follow: got error %v, want none", err)
		}
		session <- w
	}()
	return session
}

// wantSession waits for a session, and returns it with the time since began.
func wantSession(t *testing.T, session <-chan *slots.Writer, within time.Duration) *slots.Writer {
	t.Helper()
	select {
	case w := <-session:
		if w == nil {
			t.FailNow()
		}
		return w
	case <-time.After(within):
		t.Fatalf("claim of the follower: got none in %v, want one", within)
		return nil
	}
}

func TestFollowerReplacesALostOwner(t *testing.T) {
	withWriter(t, func(t *testing.T, log *unstableLog, first *slots.Writer) {
		follower := copyAndFollow(t, log, slots.Options{})
		time.Sleep(time.Minute) // The owner is idle, and lives.
		select {
		case <-follower:
			t.Fatal("claim beside a living owner: got one, want none")
		default:
		}
		first.Close()
		wantSession(t, follower, 12*time.Second).Close()
	})
}

func TestReleasedSlotIsClaimedImmediately(t *testing.T) {
	withWriter(t, func(t *testing.T, log *unstableLog, first *slots.Writer) {
		follower := copyAndFollow(t, log, slots.Options{})
		if err := first.Append(1, []byte("a")); err != nil {
			t.Fatal(err)
		}
		if err := first.Release(t.Context()); err != nil {
			t.Errorf("release: got error %v, want none", err)
		}
		second := wantSession(t, follower, 100*time.Millisecond)
		defer second.Close()
		if n := second.Acknowledged(); n != 1 {
			t.Errorf("last batch of the second session: got %d, want 1", n)
		}
		if err := first.Append(2, []byte("b")); !errors.Is(err, slots.ErrSessionEnded) {
			t.Errorf("append after the release: got error %v, want %v", err, slots.ErrSessionEnded)
		}
	})
}

func TestSlotOfAnExitedProcessIsClaimedImmediately(t *testing.T) {
	withWriter(t, func(t *testing.T, log *unstableLog, first *slots.Writer) {
		first.Close()
		wantSession(t, copyAndFollow(t, log, slots.Options{Exited: first.Session()}), 100*time.Millisecond).Close()
	})
}

// An election of the log delays, and does not move, a slot.
func TestElectionMovesNoSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stream := slotstest.NewStream(0)
		owner := wantSession(t, copyAndFollow(t, slotstest.NewLog(stream), slots.Options{}), time.Second)
		defer owner.Close()
		standby := copyAndFollow(t, slotstest.NewLog(stream), slots.Options{})
		for range 20 {
			time.Sleep(7 * time.Second)
			stream.SetLeader(false)
			time.Sleep(9 * time.Second)
			if owner.MaySend() {
				t.Error("9 s without an acknowledgement: may send, want that it may not")
			}
			stream.SetLeader(true)
			time.Sleep(2 * time.Second)
			if !owner.MaySend() {
				t.Fatal("2 s after the election: may not send, want that it may")
			}
		}
		select {
		case <-standby:
			t.Error("claim of the standby: got one, want none")
		default:
		}
	})
}
