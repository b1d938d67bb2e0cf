package helm

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/docs"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/need"
	"github.com/posthorn/posthorn/test/process"
)

var update = flag.Bool("update", false, "write the golden files")

var helm, root string

func TestMain(m *testing.M) {
	flag.Parse()
	var err error
	if root, err = env.Root(); err == nil {
		helm, err = Binary()
	}
	if err != nil {
		os.Exit(need.SkipAll(err))
	}
	code := m.Run()
	if err := started.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// server is the API server of all tests that need one.
var server = sync.OnceValues(func() (_ *env.Env, err error) {
	started, err = env.Start()
	return started, err
})

var started *env.Env

// render renders the chart as release "posthorn" in namespace "posthorn-system".
func render(args ...string) (string, error) { return renderAs("posthorn", args...) }

func renderAs(release string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	// A Helm that is built from its module has an old default version of the cluster.
	cmd := exec.Command(helm, append([]string{"template", release, filepath.Join(root, Chart), "--namespace", "posthorn-system",
		"--kube-version", "1.36.0"}, args...)...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", errors.New(stderr.String())
	}
	return stdout.String(), nil
}

func mustRender(t *testing.T, args ...string) string {
	t.Helper()
	text, err := render(args...)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func objects(t *testing.T, text string) []*unstructured.Unstructured {
	t.Helper()
	var list []*unstructured.Unstructured
	for _, part := range regexp.MustCompile(`(?m)^---$`).Split(text, -1) {
		object := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict([]byte(part), &object.Object); err != nil {
			t.Fatalf("parse of a manifest: got error %v, want none\n%s", err, part)
		}
		if object.Object != nil {
			list = append(list, object)
		}
	}
	return list
}

// stable replaces what differs in each rendering, the random write key of `helm test`, and in each
// release, the version.
func stable(text string) string {
	text = regexp.MustCompile(`writeKey: "[A-Za-z0-9]{32}"`).ReplaceAllString(text, `writeKey: "random"`)
	return regexp.MustCompile(`(app.kubernetes.io/version: |helm.sh/chart: posthorn-|ghcr.io/posthorn/posthorn:)\d\S+`).ReplaceAllString(text, "${1}VERSION")
}

func TestGolden(t *testing.T) {
	cases, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil || len(cases) < 4 {
		t.Fatalf("cases: got %d and error %v, want at least 4", len(cases), err)
	}
	for _, values := range cases {
		name := strings.TrimSuffix(filepath.Base(values), ".values.yaml")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The CRDs are compared byte by byte in TestCRDs.
			got := stable(mustRender(t, "--values", values, "--set", "crds.enabled=false"))
			golden := filepath.Join("testdata", name+".golden.yaml")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got); if the change is intended, run go test ./test/helm -update:\n%s", golden, diff)
			}
			objects(t, got)
		})
	}
}

// The chart accepts the values in the pages.
func TestValuesInDocs(t *testing.T) {
	seen := 0
	for _, page := range []string{"docs/install.md", "docs/metrics.md", "docs/operations.md", "docs/repair.md", "docs/security.md",
		"docs/sizing.md"} {
		blocks, err := docs.Blocks(root, page)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range blocks {
			if b.Language != "yaml" || strings.Contains(b.Text, "\nkind: ") {
				continue
			}
			seen++
			file := filepath.Join(t.TempDir(), "values.yaml")
			if err := os.WriteFile(file, []byte(b.Text), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := render("--values", file); err != nil {
				t.Errorf("values in %s:%d: got error %v, want none", page, b.Line, err)
			}
		}
	}
	if seen < 5 {
		t.Errorf("blocks with values: got %d, want at least 5", seen)
	}
}

// Helm installs the generated CRDs of the channel, and keeps them after an uninstall.
func TestCRDs(t *testing.T) {
	testCRDs(t, "standard")
	testCRDs(t, "experimental", "--set", "crds.channel=experimental")
	for _, object := range objects(t, mustRender(t, "--set", "crds.enabled=false")) {
		if object.GetKind() == "CustomResourceDefinition" {
			t.Errorf("CRDs with crds.enabled=false: got %s, want none", object.GetName())
		}
	}
}

func testCRDs(t *testing.T, channel string, args ...string) {
	t.Helper()
	found := 0
	for _, got := range objects(t, mustRender(t, args...)) {
		if got.GetKind() != "CustomResourceDefinition" {
			continue
		}
		found++
		group, plural, _ := strings.Cut(got.GetName(), ".")
		data, err := os.ReadFile(filepath.Join(root, "config", "crd", channel, plural+"_"+group+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		want := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(data, &want.Object); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want.Object["spec"], got.Object["spec"]); diff != "" {
			t.Errorf("%s (-config/crd +chart); run go run ./hack/chart:\n%s", got.GetName(), diff)
		}
		if policy := got.GetAnnotations()["helm.sh/resource-policy"]; policy != "keep" {
			t.Errorf("resource policy of %s: got %q, want keep; an uninstall would delete all users' resources", got.GetName(), policy)
		}
	}
	if all, err := filepath.Glob(filepath.Join(root, "config", "crd", channel, "*.yaml")); err != nil || found != len(all) {
		t.Errorf("CRDs in the chart: got %d, want %d as in config/crd (error %v)", found, len(all), err)
	}
}

// The error for an invalid value has its path and the valid format.
func TestInvalidValues(t *testing.T) {
	const jetStream = "replication.type=JetStream,replication.jetStream.name=a,replication.jetStream.url=nats://nats:4222"
	for name, c := range map[string]struct{ set, want string }{
		"unknown at the top":    {"dispacher.replicas=2", "at '': additional properties 'dispacher' not allowed"},
		"unknown below":         {"dispatcher.replica=2", "at '/dispatcher': additional properties 'replica' not allowed"},
		"number as text":        {"dispatcher.replicas=two", "at '/dispatcher/replicas': got string, want integer"},
		"negative":              {"dispatcher.replicas=-1", "at '/dispatcher/replicas': minimum: got -1, want 0"},
		"duration without unit": {"dispatcher.drainTimeout=10", "at '/dispatcher/drainTimeout': got number, want string"},
		"not a duration":        {"dispatcher.duplicateWindow=10 minutes", "at '/dispatcher/duplicateWindow': '10 minutes' does not match pattern '^(?<duration_such_as_10s_or_1h30m>"},
		"not a size":            {"dispatcher.persistence.size=20GB", "at '/dispatcher/persistence/size': '20GB' does not match pattern '^(?<quantity_such_as_20Gi_or_500Mi>"},
		"short digest":          {"image.digest=sha256:abc", "at '/image/digest': 'sha256:abc' does not match pattern '^(?<sha256_colon_and_64_hex_digits_or_empty>"},
		"tag in the repository": {"image.repository=registry.internal/posthorn:v1", "at '/image/repository': 'registry.internal/posthorn:v1' does not match pattern '^(?<repository_without_tag_and_digest>"},
		"channel":               {"crds.channel=stable", "at '/crds/channel': value must be one of 'standard', 'experimental'"},
		"pull policy":           {"image.pullPolicy=Sometimes", "at '/image/pullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'"},
		"pull secret, a name":   {"image.pullSecrets={registry}", "at '/image/pullSecrets/0': got string, want object"},
		"log level":             {"operator.logLevel=verbose", "at '/operator/logLevel': value must be one of 'debug', 'info', 'warn', 'error'"},
		"URL as egress":         {"egressAllow={https://hooks.example}", "at '/egressAllow/0': 'https://hooks.example' does not match pattern '^(?<network_or_address_or_host_name_without_scheme>"},
		"proxy, a host name":    {"dispatcher.trustedProxies={proxy.internal}", "at '/dispatcher/trustedProxies/0': 'proxy.internal' does not match pattern '^(?<network_such_as_10_0_0_0_slash_8_or_address>"},
		"collector, no scheme":  {"tracing.endpoint=collector:4318", "at '/tracing/endpoint': 'collector:4318' does not match pattern '^(?<URL_such_as_http_collector_4318>"},
		"share of traces":       {"tracing.sampleRatio=10", "at '/tracing/sampleRatio': maximum: got 10, want 1"},
		"shared volume":         {"dispatcher.persistence.accessModes={ReadWriteMany}", "at '/dispatcher/persistence/accessModes/0': value must be one of 'ReadWriteOnce', 'ReadWriteOncePod'"},
		"label not text":        {"commonLabels.a=true", "at '/commonLabels/a': got boolean, want string"},
		"label name, a space":   {"commonLabels.my team=a", "does not match pattern '^(?<label_name_such_as_team_or_example_dot_com_slash_team>"},
		"ingress without host":  {"ingress.enabled=true", "at '/ingress/hosts': minItems: got 0, want 1"},
		"host with scheme":      {"ingress.hosts={https://calls.example}", "at '/ingress/hosts/0': 'https://calls.example' does not match pattern '^(?<host_name_without_scheme_and_path>"},
		"route without parent":  {"httpRoute.enabled=true", "at '/httpRoute/parentRefs': minItems: got 0, want 1"},
		"port":                  {"service.port=70000", "at '/service/port': maximum: got 70,000, want 65,535"},
		"argument, not a flag":  {"dispatcher.extraArgs={orphan-grace=1h}", "at '/dispatcher/extraArgs/0': 'orphan-grace=1h' does not match pattern '^(?<flag_with_two_dashes>"},
		"TLS alone, no Secret":  {"tls.only=true", "at '/tls/secretName': minLength: got 0, want 1"},
		"TLS enabled":           {"tls.enabled=true", "at '/tls': additional properties 'enabled' not allowed"},
		"admin access":          {"adminAuth=basic", "at '/adminAuth': value must be one of 'kubernetes', 'none'"},
		"label of the chart":    {"commonLabels.app\\.kubernetes\\.io/name=a", "at '/commonLabels/app.kubernetes.io~1name': 'a' does not match pattern '^(?<none_the_chart_sets_this_label_itself>"},
		"label with spaces":     {"dispatcher.podLabels.a=b c", "at '/dispatcher/podLabels/a': 'b c' does not match pattern '^(?<label_value_of_letters_digits_dash_dot_underscore>"},
		"name with a dot":       {"fullnameOverride=a.b", "at '/fullnameOverride': 'a.b' does not match pattern '^(?<lower_case_name_without_dots_or_empty>"},
		"no disruption":         {"dispatcher.podDisruptionBudget.maxUnavailable=0", "at '/dispatcher/podDisruptionBudget/maxUnavailable': minimum: got 0, want 1"},
		"zero percent":          {"dispatcher.podDisruptionBudget.maxUnavailable=0%", "'0%' does not match pattern '^(?<percentage_such_as_25_percent>"},
		"memory in GB":          {"dispatcher.resources.limits.memory=1GB", "at '/dispatcher/resources/limits/memory': '1GB' does not match pattern '^(?<quantity_such_as_500m_or_1Gi>"},
		"negative memory":       {"operator.resources.requests.memory=-5", "at '/operator/resources/requests/memory': minimum: got -5, want 0"},
		"number in env":         {"dispatcher.extraEnv[0].name=A,dispatcher.extraEnv[0].value=5", "at '/dispatcher/extraEnv/0/value': got number, want string"},
		"env as a map":          {"operator.extraEnv.A=b", "at '/operator/extraEnv': got object, want array"},
		"network of 33 bits":    {"egressAllow={10.0.0.0/33}", "at '/egressAllow/0': '10.0.0.0/33' does not match pattern '^(?<network_or_address_or_host_name_without_scheme>"},
		"class with a space":    {"dispatcher.persistence.storageClassName=Fast SSD", "at '/dispatcher/persistence/storageClassName': 'Fast SSD' does not match pattern '^(?<lower_case_name_or_empty>"},
		"route with a scheme":   {"httpRoute.hostnames={https://calls.example}", "at '/httpRoute/hostnames/0': 'https://calls.example' does not match pattern '^(?<host_name_without_scheme_and_path>"},
		"switch as text":        {"dispatcher.persistence.enabled=off", "at '/dispatcher/persistence/enabled': got string, want boolean"},
		"switch for an object":  {"tls=true", "at '/tls': got boolean, want object"},
		"values of old chart":   {"tls=null", "the value tls is missing: it is null, or the release's values are those of an older chart; use helm upgrade --reset-then-reuse-values"},
		"traffic policy":        {"service.externalTrafficPolicy=Node", "at '/service/externalTrafficPolicy': value must be one of '', 'Cluster', 'Local'"},
		"local traffic, inside": {"service.externalTrafficPolicy=Local", "at '/service/externalTrafficPolicy': value must be one of '', 'Cluster'"},
		"class, not balanced":   {"service.loadBalancerClass=internal", "at '/service/loadBalancerClass': maxLength: got 8, want 0"},
		"check, not local": {"service.type=LoadBalancer,service.healthCheckNodePort=30081",
			"at '/service/healthCheckNodePort': got number, want null"},
		"distribution":          {"service.trafficDistribution=Nearest", "at '/service/trafficDistribution': value must be one of '', 'PreferClose', 'PreferSameZone', 'PreferSameNode'"},
		"certificate, issuer":   {"tls.certManager.enabled=true", "at '/tls/certManager/issuerRef': missing property 'name'"},
		"certificate, lifetime": {"tls.certManager.duration=90d", "at '/tls/certManager/duration': '90d' does not match pattern '^(?<duration_such_as_10s_or_1h30m_or_empty>"},
		"egress, API server":    {"networkPolicy.egress.enabled=true", "at '/networkPolicy/egress/apiServer': minItems: got 0, want 1"},
		"egress, an address":    {"networkPolicy.egress.apiServer={10.0.0.10}", "at '/networkPolicy/egress/apiServer/0': '10.0.0.10' does not match pattern '^(?<network_such_as_10_0_0_0_slash_8>"},
		"probe, another field":  {"dispatcher.readinessProbe.httpGet.path=/", "at '/dispatcher/readinessProbe': additional properties 'httpGet' not allowed"},
		"probe of the operator": {"operator.readinessProbe.httpGet.path=/", "at '/operator/readinessProbe': additional properties 'httpGet' not allowed"},
		"strategy of another":   {"dispatcher.updateStrategy.type=Recreate", "at '/dispatcher/updateStrategy/type': value must be one of 'RollingUpdate', 'OnDelete'"},
		"DNS policy":            {"operator.dnsPolicy=Host", "at '/operator/dnsPolicy': value must be one of '', 'ClusterFirst', 'ClusterFirstWithHostNet', 'Default', 'None'"},
		"registry, a URL":       {"global.imageRegistry=https://mirror.internal", "at '/global/imageRegistry': 'https://mirror.internal' does not match pattern '^(?<registry_without_scheme>"},
		"account as text":       {"operator.serviceAccount.create=maybe", "at '/operator/serviceAccount/create': got string, want "},
		"extra object, number":  {"extraObjects={5}", "at '/extraObjects/0': got number, want string or object"},
		"log without servers": {"replication.type=JetStream,replication.jetStream.name=a",
			"at '/replication/jetStream/url': minLength: got 0, want 1"},
		"log without a name":    {"replication.type=JetStream,replication.jetStream.url=nats://nats:4222", "at '/replication/jetStream/name': minLength: got 0, want 1"},
		"installation, a space": {"replication.jetStream.installation=a b", "at '/replication/jetStream/installation': 'a b' does not match pattern '^(?<up_to_200_letters_digits_and_dot_underscore_colon_slash_dash>"},
		"log of HTTP":           {"replication.jetStream.url=http://nats:4222", "at '/replication/jetStream/url': 'http://nats:4222' does not match pattern '^(?<nats_or_tls_URLs_separated_by_commas>"},
		"scaled, on volumes":    {"dispatcher.autoscaling.enabled=true", "dispatcher.autoscaling.enabled needs replication.type JetStream and replication.jetStream.slots of 2 or more"},
		"scaled, one slot":      {jetStream + ",dispatcher.autoscaling.enabled=true", "dispatcher.autoscaling.enabled needs replication.type JetStream and replication.jetStream.slots of 2 or more"},
		"scaled, few slots":     {jetStream + ",dispatcher.autoscaling.enabled=true,replication.jetStream.slots=4", "dispatcher.autoscaling.maxReplicas is 6 and replication.jetStream.slots 4: pods without a slot deliver nothing"},
		"scaled, bounds":        {jetStream + ",dispatcher.autoscaling.enabled=true,replication.jetStream.slots=4,dispatcher.autoscaling.minReplicas=4,dispatcher.autoscaling.maxReplicas=3", "minReplicas is 4 and maxReplicas 3"},
		"scaled by nothing":     {jetStream + ",dispatcher.autoscaling.enabled=true,replication.jetStream.slots=6,dispatcher.autoscaling.cpu=", "dispatcher.autoscaling needs cpu or firstAttemptAge"},
		"age with a unit":       {"dispatcher.autoscaling.firstAttemptAge=10s", "'10s' does not match pattern '^(?<seconds_such_as_10_or_empty>"},
		"timeout above 60s":     {"ceilings.deliveryTimeout=90s", "ceilings.deliveryTimeout is 90s: set 5s to 60s"},
		"timeout below 5s":      {"ceilings.deliveryTimeout=4s", "ceilings.deliveryTimeout is 4s: set 5s to 60s"},
		"window above 720h":     {"ceilings.retryWindow=1000h", "ceilings.retryWindow is 1000h: set 4h to 720h"},
		"window below 4h":       {"ceilings.retryWindow=239m", "ceilings.retryWindow is 239m: set 4h to 720h"},
		"reader, no namespace":  {"monitoring.readers[0].name=prometheus", "at '/monitoring/readers/0': missing property 'namespace'"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := render("--set", c.set)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("--set %s: got error %v, want one with %s", c.set, err, c.want)
			}
		})
	}
}

// Helm passes the condition of a parent chart as the value enabled, and its global values.
func TestAsADependency(t *testing.T) {
	if _, err := render("--set", "enabled=true,global.storageClass=fast"); err != nil {
		t.Error(err)
	}
}

// global.imageRegistry replaces the registry of the image, in every pod.
func TestImageRegistry(t *testing.T) {
	for repository, want := range map[string]string{
		"ghcr.io/posthorn/posthorn": "mirror.internal/posthorn/posthorn", "localhost/posthorn": "mirror.internal/posthorn",
		"registry:5000/a/posthorn": "mirror.internal/a/posthorn", "posthorn/posthorn": "mirror.internal/posthorn/posthorn",
		"posthorn": "mirror.internal/posthorn",
	} {
		text := mustRender(t, "--set", "global.imageRegistry=mirror.internal,image.tag=v9,image.repository="+repository)
		check.Equal(t, "images of "+repository, strings.Count(text, "image: "+want+":v9\n"), 3)
	}
}

// Helm refuses clusters that are older than the oldest version that the tests use.
func TestKubernetesVersion(t *testing.T) {
	for version, want := range map[string]string{
		"1.34.0": "", "1.34.4-eks-1": "", "1.40.0": "",
		"1.33.9": "chart requires kubeVersion: >= 1.34.0-0 which is incompatible with Kubernetes v1.33.9",
	} {
		_, err := render("--kube-version", version)
		if got := fmt.Sprint(err); err == nil && want != "" || err != nil && (want == "" || !strings.Contains(got, want)) {
			t.Errorf("Kubernetes %s: got error %v, want %q", version, err, want)
		}
	}
}

// The notes have the URL for calls and the next commands, with the names of the release.
func TestNotes(t *testing.T) {
	env.Need(t)
	server, err := server()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		release, namespace string
		args               []string
		want, not          []string
	}{
		"default": {"posthorn", "posthorn-system", nil,
			[]string{"http://posthorn-dispatcher.posthorn-system.svc:80/v1/", "helm test posthorn --namespace posthorn-system",
				"\n  kubectl posthorn why crm", "private addresses are denied",
				"\n---\napiVersion: ", "\nEOF\n"}, // A shell gets them by copy and paste.
			[]string{"https://posthorn", "WARNING"}},
		"TLS alone, elsewhere": {"calls", "events", []string{"--values", "testdata/tls.values.yaml", "--set", "httpRoute.enabled=false,tls.certManager.enabled=false,tls.secretName=posthorn-calls"},
			[]string{"https://calls-posthorn-dispatcher.events.svc:443/v1/", "Secret posthorn-calls", "https://calls.example.com/v1/", "kubectl posthorn --system-namespace events --support-account calls-posthorn-support why crm"},
			[]string{"http://"}},
		"warnings": {"posthorn", "posthorn-system", []string{"--set", "adminAuth=none,dispatcher.persistence.enabled=false,egressAllow={10.0.0.0/8},monitoring.readers[0].name=a,monitoring.readers[0].namespace=b"},
			[]string{"accepted calls are lost with their pod", "can read dead letters", "--dispatcher-plain", "block Prometheus"},
			[]string{"private addresses are denied"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(helm, append([]string{"install", c.release, filepath.Join(root, Chart), "--namespace", c.namespace, "--kubeconfig",
				server.Kubeconfig(), "--dry-run=client", "--set", "crds.enabled=false"}, c.args...)...)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("helm install: got error %v, want none\n%s", err, out)
			}
			_, notes, _ := strings.Cut(string(out), "\nNOTES:\n")
			for _, want := range c.want {
				if !strings.Contains(notes, want) {
					t.Errorf("notes: got\n%s\nwant %q in them", notes, want)
				}
			}
			for _, not := range c.not {
				if strings.Contains(notes, not) {
					t.Errorf("notes: got\n%s\nwant no %q in them", notes, not)
				}
			}
		})
	}
}

// The binary accepts every flag and value in the chart.
func TestFlagsAreKnown(t *testing.T) {
	binary, err := process.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	cases, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, values := range cases {
		seen := 0
		for _, o := range objects(t, mustRender(t, "--values", values, "--set", "crds.enabled=false")) {
			path := []string{"spec", "template", "spec", "containers"}
			if o.GetKind() == "Pod" {
				path = []string{"spec", "containers"}
			}
			containers, _, _ := unstructured.NestedSlice(o.Object, path...)
			for _, c := range containers {
				seen++
				args, _, _ := unstructured.NestedStringSlice(c.(map[string]any), "args")
				// The program parses the flags before --help.
				if out, err := exec.Command(binary, append(args, "--help")...).CombinedOutput(); err != nil {
					t.Errorf("%s, %s: posthorn %v: got error %v, want none: %s", values, o.GetName(), args, err, out)
				}
			}
		}
		if seen != 3 {
			t.Errorf("%s: containers: got %d, want 3: operator, dispatcher and test", values, seen)
		}
	}
}

// The selectors match their pods with other names, too.
func TestSelectors(t *testing.T) {
	for _, name := range []string{"posthorn", "other"} {
		t.Run(name, func(t *testing.T) {
			var pods []corev1.PodTemplateSpec
			var dispatcher appsv1.StatefulSet
			var operator appsv1.Deployment
			services := map[string]corev1.Service{}
			for _, o := range objects(t, mustRender(t, "--set", "fullnameOverride="+name, "--set", "dispatcher.podLabels.a=b")) {
				var into any
				service := &corev1.Service{}
				switch o.GetKind() {
				case "StatefulSet":
					into = &dispatcher
				case "Deployment":
					into = &operator
				case "Service":
					into = service
				default:
					continue
				}
				if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, into); err != nil {
					t.Fatal(err)
				}
				if o.GetKind() == "Service" {
					services[o.GetName()] = *service
				}
			}
			pods = append(pods, dispatcher.Spec.Template, operator.Spec.Template)
			matches := func(selects string, selector map[string]string, want string) {
				t.Helper()
				for _, p := range pods {
					if got, want := labels.SelectorFromSet(selector).Matches(labels.Set(p.Labels)),
						p.Labels["app.kubernetes.io/component"] == want; got != want {
						t.Errorf("%s selects the pods of %s: got %v, want %v", selects, p.Labels["app.kubernetes.io/component"], got, want)
					}
				}
			}
			matches("the StatefulSet", dispatcher.Spec.Selector.MatchLabels, "dispatcher")
			matches("the Deployment", operator.Spec.Selector.MatchLabels, "operator")
			if len(services) != 2 {
				t.Errorf("Services: got %d, want 2", len(services))
			}
			for _, s := range services {
				matches("Service "+s.Name, s.Spec.Selector, "dispatcher")
			}
			if _, ok := services[dispatcher.Spec.ServiceName]; !ok {
				t.Errorf("serviceName of the StatefulSet: got %q, want the name of a Service", dispatcher.Spec.ServiceName)
			}
			for _, arg := range operator.Spec.Template.Spec.Containers[0].Args {
				if text, ok := strings.CutPrefix(arg, "--dispatcher-selector="); ok {
					selector, err := labels.ConvertSelectorToLabelsMap(text)
					if err != nil {
						t.Fatal(err)
					}
					matches(arg, selector, "dispatcher")
					return
				}
			}
			t.Error("the operator lacks the flag --dispatcher-selector")
		})
	}
}

// drainJob returns the Job in docs/drain.md.
func drainJob(t *testing.T) *unstructured.Unstructured {
	t.Helper()
	blocks, err := docs.Blocks("../..", "docs/drain.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		if b.Language == "yaml" {
			return objects(t, b.Text)[0]
		}
	}
	t.Fatal("docs/drain.md: got no Job, want one")
	return nil
}

// The Job of a drain uses the account, the volume and the security settings of a dispatcher, and
// nothing of the chart selects its pod.
func TestDrainJob(t *testing.T) {
	var job batchv1.Job
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(drainJob(t).Object, &job); err != nil {
		t.Fatal(err)
	}
	drained := job.Spec.Template
	selectors := 0
	for _, o := range objects(t, mustRender(t, "--set", "networkPolicy.enabled=true,dispatcher.podDisruptionBudget.enabled=true,monitoring.podMonitor.enabled=true")) {
		for _, path := range [][]string{{"spec", "selector"}, {"spec", "selector", "matchLabels"}, {"spec", "podSelector", "matchLabels"}} {
			selector, found, err := unstructured.NestedStringMap(o.Object, path...)
			if !found || err != nil {
				continue
			}
			selectors++
			if labels.SelectorFromSet(selector).Matches(labels.Set(drained.Labels)) {
				t.Errorf("%s %s selects the pod of the Job", o.GetKind(), o.GetName())
			}
		}
		switch o.GetKind() {
		case "StatefulSet":
			var set appsv1.StatefulSet
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &set); err != nil {
				t.Fatal(err)
			}
			pod, container := set.Spec.Template.Spec, set.Spec.Template.Spec.Containers[0]
			check.Equal(t, "account", drained.Spec.ServiceAccountName, pod.ServiceAccountName)
			check.Same(t, "security context of the pod", drained.Spec.SecurityContext, pod.SecurityContext)
			check.Same(t, "security context of the container", drained.Spec.Containers[0].SecurityContext, container.SecurityContext)
			check.Same(t, "volume mounts", drained.Spec.Containers[0].VolumeMounts, container.VolumeMounts)
			claim := set.Spec.VolumeClaimTemplates[0].Name + "-" + set.Name + "-2"
			check.Equal(t, "claim", drained.Spec.Volumes[0].PersistentVolumeClaim.ClaimName, claim)
		case "Deployment":
			containers, _, _ := unstructured.NestedSlice(o.Object, "spec", "template", "spec", "containers")
			args, _, _ := unstructured.NestedStringSlice(containers[0].(map[string]any), "args")
			for _, arg := range args {
				if text, ok := strings.CutPrefix(arg, "--dispatcher-selector="); ok {
					selector, err := labels.Parse(text)
					if err != nil {
						t.Fatal(err)
					}
					selectors++
					check.Equal(t, "operator selects the pod of the Job as a dispatcher", selector.Matches(labels.Set(drained.Labels)), false)
				}
			}
		}
	}
	if selectors < 8 {
		t.Errorf("selectors of the chart: got %d, want at least 8", selectors)
	}
}

// An API server accepts all objects and fields, in a namespace that enforces the
// restricted Pod Security Standard.
func TestAPIServerAccepts(t *testing.T) {
	env.Need(t)
	server, err := server()
	if err != nil {
		t.Fatal(err)
	}
	cluster, err := client.New(server.Config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	namespace := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Namespace",
		"metadata": map[string]any{"name": "posthorn-system", "labels": map[string]any{"pod-security.kubernetes.io/enforce": "restricted"}},
	}}
	if err := cluster.Create(context.Background(), namespace); err != nil {
		t.Fatal(err)
	}
	strict := client.WithFieldValidation(cluster, "Strict")
	files, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("longname-", 6)[:53] // the maximum length of Helm
	cases := [][]string{
		{"true"}, // a name that is not a string in YAML without quotes
		{long},
		{"posthorn", "--set", "fullnameOverride=" + long[:40]},
		{"posthorn", "--set", "commonLabels.a=b,dispatcher.podLabels.a=c"},
	}
	for _, file := range files {
		cases = append(cases, []string{"posthorn", "--values", file})
	}
	for _, values := range cases {
		seen := 0
		text, err := renderAs(values[0], values[1:]...)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range append(objects(t, text), drainJob(t)) {
			if _, ok := foreign[o.GroupVersionKind().Group]; ok {
				continue // The API server does not have these kinds; see TestForeignKindsAccept.
			}
			seen++
			create := []client.CreateOption{client.DryRunAll}
			if o.GetKind() == "CustomResourceDefinition" {
				continue // The CRDs are already installed.
			}
			if err := strict.Create(context.Background(), o.DeepCopy(), create...); err != nil &&
				(o.GetKind() != "ServiceAccount" || !apierrors.IsAlreadyExists(err)) {
				t.Errorf("%v: create %s %s: got error %v, want none", values, o.GetKind(), o.GetName(), err)
			}
			template, found, _ := unstructured.NestedMap(o.Object, "spec", "template")
			if !found {
				continue
			}
			pod := &unstructured.Unstructured{Object: template}
			pod.SetAPIVersion("v1")
			pod.SetKind("Pod")
			pod.SetName("pod")
			pod.SetNamespace("posthorn-system")
			// A dry run does not create the account, and the StatefulSet would create the volume claim.
			name, _, _ := unstructured.NestedString(pod.Object, "spec", "serviceAccountName")
			account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "posthorn-system", Name: name}}
			if err := strict.Create(context.Background(), account); err != nil && !apierrors.IsAlreadyExists(err) {
				t.Fatal(err)
			}
			volumes, _, _ := unstructured.NestedSlice(pod.Object, "spec", "volumes")
			claims, _, _ := unstructured.NestedSlice(o.Object, "spec", "volumeClaimTemplates")
			for range claims {
				volumes = append(volumes, map[string]any{"name": "data", "persistentVolumeClaim": map[string]any{"claimName": "data"}})
			}
			_ = unstructured.SetNestedSlice(pod.Object, volumes, "spec", "volumes")
			// No controller creates tokens of ServiceAccounts here.
			_ = unstructured.SetNestedField(pod.Object, false, "spec", "automountServiceAccountToken")
			if err := strict.Create(context.Background(), pod, client.DryRunAll); err != nil {
				t.Errorf("%v: create the pod of %s: got error %v, want none", values, o.GetName(), err)
			}
		}
		if seen < 10 {
			t.Errorf("%v: objects: got %d, want at least 10", values, seen)
		}
	}
}
