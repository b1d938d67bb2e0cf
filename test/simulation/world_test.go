package simulation

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/record"
	"github.com/posthorn/posthorn/test/witness"
)

// bounds are what docs/reliability.md states: what is not recorded after a loss, and the next probe of a circuit.
var bounds = witness.Plan{Unrecorded: 300 * time.Millisecond, Wait: 65 * time.Second, Status: reported, Ready: 5 * time.Second,
	Grace: grace}

// replicatedBounds are those with a replicated log: a takeover is added, and two to Ready, because the next owner may be lost, too.
var replicatedBounds = witness.Plan{Unrecorded: 2 * time.Second, Wait: 85 * time.Second, Status: reported, Ready: 45 * time.Second,
	Grace: grace}

const (
	// reported is the time after which a report counts a delivery.
	reported = 2 * time.Second
	// grace is the grace period, and timeout the timeout of a request to a receiver.
	grace   = 10 * time.Second
	timeout = 2 * time.Second
	// inFlight bounds the requests to a receiver in flight.
	inFlight = 8
	// settling bounds the time after the plan in which all messages get an outcome.
	settling = 10 * time.Minute
)

// world has what survives the loss of a process: senders, receivers, manifests, and the disk.
type world struct {
	*testing.T
	*record.Journals
	seed uint64
	// rand is used by the goroutine of the plan only.
	rand *rand.Rand
	pods []*pod
	// log is the replicated log of the processes, which network connects; nil for one process with its own.
	log     *replicatedLog
	network network
	// configs are the live configs of the namespaces.
	configs map[string]*config

	senders sync.WaitGroup
	// detected is the number of flipped bits with which a process did not start.
	detected int
	// ending are processes that are lost, and not closed yet.
	ending sync.WaitGroup

	mu sync.Mutex
	// dice is for all goroutines; mu guards it.
	dice *rand.Rand
	// failing are the faults of receivers by the prefix of their URLs.
	failing map[string]receiverFault
	bounds  witness.Plan
	// acknowledged is the number of calls that were acknowledged.
	acknowledged int
	// epoch is the epoch of the newest owner, and disturbed the time from which on the log is disturbed; 0 if it is not.
	epoch     uint64
	disturbed time.Duration
}

func newWorld(t *testing.T, seed uint64, log func() *replicatedLog) *world {
	w := &world{T: t, seed: seed, Journals: record.Begin(t), rand: rand.New(rand.NewPCG(seed, 0)), dice: rand.New(rand.NewPCG(seed, 1)),
		configs: map[string]*config{}, failing: map[string]receiverFault{}, network: network{listeners: map[string]*listener{}}}
	w.bounds = bounds
	if log != nil { // Its channels are in the bubble.
		w.bounds, w.log = replicatedBounds, log()
	}
	w.Sender.Write(witness.Line{Plan: &w.bounds})
	for _, namespace := range namespaces {
		w.configs[namespace] = newConfig(namespace)
		w.configs[namespace].encode(t)
	}
	for _, d := range w.destinations() {
		w.apply(d)
	}
	for n := range processes(w.log) {
		w.pods = append(w.pods, newPod(w, fmt.Sprint("p", n)))
	}
	return w
}

// processes is the number of processes with a log.
func processes(log *replicatedLog) int {
	if log == nil {
		return 1
	}
	return 3
}

// one returns whether one of n cases happens.
func (w *world) one(n int) bool { return w.roll(n) == 0 }

// roll returns a number from 0 to n-1.
func (w *world) roll(n int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dice.IntN(n)
}

// upTo returns a time that is not zero.
func (w *world) upTo(d time.Duration) time.Duration {
	return time.Duration(1 + w.roll(int(d)))
}

// destinations returns those of all namespaces, sorted by name.
func (w *world) destinations() (all []*target) {
	for _, namespace := range namespaces {
		all = append(all, w.configs[namespace].destinations...)
	}
	return all
}

// apply notes that the newest revision of a destination is about to be applied.
func (w *world) apply(d *target) {
	w.Objects.Write(witness.Line{Object: &witness.Object{Name: d.id(), Action: witness.Applied, Revision: d.revision,
		Destination: &witness.Destination{
			URLs: d.urls(), Headers: map[string]string{"X-Revision": strconv.Itoa(d.revision)}, Keys: []string{d.secret()},
			InFlight: inFlight, Timeout: timeout, Window: d.window, Suspended: d.state == liveconfig.Suspended, Dropped: d.dropped,
		}}})
}

func (w *world) note(d *target, action string) {
	w.Objects.Write(witness.Line{Object: &witness.Object{Name: d.id(), Action: action, Revision: d.revision}})
}

// observe writes ledgers and the readiness every two seconds until stop is closed.
func (w *world) observe(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(2 * time.Second):
		}
		for _, p := range w.pods {
			w.Ledgers.Write(witness.Line{Probe: &witness.Probe{Process: p.name, Ready: p.request(http.MethodGet, "/readyz") == http.StatusOK}})
		}
		w.writeLedgers(false)
	}
}

// admin returns the admin API of the owner's store, by one of the processes; nil if none lives.
func (w *world) admin() *adminapi.Client {
	for i := range w.pods {
		if l := w.pods[(i+w.roll(len(w.pods)))%len(w.pods)].living(); l != nil {
			c := &adminapi.Client{URL: "http://admin.test", HTTP: &http.Client{Transport: l.admin, Timeout: 5 * time.Second}}
			if w.log != nil {
				c = c.Slot(0)
			}
			return c
		}
	}
	return nil
}

// report returns the report of the owner; nil without an answer, or from an earlier owner that reaches no server.
func (w *world) report() *adminapi.Report {
	c := w.admin()
	if c == nil {
		return nil
	}
	r, err := c.Report(w.Context(), "")
	if err != nil {
		return nil
	}
	if r.Replication != nil && !w.follow(r.Replication.Epoch) {
		return nil
	}
	return r
}

// follow notes an owner, and reports whether it is the newest one. A change of the owner while the log is disturbed is a fault:
// the last one sent nothing from Unrecorded after the begin on.
func (w *world) follow(epoch uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if epoch < w.epoch {
		return false
	}
	if epoch > w.epoch && w.disturbed > 0 {
		w.FaultAt(w.disturbed+w.bounds.Unrecorded, witness.Fault{Name: "change of the owner", Repeats: witness.Unrecorded})()
	}
	w.epoch = epoch
	return true
}

// progress waits, with a replicated log, until another call is acknowledged.
func (w *world) progress() {
	w.mu.Lock()
	before := w.acknowledged
	w.mu.Unlock()
	for end := time.Now().Add(time.Minute); w.log != nil && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		w.mu.Lock()
		done := w.acknowledged > before
		w.mu.Unlock()
		if done {
			return
		}
	}
}

// writeLedgers writes the ledgers of all destinations, and returns the number of pending messages, -1 if a ledger is missing.
func (w *world) writeLedgers(final bool) (pending int) {
	report := w.report()
	if report == nil {
		return -1
	}
	seen := 0
	for _, n := range report.Namespaces {
		for _, d := range n.Destinations {
			if seen++; !final && d.Pending > 0 && w.configs[n.Namespace].redelivered.Load() {
				pending += int(d.Pending)
				continue
			}
			pending += w.writeLedger(n.Namespace+"/"+d.Name, d, final)
		}
	}
	if seen < len(w.destinations()) && final {
		return -1
	}
	return pending
}

func (w *world) writeLedger(name string, d adminapi.DestinationReport, final bool) (pending int) {
	l, unsent := d.Ledger, 0
	for _, e := range d.Endpoints {
		pending += int(e.FirstAttemptsPending)
		unsent += int(e.FirstAttemptsPending + e.FirstAttemptsSkipped)
	}
	numbers := witness.Ledger{Name: name, Final: final, Accepted: int(l.Accepted), Delivered: int(l.Delivered), Filtered: int(l.Filtered),
		Omitted: int(l.Omitted), DeadLettered: int(l.DeadLettered), Discarded: int(l.Discarded), Pending: int(l.Pending), Unsent: unsent}
	status := numbers // A status repeats the numbers of a report.
	status.Status, status.Final = true, false
	w.Ledgers.Write(witness.Line{Ledger: &numbers})
	w.Ledgers.Write(witness.Line{Ledger: &status})
	return pending + int(l.Pending)
}

// run runs a plan, and judges its journals.
func (w *world) run(plan []step) []witness.Verdict {
	for _, p := range w.pods {
		p.start()
	}
	stop := make(chan struct{})
	var background sync.WaitGroup
	background.Go(func() { w.observe(stop) })
	sending := make(chan struct{})
	for i, namespace := range namespaces {
		random := rand.New(rand.NewPCG(w.seed, uint64(10+i)))
		w.senders.Go(func() { w.load(sending, namespace, random) })
	}
	if w.log != nil {
		w.recover()
		w.confirm() // The store must know the destinations before one of them is removed.
	}
	for _, s := range plan {
		w.rand = rand.New(rand.NewPCG(s.seed, 0))
		w.Logf("%v: %s", w.Clock.Now(), kinds[s.kind].name)
		kinds[s.kind].run(w)
	}
	w.calm()
	close(sending)
	w.senders.Wait()
	for end := time.Now().Add(settling); time.Now().Before(end) && w.writeLedgers(false) != 0; {
		time.Sleep(time.Second)
	}
	close(stop)
	background.Wait()
	w.writeLetters()
	w.writeLedgers(true)
	for _, p := range w.pods {
		p.end()
	}
	w.ending.Wait()
	return w.Judge(w.T)
}

// writeLetters writes the dead letters of all destinations.
func (w *world) writeLetters() {
	for _, d := range w.destinations() {
		letters := &witness.Letters{Name: d.id(), Expired: map[string]time.Duration{}}
		for letter, err := range w.admin().DeadLetters(w.Context(), d.id(), 10_000) {
			if err != nil {
				w.Logf("the dead letters of %s are not known, so its outcomes are unclear: %v", d.id(), err)
				return
			}
			id := string(letter.MessageID)
			if letters.IDs = append(letters.IDs, id); letter.Reason == "Expired" {
				letters.Expired[id] = letter.FailedAt.Sub(letter.AcceptedAt)
			}
		}
		w.Ledgers.Write(witness.Line{Letters: letters})
	}
}

// load sends batches of calls of a namespace until sending is closed.
func (w *world) load(sending <-chan struct{}, namespace string, random *rand.Rand) {
	for n := 0; ; n++ {
		select {
		case <-sending:
			return
		case <-time.After(time.Duration(1+random.IntN(800)) * time.Millisecond):
		}
		messages, body := w.batch(namespace, n, random)
		own := rand.New(rand.NewPCG(random.Uint64(), 0))
		w.senders.Go(func() { w.send(namespace, body, messages, own) })
	}
}

// batch makes the calls of a request, and the body.
func (w *world) batch(namespace string, n int, random *rand.Rand) (messages []witness.Message, body string) {
	var calls []string
	for i := range 1 + random.IntN(4) {
		// Ids of one order differ in their separators.
		separators := [][]string{{" ", "-", "%20"}, {"+", "/", "é", "."}}[n%2]
		id := fmt.Sprintf("%s%s%d-%d", namespace, separators[random.IntN(len(separators))], n/2, i)
		m := witness.Message{ID: id, Content: json.RawMessage(fmt.Sprintf(`{"type":"track","event":"E%d","userId":"u"}`, random.IntN(9)))}
		if random.IntN(3) == 0 {
			m.Content = json.RawMessage(fmt.Sprintf(`{"type":"identify","userId":"u%d","traits":{"n":%d}}`, random.IntN(9), n))
		}
		for _, d := range w.configs[namespace].destinations {
			if d.takes(m.Content) {
				m.Due = append(m.Due, d.id())
			}
		}
		messages = append(messages, m)
		calls = append(calls, strings.TrimSuffix(string(m.Content), "}")+fmt.Sprintf(`,"messageId":%q}`, id))
	}
	return messages, `{"batch":[` + strings.Join(calls, ",") + `]}`
}

// send sends a request as the official libraries do: again after 5xx, 429 and a missing answer, with growing waits, up
// to ten times.
func (w *world) send(namespace, body string, messages []witness.Message, random *rand.Rand) {
	wait := 100 * time.Millisecond
	for range 10 {
		status := w.post(namespace, body, messages, random)
		if status >= 200 && status < 500 && status != http.StatusTooManyRequests {
			return
		}
		time.Sleep(wait + time.Duration(random.IntN(int(wait))))
		wait = min(2*wait, 10*time.Second)
	}
}

// post sends a request once. The network loses one of 30 requests, and one of 30 answers.
func (w *world) post(namespace, body string, messages []witness.Message, random *rand.Rand) int {
	p := w.pods[random.IntN(len(w.pods))]
	call := &witness.Call{Kind: witness.Calls, Source: namespace + "/web", Messages: messages, Valid: true}
	begin, fate := w.Clock.Now(), random.IntN(30)
	if fate == 0 {
		time.Sleep(time.Second)
	} else {
		time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond)
		p.requestAndThen(http.MethodPost, "/v1/batch", body, func(r *http.Request) { r.SetBasicAuth(namespace+"-key", "") },
			func(status int, text []byte) {
				if fate == 1 {
					return
				}
				call.Process = p.name
				if call.Status = acknowledges(status, text); call.Status == http.StatusOK {
					w.acknowledged += len(messages)
				}
				w.Sender.Write(witness.Line{Begin: begin, Call: call})
			})
		if call.Status != 0 {
			return call.Status
		}
	}
	w.Sender.Write(witness.Line{Begin: begin, Call: call})
	return call.Status
}

// acknowledges returns the status of a call: 200 only if all messages are acknowledged, and 0 without an answer.
func acknowledges(status int, text []byte) int {
	var answer struct {
		Success  bool  `json:"success"`
		Rejected []any `json:"rejected"`
	}
	switch {
	case status != http.StatusOK:
		return status
	case json.Unmarshal(text, &answer) != nil || !answer.Success:
		return 0
	case len(answer.Rejected) > 0:
		return http.StatusBadRequest
	}
	return http.StatusOK
}

// find returns a destination by its id.
func (w *world) find(id string) *target {
	all := w.destinations()
	return all[slices.IndexFunc(all, func(d *target) bool { return d.id() == id })]
}
