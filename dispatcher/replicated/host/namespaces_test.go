package host

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
	"github.com/posthorn/posthorn/test/wait"
)

// nothing is the reason of owners that have compared their stores with the directory.
func nothing() string { return "" }

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
	running.Go(func() { n.assign(ctx, directory, nil, func() bool { return true }, nothing) })
	var got []string
	config := "" // the last change of a config
	until := func(last string) {
		for call := ""; call != last; {
			// A change while the directory is read can be passed twice.
			if call = <-sink.calls; call == config {
				continue
			}
			if !strings.HasPrefix(call, "synced") {
				config = call
			}
			got = append(got, call)
		}
	}
	until("synced without broken")
	n.Delete("b")
	n.Delete("a")
	until("delete a")
	n.Synced()
	until("synced")
	if diff := cmp.Diff([]string{"set a", "synced without broken", "delete a", "synced"}, got); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

// A process is not usable while configs are invalid and none is in effect: one of another release can use
// them.
func TestUsableNamespaces(t *testing.T) {
	n := newNamespaces(slog.New(slog.DiscardHandler))
	invalid := liveconfig.Stored{Config: []byte("not a config")}
	other := liveconfigtest.Config("https://hooks.example")
	other.Namespace = "other"
	for _, step := range []struct {
		name string
		do   func()
		want bool
	}{
		{"without configs", func() {}, true},
		{"with an invalid config", func() { n.Set("shop", invalid) }, false},
		{"with a config of another namespace", func() { n.Set("other", liveconfigtest.Encode(t, other)) }, true},
		{"after its deletion", func() { n.Delete("other") }, false},
		{"with a valid config", func() { n.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config("https://hooks.example"))) }, true},
		{"with the previous config in effect", func() { n.Set("shop", invalid) }, true},
		{"after the deletion of all", func() { n.Delete("shop") }, true},
	} {
		if step.do(); n.isUsable() != step.want {
			t.Errorf("usable %s: got %v, want %v", step.name, !step.want, step.want)
		}
	}
}

// An invalid config changes nothing, because the previous one remains in effect.
func TestInvalidConfigOfANamespace(t *testing.T) {
	n := newNamespaces(slog.New(slog.DiscardHandler))
	n.Set("shop", liveconfigtest.Numbered(t, 7, liveconfigtest.Config("https://hooks.example")))
	n.Set("shop", liveconfig.Stored{Config: []byte("not a config")})
	if namespace, ok := n.index.Namespace(liveconfigtest.Key); namespace != "shop" || !ok {
		t.Errorf("namespace of the write key: got %q and %v, want shop", namespace, ok)
	}
	if diff := cmp.Diff([]slots.ConfigNumber{{Namespace: "shop", Number: 7}}, n.newestConfigs()); diff != "" {
		t.Errorf("newest configs (-want +got):\n%s", diff)
	}
	n.Delete("shop")
	if namespace, ok := n.index.Namespace(liveconfigtest.Key); ok {
		t.Errorf("namespace of the write key after the deletion: got %q, want none", namespace)
	}
}

// Processes with different configs at the start do not give the same slot: one of them assigns, and the
// others wait until they have read its assignments.
func TestNamespacesAreSpread(t *testing.T) {
	stream := slotstest.NewAssignments(slotstest.Faults{}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	var second atomic.Bool
	var directories []*slots.Directory
	for i, isAssigner := range []func() bool{func() bool { return true }, second.Load} {
		directory, err := slots.OpenDirectory(ctx, stream, 2, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		directories = append(directories, directory)
		n := newNamespaces(slog.New(slog.DiscardHandler))
		n.Set(string(rune('a'+i)), liveconfig.Stored{})
		running.Go(func() { n.assign(ctx, directory, nil, isAssigner, nothing) })
	}
	waitSlot := func(namespace string, want int) {
		t.Helper()
		if err := wait.Until(func() error {
			if got, ok := directories[1].Slot(namespace); !ok || got != want {
				return fmt.Errorf("slot %d, assigned %v", got, ok)
			}
			return nil
		}); err != nil {
			t.Errorf("slot of namespace %s: want %d: %v", namespace, want, err)
		}
	}
	running.Go(func() { _ = directories[1].Run(ctx) }) // It ends with ctx.
	waitSlot("a", 0)
	second.Store(true)
	waitSlot("b", 1)
}
