package controllers

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/internal/plural"
)

const (
	// ledgersPrefix begins the names of the Secrets with the ledgers of the removed pods, one for each pod.
	ledgersPrefix = "posthorn-ledgers-"
	ledgersKey    = "report.json.gz"
	// maxLedgersBytes is below the size limit of a Secret.
	maxLedgersBytes = 1 << 20 * 9 / 10
)

// followRemoved records the ledgers of the pods that the StatefulSet does not have any more, and announces their
// messages. A pod without a key in the backlogs has none, or its volume was drained.
func (k *backlogKeeper) followRemoved(ctx context.Context, existing map[string]bool, recorded backlogs) error {
	if k.owner.statefulSet == "" {
		k.reports.endWait()
		return nil
	}
	set, replicas, err := k.statefulSet(ctx)
	if err != nil {
		return err
	}
	expected := make([]string, replicas)
	for i := range expected {
		expected[i] = fmt.Sprintf("%s-%d", k.owner.statefulSet, i)
	}
	k.reports.setExpected(expected)
	last := k.reports.lastReports()
	secrets, err := k.ledgerSecrets(ctx)
	if err != nil {
		return err
	}
	names := maps.Clone(secrets)
	for name := range recorded {
		names[name] = true
	}
	for name := range last {
		names[name] = true
	}
	removed := map[string]*podreport.Index{}
	for name := range names {
		ordinal, ok := strings.CutPrefix(name, k.owner.statefulSet+"-")
		n, notANumber := strconv.Atoi(ordinal)
		switch {
		case !ok || notANumber != nil:
		case existing[name]:
			delete(k.ledgers, name)
			delete(k.announced, name)
			if secrets[name] && last[name].report != nil {
				if err := k.deleteLedgers(ctx, name); err != nil {
					return err
				}
			}
		case n >= replicas:
			if k.ledgers[name] == nil {
				if k.ledgers[name], err = k.ledgersOf(ctx, name, last[name]); err != nil {
					return err
				}
			}
			removed[name] = nil
			if l := k.ledgers[name]; l != nil {
				removed[name] = l.drained
				if recorded[name] > 0 {
					removed[name] = l.stranded
				}
			}
			if pending := recorded[name]; pending > 0 && !k.announced[name] && set.Name != "" {
				k.announced[name] = true
				k.events.Eventf(&set, nil, corev1.EventTypeWarning, reasonStranded, "Scale",
					"%s on the volume of %s, which does not run: scale up again, or drain the volume with a Job", plural.Count(pending, "message"), name)
			}
		}
	}
	k.reports.setRemoved(removed)
	return nil
}

// statefulSet returns the number of replicas of the StatefulSet; 0 if it does not exist.
func (k *backlogKeeper) statefulSet(ctx context.Context) (ref corev1.ObjectReference, replicas int, err error) {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(appsv1.SchemeGroupVersion.WithKind("StatefulSet"))
	err = k.direct.Get(ctx, types.NamespacedName{Namespace: k.release, Name: k.owner.statefulSet}, u)
	if apierrors.IsNotFound(err) {
		return ref, 0, nil
	} else if err != nil {
		return ref, 0, fmt.Errorf("read StatefulSet %s: %w", k.owner.statefulSet, err)
	}
	n, found, err := unstructured.NestedInt64(u.Object, "spec", "replicas")
	if !found {
		n = 1
	}
	return corev1.ObjectReference{APIVersion: u.GetAPIVersion(), Kind: u.GetKind(), Namespace: k.release, Name: u.GetName(), UID: u.GetUID()},
		int(n), err
}

// ledgerSecrets returns the names of the pods with recorded ledgers.
func (k *backlogKeeper) ledgerSecrets(ctx context.Context) (map[string]bool, error) {
	all, err := listSecrets(ctx, k.client, client.InNamespace(k.release))
	if err != nil {
		return nil, fmt.Errorf("list the ledgers of removed pods: %w", err)
	}
	names := map[string]bool{}
	for i := range all {
		if name, ok := strings.CutPrefix(all[i].Name, ledgersPrefix); ok {
			names[name] = true
		}
	}
	return names, nil
}

func (k *backlogKeeper) deleteLedgers(ctx context.Context, name string) error {
	secret := &corev1.Secret{}
	secret.Namespace, secret.Name = k.release, ledgersPrefix+name
	if err := k.client.Delete(ctx, secret); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete Secret %s/%s: %w", secret.Namespace, secret.Name, err)
	}
	return nil
}

// ledgersOf returns the ledgers of a removed pod: from its last report, which it records, or recorded
// by an earlier operator; nil if neither exists.
func (k *backlogKeeper) ledgersOf(ctx context.Context, name string, last lastReport) (*ledgers, error) {
	var report adminapi.Report
	if last.report != nil {
		report = stoppedReport(last)
		var data bytes.Buffer
		w := gzip.NewWriter(&data)
		if err := json.NewEncoder(w).Encode(report); err != nil {
			return nil, fmt.Errorf("encode the ledgers of %s: %w", name, err)
		}
		if err := w.Close(); err != nil {
			return nil, fmt.Errorf("encode the ledgers of %s: %w", name, err)
		}
		if data.Len() > maxLedgersBytes {
			log.FromContext(ctx).Info("ledgers too large for a Secret; the next operator does not know them", "pod", name, "bytes", data.Len())
		} else if err := k.apply(ctx, ledgersPrefix+name, map[string][]byte{ledgersKey: data.Bytes()}); err != nil {
			return nil, err
		}
	} else {
		var secret corev1.Secret
		if err := k.direct.Get(ctx, types.NamespacedName{Namespace: k.release, Name: ledgersPrefix + name}, &secret); apierrors.IsNotFound(err) {
			return nil, nil
		} else if err != nil {
			return nil, fmt.Errorf("read the ledgers of %s: %w", name, err)
		}
		r, err := gzip.NewReader(bytes.NewReader(secret.Data[ledgersKey]))
		if err == nil {
			err = json.NewDecoder(r).Decode(&report)
		}
		if err != nil { // Another client has changed the Secret.
			log.FromContext(ctx).Error(err, "the recorded ledgers of a removed pod are invalid; they are not used", "pod", name)
			return nil, nil
		}
	}
	return &ledgers{stranded: podreport.NewIndex(report), drained: podreport.NewIndex(drainedReport(report))}, nil
}

// stoppedReport returns the ledgers in the last report of a pod that has stopped. Messages that it could deliver while it
// stopped count as delivered.
func stoppedReport(last lastReport) (r adminapi.Report) {
	r.Pod = last.report.Pod
	for name, namespace := range last.report.Namespaces() {
		n := adminapi.NamespaceReport{Namespace: name}
		backlog := int64(0)
		for d := range namespace.Destinations() {
			kept := adminapi.DestinationReport{Name: d.Name, Ledger: d.Ledger, DeadLettersStored: d.DeadLettersStored,
				DeadLettersForwarded: d.DeadLettersForwarded}
			if last.hasBacklog(d) {
				kept.OldestPending, backlog = d.OldestPending, backlog+d.Pending
			} else {
				deliverAbove(&kept.Ledger, 0)
			}
			n.Destinations = append(n.Destinations, kept)
		}
		for _, s := range namespace.Sources {
			kept := adminapi.SourceReport{Name: s.Name, Accepted: s.Accepted, Rejected: s.Rejected, Duplicates: s.Duplicates,
				LastAccepted: s.LastAccepted, Messages: s.Messages}
			deliverAbove(&kept.Messages, backlog)
			n.Sources = append(n.Sources, kept)
		}
		r.Namespaces = append(r.Namespaces, n)
	}
	return r
}

// drainedReport returns the ledgers after the volume was drained. The operator cannot read the outcomes, so the
// messages count as delivered.
func drainedReport(r adminapi.Report) adminapi.Report {
	namespaces := make([]adminapi.NamespaceReport, len(r.Namespaces))
	for i, n := range r.Namespaces {
		n.Sources, n.Destinations = append([]adminapi.SourceReport{}, n.Sources...), append([]adminapi.DestinationReport{}, n.Destinations...)
		for j := range n.Sources {
			deliverAbove(&n.Sources[j].Messages, 0)
		}
		for j := range n.Destinations {
			deliverAbove(&n.Destinations[j].Ledger, 0)
			n.Destinations[j].OldestPending = time.Time{}
		}
		namespaces[i] = n
	}
	r.Namespaces = namespaces
	return r
}

// deliverAbove counts the pending messages above a number as delivered.
func deliverAbove(l *adminapi.Ledger, pending int64) {
	if more := l.Pending - pending; more > 0 {
		l.Pending, l.Delivered = pending, l.Delivered+more
	}
}
