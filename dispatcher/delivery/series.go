package delivery

import (
	"iter"
	"maps"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/internal/promtext"
)

// destinationSeries has the values of a destination's series.
type destinationSeries struct {
	labels    promtext.Labels
	metrics   destinationMetrics
	stats     queue.DestinationStats
	ended     queue.Ledger // since the start
	retrying  int64
	oldestAge time.Duration
	endpoints []endpointSeries
	lanes     map[laneLabels]queue.LaneStats // with detail only
}

// endpointSeries has the values of an endpoint's series.
type endpointSeries struct {
	name             string
	labels           promtext.Labels
	metrics          endpointMetrics
	open             bool
	window, inFlight int
	// With detail only.
	first, skipped int64
}

// laneLabels identify a ledger. The lanes of a group share one, without an endpoint.
type laneLabels struct{ source, endpoint string }

// family is a metric with series of each destination.
type family struct {
	name  string
	kind  promtext.Kind
	help  string
	write func(*promtext.Writer, *destinationSeries)
}

// families has 8 series of each destination and 4 of each endpoint, so that a pod with ten thousand
// destinations has 120,000 series (12 MB).
var families = []family{
	{"posthorn_destination_messages_total", promtext.Counter, "Messages whose processing ended since the start, by outcome.", func(w *promtext.Writer, d *destinationSeries) {
		WriteOutcomes(w, d.labels, d.ended)
	}},
	{"posthorn_destination_pending_messages", promtext.Gauge, "Messages that are neither delivered nor ended otherwise.",
		func(w *promtext.Writer, d *destinationSeries) {
			w.Sample(float64(d.stats.Ledger.Pending), d.labels)
		}},
	{"posthorn_destination_retrying_messages", promtext.Gauge, "Pending messages with a failed attempt.",
		func(w *promtext.Writer, d *destinationSeries) {
			w.Sample(float64(d.retrying), d.labels)
		}},
	{"posthorn_destination_oldest_pending_seconds", promtext.Gauge, "Age of the oldest pending message, without the time during which its destination was suspended; 0 if none is pending.",
		func(w *promtext.Writer, d *destinationSeries) {
			w.Sample(d.oldestAge.Seconds(), d.labels)
		}},
	{"posthorn_dead_letter_bytes", promtext.Gauge, "Disk space of the stored dead letters.", func(w *promtext.Writer, d *destinationSeries) {
		w.Sample(float64(d.stats.DeadLetterBytes), d.labels)
	}},
	{"posthorn_endpoint_attempts_total", promtext.Counter, "Requests to an endpoint, by result.",
		eachEndpoint(func(w *promtext.Writer, ep *endpointSeries) {
			w.Sample(float64(ep.metrics.succeeded), ep.labels, "result", "delivered")
			w.Sample(float64(ep.metrics.failed), ep.labels, "result", "failed")
		})},
	{"posthorn_endpoint_circuit_open", promtext.Gauge, "1 while an endpoint's circuit is open and only probes are sent to it.", eachEndpoint(func(w *promtext.Writer, ep *endpointSeries) {
		open := 0.0
		if ep.open {
			open = 1
		}
		w.Sample(open, ep.labels)
	})},
	{"posthorn_endpoint_in_flight", promtext.Gauge, "Requests in flight to an endpoint.",
		eachEndpoint(func(w *promtext.Writer, ep *endpointSeries) {
			w.Sample(float64(ep.inFlight), ep.labels)
		})},
}

// detailedFamilies has the metrics that are written with Options.DetailedMetrics only.
var detailedFamilies = []family{
	{"posthorn_dead_letters", promtext.Gauge, "Dead letters that are stored.", func(w *promtext.Writer, d *destinationSeries) {
		w.Sample(float64(d.stats.DeadLetters), d.labels)
	}},
	{"posthorn_destination_dead_lettered_total", promtext.Counter, "Messages that became dead letters since the start, by reason.", func(w *promtext.Writer, d *destinationSeries) {
		for reason, n := range d.metrics.dead {
			w.Sample(float64(n), d.labels, "reason", reason)
		}
	}},
	{"posthorn_destination_long_numbers_total", promtext.Counter, "Requests whose message has numbers that JavaScript would change: sent as strings, or as digits if spec.body.numbers is Exact.", func(w *promtext.Writer, d *destinationSeries) {
		w.Sample(float64(d.metrics.longNumbers), d.labels)
	}},
	{"posthorn_destination_delivery_latency_seconds", promtext.Histogram, "Time from a message's acceptance to its delivery.",
		func(w *promtext.Writer, d *destinationSeries) {
			w.Histogram(latencyBuckets, d.metrics.latency.counts, d.metrics.latency.sum, d.labels)
		}},
	{"posthorn_lane_pending_messages", promtext.Gauge, "Pending messages of a lane. Under AnyEndpoint the endpoints share one ledger, with an empty endpoint.", func(w *promtext.Writer, d *destinationSeries) {
		for l, s := range d.lanes {
			w.Sample(float64(s.Pending), d.labels, "source", l.source, "endpoint", l.endpoint)
		}
	}},
	{"posthorn_lane_retrying_messages", promtext.Gauge, "Pending messages of a lane with a failed attempt.",
		func(w *promtext.Writer, d *destinationSeries) {
			for l, s := range d.lanes {
				w.Sample(float64(s.Retrying), d.labels, "source", l.source, "endpoint", l.endpoint)
			}
		}},
	{"posthorn_endpoint_failures_total", promtext.Counter, "Failed requests to an endpoint, by failure reason and class of the response code (none: no response).", eachEndpoint(func(w *promtext.Writer, ep *endpointSeries) {
		for kind, n := range ep.metrics.failures {
			w.Sample(float64(n), ep.labels, "result", string(kind.reason), "code", kind.code)
		}
	})},
	{"posthorn_endpoint_attempt_duration_seconds", promtext.Histogram, "Duration of requests to an endpoint.",
		eachEndpoint(func(w *promtext.Writer, ep *endpointSeries) {
			w.Histogram(attemptBuckets, ep.metrics.duration.counts, ep.metrics.duration.sum, ep.labels)
		})},
	{"posthorn_endpoint_window", promtext.Gauge, "Current limit of requests in flight to an endpoint.",
		eachEndpoint(func(w *promtext.Writer, ep *endpointSeries) {
			w.Sample(float64(ep.window), ep.labels)
		})},
	{"posthorn_endpoint_first_attempts_pending", promtext.Gauge, "Messages without an attempt at an endpoint. Under AnyEndpoint another endpoint may have accepted them.", eachEndpoint(func(w *promtext.Writer, ep *endpointSeries) {
		w.Sample(float64(ep.first), ep.labels)
	})},
	{"posthorn_endpoint_first_attempts_skipped", promtext.Gauge, "Messages that were never sent to an endpoint of several under AnyEndpoint, because their retry window ended or the space was needed.", eachEndpoint(func(w *promtext.Writer, ep *endpointSeries) {
		w.Sample(float64(ep.skipped), ep.labels)
	})},
}

func eachEndpoint(write func(*promtext.Writer, *endpointSeries)) func(*promtext.Writer, *destinationSeries) {
	return func(w *promtext.Writer, d *destinationSeries) {
		for i := range d.endpoints {
			write(w, &d.endpoints[i])
		}
	}
}

// WriteOutcomes writes a sample for each way in which the processing of a message can end.
func WriteOutcomes(w *promtext.Writer, labels promtext.Labels, l queue.Ledger) {
	w.Sample(float64(l.Delivered), labels, "outcome", "delivered")
	w.Sample(float64(l.Filtered), labels, "outcome", "filtered")
	if l.Omitted > 0 {
		w.Sample(float64(l.Omitted), labels, "outcome", "omitted")
	}
	w.Sample(float64(l.DeadLettered), labels, "outcome", "dead_lettered")
	w.Sample(float64(l.Discarded), labels, "outcome", "discarded")
}

// WriteMetrics writes the series of every destination of the config. It locks for one destination
// at a time, so that a scrape does not delay deliveries.
func (e *Engine) WriteMetrics(w *promtext.Writer) {
	all := e.series(e.o.Now())
	write := func(families []family) {
		for _, f := range families {
			w.Family(f.name, f.kind, f.help)
			for i := range all {
				f.write(w, &all[i])
			}
		}
	}
	write(families)
	if e.o.DetailedMetrics {
		write(detailedFamilies)
	}
}

func (e *Engine) series(now time.Time) []destinationSeries {
	var destinations []*destination
	e.mu.Lock()
	for _, d := range e.registry.destinations {
		if d.set != nil {
			destinations = append(destinations, d)
		}
	}
	e.mu.Unlock()
	all := make([]destinationSeries, 0, len(destinations))
	for _, d := range destinations {
		e.mu.Lock()
		s, lanes := d.series(e.o.DetailedMetrics)
		suspended := d.suspensions
		e.mu.Unlock()
		s.stats = e.o.Store.DestinationStats(d.key)
		s.ended = s.stats.Ledger.Minus(d.atStart)
		if oldest := s.addLanes(e.o.Store, lanes, e.o.DetailedMetrics); !oldest.IsZero() {
			s.oldestAge = max(0, now.Sub(suspended.windowStart(oldest, now)))
		}
		all = append(all, s)
	}
	return all
}

// series copies the numbers of a destination, and lists its lanes.
func (d *destination) series(detailed bool) (s destinationSeries, lanes []queue.LaneID) {
	s.labels = promtext.NewLabels("namespace", d.namespace, "destination", d.name)
	if detailed {
		s.metrics = d.metrics
		s.metrics.dead, s.metrics.latency = maps.Clone(d.metrics.dead), d.metrics.latency.clone()
	}
	if d.set != nil {
		s.endpoints = make([]endpointSeries, 0, len(d.set.targets))
		for _, t := range d.set.targets {
			ep := endpointSeries{name: t.name, open: t.machine.Open(), window: t.machine.Window(), inFlight: t.inFlight}
			ep.labels = s.labels + "," + promtext.NewLabels("endpoint", t.name)
			ep.metrics.attemptCounts = t.metrics.attemptCounts
			if detailed {
				ep.metrics.attemptCounts, ep.metrics.duration = t.metrics.clone(), t.metrics.duration.clone()
			}
			s.endpoints = append(s.endpoints, ep)
		}
	}
	lanes = make([]queue.LaneID, 0, len(d.lanes))
	for _, l := range d.lanes {
		lanes = append(lanes, l.id)
	}
	return s, lanes
}

// addLanes adds the numbers of a destination's lanes. It returns the acceptance of the oldest pending message; zero for none.
func (s *destinationSeries) addLanes(store queue.Stats, lanes []queue.LaneID, detailed bool) (oldest time.Time) {
	for id, stats := range ledgers(store, lanes) {
		s.retrying += stats.Retrying
		oldest = earlier(oldest, stats.OldestPending)
		if !detailed {
			continue
		}
		if s.lanes == nil {
			s.lanes = map[laneLabels]queue.LaneStats{}
		}
		_, source := split(id.Source)
		labels := laneLabels{source, id.Endpoint}
		sum := s.lanes[labels]
		sum.Pending, sum.Retrying = sum.Pending+stats.Pending, sum.Retrying+stats.Retrying
		s.lanes[labels] = sum
	}
	if !detailed {
		return oldest
	}
	for _, id := range lanes {
		stats := store.LaneStats(id)
		for i := range s.endpoints {
			if ep := &s.endpoints[i]; ep.name == id.Endpoint {
				ep.first, ep.skipped = ep.first+stats.FirstAttempts, ep.skipped+stats.Skipped
			}
		}
	}
	return oldest
}

// ledgers yields the ledger of each lane of a destination, or of its group, once.
func ledgers(store queue.Stats, lanes []queue.LaneID) iter.Seq2[queue.LaneID, queue.LaneStats] {
	return func(yield func(queue.LaneID, queue.LaneStats) bool) {
		groups := map[queue.LaneID]bool{}
		for _, id := range lanes {
			if id.Any {
				if id = id.Group(); groups[id] {
					continue
				}
				groups[id] = true
			}
			if !yield(id, store.LaneStats(id)) {
				return
			}
		}
	}
}
