package controllers

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/health"
)

const (
	reportTimeout = 2 * time.Second
	// maxReportsAtOnce bounds the number of encoded reports in memory. A full report with 10,000
	// destinations has 4 MB.
	maxReportsAtOnce = 4
	// answerGrace is the time without an answer after which a ready pod counts as silent.
	answerGrace = 10 * time.Second
	// startGrace is the time that a pod has, after it became ready, to load the newest
	// configs.
	startGrace = 30 * time.Second
	// outdatedAfter is the time for which the last report of a pod that is not ready or does
	// not answer determines conditions; afterwards only its counters are used.
	outdatedAfter = 5 * time.Minute
	// downAfter is the time without a ready pod after which the conditions of all objects report it. A rolling
	// update of one pod takes less.
	downAfter = 2 * time.Minute
	// unownedAfter is the time after the last report of a store of a replicated log after which the store
	// counts as one without owner. A takeover takes up to 30 s.
	unownedAfter = time.Minute
)

// prober keeps the last state of every dispatcher pod. Each pod with a URL has its own
// goroutine, so a pod that hangs does not delay the others.
type prober struct {
	pods     Pods
	interval time.Duration
	client   *http.Client
	// changed is called after each change of the pods or their reports.
	changed func(reportChange)
	// silenced is called when a ready pod becomes silent, and when it answers again.
	silenced func(pod Pod, silent bool)
	atOnce   chan struct{}

	mu     sync.Mutex
	probes map[Pod]*probe
	// last has the last report by the name of the store, also of pods that are not ready; see probe.stores.
	last map[string]lastReport
	// slots is the number of slots of a replicated log; 0 for none.
	slots int
	// slotsSince is when the number of slots was read first, and unowned are the stores without owner.
	slotsSince time.Time
	unowned    map[string]bool
	// removed are the pods that the StatefulSet does not have any more, with their ledgers; nil if they are
	// not known. awaitsRemoved is true until the first look for them: without their ledgers, counters would fall.
	removed       map[string]*podreport.Index
	awaitsRemoved bool
	// expected are the names of the pods that the StatefulSet has or will have.
	expected []string
	// listed is true after the first list of pods, and notReady are the names of the pods in
	// the last list that are not ready.
	listed   bool
	notReady []string
	// readyAt is when a pod was last ready, at first the time of the first list, and down is true from downAfter
	// without one.
	readyAt time.Time
	down    bool
	after   time.Duration // downAfter
}

// lastReport is the last report of a pod, and the time of the last answer.
type lastReport struct {
	report   *podreport.Index
	answered time.Time
	// outdated is true after outdatedAfter without an answer.
	outdated bool
}

// probe is the state of one pod. The prober's mutex guards its fields, except for
// refresh. Only the pod's goroutine changes them.
type probe struct {
	stop    context.CancelFunc
	refresh chan struct{}
	// requested is true after the first request.
	requested bool
	// state is the merge of the pod's reports; nil until the first answer. For a pod of a replicated log,
	// slots are the merges of the reports of those that it owns.
	state *podreport.Index
	slots map[int]*podreport.Index
	// started is the start of the probe, and answered the time of the last answer; at first,
	// of the start.
	started, answered time.Time
	// failing is true if the last request failed, silent if all have for answerGrace.
	failing, silent bool
	// starting is true until startGrace after the pod became ready. It is false for the pods
	// that were ready when the operator started.
	starting bool
}

func newProber(pods Pods, interval time.Duration, transport http.RoundTripper, changed func(reportChange),
	silenced func(pod Pod, silent bool)) *prober {
	return &prober{
		pods: pods, interval: interval, changed: changed, silenced: silenced, after: downAfter,
		atOnce: make(chan struct{}, maxReportsAtOnce), probes: map[Pod]*probe{}, last: map[string]lastReport{},
		client: &http.Client{
			Transport:     transport,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// plainTransport returns a transport to dispatchers that run with --admin-auth=none.
func plainTransport() http.RoundTripper {
	return &http.Transport{DialContext: dialer(), MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute}
}

func dialer() func(context.Context, string, string) (net.Conn, error) {
	return (&net.Dialer{Timeout: reportTimeout}).DialContext
}

// Start requests reports until ctx is done. It implements manager.Runnable.
func (p *prober) Start(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	tick := time.NewTicker(p.interval)
	defer tick.Stop()
	for {
		pods, err := p.pods.List(ctx)
		if err == nil {
			p.follow(ctx, pods, &running)
		} else if ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "listing the dispatcher pods failed; using the last list")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// follow starts and stops probes so that each pod with a URL has one.
func (p *prober) follow(ctx context.Context, pods []Pod, running *sync.WaitGroup) {
	p.mu.Lock()
	now, first := time.Now(), !p.listed
	changed := first
	p.listed = true
	notReady := p.notReady
	p.notReady = nil
	pods = slices.DeleteFunc(slices.Clone(pods), func(pod Pod) bool {
		if pod.URL == "" || pod.Unready {
			p.notReady = append(p.notReady, pod.Name)
		}
		return pod.URL == ""
	})
	slices.Sort(p.notReady)
	if first || slices.ContainsFunc(pods, func(pod Pod) bool { return !pod.Unready }) {
		p.readyAt = now
	}
	changed = changed || !slices.Equal(notReady, p.notReady) // The last reports of more or fewer pods count.
	for pod, probe := range p.probes {
		if !slices.Contains(pods, pod) {
			probe.stop()
			delete(p.probes, pod)
			changed = true // A running Redelivery waits for the pod.
		}
	}
	for _, pod := range pods {
		if p.probes[pod] != nil {
			continue
		}
		probeCtx, stop := context.WithCancel(ctx)
		probe := &probe{stop: stop, refresh: make(chan struct{}, 1), started: now, answered: now, starting: !first}
		p.probes[pod] = probe
		running.Go(func() { p.poll(probeCtx, pod, probe) })
	}
	outdated := p.expire(now)
	p.updateMetrics()
	p.mu.Unlock()
	if changed || outdated {
		p.changed(reportChange{pods: changed, all: outdated})
	}
}

// expire marks old reports as outdated, finds the stores without owner and whether no pod is ready, and ends the
// grace of pods that started. It reports whether one of the first three has changed: the objects that wait for a pod that starts
// are rechecked anyway, and for the others its grace changes nothing. The mutex is held.
func (p *prober) expire(now time.Time) (changed bool) {
	for name, last := range p.last {
		if !last.outdated && now.Sub(last.answered) > outdatedAfter {
			last.outdated, changed = true, true
			p.last[name] = last
		}
	}
	if unowned := p.withoutOwner(now); !maps.Equal(unowned, p.unowned) {
		p.unowned, changed = unowned, true
	}
	if down := !p.readyAt.IsZero() && now.Sub(p.readyAt) >= p.after; down != p.down {
		p.down, changed = down, true
	}
	for _, probe := range p.probes {
		if probe.starting && now.Sub(probe.started) > startGrace {
			probe.starting = false
		}
	}
	return changed
}

// withoutOwner returns the stores of a replicated log that no pod has had for unownedAfter, although ready pods
// could have them. The mutex is held.
func (p *prober) withoutOwner(now time.Time) map[string]bool {
	unowned := map[string]bool{}
	since := func(name string) time.Time {
		if last := p.last[name]; last.report != nil {
			return last.answered
		}
		return p.slotsSince
	}
	for pod, probe := range p.probes {
		if !pod.Unready && probe.state != nil && probe.state.Replication.HasSlots() {
			for slot := range p.slots {
				unowned[slotStore(slot)] = true
			}
		}
	}
	maps.DeleteFunc(unowned, func(name string, _ bool) bool { return now.Sub(since(name)) <= unownedAfter })
	for pod, probe := range p.probes {
		for name, state := range probe.stores(pod) {
			if state != nil && p.owns(name, state) && (!pod.Unready || !probe.failing) {
				delete(unowned, name)
			}
		}
	}
	return unowned
}

// refreshNow polls every pod immediately. It is called when a change is expected. A
// pod is polled at most five times in an interval.
func (p *prober) refreshNow() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, probe := range p.probes {
		select {
		case probe.refresh <- struct{}{}:
		default:
		}
	}
}

// poll requests one pod's report in every interval, until ctx is done.
func (p *prober) poll(ctx context.Context, pod Pod, probe *probe) {
	tick, pause := time.NewTicker(p.interval), time.NewTicker(p.interval/5)
	defer tick.Stop()
	defer pause.Stop()
	for {
		report, err := p.fetch(ctx, pod, probe)
		if ctx.Err() != nil {
			return
		}
		p.record(ctx, pod, probe, report, err)
		pause.Reset(p.interval / 5)
		select {
		case <-ctx.Done():
			return
		case <-pause.C:
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-probe.refresh:
		}
	}
}

// +kubebuilder:rbac:urls=/report,verbs=get

// fetch requests the changes since a pod's last answer.
func (p *prober) fetch(ctx context.Context, pod Pod, probe *probe) (podreport.Changes, error) {
	client := &adminapi.Client{URL: pod.URL, HTTP: p.client, ReportSlots: p.atOnce, ReportTimeout: reportTimeout}
	return podreport.Fetch(ctx, client, probe.state, probe.slots)
}

// record stores the result of a request to a pod and calls changed and silenced.
func (p *prober) record(ctx context.Context, pod Pod, probe *probe, r podreport.Changes, err error) {
	now := time.Now()
	if pod.Unready {
		p.mu.Lock()
		defer p.mu.Unlock()
		// The last report remains from the time when the pod was ready: a pod that starts has not loaded
		// its objects yet.
		probe.requested, probe.failing = true, err != nil
		p.merge(pod, probe, r)
		return
	}
	p.mu.Lock()
	change := reportChange{pods: !probe.requested}
	wasSilent := probe.silent
	probe.requested = true
	if err != nil {
		reportFailures.Inc()
		if !probe.failing {
			log.FromContext(ctx).Info("dispatcher pod does not report", "pod", pod.Name, "error", err.Error())
		}
		probe.failing = true
		probe.silent = now.Sub(probe.answered) > answerGrace
	} else {
		if probe.failing {
			log.FromContext(ctx).Info("dispatcher pod reports again", "pod", pod.Name)
		}
		probe.failing, probe.silent, probe.answered = false, false, now
		merged := p.merge(pod, probe, r)
		merged.pods = merged.pods || change.pods
		change = merged
		for name, state := range probe.stores(pod) {
			if p.owns(name, state) && isReady(pod, name, state) {
				change.all = change.all || p.last[name].outdated || p.unowned[name]
				delete(p.unowned, name)
				p.last[name] = lastReport{report: state, answered: now}
			}
		}
	}
	silent := probe.silent
	p.updateMetrics()
	p.mu.Unlock()
	if silent != wasSilent {
		change.pods = true
		p.silenced(pod, silent)
	}
	if change.all || change.pods || len(change.namespaces)+len(change.numbers) > 0 {
		p.changed(change)
	}
}

// merge updates the states of a pod by its answer. The mutex is held.
func (p *prober) merge(pod Pod, probe *probe, r podreport.Changes) (change reportChange) {
	// next returns the state of a store after a report. A report equal to the predecessor's is no
	// change.
	next := func(name string, before *podreport.Index, report *adminapi.Report) (after *podreport.Index, all bool) {
		if report == nil {
			return before, false
		}
		if before == nil && !pod.Unready {
			before = p.last[name].report
		}
		after, namespaces := before.Merge(*report, p.like(probe))
		for _, namespace := range namespaces {
			if before.EqualExceptNumbers(after, namespace) {
				change.numbers = append(change.numbers, namespace)
			} else {
				change.namespaces = append(change.namespaces, namespace)
			}
		}
		return after, concernsAll(before, after)
	}
	if r.Report != nil && r.Report.Replication.HasSlots() {
		probe.state = podreport.NewIndex(*r.Report) // It has no namespaces.
		if p.slots == 0 {
			p.slotsSince = time.Now()
		}
		p.slots = max(p.slots, r.Report.Replication.Number)
	} else {
		probe.state, change.all = next(pod.Name, probe.state, r.Report)
	}
	slots := map[int]*podreport.Index{}
	for slot, report := range r.Slots {
		before := probe.slots[slot]
		after, all := next(slotStore(slot), before, report)
		if all { // Only the namespaces of the slot.
			for name := range after.Namespaces() {
				change.namespaces = append(change.namespaces, name)
			}
		}
		slots[slot] = after
		change.pods = change.pods || all || before == nil
	}
	change.pods = change.pods || len(slots) != len(probe.slots)
	probe.slots = slots
	return change
}

// slotStores begins the names of the stores of a replicated log.
const slotStores = "replicated log, slot "

// slotStore is the name of the store of a slot. Any of the pods can own it.
func slotStore(slot int) string { return fmt.Sprintf("%s%04d", slotStores, slot) }

func isSlot(store string) bool { return strings.HasPrefix(store, slotStores) }

// isReady reports whether the state of a store is used. A pod that has taken over a slot is ready before
// it has loaded the objects of the slot.
func isReady(pod Pod, store string, state *podreport.Index) bool {
	return !pod.Unready && (!isSlot(store) || state.Ready)
}

// stores returns the names and states of a pod's stores: the one of the pod, which its successor has,
// too, or the slots of a replicated log that it owns.
func (p *probe) stores(pod Pod) iter.Seq2[string, *podreport.Index] {
	return func(yield func(string, *podreport.Index) bool) {
		if p.state == nil || p.state.Replication == nil {
			yield(pod.Name, p.state)
			return
		}
		for slot, state := range p.slots {
			if !yield(slotStore(slot), state) {
				return
			}
		}
	}
}

// owns reports whether the state of a store is not older than the last one. A pod that has lost a
// store of a replicated log to another pod has a lower epoch. The mutex is held.
func (p *prober) owns(name string, state *podreport.Index) bool {
	if state == nil || state.Replication == nil {
		return true
	}
	last := p.last[name]
	// The epochs of a log that was created again begin with 1.
	return last.report == nil || last.outdated || state.Replication.Epoch >= last.report.Replication.Epoch
}

// like returns the state of another pod, or nil. The mutex is held.
func (p *prober) like(probe *probe) *podreport.Index {
	for _, other := range p.probes {
		if other != probe && other.state != nil {
			return other.state
		}
	}
	return nil
}

// updateMetrics sets the gauge of dispatcher pods. The mutex is held.
func (p *prober) updateMetrics() {
	ready, answering := 0, 0
	for pod, probe := range p.probes {
		if pod.Unready {
			continue
		}
		ready++
		if probe.state != nil && !probe.silent {
			answering++
		}
	}
	dispatchers.WithLabelValues("true").Set(float64(answering))
	dispatchers.WithLabelValues("false").Set(float64(ready - answering))
}

// reports returns the stores of the pods with their last reports, sorted by name. complete is false
// until every ready pod without a report has had a request, because a report that is not
// requested yet would look like a change.
func (p *prober) reports() (pods []health.Pod, complete bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pods = make([]health.Pod, 0, len(p.last)+p.slots)
	complete = p.listed && !p.awaitsRemoved
	// sharing are the pods whose stores have other names.
	ready, unready, sharing := map[string]bool{}, map[string]*podreport.Index{}, map[string]bool{}
	for pod, probe := range p.probes {
		sharing[pod.Name] = sharing[pod.Name] || probe.state != nil && probe.state.Replication != nil
		for name, state := range probe.stores(pod) {
			last := p.last[name]
			switch {
			case !p.owns(name, state):
			case isReady(pod, name, state):
				ready[name] = true
				complete = complete && (probe.requested || last.report != nil)
				pods = append(pods, health.Pod{Name: name, Report: last.report, Silent: probe.silent || probe.state == nil, Outdated: last.outdated,
					Starting: probe.starting})
			case !probe.failing:
				unready[name] = state
			}
		}
	}
	for name, report := range p.removed {
		if !ready[name] {
			pods = append(pods, health.Pod{Name: name, Report: report, Absent: true, Outdated: true, Removed: true})
			ready[name] = true // Its last report is not used.
		}
	}
	if p.down {
		pods = append(pods, health.Pod{Report: &podreport.Index{}, Absent: true, Outdated: true, Removed: true, NoneReady: true})
	}
	absent := slices.Collect(maps.Keys(p.last))
	for _, name := range p.notReady {
		if p.last[name].report == nil && !sharing[name] && !ready[name] {
			absent = append(absent, name)
		}
	}
	for _, name := range absent {
		if last := p.last[name]; !ready[name] {
			pods = append(pods, health.Pod{Name: name, Report: last.report, Configs: unready[name], Absent: true, Outdated: last.outdated,
				Unowned: p.unowned[name]})
		}
	}
	for slot := range p.slots {
		if name := slotStore(slot); !ready[name] && p.last[name].report == nil {
			pods = append(pods, health.Pod{Name: name, Configs: unready[name], Silent: true, Unowned: p.unowned[name]})
		}
	}
	slices.SortFunc(pods, func(a, b health.Pod) int { return strings.Compare(a.Name, b.Name) })
	return pods, complete
}

// setRemoved replaces the pods that the StatefulSet does not have any more.
func (p *prober) setRemoved(removed map[string]*podreport.Index) {
	p.mu.Lock()
	changed := p.awaitsRemoved || !maps.Equal(p.removed, removed)
	p.removed, p.awaitsRemoved = removed, false
	p.mu.Unlock()
	if changed {
		p.changed(reportChange{all: true, pods: true})
	}
}

// setExpected sets the names of the pods that the StatefulSet has or will have.
func (p *prober) setExpected(names []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expected = names
}

// endWait ends the wait for the removed pods after a failed look for them, so that it does not prevent all
// status writes.
func (p *prober) endWait() {
	p.mu.Lock()
	waited := p.awaitsRemoved
	p.awaitsRemoved = false
	p.mu.Unlock()
	if waited {
		p.changed(reportChange{all: true, pods: true})
	}
}

// lastReports returns the last reports of the pods that reported to this operator.
func (p *prober) lastReports() map[string]lastReport {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.last)
}

// storesOf returns the stores that can have data of a namespace. In a replicated log
// one slot has them. The slot of a namespace that none reports is not known: a slot without a report is
// returned for it, or any if there is none.
func storesOf(pods []health.Pod, namespace string) []health.Pod {
	if !slices.ContainsFunc(pods, func(pod health.Pod) bool { return isSlot(pod.Name) }) {
		return pods
	}
	has := func(x *podreport.Index) bool {
		return x.Namespace(namespace) != nil || x.Config(namespace).Namespace != ""
	}
	var list []health.Pod
	var known bool
	var substitute *health.Pod
	for _, pod := range pods {
		switch {
		case !isSlot(pod.Name):
			list = append(list, pod)
		case has(pod.Report) || has(pod.Configs):
			list, known = append(list, pod), true
		case substitute == nil || substitute.Report != nil && (pod.Report == nil || !substitute.Answers() && pod.Answers()):
			substitute = &pod
		}
	}
	if !known {
		list = append(list, *substitute)
	}
	return list
}

// concernsAll reports whether the states of a pod differ in a part that concerns every
// namespace.
func concernsAll(before, after *podreport.Index) bool {
	return before == nil || before.Ready != after.Ready || before.Storage.Pressure != after.Storage.Pressure
}
