package helm

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/test/env"
)

// Helm reports a changed mode of an installed release, which Kubernetes would reject without the reason.
func TestChangedMode(t *testing.T) {
	env.Need(t)
	server, err := server()
	if err != nil {
		t.Fatal(err)
	}
	cluster, err := client.New(server.Config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const log = "replication.type=JetStream,replication.jetStream.name=a,replication.jetStream.url=nats://nats:4222"
	for name, c := range map[string]struct{ installed, upgrade, want string }{
		"other-values": {"dispatcher.replicas=1", "dispatcher.replicas=3", ""},
		"to-a-log":     {"dispatcher.replicas=1", log, "posthorn-dispatcher was installed with volumes"},
		"to-no-volume": {"dispatcher.replicas=1", "dispatcher.persistence.enabled=false", "posthorn-dispatcher was installed with volumes"},
		"from-a-log":   {log, "dispatcher.replicas=1", "posthorn-dispatcher was installed without volumes"},
	} {
		t.Run(name, func(t *testing.T) {
			create := func(o *unstructured.Unstructured) {
				if err := cluster.Create(context.Background(), o); err != nil {
					t.Fatal(err)
				}
			}
			create(&unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Namespace",
				"metadata": map[string]any{"name": name}}})
			for _, o := range objects(t, mustRender(t, "--set", c.installed)) {
				if o.GetKind() == "StatefulSet" {
					o.SetNamespace(name)
					create(o)
				}
			}
			cmd := exec.Command(helm, "template", "posthorn", filepath.Join(root, Chart), "--namespace", name, "--kubeconfig", server.Kubeconfig(),
				"--dry-run=server", "--kube-version", "1.36.0", "--set", c.upgrade)
			out, err := cmd.CombinedOutput()
			if (err == nil) != (c.want == "") || !strings.Contains(string(out), c.want) {
				t.Errorf("--set %s: got error %v, want %q in\n%s", c.upgrade, err, c.want, out)
			}
		})
	}
}
