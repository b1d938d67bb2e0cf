package replicated

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/replicated/host"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/jetstream"
	"github.com/posthorn/posthorn/test/wait"
)

// severalSlots is the number of slots, severalNamespaces that of the namespaces, and severalInFlight the most requests
// of a destination in flight.
const (
	severalSlots      = 4
	severalNamespaces = 6
	severalInFlight   = 8
)

// hosting is a process of a log with several slots, in the process of the test.
type hosting struct {
	listeners *host.Listeners
	log       *jetstream.Client
	stop      func()
}

// startHost starts a process whose log is in servers. Without configs, its watch of the live configs
// hangs.
func startHost(t *testing.T, s *servers, name string, configs map[string]liveconfig.Stored) *hosting {
	t.Helper()
	policy, err := egress.ParsePolicy([]string{"127.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	logger := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelError})).With("process", name)
	h := &hosting{}
	if h.log, err = jetstream.New(jetstream.Config{URL: s.url, Name: "several", Installation: installation, Replicas: replicas,
		MaxBytes: jetstream.MinBytes, AllowWeak: true}, logger); err != nil {
		t.Fatal(err)
	}
	o := host.Options{PeerListen: "127.0.0.1:0", Options: dispatcher.Options{
		DataDir: t.TempDir(), ServerOptions: dispatcher.ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0"}, Pod: name,
		Egress: policy, Logger: logger,
	}}
	if h.listeners, err = host.Listen(o); err != nil {
		t.Fatal(err)
	}
	o.Listeners = h.listeners
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() {
		ended <- host.Run(ctx, o, host.Slots{
			Number: severalSlots, Standbys: 1, Bus: h.log, Open: h.log.OpenSlot, OpenDirectory: h.log.OpenDirectory,
			Watch: func(ctx context.Context, to liveconfig.Sink) error {
				for namespace, stored := range configs {
					to.Set(namespace, stored)
				}
				if configs != nil {
					to.Synced()
				}
				<-ctx.Done()
				return nil
			},
		})
	}()
	h.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("process %s ended with %v", name, err)
		}
		h.log.Close()
	})
	t.Cleanup(h.stop)
	return h
}

// api returns a client of the admin API.
func (h *hosting) api() *adminapi.Client {
	return &adminapi.Client{URL: "http://" + h.listeners.AdminAddr().String()}
}

// slots returns the slots that a process owns, and the number of those that it could take.
func (h *hosting) slots(t *testing.T) (owned []int, ready int) {
	t.Helper()
	states, err := h.api().Slots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range states {
		if s.Owner {
			owned = append(owned, s.Slot)
		} else if s.Ready {
			ready++
		}
	}
	return owned, ready
}

// claims returns how often the slots of processes got an owner.
func claims(t *testing.T, hosts ...*hosting) (sum uint64) {
	t.Helper()
	for _, h := range hosts {
		states, err := h.api().Slots(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range states {
			sum += s.Epoch
		}
	}
	return sum
}

// waitOwned waits until processes own all slots, each at most a number of them.
func waitOwned(t *testing.T, most int, hosts ...*hosting) {
	t.Helper()
	if err := wait.Until(func() error {
		total := 0
		for i, h := range hosts {
			owned, _ := h.slots(t)
			if total += len(owned); len(owned) > most {
				return fmt.Errorf("process %d owns %d slots", i, len(owned))
			}
		}
		if total != severalSlots {
			return fmt.Errorf("%d slots have an owner", total)
		}
		return nil
	}); err != nil {
		t.Fatalf("want %d slots with owners, at most %d of each: %v", severalSlots, most, err)
	}
}

// severalConfigs are the live configs of namespaces whose calls a receiver gets.
func severalConfigs(t *testing.T, url string) map[string]liveconfig.Stored {
	t.Helper()
	configs := map[string]liveconfig.Stored{}
	for n := range severalNamespaces {
		namespace := fmt.Sprintf("team-%d", n)
		configs[namespace] = severalConfig(t, url, namespace, namespace)
	}
	return configs
}

// severalConfig is the live config of a namespace with a write key.
func severalConfig(t *testing.T, url, namespace, key string) liveconfig.Stored {
	t.Helper()
	sum := sha256.Sum256([]byte(key))
	return storedConfig(t, liveconfig.Config{
		Version: liveconfig.FormatVersion, Namespace: namespace,
		Sources: []liveconfig.Source{{Name: "web", Generation: 1, Revision: "s",
			WriteKeySHA256: liveconfig.KeyHashes{hex.EncodeToString(sum[:])}}},
		Destinations: []liveconfig.Destination{{
			Name: "crm", Generation: 1, Revision: "d", State: liveconfig.Active, Sources: []string{"web"},
			Endpoints: []liveconfig.Endpoint{{Name: "primary", URL: liveconfig.NewSecret(url)}},
			Signing:   liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret("shared")}},
			Success:   liveconfig.AnyEndpoint,
			Delivery: liveconfig.Delivery{TimeoutMS: 5000, RetryWindowMS: 3_600_000, MinBackoffMS: 100, MaxBackoffMS: 1000,
				MaxInFlight: severalInFlight},
			DeadLetters: liveconfig.DeadLetters{RetentionMS: 3_600_000, MaxBytes: 1 << 20},
		}},
	})
}

// storedConfig encodes a live config as the next one of its namespace.
func storedConfig(t *testing.T, c liveconfig.Config) liveconfig.Stored {
	t.Helper()
	config, revision, err := liveconfig.Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	head, err := liveconfig.EncodeHead(liveconfig.Head{Version: liveconfig.HeadVersion, Number: time.Now().UnixMilli(), Revision: revision})
	if err != nil {
		t.Fatal(err)
	}
	return liveconfig.Stored{Config: config, Head: head}
}

// load sends calls of all namespaces to all processes, each until it is acknowledged. A namespace changes the process
// when a call is not.
type load struct {
	mu           sync.Mutex
	addresses    []string
	acknowledged []string
	// count is the number of acknowledged calls of a namespace, last the time of the last one, and gap
	// the longest time without one.
	count map[string]int
	last  map[string]time.Time
	gap   time.Duration
}

// run sends until ctx is done.
func (l *load) run(ctx context.Context) {
	var group sync.WaitGroup
	for n := range severalNamespaces {
		namespace := fmt.Sprintf("team-%d", n)
		group.Go(func() {
			for i, turn := 0, n; ctx.Err() == nil; i++ {
				id := fmt.Sprintf("%s-%d", namespace, i)
				for ; !post(l.address(turn), namespace, id); turn++ {
					if ctx.Err() != nil {
						return // It was not acknowledged.
					}
					time.Sleep(20 * time.Millisecond)
				}
				l.mu.Lock()
				l.acknowledged = append(l.acknowledged, id)
				now := time.Now()
				if last, ok := l.last[namespace]; ok {
					l.gap = max(l.gap, now.Sub(last))
				}
				l.last[namespace] = now
				l.count[namespace]++
				l.mu.Unlock()
				time.Sleep(5 * time.Millisecond) // The processes share the cores with the test.
			}
		})
	}
	group.Wait()
}

// startLoad sends calls to processes until stop is called, and at most until the end of the test.
func startLoad(t *testing.T, addresses ...string) (l *load, stop func()) {
	t.Helper()
	l = &load{addresses: addresses, count: map[string]int{}, last: map[string]time.Time{}}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		l.run(ctx)
	}()
	stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(stop)
	return l, stop
}

// address returns the address of one of the processes.
func (l *load) address(turn int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.addresses[turn%len(l.addresses)]
}

// replace changes the address of a process.
func (l *load) replace(i int, address string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addresses[i] = address
}

// progress waits until each namespace has further acknowledged calls, and returns the longest time
// without one since the last call of progress.
func (l *load) progress(t *testing.T) time.Duration {
	t.Helper()
	l.mu.Lock()
	before := maps.Clone(l.count)
	l.mu.Unlock()
	if err := wait.Until(func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		for n := range severalNamespaces {
			namespace := fmt.Sprintf("team-%d", n)
			if got := l.count[namespace] - before[namespace]; got < 100 {
				return fmt.Errorf("%d acknowledged calls of namespace %s", got, namespace)
			}
		}
		return nil
	}); err != nil {
		t.Fatalf("want 100 more of each namespace: %v", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	gap := l.gap
	l.gap = 0
	return gap
}

func post(address, namespace, id string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/v1/track",
		bytes.NewBufferString(`{"event":"E","userId":"u","messageId":"`+id+`"}`))
	if err != nil {
		return false
	}
	q.SetBasicAuth(namespace, "")
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode == http.StatusOK
}

// response is an answer to a GET request.
type response struct {
	status int
	body   string
}

func get(t *testing.T, h *hosting, path string) response {
	t.Helper()
	resp, err := http.Get("http://" + h.listeners.Addr().String() + path) //nolint:noctx // bounded by the test
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return response{resp.StatusCode, string(body)}
}

// startHosts starts three processes, and waits until each owns a slot, and each slot has an owner and a standby.
func startHosts(t *testing.T, s *servers, configs map[string]liveconfig.Stored) (hosts []*hosting) {
	t.Helper()
	for i := range 3 {
		hosts = append(hosts, startHost(t, s, fmt.Sprintf("process-%d", i), configs))
	}
	if err := wait.Until(func() error {
		for i, h := range hosts {
			if owned, _ := h.slots(t); len(owned) == 0 {
				return fmt.Errorf("process %d owns no slot", i)
			}
		}
		return haveCopies(t, hosts)
	}); err != nil {
		t.Fatalf("want slots of each process, and a standby of each slot: %v", err)
	}
	waitOwned(t, 2, hosts...)
	return hosts
}

// haveCopies returns an error if a slot has no ready copy.
func haveCopies(t *testing.T, hosts []*hosting) error {
	t.Helper()
	copies := 0
	for _, h := range hosts {
		_, ready := h.slots(t)
		copies += ready
	}
	if copies < severalSlots {
		return fmt.Errorf("%d slots have a standby", copies)
	}
	return nil
}

// Each NATS server is killed and started again, under load. Calls and deliveries wait for the elections, and no slot
// gets another owner.
func TestElectionsMoveNoSlot(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	hosts := startHosts(t, s, severalConfigs(t, r.URL))
	var addresses, streams []string
	for _, h := range hosts {
		addresses = append(addresses, h.listeners.Addr().String())
	}
	for slot := range severalSlots {
		streams = append(streams, fmt.Sprintf("PH_several_W%d", slot))
	}
	l, stop := startLoad(t, addresses...)
	l.progress(t)
	before := claims(t, hosts...)
	for i := range replicas {
		s.stop(i)
		gap := l.progress(t)
		time.Sleep(3 * time.Second) // A process could hand over a slot when its deliveries have continued.
		s.start(i)
		s.waitKeepUp(streams...)
		t.Logf("server %d: longest time without an acknowledged call of a namespace %v", i, max(gap, l.progress(t)).Round(time.Millisecond))
		if got := claims(t, hosts...) - before; got > 0 {
			t.Errorf("loss of server %d: got %d slots with another owner, want none", i, got)
		}
		if err := haveCopies(t, hosts); err != nil {
			t.Errorf("loss of server %d: %v, want a standby of each", i, err)
		}
	}
	stop()
	checkDelivered(t, l.acknowledged, r)
}

// Three processes share four slots, then five, then two; one whose watch of the live configs hangs takes
// none. A process without a connection to the log loses its slots to the others, one that ends hands them
// over, and no acknowledged call is lost.
func TestSeveralSlots(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	configs := severalConfigs(t, r.URL)
	hosts := startHosts(t, s, configs)
	var addresses []string
	for _, h := range hosts {
		addresses = append(addresses, h.listeners.Addr().String())
	}
	l, stop := startLoad(t, addresses...)
	t.Logf("longest time without an acknowledged call of a namespace, before any fault: %v", l.progress(t).Round(time.Millisecond))

	before := claims(t, hosts...)
	hung := startHost(t, s, "hung", nil)
	more := []*hosting{startHost(t, s, "process-3", configs), startHost(t, s, "process-4", configs)}
	waitOwned(t, 1, append(hosts[:3:3], more...)...)
	if owned, copies := hung.slots(t); len(owned)+copies > 0 {
		t.Errorf("process without live configs: got %d slots and %d copies, want none", len(owned), copies)
	}
	if resp := get(t, hung, "/readyz"); resp.status != http.StatusServiceUnavailable || !strings.Contains(resp.body, "waiting for the first full config") {
		t.Errorf("/readyz of the process without live configs: got %+v, want 503 with the reason", resp)
	}
	t.Logf("with five processes: %v", l.progress(t).Round(time.Millisecond))
	// The two do not join at once, and the promise is the minimum plus one.
	if got := claims(t, append(hosts[:3:3], more...)...) - before; got < 1 || got > 2 {
		t.Errorf("with two further processes: got %d slots with another owner, want the one of two of a process, and one more at most", got)
	}
	for _, h := range append(more, hung, hosts[2]) {
		h.stop()
	}
	waitOwned(t, 2, hosts[:2]...)
	t.Logf("with two processes: %v", l.progress(t).Round(time.Millisecond))
	hosts[2] = startHost(t, s, "process-5", configs)
	l.replace(2, hosts[2].listeners.Addr().String())
	waitOwned(t, 2, hosts...)
	t.Logf("with three processes again: %v", l.progress(t).Round(time.Millisecond))

	hosts[0].log.Close()
	waitOwned(t, severalSlots/2, hosts[1:]...)
	t.Logf("after the loss of a process: %v", l.progress(t).Round(time.Millisecond))

	hosts[1].stop()
	waitOwned(t, severalSlots, hosts[2])
	t.Logf("after the orderly end of a process: %v", l.progress(t).Round(time.Millisecond))

	stop()
	repeated := checkDelivered(t, l.acknowledged, r)
	t.Logf("%d acknowledged calls, %d repeated deliveries", len(l.acknowledged), repeated)
}
