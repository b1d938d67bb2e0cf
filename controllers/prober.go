package controllers

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

const (
	reportTimeout  = 2 * time.Second
	maxReportBytes = 64 << 20
	// maxReportsAtOnce bounds how many reports are held in memory as bytes.
	maxReportsAtOnce = 16
	// answerGrace is how long a pod's last report stands in for those that fail,
	// so that one lost packet does not turn conditions over.
	answerGrace = 10 * time.Second
)

// prober keeps the newest report of every ready dispatcher pod. Each pod is
// asked by a goroutine of its own, so a pod that hangs delays no other.
type prober struct {
	pods     Pods
	interval time.Duration
	client   *http.Client
	// changed is called with the namespaces whose report has changed; nil means all.
	changed func(namespaces []string)
	slots   chan struct{}

	mu     sync.Mutex
	probes map[Pod]*probe
	// listed is true once the pods are known.
	listed bool
}

// probe is one pod. Its fields belong to the prober's mutex, but soon and etag.
type probe struct {
	stop  context.CancelFunc
	soon  chan struct{}
	etag  string
	asked bool
	// report is nil while the pod does not answer.
	report *liveconfig.Report
	// answered is when it last did.
	answered time.Time
	failing  bool
}

// newProber makes a prober that asks by way of transport.
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

// plainTransport is the way to dispatchers that let everybody in.
func plainTransport() http.RoundTripper {
	return &http.Transport{DialContext: dialer(), MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute}
}

func dialer() func(context.Context, string, string) (net.Conn, error) {
	return (&net.Dialer{Timeout: reportTimeout}).DialContext
}

// Start asks pods until ctx is done. It implements manager.Runnable.
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
			log.FromContext(ctx).Error(err, "The dispatcher pods are unknown; the last ones known are asked")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// follow starts and ends probes so that there is one for each of pods.
func (p *prober) follow(ctx context.Context, pods []Pod, running *sync.WaitGroup) {
	p.mu.Lock()
	news := !p.listed
	p.listed = true
	for pod, probe := range p.probes {
		if !slices.Contains(pods, pod) {
			probe.stop()
			delete(p.probes, pod)
			news = true
		}
	}
	for _, pod := range pods {
		if p.probes[pod] != nil {
			continue
		}
		probeCtx, stop := context.WithCancel(ctx)
		probe := &probe{stop: stop, soon: make(chan struct{}, 1)}
		p.probes[pod] = probe
		running.Go(func() { p.ask(probeCtx, pod, probe) })
	}
	p.count()
	p.mu.Unlock()
	if news {
		p.changed(nil)
	}
}

// hurry has every pod asked before its turn, because news are expected; not more
// often than five times in an interval.
func (p *prober) hurry() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, probe := range p.probes {
		select {
		case probe.soon <- struct{}{}:
		default:
		}
	}
}

// ask asks one pod again and again.
func (p *prober) ask(ctx context.Context, pod Pod, probe *probe) {
	tick, pause := time.NewTicker(p.interval), time.NewTicker(p.interval/5)
	defer tick.Stop()
	defer pause.Stop()
	for {
		report, err := p.fetch(ctx, pod, probe)
		if ctx.Err() != nil {
			return
		}
		p.take(ctx, pod, probe, report, err)
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
		case <-probe.soon:
		}
	}
}

// +kubebuilder:rbac:urls=/report,verbs=get

// fetch returns a pod's report, or nil when it is the one that we have.
func (p *prober) fetch(ctx context.Context, pod Pod, probe *probe) (*liveconfig.Report, error) {
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, pod.URL+"/report", nil)
	if err != nil {
		return nil, err
	}
	if probe.etag != "" {
		request.Header.Set("If-None-Match", probe.etag)
	}
	response, err := p.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusNotModified:
		return nil, nil
	case http.StatusOK:
	default:
		return nil, fmt.Errorf("GET %s: %s", request.URL, response.Status)
	}
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, maxReportBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read report: %w", err)
	}
	if len(body) > maxReportBytes {
		return nil, fmt.Errorf("report is larger than %d bytes", maxReportBytes)
	}
	report, err := liveconfig.DecodeReport(body)
	if err != nil {
		return nil, fmt.Errorf("decode report: %w", err)
	}
	probe.etag = response.Header.Get("ETag")
	return &report, nil
}

// take notes what came of asking a pod and says what is new.
func (p *prober) take(ctx context.Context, pod Pod, probe *probe, report *liveconfig.Report, err error) {
	now := time.Now()
	p.mu.Lock()
	first := !probe.asked
	probe.asked = true
	all, namespaces := first, []string(nil)
	switch {
	case err != nil:
		reportFailures.Inc()
		if !probe.failing {
			log.FromContext(ctx).Info("A ready dispatcher pod does not report", "pod", pod.Name, "error", err.Error())
		}
		probe.failing = true
		if probe.report != nil && now.Sub(probe.answered) > answerGrace {
			probe.report, probe.etag, all = nil, "", true
		}
	default:
		if probe.failing {
			log.FromContext(ctx).Info("A dispatcher pod reports again", "pod", pod.Name)
		}
		probe.failing, probe.answered = false, now
		if report != nil {
			changed, everything := differences(probe.report, report)
			all, namespaces = all || everything, changed
			probe.report = report
		}
	}
	p.count()
	p.mu.Unlock()
	switch {
	case all:
		p.changed(nil)
	case len(namespaces) > 0:
		p.changed(namespaces)
	}
}

// count sets the gauge. The mutex is held.
func (p *prober) count() {
	answering := 0
	for _, probe := range p.probes {
		if probe.report != nil {
			answering++
		}
	}
	dispatchers.WithLabelValues("true").Set(float64(answering))
	dispatchers.WithLabelValues("false").Set(float64(len(p.probes) - answering))
}

// reports returns the pods with their newest reports, sorted by name. It is
// false as long as a pod has not been asked yet: what is not known must not
// look like a change.
func (p *prober) reports() ([]health.Pod, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pods := make([]health.Pod, 0, len(p.probes))
	settled := p.listed
	for pod, probe := range p.probes {
		settled = settled && probe.asked
		pods = append(pods, health.Pod{Name: pod.Name, Report: probe.report})
	}
	slices.SortFunc(pods, func(a, b health.Pod) int { return strings.Compare(a.Name, b.Name) })
	return pods, settled
}

// differences names the namespaces of which two reports differ, or says that they
// differ as a whole.
func differences(before, after *liveconfig.Report) (namespaces []string, all bool) {
	if before == nil || before.Ready != after.Ready || before.Storage.Pressure != after.Storage.Pressure {
		return nil, true
	}
	known := make(map[string]*liveconfig.NamespaceReport, len(before.Namespaces))
	for i := range before.Namespaces {
		known[before.Namespaces[i].Namespace] = &before.Namespaces[i]
	}
	for i := range after.Namespaces {
		t := &after.Namespaces[i]
		if old := known[t.Namespace]; old == nil || !reflect.DeepEqual(old, t) {
			namespaces = append(namespaces, t.Namespace)
		}
		delete(known, t.Namespace)
	}
	for gone := range known {
		namespaces = append(namespaces, gone)
	}
	return namespaces, false
}
