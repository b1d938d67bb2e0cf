// Package replicated tests processes of posthorn whose log is in three processes of the NATS
// server: the loss of processes, of their disks, and of servers, under load.
package replicated

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

var binary, server string

func TestMain(m *testing.M) { process.Main(withServer{m}, &binary) }

// withServer builds the NATS server before the tests.
type withServer struct{ m *testing.M }

func (w withServer) Run() int {
	var err error
	if server, err = process.BuildNATS(filepath.Dir(binary)); err == nil {
		err = flag.Set("test.parallel", "4") // The tests wait most of their time.
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return w.m.Run()
}

const (
	key          = "replicated-write-key"
	sharedSecret = "0123456789abcdef"
	installation = "test/posthorn"
	replicas     = 3
)

// servers are the NATS servers.
type servers struct {
	t     *testing.T
	dir   string
	url   string // for clients
	nodes []*process.Posthorn
	logs  [replicas]process.Log
}

// startServers starts a cluster.
func startServers(t *testing.T) *servers {
	t.Helper()
	return startServersOf(t, server)
}

// startServersOf starts a cluster of a binary. The clock of each server can be set if BuildNATSWithClock has built it.
func startServersOf(t *testing.T, binary string) *servers {
	t.Helper()
	s := &servers{t: t, dir: t.TempDir()}
	var err error
	if s.nodes, s.url, err = process.NATSServers(binary, s.dir, replicas); err != nil {
		t.Fatal(err)
	}
	for i, n := range s.nodes {
		n.Log, n.Env = &s.logs[i], []string{process.ClockFile + "=" + s.clockFile(i)}
	}
	for i := range s.nodes {
		s.start(i)
	}
	t.Cleanup(func() {
		for i := range s.nodes {
			s.signal(i, syscall.SIGCONT)
			s.stop(i)
			if t.Failed() {
				t.Logf("log of server %d:\n%s", i, s.logs[i].Tail())
			}
		}
	})
	return s
}

// monitoring are the URLs of the monitoring ports.
func (s *servers) monitoring() string {
	var urls []string
	for _, n := range s.nodes {
		urls = append(urls, "http://"+n.Admin)
	}
	return strings.Join(urls, ",")
}

func (s *servers) start(i int) {
	s.t.Helper()
	if err := s.nodes[i].Start(); err != nil {
		s.t.Fatal(err)
	}
}

func (s *servers) stop(i int) {
	if err := s.nodes[i].Stop(os.Kill); err != nil {
		s.t.Error(err)
	}
}

// files is the folder of a server's files.
func (s *servers) files(i int) string { return filepath.Join(s.dir, fmt.Sprint("nats-", i)) }

// clockFile is the file with the clock of a server.
func (s *servers) clockFile(i int) string { return s.files(i) + ".clock" }

// setClock sets the clock of a server of BuildNATSWithClock.
func (s *servers) setClock(i int, ahead time.Duration) {
	s.t.Helper()
	setClock(s.t, s.clockFile(i), ahead)
}

// setClock sets the clock of the process with a file.
func setClock(t *testing.T, file string, ahead time.Duration) {
	t.Helper()
	if err := process.Replace(file, fmt.Sprint(int64(ahead.Seconds()))); err != nil {
		t.Fatal(err)
	}
}

func (s *servers) signal(i int, signal syscall.Signal) { _ = syscall.Kill(s.nodes[i].Pid(), signal) }

// pod is a process of posthorn.
type pod struct {
	*process.Posthorn
	t    *testing.T
	name string
	// manifests is the folder of the manifests.
	manifests string
	data      string
	log       process.Log
	// volume is true for a process without a replicated log, and slots the number of several slots.
	volume bool
	slots  int
	// calls is the address for calls; that of Posthorn is empty, because a process is not ready before
	// it has the records of the log.
	calls string
}

// number is the number of processes that were started.
var number atomic.Int64

// startPods starts processes with the same log and the same manifests.
func startPods(t *testing.T, n int, manifests map[string]string, flags ...string) (pods []*pod) {
	t.Helper()
	return startPodsOf(t, binary, n, manifests, flags...)
}

// startPodsOf starts processes of a binary. The clock of each can be set if BuildWithClock has built it.
func startPodsOf(t *testing.T, binary string, n int, manifests map[string]string, flags ...string) (pods []*pod) {
	t.Helper()
	for range n {
		p := &pod{t: t, name: fmt.Sprint("pod ", number.Add(1)-1), data: filepath.Join(t.TempDir(), "data")}
		dir := t.TempDir()
		for name, text := range manifests {
			if err := process.Replace(filepath.Join(dir, name), text); err != nil {
				t.Fatal(err)
			}
		}
		p.manifests = dir
		p.Posthorn = process.Run(binary, dir, p.data, append([]string{"--peer-listen", "127.0.0.1:0", "--replication-installation", installation},
			flags...)...)
		p.launch()
		pods = append(pods, p)
	}
	return pods
}

// launch starts the process, and ends it with the test.
func (p *pod) launch() {
	p.t.Helper()
	p.calls, p.Addr, p.Log = p.Addr, "", &p.log
	p.Env = []string{process.ClockFile + "=" + p.clockFile()}
	p.start()
	p.t.Cleanup(func() {
		_ = syscall.Kill(p.Pid(), syscall.SIGCONT)
		p.end(syscall.SIGTERM)
		if p.t.Failed() {
			p.t.Logf("log of %s:\n%s", p.name, p.log.Tail())
		}
	})
}

func (p *pod) start() {
	p.t.Helper()
	if err := p.Start(); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pod) end(signal syscall.Signal) {
	if err := p.Stop(signal); err != nil {
		p.t.Error(err)
	}
}

// clockFile is the file with the clock of the process.
func (p *pod) clockFile() string { return p.data + ".clock" }

// setClock sets the clock of a process of BuildWithClock.
func (p *pod) setClock(ahead time.Duration) {
	p.t.Helper()
	setClock(p.t, p.clockFile(), ahead)
}

// lose ends the process with kill -9, and removes its disk.
func (p *pod) lose() {
	p.t.Helper()
	p.end(syscall.SIGKILL)
	if err := os.RemoveAll(p.data); err != nil {
		p.t.Fatal(err)
	}
}

// epoch returns the number of the claim of an owner.
func (p *pod) epoch() (epoch uint64) {
	p.t.Helper()
	if err := wait.Until(func() error {
		state, err := p.state(p.t.Context())
		if err == nil && !state.Owner {
			err = fmt.Errorf("%s is not the owner", p.name)
		}
		if err == nil {
			epoch = state.Epoch
		}
		return err
	}); err != nil {
		p.t.Fatal(err)
	}
	return epoch
}

// state returns the part of the process in the log.
func (p *pod) state(ctx context.Context) (s adminapi.ReplicationState, err error) {
	states, err := (&adminapi.Client{URL: "http://" + p.Admin, HTTP: &http.Client{Timeout: 2 * time.Second}}).Slots(ctx)
	if err == nil && len(states) != 1 {
		err = fmt.Errorf("%s has %d slots, want one", p.name, len(states))
	}
	if err != nil {
		return s, err
	}
	return states[0], nil
}

// store returns the admin API of the store: that of the owner of the slot, or that of a process without a log.
func (p *pod) store() *adminapi.Client {
	if p.volume {
		return p.AdminAPI()
	}
	return p.AdminAPI().Slot(0)
}

// namespaces are the reports of the namespaces in all slots.
func (p *pod) namespaces(ctx context.Context) (all []adminapi.NamespaceReport, err error) {
	for slot := range max(1, p.slots) {
		r, err := p.AdminAPI().Slot(slot).Report(ctx, "")
		if err != nil {
			return nil, err
		}
		all = append(all, r.Namespaces...)
	}
	return all, nil
}

// isOwner returns why the process does not accept calls itself.
func (p *pod) isOwner() error {
	r, err := (&adminapi.Client{URL: "http://" + p.Admin, HTTP: &http.Client{Timeout: time.Second}}).Report(context.Background(), "")
	switch {
	case err != nil:
		return err
	case r.Replication == nil && !p.volume || r.Replication != nil && len(r.Replication.Slots) == 0 || !r.Ready:
		return fmt.Errorf("report: ready %v, log %+v", r.Ready, r.Replication)
	}
	return nil
}

// owner waits until one of the processes accepts calls itself.
func owner(t *testing.T, pods []*pod) (found *pod) {
	t.Helper()
	err := wait.Until(func() error {
		var last error
		for _, p := range pods {
			if last = p.isOwner(); last == nil {
				found = p
				return nil
			}
		}
		return last
	})
	if err != nil {
		t.Fatalf("owner: got none, want one: %v", err)
	}
	return found
}

// report reads the report of the owner, and checks its ledgers.
func report(t *testing.T, pods []*pod) (total queue.Ledger) {
	t.Helper()
	var r *adminapi.Report
	err := wait.Until(func() (err error) {
		r, err = owner(t, pods).store().Report(context.Background(), "")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range r.Namespaces {
		for _, s := range n.Sources {
			if err := queue.Ledger(s.Messages).Balance(); err != nil {
				t.Errorf("ledger of Source %s: %v", s.Name, err)
			}
			total = total.Plus(queue.Ledger(s.Messages))
		}
	}
	return total
}

// receiver counts the requests by messageId.
type receiver struct {
	*httptest.Server
	// answer is its status code, 200 when 0. Requests with another one do not count.
	answer atomic.Int64
	mu     sync.Mutex
	got    map[string]int
	// at are the times of the requests, in their order.
	at []time.Time
	// journals get all requests, if they are set.
	journals atomic.Pointer[journals]
}

func newReceiver(t *testing.T) *receiver {
	r := &receiver{got: map[string]int{}}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		j := r.journals.Load()
		begin := j.now()
		body, _ := io.ReadAll(q.Body)
		status := int(r.answer.Load())
		j.receipt(begin, receiptOf(q, body, cmp.Or(status, http.StatusOK), sharedSecret))
		if status != 0 {
			w.WriteHeader(status)
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.got[q.Header.Get("Idempotency-Key")]++
		r.at = append(r.at, time.Now())
	}))
	t.Cleanup(r.Close)
	return r
}

// repeated returns the number of repeated requests.
func (r *receiver) repeated() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.at) - len(r.got)
}

// receivedWithin returns the number of requests in the time before the last one before a moment.
func (r *receiver) receivedWithin(d time.Duration, before time.Time) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	end := sort.Search(len(r.at), func(i int) bool { return !r.at[i].Before(before) })
	if end == 0 {
		return 0
	}
	since := r.at[end-1].Add(-d)
	return end - sort.Search(end, func(i int) bool { return !r.at[i].Before(since) })
}

// sender sends batches to the processes, each until it is acknowledged.
type sender struct {
	pods []*pod
	mu   sync.Mutex
	// acknowledged are the messageIds that were answered 200; gap is the longest time without one.
	acknowledged []string
	last         time.Time
	gap          time.Duration
	// journals get all calls, if they are set.
	journals atomic.Pointer[journals]
}

const (
	batch   = 10
	clients = 4
)

// setPods changes the processes that get the calls.
func (s *sender) setPods(pods []*pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pods = pods
}

// start sends calls in the background, until stop is called.
func (s *sender) start(t *testing.T, prefix string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		s.run(ctx, prefix)
	}()
	return sync.OnceFunc(func() {
		cancel()
		<-sent
	})
}

// run sends until ctx is done. Each client repeats its batch until it is acknowledged, for another minute after the
// end of ctx: a batch without an answer may have been accepted.
func (s *sender) run(ctx context.Context, prefix string) {
	s.last, s.gap = time.Now(), 0
	late, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(time.Minute, cancel) })()
	var group sync.WaitGroup
	for client := range clients {
		group.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				var ids []string
				for i := range batch {
					ids = append(ids, fmt.Sprintf("%s-%d-%d-%d", prefix, client, n, i))
				}
				body := batchOf(ids)
				for turn := client; !s.send(turn, body); turn++ {
					if late.Err() != nil {
						return // It was not acknowledged.
					}
					time.Sleep(20 * time.Millisecond)
				}
				s.mu.Lock()
				s.acknowledged = append(s.acknowledged, ids...)
				now := time.Now()
				s.gap, s.last = max(s.gap, now.Sub(s.last)), now
				s.mu.Unlock()
				time.Sleep(20 * time.Millisecond) // The processes share the cores with the test.
			}
		})
	}
	group.Wait()
}

// batchOf returns a batch of calls with messageIds.
func batchOf(ids []string) string {
	var calls []string
	for _, id := range ids {
		calls = append(calls, fmt.Sprintf(`{"type":"track","event":"E","userId":"u","messageId":%q}`, id))
	}
	return `{"batch":[` + strings.Join(calls, ",") + `]}`
}

// mustSend sends a batch until it is acknowledged.
func (s *sender) mustSend(t *testing.T, body string) {
	t.Helper()
	if err := wait.Until(func() error {
		if !s.send(0, body) {
			return errors.New("the batch was not acknowledged")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// send reports whether a process acknowledged a batch.
func (s *sender) send(turn int, body string) bool {
	status, text := s.post(turn, body)
	return acknowledges(status, text)
}

// acknowledges reports whether an answer acknowledges a batch.
func acknowledges(status int, text string) bool {
	var answer struct {
		Success bool `json:"success"`
	}
	return status == http.StatusOK && json.Unmarshal([]byte(text), &answer) == nil && answer.Success
}

// post sends a batch, and returns the answer within 2 s; status 0 without one.
func (s *sender) post(turn int, body string) (status int, text string) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	s.mu.Lock()
	to := s.pods[turn%len(s.pods)]
	s.mu.Unlock()
	if j := s.journals.Load(); j != nil {
		begin := j.now()
		defer func() { j.call(begin, to, body, status, text) }()
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+to.calls+"/v1/batch", strings.NewReader(body))
	if err != nil {
		return 0, ""
	}
	q.SetBasicAuth(key, "")
	q.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		return 0, ""
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, ""
	}
	return resp.StatusCode, string(answer)
}

func manifests(url string) map[string]string {
	return map[string]string{"all.yaml": `
apiVersion: v1
kind: Secret
metadata: {name: keys}
stringData: {writeKey: ` + key + `, sharedSecret: ` + sharedSecret + `}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: web}
spec:
  writeKeys: [{name: main, secretKeyRef: {name: keys, key: writeKey}}]
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm}
spec:
  sourceRefs: [{name: web}]
  endpoints:
  - name: primary
    url: ` + url + `
  signing:
    schemes:
    - name: sha1
      type: HMACSHA1
      secretKeyRef: {name: keys, key: sharedSecret}
---
apiVersion: posthorn.dev/v1beta1
kind: Audience
metadata: {name: buyers}
spec: {sourceRef: {name: web}, key: buyers}
`}
}
