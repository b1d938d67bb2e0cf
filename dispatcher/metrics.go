package dispatcher

import (
	"fmt"
	"hash/fnv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
)

// reportCollector exports data of the report: configs and the oldest messages. It collects at
// scrape time and costs nothing in between.
type reportCollector struct{ d *Dispatcher }

var (
	descReady     = prometheus.NewDesc("posthorn_ready", "1 while calls are accepted.", nil, nil)
	descRefused   = prometheus.NewDesc("posthorn_config_refused", "1 while a namespace's newest live config is rejected and the previous one is in effect.", []string{"namespace"}, nil)
	descConfigAge = prometheus.NewDesc("posthorn_config_age_seconds", "Time since a namespace's live config took effect.", []string{"namespace"}, nil)
	descRevision  = prometheus.NewDesc("posthorn_config_revision", "48 bits of a hash over the revisions of a namespace's objects, as a number: equal where the same config runs.", []string{"namespace"}, nil)
	descLog       = prometheus.NewDesc("posthorn_queue_log_bytes", "Approximate bytes of a Source's undelivered calls.", []string{"namespace", "source"}, nil)
	descOldest    = prometheus.NewDesc("posthorn_destination_oldest_pending_seconds", "Age of a destination's oldest pending message; 0 if none is pending.", []string{"namespace", "destination"}, nil)
	descSource    = prometheus.NewDesc("posthorn_source_messages", "A Source's ledger, each call counted once per destination: accepted = delivered + filtered + dead_lettered + discarded + pending.", []string{"namespace", "source", "state"}, nil)
	descLedger    = prometheus.NewDesc("posthorn_destination_messages", "A destination's ledger: accepted = delivered + filtered + dead_lettered + discarded + pending.", []string{"namespace", "destination", "state"}, nil)
	descFree      = prometheus.NewDesc("posthorn_storage_free_bytes", "Free space on the disk of the data directory.", nil, nil)
)

// Describe implements prometheus.Collector.
func (reportCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descReady, descRefused, descConfigAge, descRevision, descLog, descOldest, descSource, descLedger, descFree} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c reportCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	ledger := func(d *prometheus.Desc, l adminapi.Ledger, namespace, name string) {
		for state, n := range map[string]int64{
			"accepted": l.Accepted, "delivered": l.Delivered, "filtered": l.Filtered,
			"dead_lettered": l.DeadLettered, "discarded": l.Discarded, "pending": l.Pending,
		} {
			gauge(d, float64(n), namespace, name, state)
		}
	}
	now, r := time.Now(), c.d.Report()
	gauge(descReady, number(r.Ready))
	gauge(descFree, float64(r.Storage.FreeBytes))
	applied := c.d.configs.AppliedTimes()
	for _, t := range r.Namespaces {
		gauge(descRefused, number(t.Refused != nil), t.Namespace)
		if at, ok := applied[t.Namespace]; ok {
			gauge(descConfigAge, now.Sub(at).Seconds(), t.Namespace)
			gauge(descRevision, revisionNumber(t), t.Namespace)
		}
		for _, s := range t.Sources {
			gauge(descLog, float64(c.d.store.SourceStats(t.Namespace+"/"+s.Name).LogBytes), t.Namespace, s.Name)
			ledger(descSource, s.Messages, t.Namespace, s.Name)
		}
		for _, d := range t.Destinations {
			ledger(descLedger, d.Ledger, t.Namespace, d.Name)
			age := 0.0
			if !d.OldestPending.IsZero() {
				age = now.Sub(d.OldestPending).Seconds()
			}
			gauge(descOldest, age, t.Namespace, d.Name)
		}
	}
}

// revisionNumber makes a 48-bit number from the revisions of all objects of a namespace: a label
// would create a new series with every change, and the config's own revision would let readers test
// guesses of its secrets (ADR 0003).
func revisionNumber(t adminapi.NamespaceReport) float64 {
	h := fnv.New64a()
	add := func(kind, name, revision string) { _, _ = fmt.Fprintf(h, "%s/%s %s\n", kind, name, revision) }
	for _, s := range t.Sources {
		add("source", s.Name, s.Revision)
	}
	for _, d := range t.Destinations {
		add("destination", d.Name, d.Revision)
	}
	for _, a := range t.Audiences {
		add("audience", a.Name, a.Revision)
	}
	for _, d := range t.Deletions {
		add("deletion", d.Name, d.Revision)
	}
	return float64(h.Sum64() >> 16)
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
