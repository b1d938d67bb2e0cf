package host

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	gocmp "github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/peer"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
	"github.com/posthorn/posthorn/test/wait"
)

// oneSlot is a log with one slot in memory.
type oneSlot struct {
	bus       bus
	directory *slotstest.Assignments
	refusal   error // of the directory; nil for none
	open      func(context.Context) (slots.Remote, error)
	control   func(context.Context, *dispatcher.Dispatcher) error
}

func newOneSlot(open func(context.Context) (slots.Remote, error)) *oneSlot {
	return &oneSlot{directory: slotstest.NewAssignments(slotstest.Faults{}, nil), open: open, control: idle}
}

// newRemote returns an empty slot with a log.
func newRemote(log *slotstest.Log) slots.Remote {
	return slots.Remote{
		Log: log, Snapshots: slotstest.NewObjectStore(1 << 30), Members: slotstest.NewObjectStore(1 << 30),
		Clocks: []slots.ServerTime{func(context.Context) (time.Time, error) { return time.Now(), nil }},
	}
}

// holding is a log with one slot whose streams can be used.
func holding(remote slots.Remote) *oneSlot {
	return newOneSlot(func(context.Context) (slots.Remote, error) { return remote, nil })
}

// slots describes the log for a process.
func (in *oneSlot) slots() Slots {
	return Slots{
		Number: 1, Standbys: 9, Bus: &in.bus, Control: in.control,
		Open:          func(ctx context.Context, _ int) (slots.Remote, error) { return in.open(ctx) },
		OpenDirectory: func(context.Context, int) (slots.Assignments, error) { return in.directory, in.refusal },
	}
}

// idle is a control plane without live configs.
func idle(ctx context.Context, _ *dispatcher.Dispatcher) error {
	<-ctx.Done()
	return nil
}

// run runs a process until the test ends. ended has its error.
func (in *oneSlot) run(t *testing.T, dir string) (l *Listeners, ended <-chan error) {
	t.Helper()
	o := Options{PeerListen: "127.0.0.1:0", Options: dispatcher.Options{DataDir: dir, ServerOptions: dispatcher.ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0"}, Logger: slog.New(slog.DiscardHandler)}}
	l, err := Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	o.Listeners = l
	ctx, cancel := context.WithCancel(t.Context())
	done, over := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(over)
		done <- Run(ctx, o, in.slots())
	}()
	t.Cleanup(func() {
		cancel()
		<-over
	})
	return l, done
}

// standby returns a standby that may claim the slot, of a process that does not run.
func (in *oneSlot) standby(t *testing.T, dir string) *standby {
	t.Helper()
	h := newHost(Options{Options: dispatcher.Options{DataDir: dir, Logger: slog.New(slog.DiscardHandler)}}, in.slots())
	t.Cleanup(h.shared.Close)
	h.slots[0].takes.Store(true)
	h.namespaces.directory.Store(&slots.Directory{})
	return h.slots[0].newStandby()
}

// damageMembers makes the store in the data directory of a slot unusable.
func damageMembers(t *testing.T, dataDir string) {
	t.Helper()
	dir := slotFolder(dataDir, 0)
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, backup.MembersFolder), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
}

func fetchText(t *testing.T, url string) (status int, text string) {
	t.Helper()
	resp, err := (&http.Client{Timeout: wait.Limit}).Get(url) //nolint:noctx // bounded by the timeout
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// wantStandby checks that a process is alive, and gives the reason why it is not ready.
func wantStandby(t *testing.T, l *Listeners, reason string) {
	t.Helper()
	if err := wait.Until(func() error {
		if status, text := fetchText(t, "http://"+l.AdminAddr().String()+"/readyz"); status != http.StatusServiceUnavailable ||
			!strings.Contains(text, reason) {
			return errors.New("readyz: " + text)
		}
		return nil
	}); err != nil {
		t.Errorf("want the reason %q: %v", reason, err)
	}
	if status, _ := fetchText(t, "http://"+l.AdminAddr().String()+"/healthz"); status != http.StatusOK {
		t.Errorf("healthz: got status %d, want 200", status)
	}
	if status, _ := fetchText(t, "http://"+l.Addr().String()+"/v1/batch"); status != http.StatusServiceUnavailable {
		t.Errorf("call to a standby: got status %d, want 503", status)
	}
}

func TestLogThatCannotBeReached(t *testing.T) {
	l, _ := newOneSlot(func(context.Context) (slots.Remote, error) {
		return slots.Remote{}, errors.New("no server answers")
	}).run(t, t.TempDir())
	wantStandby(t, l, "no server answers")
}

// A process that owns the slot and cannot open its store answers the health checks meanwhile.
func TestStoreThatCannotBeOpened(t *testing.T) {
	dir := t.TempDir()
	damageMembers(t, dir)
	l, _ := holding(newRemote(slotstest.NewLog(slotstest.NewStream(1<<30)))).run(t, dir)
	wantStandby(t, l, "open the store of the slot: audiences:")
}

// A process that cannot open the store of its slot releases the slot, so that a standby need not wait
// until the session counts as lost.
func TestStoreThatCannotBeOpenedIsReleased(t *testing.T) {
	dir := t.TempDir()
	damageMembers(t, dir)
	stream := slotstest.NewStream(1 << 30)
	holding(newRemote(slotstest.NewLog(stream))).run(t, dir)
	if err := wait.Until(func() error {
		if s, err := slotstest.NewLog(stream).State(t.Context()); err != nil || s.Last == 0 {
			return fmt.Errorf("the slot has no claim: %w", err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	o := slots.Options{Logger: slog.New(slog.DiscardHandler)}
	log := slotstest.NewLog(stream)
	w, err := slots.Slot{Log: log, Dir: filepath.Join(t.TempDir(), "copy"), Options: o}.Follow(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	released := 0
	for sequence := uint64(1); ; sequence++ {
		e, err := log.Get(t.Context(), sequence)
		if errors.Is(err, slots.ErrNoRecord) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if slotstest.IsReleased(e.Record) {
			released++
		}
	}
	if released != 1 || w.Epoch() != 2 {
		t.Errorf("end of the first ownership: got %d released records and the next epoch %d, want 1 and 2", released, w.Epoch())
	}
}

// A standby whose listener fails ends with the error.
func TestStandbyWithoutListenerEnds(t *testing.T) {
	l, ended := newOneSlot(func(ctx context.Context) (slots.Remote, error) {
		<-ctx.Done()
		return slots.Remote{}, ctx.Err()
	}).run(t, t.TempDir())
	wantStandby(t, l, connecting)
	raw, err := l.peers.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { err = syscall.Shutdown(int(fd), syscall.SHUT_RDWR) }); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "serve "+l.peers.Addr().String()) {
			t.Errorf("got error %v, want that of the listener", err)
		}
	case <-time.After(wait.Limit):
		t.Error("the process continues without a listener, want its end")
	}
}

// lease is a session.
type lease struct {
	maySend bool
	done    chan struct{}
}

func (l *lease) MaySend() bool         { return l.maySend }
func (l *lease) Done() <-chan struct{} { return l.done }

// slow is an object store that sends nothing.
type slow struct{ *slotstest.ObjectStore }

func (slow) Get(ctx context.Context, _ string) (io.ReadCloser, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A process that lost the slot must not remove the members' files of the next owner.
func TestCopiesOfAnotherOwnerAreNotListed(t *testing.T) {
	store, session := slotstest.NewObjectStore(1<<30), &lease{maySend: true, done: make(chan struct{})}
	if err := store.Put(t.Context(), "a/members-1", strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	c := ownedCopies{store, session, nil}
	if names, err := c.List(t.Context()); err != nil || len(names) != 1 {
		t.Errorf("copies of the owner: got %q and error %v, want 1", names, err)
	}
	session.maySend = false
	if names, err := c.List(t.Context()); err == nil || len(names) != 0 {
		t.Errorf("copies without the lease: got %q and error %v, want an error", names, err)
	}
}

// The end of the session, or of the process, ends a read of members.
func TestReadsOfMembersEnd(t *testing.T) {
	ended, open := make(chan struct{}), make(chan struct{})
	close(ended)
	for name, c := range map[string]ownedCopies{
		"session": {slow{}, &lease{done: ended}, open},
		"process": {slow{}, &lease{done: open}, ended},
	} {
		if _, err := c.Get(t.Context(), "a/members-1"); !errors.Is(err, context.Canceled) {
			t.Errorf("end of the %s: got error %v, want context.Canceled", name, err)
		}
	}
}

// A call that the owner did not answer is refused so that clients send it again.
func TestRefusalsOfForwardedCalls(t *testing.T) {
	for name, c := range map[string]struct {
		err        error
		status     int
		retryAfter string
	}{
		"no owner":         {peer.ErrNoOwner, http.StatusServiceUnavailable, "2"},
		"silent owner":     {peer.ErrTimeout, http.StatusServiceUnavailable, "5"},
		"busy owner":       {peer.ErrBusy, http.StatusServiceUnavailable, "5"},
		"interrupted body": {&peer.BodyError{Err: io.ErrUnexpectedEOF}, http.StatusBadRequest, ""},
		"slow client":      {&peer.BodyError{Err: os.ErrDeadlineExceeded}, http.StatusRequestTimeout, ""},
	} {
		w := httptest.NewRecorder()
		refuseForwarded(w, c.err)
		if got := w.Header().Get("Retry-After"); w.Code != c.status || got != c.retryAfter {
			t.Errorf("%s: got status %d and Retry-After %q, want %d and %q", name, w.Code, got, c.status, c.retryAfter)
		}
	}
}

// processes are those with one slot and the same log.
type processes struct{ *oneSlot }

func newProcesses() processes {
	return processes{holding(newRemote(slotstest.NewLog(slotstest.NewStream(1 << 30))))}
}

// start starts a process until stop is called, or the end of the test.
func (p processes) start(t *testing.T, o Options) (l *Listeners, stop func()) {
	t.Helper()
	o.DataDir, o.Logger = cmp.Or(o.DataDir, t.TempDir()), slog.New(slog.DiscardHandler)
	o.Listen, o.AdminListen, o.PeerListen = "127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0"
	l, err := Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	o.Listeners = l
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- Run(ctx, o, p.slots())
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("process %s ended with %v", o.Pod, err)
		}
		l.Close()
	})
	t.Cleanup(stop)
	return l, stop
}

// wantLog waits until a path has the state of a process, as the owner or as a standby.
func wantLog(t *testing.T, l *Listeners, path, pod string, owner bool) (found adminapi.ReplicationState) {
	t.Helper()
	if err := wait.Until(func() error {
		_, text := fetchText(t, "http://"+l.AdminAddr().String()+path)
		var states []adminapi.ReplicationState
		if err := json.Unmarshal([]byte(text), &states); err != nil {
			return fmt.Errorf("%w: %s", err, text)
		}
		if len(states) != 1 || states[0].Pod != pod || states[0].Owner != owner {
			return fmt.Errorf("got %+v", states)
		}
		found = states[0]
		return nil
	}); err != nil {
		t.Fatalf("%s: want that of %s, owner %v: %v", path, pod, owner, err)
	}
	return found
}

// wantParts waits until a process knows the parts of all processes in the log.
func wantParts(t *testing.T, l *Listeners, want []adminapi.ReplicationState) {
	t.Helper()
	if err := wait.Until(func() error {
		states, err := (&adminapi.Client{URL: "http://" + l.AdminAddr().String()}).AllSlots(t.Context())
		if err != nil {
			return err
		}
		var got []adminapi.ReplicationState
		for _, s := range states {
			got = append(got, adminapi.ReplicationState{Pod: s.Pod, Heard: s.Heard, Owner: s.Owner, Ready: s.Ready, MaySend: s.MaySend})
		}
		if diff := gocmp.Diff(want, got); diff != "" {
			return errors.New(diff)
		}
		return nil
	}); err != nil {
		t.Errorf("parts in the log (-want +got): %v", err)
	}
}

// A standby that starts with a copy does not know the owner at once. It is ready when it can forward calls.
func TestReadyStandbyKnowsTheOwner(t *testing.T) {
	processes := newProcesses()
	first, _ := processes.start(t, Options{Options: dispatcher.Options{Pod: "first"}})
	wantLog(t, first, "/slots", "first", true)
	o := Options{Options: dispatcher.Options{Pod: "second", DataDir: t.TempDir()}}
	for range 2 {
		l, stop := processes.start(t, o)
		waitReady(t, l)
		if state := wantLog(t, l, "/slots", "second", false); !strings.HasPrefix(state.OwnerName, "first ") {
			t.Errorf("a standby that is ready: got %+v, want the owner", state)
		}
		stop()
	}
}

// A standby forwards the requests about messages to the owner, which authorizes them, too. Its own state,
// metrics and report are the standby's.
func TestStandbyForwardsAdminRequests(t *testing.T) {
	processes := newProcesses()
	var guarded sync.Map // the names of the processes
	start := func(name string) *Listeners {
		l,
			_ := processes.start(t, Options{Options: dispatcher.Options{Pod: name,
			ServerOptions: dispatcher.ServerOptions{AdminGuard: func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if strings.HasPrefix(r.URL.Path, "/slots/") || strings.HasPrefix(r.URL.Path, "/forbidden") {
						http.Error(w, "forbidden", http.StatusForbidden)
						return
					}
					guarded.Store(name+r.URL.Path, true)
					next.ServeHTTP(w, r)
				})
			}}}})
		return l
	}
	first := start("first")
	wantLog(t, first, "/slots", "first", true)
	second := start("second")
	wantLog(t, second, "/slots", "second", false)
	wantParts(t, second, []adminapi.ReplicationState{{Pod: "second", Ready: true},
		{Pod: "first", Heard: true, Owner: true, Ready: true, MaySend: true}})
	wantParts(t, first, []adminapi.ReplicationState{{Pod: "first", Owner: true, MaySend: true}, {Pod: "second", Heard: true, Ready: true}})
	wantLog(t, second, "/slots/0/slots", "first", true)
	at := "http://" + second.AdminAddr().String()
	if status, text := fetchText(t, at+"/deadletters?destination=shop/crm"); status != http.StatusOK || text != "" {
		t.Errorf("dead letters: got status %d and %q, want the empty list of the owner", status, text)
	}
	for _, name := range []string{"first", "second"} {
		if _, ok := guarded.Load(name + "/deadletters"); !ok {
			t.Errorf("the %s process has not authorized the request", name)
		}
	}
	if status, _ := fetchText(t, at+"/slots/0/forbidden"); status != http.StatusForbidden {
		t.Errorf("a request without permission: got status %d, want 403", status)
	}
	if status, text := fetchText(t, at+"/debug/config"); status != http.StatusNotFound || !strings.Contains(text, "/slots/N/") {
		t.Errorf("debug: got status %d and %q, want 404 with the path for the owner", status, text)
	}
	for path, want := range map[string]string{"/report": `"replication":{"number":1,"standbys":1}`,
		"/slots/0/report?since=": `"pod":"first"`} {
		if status, text := fetchText(t, at+path); status != http.StatusOK || !strings.Contains(text, want) {
			t.Errorf("%s: got status %d and %s, want %s", path, status, text, want)
		}
	}
	if _, text := fetchText(t, at+"/metrics"); !strings.Contains(text, `posthorn_replication_owner{slot="0"} 0`) {
		t.Errorf("metrics: got\n%s\nwant those of the standby", text)
	}
}

// An owner with a wrong clock hands over the slot to a standby with a right clock, and is a standby that is
// not ready until its clock is right.
func TestOwnerWithAWrongClock(t *testing.T) {
	processes := newProcesses()
	start := func(name string) (*Listeners, *atomic.Int64) {
		ahead := &atomic.Int64{}
		l, _ := processes.start(t, Options{Options: dispatcher.Options{Pod: name}, WallClock: func() time.Time {
			return time.Now().Add(time.Duration(ahead.Load()))
		}})
		return l, ahead
	}
	wantState := func(what string, l *Listeners, owner bool, problem string) {
		t.Helper()
		if err := wait.Until(func() error {
			_, text := fetchText(t, "http://"+l.AdminAddr().String()+"/slots")
			var states []adminapi.ReplicationState
			if err := json.Unmarshal([]byte(text), &states); err != nil || len(states) != 1 {
				return fmt.Errorf("%w: %s", err, text)
			}
			s := states[0]
			// An owner is not ready before its first config.
			if s.Owner != owner || !strings.HasPrefix(s.Clock, problem) || (s.Clock != "") != (problem != "") ||
				!owner && s.Ready != (problem == "") {
				return fmt.Errorf("got %+v", s)
			}
			return nil
		}); err != nil {
			t.Fatalf("%s: want owner %v and the problem %q: %v", what, owner, problem, err)
		}
	}
	first, clock := start("first")
	wantState("first process", first, true, "")
	clock.Store(int64(6 * time.Hour))
	const wrong = "the clock of this process is 6h0m0s ahead of those of the NATS servers"
	wantState("first process without another one", first, true, wrong)
	second, secondClock := start("second")
	wantState("second process", second, true, "")
	wantState("first process", first, false, wrong)
	for _, l := range []*Listeners{first, second} {
		if _, text := fetchText(t, "http://"+l.AdminAddr().String()+"/metrics"); !strings.Contains(text,
			"\nposthorn_replication_clock_skew_seconds ") {
			t.Error("the metrics lack posthorn_replication_clock_skew_seconds")
		}
	}
	clock.Store(0)
	wantState("first process with a right clock", first, false, "")
	secondClock.Store(int64(-time.Hour))
	wantState("first process, when the second has a wrong clock", first, true, "")
	wantState("second process", second, false, "the clock of this process is 1h0m0s behind those of the NATS servers")
}

// newerLog returns the log of a slot whose last record is one of a newer release.
func newerLog(t *testing.T) *slotstest.Log {
	t.Helper()
	log := slotstest.NewLog(slotstest.NewStream(1 << 30))
	o := slots.Options{Logger: slog.New(slog.DiscardHandler)}
	w, err := slots.Slot{Log: log, Dir: filepath.Join(t.TempDir(), "queue"), Options: o}.TakeOver(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	state, err := log.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e, err := log.Get(t.Context(), state.Last)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := log.Publish(t.Context(), state.Last, "newer", slotstest.Newer(e.Record)); err != nil {
		t.Fatal(err)
	}
	return log
}

const newerRelease = "a newer release wrote the log (record format 2, this release reads 1): use that release or a newer one"

// A process that does not read the log, because a newer release wrote it, is not ready and claims nothing.
func TestLogOfANewerRelease(t *testing.T) {
	log := newerLog(t)
	before, _ := log.State(t.Context())
	l, _ := holding(newRemote(log)).run(t, t.TempDir())
	wantStandby(t, l, newerRelease)
	if after, _ := log.State(t.Context()); after.Last != before.Last {
		t.Errorf("last record: got %d, want %d", after.Last, before.Last)
	}
}

// messages is a log handler that keeps the messages.
type messages struct {
	mu   sync.Mutex
	list []string
}

func (m *messages) Enabled(context.Context, slog.Level) bool { return true }
func (m *messages) WithAttrs([]slog.Attr) slog.Handler       { return m }
func (m *messages) WithGroup(string) slog.Handler            { return m }

func (m *messages) Handle(_ context.Context, r slog.Record) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.list = append(m.list, r.Message)
	return nil
}

// index returns the place of the first message that begins with a text; -1 for none.
func (m *messages) index(text string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.IndexFunc(m.list, func(s string) bool { return strings.HasPrefix(s, text) })
}

// slowOwner is an owner of a slot with a long drain timeout, and with a call whose client does not send the body.
type slowOwner struct {
	*messages
	listeners *Listeners
	// call is the connection of the call.
	call net.Conn
	// stop ends the process, and returns its error.
	stop func() error
}

func newSlowOwner(t *testing.T, receiver string, calls int, change ...func(*Options)) slowOwner {
	t.Helper()
	policy, err := egress.ParsePolicy([]string{"127.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	owner := slowOwner{messages: &messages{}}
	o := Options{PeerListen: "127.0.0.1:0", Options: dispatcher.Options{DataDir: t.TempDir(), ServerOptions: dispatcher.ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0", DrainTimeout: time.Hour}, Egress: policy, Logger: slog.New(owner.messages)}}
	for _, f := range change {
		f(&o)
	}
	if owner.listeners, err = Listen(o); err != nil {
		t.Fatal(err)
	}
	o.Listeners = owner.listeners
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	in := newProcesses()
	in.control = func(ctx context.Context, d *dispatcher.Dispatcher) error {
		d.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config(receiver)))
		d.Synced()
		return idle(ctx, d)
	}
	go func() { ended <- Run(ctx, o, in.slots()) }()
	owner.stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	t.Cleanup(func() { _ = owner.stop() })
	for i := range calls {
		if err := wait.Until(func() error {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+owner.listeners.Addr().String()+"/v1/track",
				strings.NewReader(fmt.Sprintf(`{"event":"e","userId":"u","messageId":"%d"}`, i)))
			if err != nil {
				return err
			}
			r.SetBasicAuth(liveconfigtest.Key, "")
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				return err
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return fmt.Errorf("status %d", resp.StatusCode)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := wait.Until(func() error {
		if status, text := fetchText(t, "http://"+owner.listeners.AdminAddr().String()+"/readyz"); status != http.StatusOK {
			return errors.New(text)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	// The server answers the header as soon as the handler reads the body.
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", owner.listeners.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	owner.call = conn
	auth := base64.StdEncoding.EncodeToString([]byte(liveconfigtest.Key + ":"))
	if _, err := fmt.Fprintf(conn, "POST /v1/track HTTP/1.1\r\nHost: a\r\nAuthorization: Basic %s\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n", auth); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, len("HTTP/1.1 100"))); err != nil {
		t.Fatal(err)
	}
	return owner
}

// The end of an ownership gives the calls and the deliveries one common time: the deliveries end while a call is in
// progress.
func TestDeliveriesEndWithTheCalls(t *testing.T) {
	owner := newSlowOwner(t, "http://127.0.0.1:1", 0, func(o *Options) { o.HandOver = time.Hour })
	ended := make(chan error, 1)
	go func() { ended <- owner.stop() }()
	if err := wait.Until(func() error {
		if owner.index("deliveries stopped") < 0 {
			return errors.New("deliveries have not stopped")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if owner.index("stopped; pending messages are stored") >= 0 {
		t.Error("the process ended before the call")
	}
	owner.call.Close()
	if err := <-ended; err != nil {
		t.Errorf("end of the process: got error %v, want none", err)
	}
}

// A receiver that does not answer does not delay the end of an ownership by the drain timeout.
func TestSlowReceiverAtTheEndOfATerm(t *testing.T) {
	sent, cancelled := make(chan struct{}, 9), make(chan struct{}, 9)
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // Only then a closed connection is found.
		sent <- struct{}{}
		<-r.Context().Done()
		cancelled <- struct{}{}
	}))
	defer receiver.Close()
	owner := newSlowOwner(t, receiver.URL, 1)
	<-sent
	if err := owner.stop(); err != nil { // With the drain timeout it takes an hour.
		t.Errorf("end of the process: got error %v, want none", err)
	}
	<-cancelled
	for _, want := range []string{"drain timeout: requests in flight are cancelled", "drain timeout: calls in progress are cancelled"} {
		if owner.index(want) < 0 {
			t.Errorf("the log lacks %q", want)
		}
	}
}

// A copy with which the store could not be opened does not count as ready for some time, also when it has all
// records again.
func TestReadinessAfterAFailedOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		damageMembers(t, dir)
		opened := make(chan struct{}, 9)
		remote := newRemote(slotstest.NewLog(slotstest.NewStream(1 << 30)))
		remote.Clocks = nil // The clock of the test stands still in between.
		log := newOneSlot(func(context.Context) (slots.Remote, error) {
			opened <- struct{}{}
			return remote, nil
		})
		s := log.standby(t, dir)
		ctx, cancel := context.WithCancel(t.Context())
		owned := make(chan bool)
		go func() {
			_, d := s.own(ctx)
			owned <- d != nil
		}()
		<-opened
		for s.openFailure() == "" {
			time.Sleep(time.Second)
		}
		cancel()
		if <-owned {
			t.Error("the store was opened, want an error")
		}
		wantCopy := func(what string, ready, failed bool) {
			t.Helper()
			if got, want := s.copied(), (slots.SlotCopied{Ready: ready, Failed: failed}); got != want {
				t.Errorf("%s: got the copy %+v, want %+v", what, got, want)
			}
			if err := s.canReplaceOwner(); (err == nil) != ready ||
				failed && !strings.Contains(err.Error(), "open the store of the slot: audiences:") {
				t.Errorf("%s: got the reason %v, want a ready standby %v", what, err, ready)
			}
		}
		wantCopy("after the failure", false, true)
		s.markCaughtUp() // It follows the next owner, and knows its address.
		s.hasKnown.Store(true)
		wantCopy("with all records", false, true)
		time.Sleep(openBackoff)
		wantCopy("later", true, false)
	})
}

// Damage that is found when the store is opened, and not before, is replaced from the log: the next attempt
// opens the store.
func TestDamageFoundByTheOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, discard := t.TempDir(), slog.New(slog.DiscardHandler)
		remote := newRemote(slotstest.NewLog(slotstest.NewStream(1 << 30)))
		files := QueueFolder(dir, 0)
		w, err := slots.Slot{Log: remote.Log, Dir: files, Options: slots.Options{Logger: discard}}.TakeOver(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		store, err := pebblestore.Open(files, pebblestore.Options{Log: w, Logger: discard})
		if err != nil {
			t.Fatal(err)
		}
		if err := store.OpenLane(queue.LaneID{Source: "shop/web", Destination: "shop/crm"}); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(store.Close(), w.Release(t.Context())); err != nil {
			t.Fatal(err)
		}
		db, err := pebble.Open(files, &pebble.Options{})
		if err != nil {
			t.Fatal(err)
		}
		lane := append([]byte("ml"), make([]byte, 8)...)
		if err := errors.Join(db.Set(lane, []byte{1}, pebble.Sync), db.Close(), os.Remove(filepath.Join(files, "clean-shutdown"))); err != nil {
			t.Fatal(err)
		}
		s := holding(remote).standby(t, dir)
		owned, d := s.own(t.Context())
		if reason := s.openFailure(); !strings.Contains(reason, "the name of a lane is malformed") {
			t.Errorf("first attempt to open the store: got %q, want the damage", reason)
		}
		if lanes := d.Store().Lanes(); len(lanes) != 1 {
			t.Errorf("lanes of the restored store: got %d, want 1", len(lanes))
		}
		if err := errors.Join(owned.release(t.Context()), d.Close()); err != nil {
			t.Log(err) // Positions in memory are dropped.
		}
	})
}

// A process with a copy, and with all objects, follows the slot without the directory, and does not claim it.
func TestNoClaimWithoutTheDirectory(t *testing.T) {
	processes := newProcesses()
	processes.refusal = errors.New("the directory was deleted")
	dir := t.TempDir()
	if err := os.MkdirAll(slotFolder(dir, 0), 0o700); err != nil {
		t.Fatal(err)
	}
	l, _ := processes.start(t, Options{Options: dispatcher.Options{Pod: "only", DataDir: dir}, Lacks: func(map[string][]byte) []string {
		return nil
	}})
	wantStandby(t, l, processes.refusal.Error())
	wantLog(t, l, "/slots", "only", false)
	time.Sleep(settleTime + slots.HeartbeatInterval) // It would have claimed the slot.
	remote, _ := processes.open(t.Context())
	if s, err := remote.Log.State(t.Context()); err != nil || s.Last != 0 {
		t.Errorf("records of the slot: got %d and error %v, want none", s.Last, err)
	}
}

// A process does not start with a store whose messages it would not deliver.
func TestStoreOutsideOfTheSlots(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, backup.QueueFolder), 0o700); err != nil {
		t.Fatal(err)
	}
	_, ended := holding(newRemote(slotstest.NewLog(slotstest.NewStream(1<<30)))).run(t, dir)
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "posthorn replication adopt --data "+dir) {
		t.Errorf("end of the process: got error %v, want one with the command", err)
	}
}

// When the control plane of an owner fails, the process releases the slot, and owns it again.
func TestControlPlaneThatFails(t *testing.T) {
	in := newProcesses()
	var starts atomic.Int64
	in.control = func(ctx context.Context, d *dispatcher.Dispatcher) error {
		if starts.Add(1) == 1 {
			return errors.New("the control plane failed")
		}
		return idle(ctx, d)
	}
	l, _ := in.start(t, Options{Options: dispatcher.Options{Pod: "only"}})
	if err := wait.Until(func() error {
		if s := wantLog(t, l, "/slots", "only", true); s.Epoch != 2 {
			return fmt.Errorf("epoch %d", s.Epoch)
		}
		if starts.Load() < 2 {
			return errors.New("the control plane has not started again")
		}
		return nil
	}); err != nil {
		t.Errorf("second claim of the process: %v", err)
	}
	if n := starts.Load(); n != 2 {
		t.Errorf("starts of the control plane: got %d, want 2", n)
	}
}
