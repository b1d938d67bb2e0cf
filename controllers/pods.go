package controllers

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Pod is a dispatcher that is ready to accept calls.
type Pod struct {
	// Name is unique among the pods.
	Name string
	// URL is the root of its admin server, for example https://10.0.0.7:8081.
	URL string
}

// Pods lists the dispatcher pods.
type Pods interface {
	// Ready lists the ready dispatcher pods. It is called about once a second.
	Ready(ctx context.Context) ([]Pod, error)
}

// clusterPods lists the pods of the release's namespace from the cache, which
// holds those that match the dispatcher selector.
type clusterPods struct {
	reader    client.Reader
	namespace string
	scheme    string
	port      int
}

// +kubebuilder:rbac:groups="",resources=pods,namespace=posthorn-system,verbs=list;watch

// Ready implements Pods.
func (c clusterPods) Ready(ctx context.Context) ([]Pod, error) {
	var list corev1.PodList
	if err := c.reader.List(ctx, &list, client.InNamespace(c.namespace)); err != nil {
		return nil, fmt.Errorf("list dispatcher pods: %w", err)
	}
	var pods []Pod
	for i := range list.Items {
		p := &list.Items[i]
		ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
		if ready && p.DeletionTimestamp.IsZero() && p.Status.PodIP != "" {
			pods = append(pods, Pod{Name: p.Name, URL: c.scheme + "://" + net.JoinHostPort(p.Status.PodIP, strconv.Itoa(c.port))})
		}
	}
	return pods, nil
}
