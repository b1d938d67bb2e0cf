package controllers

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Pod is a dispatcher.
type Pod struct {
	// Name is unique among the pods. A pod that replaces another one with the same name has
	// its store.
	Name string
	// URL is the root of its admin server, for example https://10.0.0.7:8081. Empty while the
	// server does not run.
	URL string
	// Unready is true while the pod is not ready to accept calls. Of its reports, only the states of
	// the live configs are used. A pod without a URL is not ready, either.
	Unready bool
	// Unscheduled is true while the pod has no node: it has never run.
	Unscheduled bool
	// Workload is the object that runs the pod. It gets the Events about the pod. Zero if
	// there is none.
	Workload corev1.ObjectReference
}

// Pods lists the dispatcher pods.
type Pods interface {
	// List lists the dispatcher pods, also those that are not ready. It is called about once
	// a second.
	List(ctx context.Context) ([]Pod, error)
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

// List implements Pods.
func (c clusterPods) List(ctx context.Context) ([]Pod, error) {
	var list corev1.PodList
	if err := c.reader.List(ctx, &list, client.InNamespace(c.namespace)); err != nil {
		return nil, fmt.Errorf("list dispatcher pods: %w", err)
	}
	var pods []Pod
	for i := range list.Items {
		pods = append(pods, c.pod(&list.Items[i]))
	}
	return pods, nil
}

// pod returns the dispatcher in a pod.
func (c clusterPods) pod(p *corev1.Pod) Pod {
	ready := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
	pod := Pod{Name: p.Name, Workload: workload(p), Unready: !ready, Unscheduled: p.Spec.NodeName == ""}
	if (ready || running(p)) && p.DeletionTimestamp.IsZero() && p.Status.PodIP != "" {
		pod.URL = c.scheme + "://" + net.JoinHostPort(p.Status.PodIP, strconv.Itoa(c.port))
	}
	return pod
}

// running reports whether a container of the pod runs.
func running(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.State.Running != nil })
}

// workload returns the controller of a pod, usually a StatefulSet.
func workload(p *corev1.Pod) corev1.ObjectReference {
	owner := metav1.GetControllerOf(p)
	if owner == nil {
		return corev1.ObjectReference{}
	}
	return corev1.ObjectReference{APIVersion: owner.APIVersion, Kind: owner.Kind, Namespace: p.Namespace, Name: owner.Name, UID: owner.UID}
}
