package controllers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/test/check"
)

// everyField compares unexported fields, too.
var everyField = cmp.Exporter(func(reflect.Type) bool { return true })

// newProbe adds a pod without a goroutine to a prober.
func newProbe(p *prober, pod Pod, starting bool) *probe {
	probe := &probe{stop: func() {}, started: time.Now(), answered: time.Now(), starting: starting}
	p.probes[pod] = probe
	return probe
}

func TestSilentPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		recorder := events.NewFakeRecorder(10)
		p := newProber(nil, time.Second, nil, func(reportChange) {}, silentPodEvents(recorder))
		pod := Pod{Name: "dispatcher-0", Workload: corev1.ObjectReference{Kind: "StatefulSet", Name: "dispatcher"}}
		probe := newProbe(p, pod, false)
		p.listed = true
		report := &adminapi.Report{Pod: "dispatcher-0"}
		state := func() (health.Pod, string) {
			t.Helper()
			pods, complete := p.reports()
			if !complete || len(pods) != 1 {
				t.Fatalf("reports: got %d pods, complete %v; want 1, true", len(pods), complete)
			}
			select {
			case event := <-recorder.Events:
				return pods[0], event
			default:
				return pods[0], ""
			}
		}
		for _, step := range []struct {
			name  string
			after time.Duration
			err   error
			want  health.Pod
			event string
		}{
			{"answers", 0, nil, health.Pod{Report: podreport.NewIndex(*report)}, ""},
			{"a lost request", answerGrace, errors.New("timeout"), health.Pod{Report: podreport.NewIndex(*report)}, ""},
			{"silent", time.Second, errors.New("timeout"), health.Pod{Report: podreport.NewIndex(*report), Silent: true},
				"Warning DispatcherSilent dispatcher pod dispatcher-0 is ready, but has not answered the operator for 10s; the statuses of its objects show its last report"},
			{"still silent", time.Second, errors.New("timeout"), health.Pod{Report: podreport.NewIndex(*report), Silent: true}, ""},
			{"silent for a long time", outdatedAfter, errors.New("timeout"), health.Pod{Report: podreport.NewIndex(*report), Silent: true, Outdated: true}, ""},
			{"answers again", time.Second, nil, health.Pod{Report: podreport.NewIndex(*report)}, "Normal DispatcherAnswers dispatcher pod dispatcher-0 answers the operator again"},
		} {
			time.Sleep(step.after)
			if step.err != nil {
				p.record(ctx, pod, probe, podreport.Changes{}, step.err)
			} else {
				p.record(ctx, pod, probe, podreport.Changes{Report: report}, nil)
			}
			p.expire(time.Now())
			got, event := state()
			step.want.Name = "dispatcher-0"
			if diff := cmp.Diff(step.want, got, everyField); diff != "" {
				t.Errorf("%s: pod (-want +got):\n%s", step.name, diff)
			}
			if event != step.event {
				t.Errorf("%s: event: got %q, want %q", step.name, event, step.event)
			}
		}
	})
}

// After downAfter without a ready pod, and not before, the reports contain it, until a pod is ready.
func TestNoReadyPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		var all atomic.Bool // Also called by the probe of the pod, which does not answer.
		p := newProber(nil, time.Second, nil, func(c reportChange) { all.CompareAndSwap(false, c.all) }, func(Pod, bool) {})
		p.client.Transport = roundTripper(func(*http.Request) (*http.Response, error) { return nil, errors.New("down") })
		ready, unready := Pod{Name: "d-0", URL: "http://d-0"}, Pod{Name: "d-0"}
		down := func() bool {
			pods, _ := p.reports()
			return slices.ContainsFunc(pods, func(pod health.Pod) bool { return pod.NoneReady })
		}
		for _, step := range []struct {
			name  string
			after time.Duration
			pods  []Pod
			want  bool
		}{
			{"the operator starts", 0, nil, false},
			{"no pod", downAfter - time.Second, []Pod{unready}, false},
			{"a rolling update", time.Second / 2, []Pod{ready}, false},
			{"the next one", downAfter - time.Second, nil, false},
			{"no pod for 2 minutes", time.Second, []Pod{unready}, true},
			{"none at all", time.Hour, nil, true},
			{"ready again", time.Second, []Pod{ready}, false},
		} {
			time.Sleep(step.after)
			before := down()
			all.Store(false)
			p.follow(ctx, step.pods, &running)
			check.Equal(t, step.name, down(), step.want)
			check.Equal(t, step.name+": all objects change", all.Load(), step.want != before)
		}
		cancel()
		running.Wait()
	})
}

// A pod that is not ready when the operator starts is known, so that sums without its share are
// recognized as incomplete.
func TestPodThatIsNotReady(t *testing.T) {
	p := newProber(nil, time.Second, nil, func(reportChange) {}, func(Pod, bool) {})
	p.follow(t.Context(), []Pod{{Name: "dispatcher-0"}}, nil)
	got, complete := p.reports()
	if diff := cmp.Diff([]health.Pod{{Name: "dispatcher-0", Absent: true}}, got); diff != "" || !complete {
		t.Errorf("complete %v, pods (-want +got):\n%s", complete, diff)
	}
}

// Of a pod that runs and is not ready, only the states of the live configs are used.
func TestUnreadyPod(t *testing.T) {
	ctx := t.Context()
	p := newProber(nil, time.Second, nil, func(reportChange) { t.Error("changed was called") }, func(Pod, bool) {
		t.Error("silenced was called")
	})
	ready, unready := podreport.NewIndex(adminapi.Report{Pod: "before"}), &adminapi.Report{Configs: []adminapi.ConfigReport{{Namespace: "shop", Number: 7}}}
	p.listed, p.notReady = true, []string{"dispatcher-0"}
	p.last["dispatcher-0"] = lastReport{report: ready, answered: time.Now()}
	pod := Pod{Name: "dispatcher-0", URL: "a", Unready: true}
	probe := newProbe(p, pod, false)
	for _, step := range []struct {
		name   string
		report *adminapi.Report
		err    error
		want   *podreport.Index
	}{
		{"refused", nil, errors.New("connection refused"), nil},
		{"answers", unready, nil, podreport.NewIndex(*unready)},
		{"unchanged", nil, nil, podreport.NewIndex(*unready)},
		{"refused again", nil, errors.New("connection refused"), nil},
	} {
		p.record(ctx, pod, probe, podreport.Changes{Report: step.report}, step.err)
		got, complete := p.reports()
		want := []health.Pod{{Name: "dispatcher-0", Report: ready, Configs: step.want, Absent: true}}
		if diff := cmp.Diff(want, got, everyField); diff != "" || !complete {
			t.Errorf("%s: complete %v, pods (-want +got):\n%s", step.name, complete, diff)
		}
	}
}

func TestPodURL(t *testing.T) {
	running := corev1.ContainerStatus{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
	waiting := corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}}
	for name, c := range map[string]struct {
		node, ip  string
		ready     corev1.ConditionStatus
		container corev1.ContainerStatus
		want      Pod
	}{
		"ready":              {"a", "10.0.0.7", corev1.ConditionTrue, running, Pod{URL: "https://10.0.0.7:8081"}},
		"running, not ready": {"a", "10.0.0.7", corev1.ConditionFalse, running, Pod{URL: "https://10.0.0.7:8081", Unready: true}},
		"container waits":    {"a", "10.0.0.7", corev1.ConditionFalse, waiting, Pod{Unready: true}},
		"running without IP": {"a", "", corev1.ConditionFalse, running, Pod{Unready: true}},
		"without a node":     {"", "", corev1.ConditionFalse, waiting, Pod{Unready: true, Unscheduled: true}},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &corev1.Pod{Spec: corev1.PodSpec{NodeName: c.node}, Status: corev1.PodStatus{
				PodIP: c.ip, ContainerStatuses: []corev1.ContainerStatus{c.container},
				Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: c.ready}},
			}}
			if diff := cmp.Diff(c.want, clusterPods{scheme: "https", port: 8081}.pod(pod)); diff != "" {
				t.Errorf("pod (-want +got):\n%s", diff)
			}
		})
	}
}

func TestReplacedPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		p := newProber(nil, time.Second, nil, func(reportChange) {}, func(Pod, bool) {})
		p.listed = true
		old, replacement := Pod{Name: "dispatcher-0", URL: "a"}, Pod{Name: "dispatcher-0", URL: "b"}
		first, second := &adminapi.Report{Pod: "first"}, &adminapi.Report{Pod: "second"}
		expect := func(step string, want health.Pod) {
			t.Helper()
			want.Name = "dispatcher-0"
			got, complete := p.reports()
			if diff := cmp.Diff([]health.Pod{want}, got, everyField); diff != "" || !complete {
				t.Errorf("%s: complete %v, pods (-want +got):\n%s", step, complete, diff)
			}
		}
		p.record(ctx, old, newProbe(p, old, false), podreport.Changes{Report: first}, nil)
		expect("ready", health.Pod{Report: podreport.NewIndex(*first)})
		delete(p.probes, old)
		expect("absent", health.Pod{Report: podreport.NewIndex(*first), Absent: true})
		time.Sleep(outdatedAfter + time.Second)
		p.expire(time.Now())
		expect("absent for a long time", health.Pod{Report: podreport.NewIndex(*first), Absent: true, Outdated: true})
		probe := newProbe(p, replacement, true)
		expect("replaced", health.Pod{Report: podreport.NewIndex(*first), Silent: true, Outdated: true, Starting: true})
		p.record(ctx, replacement, probe, podreport.Changes{Report: second}, nil)
		expect("the replacement answers", health.Pod{Report: podreport.NewIndex(*second), Starting: true})
		time.Sleep(startGrace + time.Second)
		p.expire(time.Now())
		expect("the replacement has started", health.Pod{Report: podreport.NewIndex(*second)})
	})
}

// A rolling update of many pods must not compute the statuses of all objects again for the end of
// each pod's grace. An outdated report changes statuses.
func TestEndOfTheGraceChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(nil, time.Second, nil, func(reportChange) {}, func(Pod, bool) {})
		started := newProbe(p, Pod{Name: "dispatcher-0"}, true)
		p.last["dispatcher-1"] = lastReport{answered: time.Now()}
		time.Sleep(startGrace + time.Second)
		if p.expire(time.Now()) || started.starting {
			t.Errorf("after the grace: got starting %v, want a pod that has started and no change", started.starting)
		}
		time.Sleep(outdatedAfter)
		if !p.expire(time.Now()) {
			t.Error("an outdated report: got no change, want one")
		}
	})
}

// ofOneSlot is an answer of a pod of a replicated log with one slot, with the report of the slot; nil for a standby.
func ofOneSlot(slot *adminapi.Report) podreport.Changes {
	c := podreport.Changes{Report: &adminapi.Report{Ready: true, Replication: &adminapi.ReplicationReport{Number: 1}},
		Slots: map[int]*adminapi.Report{}}
	if slot != nil {
		c.Slots[0] = slot
	}
	return c
}

// With a replicated log of one slot, the pods have one store. The statuses show the report of its owner, before
// and after a takeover, and standbys need not confirm anything.
func TestReplicatedLogHasOneStore(t *testing.T) {
	p := newProber(nil, time.Second, nil, func(reportChange) {}, func(Pod, bool) {})
	p.listed = true
	pods := []Pod{{Name: "dispatcher-0", URL: "a"}, {Name: "dispatcher-1", URL: "b"}}
	probes := []*probe{newProbe(p, pods[0], false), newProbe(p, pods[1], false)}
	owner := func(epoch uint64, accepted int64) *adminapi.Report {
		return &adminapi.Report{Ready: true, Replication: &adminapi.ReplicationReport{Epoch: epoch},
			Namespaces: []adminapi.NamespaceReport{{Namespace: "shop", Sources: []adminapi.SourceReport{{Name: "web", Accepted: accepted}}}}}
	}
	var standby *adminapi.Report
	silent := &adminapi.Report{}
	for _, step := range []struct {
		name    string
		reports [2]*adminapi.Report
		want    health.Pod
	}{
		{"an owner and a standby", [2]*adminapi.Report{owner(1, 5), standby}, health.Pod{Report: podreport.NewIndex(*owner(1, 5))}},
		{"no answer of the owner", [2]*adminapi.Report{silent, standby}, health.Pod{Report: podreport.NewIndex(*owner(1, 5))}},
		{"the standby has taken over", [2]*adminapi.Report{silent, owner(2, 7)}, health.Pod{Report: podreport.NewIndex(*owner(2, 7))}},
		{"the former owner does not know it", [2]*adminapi.Report{owner(1, 5), owner(2, 8)},
			health.Pod{Report: podreport.NewIndex(*owner(2, 8))}},
		{"two standbys", [2]*adminapi.Report{standby, standby}, health.Pod{Report: podreport.NewIndex(*owner(2, 8)), Absent: true}},
	} {
		for i, report := range step.reports {
			if report == silent {
				p.record(t.Context(), pods[i], probes[i], podreport.Changes{}, errors.New("timeout"))
				continue
			}
			p.record(t.Context(), pods[i], probes[i], ofOneSlot(report), nil)
		}
		got, complete := p.reports()
		step.want.Name = slotStore(0)
		if diff := cmp.Diff([]health.Pod{step.want}, got, everyField); diff != "" || !complete {
			t.Errorf("%s: complete %v, pods (-want +got):\n%s", step.name, complete, diff)
		}
	}
}

// An owner that is not ready is the one store of the log, not another dispatcher without a report: with
// one, the operator cannot know which configs the dispatchers have.
func TestOwnerOfALogThatIsNotReady(t *testing.T) {
	p := newProber(nil, time.Second, nil, func(reportChange) {}, func(Pod, bool) {})
	p.listed = true
	pod := Pod{Name: "dispatcher-0", URL: "a"}
	ready := &adminapi.Report{Ready: true, Replication: &adminapi.ReplicationReport{Epoch: 1}}
	first := newProbe(p, pod, false)
	p.record(t.Context(), pod, first, ofOneSlot(ready), nil)
	delete(p.probes, pod)
	pod.Unready, p.notReady = true, []string{pod.Name}
	unready := &adminapi.Report{Replication: &adminapi.ReplicationReport{Epoch: 1}}
	p.record(t.Context(), pod, newProbe(p, pod, false), ofOneSlot(unready), nil)
	got, complete := p.reports()
	want := []health.Pod{{Name: slotStore(0), Report: podreport.NewIndex(*ready), Configs: podreport.NewIndex(*unready), Absent: true}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(podreport.Index{})); diff != "" || !complete {
		t.Errorf("complete %v, pods (-want +got):\n%s", complete, diff)
	}
}

// The epochs of a log that was created again begin with 1. Its owner counts when the owner of the
// former log has not reported for outdatedAfter.
func TestLogThatWasCreatedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(nil, time.Second, nil, func(reportChange) {}, func(Pod, bool) {})
		p.listed = true
		pod := Pod{Name: "dispatcher-0", URL: "a"}
		probe := newProbe(p, pod, false)
		report := func(epoch uint64) *adminapi.Report {
			return &adminapi.Report{Ready: true, Replication: &adminapi.ReplicationReport{Epoch: epoch}}
		}
		expect := func(step string, want *adminapi.Report) {
			t.Helper()
			got, _ := p.reports()
			if len(got) != 1 || got[0].Report.Replication.Epoch != want.Replication.Epoch {
				t.Errorf("%s: got %+v, want one store with epoch %d", step, got, want.Replication.Epoch)
			}
		}
		p.record(t.Context(), pod, probe, ofOneSlot(report(7)), nil)
		expect("before", report(7))
		p.record(t.Context(), pod, probe, ofOneSlot(report(1)), nil)
		expect("a lower epoch", report(7))
		time.Sleep(outdatedAfter + time.Second)
		p.expire(time.Now())
		p.record(t.Context(), pod, probe, ofOneSlot(report(1)), nil)
		expect("a lower epoch for a long time", report(1))
	})
}

// A pod with several slots reports each slot by itself. The store of its slot determines the status of a namespace,
// also while the slot has no owner.
func TestSeveralSlots(t *testing.T) {
	slot := func(epoch uint64, namespaces ...string) *adminapi.Report {
		r := &adminapi.Report{Ready: true, Cursor: fmt.Sprint(epoch), Replication: &adminapi.ReplicationReport{Epoch: epoch}}
		for _, name := range namespaces {
			r.Namespaces = append(r.Namespaces, adminapi.NamespaceReport{Namespace: name, Revision: fmt.Sprint(epoch)})
		}
		return r
	}
	type slots = map[int]*adminapi.Report
	var answer podreport.Changes
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		report := answer.Report
		var number int
		if _, err := fmt.Sscanf(r.URL.Path, "/slots/%d/report", &number); err == nil {
			report = answer.Slots[number]
		}
		switch {
		case report == nil:
			http.Error(w, "not owned", http.StatusNotFound)
		case report.Cursor != "" && r.URL.Query().Get(adminapi.ReportCursor) == report.Cursor:
			w.WriteHeader(http.StatusNotModified)
		default:
			_ = json.NewEncoder(w).Encode(report)
		}
	}))
	defer server.Close()
	var last reportChange
	p := newProber(nil, time.Second, http.DefaultTransport, func(c reportChange) { last = c }, func(Pod, bool) {})
	p.listed = true
	pods := []Pod{{Name: "a", URL: server.URL}, {Name: "b", URL: server.URL}}
	probes := []*probe{newProbe(p, pods[0], false), newProbe(p, pods[1], false)}
	poll := func(pod int, owned slots, listed ...int) reportChange {
		t.Helper()
		last = reportChange{}
		answer = podreport.Changes{Report: &adminapi.Report{Ready: true, Cursor: fmt.Sprint(pod, listed),
			Replication: &adminapi.ReplicationReport{Number: 3, Slots: listed}}, Slots: owned}
		r, err := p.fetch(t.Context(), pods[pod], probes[pod])
		if err != nil {
			t.Fatal(err)
		}
		p.record(t.Context(), pods[pod], probes[pod], r, nil)
		return last
	}
	// expect checks the store of a namespace: its name, the revision, and its flags.
	expect := func(step, namespace, want string) {
		t.Helper()
		all, complete := p.reports()
		got := ""
		for _, pod := range storesOf(all, namespace) {
			got += fmt.Sprintf("%s %v", pod.Name, pod.Answers())
			if n := pod.Report.Namespace(namespace); n != nil {
				got += " " + n.Revision
			}
		}
		if got != want || !complete || len(all) != 3 {
			t.Errorf("%s: namespace %s: got %q of %d stores, complete %v; want %q of 3", step, namespace, got, len(all), complete, want)
		}
	}
	poll(0, slots{0: slot(1, "shop"), 1: slot(1, "news")}, 0, 1)
	poll(1, nil)
	expect("the first reports", "shop", slotStore(0)+" true 1")
	expect("the first reports", "news", slotStore(1)+" true 1")
	expect("slot 2 has no owner", "blog", slotStore(2)+" false")
	poll(1, slots{2: slot(1, "blog")}, 2)
	expect("slot 2 has an owner", "blog", slotStore(2)+" true 1")
	expect("a new namespace", "new", slotStore(0)+" true")
	if change := poll(1, slots{2: slot(1, "blog")}, 2); !reflect.DeepEqual(change, reportChange{}) {
		t.Errorf("equal reports: got change %+v, want none", change)
	}

	// A slot is in the list, and handed over before its report is read.
	if change := poll(0, slots{0: slot(1, "shop")}, 0, 1); !change.pods || len(change.namespaces) > 0 || change.all {
		t.Errorf("handed over: got change %+v, want one of the pods only", change)
	}
	expect("slot 1 has no owner", "news", slotStore(1)+" false 1")
	starting := slot(2)
	starting.Ready = false
	poll(1, slots{1: starting, 2: slot(1, "blog")}, 1, 2)
	expect("the owner of slot 1 loads its objects", "news", slotStore(1)+" false 1")
	ready := slot(2, "news")
	ready.Cursor = "loaded"
	if change := poll(1, slots{1: ready, 2: slot(1, "blog")}, 1, 2); !slices.Equal(slices.Compact(change.namespaces), []string{"news"}) || change.all {
		t.Errorf("taken over: got change %+v, want one of news", change)
	}
	expect("slot 1 was taken over", "news", slotStore(1)+" true 2")
	poll(0, slots{0: slot(1, "shop"), 1: slot(1, "news")}, 0, 1)
	expect("the former owner does not know it", "news", slotStore(1)+" true 2")
	if len(p.backlogs()) != 0 {
		t.Errorf("backlogs: got %v, want none: each pod can deliver the messages", p.backlogs())
	}
}

// A slot that no pod owns for unownedAfter has a state of its own, until a pod reports it: also a slot that was
// never reported. A pod that owns it and is not ready is an owner.
func TestSlotsWithoutOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(nil, time.Second, nil, func(reportChange) {}, func(Pod, bool) {})
		p.listed = true
		pods := []Pod{{Name: "a", URL: "a"}, {Name: "b", URL: "b"}}
		probes := []*probe{newProbe(p, pods[0], false), newProbe(p, pods[1], false)}
		var last reportChange
		p.changed = func(c reportChange) { last = c }
		poll := func(pod int, owned map[int]*adminapi.Report) {
			answer := podreport.Changes{Report: &adminapi.Report{Ready: true, Replication: &adminapi.ReplicationReport{Number: 2}}, Slots: owned}
			p.record(t.Context(), pods[pod], probes[pod], answer, nil)
		}
		owned := func(epoch uint64) map[int]*adminapi.Report {
			return map[int]*adminapi.Report{0: {Ready: true, Replication: &adminapi.ReplicationReport{Epoch: epoch}}}
		}
		expect := func(step string, changed bool, want ...bool) {
			t.Helper()
			if got := p.expire(time.Now()); got != changed {
				t.Errorf("%s: got a change %v, want %v", step, got, changed)
			}
			var got []bool
			all, _ := p.reports()
			for _, store := range all {
				got = append(got, store.Unowned)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: stores without owner (-want +got):\n%s", step, diff)
			}
		}
		poll(0, owned(1))
		poll(1, nil)
		expect("slot 0 has an owner", false, false, false)
		time.Sleep(unownedAfter)
		poll(0, owned(1))
		expect("slot 1 has none", false, false, false)
		time.Sleep(time.Nanosecond)
		expect("slot 1 has none for a minute", true, false, true)
		poll(0, nil)
		expect("slot 0 was released", false, false, true)
		time.Sleep(unownedAfter)
		expect("slot 0 has none for a minute", true, true, true)
		poll(1, owned(2))
		if !last.all {
			t.Errorf("slot 0 has an owner again: got change %+v, want one of all objects", last)
		}
		expect("slot 0 has an owner again", false, false, true)

		// The only pod with the slot is not ready.
		delete(p.probes, pods[1])
		pods[1].Unready = true
		probes[1] = newProbe(p, pods[1], false)
		poll(1, owned(2))
		time.Sleep(unownedAfter + 1)
		expect("the owner of slot 0 is not ready", false, false, true)
		delete(p.probes, pods[0]) // The only ready pod.
		expect("no pod is ready", true, false, false)
	})
}

// A report in which only numbers changed is distinguished, also for a full one.
func TestReportsOfNumbers(t *testing.T) {
	var got reportChange
	p := newProber(nil, time.Second, nil, func(c reportChange) { got = c }, func(Pod, bool) {})
	pod := Pod{Name: "dispatcher-0"}
	probe := newProbe(p, pod, false)
	now := time.Unix(1000, 0)
	report := func(delta bool, accepted int64, state adminapi.EndpointState) *adminapi.Report {
		return &adminapi.Report{Ready: true, Delta: delta, Namespaces: []adminapi.NamespaceReport{{
			Namespace: "shop",
			Sources:   []adminapi.SourceReport{{Name: "web", Accepted: accepted, LastAccepted: now.Add(time.Duration(accepted))}},
			Destinations: []adminapi.DestinationReport{{Name: "crm", Ledger: adminapi.Ledger{Delivered: accepted},
				Endpoints: []adminapi.EndpointReport{{Name: "primary", State: state, LastSuccess: now.Add(time.Duration(accepted))}}}},
		}}}
	}
	numbers, more := reportChange{numbers: []string{"shop"}}, reportChange{namespaces: []string{"shop"}}
	for _, step := range []struct {
		name   string
		report *adminapi.Report
		want   reportChange
	}{
		{"the first report", report(false, 1, adminapi.EndpointHealthy), reportChange{namespaces: []string{"shop"}, all: true, pods: true}},
		{"numbers", report(true, 2, adminapi.EndpointHealthy), numbers},
		{"numbers in a full report", report(false, 3, adminapi.EndpointHealthy), numbers},
		{"an open circuit", report(true, 4, adminapi.EndpointCircuitOpen), more},
		{"a removed namespace", &adminapi.Report{Ready: true, Delta: true, RemovedNamespaces: []string{"shop"}}, more},
	} {
		got = reportChange{}
		p.record(t.Context(), pod, probe, podreport.Changes{Report: step.report}, nil)
		if !reflect.DeepEqual(got, step.want) {
			t.Errorf("%s: got %+v, want %+v", step.name, got, step.want)
		}
	}
}

func TestConcernsAll(t *testing.T) {
	index := func(r adminapi.Report) *podreport.Index { return podreport.NewIndex(r) }
	tests := []struct {
		name          string
		before, after *podreport.Index
		want          bool
	}{
		{"the first report", nil, index(adminapi.Report{}), true},
		{"equal", index(adminapi.Report{Ready: true}), index(adminapi.Report{Ready: true}), false},
		{"ready", index(adminapi.Report{}), index(adminapi.Report{Ready: true}), true},
		{"disk full", index(adminapi.Report{}), index(adminapi.Report{Storage: adminapi.StorageReport{Pressure: true}}), true},
		{"disk used", index(adminapi.Report{}), index(adminapi.Report{Storage: adminapi.StorageReport{UsedBytes: 1}}), false},
		{"a namespace", index(adminapi.Report{}), index(adminapi.Report{Namespaces: []adminapi.NamespaceReport{{Namespace: "a"}}}), false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if got := concernsAll(test.before, test.after); got != test.want {
				t.Errorf("concerns all namespaces: got %v, want %v", got, test.want)
			}
		})
	}
}
