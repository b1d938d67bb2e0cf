package delivery

import (
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/dispatcher/delivery/retry"
	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Metrics are plain numbers in the objects that they describe, guarded by the engine's lock, and
// are converted to series on a scrape. So they cost almost nothing per message, and the series of a
// deleted object disappear with it.
var (
	attemptBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
	latencyBuckets = []float64{.001, .005, .025, .1, .5, 1, 5, 30, 60, 300, 1800, 7200, 14400}
)

// histogram counts durations; counts has one more entry than bounds, for longer durations.
type histogram struct {
	counts []uint64
	sum    float64
}

func (h *histogram) observe(bounds []float64, d time.Duration) {
	if h.counts == nil {
		h.counts = make([]uint64, len(bounds)+1)
	}
	i, _ := slices.BinarySearch(bounds, d.Seconds())
	h.counts[i]++
	h.sum += d.Seconds()
}

func (h histogram) clone() histogram {
	h.counts = slices.Clone(h.counts)
	return h
}

// metric converts the histogram to a series.
func (h *histogram) metric(desc *prometheus.Desc, bounds []float64, labels ...string) prometheus.Metric {
	cumulative := make(map[float64]uint64, len(bounds))
	var n uint64
	for i, c := range h.counts {
		n += c
		if i < len(bounds) {
			cumulative[bounds[i]] = n
		}
	}
	return prometheus.MustNewConstHistogram(desc, n, h.sum, cumulative, labels...)
}

// endpointMetrics count attempts.
type endpointMetrics struct {
	succeeded uint64
	failed    map[failureKind]uint64
	duration  histogram
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

func (m *endpointMetrics) attempt(r *ended) {
	m.duration.observe(attemptBuckets, r.duration)
	if !r.outcome().Failed() {
		m.succeeded++
		return
	}
	if m.failed == nil {
		m.failed = map[failureKind]uint64{}
	}
	m.failed[failureKind{r.Reason, codeClass(r.StatusCode)}]++
}

// destinationMetrics count messages.
type destinationMetrics struct {
	delivered uint64
	// longNumbers counts requests for messages with long numbers.
	longNumbers uint64
	dead        map[string]uint64 // by reason
	latency     histogram
}

func (m *destinationMetrics) settled(s outcome, age time.Duration) {
	switch s {
	case delivered:
		m.delivered++
		m.latency.observe(latencyBuckets, age)
	case rejected:
		m.buried(string(egress.Rejected), 1)
	case redirected:
		m.buried(string(egress.Redirected), 1)
	case timedOut:
		m.buried(string(retry.Expired), 1)
	}
}

func (m *destinationMetrics) buried(reason string, n int64) {
	if m.dead == nil {
		m.dead = map[string]uint64{}
	}
	m.dead[reason] += uint64(n)
}

// collector converts an engine's numbers to series.
type collector struct{ e *Engine }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

var (
	descAttempts = desc("posthorn_delivery_attempts_total", "Requests to endpoints, by result (delivered, or the failure reason) and class of the response code (none: no response).", "namespace", "destination", "endpoint", "result", "code")
	descLong     = desc("posthorn_delivery_long_numbers_total", "Requests whose message has numbers that JavaScript would change: sent as strings, or as digits if spec.body.numbers is Exact.", "namespace", "destination")
	descDuration = desc("posthorn_delivery_attempt_duration_seconds", "Duration of requests to endpoints.", "namespace", "destination", "endpoint")
	descOpen     = desc("posthorn_endpoint_circuit_open", "1 while an endpoint's circuit is open and only probes are sent to it.", "namespace", "destination", "endpoint")
	descWindow   = desc("posthorn_endpoint_window", "Current limit of requests in flight to an endpoint.", "namespace", "destination", "endpoint")
	descBusy     = desc("posthorn_endpoint_in_flight", "Requests in flight to an endpoint.", "namespace", "destination", "endpoint")

	descFirst   = desc("posthorn_endpoint_first_attempts_pending", "Messages without an attempt at an endpoint. Under AnyEndpoint another endpoint may have accepted them.", "namespace", "destination", "endpoint")
	descSkipped = desc("posthorn_endpoint_first_attempts_skipped_total", "Messages that were never sent to an endpoint of several under AnyEndpoint, because their retry window ended or the space was needed.", "namespace", "destination", "endpoint")

	descDelivered  = desc("posthorn_messages_delivered_total", "Messages that were delivered since the start.", "namespace", "destination")
	descDead       = desc("posthorn_messages_dead_lettered_total", "Messages that became dead letters since the start, by reason.", "namespace", "destination", "reason")
	descLatency    = desc("posthorn_message_delivery_latency_seconds", "Time from a message's acceptance to its delivery.", "namespace", "destination")
	descLetters    = desc("posthorn_dead_letters", "Dead letters that are stored.", "namespace", "destination")
	descLetterSize = desc("posthorn_dead_letter_bytes", "Disk space of the dead letters.", "namespace", "destination")
	descLedger     = desc("posthorn_lane_messages", "A lane's ledger: accepted = delivered + filtered + dead_lettered + discarded + pending. retrying is a part of pending. Under AnyEndpoint the endpoints share one, with an empty endpoint.", "namespace", "source", "destination", "endpoint", "state")

	descInFlight = desc("posthorn_delivery_in_flight", "Requests in flight to all endpoints.")
	descLimit    = desc("posthorn_delivery_in_flight_limit", "Limit of requests in flight to all endpoints.")
	descWorkers  = desc("posthorn_delivery_workers", "Goroutines that send requests, by state: busy or idle.", "state")
)

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descAttempts, descLong, descDuration, descOpen, descWindow, descBusy, descFirst, descSkipped, descDelivered, descDead, descLetters, descLetterSize, descLatency, descLedger, descInFlight, descLimit, descWorkers,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It locks for one destination at a time, so that a scrape
// does not delay deliveries.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	add := func(d *prometheus.Desc, t prometheus.ValueType, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, value, labels...)
	}
	e := c.e
	var destinations []*destination
	e.mu.Lock()
	inFlight, workers, idle := e.inFlight, e.workers, len(e.idle)
	for _, d := range e.namespaces {
		destinations = append(destinations, d...)
	}
	e.mu.Unlock()
	add(descInFlight, prometheus.GaugeValue, float64(inFlight))
	add(descLimit, prometheus.GaugeValue, float64(e.o.MaxInFlight))
	add(descWorkers, prometheus.GaugeValue, float64(workers-idle), "busy")
	add(descWorkers, prometheus.GaugeValue, float64(idle), "idle")
	for _, d := range destinations {
		m, endpoints, lanes := e.snapshot(d)
		add(descDelivered, prometheus.CounterValue, float64(m.delivered), d.namespace, d.name)
		if m.longNumbers > 0 {
			add(descLong, prometheus.CounterValue, float64(m.longNumbers), d.namespace, d.name)
		}
		for reason, n := range m.dead {
			add(descDead, prometheus.CounterValue, float64(n), d.namespace, d.name, reason)
		}
		stored := e.o.Store.DestinationStats(d.key)
		add(descLetters, prometheus.GaugeValue, float64(stored.DeadLetters), d.namespace, d.name)
		add(descLetterSize, prometheus.GaugeValue, float64(stored.DeadLetterBytes), d.namespace, d.name)
		ch <- m.latency.metric(descLatency, latencyBuckets, d.namespace, d.name)
		for _, ep := range endpoints {
			add(descAttempts, prometheus.CounterValue, float64(ep.metrics.succeeded), d.namespace, d.name, ep.name, "Delivered", "2xx")
			for kind, n := range ep.metrics.failed {
				add(descAttempts, prometheus.CounterValue, float64(n), d.namespace, d.name, ep.name, string(kind.reason), kind.code)
			}
			ch <- ep.metrics.duration.metric(descDuration, attemptBuckets, d.namespace, d.name, ep.name)
			open := 0.0
			if ep.open {
				open = 1
			}
			add(descOpen, prometheus.GaugeValue, open, d.namespace, d.name, ep.name)
			add(descWindow, prometheus.GaugeValue, float64(ep.window), d.namespace, d.name, ep.name)
			add(descBusy, prometheus.GaugeValue, float64(ep.inFlight), d.namespace, d.name, ep.name)
		}
		type ledgerKey struct{ source, endpoint string }
		ledgers, first, skipped := map[ledgerKey]queue.LaneStats{}, map[string]int64{}, map[string]int64{}
		groups := map[queue.LaneID]bool{}
		for _, id := range lanes {
			s := e.o.Store.LaneStats(id)
			first[id.Endpoint] += s.FirstAttempts
			skipped[id.Endpoint] += s.Skipped
			if id.Any {
				if groups[id.Group()] {
					continue
				}
				groups[id.Group()] = true
				id = id.Group()
				s = e.o.Store.LaneStats(id)
			}
			_, source := split(id.Source)
			sum := ledgers[ledgerKey{source, id.Endpoint}]
			sum.Ledger, sum.Retrying = sum.Plus(s.Ledger), sum.Retrying+s.Retrying
			ledgers[ledgerKey{source, id.Endpoint}] = sum
		}
		for _, ep := range endpoints {
			add(descFirst, prometheus.GaugeValue, float64(first[ep.name]), d.namespace, d.name, ep.name)
			add(descSkipped, prometheus.CounterValue, float64(skipped[ep.name]), d.namespace, d.name, ep.name)
		}
		for k, s := range ledgers {
			for state, n := range map[string]int64{
				"accepted": s.Accepted, "delivered": s.Delivered, "filtered": s.Filtered, "dead_lettered": s.DeadLettered,
				"discarded": s.Discarded, "pending": s.Pending, "retrying": s.Retrying,
			} {
				add(descLedger, prometheus.GaugeValue, float64(n), d.namespace, k.source, d.name, k.endpoint, state)
			}
		}
	}
}

type endpointSnapshot struct {
	name             string
	metrics          endpointMetrics
	open             bool
	window, inFlight int
}

// snapshot copies the metrics of a destination; nothing if it is missing in the config.
func (e *Engine) snapshot(d *destination) (destinationMetrics, []endpointSnapshot, []queue.LaneID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	m := d.metrics
	m.dead, m.latency = maps.Clone(m.dead), m.latency.clone()
	var endpoints []endpointSnapshot
	if d.set != nil {
		for _, t := range d.set.targets {
			s := endpointSnapshot{t.name, t.metrics, t.machine.Open(), t.machine.Window(), t.inFlight}
			s.metrics.failed, s.metrics.duration = maps.Clone(t.metrics.failed), t.metrics.duration.clone()
			endpoints = append(endpoints, s)
		}
	}
	var lanes []queue.LaneID
	for _, l := range d.lanes {
		lanes = append(lanes, l.id)
	}
	return m, endpoints, lanes
}
