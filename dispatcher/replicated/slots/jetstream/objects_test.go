package jetstream

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

func connect(t *testing.T, s *server.Server) *nats.Conn {
	t.Helper()
	nc, err := Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func openTestObjects(t *testing.T, nc *nats.Conn, maxBytes int64) *Objects {
	t.Helper()
	o, err := OpenObjects(t.Context(), nc, ObjectsConfig{Bucket: "PH_test_O0", Replicas: 1, MaxBytes: maxBytes})
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func (o *Objects) wantNames(t *testing.T, want ...string) {
	t.Helper()
	names, err := o.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
}

// wantMessages compares the number of messages that the bucket has on the disk.
func (o *Objects) wantMessages(t *testing.T, want uint64) {
	t.Helper()
	info, err := o.stream.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if info.State.Msgs != want {
		t.Errorf("messages of the bucket: got %d, want %d", info.State.Msgs, want)
	}
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return b
}

// TestObjects compares an object store with the contract of slots.Objects.
func TestObjects(t *testing.T) {
	o := openTestObjects(t, connect(t, startServer(t, server.Options{Port: server.RANDOM_PORT})), 4<<20)
	o.wantNames(t)
	large := randomBytes(1 << 20)
	for name, data := range map[string][]byte{"a/1.sst": large, "a/2": []byte("small")} {
		if err := o.Put(t.Context(), name, bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
	}
	o.wantNames(t, "a/1.sst", "a/2")
	r, err := o.Get(t.Context(), "a/1.sst")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, large) {
		t.Errorf("object: got %d bytes and error %v, want the %d stored ones", len(got), err, len(large))
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
	_, err = o.Get(t.Context(), "b")
	wantError(t, "get of a missing object", err, slots.ErrNoObject)

	wantError(t, "put to a full store", o.Put(t.Context(), "a/3", bytes.NewReader(randomBytes(8<<20))), slots.ErrNoSpace)
	o.wantNames(t, "a/1.sst", "a/2")

	info, err := o.store.GetInfo(t.Context(), "a/1.sst")
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Delete(t.Context(), restPrefix+info.NUID); err != nil {
		t.Fatal(err)
	}
	_, err = o.Get(t.Context(), "a/1.sst")
	wantError(t, "get of an object without its chunks", err, slots.ErrNoObject)
	for _, name := range []string{"a/1.sst", "a/2", "b"} {
		if err := o.Delete(t.Context(), name); err != nil {
			t.Errorf("delete %s: got error %v, want none", name, err)
		}
	}
	o.wantNames(t)
	o.wantMessages(t, 0)
}

func (o *Objects) wantMissing(t *testing.T, what string, want ...string) {
	t.Helper()
	missing, err := o.Missing(t.Context(), []string{"a", "b", "c"})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(missing)
	if diff := cmp.Diff(want, missing); diff != "" {
		t.Errorf("%s: missing objects (-want +got):\n%s", what, diff)
	}
}

// Objects that another program has removed, in whole or in part, are missing. A deleted store is created again.
func TestMissingObjects(t *testing.T) {
	nc := connect(t, startServer(t, server.Options{Port: server.RANDOM_PORT}))
	o := openTestObjects(t, nc, -1)
	put := func() {
		t.Helper()
		for _, name := range []string{"a", "b", "c"} {
			if err := o.Put(t.Context(), name, bytes.NewReader(randomBytes(300<<10))); err != nil {
				t.Fatal(err)
			}
		}
	}
	info := func(name string) string {
		t.Helper()
		found, err := o.store.GetInfo(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		return found.NUID
	}
	for what, c := range map[string]struct {
		remove func() error
		want   []string
	}{
		"nats object rm":      {func() error { return o.store.Delete(t.Context(), "b") }, []string{"b"}},
		"a purge of its name": {func() error { return o.stream.Purge(t.Context(), natsjs.WithPurgeSubject(o.meta("c"))) }, []string{"c"}},
		"a purge of its data": {func() error { return o.stream.Purge(t.Context(), natsjs.WithPurgeSubject(o.chunks(info("a")))) }, []string{"a"}},
		"a purge of some data": {func() error {
			return o.stream.Purge(t.Context(), natsjs.WithPurgeSubject(o.chunks(info("a"))), natsjs.WithPurgeKeep(1))
		}, []string{"a"}},
		"a purge":         {func() error { return o.stream.Purge(t.Context()) }, []string{"a", "b", "c"}},
		"a deleted store": {func() error { return o.js.DeleteStream(t.Context(), o.want.Name) }, []string{"a", "b", "c"}},
	} {
		put()
		o.wantMissing(t, "before "+what)
		if err := c.remove(); err != nil {
			t.Fatal(err)
		}
		o.wantMissing(t, what, c.want...)
		openTestObjects(t, nc, -1).wantMissing(t, what+", for another process", c.want...)
	}
	put()
	o.wantMissing(t, "at the end")
}

// lostReader ends an upload as the end of its process does.
type lostReader struct {
	from io.Reader
	lose func()
}

func (r *lostReader) Read(p []byte) (int, error) {
	n, err := r.from.Read(p)
	if err == io.EOF {
		r.lose()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

// The rest of an upload whose process was lost is listed, and can be deleted.
func TestCutUpload(t *testing.T) {
	s := startServer(t, server.Options{Port: server.RANDOM_PORT})
	o := openTestObjects(t, connect(t, s), -1)
	nc := connect(t, s)
	lost := openTestObjects(t, nc, -1)
	err := lost.Put(t.Context(), "a", &lostReader{bytes.NewReader(randomBytes(1 << 20)), func() {
		_ = nc.Flush()
		nc.Close()
	}})
	if err == nil {
		t.Fatal("put: got no error, want one")
	}
	names, err := o.List(t.Context())
	if err != nil || len(names) != 1 || !strings.HasPrefix(names[0], restPrefix) {
		t.Fatalf("objects after a cut upload: got %q and error %v, want one rest", names, err)
	}
	if err := o.Delete(t.Context(), names[0]); err != nil {
		t.Fatal(err)
	}
	o.wantNames(t)
	o.wantMessages(t, 0)
}

// A store is restored from its snapshot and a trimmed stream, by a pod without files and by one whose
// copy ends before the stream begins.
func TestRestoreFromSnapshot(t *testing.T) {
	s := startServer(t, server.Options{Port: server.RANDOM_PORT})
	log, objects := openLog(t, s, StreamConfig{Replicas: 1, MaxBytes: 1 << 30}), openTestObjects(t, connect(t, s), -1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	open := func(dir string) (*slotStore, *slots.Snapshotter) {
		t.Helper()
		slot := slots.Slot{Log: log, Objects: objects, Dir: dir + "/queue", Store: pebblestore.Options{Logger: slog.New(slog.DiscardHandler)}}
		w, err := slot.TakeOver(ctx)
		if err != nil {
			t.Fatal(err)
		}
		slot.Store.Log = w
		store, err := pebblestore.Open(slot.Dir, slot.Store)
		if err != nil {
			t.Fatal(err)
		}
		return &slotStore{store, w}, &slots.Snapshotter{Log: log, Objects: objects, Writer: w, Store: store, FS: vfs.Default,
			Dir: slot.Dir + ".snapshot", Logger: slot.Store.Logger}
	}
	number := 0
	accept := func(s *slotStore) {
		t.Helper()
		for range 50 {
			number++
			if _, err := s.Append(ctx, []queue.Message{{Source: "shop/web", ID: string(randomBytes(16)), AcceptedAt: time.Now(), Body: []byte("{}")}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	behind := t.TempDir()
	first, _ := open(behind)
	accept(first)
	if err := first.Close(); err != nil && !errors.Is(err, slots.ErrSessionEnded) {
		t.Fatal(err)
	}
	second, snapshots := open(t.TempDir())
	for range 2 {
		accept(second)
		if err := snapshots.Take(ctx); err != nil {
			t.Fatal(err)
		}
	}
	accept(second)
	state, err := log.State(ctx)
	if err != nil || state.First < 100 {
		t.Errorf("first record: got %d and error %v, want at least 100", state.First, err)
	}
	for name, dir := range map[string]string{"a pod without files": t.TempDir(), "a pod far behind": behind} {
		restored, _ := open(dir)
		if got := restored.SourceStats("shop/web").Accepted; int(got) != number {
			t.Errorf("accepted messages of %s: got %d, want %d", name, got, number)
		}
		_ = restored.Close()
	}
	_ = second.Close()
}
