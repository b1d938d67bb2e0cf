package audience

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	syncs    *prometheus.CounterVec
	changes  *prometheus.CounterVec
	members  *prometheus.GaugeVec
	unsent   *prometheus.GaugeVec
	duration prometheus.Histogram
}

func newMetrics(r prometheus.Registerer) metrics {
	m := metrics{
		syncs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "posthorn_audience_syncs_total", Help: "Syncs of audiences by result: done or refused.",
		}, []string{"namespace", "audience", "result"}),
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "posthorn_audience_changes_total", Help: "Users with an identify call, by change: added, removed, changed or resent.",
		}, []string{"namespace", "audience", "change"}),
		members: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "posthorn_audience_members", Help: "Members as of the last sync.",
		}, []string{"namespace", "audience"}),
		unsent: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "posthorn_audience_unsent", Help: "Identify calls of the last sync that are not in the queue yet.",
		}, []string{"namespace", "audience"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "posthorn_audience_receive_seconds", Help: "Duration of receiving, sorting and comparing a sync.",
			Buckets: prometheus.ExponentialBuckets(0.01, 4, 10),
		}),
	}
	if r != nil {
		r.MustRegister(m.syncs, m.changes, m.members, m.unsent, m.duration)
	}
	return m
}

// known initializes the metrics of an audience that was found on disk.
func (m *metrics) known(a *audience) {
	if a.done != nil {
		m.members.WithLabelValues(a.namespace, a.name.name).Set(float64(a.done.Members))
	}
	if a.pending != nil {
		m.sending(a.name, a.pending.Changes()-a.sent.Load())
	}
}

func (m *metrics) sending(n name, unsent int64) {
	m.unsent.WithLabelValues(n.namespace, n.name).Set(float64(unsent))
}

func (m *metrics) finished(n name, s state) {
	m.syncs.WithLabelValues(n.namespace, n.name, "done").Inc()
	m.members.WithLabelValues(n.namespace, n.name).Set(float64(s.Members))
	m.changes.WithLabelValues(n.namespace, n.name, "added").Add(float64(s.Added))
	m.changes.WithLabelValues(n.namespace, n.name, "removed").Add(float64(s.Removed))
	m.changes.WithLabelValues(n.namespace, n.name, "changed").Add(float64(s.Changed))
	m.changes.WithLabelValues(n.namespace, n.name, "resent").Add(float64(s.Resent))
}

func (m *metrics) refused(n name) { m.syncs.WithLabelValues(n.namespace, n.name, "refused").Inc() }

// forget deletes the series of a removed audience.
func (m *metrics) forget(n name) {
	labels := prometheus.Labels{"namespace": n.namespace, "audience": n.name}
	m.syncs.DeletePartialMatch(labels)
	m.changes.DeletePartialMatch(labels)
	m.members.DeletePartialMatch(labels)
	m.unsent.DeletePartialMatch(labels)
}
