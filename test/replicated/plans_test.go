package replicated

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
	"github.com/posthorn/posthorn/test/witness"
)

// planned is the number of random plans without POSTHORN_PLANS, and steps the number of steps of a plan.
const (
	planned = 1
	steps   = 4
)

// slotsEach is the number of seeds of which one has several slots.
const slotsEach = 4

// planBounds are what docs/reliability.md and docs/replication.md state, the times of takeovers four times as long.
var planBounds = witness.Plan{
	Unrecorded: positionsWithin, Wait: 8 * takeover, Status: 35 * time.Second, Ready: 4 * takeover, Grace: planGrace,
}

// planGrace is the grace period of the processes, deliveryTimeout the timeout of a request, and planDisk the size of the
// file system of a data directory in MiB.
const (
	planDisk        = 512
	planGrace       = 8 * time.Second
	deliveryTimeout = 5 * time.Second
)

// Processes, servers and folders fail in random order under load, while destinations change, receivers fail and
// users are deleted: test/witness judges the journals. POSTHORN_PLANS is the number of plans, POSTHORN_PLAN_SEED the seed
// of the first one, POSTHORN_BINARY another binary of posthorn, and POSTHORN_OLDER the one of the first process until its
// next restart in a plan. Without POSTHORN_PLANS the plan is the same each time.
func TestRandomPlans(t *testing.T) {
	t.Parallel()
	plans, program, seed := planned, binary, uint64(3)
	if n, err := strconv.Atoi(os.Getenv("POSTHORN_PLANS")); err == nil {
		plans, seed = n, rand.Uint64()
	}
	if n, err := strconv.ParseUint(os.Getenv("POSTHORN_PLAN_SEED"), 10, 64); err == nil {
		seed = n
	}
	if path := os.Getenv("POSTHORN_BINARY"); path != "" {
		program = path
	}
	for n := range plans {
		t.Run(fmt.Sprint("seed ", seed+uint64(n)), func(t *testing.T) {
			t.Parallel()
			t.Logf("to reproduce: POSTHORN_PLAN_SEED=%d go test ./test/replicated -run TestRandomPlans -v", seed+uint64(n))
			newWorld(t, program, seed+uint64(n)).run()
		})
	}
}

// world has processes with a log, whose journals the witness reads.
type world struct {
	*cluster
	*journals
	t    *testing.T
	rand *rand.Rand
	// older is the binary of the first process at its start, and program that of all others.
	program, older string
	// receiver gets all requests; it answers those whose path has a prefix in failing with its status.
	receiver, private *httptest.Server
	failing           sync.Map
	// destinations are those of the manifests that were written last, except those in away, which also has namespaces;
	// deletions are the users.
	destinations []*target
	away         map[string]bool
	deletions    []string
	// audiences are those of the namespaces, and redelivery is the manifest of a redelivery in a namespace.
	audiences  map[string]*audience
	redelivery map[string]string
	// holes are between a process and the servers. With small, the data directories are in small file systems, and with
	// filled one of them has been full.
	holes         map[*pod]*blackHole
	small, filled bool
	// configs has the live configs of processes with several slots; nil for those of posthorn run.
	configs *configs
	// same ends the fault of folders that differ; nil without one.
	same         func()
	acknowledged atomic.Int64
}

// target is a destination with the revision of its newest manifest.
type target struct {
	namespace, name string
	// types are the only types of calls that its filter selects, all if empty.
	types []string
	// urls is the number of its URLs if it has several.
	urls     int
	revision int
}

func (d *target) id() string { return d.namespace + "/" + d.name }

func (d *target) secret() string { return fmt.Sprintf("%s-secret-%d", d.name, d.revision%3) }

var namespaces = []string{"shop", "news"}

func newWorld(t *testing.T, program string, seed uint64) *world {
	t.Helper()
	w := &world{
		t: t, program: program, older: cmp.Or(os.Getenv("POSTHORN_OLDER"), program), rand: rand.New(rand.NewPCG(seed, 0)),
		journals: newJournals(t),
		away:     map[string]bool{}, holes: map[*pod]*blackHole{}, audiences: map[string]*audience{}, redelivery: map[string]string{},
	}
	w.receiver = httptest.NewServer(http.HandlerFunc(w.receive))
	t.Cleanup(w.receiver.Close)
	listener, err := net.Listen("tcp", "127.0.0.2:0")
	check.NoError(t, "listen at the denied address", err)
	w.private = httptest.NewUnstartedServer(http.HandlerFunc(w.receive))
	_ = w.private.Listener.Close()
	w.private.Listener = listener
	w.private.Start()
	t.Cleanup(w.private.Close)
	w.Sender.Write(witness.Line{Plan: &planBounds})
	w.destinations = []*target{
		{namespace: "shop", name: "crm", urls: 2},
		{namespace: "shop", name: "people", types: []string{"identify"}},
		{namespace: "news", name: "log"},
	}
	w.cluster = &cluster{servers: startServers(t)}
	manifests := map[string]string{}
	for _, namespace := range namespaces {
		w.audiences[namespace] = &audience{}
		manifests[namespace+".yaml"] = w.manifest(namespace)
	}
	for _, d := range w.destinations {
		w.apply(d)
	}
	w.Objects.Write(witness.Line{Object: &witness.Object{Name: "shop/private", Action: witness.Applied, Destination: &witness.Destination{Denied: []string{w.private.URL + "/"}}}})
	processes := 2 + w.rand.IntN(2)
	if seed%slotsEach == 0 && program == binary && env.Missing() == nil {
		w.compile(manifests)
		processes = 3
	}
	for range processes {
		hole, url := startBlackHole(t, w.url)
		data := filepath.Join(w.disk(), "data")
		if w.configs != nil {
			w.pods = append(w.pods, startDispatcher(t, url, w.configs.kubeconfig, data, w.flags(url)...))
		} else {
			w.pods = append(w.pods, startPodsOf(t, w.older, 1, manifests, append(w.flags(url), "--data", data)...)...)
		}
		p := w.pods[len(w.pods)-1]
		p.data, w.holes[p], w.older = data, hole, program // Only the first process is an older one.
	}
	return w
}

// disk returns a small file system for a data directory, or a folder if none can be mounted.
func (w *world) disk() string {
	w.t.Helper()
	disk, err := process.SmallDisk(w.t, planDisk)
	if err != nil {
		w.t.Logf("no disk becomes full: %v", err)
		return w.t.TempDir()
	}
	w.small = true
	return disk
}

// flags are the flags of a process that reaches the servers with a URL.
func (w *world) flags(url string) []string {
	return []string{"--replication-url", url, "--replication-name", "test", "--replication-max-bytes", "256Mi", "--replication-monitoring",
		w.monitoring(), "--orphan-grace", planGrace.String(), "--egress-allow", "!127.0.0.2/32"}
}

// manifest returns the newest manifests of a namespace.
func (w *world) manifest(namespace string) string {
	in := "namespace: " + namespace
	text := fmt.Sprintf(`
apiVersion: v1
kind: Secret
metadata: {name: keys, %s}
stringData: {writeKey: %s-key}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: web, %s}
spec: {writeKeys: [{name: main, secretKeyRef: {name: keys, key: writeKey}}]}
`, in, namespace, in)
	for _, d := range w.destinations {
		if d.namespace != namespace || w.away[d.id()] {
			continue
		}
		filter := ""
		if len(d.types) > 0 {
			filter = "  filter: {types: [" + strings.Join(d.types, ", ") + "]}\n"
		}
		text += fmt.Sprintf(`---
apiVersion: v1
kind: Secret
metadata: {name: %[1]s, %[2]s}
stringData: {sharedSecret: %[3]s}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: %[1]s, %[2]s}
spec:
  sourceRefs: [{name: web}]
  endpoints: [%[4]s]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: %[1]s, key: sharedSecret}}]}
%[5]s`, d.name, in, d.secret(), w.endpointsOf(d), filter)
	}
	if namespace == "shop" {
		text += fmt.Sprintf(`---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: private, %s}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: primary, url: "%s/"}]
`, in, w.private.URL)
	}
	for _, user := range w.deletions {
		if of, name, _ := strings.Cut(user, "-"); of == namespace {
			text += fmt.Sprintf("---\napiVersion: posthorn.dev/v1beta1\nkind: DeletionRequest\nmetadata: {name: d%s, %s}\nspec: {userID: %s}\n", name, in, user)
		}
	}
	return text + w.audiences[namespace].manifest(in) + w.redelivery[namespace]
}

// urlsOf are the URLs of the newest revision of a destination.
func (w *world) urlsOf(d *target) (urls []string) {
	for position := range max(d.urls, 1) {
		urls = append(urls, fmt.Sprintf("%s/%s/%s/%d/%d", w.receiver.URL, d.namespace, d.name, position, d.revision))
	}
	return urls
}

// endpointsOf are the endpoints of the newest revision of a destination.
func (w *world) endpointsOf(d *target) string {
	var all []string
	for position, url := range w.urlsOf(d) {
		all = append(all, fmt.Sprintf(`{name: e%d, url: "%s", headers: [{name: X-Revision, value: "%d"}]}`, position, url, d.revision))
	}
	return strings.Join(all, ", ")
}

// apply notes that the newest revision of a destination is about to be applied.
func (w *world) apply(d *target) {
	w.Objects.Write(witness.Line{Object: &witness.Object{Name: d.id(), Action: witness.Applied, Revision: d.revision,
		Destination: &witness.Destination{
			URLs: w.urlsOf(d), Headers: map[string]string{"X-Revision": strconv.Itoa(d.revision)}, Keys: []string{d.secret()},
			InFlight: inFlight, Timeout: deliveryTimeout, Window: 4 * time.Hour,
		}}})
}

// receive is the handler of the receiver.
func (w *world) receive(to http.ResponseWriter, q *http.Request) {
	begin := w.Clock.Now()
	body, err := io.ReadAll(q.Body)
	if err != nil {
		return // The product ended the request.
	}
	var secrets []string
	for _, d := range w.destinations {
		for n := range 3 {
			secrets = append(secrets, fmt.Sprintf("%s-secret-%d", d.name, n))
		}
	}
	r := receiptOf(q, body, w.answer(q.URL.Path), secrets...)
	w.Received.Write(witness.Line{Begin: begin, Receipt: r})
	to.WriteHeader(r.Status)
}

// answer returns the status for requests with a path, by the longest prefix in failing; 200 without one.
func (w *world) answer(path string) int {
	status, longest := http.StatusOK, ""
	w.failing.Range(func(prefix, failing any) bool {
		if p := prefix.(string); strings.HasPrefix(path, p+"/") && len(p) > len(longest) {
			status, longest = failing.(int), p
		}
		return true
	})
	return status
}

// load sends calls of a namespace, each until it is acknowledged or rejected, until ctx is done and then for another minute.
func (w *world) load(ctx context.Context, namespace string, random *rand.Rand) {
	used := map[string]bool{}
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 24*time.Hour)
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(time.Minute, cancel) })()
	for n := 0; ctx.Err() == nil; n++ {
		var messages []witness.Message
		var calls []string
		for len(messages) < 5 {
			// Ids of one order differ in their separators.
			id := namespace + []string{" ", "+", "-", "/", "%20", "é", "."}[random.IntN(7)] + strconv.Itoa(n/2)
			if used[id] {
				continue
			}
			used[id] = true
			m := witness.Message{ID: id, Content: json.RawMessage(fmt.Sprintf(`{"type":"track","event":"E%d","userId":"u"}`, random.IntN(9)))}
			if random.IntN(3) == 0 {
				m.Content = json.RawMessage(fmt.Sprintf(`{"type":"identify","userId":"u%d","traits":{"n":%d}}`, random.IntN(9), n))
			}
			for _, d := range w.destinations {
				if d.namespace == namespace && (len(d.types) == 0 || strings.Contains(string(m.Content), `"type":"`+d.types[0])) {
					m.Due = append(m.Due, d.id())
				}
			}
			messages = append(messages, m)
			calls = append(calls, strings.TrimSuffix(string(m.Content), "}")+fmt.Sprintf(`,"messageId":%q}`, id))
			if len(used)%7 == 0 {
				n++
			}
		}
		body := `{"batch":[` + strings.Join(calls, ",") + `]}`
		for late.Err() == nil {
			status := w.post(namespace, body, messages, random)
			if status == http.StatusOK {
				w.acknowledged.Add(1)
				break
			}
			if status >= 400 && status < 500 && status != http.StatusTooManyRequests {
				break // A client drops them.
			}
			time.Sleep(50 * time.Millisecond)
		}
		time.Sleep(50 * time.Millisecond) // The processes share the cores with the test.
	}
}

// post sends a batch to one of the processes.
func (w *world) post(namespace, body string, messages []witness.Message, random *rand.Rand) (status int) {
	p := w.pods[random.IntN(len(w.pods))]
	l := witness.Line{Begin: w.Clock.Now(), Call: &witness.Call{Kind: witness.Calls, Process: p.name, Source: namespace + "/web",
		Messages: messages, Valid: true}}
	defer func() {
		l.Call.Status = status
		w.Sender.Write(l)
	}()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+p.calls+"/v1/batch", strings.NewReader(body))
	if err != nil {
		return 0
	}
	q.SetBasicAuth(namespace+"-key", "")
	q.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	var answer struct {
		Success  bool  `json:"success"`
		Rejected []any `json:"rejected"`
	}
	if resp.StatusCode != http.StatusOK {
		return resp.StatusCode
	}
	if json.NewDecoder(resp.Body).Decode(&answer) != nil || !answer.Success {
		return 0
	}
	if len(answer.Rejected) > 0 {
		return http.StatusBadRequest
	}
	return http.StatusOK
}

// step is a random step of a plan.
type step struct {
	name   string
	weight int
	// slots is true for a step that is also possible with several slots.
	slots bool
	run   func(*world)
}

var planSteps = []step{
	{"the owner is lost with its disk", 6, true, func(w *world) {
		w.fault("kill -9 of the owner, and loss of its disk", witness.Unrecorded, func() {
			if p := w.owner(10 * time.Second); p != nil {
				p.lose()
				w.progress(25 * time.Second)
				if w.rand.IntN(2) == 0 {
					time.Sleep(planGrace + deliveryTimeout)
				}
				p.start()
			}
		})
	}},
	{"the owner ends", 1, true, func(w *world) {
		w.fault("SIGTERM of the owner", witness.InFlight, func() {
			if p := w.owner(10 * time.Second); p != nil {
				p.end(syscall.SIGTERM)
				w.progress(10 * time.Second)
				p.start()
			}
		})
	}},
	{"the owner is stopped", 1, true, func(w *world) {
		w.fault("SIGSTOP of the owner", witness.Unrecorded, func() {
			if p := w.owner(10 * time.Second); p != nil {
				_ = syscall.Kill(p.Pid(), syscall.SIGSTOP)
				time.Sleep(time.Duration(5+w.rand.IntN(15)) * time.Second)
				_ = syscall.Kill(p.Pid(), syscall.SIGCONT)
				time.Sleep(3 * time.Second)
			}
		})
	}},
	{"all processes are lost with their disks", 1, true, (*world).loseAll},
	{"a server is lost", 1, true, func(w *world) {
		w.fault("kill -9 of a server", witness.InFlight, func() {
			end := w.kill(w.rand.IntN(replicas))
			time.Sleep(time.Duration(w.rand.IntN(6)) * time.Second)
			end()
			w.progress(20 * time.Second)
		})
	}},
	{"all servers are lost", 1, true, func(w *world) {
		w.fault("kill -9 of all servers", witness.InFlight, func() {
			w.restart(func() error { return nil })
			w.progress(20 * time.Second)
		})
	}},
	{"records or objects are lost", 3, true, (*world).loseRecords},
	{"the stream of the slot is deleted", 2, false, (*world).deleteStream},
	{"a process is cut off from the servers", 3, true, (*world).cutOff},
	{"another installation joins", 3, false, (*world).join},
	{"a folder differs", 6, false, (*world).differ},
	{"a disk is full", 2, true, (*world).fillDisk},
	{"all processes are restarted", 2, true, (*world).update},
	{"a destination changes", 2, true, func(w *world) { w.edit(w.pods) }},
	{"a user is deleted", 3, false, (*world).remove},
	{"members of an audience change", 3, true, (*world).changeMembers},
	{"dead letters are redelivered", 4, false, (*world).redeliver},
	{"a destination or a namespace is removed", 6, false, (*world).takeAway},
}

// fault notes a fault from its begin to its end.
func (w *world) fault(name, repeats string, run func()) {
	end := w.Fault(witness.Fault{Name: name, Repeats: repeats})
	run()
	end()
}

// failReceivers makes the receivers of a random choice of namespaces fail, so that messages are pending, until works.
func (w *world) failReceivers() (works func()) {
	var ends []func()
	for _, namespace := range namespaces {
		if w.rand.IntN(3) > 0 {
			continue
		}
		ends = append(ends, w.failReceiver(namespace))
	}
	if d := w.destinations[0]; w.rand.IntN(2) == 0 {
		ends = append(ends, w.failURL(d, w.rand.IntN(d.urls)))
	}
	time.Sleep(time.Second)
	return func() {
		for _, end := range ends {
			end()
		}
	}
}

// failReceiver makes the receiver of a namespace fail, until works.
func (w *world) failReceiver(namespace string) (works func()) {
	return w.fail("/"+namespace, http.StatusServiceUnavailable, witness.Fault{Name: "failing receiver", Namespace: namespace})
}

// failURL makes a URL of several of a destination fail, until works.
func (w *world) failURL(d *target, position int) (works func()) {
	return w.fail(fmt.Sprintf("/%s/%d", d.id(), position), http.StatusServiceUnavailable, witness.Fault{Name: "failing URL", Destination: d.id()})
}

// fail answers requests for paths with a prefix with a status, until works.
func (w *world) fail(prefix string, status int, f witness.Fault) (works func()) {
	w.t.Logf("%v: the receiver of %s fails", w.Clock.Now().Round(time.Millisecond), prefix)
	end := w.Fault(f)
	w.failing.Store(prefix, status)
	return sync.OnceFunc(func() {
		w.failing.Delete(prefix)
		end()
	})
}

// until polls until a condition is true, or a time has passed.
func until(limit time.Duration, is func() bool) bool {
	for end := time.Now().Add(limit); ; time.Sleep(100 * time.Millisecond) {
		if is() {
			return true
		} else if time.Now().After(end) {
			return false
		}
	}
}

// owner returns a process that owns a slot, or nil.
func (w *world) owner(limit time.Duration) (found *pod) {
	until(limit, func() bool {
		for _, i := range rand.Perm(len(w.pods)) {
			if p := w.pods[i]; p.isOwner() == nil {
				found = p
				return true
			}
		}
		return false
	})
	return found
}

// progress waits until further calls are acknowledged, or for a time.
func (w *world) progress(limit time.Duration) {
	before := w.acknowledged.Load()
	until(limit, func() bool { return w.acknowledged.Load() > before+5 })
}

// fillDisk fills the disk of a process, mostly of the owner, to the last byte for some seconds. The process may end
// meanwhile.
func (w *world) fillDisk() {
	p := w.owner(10 * time.Second)
	if p == nil || w.rand.IntN(4) == 0 {
		p = w.pods[w.rand.IntN(len(w.pods))]
	}
	if !w.small {
		return
	}
	w.filled = true
	end := w.rand.IntN(2) == 0
	w.fault("full disk of a process", witness.Unrecorded, func() {
		remove := process.Fill(w.t, filepath.Dir(p.data))
		time.Sleep(time.Duration(5+w.rand.IntN(20)) * time.Second)
		if end {
			p.end(syscall.SIGKILL)
			p.start()
			time.Sleep(5 * time.Second)
		}
		remove()
		select {
		case <-p.Exited():
			w.t.Logf("%s ended with a full disk", p.name)
			p.start()
		default:
		}
		w.progress(30 * time.Second)
	})
}

// update restarts the processes one after the other, as a rolling update does.
func (w *world) update() {
	for _, p := range w.pods {
		w.fault("SIGTERM of a process", witness.InFlight, func() {
			p.end(syscall.SIGTERM)
			p.Binary = w.program
			p.start()
			until(20*time.Second, func() bool { r, err := p.AdminAPI().Report(w.t.Context(), ""); return err == nil && r.Ready })
			w.progress(20 * time.Second)
		})
	}
}

func (w *world) loseAll() {
	w.fault("kill -9 of all processes, and loss of their disks", witness.Unrecorded, func() {
		for _, p := range w.pods {
			p.lose()
		}
		for _, p := range w.pods {
			p.start()
		}
		w.progress(30 * time.Second)
	})
}

// loseRecords purges or deletes a stream or an object store. All processes are lost after the time in which an owner
// repairs the log, when posthorn slots reports no problem.
func (w *world) loseRecords() {
	stream := stream
	if w.configs != nil {
		stream = fmt.Sprint(strings.TrimSuffix(stream, "0"), w.rand.IntN(severalSlots))
	}
	name := []string{stream, stream, "OBJ_" + stream, "OBJ_" + stream + "_members"}[w.rand.IntN(4)]
	w.fault("loss of records in "+name, witness.InFlight, func() {
		js := w.administrator()
		var err error
		if found, lookup := js.Stream(w.t.Context(), name); lookup != nil {
			err = lookup
		} else if name != stream && w.rand.IntN(2) == 0 {
			err = js.DeleteStream(w.t.Context(), name)
		} else {
			err = found.Purge(w.t.Context())
		}
		if err != nil {
			w.t.Logf("loss of records in %s: %v", name, err)
		}
		time.Sleep(35 * time.Second)
		repaired := until(2*time.Minute, func() bool {
			p := w.owner(time.Second)
			return p != nil && exec.Command(w.program, "slots", "--admin", p.Admin).Run() == nil
		})
		if !repaired {
			w.t.Logf("posthorn slots reports a problem for two minutes after the loss of records in %s", name)
		}
	})
	w.loseAll()
}

// deleteStream deletes the stream of the slot. It continues with the files of the owner, which knows that it is deleted.
func (w *world) deleteStream() {
	p := w.owner(10 * time.Second)
	if p == nil {
		return
	}
	w.fault("deletion of the stream", witness.InFlight, func() {
		js := w.administrator()
		settings := w.settings(js, stream)
		check.NoError(w.t, "delete the stream", js.DeleteStream(w.t.Context(), stream))
		for _, each := range w.pods {
			wait.For(w.t, each.name+" reports the deleted stream", func() error { return each.notReady(stream) })
		}
		if settings.Metadata = nil; w.rand.IntN(2) == 0 {
			wait.For(w.t, "the stream is created again", func() error {
				// An attempt without an answer can have created it.
				_, err := js.CreateOrUpdateStream(w.t.Context(), settings)
				return err
			})
		}
		w.adoptFiles(p)
		w.progress(30 * time.Second)
	})
}

// join starts a process of another installation, without an identity or with a wrong one. All others are lost.
func (w *world) join() {
	foreign := &pod{t: w.t, name: "foreign", data: filepath.Join(w.t.TempDir(), "data")}
	dir := w.t.TempDir()
	check.NoError(w.t, "write a manifest", process.Replace(filepath.Join(dir, "all.yaml"), manifests(w.receiver.URL + "/foreign")["all.yaml"]))
	flags := append(w.flags(w.url), "--peer-listen", "127.0.0.1:0")
	if w.rand.IntN(2) == 0 {
		flags = append(flags, "--replication-installation", "another/posthorn")
	}
	foreign.Posthorn = process.Run(w.program, dir, foreign.data, flags...)
	foreign.launch()
	time.Sleep(5 * time.Second)
	w.fault("kill -9 of all processes beside another installation", witness.Unrecorded, func() {
		for _, p := range w.pods {
			p.lose()
		}
		until(2*takeover, func() bool { return foreign.isOwner() == nil })
		time.Sleep(planGrace + deliveryTimeout)
		foreign.end(syscall.SIGKILL)
		for _, p := range w.pods {
			p.start()
		}
		w.progress(30 * time.Second)
	})
}

// write writes the newest manifests of all namespaces to the folders of processes.
func (w *world) write(pods []*pod) {
	if w.configs != nil {
		w.publish()
		return
	}
	for _, p := range pods {
		for _, namespace := range namespaces {
			file := filepath.Join(p.manifests, namespace+".yaml")
			if w.away[namespace] {
				check.NoError(w.t, "remove a manifest", os.RemoveAll(file))
				continue
			}
			check.NoError(w.t, "write a manifest", process.Replace(file, w.manifest(namespace)))
		}
	}
}

// edit changes a destination in the folders of processes, in a random order, and notes when it is confirmed.
func (w *world) edit(pods []*pod) {
	d := w.destinations[w.rand.IntN(len(w.destinations))]
	d.revision++
	w.apply(d)
	pods = slices.Clone(pods)
	w.rand.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	w.write(pods)
	w.confirm(d)
}

// confirm notes that the owner uses the newest revision of a destination.
func (w *world) confirm(d *target) {
	if until(20*time.Second, func() bool { return w.confirmed(d) == nil }) {
		w.Objects.Write(witness.Line{Object: &witness.Object{Name: d.id(), Action: witness.Confirmed, Revision: d.revision}})
	}
}

// confirmed returns an error unless the owner uses the newest revision of a destination.
func (w *world) confirmed(d *target) error {
	if w.configs != nil {
		return w.confirmedInSlots(d)
	}
	var o v1beta1.WebhookDestination
	if err := w.object("destinations", d.namespace, d.name, &o); err != nil {
		return err
	}
	if !programmed(o.Status.Conditions, o.Generation) || o.Spec.Endpoints[0].URL != w.urlsOf(d)[0] {
		return fmt.Errorf("destination %s: %+v", d.id(), o.Status.Conditions)
	}
	return nil
}

// programmed reports whether the owner uses a generation of an object.
func programmed(conditions []metav1.Condition, generation int64) bool {
	c := meta.FindStatusCondition(conditions, v1beta1.ConditionProgrammed)
	return c != nil && c.Status == metav1.ConditionTrue && c.ObservedGeneration == generation
}

// object reads an object from the owner.
func (w *world) object(kind, namespace, name string, to any) error {
	p := w.owner(time.Second)
	if p == nil {
		return errors.New("no process owns the slot")
	}
	out, err := exec.Command(w.program, "get", kind, name, "-n", namespace, "-o", "json", "--admin", p.Admin).Output()
	if err != nil {
		return err
	}
	return json.Unmarshal(out, to)
}

// differ makes the folders of the standbys lack a namespace or a destination, or keep an older version.
func (w *world) differ() {
	p := w.owner(10 * time.Second)
	if p == nil {
		return
	}
	if w.same == nil {
		w.same = w.Fault(witness.Fault{Name: "folders that differ"})
	}
	standbys := w.standbys(p)
	namespace := namespaces[w.rand.IntN(len(namespaces))]
	switch w.rand.IntN(3) {
	case 0:
		for _, s := range standbys {
			_ = os.Remove(filepath.Join(s.manifests, namespace+".yaml"))
		}
	case 1:
		for _, s := range standbys {
			check.NoError(w.t, "write a manifest", process.Replace(filepath.Join(s.manifests, namespace+".yaml"),
				cut(w.manifest(namespace), "WebhookDestination")))
		}
	case 2:
		w.edit([]*pod{p})
	}
}

// repair gives all folders the newest manifests. The process that applied them last is the first one.
func (w *world) repair() {
	w.write(w.pods)
	if w.same != nil {
		time.Sleep(3 * time.Second)
		w.same()
		w.same = nil
	}
}

// remove deletes a user: all destinations of the namespace get a message.
func (w *world) remove() {
	namespace := namespaces[w.rand.IntN(len(namespaces))]
	user := fmt.Sprintf("%s-%d", namespace, len(w.deletions))
	w.repair()
	w.deletions = append(w.deletions, user)
	w.write(w.pods)
	w.demand(user)
}

// demand notes that a deletion of a user begins.
func (w *world) demand(user string) {
	namespace, number, _ := strings.Cut(user, "-")
	begin, call := w.Clock.Now(), w.deletionOf(user)
	if until(20*time.Second, func() bool {
		var o v1beta1.DeletionRequest
		return w.object("deletions", namespace, "d"+number, &o) == nil && o.Status.StartTime != nil
	}) {
		call.Status = http.StatusOK
	}
	w.Sender.Write(witness.Line{Begin: begin, Call: call})
}

// deletionOf is the demand of a deletion of a user, which has not begun.
func (w *world) deletionOf(user string) *witness.Call {
	namespace, _, _ := strings.Cut(user, "-")
	return &witness.Call{Kind: witness.Deletion, Source: namespace + "/web", Messages: []witness.Message{{Due: w.named(namespace),
		Content: json.RawMessage(fmt.Sprintf(`{"type":"delete","userId":%q}`, user))}}}
}

// run runs the plan, and judges its journals.
func (w *world) run() {
	w.t.Helper()
	if w.owner(wait.Limit) == nil {
		w.t.Fatal("no process became the owner at the start of the plan")
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	var group sync.WaitGroup
	for i, namespace := range namespaces {
		random := rand.New(rand.NewPCG(w.rand.Uint64(), uint64(i)))
		group.Go(func() { w.load(ctx, namespace, random) })
	}
	observed, stop := context.WithCancel(w.t.Context())
	var observer sync.WaitGroup
	observer.Go(func() { w.observe(observed) })
	w.progress(time.Minute)

	possible, total := []step{}, 0
	for _, s := range planSteps {
		if w.configs == nil || s.slots {
			possible, total = append(possible, s), total+s.weight
		}
	}
	for range steps {
		n := w.rand.IntN(total)
		i := 0
		for ; n >= possible[i].weight; i++ {
			n -= possible[i].weight
		}
		works := w.failReceivers()
		w.t.Logf("%v: %s", w.Clock.Now().Round(time.Millisecond), possible[i].name)
		possible[i].run(w)
		works()
		w.progress(5 * time.Second)
	}
	w.repair()
	w.progress(time.Minute)
	cancel()
	group.Wait()
	until(planBounds.Wait+10*time.Second, w.settled)
	stop()
	observer.Wait()
	w.final()
	hold := []string{"outcome", "accepted", "refusal", "config", "signed", "denied", "bytes", "wait", "ids", "ledger"}
	if !w.filled { // For space, first attempts at one of several URLs are skipped.
		hold = append(hold, "urls")
	}
	w.judge(w.t, hold...)
}

// observe writes ledgers, the readiness of all processes, and each change of the owner, every second. On a machine with
// much other work, an owner is lost without another fault, because it has no CPU time for longer than its lease.
func (w *world) observe(ctx context.Context) {
	client := &http.Client{Timeout: time.Second}
	epochs, seen := map[int]uint64{}, map[int]time.Duration{}
	for ctx.Err() == nil {
		for _, p := range w.pods {
			states, _ := (&adminapi.Client{URL: "http://" + p.Admin, HTTP: client}).Slots(ctx) // Without an answer it has none.
			for _, s := range states {
				if !s.Owner || s.Epoch < epochs[s.Slot] {
					continue
				}
				if before := epochs[s.Slot]; before != 0 && s.Epoch > before {
					w.FaultAt(seen[s.Slot], witness.Fault{Name: "change of the owner", Repeats: witness.Unrecorded})()
				}
				epochs[s.Slot], seen[s.Slot] = s.Epoch, w.Clock.Now()
			}
		}
		for _, p := range w.pods {
			resp, err := client.Get("http://" + p.calls + "/readyz") //nolint:noctx // a local poll
			if err == nil {
				resp.Body.Close()
			}
			w.Ledgers.Write(witness.Line{Probe: &witness.Probe{Process: p.name, Ready: err == nil && resp.StatusCode == http.StatusOK}})
		}
		w.writeLedgers(false)
		time.Sleep(time.Second)
	}
}

// writeLedgers writes the ledgers of the owner, and returns the number of pending messages, -1 without an owner.
func (w *world) writeLedgers(final bool) (pending int) {
	p := w.owner(0)
	if p == nil {
		return -1
	}
	var names []string
	for _, d := range w.destinations {
		names = append(names, d.id())
	}
	return w.journals.writeLedgers(w.t, p, final, names...)
}

// settled reports whether nothing is pending.
func (w *world) settled() bool { return w.writeLedgers(false) == 0 }

// final writes the ledgers, statuses and dead letters at the end.
func (w *world) final() {
	for _, d := range w.destinations {
		var o v1beta1.WebhookDestination
		if w.configs == nil && w.object("destinations", d.namespace, d.name, &o) == nil && o.Status.Delivery != nil {
			s := o.Status.Delivery
			w.Ledgers.Write(witness.Line{Ledger: &witness.Ledger{
				Name: d.id(), Status: true,
				Accepted:  int(s.Delivered + s.Filtered + s.Omitted + s.DeadLettered + s.Discarded + s.Pending),
				Delivered: int(s.Delivered), Filtered: int(s.Filtered), Omitted: int(s.Omitted),
				DeadLettered: int(s.DeadLettered), Discarded: int(s.Discarded),
				Pending: int(s.Pending),
			}})
		}
		if p := w.owner(time.Second); p != nil {
			w.writeLetters(w.t, p, d.id())
		}
	}
	w.writeLedgers(true)
}
