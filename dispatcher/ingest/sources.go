package ingest

import (
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/limits"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// SourceCounters are a Source's counters since the start of the Handler.
type SourceCounters struct {
	Rejected, Duplicates       int64
	LastAccepted, LastRejected time.Time
	// LastRejection is the reason in words, without request data. Calls refused because the Source
	// is disabled are only counted.
	LastRejection string
	// StoragePressure is true while calls are refused because storage is full: from the first
	// refusal until a call is stored, or until pressureMemory has passed without a call.
	StoragePressure bool
}

// Counters returns a Source's counters; its key is "namespace/name".
func (h *Handler) Counters(key string) (c SourceCounters) {
	v, ok := h.sources.Load(key)
	if !ok {
		return c
	}
	s := v.(*source)
	c = SourceCounters{
		Rejected: s.rejectedCalls.Load(), Duplicates: s.duplicateCalls.Load(),
		LastAccepted: unixNano(s.lastAccepted.Load()), LastRejected: unixNano(s.lastRejected.Load()),
	}
	if text := s.lastRejection.Load(); text != nil {
		c.LastRejection = *text
	}
	full := s.lastFull.Load()
	c.StoragePressure = full != 0 && h.Now().Sub(time.Unix(0, full)) < pressureMemory
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

// source is the runtime state of one Source, or of all requests without a known write key.
type source struct {
	key, namespace, name          string
	limits                        *limits.Source
	rejectedCalls, duplicateCalls atomic.Int64
	lastAccepted, lastRejected    atomic.Int64
	lastRejection                 atomic.Pointer[string]
	// lastFull is the time of the last refusal because of full storage; 0 after a call was stored.
	lastFull atomic.Int64
	log      sampler

	acceptedCount, duplicateCount prometheus.Counter
}

// sourceOf returns the runtime state of a Source.
func (h *Handler) sourceOf(ref liveconfig.SourceRef) *source {
	key := ref.Key()
	if s, ok := h.sources.Load(key); ok {
		return s.(*source)
	}
	namespace, name := ref.Namespace, ref.Source.Name
	s := &source{key: key, namespace: namespace, name: name, limits: limits.NewSource()}
	s.acceptedCount = h.metrics.calls.WithLabelValues(namespace, name, "accepted")
	s.duplicateCount = h.metrics.calls.WithLabelValues(namespace, name, "duplicate")
	actual, _ := h.sources.LoadOrStore(key, s)
	return actual.(*source)
}

// origins are the origins that some Source of a view allows.
type origins struct {
	view *liveconfig.View
	set  map[string]bool
}

// follow returns the origins of a view. After a config change it collects them again and drops the
// state of removed Sources.
func (h *Handler) follow(view *liveconfig.View) *origins {
	if o := h.origins.Load(); o != nil && o.view == view {
		return o
	}
	exists := map[string]bool{}
	o := &origins{view: view, set: map[string]bool{}}
	for _, namespace := range view.Namespaces() {
		c, _ := view.Namespace(namespace)
		for _, s := range c.Sources {
			exists[namespace+"/"+s.Name] = true
			for _, origin := range s.AllowedOrigins {
				o.set[strings.ToLower(origin)] = true
			}
		}
	}
	h.sources.Range(func(key, v any) bool {
		if !exists[key.(string)] {
			s := v.(*source)
			h.sources.Delete(key)
			h.metrics.forget(s.namespace, s.name)
		}
		return true
	})
	h.origins.Store(o)
	return o
}

func (o *origins) allow(origin string) bool { return o.set["*"] || o.set[strings.ToLower(origin)] }

// accepted counts stored calls.
func (s *source) accepted(now time.Time, n int, duplicates []bool) {
	repeated := 0
	for _, d := range duplicates {
		if d {
			repeated++
		}
	}
	s.lastFull.Store(0)
	s.duplicateCalls.Add(int64(repeated))
	s.duplicateCount.Add(float64(repeated))
	s.acceptedCount.Add(float64(n - repeated))
	s.lastAccepted.Store(now.UnixNano())
}

const logEvery = 10 * time.Second

// sampler limits how often a message is logged.
type sampler struct{ next, missed atomic.Int64 }

// due reports whether to log now, and how many messages were suppressed since the last one.
func (s *sampler) due(now time.Time) (missed int64, ok bool) {
	next := s.next.Load()
	if now.UnixNano() < next || !s.next.CompareAndSwap(next, now.Add(logEvery).UnixNano()) {
		s.missed.Add(1)
		return 0, false
	}
	return s.missed.Swap(0), true
}

// reject counts refused calls and logs a sample of the refusals.
func (h *Handler) reject(s *source, now time.Time, n int, code, message string) {
	s.rejectedCalls.Add(int64(n))
	if code != codeSourceDisabled { // This code describes neither the calls nor the Source after it is enabled again.
		text := code + ": " + message
		s.lastRejection.Store(&text)
		s.lastRejected.Store(now.UnixNano())
	}
	h.metrics.rejected.WithLabelValues(s.namespace, s.name, code).Add(float64(n))
	if missed, ok := s.log.due(now); ok {
		h.Logger.Warn("calls refused", "namespace", s.namespace, "source", s.name, "code", code, "message", message, "calls", n, "suppressed", missed)
	}
}

// countRejected counts the rejected calls of a batch.
func (h *Handler) countRejected(q *request, rejected []event.Rejection, now time.Time) {
	byCode := map[string]int{}
	for _, r := range rejected {
		byCode[r.Err.Code]++
	}
	last := rejected[len(rejected)-1].Err
	for code, n := range byCode {
		if code != last.Code {
			h.reject(q.source, now, n, code, "see the answer to the batch")
		}
	}
	h.reject(q.source, now, byCode[last.Code], last.Code, last.Message)
}

type metrics struct {
	calls, rejected *prometheus.CounterVec
	duration        *prometheus.HistogramVec
	succeeded       prometheus.Observer // duration of successful requests
	durable         prometheus.Histogram
}

func newMetrics(r prometheus.Registerer, held func() int64) metrics {
	m := metrics{
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "posthorn_ingest_calls_total", Help: "Calls that were answered with success, by result: accepted or duplicate.",
		}, []string{"namespace", "source", "result"}),
		rejected: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "posthorn_ingest_rejected_total", Help: "Calls that were refused, by code. A request that was refused as a whole counts as one call. The source label is empty when the write key is unknown.",
		}, []string{"namespace", "source", "code"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "posthorn_ingest_request_duration_seconds", Help: "Time to answer a request, by class of status.", Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14),
		}, []string{"status"}),
		durable: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "posthorn_ingest_durable_seconds", Help: "Duration of storing the calls of a request.", Buckets: prometheus.ExponentialBuckets(0.0001, 2, 15),
		}),
	}
	m.succeeded = m.duration.WithLabelValues("2xx")
	if r != nil {
		r.MustRegister(m.calls, m.rejected, m.duration, m.durable, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "posthorn_ingest_memory_bytes", Help: "Memory of the requests in progress, for bodies and messages.",
		}, func() float64 { return float64(held()) }))
	}
	return m
}

// forget deletes the series of a removed Source.
func (m *metrics) forget(namespace, name string) {
	labels := prometheus.Labels{"namespace": namespace, "source": name}
	m.calls.DeletePartialMatch(labels)
	m.rejected.DeletePartialMatch(labels)
}
