package host

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/test/wait"
)

func TestConfigVersions(t *testing.T) {
	start := time.Now()
	problem := func(name string, v *configVersions, seconds int, announced map[string]int64, want bool) {
		t.Helper()
		now := start.Add(time.Duration(seconds) * time.Second)
		v.compare(now, announced)
		if text := v.problem(now, 30*time.Second); (text != "") != want {
			t.Errorf("%s: got the problem %q, want one: %v", name, text, want)
		}
	}
	v := newConfigVersions()
	v.set("a", 5)
	problem("the same number", &v, 0, map[string]int64{"a": 5}, false)
	problem("a higher number", &v, 1, map[string]int64{"a": 6}, false)
	problem("for less than the delay", &v, 30, map[string]int64{"a": 7}, false)
	problem("for the delay", &v, 31, map[string]int64{"a": 7}, true)
	v.set("a", 6)
	problem("each change within the delay", &v, 32, map[string]int64{"a": 8}, false)
	problem("and for the delay", &v, 62, map[string]int64{"a": 8}, true)
	problem("a config that no process has any more", &v, 63, nil, false)
	problem("an unknown namespace", &v, 64, map[string]int64{"b": 1}, false)
	problem("an unknown namespace for the delay", &v, 94, map[string]int64{"b": 1}, true)
	v.set("b", 1)
	v.remove("b")
	problem("a config that was deleted here", &v, 200, map[string]int64{"b": 1}, false)
	problem("it is still deleted", &v, 300, map[string]int64{"b": 1}, false)
	v.set("a", 2)
	for n := range announcedConfigs {
		v.set(fmt.Sprint("n", n), int64(n)+1)
	}
	var want []slots.ConfigNumber
	for n := announcedConfigs; n > 1; n-- {
		if n == 6 {
			want = append(want, slots.ConfigNumber{Namespace: "a", Number: 6}) // The highest one that it had.
		}
		want = append(want, slots.ConfigNumber{Namespace: fmt.Sprint("n", n-1), Number: int64(n)})
	}
	if diff := cmp.Diff(want, v.newest()); diff != "" {
		t.Errorf("newest configs (-want +got):\n%s", diff)
	}
}

// A process whose watch of the live configs hangs hands over its slots to one that has the changed config, and
// forwards calls, those with its new write keys included. Without another process it keeps and takes slots.
func TestWatchOfLiveConfigsHangs(t *testing.T) {
	namespaces := []string{"a", "b", "c", "d"}
	in := newInstallation(t, 4, append(namespaces, "e")...)
	in.configDelay = time.Second
	added := in.configs["e"]
	delete(in.configs, "e")
	first, _ := in.start(t, "first")
	if err := wait.Until(func() error {
		in.mu.Lock()
		defer in.mu.Unlock()
		if len(in.sinks) == 0 {
			return fmt.Errorf("the watch of the first process has not begun")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	second, stopSecond := in.start(t, "second")
	waitSlots(t, first, 2)
	waitSlots(t, second, 2)
	sent := 0
	send := func(l *Listeners, namespaces ...string) {
		for _, namespace := range namespaces {
			sent++
			in.call(t, l, namespace, fmt.Sprintf("%s-%d", namespace, sent), false)
		}
	}
	send(first, namespaces...)
	ready := func(l *Listeners, status int, problem string) {
		t.Helper()
		if err := wait.Until(func() error {
			if got, reason := fetchText(t, "http://"+l.AdminAddr().String()+"/readyz"); got != status || !strings.Contains(reason, problem) {
				return fmt.Errorf("got status %d with %q", got, reason)
			}
			return nil
		}); err != nil {
			t.Errorf("readyz: want status %d and %q: %v", status, problem, err)
		}
	}

	in.mu.Lock()
	hung, watches := in.sinks[0], in.sinks[1]
	in.mu.Unlock()
	watches.Set("e", added)
	send(second, "e")
	waitSlots(t, second, 4)
	waitSlots(t, first, 0)
	ready(first, http.StatusServiceUnavailable, "the live config of namespace e has number 1 in another process, and 0 in this one")
	ready(second, http.StatusOK, "")
	send(first, append(namespaces, "e")...)

	hung.Set("e", added)
	waitSlots(t, first, 2)
	waitSlots(t, second, 2)
	ready(first, http.StatusOK, "")

	live, err := in.configs["a"].Decode()
	if err != nil {
		t.Fatal(err)
	}
	watches.Set("a", liveconfigtest.Numbered(t, 2, live.Config))
	waitSlots(t, second, 4)
	stopSecond()
	waitSlots(t, first, 4)
	send(first, "b")
	in.waitDelivered(t, sent)
}
