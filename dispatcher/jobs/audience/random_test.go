package audience

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/wait"
)

// random syncs one audience repeatedly, with random faults in between, and compares the
// result with a simple model: the members and their values.
type random struct {
	*rand.Rand
	t        *testing.T
	audience liveconfig.Audience
	disk     *disk
	log      *log
	rig      *rig
	history  []string

	members  map[string]string // the value of each user; "true" for an audience
	received map[string]string // the receiver's members after all calls so far
}

// After any snapshots, increments, faults and crashes, the receiver has the same members
// when a sync is sent, and it received neither repeated nor outdated calls.
func TestRandomSyncs(t *testing.T) {
	seeds := uint64(8)
	if testing.Short() {
		seeds = 4
	}
	for seed := range seeds {
		x := &random{
			Rand: rand.New(rand.NewPCG(seed, 2)), t: t, audience: config().Audiences[seed%2],
			disk: memory(), log: newLog(), members: map[string]string{}, received: map[string]string{},
		}
		x.rig = newRig(t, x.disk, x.log, nil)
		for range 12 {
			x.sync()
		}
		x.rig.end()
		if t.Failed() {
			t.Fatalf("seed %d: %s", seed, strings.Join(x.history, "\n"))
		}
	}
}

// sync sends one sync, with a random fault, until it completes.
func (x *random) sync() {
	q := Request{Namespace: "shop", Audience: x.audience, Full: x.IntN(3) > 0, AllowRemoval: 100, AllowEmpty: true, Resend: x.IntN(6) == 0}
	next := map[string]string{}
	if !q.Full {
		next = maps.Clone(x.members)
	}
	var lines strings.Builder
	for range x.IntN(60) {
		id, value := fmt.Sprintf("u%d", x.IntN(40)), "true"
		line := map[string]any{"userId": id}
		switch {
		case !q.Full && x.IntN(2) == 0:
			line["member"] = false
			delete(next, id)
			value = ""
		case x.audience.Kind == liveconfig.KindComputedTrait:
			line["value"] = x.IntN(3)
			value = fmt.Sprint(line["value"])
		}
		if value != "" {
			next[id] = value
		}
		text, _ := json.Marshal(line)
		lines.Write(append(text, '\n'))
	}
	switch x.IntN(7) {
	case 0:
		x.note("a bad line")
		if _, err := x.rig.Sync(x.t.Context(), q, strings.NewReader(lines.String()+"{")); err == nil {
			x.t.Error("sync with a bad line: got no error, want one")
		}
	case 1:
		x.note("a dry run")
		dry := q
		dry.DryRun = true
		if _, err := x.rig.Sync(x.t.Context(), dry, strings.NewReader(lines.String())); err != nil {
			x.t.Errorf("dry run: got error %v, want none", err)
		}
	case 2, 3, 4:
		x.crash(q, lines.String())
	case 5:
		x.stop(q, lines.String())
	}
	x.note(fmt.Sprintf("full %t, resend %t, to %d members", q.Full, q.Resend, len(next)))
	wait.True(x.rig.t, "the audience is up to date", func() bool {
		result, err := x.rig.Sync(x.t.Context(), q, strings.NewReader(lines.String()))
		if refusal, ok := errors.AsType[*admission.Refusal](err); ok && refusal.Code == "sync_in_progress" {
			return false
		}
		if err != nil || !result.Sent || result.Members != int64(len(next)) {
			x.t.Fatalf("sync: got Sent %t, %d members and error %v, want Sent and %d members\n%s", result.Sent, result.Members, err, len(next), strings.Join(x.history, "\n"))
		}
		return true
	})
	x.members = next
	x.check(q.Resend)
}

func (x *random) note(event string) { x.history = append(x.history, event) }

// crash sends a sync, and continues with the disk and the queue of one of its steps.
func (x *random) crash(q Request, lines string) {
	at, steps, power := x.IntN(30), 0, x.IntN(2) == 0 // A sync has about 30 steps.
	var killed *disk
	var before *log
	snapshot := func() {
		if steps++; steps-1 == at {
			killed, before = x.disk.crash(power), x.log.clone()
		}
	}
	x.disk.step.Store(&snapshot)
	if _, err := x.rig.Sync(x.t.Context(), q, strings.NewReader(lines)); err != nil {
		x.t.Error(err)
	}
	x.rig.end()
	x.disk.step.Store(nil)
	if killed != nil {
		x.disk, x.log = killed, before
		x.note(fmt.Sprintf("crash at step %d, with power loss: %t", at, power))
	}
	x.rig = newRig(x.t, x.disk, x.log, nil)
}

// stop sends a sync, rejects its calls in the queue, and restarts the Service.
func (x *random) stop(q Request, lines string) {
	x.note("stopped before its calls were in the queue")
	x.log.onAppend(func(int) error { return queue.ErrClosed })
	ctx, cancel := context.WithCancel(x.t.Context())
	cancel()
	if _, err := x.rig.Sync(ctx, q, strings.NewReader(lines)); err != nil {
		x.t.Error(err)
	}
	x.rig.end()
	x.log.onAppend(nil)
	x.rig = newRig(x.t, x.disk, x.log, nil)
}

// check reads the new calls. They contain no current value again, except with resend.
func (x *random) check(resend bool) {
	for _, text := range x.log.drain(x.t) {
		var user, key, value string
		_, _ = fmt.Sscanf(strings.Replace(text, "=", " ", 1), "%s %s %s", &user, &key, &value)
		if value == "false" || value == "<nil>" {
			value = ""
		}
		if want := x.members[user]; value != want || key != x.audience.Key {
			x.t.Errorf("call for %s: got %s=%q, want %s=%q", user, key, value, x.audience.Key, want)
		}
		if x.received[user] == value && !resend {
			x.t.Errorf("the call %s is repeated", text)
		}
		if x.received[user] = value; value == "" {
			delete(x.received, user)
		}
	}
	if d := gocmp.Diff(x.members, x.received); d != "" {
		x.t.Errorf("members of the receiver (-want +got):\n%s", d)
	}
}
