package admission

import (
	"cmp"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
)

// Source is the runtime state of one Source, or of all requests without a known write key.
type Source struct {
	Namespace, Name string
	// Limits are its shares of memory, CPU and disk.
	Limits *limits.Source

	key                           string
	rejectedCalls, duplicateCalls atomic.Int64
	lastAccepted, lastRejected    atomic.Int64
	lastRejection                 atomic.Pointer[string]
	defects                       [len(event.DefectNames)]atomic.Int64
	// lastFull is the time of the last refusal because of full storage; 0 after a call was stored.
	lastFull atomic.Int64
	changed  *changes.Object
	log      Sampler

	acceptedCount, duplicateCount prometheus.Counter
}

// Key is the Source's name in the queue: "namespace/name".
func (s *Source) Key() string { return s.key }

// sourceOf returns the runtime state of a Source.
func (g *Gate) sourceOf(ref liveconfig.SourceRef) *Source {
	key := ref.Key()
	if s, ok := g.sources.Load(key); ok {
		return s.(*Source)
	}
	namespace, name := ref.Namespace, ref.Source.Name
	share, _ := g.shares.LoadOrStore(namespace, new(limits.Share))
	s := &Source{key: key, Namespace: namespace, Name: name, Limits: limits.NewSource(share.(*limits.Share)),
		changed: g.Changes.Object(changes.Sources, namespace, name)}
	s.acceptedCount = g.metrics.calls.WithLabelValues(namespace, name, "accepted")
	s.duplicateCount = g.metrics.calls.WithLabelValues(namespace, name, "duplicate")
	if c, ok := g.counters.Load(key); ok {
		s.restore(c.(storedCounters))
	}
	actual, _ := g.sources.LoadOrStore(key, s)
	return actual.(*Source)
}

// forgetSources removes the state and the series of Sources that a view lacks.
func (g *Gate) forgetSources(view *liveconfig.View) {
	exists := map[string]bool{}
	for _, namespace := range view.Namespaces() {
		c, _ := view.Namespace(namespace)
		for _, s := range c.Sources {
			exists[namespace+"/"+s.Name] = true
		}
	}
	g.sources.Range(func(key, v any) bool {
		if !exists[key.(string)] {
			s := v.(*Source)
			g.counters.Store(key, g.countersOf(s.key))
			g.sources.Delete(key)
			g.metrics.forget(s.Namespace, s.Name)
		}
		return true
	})
}

// Accepted counts stored calls; duplicates is true for each repetition.
func (s *Source) Accepted(now time.Time, n int, duplicates []bool) {
	repeated := 0
	for _, d := range duplicates {
		if d {
			repeated++
		}
	}
	if s.lastFull.Swap(0) != 0 {
		s.changed.Transition()
	}
	s.duplicateCalls.Add(int64(repeated))
	s.duplicateCount.Add(float64(repeated))
	s.acceptedCount.Add(float64(n - repeated))
	s.lastAccepted.Store(now.UnixNano())
	s.changed.Numbers()
}

// Defects counts calls by their defects, in the order of event.DefectNames.
type Defects [len(event.DefectNames)]int64

// Add counts the defects of a call.
func (d *Defects) Add(of event.Defects) {
	for i := range d {
		d[i] += int64(of >> i & 1)
	}
}

// CountDefects counts the defects of accepted calls of a Source.
func (g *Gate) CountDefects(s *Source, defects Defects) {
	for i, n := range defects {
		if n > 0 {
			s.defects[i].Add(n)
			g.metrics.defects.WithLabelValues(s.Namespace, s.Name, event.DefectNames[i]).Add(float64(n))
		}
	}
}

// StorageFull records a refusal because of full storage.
func (s *Source) StorageFull(now time.Time) {
	before := s.lastFull.Swap(now.UnixNano())
	if before == 0 || now.Sub(time.Unix(0, before)) >= pressureMemory { // The report had no pressure.
		s.changed.Transition()
	}
}

// Reject counts n refused calls of a Source and logs a sample of the refusals. message must not
// contain request data.
func (g *Gate) Reject(s *Source, now time.Time, n int, code, message string) {
	s.rejectedCalls.Add(int64(n))
	if code != CodeSourceSuspended { // This code describes neither the calls nor the Source after its resumption.
		text := code + ": " + message
		s.lastRejection.Store(&text)
		s.lastRejected.Store(now.UnixNano())
	}
	s.changed.Numbers()
	g.metrics.rejected.WithLabelValues(s.Namespace, s.Name, code).Add(float64(n))
	if missed, ok := s.log.Due(now); ok {
		g.Logger.Warn("calls refused", "namespace", s.Namespace, "source", s.Name, "code", code, "message", message, "calls", n,
			"suppressed", missed)
	}
}

// SourceCounters are a Source's counters; see RecoverCounters.
type SourceCounters struct {
	Rejected, Duplicates       int64
	Defects                    adminapi.CallDefects
	LastAccepted, LastRejected time.Time
	// LastRejection is the reason in words, without request data. Calls refused because the Source
	// is suspended are only counted.
	LastRejection string
	// StoragePressure is true while calls are refused because storage is full: from the first
	// refusal until a call is stored, or until PressureEnds if no further call arrives.
	StoragePressure bool
	PressureEnds    time.Time
}

// Counters returns a Source's counters; its key is "namespace/name".
func (g *Gate) Counters(key string) (c SourceCounters) {
	v, ok := g.sources.Load(key)
	if !ok { // No call since the start.
		if recovered, ok := g.counters.Load(key); ok {
			r := recovered.(storedCounters)
			c = SourceCounters{Rejected: r.Rejected, Duplicates: r.Duplicates, LastAccepted: r.LastAccepted, LastRejected: r.LastRejected,
				LastRejection: r.LastRejection, Defects: r.Defects}
		}
		return c
	}
	s := v.(*Source)
	c = SourceCounters{
		Rejected: s.rejectedCalls.Load(), Duplicates: s.duplicateCalls.Load(),
		LastAccepted: unixNano(s.lastAccepted.Load()), LastRejected: unixNano(s.lastRejected.Load()),
	}
	for i, n := range c.Defects.ByName() {
		*n = s.defects[i].Load()
	}
	if text := s.lastRejection.Load(); text != nil {
		c.LastRejection = *text
	}
	if full := s.lastFull.Load(); full != 0 {
		c.PressureEnds = time.Unix(0, full).Add(pressureMemory)
		c.StoragePressure = g.Now().Before(c.PressureEnds)
	}
	return c
}

// pressureMemory is how long a refusal because of full storage is reported when no further call
// arrives.
const pressureMemory = 5 * time.Minute

func unixNano(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}

// SetShares sets the dispatcher's shares of the limits of all Sources; nil gives it the whole limits.
func (g *Gate) SetShares(shares *liveconfig.PodShares) { g.limits.Store(shares) }

// TakeCalls takes n calls from the dispatcher's share of a Source's rate and returns 0, or takes none and returns the time
// to wait; see limits.CallRate.
func (g *Gate) TakeCalls(ref liveconfig.SourceRef, s *Source, n int) time.Duration {
	if ref.Source.CallsPerSecond == 0 {
		return 0
	}
	share := g.limits.Load().For(ref.Namespace, sourceRef(ref.Source.Name))
	if share == 0 {
		return noShareWait
	}
	burst := cmp.Or(ref.Source.Burst, 2*ref.Source.CallsPerSecond)
	return s.Limits.Calls.Take(share.Rate(ref.Source.CallsPerSecond), max(1, share.Count(burst)), g.Now, n)
}

// noShareWait is the time that callers wait for a dispatcher without a share, which is not ready.
const noShareWait = 2 * time.Second

// LimitUse returns the use of a Source's rate, for its report.
func (g *Gate) LimitUse(namespace string, source *liveconfig.Source) (use adminapi.LimitUse) {
	v, ok := g.sources.Load(namespace + "/" + source.Name)
	shares := g.limits.Load()
	if !ok || source.CallsPerSecond == 0 || !shares.Divided() {
		return use
	}
	s := v.(*Source)
	rate, refused := s.Limits.Calls.Use(g.Now())
	used := rate / float64(source.CallsPerSecond)
	if !refused && !shares.IsReported(used) {
		return use
	}
	s.changed.TransitionAt(g.Now().Add(liveconfig.LimitUseFor)) // It ends without an event.
	share := float64(shares.For(namespace, sourceRef(source.Name))) / float64(liveconfig.Whole)
	return adminapi.LimitUse{Used: int64(used * 1e6), Limited: refused && used >= 0.9*share}
}

func sourceRef(name string) liveconfig.Ref {
	return liveconfig.Ref{Section: liveconfig.SectionSources, Name: name}
}

const logEvery = 10 * time.Second

// Sampler limits how often a message is logged.
type Sampler struct{ next, missed atomic.Int64 }

// Due reports whether to log now, and how many messages were suppressed since the last one.
func (s *Sampler) Due(now time.Time) (missed int64, ok bool) {
	next := s.next.Load()
	if now.UnixNano() < next || !s.next.CompareAndSwap(next, now.Add(logEvery).UnixNano()) {
		s.missed.Add(1)
		return 0, false
	}
	return s.missed.Swap(0), true
}

type metrics struct{ calls, rejected, defects *prometheus.CounterVec }

func newMetrics(r prometheus.Registerer) metrics {
	m := metrics{
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "posthorn_ingest_calls_total", Help: "Calls that were answered with success, by result: accepted or duplicate.",
		}, []string{"namespace", "source", "result"}),
		rejected: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "posthorn_ingest_rejected_total", Help: "Calls that were refused, by code. A request that was refused as a whole counts as one call. The source label is empty when the write key is unknown.",
		}, []string{"namespace", "source", "code"}),
		defects: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "posthorn_ingest_defects_total", Help: "Accepted calls with a defect: timestamp, originalTimestamp or sentAt is not a time, clock (sentAt is too far from the time of receipt to correct the timestamp), or encoding (bytes that are not UTF-8 were replaced).",
		}, []string{"namespace", "source", "defect"}),
	}
	if r != nil {
		r.MustRegister(m.calls, m.rejected, m.defects)
	}
	return m
}

// forget deletes the series of a removed Source.
func (m *metrics) forget(namespace, name string) {
	labels := prometheus.Labels{"namespace": namespace, "source": name}
	m.calls.DeletePartialMatch(labels)
	m.rejected.DeletePartialMatch(labels)
	m.defects.DeletePartialMatch(labels)
}
