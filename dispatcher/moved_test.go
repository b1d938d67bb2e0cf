package dispatcher_test

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/check"
)

// failingTarget is a target that is not reachable.
type failingTarget struct{ redelivery.Target }

func (failingTarget) Lanes() []queue.LaneID { return nil }

func (failingTarget) OpenLane(queue.LaneID) error { return queue.ErrUnavailable }

// A data directory whose messages were moved to a log in part starts no dispatcher, until the move is complete.
func TestDataDirectoryThatIsBeingMoved(t *testing.T) {
	dir := t.TempDir()
	open := func() *pebblestore.Store {
		store, err := pebblestore.Open(filepath.Join(dir, backup.QueueFolder), pebblestore.Options{})
		check.NoError(t, "open the store", err)
		return store
	}
	start := func() error {
		d, err := dispatcher.New(dispatcher.Options{DataDir: dir, Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0"})
		if err == nil {
			check.NoError(t, "close the dispatcher", d.Close())
		}
		return err
	}
	store := open()
	check.NoError(t, "open a lane", store.OpenLane(queue.LaneID{Source: "shop/web", Destination: "shop/crm"}))
	_, err := store.Append(t.Context(), []queue.Message{{Source: "shop/web", ID: "m", Type: "track", Body: []byte("{}")}})
	check.NoError(t, "append a message", err)
	all := func(string) bool { return true }
	if _, err := redelivery.Move(t.Context(), store, failingTarget{}, "log", all); !errors.Is(err, queue.ErrUnavailable) {
		t.Fatalf("move to a target that fails: got error %v, want %v", err, queue.ErrUnavailable)
	}
	check.NoError(t, "close the store", store.Close())
	if err := start(); !errors.Is(err, redelivery.ErrMoving) {
		t.Fatalf("start of a dispatcher: got error %v, want %v", err, redelivery.ErrMoving)
	}
	store = open()
	to, err := pebblestore.Open(t.TempDir(), pebblestore.Options{})
	check.NoError(t, "open the target", err)
	_, err = redelivery.Move(t.Context(), store, to, "log", all)
	check.NoError(t, "move", errors.Join(err, store.Close(), to.Close()))
	check.NoError(t, "start of a dispatcher after the move", start())
}
