package helm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/test/docs"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/need"
)

// foreign are the kinds of other projects in the chart and its docs, with the module of their CRDs, its
// checksum and the CRDs' paths in it.
var foreign = map[string]struct {
	module, sum string
	crds        []string
}{
	"cert-manager.io": {
		"github.com/cert-manager/cert-manager@v1.19.1", "h1:Txh8L/nLWTDcb7ZnXuXbTe15BxQnLbLirXmbNk0fGgY=",
		[]string{"deploy/crds/cert-manager.io_certificates.yaml"},
	},
	"gateway.networking.k8s.io": {
		"sigs.k8s.io/gateway-api@v1.4.1", "h1:NPxFutNkKNa8UfLd2CMlEuhIPMQgDQ6DXNKG9sHbJU8=",
		[]string{"config/crd/standard/gateway.networking.k8s.io_httproutes.yaml"},
	},
	"keda.sh": {
		"github.com/kedacore/keda/v2@v2.17.2", "h1:xlrcK5TKABJF9PebK79sgL07s/csGjL3H4m72OkZXxk=",
		[]string{"config/crd/bases/keda.sh_scaledobjects.yaml"},
	},
	"monitoring.coreos.com": {
		"github.com/prometheus-operator/prometheus-operator@v0.85.0", "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
		[]string{
			"example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
			"example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
			"example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
		},
	},
}

// The CRDs of cert-manager, the Gateway API and the Prometheus operator accept the chart's objects, and
// KEDA's accept the sample in the docs, with all their fields.
func TestForeignKindsAccept(t *testing.T) {
	env.Need(t)
	server, kubectl := env.For(t)
	kubectl("", "create", "namespace", "posthorn-system")
	for _, f := range foreign {
		dir := moduleDir(t, f.module, f.sum)
		for _, crd := range f.crds {
			file := filepath.Join(dir, filepath.FromSlash(crd))
			kubectl("", "apply", "--server-side", "-f", file)
			kubectl("", "wait", "--for=condition=Established", "--timeout=1m", "-f", file)
		}
	}
	cluster, err := client.New(server.Config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	strict := client.WithFieldValidation(cluster, "Strict")
	files, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	create := func(from string, o *unstructured.Unstructured) {
		group := o.GroupVersionKind().Group
		if _, ok := foreign[group]; !ok {
			return
		}
		seen[group]++
		if err := strict.Create(context.Background(), o, client.DryRunAll); err != nil {
			t.Errorf("%s: create %s %s: got error %v, want none", from, o.GetKind(), o.GetName(), err)
		}
	}
	for _, values := range files {
		for _, o := range objects(t, mustRender(t, "--values", values, "--set", "crds.enabled=false")) {
			create(values, o)
		}
	}
	const page = "docs/replication.md"
	blocks, err := docs.Blocks(root, page)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		if b.Language == "yaml" && strings.Contains(b.Text, "\nkind: ") {
			for _, o := range objects(t, b.Text) {
				create(page, o)
			}
		}
	}
	for group := range foreign {
		if seen[group] == 0 {
			t.Errorf("objects of %s: got none, want some", group)
		}
	}
}

// moduleDir returns the directory of a Go module, which it downloads if necessary.
func moduleDir(t *testing.T, module, sum string) string {
	t.Helper()
	cmd := exec.Command("go", "mod", "download", "-json", module)
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	cmd.Dir = t.TempDir() // outside of the repository's module
	out, err := cmd.Output()
	var download struct{ Dir, Sum, Error string }
	if jsonErr := json.Unmarshal(out, &download); err != nil || jsonErr != nil {
		need.Skip(t, fmt.Errorf("download %s: %w %s", module, errors.Join(err, jsonErr), download.Error))
	}
	if download.Sum != sum {
		t.Fatalf("checksum of %s: got %s, want %s", module, download.Sum, sum)
	}
	return download.Dir
}

// The NetworkPolicy for egress excludes the same ranges as the dispatchers' address guard.
func TestEgressPolicyExcludesDeniedRanges(t *testing.T) {
	var excluded, blocks []netip.Prefix
	for _, o := range objects(t, mustRender(t, "--set", "crds.enabled=false,networkPolicy.egress.enabled=true,networkPolicy.egress.apiServer={192.0.2.1/32}")) {
		if o.GetKind() != "NetworkPolicy" {
			continue
		}
		var policy networkingv1.NetworkPolicy
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &policy); err != nil {
			t.Fatal(err)
		}
		for _, rule := range policy.Spec.Egress {
			for _, peer := range rule.To {
				if peer.IPBlock == nil || len(peer.IPBlock.Except) == 0 {
					continue
				}
				blocks = append(blocks, netip.MustParsePrefix(peer.IPBlock.CIDR))
				for _, e := range peer.IPBlock.Except {
					excluded = append(excluded, netip.MustParsePrefix(e))
				}
			}
		}
	}
	if len(blocks) != 2 {
		t.Fatalf("public blocks: got %v, want one for IPv4 and one for IPv6", blocks)
	}
	contains := func(in []netip.Prefix, p netip.Prefix) bool {
		return slices.ContainsFunc(in, func(q netip.Prefix) bool { return q.Contains(p.Addr()) && q.Bits() <= p.Bits() })
	}
	denied := egress.DeniedRanges()
	for _, e := range excluded {
		if !contains(denied, e) {
			t.Errorf("excluded range %s: got no denial by the dispatchers, want one", e)
		}
	}
	for _, d := range denied {
		if contains(blocks, d) && !contains(excluded, d) {
			t.Errorf("range %s, which the dispatchers deny: got no exclusion, want one", d)
		}
	}
}
