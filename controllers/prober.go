package controllers

import (
	"context"
	"errors"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
)

const (
	reportTimeout = 2 * time.Second
	// maxReportsAtOnce bounds the number of encoded reports in memory.
	maxReportsAtOnce = 16
	// answerGrace is how long a pod's last report remains valid while requests to the
	// pod fail, so that one lost packet does not change conditions.
	answerGrace = 10 * time.Second
)

// prober keeps the newest report of every ready dispatcher pod. Each pod has its own
// goroutine, so a pod that hangs does not delay the others.
type prober struct {
	pods     Pods
	interval time.Duration
	client   *http.Client
	// changed is called with the namespaces whose reports have changed; nil means all.
	changed func(namespaces []string)
	slots   chan struct{}

	mu     sync.Mutex
	probes map[Pod]*probe
	// listed is true after the first list of pods.
	listed bool
}

// probe is the state of one pod. The prober's mutex guards its fields, except for
// refresh and etag.
type probe struct {
	stop    context.CancelFunc
	refresh chan struct{}
	etag    string
	// requested is true after the first request.
	requested bool
	// report is nil while the pod does not answer.
	report *adminapi.Report
	// answered is the time of the last answer.
	answered time.Time
	failing  bool
}

func newProber(pods Pods, interval time.Duration, transport http.RoundTripper, changed func(namespaces []string)) *prober {
	return &prober{
		pods: pods, interval: interval, changed: changed,
		slots: make(chan struct{}, maxReportsAtOnce), probes: map[Pod]*probe{},
		client: &http.Client{
			Timeout:       reportTimeout,
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
		pods, err := p.pods.Ready(ctx)
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

// follow starts and stops probes so that each of the pods has one.
func (p *prober) follow(ctx context.Context, pods []Pod, running *sync.WaitGroup) {
	p.mu.Lock()
	changed := !p.listed
	p.listed = true
	for pod, probe := range p.probes {
		if !slices.Contains(pods, pod) {
			probe.stop()
			delete(p.probes, pod)
			changed = true
		}
	}
	for _, pod := range pods {
		if p.probes[pod] != nil {
			continue
		}
		probeCtx, stop := context.WithCancel(ctx)
		probe := &probe{stop: stop, refresh: make(chan struct{}, 1)}
		p.probes[pod] = probe
		running.Go(func() { p.poll(probeCtx, pod, probe) })
	}
	p.updateMetrics()
	p.mu.Unlock()
	if changed {
		p.changed(nil)
	}
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

// fetch returns a pod's report, or nil if it has not changed.
func (p *prober) fetch(ctx context.Context, pod Pod, probe *probe) (*adminapi.Report, error) {
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	client := adminapi.Client{URL: pod.URL, HTTP: p.client, ReportSlots: p.slots}
	report, etag, err := client.Report(ctx, probe.etag)
	if errors.Is(err, adminapi.ErrNotModified) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	probe.etag = etag
	return report, nil
}

// record stores the result of a request to a pod and calls changed.
func (p *prober) record(ctx context.Context, pod Pod, probe *probe, report *adminapi.Report, err error) {
	now := time.Now()
	p.mu.Lock()
	first := !probe.requested
	probe.requested = true
	all, namespaces := first, []string(nil)
	switch {
	case err != nil:
		reportFailures.Inc()
		if !probe.failing {
			log.FromContext(ctx).Info("dispatcher pod does not report", "pod", pod.Name, "error", err.Error())
		}
		probe.failing = true
		if probe.report != nil && now.Sub(probe.answered) > answerGrace {
			probe.report, probe.etag, all = nil, "", true
		}
	default:
		if probe.failing {
			log.FromContext(ctx).Info("dispatcher pod reports again", "pod", pod.Name)
		}
		probe.failing, probe.answered = false, now
		if report != nil {
			changed, everything := differences(probe.report, report)
			all, namespaces = all || everything, changed
			probe.report = report
		}
	}
	p.updateMetrics()
	p.mu.Unlock()
	switch {
	case all:
		p.changed(nil)
	case len(namespaces) > 0:
		p.changed(namespaces)
	}
}

// updateMetrics sets the gauge of dispatcher pods. The mutex is held.
func (p *prober) updateMetrics() {
	answering := 0
	for _, probe := range p.probes {
		if probe.report != nil {
			answering++
		}
	}
	dispatchers.WithLabelValues("true").Set(float64(answering))
	dispatchers.WithLabelValues("false").Set(float64(len(p.probes) - answering))
}

// reports returns the pods with their newest reports, sorted by name. complete is
// false until every pod has had a request, because a report that is not requested yet
// would look like a change.
func (p *prober) reports() (pods []health.Pod, complete bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pods = make([]health.Pod, 0, len(p.probes))
	complete = p.listed
	for pod, probe := range p.probes {
		complete = complete && probe.requested
		pods = append(pods, health.Pod{Name: pod.Name, Report: probe.report})
	}
	slices.SortFunc(pods, func(a, b health.Pod) int { return strings.Compare(a.Name, b.Name) })
	return pods, complete
}

// differences returns the namespaces in which two reports differ. all is true if the
// reports differ in a part that concerns every namespace.
func differences(before, after *adminapi.Report) (namespaces []string, all bool) {
	if before == nil || before.Ready != after.Ready || before.Storage.Pressure != after.Storage.Pressure {
		return nil, true
	}
	old := make(map[string]*adminapi.NamespaceReport, len(before.Namespaces))
	for i := range before.Namespaces {
		old[before.Namespaces[i].Namespace] = &before.Namespaces[i]
	}
	for i := range after.Namespaces {
		n := &after.Namespaces[i]
		if o := old[n.Namespace]; o == nil || !reflect.DeepEqual(o, n) {
			namespaces = append(namespaces, n.Namespace)
		}
		delete(old, n.Namespace)
	}
	for removed := range old {
		namespaces = append(namespaces, removed)
	}
	return namespaces, false
}
