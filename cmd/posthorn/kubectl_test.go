package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/dispatcher/admin"
	"github.com/posthorn/posthorn/dispatcher/redelivery"
	"github.com/posthorn/posthorn/test/env"
)

// pods is a reach of dispatchers in this process.
type pods struct{ targets []target }

func (p pods) namespace() (string, error) { return "shop", nil }
func (p pods) open(context.Context) ([]target, func(), error) {
	return p.targets, func() {}, nil
}

// pod has one dead letter and one attempt, named after it.
func pod(t *testing.T, name string, letters int) target {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /deadletters", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("destination") != "shop/crm" {
			http.Error(w, "which?", http.StatusBadRequest)
			return
		}
		_ = json.NewEncoder(w).Encode(admin.DeadLetter{Key: "key-" + name, MessageID: "m", Reason: "Rejected"})
	})
	mux.HandleFunc("GET /deadletters/{key}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("key") != "key-"+name {
			http.Error(w, "no dead letter "+r.PathValue("key"), http.StatusNotFound)
			return
		}
		_ = json.NewEncoder(w).Encode(admin.DeadLetter{Key: "key-" + name, Body: json.RawMessage(`{"userId":"u"}`)})
	})
	mux.HandleFunc("POST /deadletters/purge", func(w http.ResponseWriter, r *http.Request) {
		var a admin.Action
		if err := json.NewDecoder(r.Body).Decode(&a); err != nil || a.Destination != "shop/crm" {
			http.Error(w, "what?", http.StatusBadRequest)
			return
		}
		if letters < 0 {
			http.Error(w, `user "ann" may not`, http.StatusForbidden)
			return
		}
		out := json.NewEncoder(w)
		_ = out.Encode(admin.ActionProgress{Progress: redelivery.Progress{Matched: 1, Redelivered: 1}})
		_ = out.Encode(admin.ActionProgress{Progress: redelivery.Progress{Matched: letters, Redelivered: letters, Bytes: 10}, Done: true})
	})
	for _, path := range []string{"GET /attempts", "GET /tail"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"destination": "shop/crm", "messageId": "of-%s"}`+"\n", name)
		})
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return target{name: name, client: server.Client(), url: server.URL}
}

// run runs one command with its own flags.
func run(cmd *cobra.Command, args ...string) (string, error) {
	var out bytes.Buffer
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	err := cmd.ExecuteContext(context.Background())
	return out.String(), err
}

func TestCommandsAskEveryPod(t *testing.T) {
	way := func(targets ...target) reaching { return func(*cobra.Command) reach { return pods{targets} } }
	a, b := pod(t, "a", 3), pod(t, "b", 4)
	for _, c := range []struct {
		name    string
		command *cobra.Command
		args    []string
		want    []string
		fails   string
	}{
		{"list", newDeadLetters(way(a, b)), []string{"list", "crm"}, []string{"key-a", "key-b"}, ""},
		{"show, of the second", newDeadLetters(way(a, b)), []string{"show", "crm", "key-b"}, []string{`"key-b"`, `"userId": "u"`}, ""},
		{"show, of nobody", newDeadLetters(way(a, b)), []string{"show", "crm", "key-c"}, nil, "no dead letter key-c"},
		{"purge", newDeadLetters(way(a, b)), []string{"purge", "crm", "--all"}, []string{"7 removed (20 bytes)"}, ""},
		{"purge, dry", newDeadLetters(way(a, b)), []string{"purge", "crm", "--all", "--dry-run"}, []string{"7 would be removed"}, ""},
		{"purge, refused by the second", newDeadLetters(way(a, pod(t, "c", -1))), []string{"purge", "crm", "--all"}, []string{"3 removed"}, `pod c: 403 Forbidden: user "ann" may not`},
		{"attempts", newAttempts(way(a, b)), []string{"crm"}, []string{"of-a", "of-b"}, ""},
		{"tail", newTail(way(a, b)), []string{"crm"}, []string{"of-a", "of-b"}, ""},
		{"a pod that is gone", newTail(way(a, target{name: "gone", client: http.DefaultClient, url: "http://127.0.0.1:1"})), nil, nil, "pod gone: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, err := run(c.command, c.args...)
			if (err != nil) != (c.fails != "") || (err != nil && !strings.Contains(err.Error(), c.fails)) {
				t.Errorf("error %v, want %q", err, c.fails)
			}
			for _, want := range c.want {
				if !strings.Contains(out, want) {
					t.Errorf("no %q in:\n%s", want, out)
				}
			}
		})
	}
}

// TestKubectl runs the plugin against a real API server, without operator and dispatcher.
func TestKubectl(t *testing.T) {
	server, err := env.Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	kubectl := func(stdin string, args ...string) string {
		t.Helper()
		out, err := server.Kubectl(stdin, args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	root, err := env.Root()
	if err != nil {
		t.Fatal(err)
	}
	kubectl("", "create", "namespace", "posthorn-system")
	kubectl(kubectl("", "kustomize", filepath.Join(root, "config", "rbac")), "apply", "--server-side", "-f", "-")
	kubectl("", "create", "namespace", "shop")
	kubectl(`
apiVersion: posthorn.dev/v1alpha1
kind: WebhookDestination
metadata: {name: crm, namespace: shop}
spec:
  sources: {names: [web]}
  endpoints: [{name: primary, url: "https://hooks.example/in"}]
`, "apply", "-f", "-")
	// ann may edit her namespace, and nothing else.
	kubectl("", "create", "serviceaccount", "ann", "-n", "shop")
	kubectl("", "create", "rolebinding", "ann", "--clusterrole=posthorn-edit", "--serviceaccount=shop:ann", "-n", "shop")
	call := func(want int, args ...string) string {
		t.Helper()
		var out bytes.Buffer
		args = append([]string{"kubectl", "--kubeconfig", server.Kubeconfig(), "--as", "system:serviceaccount:shop:ann", "-n", "shop"}, args...)
		if code := Main(args, nil, &out, &out); code != want {
			t.Errorf("%v: exit %d, want %d:\n%s", args, code, want, out.String())
		}
		return out.String()
	}
	has := func(out, want string) {
		t.Helper()
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	has(call(exitFailure, "why", "cmr"), `there is no WebhookDestination "cmr" in namespace "shop"`)
	has(call(exitFailure, "why", "crm"), "shop/crm: the operator has not looked at this version of the destination yet.\nTo do: look at the operator's pod")
	has(call(exitFailure, "why", "crm", "-o", "json"), `{"level":"PROBLEM","about":"Destination"`)
	has(call(exitFailure, "why", "crm", "-n", "default"), "forbidden")
	has(call(exitUsage, "why"), "DESTINATION is missing")

	has(call(exitUsage, "redeliver", "crm"), "--all")
	has(call(exitOK, "redeliver", "crm", "--reason", "Rejected", "--since", "2h", "--rate", "7", "--wait=false"), "created")
	if got := kubectl("", "get", "redeliveries", "-n", "shop", "-o", "jsonpath={.items[*].spec.destination} {.items[*].spec.rate} {.items[*].spec.selector.reasons}"); got != `crm 7 ["Rejected"]` {
		t.Errorf("the Redelivery: %s", got)
	}
	// As the operator ends it.
	ended := make(chan string)
	go func() { ended <- call(exitFailure, "redeliver", "crm", "--all") }()
	var name string
	for deadline := time.Now().Add(60 * time.Second); name == ""; time.Sleep(50 * time.Millisecond) {
		name = kubectl("", "get", "redeliveries", "-n", "shop", "-o", "jsonpath={.items[?(@.spec.rate==100)].metadata.name}")
		if time.Now().After(deadline) {
			t.Fatal("no Redelivery was created")
		}
	}
	kubectl("", "patch", "redelivery", name, "-n", "shop", "--subresource=status", "--type=merge", "--patch", `{"status": {"phase": "Failed", "finishTime": "2026-01-02T03:04:05Z",
		"conditions": [{"type": "Complete", "status": "False", "reason": "RedeliveryFailed", "message": "2 of 9 dead letters redelivered", "lastTransitionTime": "2026-01-02T03:04:05Z"}]}}`)
	has(<-ended, "2 of 9 dead letters redelivered")

	has(call(exitFailure, "attempts", "crm"), "posthorn-support-user")
	// With the Role, and no pods: the next thing that is missing.
	kubectl("", "create", "rolebinding", "ann", "--role=posthorn-support-user", "--serviceaccount=shop:ann", "-n", "posthorn-system")
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		var out bytes.Buffer
		Main([]string{"kubectl", "--kubeconfig", server.Kubeconfig(), "--as", "system:serviceaccount:shop:ann", "-n", "shop", "attempts", "crm"}, nil, &out, &out)
		if strings.Contains(out.String(), "no dispatcher pod runs in namespace posthorn-system") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("attempts: %s", out.String())
		}
	}
	// kubectl finds plugins by the name of the program.
	args := os.Args
	t.Cleanup(func() { os.Args = args })
	os.Args = []string{"/usr/local/bin/kubectl-posthorn"}
	var out bytes.Buffer
	if code := Main([]string{"why", "--help"}, nil, &out, &out); code != exitOK {
		t.Errorf("exit %d: %s", code, out.String())
	}
	has(out.String(), "kubectl posthorn why crm -n shop")
}
