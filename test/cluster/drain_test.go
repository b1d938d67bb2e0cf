package cluster

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/controllers"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/docs"
	"github.com/posthorn/posthorn/test/wait"
)

// The Job of docs/drain.md delivers what a pod that does not exist any more has pending, with the
// permissions of the dispatchers, beside a dispatcher that runs.
func TestDrainJob(t *testing.T) {
	server, kubectl, logs := cluster(t)
	if err := server.Install(); err != nil {
		t.Fatal(err)
	}
	hook := newReceiver(t, "hush-crm-secret")
	hook.set(func() { hook.status = http.StatusServiceUnavailable })
	p := newPods(t, server, logs, 2)
	kubectl(webToCRM(hook.URL)+"  delivery: {retry: {initialBackoff: 10ms, maxBackoff: 50ms}}\n", "apply", "-f", "-")
	operator(t, server.As("posthorn-operator"), controllers.Options{Pods: p})
	p.start(0)
	p.start(1)
	kubectl("", "wait", "whd/crm", "psrc/web", "--for=condition=Ready")
	for i := range 50 {
		status, answer, _, err := p.do(1, http.MethodPost, "/v1/track", fmt.Sprintf(`{"messageId": "m%d", "userId": "u", "event": "E"}`, i))
		if err != nil || status != http.StatusOK {
			t.Fatalf("call: got status %d, body %s and error %v, want 200", status, answer, err)
		}
	}
	p.stop(1, syscall.SIGKILL)

	drain := func(flags ...string) (output string, code int) {
		t.Helper()
		args := append(drainArgs(t, dataOf(t, p.list[1])), "--kubeconfig", as(t, server.Kubeconfig(), "posthorn-dispatcher"), "--egress-allow",
			"127.0.0.0/8")
		cmd := exec.CommandContext(t.Context(), p.list[1].Binary, append(args, flags...)...)
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	if err := wait.Until(func() error { // Its time may end before its start.
		output, code := drain("--timeout", "5s")
		if want := "default/crm: 50 pending: endpoint primary is "; code != 1 || !strings.Contains(output, want) {
			return fmt.Errorf("got exit code %d and output %s, want 1 and %q", code, output, want)
		}
		return nil
	}); err != nil {
		t.Fatalf("drain with a failing receiver: %v", err)
	}
	check.Equal(t, "deliveries before the receiver works", hook.count(), 0)
	hook.set(func() { hook.status = http.StatusOK })
	output, code := drain()
	if want := "drained: nothing is pending; delivered 50, filtered 0, dead letters 0, discarded 0\n"; code != 0 || !strings.Contains(output, want) {
		t.Fatalf("drain: got exit code %d and output %s, want 0 and %q", code, output, want)
	}
	check.Equal(t, "deliveries", hook.count(), 50)
	check.Equal(t, "requests with a wrong signature", hook.unsigned, 0)
	kubectl("", "wait", "whd/crm", "--for=condition=Ready")
}

// drainArgs returns the arguments of the Job in docs/drain.md with another data directory.
func drainArgs(t *testing.T, data string) []string {
	t.Helper()
	blocks, err := docs.Blocks("../..", "docs/drain.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		var job batchv1.Job
		if b.Language != "yaml" {
			continue
		}
		if err := yaml.UnmarshalStrict([]byte(b.Text), &job); err != nil {
			t.Fatal(err)
		}
		args := job.Spec.Template.Spec.Containers[0].Args
		for i, arg := range args {
			if strings.HasPrefix(arg, "--data=") {
				args[i] = "--data=" + data
				return args
			}
		}
	}
	t.Fatal("docs/drain.md: got no Job with --data, want one")
	return nil
}

// dataOf returns the data directory of a pod.
func dataOf(t *testing.T, p *pod) string {
	t.Helper()
	for i, arg := range p.Args {
		if arg == "--data" {
			return p.Args[i+1]
		}
	}
	t.Fatal("the pod has no --data")
	return ""
}

// as writes a kubeconfig file for a service account of the release.
func as(t *testing.T, kubeconfig, account string) string {
	t.Helper()
	config, err := clientcmd.LoadFromFile(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, user := range config.AuthInfos {
		user.Impersonate = "system:serviceaccount:" + release + ":" + account
		user.ImpersonateGroups = []string{"system:serviceaccounts", "system:serviceaccounts:" + release, "system:authenticated"}
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() == 0 {
		t.Fatalf("kubeconfig: got error %v, want a file", err)
	}
	return path
}
