package pebblestore

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	registerer prometheus.Registerer
	all        []prometheus.Collector

	commitSeconds  prometheus.Histogram
	commitMessages prometheus.Histogram
	syncSeconds    prometheus.Histogram
	discarded      prometheus.Counter
	damaged        prometheus.Counter
}

func newMetrics(s *Store) *metrics {
	m := &metrics{
		commitSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "posthorn_queue_commit_seconds", Help: "Duration of storing a group of messages, with the disk sync.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16),
		}),
		commitMessages: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "posthorn_queue_commit_messages", Help: "Messages made durable by one disk sync.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 12),
		}),
		syncSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "posthorn_queue_sync_seconds", Help: "Duration of one sync (fsync) of the queue's log.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16),
		}),
		discarded: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "posthorn_queue_discarded_messages_total", Help: "Messages that were pending when their Source or destination was deleted.",
		}),
	}
	m.damaged = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "posthorn_queue_damaged_messages_total", Help: "Messages that became dead letters because their file is damaged.",
	})
	gauge := func(name, help string, fn func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, fn)
	}
	m.all = []prometheus.Collector{
		m.commitSeconds, m.commitMessages, m.syncSeconds, m.discarded, m.damaged,
		gauge("posthorn_queue_corrupt", "1 after a file of the queue was found damaged, until the queue is repaired.", func() float64 {
			if s.corrupt.Load() != nil {
				return 1
			}
			return 0
		}),
		gauge("posthorn_queue_disk_bytes", "Disk space of the queue.", func() float64 { return float64(s.DiskBytes()) }),
		gauge("posthorn_queue_full", "1 while new calls are refused because the disk is above its high-water mark.", func() float64 {
			if s.Full() {
				return 1
			}
			return 0
		}),
		gauge("posthorn_queue_source_quota_bytes", "Bytes of undelivered messages that one Source may keep before its calls are refused, if a quota is set; 0 for none.", func() float64 { return float64(max(s.quota(), 0)) }),
		gauge("posthorn_queue_namespace_share_bytes", "Share of each namespace of the disk, for its undelivered messages; 0 if a quota is set.", func() float64 { return float64(s.disk.shares.size()) }),
		gauge("posthorn_queue_lanes", "Lanes of the queue.", func() float64 {
			s.mu.RLock()
			defer s.mu.RUnlock()
			return float64(len(s.lanes))
		}),
	}
	return m
}

// register registers the metrics; r may be nil.
func (m *metrics) register(r prometheus.Registerer) error {
	m.registerer = r
	if r == nil {
		return nil
	}
	for i, c := range m.all {
		if err := r.Register(c); err != nil {
			m.all = m.all[:i]
			m.unregister()
			return fmt.Errorf("register the queue's metrics: %w", err)
		}
	}
	return nil
}

// unregister removes the metrics, so that another store can use the same registry.
func (m *metrics) unregister() {
	if m.registerer == nil {
		return
	}
	for _, c := range m.all {
		m.registerer.Unregister(c)
	}
}

func (m *metrics) committed(messages int, elapsed time.Duration) {
	m.commitSeconds.Observe(elapsed.Seconds())
	m.commitMessages.Observe(float64(messages))
}

func (m *metrics) synced(elapsed time.Duration) { m.syncSeconds.Observe(elapsed.Seconds()) }

func (m *metrics) discard(n int64) { m.discarded.Add(float64(n)) }
