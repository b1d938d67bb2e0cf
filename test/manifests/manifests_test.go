// Package manifests tests config/ with a real API server: all manifests render and are
// valid, and the pods are allowed in a namespace that enforces the restricted Pod Security
// Standard.
package manifests

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/test/env"
)

func TestConfigDefault(t *testing.T) {
	server, _ := env.For(t)
	ctx := context.Background()
	cluster, err := client.New(server.Config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	root, err := env.Root()
	if err != nil {
		t.Fatal(err)
	}
	// The manifests with the component for calls over TLS.
	dir := t.TempDir()
	for _, name := range []string{"default", "tls", "crd", "rbac", "operator", "dispatcher"} {
		if err := os.CopyFS(filepath.Join(dir, name), os.DirFS(filepath.Join(root, "config", name))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte("resources: [default]\ncomponents: [tls]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	plain, err := server.Kubectl("", "kustomize", filepath.Join(dir, "default"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := server.Kubectl("", "kustomize", dir)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(plain, "calls-tls") || strings.Count(text, "calls-tls") != 4 {
		t.Errorf("occurrences of calls-tls: got %d without and %d with the component, want 0 and 4", strings.Count(plain, "calls-tls"), strings.Count(text, "calls-tls"))
	}

	kinds := map[string]int{}
	var pods []*corev1.Pod
	for _, part := range regexp.MustCompile(`(?m)^---$`).Split(text, -1) {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(part), &object.Object); err != nil {
			t.Fatal(err)
		}
		kinds[object.GetKind()]++
		options := []client.ApplyOption{client.FieldOwner("test"), client.ForceOwnership, client.DryRunAll}
		if object.GetKind() == "Namespace" {
			options = options[:2] // Dry runs of the other objects need the namespace.
		}
		if err := cluster.Apply(ctx, client.ApplyConfigurationFromUnstructured(object), options...); err != nil {
			t.Errorf("apply %s %s: got error %v, want none", object.GetKind(), object.GetName(), err)
		}
		if pod := podOf(t, object); pod != nil {
			pods = append(pods, pod)
		}
	}
	crds, err := filepath.Glob(filepath.Join(root, "config", "crd", "standard", "*.yaml"))
	if err != nil || len(crds) < 2 {
		t.Fatalf("CRDs in config/crd/standard: got %d and error %v, want at least 2", len(crds), err)
	}
	for kind, want := range map[string]int{"Namespace": 1, "CustomResourceDefinition": len(crds), "Deployment": 1, "StatefulSet": 1,
		"ServiceAccount": 4, "NetworkPolicy": 2} {
		if kinds[kind] != want {
			t.Errorf("objects of kind %s: got %d, want %d", kind, kinds[kind], want)
		}
	}

	if len(pods) != 2 {
		t.Fatalf("workloads: got %d, want 2", len(pods))
	}
	image := chartImage(t, filepath.Join(root, "charts", "posthorn"))
	for _, pod := range pods {
		t.Run(pod.Spec.Containers[0].Name, func(t *testing.T) {
			if err := cluster.Create(ctx, pod, client.DryRunAll); err != nil {
				t.Errorf("create the pod: got error %v, want none", err)
			}
			c := pod.Spec.Containers[0]
			if c.SecurityContext.ReadOnlyRootFilesystem == nil || !*c.SecurityContext.ReadOnlyRootFilesystem {
				t.Error("the root file system is writable")
			}
			if c.Image != image {
				t.Errorf("image: got %s, want %s as in the chart", c.Image, image)
			}
			if c.ReadinessProbe == nil || c.LivenessProbe == nil {
				t.Errorf("probes: got readiness %v and liveness %v, want both", c.ReadinessProbe, c.LivenessProbe)
			}
			if c.Resources.Requests.Memory().IsZero() || c.Resources.Limits.Memory().IsZero() {
				t.Error("the request or the limit of memory is missing")
			}
			// The standard rejects a pod with privilege escalation.
			yes := true
			bad := pod.DeepCopy()
			bad.Spec.Containers[0].SecurityContext.AllowPrivilegeEscalation = &yes
			if err := cluster.Create(ctx, bad, client.DryRunAll); err == nil || !strings.Contains(err.Error(), "restricted") {
				t.Errorf("create a pod with privilege escalation: got error %v, want one of the restricted standard", err)
			}
		})
	}
}

// chartImage returns the default image of a chart.
func chartImage(t *testing.T, dir string) string {
	t.Helper()
	var about struct{ AppVersion string }
	var values struct{ Image struct{ Repository string } }
	for name, into := range map[string]any{"Chart.yaml": &about, "values.yaml": &values} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil {
			err = yaml.Unmarshal(data, into)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return values.Image.Repository + ":" + about.AppVersion
}

// podOf returns the pod of a workload, or nil for other kinds.
func podOf(t *testing.T, object *unstructured.Unstructured) *corev1.Pod {
	t.Helper()
	typed, err := scheme.Scheme.New(object.GroupVersionKind())
	if err != nil {
		return nil // It is not a built-in kind.
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, typed); err != nil {
		t.Fatal(err)
	}
	var template corev1.PodTemplateSpec
	switch w := typed.(type) {
	case *appsv1.Deployment:
		template = w.Spec.Template
	case *appsv1.StatefulSet:
		template = w.Spec.Template
		for _, claim := range w.Spec.VolumeClaimTemplates {
			template.Spec.Volumes = append(template.Spec.Volumes, corev1.Volume{Name: claim.Name, VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim.Name},
			}})
		}
	default:
		return nil
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: object.GetNamespace(), Name: object.GetName() + "-0", Labels: template.Labels},
		Spec:       template.Spec,
	}
}
