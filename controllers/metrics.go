package controllers

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var (
	compiles = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "posthorn_operator_compiles_total",
		Help: "Compilations of namespaces by result: written, unchanged, too_large, removed or error.",
	}, []string{"result"})
	statusWrites = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "posthorn_operator_status_writes_total",
		Help: "Status writes by kind. An idle cluster has none.",
	}, []string{"kind"})
	dispatchers = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "posthorn_operator_dispatchers",
		Help: "Dispatcher pods that are ready, by whether they answer the operator.",
	}, []string{"answering"})
	reportFailures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "posthorn_operator_report_failures_total",
		Help: "Reports that a ready dispatcher pod did not give.",
	})
)

func init() { metrics.Registry.MustRegister(compiles, statusWrites, dispatchers, reportFailures) }
