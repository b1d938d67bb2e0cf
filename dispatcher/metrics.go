package dispatcher

import (
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/internal/promtext"
)

// NewRegistry returns a registry with the metrics of the process.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// namespaceSeries has the values of a namespace's series.
type namespaceSeries struct {
	labels  promtext.Labels
	refused bool
	// missing is true while the config is missing although it was not deleted; parked counts the
	// objects without a config that were not deleted.
	missing bool
	parked  int
	// applied is false while no config of the namespace is in effect.
	applied  bool
	age      time.Duration
	revision float64
	sources  []sourceSeries
}

// sourceSeries has the values of a Source's series.
type sourceSeries struct {
	labels promtext.Labels
	stats  queue.SourceStats
	ended  queue.Ledger // since the start
}

// namespaceFamilies are the metrics of namespaces and Sources.
var namespaceFamilies = []struct {
	name  string
	kind  promtext.Kind
	help  string
	write func(*promtext.Writer, *namespaceSeries)
}{
	{"posthorn_config_refused", promtext.Gauge, "1 while a namespace's newest live config is rejected and the previous one is in effect.", func(w *promtext.Writer, n *namespaceSeries) {
		w.Sample(promtext.Bool(n.refused), n.labels)
	}},
	{"posthorn_config_missing", promtext.Gauge, "1 while a namespace's live config is missing although it was not deleted: its messages are parked and its calls are answered 503.", func(w *promtext.Writer, n *namespaceSeries) {
		w.Sample(promtext.Bool(n.missing), n.labels)
	}},
	{"posthorn_config_parked_objects", promtext.Gauge, "Objects that are missing in a namespace's live config although they were not deleted; their messages are parked.", func(w *promtext.Writer, n *namespaceSeries) {
		w.Sample(float64(n.parked), n.labels)
	}},
	{"posthorn_config_age_seconds", promtext.Gauge, "Time since a namespace's live config took effect.",
		func(w *promtext.Writer, n *namespaceSeries) {
			if n.applied {
				w.Sample(n.age.Seconds(), n.labels)
			}
		}},
	{"posthorn_config_revision", promtext.Gauge, "48 bits of a hash over the revisions of a namespace's objects, as a number: equal where the same config runs.", func(w *promtext.Writer, n *namespaceSeries) {
		if n.applied {
			w.Sample(n.revision, n.labels)
		}
	}},
	{"posthorn_queue_log_bytes", promtext.Gauge, "Approximate bytes of a Source's undelivered calls.",
		eachSource(func(w *promtext.Writer, s *sourceSeries) {
			w.Sample(float64(s.stats.LogBytes), s.labels)
		})},
	{"posthorn_source_messages_total", promtext.Counter, "A Source's messages whose processing ended since the start, by outcome; a call counts once per destination.", eachSource(func(w *promtext.Writer, s *sourceSeries) {
		delivery.WriteOutcomes(w, s.labels, s.ended)
	})},
	{"posthorn_source_pending_messages", promtext.Gauge, "A Source's messages that are neither delivered nor ended otherwise; a call counts once per destination.", eachSource(func(w *promtext.Writer, s *sourceSeries) {
		w.Sample(float64(s.stats.Ledger.Pending), s.labels)
	})},
}

func eachSource(write func(*promtext.Writer, *sourceSeries)) func(*promtext.Writer, *namespaceSeries) {
	return func(w *promtext.Writer, n *namespaceSeries) {
		for i := range n.sources {
			write(w, &n.sources[i])
		}
	}
}

// writeMetrics writes the state of the dispatcher and the series of namespaces and Sources. They
// are collected by a scrape and cost nothing in between.
func (d *Dispatcher) writeMetrics(w *promtext.Writer) {
	w.Family("posthorn_ready", promtext.Gauge, "1 while calls are accepted.")
	w.Sample(promtext.Bool(d.Ready() == nil), "")
	w.Family("posthorn_storage_free_bytes", promtext.Gauge, "Free space on the disk of the data directory.")
	w.Sample(float64(d.gate.Storage().FreeBytes), "")
	w.Family("posthorn_storage_days_left", promtext.Gauge, "Days until the disk reaches the high-water mark at the present rate, rounded up; 31 means more than 30.")
	days := d.storage.get(d.gate).DaysLeft
	if days == 0 {
		days = maxForecastDays + 1
	}
	w.Sample(float64(days), "")
	all := d.namespaceSeries(time.Now())
	for _, f := range namespaceFamilies {
		w.Family(f.name, f.kind, f.help)
		for i := range all {
			f.write(w, &all[i])
		}
	}
}

func (d *Dispatcher) namespaceSeries(now time.Time) (all []namespaceSeries) {
	view := d.gate.View()
	if view == nil {
		return nil
	}
	refused, applied := d.configs.Rejected(), d.configs.AppliedTimes()
	states, _ := d.configs.States()
	for _, name := range reportedNamespaces(view, refused, states) {
		n := namespaceSeries{labels: promtext.NewLabels("namespace", name)}
		if config, ok := view.Namespace(name); ok {
			n = d.seriesOf(name, &config.Config)
		}
		_, n.refused = refused[name]
		n.missing, n.parked = !states[name].Missing.IsZero(), len(states[name].Parked)
		if at, ok := applied[name]; ok {
			n.applied, n.age = true, now.Sub(at)
		}
		all = append(all, n)
	}
	return all
}

// reportedNamespaces returns the namespaces with a config, and those whose config is rejected or
// missing, sorted.
func reportedNamespaces(view *liveconfig.View, refused map[string]adminapi.RefusedConfig,
	states map[string]admission.ConfigState) []string {
	names := map[string]bool{}
	for _, name := range view.Namespaces() {
		names[name] = true
	}
	for name := range refused {
		names[name] = true
	}
	for name, state := range states {
		if !state.Missing.IsZero() || len(state.Parked) > 0 {
			names[name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

func (d *Dispatcher) seriesOf(name string, config *liveconfig.Config) namespaceSeries {
	n := namespaceSeries{labels: promtext.NewLabels("namespace", name), revision: revisionNumber(config)}
	for _, source := range config.Sources {
		key := name + "/" + source.Name
		s := sourceSeries{labels: n.labels + "," + promtext.NewLabels("source", source.Name), stats: d.store.SourceStats(key)}
		s.ended = s.stats.Ledger.Minus(d.sourcesAtStart[key])
		n.sources = append(n.sources, s)
	}
	return n
}

// ledgersOfSources returns the ledger of each Source of the store.
func ledgersOfSources(s queue.Stats) map[string]queue.Ledger {
	ledgers := map[string]queue.Ledger{}
	for _, source := range s.Sources() {
		ledgers[source] = s.SourceStats(source).Ledger
	}
	return ledgers
}

// revisionNumber makes a 48-bit number from the revisions of all objects of a namespace: a label
// would create a new series with every change, and the config's own revision would let readers test
// guesses of its secrets (ADR 0003).
func revisionNumber(c *liveconfig.Config) float64 {
	h := fnv.New64a()
	add := func(kind, name, revision string) { _, _ = fmt.Fprintf(h, "%s/%s %s\n", kind, name, revision) }
	for _, s := range c.Sources {
		add("source", s.Name, s.Revision)
	}
	for _, d := range c.Destinations {
		add("destination", d.Name, d.Revision)
	}
	for _, a := range c.Audiences {
		add("audience", a.Name, a.Revision)
	}
	for _, d := range c.Deletions {
		add("deletion", d.Name, d.Revision)
	}
	return float64(h.Sum64() >> 16)
}
