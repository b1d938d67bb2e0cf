package delivery

import (
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Metrics are plain numbers in the objects that they describe, guarded by the engine's lock, and are converted to
// series on a scrape. So they cost almost nothing per message, and the series of a deleted object disappear with it.
// The totals of this file are collected through a registry; series.go writes the series of each destination.
var (
	attemptBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
	latencyBuckets = []float64{.001, .005, .025, .1, .5, 1, 5, 30, 60, 300, 1800, 7200, 14400}
)

// histogram counts durations; counts has one more entry than bounds, for longer durations.
type histogram struct {
	counts []uint64
	sum    float64
}

// bucket returns the index of a duration in the counts.
func bucket(bounds []float64, d time.Duration) int {
	i, _ := slices.BinarySearch(bounds, d.Seconds())
	return i
}

func (h *histogram) observe(bounds []float64, bucket int, d time.Duration) {
	if h.counts == nil {
		h.counts = make([]uint64, len(bounds)+1)
	}
	h.counts[bucket]++
	h.sum += d.Seconds()
}

func (h histogram) clone() histogram {
	h.counts = slices.Clone(h.counts)
	return h
}

// metric converts the histogram to a series.
func (h *histogram) metric(desc *prometheus.Desc, bounds []float64) prometheus.Metric {
	cumulative := make(map[float64]uint64, len(bounds))
	var n uint64
	for i, c := range h.counts {
		n += c
		if i < len(bounds) {
			cumulative[bounds[i]] = n
		}
	}
	return prometheus.MustNewConstHistogram(desc, n, h.sum, cumulative)
}

// failureKind is the reason of a failed attempt, and the status class of the response.
type failureKind struct {
	reason egress.Reason
	code   string
}

// codeClass is "2xx" for 200 to 299 and so on, "none" without a response.
func codeClass(status int) string {
	if classes := [...]string{1: "1xx", "2xx", "3xx", "4xx", "5xx"}; status >= 100 && status < 600 {
		return classes[status/100]
	}
	return "none"
}

// attemptCounts count requests by their result.
type attemptCounts struct {
	succeeded, failed uint64
	failures          map[failureKind]uint64
}

func (c *attemptCounts) add(r *ended) {
	if !r.outcome().Failed() {
		c.succeeded++
		return
	}
	if c.failures == nil {
		c.failures = map[failureKind]uint64{}
	}
	c.failed++
	c.failures[failureKind{r.Reason, codeClass(r.StatusCode)}]++
}

func (c attemptCounts) clone() attemptCounts {
	c.failures = maps.Clone(c.failures)
	return c
}

// endpointMetrics count the requests to an endpoint.
type endpointMetrics struct {
	attemptCounts
	duration histogram
}

// deadCounts count dead letters by reason.
type deadCounts map[string]uint64

func (c *deadCounts) add(reason string, n int64) {
	if *c == nil {
		*c = deadCounts{}
	}
	(*c)[reason] += uint64(n)
}

// destinationMetrics count the messages of a destination.
type destinationMetrics struct {
	// longNumbers counts requests for messages with long numbers.
	longNumbers uint64
	dead        deadCounts
	latency     histogram
}

// CountDead counts a dead letter of a destination ("namespace/name") that another part of the dispatcher made.
func (e *Engine) CountDead(destination, reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if d := e.registry.destinations[destination]; d != nil {
		d.countDead(reason, 1)
	}
}

// collector converts an engine's totals to series.
type collector struct{ e *Engine }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

var (
	descAttempts = desc("posthorn_delivery_attempts_total", "Requests to the endpoints of a namespace, by result (delivered, or the failure reason) and class of the response code (none: no response).", "namespace", "result", "code")
	descDead     = desc("posthorn_messages_dead_lettered_total", "Messages that became dead letters since the start, by reason.", "namespace", "reason")
	descDuration = desc("posthorn_delivery_attempt_duration_seconds", "Duration of requests to all endpoints.")
	descLatency  = desc("posthorn_message_delivery_latency_seconds", "Time from a message's acceptance to its delivery, over all destinations.")
	descInFlight = desc("posthorn_delivery_in_flight", "Requests in flight to all endpoints.")
	descLimit    = desc("posthorn_delivery_in_flight_limit", "Limit of requests in flight to all endpoints.")
	descWaiting  = desc("posthorn_delivery_first_attempt_age_seconds", "Age of the oldest message whose first attempt waits for this dispatcher: its endpoint is not paused, and its circuit, window and rate permit a request. 0 if there is none.")
	descWorkers  = desc("posthorn_delivery_workers", "Goroutines that send requests, by state: busy or idle.", "state")
)

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descAttempts, descDead, descDuration, descLatency, descInFlight, descLimit, descWaiting,
		descWorkers} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	add := func(d *prometheus.Desc, t prometheus.ValueType, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, value, labels...)
	}
	e := c.e
	namespaces := map[string]namespace{}
	e.mu.Lock()
	inFlight, limit, workers, idle := e.scheduler.inFlight, e.scheduler.limit(), e.workers.count, len(e.workers.idle)
	duration, latency := e.recorder.duration.clone(), e.recorder.latency.clone()
	for _, d := range e.registry.destinations {
		if _, ok := namespaces[d.namespace]; d.set != nil && !ok {
			namespaces[d.namespace] = namespace{attempts: d.owner.attempts.clone(), dead: maps.Clone(d.owner.dead)}
		}
	}
	e.mu.Unlock()
	add(descInFlight, prometheus.GaugeValue, float64(inFlight))
	add(descLimit, prometheus.GaugeValue, float64(limit))
	add(descWaiting, prometheus.GaugeValue, c.firstAttemptAge(c.e.o.Now()).Seconds())
	add(descWorkers, prometheus.GaugeValue, float64(workers-idle), "busy")
	add(descWorkers, prometheus.GaugeValue, float64(idle), "idle")
	ch <- duration.metric(descDuration, attemptBuckets)
	ch <- latency.metric(descLatency, latencyBuckets)
	for name, m := range namespaces {
		add(descAttempts, prometheus.CounterValue, float64(m.attempts.succeeded), name, "Delivered", "2xx")
		for kind, n := range m.attempts.failures {
			add(descAttempts, prometheus.CounterValue, float64(n), name, string(kind.reason), kind.code)
		}
		for reason, n := range m.dead {
			add(descDead, prometheus.CounterValue, float64(n), name, reason)
		}
	}
}

// firstAttemptAge is the age of the oldest message whose first attempt waits for the engine only. It
// grows with too few dispatchers, and not with a receiver that fails or is slow.
func (c collector) firstAttemptAge(now time.Time) time.Duration {
	e := c.e
	var oldest time.Time
	var unread []queue.LaneID
	e.mu.Lock()
	for _, l := range e.registry.lanes {
		if l.parked() || !l.hasWork() {
			continue
		}
		if closed, _ := l.sendable(now); !closed {
			continue
		}
		for i := range l.buffer[l.head:] {
			if d := &l.buffer[l.head+i]; d.Attempt == 0 {
				oldest = earlier(oldest, d.AcceptedAt)
			}
		}
		if l.more {
			unread = append(unread, l.id)
		}
	}
	e.mu.Unlock()
	for _, id := range unread {
		oldest = earlier(oldest, e.o.Store.OldestWaiting(id))
	}
	if oldest.IsZero() {
		return 0
	}
	return max(0, now.Sub(oldest))
}
