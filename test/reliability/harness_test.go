// Package reliability tests the guarantees of docs/reliability.md on the whole
// data plane: calls over HTTP, the real store, and deliveries over sockets.
package reliability

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/wait"
)

// waitLimit bounds the wait for an event that must happen. No assertion depends on it.
const waitLimit = wait.Limit

// namespace is the namespace of everything here.
const namespace = "shop"

// number returns a count from the environment, for example for a long run. With -short it is a
// quarter of the normal one.
func number(name string, normal int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil && n > 0 {
		return n
	}
	if testing.Short() {
		return max(1, normal/4)
	}
	return normal
}

func source(name string) liveconfig.Source {
	sum := sha256.Sum256([]byte("key-" + name))
	return liveconfig.Source{Name: name, Generation: 1, Revision: "1",
		WriteKeySHA256: liveconfig.KeyHashes{hex.EncodeToString(sum[:])}}
}

// destination returns a destination with a long retry window for the calls of a Source.
func destination(name, source, url string) liveconfig.Destination {
	return liveconfig.Destination{
		Name: name, Generation: 1, Revision: "1", State: liveconfig.Active, Sources: []string{source},
		Endpoints:   []liveconfig.Endpoint{{Name: "primary", URL: liveconfig.NewSecret(url)}},
		Signing:     liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret("shared")}},
		Success:     liveconfig.AnyEndpoint,
		Delivery:    liveconfig.Delivery{TimeoutMS: 5000, RetryWindowMS: 3_600_000, MinBackoffMS: 10, MaxBackoffMS: 200, MaxInFlight: 16},
		DeadLetters: liveconfig.DeadLetters{RetentionMS: 3_600_000, MaxBytes: 64 << 20},
	}
}

func config(sources []liveconfig.Source, destinations ...liveconfig.Destination) liveconfig.Config {
	return liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: namespace, Sources: sources, Destinations: destinations}
}

// options returns the options of a dispatcher on the loopback interface.
func options(t testing.TB, dir string, q pebblestore.Options) dispatcher.Options {
	t.Helper()
	policy, err := egress.ParsePolicy([]string{"127.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	if q.DuplicateWindow == 0 {
		q.DuplicateWindow = 10 * time.Minute
	}
	return dispatcher.Options{
		DataDir: dir, ServerOptions: dispatcher.ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0", DrainTimeout: 2 * time.Second},
		Pod: "p0", Egress: policy,
		Queue: q, Logger: slog.New(slog.DiscardHandler),
	}
}

// running is a running dispatcher.
type running struct {
	*dispatcher.Dispatcher
	cancel context.CancelFunc
	ended  chan error
	once   sync.Once
	err    error
}

func run(d *dispatcher.Dispatcher) *running {
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{Dispatcher: d, cancel: cancel, ended: make(chan error, 1)}
	go func() { r.ended <- d.Run(ctx) }()
	return r
}

// start runs a dispatcher with a config and stops it at the end of the test.
func start(t testing.TB, o dispatcher.Options, c liveconfig.Config) *running {
	t.Helper()
	d, err := dispatcher.New(o)
	if err != nil {
		t.Fatal(err)
	}
	r := run(d)
	t.Cleanup(func() {
		balanced(t, r)
		_ = r.stop()
	})
	r.set(t, c)
	return r
}

// set activates a config.
func (r *running) set(t testing.TB, c liveconfig.Config) {
	t.Helper()
	data, _, err := liveconfig.Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	r.Set(namespace, liveconfig.Stored{Config: data})
	r.Synced()
	for _, tr := range r.Report().Namespaces {
		if tr.Refused != nil {
			t.Fatalf("config: got error %s, want none", tr.Refused.Error)
		}
	}
}

func (r *running) stop() error {
	r.once.Do(func() {
		r.cancel()
		r.err = <-r.ended
	})
	return r.err
}

// target is a dispatcher in this or in another process.
type target interface {
	Addr() net.Addr
	Report() adminapi.Report
}

// ledger returns a destination's part of the report.
func ledger(t testing.TB, r target, name string) adminapi.DestinationReport {
	t.Helper()
	for _, tr := range r.Report().Namespaces {
		for _, d := range tr.Destinations {
			if d.Name == name {
				return d
			}
		}
	}
	t.Fatalf("the report has no destination %s", name)
	return adminapi.DestinationReport{}
}

// balanced checks the ledgers of all Sources and destinations, at the end of every test.
func balanced(t testing.TB, r target) {
	t.Helper()
	for _, tr := range r.Report().Namespaces {
		for _, s := range tr.Sources {
			if err := queue.Ledger(s.Messages).Balance(); err != nil {
				t.Errorf("ledger of Source %s: %v", s.Name, err)
			}
		}
		for _, d := range tr.Destinations {
			if err := balance(d); err != nil {
				t.Error(err)
			}
		}
	}
}

// balance returns an error if a destination's ledger does not balance.
func balance(d adminapi.DestinationReport) error {
	if err := queue.Ledger(d.Ledger).Balance(); err != nil {
		return fmt.Errorf("%s: %w", d.Name, err)
	}
	return nil
}

// call returns the JSON of a call; extra fields begin with a comma.
func call(id, extra string) string {
	return fmt.Sprintf(`{"type":"track","event":"Order","userId":"u","messageId":%q%s}`, id, extra)
}

// answer is the answer to a batch.
type answer struct {
	status     int
	retryAfter string
	body       string
}

// client sends calls to a dispatcher, one request at a time on a persistent connection.
type client struct {
	http http.Client
}

func newClient() *client {
	return &client{http.Client{Timeout: waitLimit, Transport: &http.Transport{MaxIdleConnsPerHost: 1}}}
}

func (c *client) close() { c.http.CloseIdleConnections() }

// batch posts calls in one request.
func (c *client) batch(ctx context.Context, addr net.Addr, source string, calls ...string) (answer, error) {
	body := `{"batch":[` + strings.Join(calls, ",") + `]}`
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr.String()+"/v1/batch", strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	req.SetBasicAuth("key-"+source, "")
	resp, err := c.http.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header.Get("Retry-After"), string(b)}, err
}

// messageID reads the messageId of a delivered body.
func messageID(r *http.Request) (string, error) {
	var m struct {
		MessageID string `json:"messageId"`
	}
	err := json.NewDecoder(r.Body).Decode(&m)
	return m.MessageID, err
}

// receiver is an HTTP server on the loopback interface.
type receiver struct {
	url    string
	server *http.Server
}

func receive(t testing.TB, handler http.HandlerFunc) *receiver {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &receiver{url: "http://" + l.Addr().String(),
		server: &http.Server{Handler: handler, ReadHeaderTimeout: waitLimit, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}}
	go func() { _ = r.server.Serve(l) }()
	t.Cleanup(func() { _ = r.server.Close() })
	return r
}

// inbox counts deliveries by messageId.
type inbox struct {
	mu   sync.Mutex
	seen map[string]int
	all  int
}

func (b *inbox) add(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.seen == nil {
		b.seen = map[string]int{}
	}
	b.seen[id]++
	b.all++
}

func (b *inbox) distinct() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.seen)
}

// ServeHTTP accepts every message.
func (b *inbox) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id, err := messageID(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	b.add(id)
}
