package host

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/test/check"
)

// A standby is not ready while it has lacked an object for lackingDelay. The reason names a few objects.
func TestLackedObjects(t *testing.T) {
	const (
		before = "the manifests of this standby lack what the log has, or have an older version: "
		after  = "; copy the manifests of the owner. If this process becomes the owner, it parks these objects"
	)
	start := time.Now()
	l := lackedSince{}
	for _, step := range []struct {
		after   time.Duration
		objects []string
		want    string
	}{
		{0, nil, ""},
		{0, []string{"Source b/web"}, ""},
		{lackingDelay - time.Second, []string{"Source b/web", "WebhookDestination b/crm"}, ""},
		{lackingDelay, []string{"WebhookDestination b/crm", "Source b/web"}, "Source b/web"},
		{2*lackingDelay - time.Second, []string{"Source b/web", "WebhookDestination b/crm"}, "Source b/web, WebhookDestination b/crm"},
		{2 * lackingDelay, []string{"WebhookDestination b/crm"}, "WebhookDestination b/crm"},
		{2 * lackingDelay, nil, ""},
		{2 * lackingDelay, []string{"Source b/web"}, ""},
		{3 * lackingDelay, []string{"a", "b", "c", "d", "e", "Source b/web"}, "Source b/web"},
		{4 * lackingDelay, []string{"a", "b", "c", "d", "e", "Source b/web"}, "Source b/web, a, b, c, d and 1 more object"},
		{4 * lackingDelay, []string{"a", "b", "c", "d", "e", "f", "Source b/web"}, "Source b/web, a, b, c, d and 1 more object"},
	} {
		now := start.Add(step.after)
		l.compare(now, step.objects)
		want := step.want
		if want != "" {
			want = before + want + after
		}
		check.Equal(t, fmt.Sprintf("problem after %v of a process that lacks %q", step.after, step.objects), l.problem(now), want)
	}
}

// A process that lacks an object leaves the slot to a ready standby that has all, but not for longer than a turn.
func TestClaimOfAProcessThatLacksObjects(t *testing.T) {
	now := time.Now()
	type beat = slots.Heartbeat
	ready := []slots.SlotCopied{{Ready: true}}
	for name, test := range map[string]struct {
		other    beat
		compared bool
		objects  []string
		unowned  time.Duration
		want     bool
	}{
		"it lacks nothing":                    {beat{Member: "other", Copies: ready}, true, nil, 0, true},
		"another one has all":                 {beat{Member: "other", Copies: ready}, true, []string{"Source b/web"}, 0, false},
		"it has not compared yet":             {beat{Member: "other", Copies: ready}, false, nil, 0, false},
		"alone, it has not compared":          {beat{Member: "own", Copies: ready, OldConfig: true}, false, nil, 0, true},
		"the other one lacks objects, too":    {beat{Member: "other", Copies: ready, OldConfig: true}, true, []string{"Source b/web"}, 0, true},
		"the other one restores its copy":     {beat{Member: "other", Copies: []slots.SlotCopied{{}}}, true, []string{"Source b/web"}, 0, true},
		"the clock of the other one is wrong": {beat{Member: "other", Copies: ready, ClockSkew: time.Hour.Milliseconds()}, true, []string{"Source b/web"}, 0, true},
		"the other one ends":                  {beat{Member: "other", Copies: ready, Leaving: true}, true, []string{"Source b/web"}, 0, true},
		"the other one waits": {beat{Member: "other", Copies: ready}, true, []string{"Source b/web"},
			slots.TakeTurn - time.Second, false},
		"the other one does not claim": {beat{Member: "other", Copies: ready}, true, []string{"Source b/web"}, slots.TakeTurn, true},
	} {
		clock := now
		members := slots.NewMembers(func() time.Time { return clock })
		l := newLacking(Options{Options: dispatcher.Options{Logger: slog.New(slog.DiscardHandler)}, Lacks: func(map[string][]byte) []string {
			return nil
		}}, members)
		if test.compared {
			l.take(now, test.objects)
		}
		members.View(1)
		clock = now.Add(test.unowned)
		members.Hear(beat{Member: "own", OldConfig: !l.isComplete(), Copies: ready, Clock: clock.UnixMilli()})
		if test.other.ClockSkew == 0 {
			test.other.Clock = clock.UnixMilli()
		}
		members.Hear(test.other)
		check.Equal(t, name+": it may claim the slot", l.mayClaim(), test.want)
		l.restart()
		check.Equal(t, name+": it has all objects before it has compared again", l.isComplete(), false)
	}
	var none *lacking
	check.Equal(t, "a process that compares nothing has all", none.isComplete() && none.mayClaim() && none.problem() == "", true)
}
