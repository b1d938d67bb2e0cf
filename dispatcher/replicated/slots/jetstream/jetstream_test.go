package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/storetest"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// startTimeout bounds the start of the servers.
const startTimeout = wait.Limit

// startServer starts a server with JetStream in this process.
func startServer(t *testing.T, o server.Options) *server.Server {
	t.Helper()
	o.Host, o.NoLog, o.NoSigs = "127.0.0.1", true, true
	o.JetStream, o.StoreDir, o.SyncAlways = true, t.TempDir(), true
	s, err := server.NewServer(&o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(startTimeout) {
		t.Fatalf("server %s: not ready after %v", o.ServerName, startTimeout)
	}
	return s
}

// startCluster starts three servers and returns one of them.
func startCluster(t *testing.T) *server.Server { return startServers(t)[2] }

// startServers starts three servers, n0 to n2, with monitoring ports.
func startServers(t *testing.T) (all []*server.Server) {
	t.Helper()
	ports := freePorts(t, 3)
	var routes []string
	for _, port := range ports {
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", port))
	}
	for i, port := range ports {
		all = append(all, startServer(t, server.Options{
			ServerName: fmt.Sprint("n", i), Port: server.RANDOM_PORT, HTTPHost: "127.0.0.1", HTTPPort: server.RANDOM_PORT,
			Cluster: server.ClusterOpts{Name: "posthorn", Host: "127.0.0.1", Port: port},
			Routes:  server.RoutesFromStr(strings.Join(routes, ",")),
		}))
	}
	return all
}

// freePorts returns unused ports.
func freePorts(t *testing.T, n int) (ports []int) {
	t.Helper()
	for range n {
		address, err := netip.ParseAddrPort(process.FreeAddr())
		if err != nil {
			t.Fatal(err)
		}
		ports = append(ports, int(address.Port()))
	}
	return ports
}

// openLog opens a stream, as soon as the servers have a leader.
func openLog(t *testing.T, s *server.Server, c StreamConfig) *Log {
	t.Helper()
	nc, err := Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	c.Name, c.Subject = "PH_test_W0", "ph.test.W0"
	for deadline := time.Now().Add(startTimeout); ; {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		l, err := Open(ctx, nc, c)
		cancel()
		if err == nil {
			return l
		}
		if time.Now().After(deadline) {
			t.Fatalf("open the stream: got error %v after %v, want none", err, startTimeout)
		}
	}
}

func wantError(t *testing.T, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: got error %v, want %v", what, got, want)
	}
}

// TestLog compares a stream with the contract of slots.Log.
func TestLog(t *testing.T) {
	single := startServer(t, server.Options{Port: server.RANDOM_PORT})
	l := openLog(t, single, StreamConfig{Replicas: 1, MaxBytes: 1 << 20})
	publish := func(expected uint64, id string, record []byte) (uint64, error) {
		ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
		defer cancel()
		return l.Publish(ctx, expected, id, record)
	}
	state := func() slots.State {
		t.Helper()
		s, err := l.State(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s.ID == "" {
			t.Error("the stream has no ID")
		}
		s.Bytes, s.ID, s.Replaced = 0, "", nil
		return s
	}
	wantState := func(what string, want slots.State) {
		t.Helper()
		if diff := cmp.Diff(want, state()); diff != "" {
			t.Errorf("state %s (-want +got):\n%s", what, diff)
		}
	}

	wantState("of an empty stream", slots.State{First: 1, MaxBytes: 1 << 20})
	if _, err := l.Get(t.Context(), 1); !errors.Is(err, slots.ErrNoRecord) {
		t.Errorf("get of an empty stream: got error %v, want %v", err, slots.ErrNoRecord)
	}
	for i := range uint64(3) {
		sequence, err := publish(i, fmt.Sprint("id", i), fmt.Append(nil, "record ", i))
		if err != nil || sequence != i+1 {
			t.Fatalf("publish record %d: got sequence %d and error %v, want %d and none", i, sequence, err, i+1)
		}
	}
	_, err := publish(1, "other", []byte("late"))
	wantError(t, "publish behind a record that is not the last one", err, slots.ErrWrongSequence)
	// A single server compares the sequence first, a cluster the id.
	if sequence, err := publish(1, "id1", []byte("record 1")); sequence != 2 && !errors.Is(err, slots.ErrWrongSequence) {
		t.Errorf("publish of a duplicate: got sequence %d and error %v, want 2, or error %v", sequence, err, slots.ErrWrongSequence)
	}
	_, err = publish(3, "large", bytes.Repeat([]byte("x"), 900<<10))
	if err != nil {
		t.Errorf("publish of a large record: got error %v, want none", err)
	}
	_, err = publish(4, "full", bytes.Repeat([]byte("x"), 500<<10))
	wantError(t, "publish to a full stream", err, slots.ErrNoSpace)

	e, err := l.Get(t.Context(), 2)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(slots.Entry{Sequence: 2, Record: []byte("record 1")}, e); diff != "" {
		t.Errorf("record 2 (-want +got):\n%s", diff)
	}
	if err := l.Trim(t.Context(), 3); err != nil {
		t.Fatal(err)
	}
	wantState("after a trim", slots.State{First: 3, Last: 4, MaxBytes: 1 << 20})
	if e, err := l.Get(t.Context(), 1); err != nil || e.Sequence != 3 {
		t.Errorf("get behind the trimmed records: got sequence %d and error %v, want 3 and none", e.Sequence, err)
	}
	var sequences []uint64
	errEnough := errors.New("enough")
	err = l.Tail(t.Context(), 3, func(e slots.Entry) error {
		if sequences = append(sequences, e.Sequence); len(sequences) == 2 {
			return errEnough
		}
		return nil
	})
	wantError(t, "tail", err, errEnough)
	if diff := cmp.Diff([]uint64{3, 4}, sequences); diff != "" {
		t.Errorf("sequences of the tail (-want +got):\n%s", diff)
	}
}

// slotStore is a store on a stream.
type slotStore struct {
	*pebblestore.Store
	writer *slots.Writer
}

func (s *slotStore) Close() error {
	defer s.writer.Close()
	return s.Store.Close()
}

// TestStore runs random operations on a store whose log has three replicas. The store is often
// closed, and restored from the stream into an empty folder.
func TestStore(t *testing.T) {
	log := openLog(t, startCluster(t), StreamConfig{Replicas: 3, MaxBytes: 1 << 30})
	clock := &storetest.Clock{}
	storetest.Model(t, 1, 300, func(*testing.T) storetest.Engine {
		return storetest.Engine{
			Open: func(tb testing.TB) queue.Store {
				return openStore(t, log, pebblestore.Options{DuplicateWindow: 10 * time.Minute, Now: clock.Now})
			},
			Clock: clock, DuplicateWindow: 10 * time.Minute,
		}
	})
}

func openStore(t *testing.T, log slots.Log, o pebblestore.Options) *slotStore {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	dir := t.TempDir()
	o.Logger = slog.New(slog.DiscardHandler)
	w, err := slots.Slot{Log: log, Dir: dir, Store: o}.TakeOver(ctx)
	if err != nil {
		t.Fatal(err)
	}
	o.Log = w
	s, err := pebblestore.Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	return &slotStore{s, w}
}

// The claim of another session ends the first one: it acknowledges nothing more, and its
// acknowledged batches are in the second store.
func TestTakeOver(t *testing.T) {
	log := openLog(t, startCluster(t), StreamConfig{Replicas: 3, MaxBytes: 1 << 30})
	first := openStore(t, log, pebblestore.Options{})
	appendOne := func(id string) error {
		_, err := first.Append(t.Context(), []queue.Message{{Source: "shop/web", ID: id, AcceptedAt: time.Now(), Body: []byte("{}")}})
		return err
	}
	const messages = 20
	for i := range messages {
		if err := appendOne(fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	second := openStore(t, log, pebblestore.Options{})
	defer second.Close()
	wantError(t, "append to the first store", appendOne("late"), slots.ErrSessionEnded)
	if got := second.SourceStats("shop/web").Accepted; got != messages {
		t.Errorf("accepted messages of the second store: got %d, want %d", got, messages)
	}
	_ = first.Close()
}
