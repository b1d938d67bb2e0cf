package standalone

import (
	"context"
	"log/slog"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/check"
)

// numbers is a fake dispatcher that reports the numbers of the live configs, and what it parks.
type numbers struct {
	runner
	configs []adminapi.ConfigReport
}

func (n *numbers) changes(string) *adminapi.Report {
	report := n.runner.changes("")
	n.mu.Lock()
	defer n.mu.Unlock()
	report.Configs = slices.Clone(n.configs)
	return report
}

// head returns the head of the namespace default.
func (n *numbers) head() liveconfig.Head {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.runner.configs["default"].Head
}

// runFolder runs a Control until the end of the test, or stop.
func runFolder(t *testing.T, dir, state string, n *numbers) (c *Control, stop func()) {
	t.Helper()
	c = New(Options{Dir: dir, StateFile: state, Records: metaStore{}, Sink: n, Changes: n.changes, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	<-c.started
	return c, func() {
		cancel()
		check.NoError(t, "run", <-ended)
	}
}

// A process deletes an object whose manifest was removed while it did not run only if no other process has applied a
// newer live config.
func TestDeletionWhileStopped(t *testing.T) {
	crm := liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: "crm"}
	for name, c := range map[string]struct {
		newer int64 // By how much the number of the dispatcher is higher.
		want  bool
	}{"the newest config": {0, true}, "another process has a newer one": {1, false}} {
		t.Run(name, func(t *testing.T) {
			dir, state := t.TempDir(), filepath.Join(t.TempDir(), "manifests.json")
			put(t, dir, "web.yaml", secret+"---\n"+webSource)
			put(t, dir, "crm.yaml", webDestination)
			n := &numbers{}
			_, stop := runFolder(t, dir, state, n)
			stop()
			n.configs = []adminapi.ConfigReport{{Namespace: "default", Number: n.head().Number + c.newer}}
			put(t, dir, "crm.yaml", noObjects)
			_, stop = runFolder(t, dir, state, n)
			defer stop()
			head := n.head()
			check.Equal(t, "the destination has a tombstone", head.Buried(crm), c.want)
			check.Equal(t, "the history of the live configs is broken", head.Since == head.Number, !c.want)
		})
	}
}

// A namespace that only the dispatcher has gets no live config. Its objects get tombstones one by one, by hand.
func TestDiscard(t *testing.T) {
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "manifests.json")
	put(t, dir, "news.yaml", strings.ReplaceAll(secret+"---\n"+webSource, "metadata: {name: ", "metadata: {namespace: news, name: "))
	parked := []adminapi.ParkedObject{{Object: "destinations/crm", Number: 7}, {Object: "sources/crm", Number: 7},
		{Object: "sources/web", Number: 7}}
	n := &numbers{configs: []adminapi.ConfigReport{{Namespace: "default", Number: 7, Missing: time.Now(), Parked: parked}}}
	c, stop := runFolder(t, dir, state, n)
	defer stop()
	server := httptest.NewServer(c.Handler())
	defer server.Close()
	client := &adminapi.Client{URL: server.URL}
	discard := func(name string, dryRun bool, want ...string) {
		t.Helper()
		got, err := client.Discard(t.Context(), "default", name, dryRun)
		check.NoError(t, "discard "+name, err)
		if !slices.Equal(got, want) {
			t.Errorf("discard %s: got %v, want %v", name, got, want)
		}
	}
	crm := []string{"Source default/crm", "WebhookDestination default/crm"}
	discard("crm", true, crm...)
	discard("nothing", false)
	check.Equal(t, "number of a live config of the namespace", n.head().Number, int64(0))
	discard("crm", false, crm...)
	var objects []string
	for _, tombstone := range n.head().Tombstones {
		objects = append(objects, tombstone.Object.String())
	}
	if want := []string{"destinations/crm", "sources/crm"}; !slices.Equal(objects, want) {
		t.Errorf("tombstones: got %v, want %v", objects, want)
	}
}

// A new owner whose folder has an object that the last one deleted creates it again, as a new object, and logs it.
func TestObjectThatTheLastOwnerDeleted(t *testing.T) {
	records := metaStore{}
	own := func(dir string) (n *numbers, log *strings.Builder, stop func()) {
		n, log = &numbers{}, &strings.Builder{}
		c := New(Options{Dir: dir, StateFile: filepath.Join(t.TempDir(), "manifests.json"), Records: records, Sink: n, Changes: n.changes,
			Logger: slog.New(slog.NewTextHandler(log, nil))})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Run(ctx) }()
		<-c.started
		return n, log, func() {
			cancel()
			check.NoError(t, "run", <-ended)
		}
	}
	first, second := t.TempDir(), t.TempDir()
	for _, dir := range []string{first, second} {
		put(t, dir, "web.yaml", secret+"---\n"+webSource)
	}
	put(t, second, "crm.yaml", webDestination)
	_, log, stop := own(first)
	stop()
	check.Equal(t, "objects that the first owner of a log created: "+log.String(), strings.Count(log.String(), "object created"), 0)
	n, log, stop := own(second)
	stop()
	check.Equal(t, "messages about the destination: "+log.String(),
		strings.Count(log.String(), "object created that the log does not have"), 1)
	check.Equal(t, "the message names it", strings.Contains(log.String(), "kind=WebhookDestination namespace=default name=crm"), true)
	check.Equal(t, "the destination exists", len(n.runner.configs["default"].Destinations), 1)
}
