package controllers

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// leaseName is the name of the operator's Lease in the namespace of each release.
const leaseName = "posthorn-operator"

// otherRelease checks that no other release of the cluster is active: its operator would process the same objects,
// and the two would overwrite each other's statuses. The operators of one namespace have one Lease.
type otherRelease struct {
	client   kubernetes.Interface
	own      string
	interval time.Duration
}

func newOtherRelease(cfg *rest.Config, own string) (*otherRelease, error) {
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("create a client for the Leases of other releases: %w", err)
	}
	return &otherRelease{client: client, own: own, interval: 10 * time.Second}, nil
}

// Start fails when another release has the precedence, for example after both were installed at the same time. It
// implements manager.Runnable.
func (o *otherRelease) Start(ctx context.Context) error {
	tick := time.NewTicker(o.interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := o.check(ctx); err != nil {
			return err
		}
	}
}

// +kubebuilder:rbac:groups=coordination.k8s.io,resources=leases,resourceNames=posthorn-operator,verbs=list

// check returns an error that names another active release. If the Leases cannot be read, the operator must run
// nevertheless.
func (o *otherRelease) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, o.interval)
	defer cancel()
	list, err := o.client.CoordinationV1().Leases(metav1.NamespaceAll).List(ctx,
		metav1.ListOptions{FieldSelector: "metadata.name=" + leaseName})
	if err != nil {
		if apierrors.IsForbidden(err) {
			log.FromContext(ctx).Info("cannot check whether another release is active; permit to list Leases named "+leaseName, "error", err.Error())
		}
		return nil
	}
	if namespace := precedingRelease(list.Items, o.own, time.Now()); namespace != "" {
		return fmt.Errorf("the release in namespace %s already processes the objects of this cluster, and one release serves all namespaces: uninstall that release or this one, in namespace %s", namespace, o.own)
	}
	return nil
}

// precedingRelease returns the namespace of an active release that has the precedence over the own one; "" if there
// is none. Of two active releases the one with the older Lease has it.
func precedingRelease(leases []coordinationv1.Lease, own string, now time.Time) string {
	active := slices.DeleteFunc(slices.Clone(leases), func(l coordinationv1.Lease) bool {
		s := l.Spec
		return s.HolderIdentity == nil || *s.HolderIdentity == "" || s.RenewTime == nil || s.LeaseDurationSeconds == nil ||
			now.Sub(s.RenewTime.Time) > time.Duration(*s.LeaseDurationSeconds)*time.Second
	})
	slices.SortFunc(active, func(a, b coordinationv1.Lease) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Namespace, b.Namespace))
	})
	if len(active) == 0 || active[0].Namespace == own {
		return ""
	}
	return active[0].Namespace
}
