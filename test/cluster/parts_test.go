package cluster

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/admin/kubeauth"
	"github.com/posthorn/posthorn/dispatcher/configsource"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// large returns manifests of n destinations with 56 KiB that cannot be compressed, which get no call.
func large(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "---\napiVersion: posthorn.dev/v1beta1\nkind: WebhookDestination\nmetadata: {name: large-%03d}\nspec:\n  sourceRefs: [{name: web}]\n  filter: {events: [Never]}\n  endpoints:\n", i)
		for e := range 5 {
			fmt.Fprintf(&b, "  - name: e%d\n    url: https://hooks.example/%d\n    headers:\n", e, e)
			for h := range 4 {
				noise := make([]byte, 2900)
				_, _ = rand.Read(noise)
				fmt.Fprintf(&b, "    - {name: X-%d, value: %q}\n", h, base64.StdEncoding.EncodeToString(noise))
			}
		}
	}
	return b.String()
}

// A namespace whose live config has more than 3 MB works like any other: its destinations become
// Ready, an edit takes effect and writes one part, and a part that was deleted changes nothing for a
// running dispatcher, parks the namespace in one that starts, and is written again.
func TestLargeNamespace(t *testing.T) {
	server, kubectl, logs := cluster(t)
	log := slog.New(slog.NewTextHandler(logs, nil))
	if err := server.Install(); err != nil {
		t.Fatal(err)
	}
	policy, err := egress.ParsePolicy([]string{"127.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(server.As("posthorn-dispatcher"))
	if err != nil {
		t.Fatal(err)
	}
	data := t.TempDir()
	var d *dispatcher.Dispatcher
	start := func() (stop func()) {
		t.Helper()
		var certificate kubeauth.Certificate
		if d, err = dispatcher.New(dispatcher.Options{
			DataDir: data, Pod: "posthorn-dispatcher-0", Egress: policy, Logger: log,
			ServerOptions: dispatcher.ServerOptions{
				Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0",
				AdminTLS: certificate.Config(), AdminGuard: kubeauth.New(client, log).Wrap,
			},
		}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		var running sync.WaitGroup
		for component, f := range map[string]func() error{
			"dispatcher":   func() error { return d.Run(ctx) },
			"certificate":  func() error { return certificate.Watch(ctx, client, release, log) },
			"configsource": func() error { return configsource.Watch(ctx, client, release, d, log) },
		} {
			running.Go(func() {
				if err := f(); err != nil {
					t.Errorf("%s: got error %v, want none", component, err)
				}
			})
		}
		stop = func() { cancel(); running.Wait() }
		t.Cleanup(stop)
		return stop
	}
	stopDispatcher := start()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(kubectl("", "create", "token", "posthorn-operator", "--namespace", release, "--audience",
		adminapi.TokenAudience)), 0o600); err != nil {
		t.Fatal(err)
	}
	startOperator := func() (stop func()) {
		return operator(t, server.As("posthorn-operator"), controllers.Options{
			Pods: onePod{"https://" + d.AdminAddr().String()}, DispatcherTokenFile: token, Policy: compile.Policy{CheckHost: policy.CheckHost},
		})
	}
	stopOperator := startOperator()
	send := func(id string) int {
		t.Helper()
		request, err := http.NewRequest(http.MethodPost, "http://"+d.Addr().String()+"/v1/track",
			strings.NewReader(fmt.Sprintf(`{"messageId": %q, "userId": "u1", "event": "Order Completed"}`, id)))
		if err != nil {
			t.Fatal(err)
		}
		request.SetBasicAuth("hush-web-key", "")
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
		return response.StatusCode
	}
	administrator, err := kubernetes.NewForConfig(server.Config)
	if err != nil {
		t.Fatal(err)
	}
	secrets := administrator.CoreV1().Secrets(release)
	parts := func() (names map[string]bool, size int) {
		t.Helper()
		list, err := secrets.List(context.Background(), metav1.ListOptions{LabelSelector: liveconfig.LabelPart})
		if err != nil {
			t.Fatal(err)
		}
		names = map[string]bool{}
		for _, s := range list.Items {
			names[s.Name] = true
			size += len(s.Data[liveconfig.PartKey])
		}
		return names, size
	}

	// listed returns the parts if they are those that the root lists: old ones are removed.
	listed := func() (names map[string]bool, size int) {
		t.Helper()
		root, err := secrets.Get(context.Background(), liveconfig.SecretName("default"), metav1.GetOptions{})
		if err != nil {
			return nil, 0
		}
		names, size = parts()
		wanted := liveconfig.PartNames("default", root.Data)
		if len(wanted) != len(names) || slices.ContainsFunc(wanted, func(name string) bool { return !names[name] }) {
			return nil, 0
		}
		return names, size
	}

	hook, edited := newReceiver(t, "hush-crm-secret"), newReceiver(t, "hush-crm-secret")
	kubectl(webToCRM(hook.URL)+large(56), "apply", "--server-side", "-f", "-")
	kubectl("", "wait", "whd", "--all", "--for=condition=Ready", "--timeout=5m")
	check.Equal(t, "status of a call", send("first"), http.StatusOK)
	wait.True(t, "a delivery", func() bool { return hook.count() == 1 })
	var before map[string]bool
	wait.True(t, "the removal of old parts", func() bool {
		names, size := listed()
		before = names
		return size > 3_000_000 && size < 4_000_000
	})
	if n := len(before); n < 12 || n > liveconfig.MaxParts {
		t.Errorf("parts: got %d, want 12 to %d", n, liveconfig.MaxParts)
	}

	begin := time.Now()
	kubectl("", "patch", "whd", "crm", "--type=json", "-p", fmt.Sprintf(`[{"op": "replace", "path": "/spec/endpoints/0/url", "value": %q}]`, edited.URL))
	kubectl("", "wait", "whd/crm", "--for=jsonpath={.status.observedGeneration}=2")
	kubectl("", "wait", "whd/crm", "--for=condition=Programmed")
	t.Logf("from the edit to Programmed: %v", time.Since(begin))
	check.Equal(t, "status of a call after the edit", send("second"), http.StatusOK)
	wait.True(t, "a delivery to the new URL", func() bool { return edited.count() == 1 })
	var names map[string]bool
	wait.True(t, "the removal of one old part", func() bool { names, _ = listed(); return len(names) > 0 })
	var added []string
	for name := range names {
		if !before[name] {
			added = append(added, name)
		}
	}
	check.Equal(t, "parts written by the edit", len(added), 1)

	// A part is deleted while no operator can write it.
	stopOperator()
	if err := secrets.Delete(context.Background(), added[0], metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wait.True(t, "the rejection of the incomplete config", func() bool {
		return strings.Contains(logs.String(), "Secret "+added[0]+", does not exist")
	})
	check.Equal(t, "readiness of the running dispatcher", d.Ready(), error(nil))
	check.Equal(t, "status of a call without a part", send("third"), http.StatusOK)
	wait.True(t, "a delivery without a part", func() bool { return edited.count() == 2 })
	stopDispatcher()
	stopDispatcher = start()
	wait.True(t, "503 from a dispatcher that started without a part", func() bool {
		return strings.Contains(logs.String(), "configuration loaded") && send("fourth") == http.StatusServiceUnavailable
	})
	stopOperator = startOperator()
	wait.True(t, "the part that was deleted", func() bool {
		_, err := secrets.Get(context.Background(), added[0], metav1.GetOptions{})
		return err == nil
	})
	wait.True(t, "200 after the part was written again", func() bool { return send("fifth") == http.StatusOK })
	wait.True(t, "a delivery after the part was written again", func() bool { return edited.count() >= 3 })
	kubectl("", "wait", "whd", "--all", "--for=condition=Programmed")

	kubectl("", "delete", "whd", "--field-selector", "metadata.name!=crm")
	wait.True(t, "one Secret without parts", func() bool {
		names, _ := parts()
		root, err := secrets.Get(context.Background(), liveconfig.SecretName("default"), metav1.GetOptions{})
		return err == nil && len(names) == 0 && onlyConfig(root)
	})
	check.Equal(t, "status of a call in the small namespace", send("last"), http.StatusOK)
	stopOperator()
	stopDispatcher()
	for _, word := range []string{"hush", "is forbidden", "panic"} {
		if strings.Contains(logs.String(), word) {
			t.Errorf("the logs contain %q", word)
		}
	}
}

// onlyConfig reports whether a Secret contains a config and not an index.
func onlyConfig(s *corev1.Secret) bool {
	return len(s.Data[liveconfig.DataKey]) > 0 && len(s.Data[liveconfig.IndexKey]) == 0
}
