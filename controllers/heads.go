package controllers

import (
	"context"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
)

// heads decides the heads of the live configs: the parts that also depend on what the dispatchers report, and on what was
// there before. A head has tombstones of deleted objects, objects that are only missing, and reserved write keys.
type heads struct {
	// reports returns the newest reports of the dispatcher pods; complete is false until every pod
	// had a request.
	reports        func() (pods []health.Pod, complete bool)
	served         *servedKinds
	now            func() time.Time
	tombstoneGrace time.Duration
}

// dispatchers returns what the pods report about the live config of a namespace.
func (h *heads) dispatchers(namespace string) compile.Dispatchers {
	pods, complete := h.reports()
	return dispatchersOf(pods, complete, namespace)
}

// present returns the part of the next head that depends on the namespace's objects. If one of the last config
// does not exist, it reads the definitions of the kinds, because the reason can be that they are deleted.
func (h *heads) present(ctx context.Context, namespace string, config liveconfig.Config, uids map[liveconfig.Ref]string,
	last liveSecret) (compile.Present, error) {
	served := h.served.current
	if last.history.Misses(uids) {
		served = h.served.read
	}
	kinds, err := served(ctx)
	return compile.Present{UIDs: uids, Kinds: kinds, Reserved: last.history.Reserve(config, h.dispatchers(namespace), last.released, h.now())},
		err
}

// bytes returns a function that returns the size of a namespace's next head.
func (h *heads) bytes(namespace string, present compile.Present) func(compile.History, bool) (int, error) {
	d, now := h.dispatchers(namespace), h.now()
	return func(history compile.History, exact bool) (int, error) {
		return history.HeadBytes(exact, present, d, now, h.tombstoneGrace)
	}
}

// next returns the next head of a namespace, and whether it differs from the last one.
func (h *heads) next(namespace, revision string, present compile.Present, last liveSecret) (liveconfig.Head, bool) {
	return last.history.Next(revision, present, h.dispatchers(namespace), h.now(), h.tombstoneGrace)
}

// dispatchersOf is dispatchers with given reports.
func dispatchersOf(pods []health.Pod, complete bool, namespace string) compile.Dispatchers {
	reports := compile.Reports{Silent: !complete}
	for _, pod := range storesOf(pods, namespace) {
		if pod.Removed { // Its store has no config to compare until the pod exists again.
			continue
		}
		reports.Unknown = reports.Unknown || !hasConfigs(pod.Report) && !hasConfigs(pod.Configs)
		config := pod.Report.Config(namespace)
		switch {
		case !pod.Absent:
			reports.Silent = reports.Silent || pod.Silent || pod.Report == nil
			reports.Ready = append(reports.Ready, config)
		case hasConfigs(pod.Configs):
			reports.Unready = append(reports.Unready, pod.Configs.Config(namespace))
		case pod.Report != nil: // An old report. Only the number cannot be outdated.
			reports.Unready = append(reports.Unready, adminapi.ConfigReport{Namespace: namespace, Number: config.Number})
		}
	}
	return compile.DispatchersOf(reports)
}

// hasConfigs reports whether a report has the numbers of the live configs. A pod that starts does not
// report them.
func hasConfigs(report *podreport.Index) bool {
	return report != nil && (report.Ready || len(report.Configs) > 0)
}
