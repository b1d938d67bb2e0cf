package host

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
	"github.com/posthorn/posthorn/test/wait"
)

// bus is a Bus in memory.
type bus struct {
	mu  sync.Mutex
	fns map[int]func([]byte)
	n   int
	// published counts the heartbeats. denied is true while none arrives, and cutOff is a process whose heartbeats
	// do not arrive.
	published int
	denied    bool
	cutOff    string
}

func (b *bus) Publish(text []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.published++; b.denied || b.cutOff != "" && bytes.Contains(text, []byte(`"member":"`+b.cutOff+`"`)) {
		return nil
	}
	for _, fn := range b.fns {
		fn(text)
	}
	return nil
}

func (b *bus) Subscribe(fn func([]byte)) (func(), error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.n++
	n := b.n
	if b.fns == nil {
		b.fns = map[int]func([]byte){}
	}
	b.fns[n] = fn
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.fns, n)
	}, nil
}

// installation has slots in memory.
type installation struct {
	bus       bus
	directory *slotstest.Assignments
	remotes   []slots.Remote
	configs   map[string]liveconfig.Stored
	number    int
	calls     *receivedCalls
	// held ends the wait of a process that opens a slot; nil for no wait.
	held map[string]map[int]chan struct{}
	// ahead is by how much the clocks of processes are ahead of the servers' clocks, in nanoseconds.
	ahead map[string]*atomic.Int64
	// refusal is the error of OpenDirectory for processes that start later; nil for none.
	refusal error
	// hanging is the process whose watch of the live configs hangs.
	hanging string
	// configDelay is Slots.ConfigDelay.
	configDelay time.Duration

	mu    sync.Mutex
	sinks []liveconfig.Sink // of the processes
}

// setClock sets the clock of a process.
func (in *installation) setClock(name string, ahead time.Duration) {
	in.ahead[name].Store(int64(ahead))
}

// set changes the config of a namespace in all processes.
func (in *installation) set(namespace string, stored liveconfig.Stored) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, sink := range in.sinks {
		sink.Set(namespace, stored)
	}
}

// waitDelivered waits until a number of calls were delivered.
func (in *installation) waitDelivered(t *testing.T, sent int) {
	t.Helper()
	if err := wait.Until(func() error {
		in.calls.mu.Lock()
		defer in.calls.mu.Unlock()
		if len(in.calls.ids) != sent {
			return fmt.Errorf("%d of %d calls were delivered", len(in.calls.ids), sent)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// receivedCalls counts the messageIds that a receiver got.
type receivedCalls struct {
	mu  sync.Mutex
	ids map[string]int
}

func newInstallation(t *testing.T, number int, namespaces ...string) *installation {
	t.Helper()
	in := &installation{directory: slotstest.NewAssignments(slotstest.Faults{}, nil), configs: map[string]liveconfig.Stored{}, number: number,
		calls: &receivedCalls{ids: map[string]int{}}, ahead: map[string]*atomic.Int64{}}
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var call struct{ MessageID string }
		if err := json.NewDecoder(r.Body).Decode(&call); err != nil {
			t.Errorf("a message cannot be decoded: %v", err)
		}
		in.calls.mu.Lock()
		defer in.calls.mu.Unlock()
		in.calls.ids[call.MessageID]++
	}))
	t.Cleanup(receiver.Close)
	for range number {
		stream := slotstest.NewStream(1 << 30)
		in.remotes = append(in.remotes, slots.Remote{Log: slotstest.NewLog(stream), Snapshots: slotstest.NewObjectStore(1 << 30),
			Members: slotstest.NewObjectStore(1 << 30), Clocks: []slots.ServerTime{
				func(context.Context) (time.Time, error) { return time.Now(), nil },
			}})
	}
	for _, namespace := range namespaces {
		c := liveconfigtest.Config(receiver.URL)
		sum := sha256.Sum256([]byte("key-" + namespace))
		c.Namespace, c.Sources[0].WriteKeySHA256 = namespace, liveconfig.KeyHashes{hex.EncodeToString(sum[:])}
		c.Sources[0].AllowedOrigins = []string{"https://" + namespace + ".example"}
		in.configs[namespace] = liveconfigtest.Numbered(t, 1, c)
	}
	return in
}

// start runs a process of the installation until stop.
func (in *installation) start(t *testing.T, name string, change ...func(*Options)) (l *Listeners, stop func()) {
	t.Helper()
	policy, err := egress.ParsePolicy([]string{"127.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	ahead := &atomic.Int64{}
	in.ahead[name] = ahead
	o := Options{
		WallClock: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }, PeerListen: "127.0.0.1:0",
	}
	o.Options = dispatcher.Options{
		DataDir: t.TempDir(), Pod: name, Egress: policy, Logger: slog.New(slog.DiscardHandler),
	}
	o.ServerOptions = dispatcher.ServerOptions{
		Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0",
		// The path of a slot's API is authorized without the slot.
		AdminGuard: func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if strings.HasPrefix(r.URL.Path, "/slots/") {
					http.Error(w, "forbidden", http.StatusForbidden)
					return
				}
				next.ServeHTTP(w, r)
			})
		},
	}
	for _, f := range change {
		f(&o)
	}
	l, err = Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	o.Listeners = l
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	refusal := in.refusal
	go func() {
		ended <- Run(ctx, o, Slots{
			Number: in.number, Standbys: 1, Bus: &in.bus, ConfigDelay: in.configDelay,
			Open: func(ctx context.Context, slot int) (slots.Remote, error) {
				if held := in.held[name][slot]; held != nil {
					select {
					case <-held:
					case <-ctx.Done():
						return slots.Remote{}, ctx.Err()
					}
				}
				return in.remotes[slot], nil
			},
			OpenDirectory: func(context.Context, int) (slots.Assignments, error) { return in.directory, refusal },
			Watch: func(ctx context.Context, to liveconfig.Sink) error {
				if name == in.hanging {
					<-ctx.Done()
					return nil
				}
				for namespace, stored := range in.configs {
					to.Set(namespace, stored)
				}
				to.Synced()
				in.mu.Lock()
				in.sinks = append(in.sinks, to)
				in.mu.Unlock()
				<-ctx.Done()
				return nil
			},
		})
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("process %s ended with %v", name, err)
		}
	})
	t.Cleanup(stop)
	return l, stop
}

// slotsOf returns the number of slots that a process owns.
func slotsOf(t *testing.T, l *Listeners) (owned, followed int) {
	t.Helper()
	_, text := fetchText(t, "http://"+l.AdminAddr().String()+"/slots")
	var states []adminapi.ReplicationState
	if err := json.Unmarshal([]byte(text), &states); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	for _, s := range states {
		if s.Owner {
			owned++
		} else {
			followed++
		}
	}
	return owned, followed
}

// waitSlots waits until a process owns a number of slots.
func waitSlots(t *testing.T, l *Listeners, want int) {
	t.Helper()
	if err := wait.Until(func() error {
		if owned, _ := slotsOf(t, l); owned != want {
			return fmt.Errorf("the process owns %d slots", owned)
		}
		return nil
	}); err != nil {
		t.Fatalf("want %d: %v", want, err)
	}
}

// readiness returns why a process is not ready; empty if it is.
func readiness(t *testing.T, l *Listeners) string {
	t.Helper()
	status, text := fetchText(t, "http://"+l.AdminAddr().String()+"/readyz")
	if status == http.StatusOK {
		return ""
	}
	return text
}

// waitReady waits until a process is ready.
func waitReady(t *testing.T, l *Listeners) {
	t.Helper()
	if err := wait.Until(func() error {
		if reason := readiness(t, l); reason != "" {
			return errors.New(reason)
		}
		return nil
	}); err != nil {
		t.Fatalf("want a ready process: %v", err)
	}
}

// call sends a call until it is acknowledged.
func (in *installation) call(t *testing.T, l *Listeners, namespace, id string, keyInBody bool) {
	t.Helper()
	body := map[string]string{"type": "track", "event": "e", "userId": "u", "messageId": id}
	if keyInBody {
		body["writeKey"] = "key-" + namespace
	}
	text, _ := json.Marshal(body)
	if err := wait.Until(func() error {
		// With an empty segment, as with a host setting that ends with a slash.
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+l.Addr().String()+"//v1/track", bytes.NewReader(text))
		if err != nil {
			return err
		}
		if !keyInBody {
			r.SetBasicAuth("key-"+namespace, "")
			r.Header.Set("Referer", strings.Repeat("r", 60<<10))
		}
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		answer, _ := io.ReadAll(resp.Body)
		if resp.StatusCode == http.StatusUnauthorized {
			t.Fatalf("call %s: status 401: %s", id, answer)
		}
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("status %d: %s", resp.StatusCode, answer)
		}
		return nil
	}); err != nil {
		t.Fatalf("call %s of namespace %s: %v", id, namespace, err)
	}
}

// Two processes share the slots, forward the calls of the other's namespaces, and hand over their slots
// when they end; nothing that was acknowledged is lost.
func TestSeveralSlots(t *testing.T) {
	namespaces := []string{"a", "b", "c", "d"}
	in := newInstallation(t, 4, namespaces...)
	first, stopFirst := in.start(t, "first")
	waitSlots(t, first, 4)
	sent := 0
	send := func(l *Listeners) {
		for _, namespace := range namespaces {
			for _, keyInBody := range []bool{false, true} {
				sent++
				in.call(t, l, namespace, fmt.Sprintf("%s-%d", namespace, sent), keyInBody)
			}
		}
	}
	send(first)
	second, _ := in.start(t, "second")
	waitSlots(t, second, 2)
	waitSlots(t, first, 2)
	send(first)
	send(second)
	for _, l := range []*Listeners{first, second} {
		waitReady(t, l)
		_, text := fetchText(t, "http://"+l.AdminAddr().String()+"/metrics")
		for _, want := range []string{"posthorn_ready 1", `posthorn_replication_owner{slot="0"}`, `posthorn_replication_epoch{slot="`} {
			if !strings.Contains(text, want) {
				t.Errorf("the metrics lack %q", want)
			}
		}
		if n := strings.Count(text, "# TYPE posthorn_storage_free_bytes "); n != 1 {
			t.Errorf("the metrics have the family posthorn_storage_free_bytes %d times, want once", n)
		}
	}
	// Each process forwards the admin requests for the slots of the other one.
	for slot := range 4 {
		var owners []string
		for _, l := range []*Listeners{first, second} {
			states, err := (&adminapi.Client{URL: "http://" + l.AdminAddr().String()}).Slot(slot).Slots(t.Context())
			if err != nil || len(states) != 1 || !states[0].Owner || states[0].Slot != slot {
				t.Fatalf("slot %d: got %+v and error %v, want the state of the owner", slot, states, err)
			}
			owners = append(owners, states[0].Pod)
		}
		if owners[0] != owners[1] {
			t.Errorf("slot %d: got the answers of %q, want those of one owner", slot, owners)
		}
	}
	if _, text := fetchText(t, "http://"+second.AdminAddr().String()+"/metrics"); strings.Count(text, "\nposthorn_replication_owner{") != 4 {
		t.Errorf("the metrics lack the owner of a slot:\n%s", text)
	}
	stopFirst()
	waitSlots(t, second, 4)
	send(second)
	in.waitDelivered(t, sent)
}

// A process whose directory was deleted is not ready, and keeps its slots, until the directory is restored.
func TestDeletedDirectoryIsReported(t *testing.T) {
	in := newInstallation(t, 2, "a")
	l, _ := in.start(t, "only")
	waitSlots(t, l, 2)
	in.call(t, l, "a", "before", false)
	for _, step := range []struct {
		isDeleted  bool
		wantStatus int
	}{{true, http.StatusServiceUnavailable}, {false, http.StatusOK}} {
		in.directory.SetDeleted(step.isDeleted)
		if err := wait.Until(func() error {
			status, text := fetchText(t, "http://"+l.AdminAddr().String()+"/readyz")
			if status != step.wantStatus || strings.Contains(text, slots.ErrNoStream.Error()) != step.isDeleted {
				return fmt.Errorf("readyz: status %d: %s", status, text)
			}
			return nil
		}); err != nil {
			t.Errorf("directory is deleted: %t: %v", step.isDeleted, err)
		}
	}
	if owned, _ := slotsOf(t, l); owned != 2 {
		t.Errorf("slots of the process: got %d, want 2", owned)
	}
	in.waitDelivered(t, 1)
}

// slotInDirectory returns the slot of a namespace; ok is false while it has none.
func (in *installation) slotInDirectory(t *testing.T, namespace string) (slot int, ok bool) {
	t.Helper()
	a, _, err := in.directory.Get(t.Context(), namespace)
	if err != nil && !errors.Is(err, slots.ErrNoRecord) {
		t.Fatal(err)
	}
	return a.Slot, err == nil
}

// When the directory lacks the namespaces of a slot, they get this slot again, before other namespaces get
// theirs: the directory was restored from an older backup, or created again.
func TestDirectoryWithoutRecords(t *testing.T) {
	in := newInstallation(t, 2, "a", "b")
	later := in.configs["a"]
	delete(in.configs, "a")
	duplicates := func(o *Options) { o.Queue.DuplicateWindow = pebblestore.DefaultDuplicateWindow }
	first, stop := in.start(t, "first", duplicates)
	waitSlots(t, first, 2)
	in.call(t, first, "b", "b-1", false)
	in.waitDelivered(t, 1)
	if slot, ok := in.slotInDirectory(t, "b"); slot != 0 || !ok {
		t.Fatalf("slot of namespace b: got %d, %t, want 0", slot, ok)
	}
	stop()
	in.directory.Replace()
	in.configs["a"] = later // In order of the names, it would get slot 0.
	second, _ := in.start(t, "second", duplicates)
	in.call(t, second, "b", "b-1", false)
	in.call(t, second, "a", "a-1", false)
	for namespace, want := range map[string]int{"a": 1, "b": 0} {
		if slot, ok := in.slotInDirectory(t, namespace); slot != want || !ok {
			t.Errorf("slot of namespace %s: got %d, %t, want %d", namespace, slot, ok, want)
		}
	}
	in.waitDelivered(t, 2)
	in.calls.mu.Lock()
	defer in.calls.mu.Unlock()
	if n := in.calls.ids["b-1"]; n != 1 {
		t.Errorf("deliveries of a repeated call: got %d, want 1", n)
	}
}

// A namespace gets no slot while a slot has no owner that has compared its store with the directory.
func TestUncomparedSlots(t *testing.T) {
	in := newInstallation(t, 2)
	directory, err := slots.OpenDirectory(t.Context(), in.directory, 2, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	id, _ := directory.Read()
	for name, c := range map[string]struct {
		owned []slots.OwnedSlot
		want  string
	}{
		"without an owner": {[]slots.OwnedSlot{{Slot: 0, Epoch: 1, Directory: id}}, "slot 1 has no owner"},
		"not compared":     {[]slots.OwnedSlot{{Slot: 0, Epoch: 1, Directory: id}, {Slot: 1, Epoch: 1}}, "the owner of slot 1 has not yet compared"},
		"compared with another one": {[]slots.OwnedSlot{{Slot: 0, Epoch: 1, Directory: "other"}, {Slot: 1, Epoch: 1, Directory: id}},
			"the owner of slot 0 has not yet compared"},
		"compared with more records": {[]slots.OwnedSlot{{Slot: 0, Epoch: 1, Directory: id}, {Slot: 1, Epoch: 1, Directory: id, Assignments: 1}}, "the owner of slot 1 has not yet compared"},
		"compared":                   {[]slots.OwnedSlot{{Slot: 0, Epoch: 1, Directory: id}, {Slot: 1, Epoch: 1, Directory: id}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := &host{namespaces: newNamespaces(slog.New(slog.DiscardHandler)), members: slots.NewMembers(nil)}
			h.namespaces.directory.Store(directory)
			h.members.Hear(slots.Heartbeat{Member: "other", Owned: c.owned})
			if got := h.uncompared(); got == "" != (c.want == "") || !strings.HasPrefix(got, c.want) {
				t.Errorf("reason: got %q, want %q", got, c.want)
			}
		})
	}
}

// Messages of a namespace that the directory assigns to another slot are reported.
func TestMisplacedNamespace(t *testing.T) {
	in := newInstallation(t, 2, "b")
	live, err := in.configs["b"].Decode()
	if err != nil {
		t.Fatal(err)
	}
	live.Config.Destinations[0].Endpoints[0].URL = liveconfig.NewSecret("http://127.0.0.1:1/")
	in.configs["b"] = liveconfigtest.Numbered(t, 2, live.Config)
	for i := range in.remotes {
		in.remotes[i].Durability = func(context.Context) (slots.Durability, error) { return slots.Durability{}, nil }
	}
	first, stop := in.start(t, "first")
	waitSlots(t, first, 2)
	in.call(t, first, "b", "b-1", false)
	stop()
	in.directory.Replace()
	if _, err := in.directory.Create(t.Context(), slots.Assignment{Namespace: "b", Slot: 1}); err != nil {
		t.Fatal(err)
	}
	second, _ := in.start(t, "second")
	want := []string{"slot 0 has 1 pending messages and 0 dead letters of namespace b, which the directory assigns to slot 1, so they are not delivered; restore the stream of the directory from a backup that assigns it to slot 0"}
	if err := wait.Until(func() error {
		_, text := fetchText(t, "http://"+second.AdminAddr().String()+"/slots")
		var states []adminapi.ReplicationState
		if err := json.Unmarshal([]byte(text), &states); err != nil {
			return err
		}
		for _, s := range states {
			if s.Owner && s.Slot == 0 && slices.Equal(s.Weak, want) {
				return nil
			}
		}
		return fmt.Errorf("states %s", text)
	}); err != nil {
		t.Errorf("problems of slot 0: want %q: %v", want, err)
	}
}

// A process that does not receive heartbeats, because of its permissions, knows no other process: it takes
// no slots, and is not ready.
func TestHeartbeatsAreRequired(t *testing.T) {
	in := newInstallation(t, 2, "a")
	in.bus.denied = true
	l, _ := in.start(t, "only")
	if err := wait.Until(func() error {
		in.bus.mu.Lock()
		defer in.bus.mu.Unlock()
		if in.bus.published < 6 { // Slots are taken at the age of 2 s.
			return fmt.Errorf("%d heartbeats", in.bus.published)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if owned, followed := slotsOf(t, l); owned+followed != 0 {
		t.Errorf("without heartbeats: got %d slots owned and %d followed, want none", owned, followed)
	}
	if status, text := fetchText(t, "http://"+l.AdminAddr().String()+"/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(text, "ph.NAME.members") {
		t.Errorf("readyz without heartbeats: got status %d and %q, want 503 with the subject", status, text)
	}
	in.bus.mu.Lock()
	in.bus.denied = false
	in.bus.mu.Unlock()
	waitSlots(t, l, 2)
}

// A process that is cut off from the servers is not ready after a time, and is ready again with them.
func TestCutOffProcessIsNotReady(t *testing.T) {
	in := newInstallation(t, 2, "a")
	l, _ := in.start(t, "only")
	waitSlots(t, l, 2)
	for _, c := range []struct {
		denied bool
		status int
		text   string
	}{{false, http.StatusOK, ""}, {true, http.StatusServiceUnavailable, "cannot reach the servers"}, {false, http.StatusOK, ""}} {
		in.bus.mu.Lock()
		in.bus.denied = c.denied
		in.bus.mu.Unlock()
		if err := wait.Until(func() error {
			if status, text := fetchText(t, "http://"+l.AdminAddr().String()+"/readyz"); status != c.status || !strings.Contains(text, c.text) {
				return fmt.Errorf("readyz: got status %d and %q, want %d with %q", status, text, c.status, c.text)
			}
			return nil
		}); err != nil {
			t.Fatalf("heartbeats denied %v: %v", c.denied, err)
		}
	}
}

// A process whose heartbeats were lost has the age of a new one when they arrive again, and the slots that it owned.
func TestProcessThatWasCutOff(t *testing.T) {
	in := newInstallation(t, 4, "a")
	first, _ := in.start(t, "first")
	second, _ := in.start(t, "second")
	waitSlots(t, first, 2)
	waitSlots(t, second, 2)
	var mu sync.Mutex
	ages := map[string]int64{}
	stop, err := in.bus.Subscribe(func(text []byte) {
		var h slots.Heartbeat
		if err := json.Unmarshal(text, &h); err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		ages[h.Member] = h.Milliseconds
	})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	cutOff := func(name string) {
		in.bus.mu.Lock()
		defer in.bus.mu.Unlock()
		in.bus.cutOff = name
	}
	cutOff("second")
	time.Sleep(deafAfter + 2*slots.HeartbeatInterval)
	mu.Lock()
	delete(ages, "second")
	mu.Unlock()
	begin := time.Now()
	cutOff("")
	if err := wait.Until(func() error {
		mu.Lock()
		defer mu.Unlock()
		if _, ok := ages["second"]; !ok {
			return errors.New("no heartbeat")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	if most := time.Since(begin).Milliseconds(); ages["second"] > most || ages["first"] <= ages["second"]+deafAfter.Milliseconds() {
		t.Errorf("ages %v ms: want at most %d ms of the second process, and the time since the start of the first one", ages, most)
	}
	mu.Unlock()
	waitSlots(t, second, 2)
	waitSlots(t, first, 2)
}

// A config that its owner refuses, or parks Sources for, changes nothing for the calls of another process:
// they are routed to the owner, which knows the keys.
func TestKeysOfRefusedConfigs(t *testing.T) {
	in := newInstallation(t, 2, "a", "b")
	for _, namespace := range []string{"a", "b"} {
		live, err := in.configs[namespace].Decode()
		if err != nil {
			t.Fatal(err)
		}
		in.configs[namespace] = liveconfigtest.Numbered(t, 7, live.Config)
	}
	l, _ := in.start(t, "only")
	waitSlots(t, l, 2)
	for _, namespace := range []string{"a", "b"} {
		in.call(t, l, namespace, "call-"+namespace, false)
	}
	// The config is one of a backup, from before the key.
	for _, namespace := range []string{"a", "b"} {
		in.set(namespace, liveconfigtest.Numbered(t, 6, liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: namespace}))
	}
	for _, namespace := range []string{"a", "b"} {
		in.call(t, l, namespace, "later-"+namespace, false) // It fails at a status 401.
	}
}

// wantTwin waits until the readiness of a process is as the first's or the second's with its name.
func wantTwin(t *testing.T, l *Listeners, first bool) {
	t.Helper()
	if err := wait.Until(func() error {
		status, text := fetchText(t, "http://"+l.AdminAddr().String()+"/readyz")
		if (status == http.StatusOK) != first || !first && !strings.Contains(text, "another process that uses this log has the name twin") {
			return fmt.Errorf("readyz: status %d: %s", status, text)
		}
		return nil
	}); err != nil {
		t.Errorf("want a ready process %v: %v", first, err)
	}
}

// The second process with a name is not ready, and takes no slots until the first one has ended. The first
// one is not affected, also for a third process.
func TestNamesOfProcesses(t *testing.T) {
	in := newInstallation(t, 3, "a", "b")
	first, stopFirst := in.start(t, "twin")
	waitSlots(t, first, 3)
	second, _ := in.start(t, "twin")
	wantTwin(t, second, false)
	third, _ := in.start(t, "third")
	waitSlots(t, first, 2)
	waitSlots(t, third, 1)
	for i := range 3 {
		in.call(t, first, "a", fmt.Sprint("first-", i), false)
		in.call(t, third, "a", fmt.Sprint("third-a-", i), false)
		in.call(t, third, "b", fmt.Sprint("third-b-", i), false)
	}
	wantTwin(t, first, true)
	wantTwin(t, second, false)
	waitSlots(t, second, 0)
	stopFirst()
	wantTwin(t, second, true)
	waitSlots(t, second, 1)
	waitSlots(t, third, 2)
	in.call(t, second, "a", "last", false)
}

// A process whose log belongs to another installation names the reason, also if a process of the other one has
// its name. It forwards no calls, and the other installation does not count it as a process.
func TestProcessOfAnotherInstallation(t *testing.T) {
	in := newInstallation(t, 2, "a")
	first, _ := in.start(t, "twin")
	waitSlots(t, first, 2)
	waitReady(t, first)
	in.call(t, first, "a", "before", false)
	in.refusal = errors.New("the log belongs to another installation")
	var mu sync.Mutex
	heard, senders := 0, map[string]bool{}
	unsubscribe, _ := in.bus.Subscribe(func(text []byte) {
		var h slots.Heartbeat
		_ = json.Unmarshal(text, &h)
		mu.Lock()
		defer mu.Unlock()
		heard++
		senders[string(h.Announcement)] = true
	})
	defer unsubscribe()
	for _, name := range []string{"twin", "other"} {
		l, stop := in.start(t, name)
		mu.Lock()
		before := heard
		mu.Unlock()
		if err := wait.Until(func() error {
			mu.Lock()
			defer mu.Unlock()
			if n := heard - before; n < 6 { // Slots are taken at the age of 2 s.
				return fmt.Errorf("%d heartbeats", n)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if got := readiness(t, l); !strings.Contains(got, in.refusal.Error()) {
			t.Errorf("readyz of %s: got %q, want %q", name, got, in.refusal)
		}
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+l.Addr().String()+"/v1/track",
			strings.NewReader(`{"event":"e","userId":"u"}`))
		if err != nil {
			t.Fatal(err)
		}
		r.SetBasicAuth("key-a", "")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("a call to %s: got status %d, want 503", name, resp.StatusCode)
		}
		if owned, followed := slotsOf(t, l); owned+followed != 0 {
			t.Errorf("%s: got %d slots owned and %d followed, want none", name, owned, followed)
		}
		stop()
	}
	mu.Lock()
	if len(senders) != 1 {
		t.Errorf("heartbeats: got those of %d processes, want those of the first one alone", len(senders))
	}
	mu.Unlock()
	waitReady(t, first)
	in.waitDelivered(t, 1)
}

// With one slot, a process forwards calls before it has a live config. It is not ready, and takes no slot.
func TestOnlySlotNeedsNoConfig(t *testing.T) {
	in := newInstallation(t, 1, "a")
	first, _ := in.start(t, "first")
	waitSlots(t, first, 1)
	in.hanging = "second"
	second, _ := in.start(t, "second")
	for _, keyInBody := range []bool{false, true} {
		in.call(t, second, "a", fmt.Sprint("forwarded-", keyInBody), keyInBody)
	}
	in.waitDelivered(t, 2)
	if got := readiness(t, second); !strings.Contains(got, errNotSynced.Error()) {
		t.Errorf("readyz of the process without a config: got %q, want %q", got, errNotSynced)
	}
	waitSlots(t, second, 0)
}

// post sends a call once, and returns the status.
func post(t *testing.T, l *Listeners, namespace string) int {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+l.Addr().String()+"/v1/track",
		strings.NewReader(`{"event":"e","userId":"u"}`))
	if err != nil {
		t.Fatal(err)
	}
	r.SetBasicAuth("key-"+namespace, "")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

// The number of slots is raised from 1 by a rolling update: namespaces remain in slot 0, and new ones get the others. A
// process that knows one slot does not reject the calls of the others.
func TestMoreSlotsThanOne(t *testing.T) {
	in := newInstallation(t, 3, "a", "b", "new")
	added := in.configs["new"]
	delete(in.configs, "new")
	in.number = 1
	before, stop := in.start(t, "z-before")
	waitSlots(t, before, 1)
	in.call(t, before, "a", "a-1", false)
	in.call(t, before, "b", "b-1", false)
	in.number = 3
	after, _ := in.start(t, "after")
	waitSlots(t, after, 2)
	in.set("new", added) // The first process by name assigns it.
	in.call(t, after, "new", "new-1", false)
	in.call(t, after, "a", "a-2", false)
	in.call(t, before, "b", "b-2", false)
	if slot, ok := in.slotInDirectory(t, "new"); slot == 0 || !ok {
		t.Errorf("slot of the new namespace: got %d, %t, want another one than 0", slot, ok)
	}
	for namespace, want := range map[string]int{"a": http.StatusOK, "new": http.StatusServiceUnavailable} {
		if status := post(t, before, namespace); status != want {
			t.Errorf("call of %s to a process with one slot: got status %d, want %d", namespace, status, want)
		}
	}
	stop()
	waitSlots(t, after, 3)
	in.call(t, after, "b", "b-3", true)
	in.waitDelivered(t, 7)
}

// Of two processes with one name that start together, one is ready.
func TestTwinsThatStartTogether(t *testing.T) {
	in := newInstallation(t, 1, "a")
	one, _ := in.start(t, "twin")
	other, _ := in.start(t, "twin")
	if err := wait.Until(func() error {
		ready, owned := 0, 0
		for _, l := range []*Listeners{one, other} {
			if status, _ := fetchText(t, "http://"+l.AdminAddr().String()+"/readyz"); status == http.StatusOK {
				ready++
			}
			n, _ := slotsOf(t, l)
			owned += n
		}
		if ready != 1 || owned != 1 {
			return fmt.Errorf("%d processes are ready, and %d own the slot", ready, owned)
		}
		return nil
	}); err != nil {
		t.Errorf("want one ready process with the slot: %v", err)
	}
}

// Without the owner of its slot a call is refused with 503, and an unknown key with 401.
func TestKeysOfSeveralSlots(t *testing.T) {
	in := newInstallation(t, 2, "a", "b")
	l, _ := in.start(t, "only")
	waitSlots(t, l, 2)
	for _, namespace := range []string{"a", "b"} { // Each gets its slot after the first config.
		in.call(t, l, namespace, "call-"+namespace, false)
	}
	for _, keyInBody := range []bool{false, true} {
		body := `{"userId":"u","event":"e"}`
		if keyInBody {
			body = `{"userId":"u","event":"e","writeKey":"unknown"}`
		}
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+l.Addr().String()+"/v1/track", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if !keyInBody {
			r.SetBasicAuth("unknown", "")
		}
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("unknown key, in the body %v: got status %d, want 401", keyInBody, resp.StatusCode)
		}
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodOptions, "http://"+l.Addr().String()+"/v1/track", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Origin", "https://b.example")
	r.Header.Set("Access-Control-Request-Method", http.MethodPost)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if got := resp.Header.Get("Access-Control-Allow-Origin"); got != "https://b.example" {
		t.Errorf("preflight of a page that namespace b allows: got origin %q", got)
	}
	if err := wait.Until(func() error {
		if _, text := fetchText(t, "http://"+l.AdminAddr().String()+"/slots/0/report?since="); !strings.Contains(text, `"namespace"`) {
			return errors.New(text)
		}
		return nil
	}); err != nil {
		t.Errorf("report of slot 0: %v", err)
	}
	if _, text := fetchText(t, "http://"+l.AdminAddr().String()+"/slots/1/slots"); !strings.Contains(text, `"slot":1`) {
		t.Errorf("state of slot 1: got %s", text)
	}
	for _, slot := range []string{"2", "-1", "x"} {
		if status, text := fetchText(t, "http://"+l.AdminAddr().String()+"/slots/"+slot+"/report"); status != http.StatusNotFound || !strings.Contains(text, "this log has 2 slots") {
			t.Errorf("report of slot %s: got status %d and %q, want 404 with the number of slots", slot, status, text)
		}
	}
	// Namespace c has no config, so its slot is asked about unknown keys.
	if _, err := in.directory.Create(t.Context(), slots.Assignment{Namespace: "c", Slot: 9}); err != nil {
		t.Fatal(err)
	}
	if err := wait.Until(func() error {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+l.Addr().String()+"/v1/track",
			strings.NewReader(`{"userId":"u","event":"e"}`))
		if err != nil {
			return err
		}
		r.SetBasicAuth("unknown", "")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusServiceUnavailable {
			return fmt.Errorf("got status %d", resp.StatusCode)
		}
		return nil
	}); err != nil {
		t.Errorf("unknown key, and a slot that this process does not know: want 503: %v", err)
	}
}

// wantClock waits until the state of a process's clock and its readiness are these.
func wantClock(t *testing.T, l *Listeners, status int, problem string) {
	t.Helper()
	if err := wait.Until(func() error {
		got, reason := fetchText(t, "http://"+l.AdminAddr().String()+"/readyz")
		if got != status || status != http.StatusOK && !strings.Contains(reason, problem) {
			return fmt.Errorf("readyz: got status %d with %q", got, reason)
		}
		_, text := fetchText(t, "http://"+l.AdminAddr().String()+"/slots")
		if has := strings.Contains(text, `"clock":"`); has != (problem != "") || !strings.Contains(text, problem) {
			return fmt.Errorf("slots: got %s", text)
		}
		return nil
	}); err != nil {
		t.Errorf("want status %d and the problem %q: %v", status, problem, err)
	}
}

// A process with a wrong clock hands over its slots to one with a right clock, forwards calls, and gets
// slots again when its clock is right.
func TestWrongClockOfAProcess(t *testing.T) {
	namespaces := []string{"a", "b", "c", "d"}
	in := newInstallation(t, 4, namespaces...)
	first, stopFirst := in.start(t, "first")
	second, _ := in.start(t, "second")
	waitSlots(t, first, 2)
	waitSlots(t, second, 2)
	sent := 0
	send := func(l *Listeners) {
		for _, namespace := range namespaces {
			sent++
			in.call(t, l, namespace, fmt.Sprintf("%s-%d", namespace, sent), false)
		}
	}
	send(first)
	const wrong = "the clock of this process is 6h0m0s ahead of those of the NATS servers"
	in.setClock("first", 6*time.Hour)
	waitSlots(t, second, 4)
	wantClock(t, first, http.StatusServiceUnavailable, wrong)
	wantClock(t, second, http.StatusOK, "")
	send(first)
	send(second)
	if _, text := fetchText(t, "http://"+first.AdminAddr().String()+"/metrics"); !strings.Contains(text,
		"\nposthorn_replication_clock_skew_seconds 2160") && !strings.Contains(text, "\nposthorn_replication_clock_skew_seconds 2159") {
		t.Error("the metrics lack posthorn_replication_clock_skew_seconds of about 21600")
	}

	// When all processes agree, the servers are wrong, and the processes share the slots as before.
	in.setClock("second", 6*time.Hour)
	waitSlots(t, first, 2)
	waitSlots(t, second, 2)
	const all = "the clocks of all processes are 6h0m0s ahead of those of the NATS servers"
	wantClock(t, first, http.StatusOK, all)
	wantClock(t, second, http.StatusOK, all)
	in.setClock("first", 0)
	in.setClock("second", 0)
	wantClock(t, first, http.StatusOK, "")
	wantClock(t, second, http.StatusOK, "")
	send(second)

	// The last process keeps its slots, and takes no others.
	stopFirst()
	waitSlots(t, second, 4)
	in.setClock("second", -time.Hour)
	wantClock(t, second, http.StatusOK, "the clock of this process is 1h0m0s behind those of the NATS servers")
	waitSlots(t, second, 4)
	send(second)
	in.waitDelivered(t, sent)
}

// A process that starts alone with a wrong clock takes no slot until the clock is right.
func TestStartWithAWrongClock(t *testing.T) {
	in := newInstallation(t, 1, "a")
	in.remotes[0].Clocks = []slots.ServerTime{func(context.Context) (time.Time, error) { return time.Now().Add(time.Hour), nil }}
	l, _ := in.start(t, "only")
	wantClock(t, l, http.StatusServiceUnavailable, "the clock of this process is 1h0m0s behind those of the NATS servers")
	waitSlots(t, l, 0)
	in.setClock("only", time.Hour)
	waitSlots(t, l, 1)
	wantClock(t, l, http.StatusOK, "")
	in.call(t, l, "a", "call", false)
}

// A process is idle again when the only busy store is handed over.
func TestQuietness(t *testing.T) {
	var got []bool
	q := idleTracker{report: func(quiet bool) { got = append(got, quiet) }}
	q.set(1, false)
	q.set(2, false)
	q.set(1, true)
	q.end(2)
	q.end(3)
	if diff := cmp.Diff([]bool{false, true}, got); diff != "" {
		t.Errorf("reports (-want +got):\n%s", diff)
	}
	(&idleTracker{}).end(1) // Without a limit of the memory nothing is reported.
}

// A process with several slots, of which a newer release wrote one, is not ready.
func TestSlotOfANewerRelease(t *testing.T) {
	in := newInstallation(t, 2, "a", "b")
	in.remotes[1].Log = newerLog(t)
	l, _ := in.start(t, "only")
	waitSlots(t, l, 1)
	if err := wait.Until(func() error {
		if status, text := fetchText(t, "http://"+l.AdminAddr().String()+"/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(text, "slot 1: ") || !strings.Contains(text, newerRelease) {
			return fmt.Errorf("got status %d and %q", status, text)
		}
		return nil
	}); err != nil {
		t.Errorf("readyz: want 503 with the formats: %v", err)
	}
}

// startHeld starts a second process that cannot open two of the four slots, and waits until it has the others.
func (in *installation) startHeld(t *testing.T) (second *Listeners) {
	t.Helper()
	in.held = map[string]map[int]chan struct{}{"second": {2: make(chan struct{}), 3: make(chan struct{})}}
	second, _ = in.start(t, "second")
	if err := wait.Until(func() error {
		if owned, followed := slotsOf(t, second); owned != 2 || followed != 1 {
			return fmt.Errorf("the process owns %d slots, and follows %d", owned, followed)
		}
		return nil
	}); err != nil {
		t.Fatalf("want 2 slots and the copy that cannot be restored: %v", err)
	}
	if reason := readiness(t, second); !strings.Contains(reason, "restoring copies of slots") {
		t.Errorf("readiness without two copies: got %q, want that it restores copies", reason)
	}
	return second
}

// A copy that another process keeps is removed with its files, and is restored after the end of that process.
func TestRemovedCopies(t *testing.T) {
	in := newInstallation(t, 4, "a")
	folders := map[*Listeners]string{}
	start := func(name string) (l *Listeners, stop func()) {
		var dir string
		l, stop = in.start(t, name, func(o *Options) { dir = filepath.Join(o.DataDir, "slots") })
		folders[l] = dir
		return l, stop
	}
	want := func(processes ...*Listeners) {
		t.Helper()
		if err := wait.Until(func() error {
			copies := 0
			for _, l := range processes {
				owned, followed := slotsOf(t, l)
				stored, err := os.ReadDir(folders[l])
				if err != nil {
					return err
				}
				if len(stored) != owned+followed || owned > 2 {
					return fmt.Errorf("a process owns %d slots, follows %d, and has the files of %d", owned, followed, len(stored))
				}
				copies += followed
			}
			if copies != in.number {
				return fmt.Errorf("%d copies", copies)
			}
			return nil
		}); err != nil {
			t.Fatalf("%d processes with %d slots, want a copy of each: %v", len(processes), in.number, err)
		}
	}
	first, _ := start("first")
	second, _ := start("second")
	want(first, second)
	third, stop := start("third")
	waitSlots(t, third, 1)
	want(first, second, third)
	stop()
	want(first, second)
}

// A process that starts beside a ready one is ready when it has the slots and copies that it should have: a
// rolling update then ends the next process.
func TestReadinessWaitsForCopies(t *testing.T) {
	in := newInstallation(t, 4, "a")
	first, _ := in.start(t, "first")
	waitReady(t, first) // It waits for no other process.
	waitSlots(t, first, 4)
	second := in.startHeld(t)
	for _, held := range in.held["second"] {
		close(held)
	}
	waitReady(t, second)
	if owned, followed := slotsOf(t, second); owned != 2 || followed != 2 {
		t.Errorf("the ready process: got %d slots and %d copies, want 2 and 2", owned, followed)
	}
	if reason := readiness(t, first); reason != "" {
		t.Errorf("readiness of the first process: got %q, want a ready process", reason)
	}
}

// A process that waits for copies is ready at once when no other process is.
func TestReadinessWithoutAnotherProcess(t *testing.T) {
	in := newInstallation(t, 4, "a")
	first, stopFirst := in.start(t, "first", func(o *Options) { o.DrainTimeout = time.Millisecond })
	waitSlots(t, first, 4)
	second := in.startHeld(t)
	go stopFirst()
	waitReady(t, second)
}

// The gate of a process that starts opens when its copies are complete, when no other process is ready, or after
// copyLimit without another copy; and does not close again.
func TestStartGate(t *testing.T) {
	begin := time.Unix(1000, 0)
	for name, c := range map[string]struct {
		steps func(*startGate)
		want  bool
	}{
		"no other process": {func(g *startGate) { g.update(begin, slots.Progress{}, false) }, true},
		"complete":         {func(g *startGate) { g.update(begin, slots.Progress{Has: 3, Complete: true}, true) }, true},
		"incomplete": {func(g *startGate) {
			g.update(begin, slots.Progress{}, true)
			g.update(begin.Add(copyLimit-1), slots.Progress{}, true)
		}, false},
		"without progress": {func(g *startGate) {
			g.update(begin, slots.Progress{Has: 1}, true)
			g.update(begin.Add(copyLimit), slots.Progress{Has: 1}, true)
		}, true},
		"with progress": {func(g *startGate) {
			g.update(begin, slots.Progress{Has: 1}, true)
			g.update(begin.Add(time.Minute), slots.Progress{Has: 2}, true)
			g.update(begin.Add(copyLimit), slots.Progress{Has: 2}, true)
		}, false},
		"with a copy that is lost and restored": {func(g *startGate) {
			g.update(begin, slots.Progress{Has: 2}, true)
			g.update(begin.Add(time.Minute), slots.Progress{Has: 1}, true)
			g.update(begin.Add(2*time.Minute), slots.Progress{Has: 2}, true)
			g.update(begin.Add(copyLimit), slots.Progress{Has: 2}, true)
		}, true},
		"incomplete later": {func(g *startGate) {
			g.update(begin, slots.Progress{Complete: true}, true)
			g.update(begin.Add(1), slots.Progress{}, true)
		}, true},
	} {
		var g startGate
		c.steps(&g)
		if got := g.open.Load(); got != c.want {
			t.Errorf("%s: got an open gate %v, want %v", name, got, c.want)
		}
	}
}

// A process that ends waits for its successors as long as the chart permits: shutdownDelay and two drain timeouts.
func TestLeaveLimit(t *testing.T) {
	for _, c := range []struct{ delay, drain, want time.Duration }{
		{0, 0, 20 * time.Second},
		{5 * time.Second, 10 * time.Second, 25 * time.Second},
		{5 * time.Second, 35 * time.Second, 75 * time.Second},
		{0, time.Second, 10 * time.Second},
	} {
		h := &host{o: Options{Options: dispatcher.Options{ServerOptions: dispatcher.ServerOptions{ShutdownDelay: c.delay,
			DrainTimeout: c.drain}}}}
		if got := h.leaveLimit(); got != c.want {
			t.Errorf("shutdown delay %v and drain timeout %v: got %v, want %v", c.delay, c.drain, got, c.want)
		}
	}
}
