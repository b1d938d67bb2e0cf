package dispatcher

import (
	"context"
	"log/slog"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue/slots"
	"github.com/posthorn/posthorn/dispatcher/queue/slots/slotstest"
)

// recordingSink records the calls of a Dispatcher's configs.
type recordingSink struct{ calls chan string }

func (r recordingSink) Set(namespace string, _ liveconfig.Stored) { r.calls <- "set " + namespace }
func (r recordingSink) Delete(namespace string)                   { r.calls <- "delete " + namespace }
func (r recordingSink) Synced(failed ...string) {
	text := "synced"
	for _, f := range failed {
		text += " without " + f
	}
	r.calls <- text
}

// A Dispatcher gets the configs of its namespaces before Synced, and Synced only when the directory is
// read: until then all namespaces seem to have no slot.
func TestConfigsOfASlot(t *testing.T) {
	n := newNamespaces(slog.New(slog.DiscardHandler))
	sink := recordingSink{make(chan string, 10)}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { n.feed(ctx, 0, sink) })
	n.Set("a", liveconfig.Stored{})
	n.Set("b", liveconfig.Stored{})
	n.Synced("broken")
	if n.isSynced() {
		t.Error("the directory is not read: got synced, want not")
	}
	directory, err := slots.OpenDirectory(ctx, slotstest.NewAssignments(slotstest.Faults{}, nil), 2, n.log)
	if err != nil {
		t.Fatal(err)
	}
	for namespace, slot := range map[string]int{"a": 0, "b": 1} {
		if _, err := directory.Assign(ctx, namespace, slot); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case call := <-sink.calls:
		t.Errorf("got %q before the directory was read, want nothing", call)
	default:
	}
	running.Go(func() { n.assign(ctx, directory, nil) })
	got := []string{<-sink.calls, <-sink.calls}
	n.Delete("b")
	n.Delete("a")
	got = append(got, <-sink.calls)
	n.Synced()
	got = append(got, <-sink.calls)
	if diff := cmp.Diff([]string{"set a", "synced without broken", "delete a", "synced"}, got); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}
