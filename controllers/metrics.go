package controllers

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	compiles = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "posthorn_operator_compiles_total",
		Help: "Compilations of namespaces by result: written, unchanged, too_large, removed, delayed or error.",
	}, []string{"result"})
	statusWrites = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "posthorn_operator_status_writes_total",
		Help: "Status writes by kind. There are none without changes and traffic.",
	}, []string{"kind"})
	dispatchers = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "posthorn_operator_dispatchers",
		Help: "Ready dispatcher pods, by whether they answer the operator.",
	}, []string{"responding"})
	reportFailures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "posthorn_operator_report_failures_total",
		Help: "Failed requests for the report of a ready dispatcher pod.",
	})
	kindServed = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "posthorn_operator_kind_served",
		Help: "1 if the API server serves the kind, 0 if its CustomResourceDefinition is missing or is being deleted.",
	}, []string{"kind"})
	orphanedPending = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "posthorn_operator_orphaned_pending_messages",
		Help: "Pending messages on the volume of a dispatcher pod that does not exist any more, by its last report.",
	}, []string{"dispatcher"})
)

func init() {
	metrics.Registry.MustRegister(compiles, statusWrites, dispatchers, reportFailures, kindServed, orphanedPending)
}
