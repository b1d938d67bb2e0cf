package host

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/internal/promtext"
)

// replicationMetrics are the metrics of a slot of the replicated log.
type replicationMetrics struct{ *replica }

var _ prometheus.Collector = replicationMetrics{}

// The metrics of the log in every process.
var (
	logForwarded = prometheus.NewDesc("posthorn_replication_forwarded_requests_total", "Requests that this process forwarded to the owner as a standby, by result.", []string{"result"}, nil)
	logOwner     = prometheus.NewDesc("posthorn_replication_owner", "1 in the process that accepts and delivers calls, 0 in a standby.", nil, nil)
	logGaps      = prometheus.NewDesc("posthorn_replication_gaps_total", "Checks of the owner, at most 15 s apart, that found missing records or objects in the log or in the copy of a server.", nil, nil)
	logUploaded  = prometheus.NewDesc("posthorn_replication_snapshot_bytes_total", "Bytes that the owner has uploaded for snapshots since its claim.", nil, nil)
	logSequence  = prometheus.NewDesc("posthorn_replication_sequence", "Number of the last record of the log that this process has.", nil, nil)
)

// ownerMetrics are the metrics of an owner.
var ownerMetrics = []struct {
	desc  *prometheus.Desc
	value func(*ownership, slots.Status, slots.Durability) float64
}{
	{prometheus.NewDesc("posthorn_replication_epoch", "Number of the owner's claim; it grows by one with each change of the owner.", nil, nil), func(t *ownership, _ slots.Status, _ slots.Durability) float64 {
		return float64(t.writer.Epoch())
	}},
	{prometheus.NewDesc("posthorn_replication_may_send", "1 while the owner may deliver; 0 while the log does not answer.", nil, nil), func(t *ownership, _ slots.Status, _ slots.Durability) float64 {
		return promtext.Bool(t.writer.MaySend())
	}},
	{prometheus.NewDesc("posthorn_replication_unacknowledged_seconds", "Age of the oldest change that the log has not acknowledged.", nil,
		nil), func(_ *ownership, s slots.Status, _ slots.Durability) float64 {
		return s.Unacknowledged.Seconds()
	}},
	{prometheus.NewDesc("posthorn_replication_stream_bytes", "Bytes in the stream; calls are refused at 70 % of the maximum.", nil, nil), func(_ *ownership, s slots.Status, _ slots.Durability) float64 {
		return float64(s.Bytes)
	}},
	{prometheus.NewDesc("posthorn_replication_stream_max_bytes", "Maximum size of the stream; 0 for none.", nil, nil),
		func(_ *ownership, s slots.Status, _ slots.Durability) float64 {
			return float64(s.MaxBytes)
		}},
	{prometheus.NewDesc("posthorn_replication_weak_settings", "Settings of the NATS servers with which a loss of servers can lose calls.", nil, nil), func(_ *ownership, _ slots.Status, d slots.Durability) float64 {
		return float64(len(d.Weak))
	}},
	{prometheus.NewDesc("posthorn_replication_sync_verified", "1 if a server has confirmed that it syncs each record to its disk (replication.jetStream.monitoringURL).", nil, nil), func(_ *ownership, _ slots.Status, d slots.Durability) float64 {
		return promtext.Bool(d.Sync == slots.SyncAlways)
	}},
	{prometheus.NewDesc("posthorn_replication_replicas", "Servers that should have a copy of each record; 0 before the first check.", nil, nil), func(_ *ownership, _ slots.Status, d slots.Durability) float64 {
		return float64(d.Replicas)
	}},
	{prometheus.NewDesc("posthorn_replication_current_replicas", "Servers that have all records; 0 before the first check.", nil, nil),
		func(_ *ownership, _ slots.Status, d slots.Durability) float64 {
			return float64(d.Current)
		}},
	{prometheus.NewDesc("posthorn_replication_snapshot_timestamp_seconds", "Time of the owner's last snapshot; 0 before the first one.", nil,
		nil), func(t *ownership, _ slots.Status, _ slots.Durability) float64 {
		taken := t.snapshotTaken()
		if taken.IsZero() {
			return 0
		}
		return float64(taken.UnixMilli()) / 1000
	}},
}

// Describe implements prometheus.Collector. A process becomes an owner later.
func (m replicationMetrics) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{logForwarded, logOwner, logSequence, logUploaded, logGaps} {
		to <- d
	}
	for _, o := range ownerMetrics {
		to <- o.desc
	}
}

// Collect implements prometheus.Collector.
func (m replicationMetrics) Collect(to chan<- prometheus.Metric) {
	add := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, kind, value, labels...)
	}
	add(logForwarded, prometheus.CounterValue, float64(m.forwarder.Answered()), "answered")
	add(logForwarded, prometheus.CounterValue, float64(m.forwarder.Failed()), "failed")
	t := m.ownership.Load()
	add(logOwner, prometheus.GaugeValue, promtext.Bool(t != nil))
	if n, ok := m.sequence(); ok {
		add(logSequence, prometheus.GaugeValue, float64(n))
	}
	if t == nil {
		return
	}
	add(logGaps, prometheus.CounterValue, float64(t.foundGaps()))
	add(logUploaded, prometheus.CounterValue, float64(t.uploaded()))
	status, known := t.writer.Status(), t.durability.known()
	for _, o := range ownerMetrics {
		add(o.desc, prometheus.GaugeValue, o.value(t, status, known))
	}
}
