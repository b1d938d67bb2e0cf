package controllers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
)

const (
	// backlogSecret is the Secret of the release's namespace with the backlogs of the dispatcher pods:
	// a key for each pod. It is a Secret because the operator may write these.
	backlogSecret = "posthorn-backlog"
	// backlogAge is the age from which a pending message belongs to a backlog. A pod that ends delivers
	// younger ones, whose receivers work.
	backlogAge = time.Minute
)

// backlogs are numbers of pending messages, by dispatcher pod. A pod without a backlog is missing.
type backlogs map[string]int64

// backlogKeeper records the backlogs of the dispatcher pods, so that the backlogs of pods that do not
// exist any more are known, also to the next operator: their volumes have messages that nothing delivers.
// A user removes the record of such a pod by its key in the Secret. It also records the ledgers of the pods
// that the StatefulSet does not have any more, for the counters in the status. The records have no owner:
// volumes remain after an uninstall, too.
type backlogKeeper struct {
	client   client.Client
	direct   client.Reader
	release  string
	owner    secretOwner
	pods     Pods
	interval time.Duration
	reports  *prober
	events   events.EventRecorder
	// seen are the pods that existed at the last pass.
	seen map[string]bool
	// ledgers are the recorded ledgers of removed pods, and announced the removed pods with an Event.
	ledgers   map[string]*ledgers
	announced map[string]bool
}

// ledgers has the ledgers of a removed pod: before and after its volume was drained.
type ledgers struct{ stranded, drained *podreport.Index }

// Start records the backlogs until ctx is done. It implements manager.Runnable.
func (k *backlogKeeper) Start(ctx context.Context) error {
	defer orphanedPending.Reset() // Another operator reports them.
	wait.NonSlidingUntilWithContext(ctx, func(ctx context.Context) {
		if err := k.pass(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "recording the backlogs of the dispatcher pods failed; it is retried")
			k.reports.endWait()
		}
	}, k.interval)
	return nil
}

// pass updates the records, the metric, and the removed pods of the prober.
func (k *backlogKeeper) pass(ctx context.Context) error {
	pods, err := k.pods.List(ctx)
	if err != nil {
		return err
	}
	existing := map[string]bool{}
	for _, pod := range pods {
		existing[pod.Name] = true
	}
	stored, err := k.read(ctx)
	if err != nil {
		return err
	}
	next := nextBacklogs(stored, k.reports.backlogs(), k.seen, existing)
	if !maps.Equal(next, stored) {
		if err := k.write(ctx, next); err != nil {
			return err
		}
	}
	k.seen = existing
	orphanedPending.Reset()
	for name, pending := range next {
		if !existing[name] {
			orphanedPending.WithLabelValues(name).Set(float64(pending))
		}
	}
	return k.followRemoved(ctx, existing, next)
}

// nextBacklogs returns the record after a pass. The numbers of a pod that exists are recorded when
// they have changed by half, to limit the writes. When a pod has ended since the last pass, its
// numbers are its last ones, and later they do not change.
func nextBacklogs(stored, last backlogs, seen, existing map[string]bool) backlogs {
	next := maps.Clone(stored)
	if next == nil {
		next = backlogs{}
	}
	for name, reported := range last {
		switch recorded := stored[name]; {
		case !existing[name] && !seen[name]:
		case existing[name] && reported > 0 && recorded > 0 && reported <= 2*recorded && recorded <= 2*reported:
		case reported > 0:
			next[name] = reported
		default:
			delete(next, name)
		}
	}
	return next
}

// read returns the record.
func (k *backlogKeeper) read(ctx context.Context) (backlogs, error) {
	var secret corev1.Secret
	key := types.NamespacedName{Namespace: k.release, Name: backlogSecret}
	if err := k.direct.Get(ctx, key, &secret); apierrors.IsNotFound(err) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("read Secret %s: %w", key, err)
	}
	stored := backlogs{}
	for name, text := range secret.Data {
		// A value that a user has broken is written again, or belongs to no pod.
		if pending, err := strconv.ParseInt(string(text), 10, 64); err == nil && pending > 0 {
			stored[name] = pending
		}
	}
	return stored, nil
}

// write replaces the record.
func (k *backlogKeeper) write(ctx context.Context, next backlogs) error {
	data := map[string][]byte{}
	for name, pending := range next {
		data[name] = strconv.AppendInt(nil, pending, 10)
	}
	if err := k.apply(ctx, backlogSecret, data); err != nil {
		return err
	}
	log.FromContext(ctx).V(1).Info("backlogs recorded", "pods", slices.Sorted(maps.Keys(next)))
	return nil
}

// apply replaces a Secret of the record.
func (k *backlogKeeper) apply(ctx context.Context, name string, data map[string][]byte) error {
	wanted := corev1ac.Secret(name, k.release).WithData(data).WithLabels(map[string]string{labelName: "posthorn", labelManagedBy: managedBy})
	if err := k.client.Apply(ctx, wanted, fieldOwner, client.ForceOwnership); err != nil {
		return fmt.Errorf("apply Secret %s/%s: %w", k.release, name, err)
	}
	return nil
}

// backlogs returns the backlogs in the last reports of all pods. A replicated log has none: each of
// its pods can deliver its messages.
func (p *prober) backlogs() backlogs {
	all := backlogs{}
	for name, last := range p.lastReports() {
		if last.report == nil || last.report.Replication != nil {
			continue
		}
		pending := int64(0)
		for _, namespace := range last.report.Namespaces() {
			for d := range namespace.Destinations() {
				if last.hasBacklog(d) {
					pending += d.Pending
				}
			}
		}
		all[name] = pending
	}
	return all
}

// hasBacklog reports whether the pod cannot deliver the pending messages of a destination while it stops.
func (l lastReport) hasBacklog(d *adminapi.DestinationReport) bool {
	return d.Retrying > 0 || !d.OldestPending.IsZero() && l.answered.Sub(d.OldestPending) >= backlogAge
}
