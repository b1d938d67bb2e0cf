package ingest

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/analytics/event"
)

// countRejected counts the rejected calls of a batch.
func (h *Handler) countRejected(q *request, rejected []event.Rejection, now time.Time) {
	byCode := map[string]int{}
	for _, r := range rejected {
		byCode[r.Err.Code]++
	}
	last := rejected[len(rejected)-1].Err
	for code, n := range byCode {
		if code != last.Code {
			h.Gate.Reject(q.source, now, n, code, "see the answer to the batch")
		}
	}
	h.Gate.Reject(q.source, now, byCode[last.Code], last.Code, last.Message)
}

type metrics struct {
	duration  *prometheus.HistogramVec
	succeeded prometheus.Observer // duration of successful requests
	durable   prometheus.Histogram
}

func newMetrics(r prometheus.Registerer, memory func() int64) metrics {
	m := metrics{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "posthorn_ingest_request_duration_seconds", Help: "Time to answer a request, by class of status.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14),
		}, []string{"status"}),
		durable: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "posthorn_ingest_durable_seconds", Help: "Duration of storing the calls of a request.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 15),
		}),
	}
	m.succeeded = m.duration.WithLabelValues("2xx")
	if r != nil {
		r.MustRegister(m.duration, m.durable, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "posthorn_ingest_memory_bytes", Help: "Memory of the requests in progress, for bodies and messages.",
		}, func() float64 { return float64(memory()) }))
	}
	return m
}
