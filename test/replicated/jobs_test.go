package replicated

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// openReceiver answers 503 slowly until it works, and records the most requests at once, and their number.
type openReceiver struct {
	*receiver
	mu                       sync.Mutex
	works                    bool
	now, atOnce, sinceForget int
}

func newOpenReceiver(t *testing.T) *openReceiver {
	r := &openReceiver{receiver: newReceiver(t)}
	deliver := r.Config.Handler
	r.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if r.begin() {
			deliver.ServeHTTP(w, q)
		} else {
			time.Sleep(200 * time.Millisecond) // Further requests, if any, arrive meanwhile.
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.now--
	})
	return r
}

func (r *openReceiver) begin() (works bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now++
	r.sinceForget++
	r.atOnce = max(r.atOnce, r.now)
	return r.works
}

// forget returns the most requests at once since the last call, and their number.
func (r *openReceiver) forget() (atOnce, requests int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	atOnce, requests = r.atOnce, r.sinceForget
	r.atOnce, r.sinceForget = r.now, 0
	return atOnce, requests
}

func (r *openReceiver) work() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.works = true
}

// deletes returns the ids of the delete messages that a receiver got.
func (r *receiver) deletes() (ids []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := range r.got {
		if strings.HasPrefix(id, "delete-") {
			ids = append(ids, id)
		}
	}
	return ids
}

func destinationManifest(name, source, url string) string {
	return `---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: ` + name + `}
spec:
  sourceRefs: [{name: ` + source + `}]
  endpoints: [{name: primary, url: "` + url + `"}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: keys, key: sharedSecret}}]}
`
}

// jobManifests are the Source web with the destinations crm, rejecting and held, and the Source radio with two
// destinations for the delete messages.
func jobManifests(urls map[string]string) map[string]string {
	all := manifests(urls["crm"])
	all["all.yaml"] += `---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: radio}
spec:
  writeKeys: [{name: main, secretKeyRef: {name: keys, key: sharedSecret}}]
`
	for _, name := range []string{"rejecting", "held"} {
		all["all.yaml"] += destinationManifest(name, "web", urls[name])
	}
	all["all.yaml"] += destinationManifest("radio-crm", "radio", urls["radio"]) + destinationManifest("radio-rejecting", "radio",
		urls["radioRejecting"])
	return all
}

// write writes a manifest for all processes.
func write(t *testing.T, pods []*pod, name, text string) {
	t.Helper()
	for _, p := range pods {
		check.NoError(t, "write a manifest", process.Replace(filepath.Join(p.manifests, name), text))
	}
}

func deletionManifest(name, user, source string) string {
	return `
apiVersion: posthorn.dev/v1beta1
kind: DeletionRequest
metadata: {name: ` + name + `}
spec: {userID: ` + user + `, suppress: true, sourceRefs: [{name: ` + source + `}]}
`
}

// object reads an object with `posthorn get`.
func object(p *pod, kind, name string, to any) error {
	out, err := exec.Command(binary, "get", kind, name, "-o", "json", "--admin", p.Admin).CombinedOutput()
	if err != nil {
		return fmt.Errorf("posthorn get: %w\n%s", err, out)
	}
	return json.Unmarshal(out, to)
}

// ages matches the time since an event and the spaces that its width decides: two commands print it seconds apart.
var ages = regexp.MustCompile(` *\b([0-9]+(d|h|m|s))+\b *`)

// sameCommands checks that commands have the same output with the admin address of each process.
func sameCommands(t *testing.T, pods []*pod, commands ...string) {
	t.Helper()
	for _, command := range commands {
		if err := wait.Until(func() error { // A standby has other numbers of records at first.
			var first string
			for i, p := range pods {
				out, err := exec.Command(binary, append(strings.Fields(command), "--admin", p.Admin)...).CombinedOutput()
				if err != nil {
					return fmt.Errorf("process %s: %w\n%s", p.name, err, out)
				}
				got := ages.ReplaceAllString(string(out), "age")
				if i == 0 {
					first = got
				} else if got != first {
					return fmt.Errorf("got\n%s\nand, from process %s,\n%s", first, p.name, got)
				}
			}
			return nil
		}); err != nil {
			t.Errorf("posthorn %s, with the admin address of each process: %v", command, err)
		}
	}
}

// ended returns an error unless a condition of a run is True with a reason.
func ended(s v1beta1.JobStatus, condition, reason string) error {
	if c := meta.FindStatusCondition(s.Conditions, condition); c == nil || c.Status != metav1.ConditionTrue || c.Reason != reason {
		return fmt.Errorf("condition %s: got %+v, want True with %s", condition, c, reason)
	}
	return nil
}

// outcomes are the states of the notifications of a request, by Source and destination.
func outcomes(s v1beta1.DeletionRequestStatus) map[string]string {
	states := map[string]string{}
	for _, n := range s.Notifications {
		states[n.Source+" to "+n.Destination] = strings.TrimSuffix(string(n.State)+" "+n.Reason, " ")
	}
	return states
}

// wantDeletion waits for the end of a request with outcomes. condition is empty for a request that has not ended.
func wantDeletion(t *testing.T, pods []*pod, name, condition, reason string, want map[string]string) (o v1beta1.DeletionRequest) {
	t.Helper()
	if err := wait.Until(func() error {
		o = v1beta1.DeletionRequest{}
		if err := object(owner(t, pods), "deletions", name, &o); err != nil {
			return err
		}
		if got := outcomes(o.Status); fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("notifications: got %v, want %v", got, want)
		}
		if condition == "" {
			if v1beta1.JobEnded(o.Status.JobStatus) {
				return fmt.Errorf("the run has ended: %+v", o.Status.Conditions)
			}
			return nil
		}
		return ended(o.Status.JobStatus, condition, reason)
	}); err != nil {
		t.Fatalf("deletion request %s: %v", name, err)
	}
	return o
}

// wantSuppressed checks that each process rejects calls of a user.
func wantSuppressed(t *testing.T, pods []*pod, user string) {
	t.Helper()
	for _, p := range pods {
		if err := wait.Until(func() error { // A standby does not know the new owner at once.
			resp, body, err := track(t, p, user)
			if err != nil {
				return err
			}
			switch {
			case resp.StatusCode == http.StatusForbidden && strings.Contains(body, "user_suppressed"):
				return nil
			case resp.StatusCode == http.StatusOK:
				return wait.Stop(errors.New("the call was accepted"))
			}
			return fmt.Errorf("got status %d and %s", resp.StatusCode, body)
		}); err != nil {
			t.Errorf("call of the suppressed user %s to %s, want 403 user_suppressed: %v", user, p.name, err)
		}
	}
}

// state is what a takeover must not change.
type jobState struct {
	Ledgers   map[string]adminapi.Ledger
	Stored    map[string]int64
	Letters   map[string][]adminapi.DeadLetter
	Revisions map[string]string
}

func stateOf(t *testing.T, p *pod, names ...string) jobState {
	t.Helper()
	s := jobState{map[string]adminapi.Ledger{}, map[string]int64{}, map[string][]adminapi.DeadLetter{}, map[string]string{}}
	for _, name := range names {
		d := destinationOf(t, p, name)
		s.Ledgers[name], s.Stored[name], s.Revisions[name] = d.Ledger, d.DeadLettersStored, d.Revision
		for letter, err := range p.AdminAPI().DeadLetters(t.Context(), "default/"+name, 10_000) {
			check.NoError(t, "list the dead letters", err)
			s.Letters[name] = append(s.Letters[name], letter)
		}
	}
	return s
}

// destinationOf returns the report of a destination.
func destinationOf(t *testing.T, p *pod, name string) (d adminapi.DestinationReport) {
	t.Helper()
	if err := wait.Until(func() error {
		r, err := p.store().Report(t.Context(), "")
		if err != nil {
			return err
		}
		for _, n := range r.Namespaces {
			for _, d = range n.Destinations {
				if d.Name == name && len(d.Endpoints) > 0 {
					return nil
				}
			}
		}
		return errors.New("the report lacks it")
	}); err != nil {
		t.Fatalf("destination %s: %v", name, err)
	}
	return d
}

// loseOwner ends the owner with kill -9, removes its disk, waits for the next owner, and starts the process again.
func loseOwner(t *testing.T, pods []*pod) (next *pod) {
	t.Helper()
	before := owner(t, pods)
	before.lose()
	next = owner(t, slices.DeleteFunc(slices.Clone(pods), func(p *pod) bool { return p == before }))
	before.start()
	return next
}

// rejects makes a receiver answer 409 to one message, and count its requests.
func (r *receiver) rejects(id string) (requests func() int) {
	deliver, n := r.Config.Handler, 0
	r.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.Header.Get("Idempotency-Key") != id {
			deliver.ServeHTTP(w, q)
			return
		}
		r.mu.Lock()
		n++
		r.mu.Unlock()
		w.WriteHeader(http.StatusConflict)
	})
	return func() int {
		r.mu.Lock()
		defer r.mu.Unlock()
		return n
	}
}

// waitCount waits until a receiver has a number of messages.
func waitCount(t *testing.T, what string, r *receiver, want int) {
	t.Helper()
	if err := wait.Until(func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.got) < want {
			return fmt.Errorf("got %d", len(r.got))
		}
		return nil
	}); err != nil {
		t.Fatalf("%s, want %d messages: %v", what, want, err)
	}
}

// When the owner is lost with its disk, the next one has the dead letters, continues the deletion requests and
// redeliveries, and keeps the users suppressed and the circuits open. A run that has ended is not repeated.
func TestJobsAndCircuitsAfterTheLossOfTheOwner(t *testing.T) {
	t.Parallel()
	const letters = 40
	s := startServers(t)
	crm, rejecting, held, radio, radioRejecting, failing := newReceiver(t), newReceiver(t), newReceiver(t), newReceiver(t), newReceiver(t),
		newOpenReceiver(t)
	requests := rejecting.rejects("m0")
	for _, r := range []*receiver{rejecting, held, radioRejecting} {
		r.answer.Store(http.StatusConflict) // It never opens a circuit.
	}
	pods := startPods(t, 2, jobManifests(map[string]string{
		"crm": crm.URL, "rejecting": rejecting.URL, "held": held.URL, "radio": radio.URL, "radioRejecting": radioRejecting.URL,
	}), "--replication-url", s.url, "--replication-name", "test", "--replication-max-bytes", "1Gi")
	write(t, pods, "failing.yaml", destinationManifest("failing", "web", failing.URL))
	first := ownerOfCopied(t, pods)
	destinationOf(t, first, "failing")
	var ids []string
	for i := range letters {
		ids = append(ids, fmt.Sprint("m", i))
	}
	(&sender{pods: pods}).mustSend(t, batchOf(ids))
	checkDelivered(t, ids, crm)

	// The circuit opens before the delete message, so that this is pending.
	if err := wait.Until(func() error {
		if e := destinationOf(t, first, "failing").Endpoints[0]; e.State != adminapi.EndpointCircuitOpen {
			return fmt.Errorf("state %s", e.State)
		}
		return nil
	}); err != nil {
		t.Fatalf("circuit of the failing endpoint, want it open: %v", err)
	}
	write(t, pods, "gone.yaml", deletionManifest("gone", "gone", "web"))
	write(t, pods, "radio.yaml", deletionManifest("radio", "gone-from-radio", "radio"))
	outcome := map[string]string{"web to crm": "Delivered", "web to rejecting": "DeadLettered Rejected",
		"web to held": "DeadLettered Rejected", "web to failing": "Pending"}
	notDelivered := map[string]string{"radio to radio-crm": "Delivered", "radio to radio-rejecting": "DeadLettered Rejected"}
	wantDeletion(t, pods, "gone", "", "", outcome)
	failed := wantDeletion(t, pods, "radio", v1beta1.ConditionFailed, v1beta1.ReasonNotDelivered, notDelivered)
	wantSuppressed(t, pods, "gone")

	names := []string{"crm", "rejecting", "held", "radio-crm", "radio-rejecting"}
	waitCopied(t, ownerOfCopied(t, pods), pods)
	failing.forget()
	before, circuit := stateOf(t, first, names...), destinationOf(t, first, "failing")
	second := loseOwner(t, pods)
	check.Same(t, "ledgers, dead letters and revisions after the loss of the owner", stateOf(t, second, names...), before)
	open := destinationOf(t, second, "failing")
	check.Equal(t, "revision of the failing destination after the loss of the owner", open.Revision, circuit.Revision)
	check.Equal(t, "messages that are pending there", open.Pending, circuit.Pending)
	e := open.Endpoints[0]
	if e.State != adminapi.EndpointCircuitOpen || !e.Since.Equal(circuit.Endpoints[0].Since) || e.LastFailure == nil ||
		e.LastFailure.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("failing endpoint after the loss of the owner: got %+v with the failure %+v, want an open circuit since %v and a failure with status 503", e, e.LastFailure, circuit.Endpoints[0].Since)
	}
	wantDeletion(t, pods, "gone", "", "", outcome)
	again := wantDeletion(t, pods, "radio", v1beta1.ConditionFailed, v1beta1.ReasonNotDelivered, notDelivered)
	check.Same(t, "status of the request that ended before the loss of the owner", again.Status, failed.Status)
	wantSuppressed(t, pods, "gone")

	// The next owner is lost during a redelivery, and after the answer to another one.
	ownerOfCopied(t, pods)
	already := requests()
	rejecting.answer.Store(0)
	write(t, pods, "again.yaml", `
apiVersion: posthorn.dev/v1beta1
kind: Redelivery
metadata: {name: again}
spec: {destinationRef: {name: rejecting}, deadLettersPerSecond: 2, match: {reasons: [Rejected], types: [track]}}
`)
	waitCount(t, "redelivered dead letters", rejecting, 3)
	held.answer.Store(http.StatusServiceUnavailable)
	progress, err := second.AdminAPI().Redeliver(t.Context(),
		adminapi.DeadLetterAction{Destination: "default/held", Selector: adminapi.DeadLetterSelector{Types: []string{"track"}}, Rate: 1000}, nil)
	check.NoError(t, "redeliver the dead letters of held", err)
	check.Equal(t, "acknowledged redelivery of the dead letters of held", progress.Redelivered, letters)
	loseOwner(t, pods)
	held.answer.Store(0)
	var run v1beta1.Redelivery
	if err := wait.Until(func() error {
		run = v1beta1.Redelivery{}
		if err := object(owner(t, pods), "redeliveries", "again", &run); err != nil {
			return err
		}
		return ended(run.Status.JobStatus, v1beta1.ConditionComplete, v1beta1.ReasonRedelivered)
	}); err != nil {
		t.Fatalf("redelivery: %v", err)
	}
	check.Equal(t, "matched dead letters", ptr.Deref(run.Status.Matched, -1), letters)
	check.Equal(t, "redelivered dead letters", ptr.Deref(run.Status.Redelivered, -1), letters)
	waitCount(t, "redelivery that the next owner has completed", rejecting, letters-1)
	check.Equal(t, "requests for the dead letter that the receiver rejects again", requests()-already, 1)
	waitCount(t, "redelivery that was acknowledged before the loss of the owner", held, letters)
	wantSuppressed(t, pods, "gone")

	if atOnce, _ := failing.forget(); atOnce > 1 {
		t.Errorf("requests at once to the endpoint with an open circuit: got %d, want the single one of a probe", atOnce)
	}
	failing.work()
	// It makes the next probe due.
	write(t, pods, "failing.yaml", destinationManifest("failing", "web", failing.URL)+"  delivery: {maxInFlight: 20}\n")
	outcome["web to failing"] = "Delivered"
	wantDeletion(t, pods, "gone", v1beta1.ConditionFailed, v1beta1.ReasonNotDelivered, outcome)
	for name, r := range map[string]*receiver{"crm": crm, "failing": failing.receiver, "radio": radio} {
		check.Equal(t, "delete messages at "+name, len(r.deletes()), 1)
	}
	var last *pod
	if err := wait.Until(func() error {
		if l := report(t, pods); l.Pending != 0 || l.Discarded != 0 {
			return fmt.Errorf("got %+v", l)
		}
		last = owner(t, pods)
		return nil
	}); err != nil {
		t.Fatalf("ledger, want nothing pending and nothing discarded: %v", err)
	}
	after := stateOf(t, last, append(names, "failing")...)
	// One page of the run, two dead letters, can be redelivered twice.
	for name, want := range map[string]struct{ delivered, repeated, deadLettered, stored int64 }{
		"crm": {delivered: letters + 1}, "failing": {delivered: letters + 1}, "radio-crm": {delivered: 1},
		"radio-rejecting": {deadLettered: 1, stored: 1},
		"rejecting":       {delivered: letters - 1, repeated: 2, deadLettered: letters + 2, stored: 2}, "held": {delivered: letters, repeated: 100, deadLettered: letters + 1, stored: 1},
	} {
		got := after.Ledgers[name]
		if got.Delivered < want.delivered || got.Delivered > want.delivered+want.repeated || got.DeadLettered != want.deadLettered ||
			after.Stored[name] != want.stored || len(after.Letters[name]) != int(want.stored) {
			t.Errorf("destination %s at the end: got %+v and %d stored dead letters, want %+v", name, got, after.Stored[name], want)
		}
	}
	sameCommands(t, pods, "get destinations", "get deletions gone -o json", "deadletters list held -o json", "why redelivery/again",
		"trace m0 -o json")
}
