package audience

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// random syncs one audience again and again, with everything that may go wrong in
// between, against the simplest model: who is a member, and of what value.
type random struct {
	*rand.Rand
	t        *testing.T
	audience liveconfig.Audience
	dir      string
	log      *log
	rig      *rig
	history  []string

	members map[string]string // by user, their values; "true" of an audience
	told    map[string]string // what the receiver makes of what it is told, in its order
}

// atStep, when set, is called where step is.
var atStep atomic.Pointer[func()]

// Whatever comes of snapshots, increments, faults and crashes: when a sync is
// answered and sent, the receiver has it as the members are, and on the way it was
// told nothing twice, nor what is not so in the end.
func TestRandomSyncs(t *testing.T) {
	step = func() {
		if f := atStep.Load(); f != nil {
			(*f)()
		}
	}
	defer func() { step = func() {} }()
	seeds := uint64(8)
	if testing.Short() {
		seeds = 4
	}
	for seed := range seeds {
		x := &random{
			Rand: rand.New(rand.NewPCG(seed, 2)), t: t, audience: config().Audiences[seed%2],
			dir: t.TempDir(), log: newLog(), members: map[string]string{}, told: map[string]string{},
		}
		x.rig = newRig(t, x.dir, x.log, nil)
		for range 12 {
			x.syncs()
		}
		x.rig.end()
		if t.Failed() {
			t.Fatalf("seed %d: %s", seed, strings.Join(x.history, "\n"))
		}
	}
}

// syncs sends one sync until it is through, whatever happens to it.
func (x *random) syncs() {
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
			x.t.Error("it is taken")
		}
	case 1:
		x.note("a dry run")
		dry := q
		dry.DryRun = true
		if _, err := x.rig.Sync(x.t.Context(), dry, strings.NewReader(lines.String())); err != nil {
			x.t.Error(err)
		}
	case 2, 3, 4:
		x.crash(q, lines.String())
	case 5:
		x.refuse(q, lines.String())
	}
	x.note(fmt.Sprintf("full %t, resend %t, to %d members", q.Full, q.Resend, len(next)))
	x.rig.eventually(func() bool {
		result, err := x.rig.Sync(x.t.Context(), q, strings.NewReader(lines.String()))
		if refusal, ok := errors.AsType[*Refusal](err); ok && refusal.Code == "sync_in_progress" {
			return false
		}
		if err != nil || !result.Sent || result.Members != int64(len(next)) {
			x.t.Fatalf("%+v %v\n%s", result, err, strings.Join(x.history, "\n"))
		}
		return true
	})
	x.members = next
	x.check(q.Resend)
}

func (x *random) note(what string) { x.history = append(x.history, what) }

// crash sends a sync and goes on with what was on disk, and in the queue, at one of its steps.
func (x *random) crash(q Request, lines string) {
	at, steps := x.IntN(18), 0 // of about as many
	killed, was := filepath.Join(x.t.TempDir(), "killed"), newLog()
	take := func() {
		if steps++; steps-1 != at {
			return
		}
		if err := os.CopyFS(killed, os.DirFS(x.dir)); err != nil {
			x.t.Error(err)
		}
		x.log.mu.Lock()
		was.messages, was.ids = slices.Clone(x.log.messages), maps.Clone(x.log.ids)
		x.log.mu.Unlock()
	}
	atStep.Store(&take)
	if _, err := x.rig.Sync(x.t.Context(), q, strings.NewReader(lines)); err != nil {
		x.t.Error(err)
	}
	x.rig.end()
	atStep.Store(nil)
	if _, err := os.Stat(killed); err == nil {
		x.dir, x.log = killed, was
		x.note(fmt.Sprintf("killed at step %d", at))
		if progress := glob(x.t, x.dir, progressFile); len(progress) > 0 && x.IntN(2) == 0 {
			x.note("the power was gone")
			if err := os.Truncate(progress[0], 0); err != nil {
				x.t.Error(err)
			}
		}
	}
	x.rig = newRig(x.t, x.dir, x.log, nil)
}

// refuse sends a sync whose calls the queue takes in part, and starts anew.
func (x *random) refuse(q Request, lines string) {
	x.note("stopped before its calls were in the queue")
	x.log.refuse(func(int) error { return queue.ErrClosed })
	ctx, cancel := context.WithCancel(x.t.Context())
	cancel()
	if _, err := x.rig.Sync(ctx, q, strings.NewReader(lines)); err != nil {
		x.t.Error(err)
	}
	x.rig.end()
	x.log.refuse(nil)
	x.rig = newRig(x.t, x.dir, x.log, nil)
}

// check lets the receiver read on. It hears nothing that it knows, unless asked for.
func (x *random) check(resend bool) {
	for _, text := range x.log.take(x.t) {
		var user, key, value string
		_, _ = fmt.Sscanf(strings.Replace(text, "=", " ", 1), "%s %s %s", &user, &key, &value)
		if value == "false" || value == "<nil>" {
			value = ""
		}
		if is := x.members[user]; value != is || key != x.audience.Key {
			x.t.Errorf("told %s, is %q", text, is)
		}
		if x.told[user] == value && !resend {
			x.t.Errorf("told %s once more", text)
		}
		if x.told[user] = value; value == "" {
			delete(x.told, user)
		}
	}
	if d := gocmp.Diff(x.members, x.told); d != "" {
		x.t.Errorf("(-members +told):\n%s", d)
	}
}
