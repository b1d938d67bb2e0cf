package replicated

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/test/witness"
)

// audience is an audience of a plan, with its members after the last change that was acknowledged.
type audience struct {
	number  int
	members []string
}

func (a *audience) key() string { return fmt.Sprint("buyers_", a.number) }

// replace makes it another audience, whose members are known: none.
func (a *audience) replace() { a.number, a.members = a.number+1, nil }

func (a *audience) manifest(in string) string {
	return fmt.Sprintf(`---
apiVersion: posthorn.dev/v1beta1
kind: Audience
metadata: {name: buyers-%[1]d, %[2]s}
spec: {sourceRef: {name: web}, key: %[3]s}
`, a.number, in, a.key())
}

// changeMembers sends other members of an audience, until they are acknowledged. The owner may be lost in between.
func (w *world) changeMembers() {
	w.repair()
	namespace := namespaces[w.rand.IntN(len(namespaces))]
	a := w.audiences[namespace]
	var members []string
	for user := range 20 {
		if w.rand.IntN(2) == 0 {
			members = append(members, fmt.Sprint("member-", user))
		}
	}
	call := &witness.Call{Kind: witness.Sync, Source: namespace + "/web"}
	for member, users := range map[bool][]string{true: without(members, a.members), false: without(a.members, members)} {
		for _, user := range users {
			call.Messages = append(call.Messages, witness.Message{Due: w.named(namespace),
				Content: json.RawMessage(fmt.Sprintf(`{"type":"identify","userId":%q,"traits":{%q:%v}}`, user, a.key(), member))})
		}
	}
	begin := w.Clock.Now()
	w.maybeLose(func() {
		if until(30*time.Second, func() bool { return w.putMembers(namespace, members) }) {
			call.Status = http.StatusOK
		}
	})
	if a.members = members; call.Status == 0 {
		a.replace()
		w.write(w.pods)
	}
	w.Sender.Write(witness.Line{Begin: begin, Call: call})
}

// without returns the users that are not in others.
func without(users, others []string) (left []string) {
	for _, user := range users {
		if !slices.Contains(others, user) {
			left = append(left, user)
		}
	}
	return left
}

// named are the names of the destinations of a namespace.
func (w *world) named(namespace string) (names []string) {
	for _, d := range w.destinations {
		if d.namespace == namespace {
			names = append(names, d.id())
		}
	}
	return names
}

// putMembers sends the members of the audience of a namespace to a process, and reports whether they are acknowledged.
func (w *world) putMembers(namespace string, members []string) bool {
	var text strings.Builder
	for _, user := range members {
		fmt.Fprintf(&text, "{\"userId\":%q}\n", user)
	}
	ctx, cancel := context.WithTimeout(w.t.Context(), 5*time.Second)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodPut, fmt.Sprintf("http://%s/v1/audiences/%s/members?allowEmpty=true&allowRemoval=100",
		w.pods[w.rand.IntN(len(w.pods))].calls, w.audiences[namespace].key()), strings.NewReader(text.String()))
	if err != nil {
		return false
	}
	q.SetBasicAuth(namespace+"-key", "")
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK || resp.StatusCode == http.StatusAccepted
}

// maybeLose runs a function, and in half of all cases the owner is lost with its disk as it begins, or soon after.
func (w *world) maybeLose(run func()) {
	p := w.owner(10 * time.Second)
	if p == nil || w.rand.IntN(2) == 0 {
		run()
		return
	}
	delay, lost := time.Duration(w.rand.IntN(2000))*time.Millisecond, make(chan func())
	go func() {
		time.Sleep(delay)
		end := w.Fault(witness.Fault{Name: "kill -9 of the owner during a change, and loss of its disk", Repeats: witness.Unrecorded})
		_ = p.Stop(syscall.SIGKILL)
		lost <- end
	}()
	run()
	end := <-lost
	p.lose()
	w.progress(25 * time.Second)
	p.start()
	end()
}

// redeliver rejects the messages of a destination for a while, and then redelivers its dead letters.
func (w *world) redeliver() {
	w.repair()
	d := w.destinations[w.rand.IntN(len(w.destinations))]
	works := w.fail("/"+d.id(), http.StatusConflict, witness.Fault{Name: "rejecting receiver", Destination: d.id()})
	list := func() (ids []string) {
		if p := w.owner(time.Second); p != nil {
			ids, _ = lettersOf(w.t, p, d.id()) // None without an answer.
		}
		return ids
	}
	until(15*time.Second, func() bool { return len(list()) > 20 }) // A circuit may be open at first.
	works()
	time.Sleep(time.Second)
	begin, ids := w.Clock.Now(), list()
	w.t.Logf("%v: %d dead letters of %s are redelivered", w.Clock.Now().Round(time.Millisecond), len(ids), d.id())
	call := &witness.Call{Kind: witness.Redelivery}
	for _, id := range ids {
		call.Messages = append(call.Messages, witness.Message{ID: id, Due: []string{d.id()}})
	}
	name := fmt.Sprint("r", begin.Milliseconds())
	w.redelivery[d.namespace] = fmt.Sprintf(`---
apiVersion: posthorn.dev/v1beta1
kind: Redelivery
metadata: {name: %s, namespace: %s}
spec: {destinationRef: {name: %s}, deadLettersPerSecond: 50, match: {reasons: [Rejected]}}
`, name, d.namespace, d.name)
	w.write(w.pods)
	w.maybeLose(func() {
		if until(30*time.Second, func() bool {
			var o v1beta1.Redelivery
			return w.object("redeliveries", d.namespace, name, &o) == nil &&
				ended(o.Status.JobStatus, v1beta1.ConditionComplete, v1beta1.ReasonRedelivered) == nil
		}) {
			call.Status = http.StatusOK
		}
	})
	w.Sender.Write(witness.Line{Begin: begin, Call: call})
	delete(w.redelivery, d.namespace)
	w.write(w.pods)
}
