package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/why"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/wait"
)

// pods is a connector of dispatchers in this process.
type pods struct{ targets []target }

func (p pods) namespace() (string, error)                      { return "shop", nil }
func (p pods) names(context.Context, string) ([]string, error) { return []string{"crm"}, nil }
func (p pods) connect(context.Context) ([]target, func(), error) {
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
		_ = json.NewEncoder(w).Encode(adminapi.DeadLetter{Key: "key-" + name, MessageID: "m", Reason: "Rejected"})
	})
	mux.HandleFunc("GET /deadletters/count", func(w http.ResponseWriter, _ *http.Request) {
		if letters < 0 { // an older dispatcher
			http.Error(w, "no dead letter count", http.StatusNotFound)
			return
		}
		_ = json.NewEncoder(w).Encode(adminapi.DeadLetterCount{Stored: int64(letters)})
	})
	for prefix, body := range map[string]string{"": "", adminapi.BodiesPath: `{"userId":"u"}`} {
		mux.HandleFunc("GET "+prefix+"/deadletters/{key}", func(w http.ResponseWriter, r *http.Request) {
			switch {
			case letters < 0 && prefix != "":
				http.Error(w, "bind the ClusterRole posthorn-bodies", http.StatusForbidden)
			case r.PathValue("key") != "key-"+name:
				http.Error(w, "no dead letter "+r.PathValue("key"), http.StatusNotFound)
			default:
				_ = json.NewEncoder(w).Encode(adminapi.DeadLetter{Key: "key-" + name, Body: json.RawMessage(body)})
			}
		})
	}
	mux.HandleFunc("GET "+adminapi.BodiesPath+"/tail", func(w http.ResponseWriter, _ *http.Request) {
		if letters < 0 {
			http.Error(w, "bind the ClusterRole posthorn-bodies", http.StatusForbidden)
			return
		}
		fmt.Fprintf(w, `{"destination": "shop/crm", "messageId": "of-%s", "body": {"userId": "u"}, "missed": 2}`+"\n", name)
	})
	mux.HandleFunc("POST /deadletters/purge", func(w http.ResponseWriter, r *http.Request) {
		var a adminapi.DeadLetterAction
		if err := json.NewDecoder(r.Body).Decode(&a); err != nil || a.Destination != "shop/crm" {
			http.Error(w, "what?", http.StatusBadRequest)
			return
		}
		if letters < 0 {
			http.Error(w, `user "ann" may not`, http.StatusForbidden)
			return
		}
		out := json.NewEncoder(w)
		_ = out.Encode(adminapi.DeadLetterProgress{Matched: 1, Redelivered: 1})
		_ = out.Encode(adminapi.DeadLetterProgress{Matched: int64(letters), Redelivered: int64(letters), Bytes: 10, Done: true})
	})
	for _, path := range []string{"GET /attempts", "GET /tail"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"destination": "shop/crm", "messageId": "of-%s"}`+"\n", name)
		})
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return target{name, &adminapi.Client{URL: server.URL}}
}

// idle has the destination shop/crm, and neither dead letters nor attempts.
func idle(t *testing.T) target {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /report", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(adminapi.Report{Namespaces: []adminapi.NamespaceReport{{Namespace: "shop",
			Destinations: []adminapi.DestinationReport{{Name: "crm", Endpoints: []adminapi.EndpointReport{{Name: "primary"}, {Name: "backup"}}}}}}})
	})
	mux.HandleFunc("POST /deadletters/purge", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(adminapi.DeadLetterProgress{Done: true})
	})
	for _, path := range []string{"GET /deadletters", "GET /attempts", "GET /tail"} {
		mux.HandleFunc(path, func(http.ResponseWriter, *http.Request) {})
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return target{"idle", &adminapi.Client{URL: server.URL}}
}

// execute runs one command line of the client commands.
func execute(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := &cobra.Command{Use: "posthorn", RunE: command.ShowHelp}
	AddTo(root)
	SetGroups(root, InsteadLocal)
	return command.Run(root, args, stdin, stdout, stderr)
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
	flags := func(targets ...target) connectorFlags { return func(*cobra.Command) connector { return pods{targets} } }
	a, b := pod(t, "a", 3), pod(t, "b", 4)
	other := idle(t)
	down := target{"down", &adminapi.Client{URL: "http://127.0.0.1:1"}}
	for _, c := range []struct {
		name    string
		command *cobra.Command
		args    []string
		want    []string
		fails   string
	}{
		{"list", newDeadLetters(flags(a, b)), []string{"list", "crm"}, []string{"key-a", "key-b"}, ""},
		{"list, cut off", newDeadLetters(flags(a, b)), []string{"list", "crm", "--limit", "1"},
			[]string{"key-a", "key-b", "2 of 7 shown; set --limit to see more"}, ""},
		{"list, cut off, an older dispatcher", newDeadLetters(flags(pod(t, "c", -1))), []string{"list", "crm", "--limit", "1"},
			[]string{"key-c", "1 shown; there may be more, set --limit"}, ""},
		{"show, of the second", newDeadLetters(flags(a, b)), []string{"show", "crm", "key-b"}, []string{`"key-b"`, `"userId": "u"`}, ""},
		{"list, one pod is down", newDeadLetters(flags(down, b)), []string{"list", "crm"}, []string{"key-b"}, "pod down: "},
		{"list, all pods are down", newDeadLetters(flags(down)), []string{"list", "crm"}, nil, "pod down: "},
		{"show, one pod is down", newDeadLetters(flags(down, b)), []string{"show", "crm", "key-b"}, []string{`"key-b"`}, ""},
		{"show, one pod does not answer", newDeadLetters(flags(down, b)), []string{"show", "crm", "key-c"}, nil, "pod down: "},
		{"show, without the permission for bodies", newDeadLetters(flags(pod(t, "c", -1))), []string{"show", "crm", "key-c"}, []string{`"key": "key-c"`, "The body is not shown. pod c: 403 Forbidden: bind the ClusterRole posthorn-bodies"}, ""},
		{"tail with bodies", newTail(flags(a, b)), []string{"crm", "--bodies"},
			[]string{"of-a", "of-b", `{"userId": "u"}`, "2 attempts missed"}, ""},
		{"tail with bodies, without the permission", newTail(flags(pod(t, "c", -1))), []string{"crm", "--bodies"}, []string{"of-c", "The bodies are not shown. pod c: 403 Forbidden: bind the ClusterRole posthorn-bodies"}, ""},
		{"tail to a receiver, without the permission", newTail(flags(pod(t, "c", -1))), []string{"crm", "--forward-to", "http://127.0.0.1:1"},
			[]string{"0 sent on"}, "pod c: 403 Forbidden: bind the ClusterRole posthorn-bodies"},
		{"tail to no URL", newTail(flags(a)), []string{"crm", "--forward-to", "localhost:3000"}, nil, `--forward-to "localhost:3000" is not a URL like http://localhost:3000/hook`},
		{"tail, of the namespace", newTail(flags(a)), nil, []string{"of-a"}, ""},
		{"tail, all and a destination", newTail(flags(a)), []string{"crm", "-A"}, nil, `-A is for all objects; leave out -A or the name "crm"`},
		{"tail with a secret alone", newTail(flags(a)), []string{"crm", "--secret-value", "s"}, nil,
			"--secret-value signs the requests of --forward-to; set both"},
		{"tail to a receiver that is down", newTail(flags(a)), []string{"crm", "--forward-to", "http://127.0.0.1:1"},
			[]string{"of-a", "not sent on: ", "1 sent on, 1 of them not accepted; 2 missed"}, ""},
		{"show, no pod has it", newDeadLetters(flags(a, b)), []string{"show", "crm", "key-c"}, nil, "no dead letter key-c"},
		{"purge", newDeadLetters(flags(a, b)), []string{"purge", "crm", "--all", "--yes"}, []string{"7 removed (20 bytes)"}, ""},
		{"purge, dry", newDeadLetters(flags(a, b)), []string{"purge", "crm", "--all", "--dry-run"}, []string{"7 would be removed"}, ""},
		{"purge, refused by the second", newDeadLetters(flags(a, pod(t, "c", -1))), []string{"purge", "crm", "--all", "--yes"},
			[]string{"3 removed"}, `pod c: 403 Forbidden: user "ann" may not`},
		{"purge, not confirmed", newDeadLetters(flags(a, b)), []string{"purge", "crm", "--all"}, nil, "there is no terminal to confirm on; set --yes to remove 7 dead letters of shop/crm permanently"},
		{"list, an unknown destination", newDeadLetters(flags(other, other)), []string{"list", "cr"}, nil, `no dispatcher has a destination "cr" in namespace "shop"; did you mean crm?`},
		{"list, a destination without dead letters", newDeadLetters(flags(other)), []string{"list", "crm"},
			[]string{"No dead letters of shop/crm."}, ""},
		{"purge, an unknown destination", newDeadLetters(flags(other)), []string{"purge", "cr", "--all", "--yes"}, nil,
			`no dispatcher has a destination "cr"`},
		{"attempts, an unknown destination", newAttempts(flags(other)), []string{"nope"}, nil,
			`no dispatcher has a destination "nope" in namespace "shop"`},
		{"tail, an unknown destination", newTail(flags(other)), []string{"nope"}, nil,
			`no dispatcher has a destination "nope" in namespace "shop"`},
		{"attempts, an unknown endpoint", newAttempts(flags(other)), []string{"crm", "--endpoint", "main"}, nil,
			`no endpoint "main" of shop/crm; use one of backup, primary`},
		{"attempts, an endpoint without attempts", newAttempts(flags(other, other)), []string{"crm", "--endpoint", "backup"}, []string{`No attempts to shop/crm since the dispatchers started, at endpoint "backup".`}, ""},
		{"tail, an unknown endpoint", newTail(flags(other)), []string{"crm", "--endpoint", "main"}, nil,
			`no endpoint "main" of shop/crm; use one of backup, primary`},
		{"tail, an unknown endpoint of any destination", newTail(flags(other)), []string{"--endpoint", "main"}, nil, `no endpoint "main" of any destination; use one of backup, primary`},
		{"attempts", newAttempts(flags(a, b)), []string{"crm"}, []string{"of-a", "of-b"}, ""},
		{"tail", newTail(flags(a, b)), []string{"crm"}, []string{"of-a", "of-b"}, ""},
		{"a pod that does not answer", newTail(flags(a, down)), nil, nil, "pod down: "},
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

// attempts merges the attempts of the pods by time, and counts them below the list.
func TestAttemptsAreLimited(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	serves := func(name string, seconds ...int) target {
		server := httptest.NewServer(oneStore(func(w http.ResponseWriter, _ *http.Request) {
			out := json.NewEncoder(w)
			for _, s := range seconds {
				a := adminapi.Attempt{Time: start.Add(time.Duration(s) * time.Second), MessageID: event.ID(fmt.Sprintf("m%d", s))}
				if s%2 == 1 {
					a.Reason = "Rejected"
				}
				_ = out.Encode(a)
			}
		}))
		t.Cleanup(server.Close)
		return target{name, &adminapi.Client{URL: server.URL}}
	}
	flags := func(*cobra.Command) connector { return pods{[]target{serves("a", 1, 4, 5), serves("b", 2, 3)}} }
	for _, c := range []struct{ args, ids, footer string }{
		{"attempts crm", "m1 m2 m3 m4 m5", "5 attempts, 3 failed"},
		{"attempts crm --failed", "m1 m3 m5", "5 attempts, 3 failed"},
		{"attempts crm --limit 2", "m4 m5", "5 attempts, 3 failed; 2 shown"},
		{"attempts crm --failed --limit 2", "m3 m5", "5 attempts, 3 failed; 2 shown"},
		{"attempts crm --limit 9", "m1 m2 m3 m4 m5", "5 attempts, 3 failed"},
		{"tail crm --failed", "m1 m3 m5", ""},
	} {
		cmd := newAttempts(flags)
		if strings.HasPrefix(c.args, "tail") {
			cmd = newTail(flags)
		}
		var out, errs bytes.Buffer
		cmd.SetArgs(append(strings.Fields(c.args)[1:], "-o", "json"))
		cmd.SetOut(&out)
		cmd.SetErr(&errs)
		if err := cmd.ExecuteContext(context.Background()); err != nil {
			t.Errorf("%s: %v", c.args, err)
		}
		var ids []string
		for in := json.NewDecoder(&out); in.More(); {
			var a adminapi.Attempt
			if err := in.Decode(&a); err != nil {
				t.Fatal(err)
			}
			ids = append(ids, string(a.MessageID))
		}
		if strings.HasPrefix(c.args, "tail") {
			slices.Sort(ids) // The pods answer in any order.
		}
		if got := strings.Join(ids, " "); got != c.ids {
			t.Errorf("%s: got %q, want %q", c.args, got, c.ids)
		}
		if errs.Len() > 0 {
			t.Errorf("%s -o json: got %q on stderr, want nothing", c.args, errs.String())
		}
		if c.footer == "" {
			continue
		}
		text, err := run(newAttempts(flags), strings.Fields(c.args)[1:]...)
		if err != nil || !strings.HasSuffix(text, "\n"+c.footer+"\n") {
			t.Errorf("%s: got %v and\n%s\nwant the last line %q", c.args, err, text, c.footer)
		}
	}
}

// senderTo is a sender of one address.
type senderTo trackingAPI

func (s senderTo) connect(context.Context) (trackingAPI, func(), error) {
	return trackingAPI(s), func() {}, nil
}

// The same commands send directly and through a cluster.
func TestSendingCommands(t *testing.T) {
	var got []string
	server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
		key, _, _ := r.BasicAuth()
		body, _ := io.ReadAll(r.Body)
		got = append(got, key, r.Method+" "+r.URL.Path, string(body))
		_, _ = w.Write([]byte(`{"success":true}`))
	}))
	t.Cleanup(server.Close)
	flags := func(*cobra.Command) sender { return senderTo{url: server.URL + "/", writeKey: "k"} }
	if out, err := run(newSend(flags), "track", "--json", `{"event":"e"}`); err != nil || out != "200 OK {\"success\":true}\n" {
		t.Errorf("%v: %s", err, out)
	}
	members := filepath.Join(t.TempDir(), "members.ndjson")
	if err := os.WriteFile(members, []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := run(newAudience(flags), "sync", "vip", members, "--increment"); err != nil || !strings.Contains(out, "members 0") {
		t.Errorf("%v: %s", err, out)
	}
	want := []string{"k", "POST /v1/track", `{"event":"e"}`, "k", "POST /v1/audiences/vip/members", "{}\n"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A property that is JSON keeps its digits; anything else is a string.
func TestSendProperties(t *testing.T) {
	var body string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		body = string(text)
	}))
	t.Cleanup(server.Close)
	args := []string{"send", "track", "--write-key", "k", "--address", server.URL}
	want := []string{}
	add := func(quote string, values ...string) {
		for _, value := range values {
			name := fmt.Sprintf("p%02d", len(want))
			args, want = append(args, "-p", name+"="+value), append(want, fmt.Sprintf("%q:%s%s%[2]s", name, quote, value))
		}
	}
	add("", "9007199254740993", "12345678901234567890", "0.1000000000000000055511151231257827", "100.00", "1e400", "-0",
		`{"ids":[9007199254740993]}`, "true", "null", `"5"`)
	add(`"`, "007", "5 apples", "", "NaN")
	var out bytes.Buffer
	if code := execute(args, nil, &out, &out); code != command.ExitOK {
		t.Fatalf("exit %d: %s", code, out.String())
	}
	_, got, _ := strings.Cut(body, `"properties":`)
	got, _, _ = strings.Cut(got, `,"timestamp"`)
	if diff := cmp.Diff("{"+strings.Join(want, ",")+"}", got); diff != "" {
		t.Error(diff)
	}
}

// An error names the fix.
func TestSendExplains(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"success":true}`))
	}))
	t.Cleanup(server.Close)
	for _, c := range []struct {
		args []string
		want string
		code int
	}{
		{[]string{"--address", "http://127.0.0.1:1"}, "Is Posthorn running there?", command.ExitFailure},
		{[]string{"--address", server.URL}, "use --insecure to skip verification", command.ExitFailure},
		{[]string{"--address", server.URL, "--insecure"}, "200 OK", command.ExitOK},
	} {
		var out bytes.Buffer
		if code := execute(append([]string{"send", "track", "--write-key", "k"}, c.args...), nil, &out, &out); code != c.code ||
			!strings.Contains(out.String(), c.want) {
			t.Errorf("%v: exit %d: %s", c.args, code, out.String())
		}
	}
}

// Mistakes on the command line are refused before any connection is opened, and the error names the fix.
func TestRefusedFlags(t *testing.T) {
	t.Setenv("POSTHORN_WRITE_KEY", "")
	for _, c := range []struct{ line, want string }{
		{"kubectl atempts", `unknown command "atempts"; did you mean attempts?`},
		{"deadletters redeliver crm --status-code 4222", "--status-code 4222: use a status code like 422"},
		{"deadletters redeliver crm --status-code 0", "--no-response selects dead letters without one"},
		{"deadletters redeliver crm --rate x", `--rate "x": use a number`},
		{"send track", "set --write-key or POSTHORN_WRITE_KEY"},
		{"tail a b", `unexpected argument "b"`},
		{"verify a b", `unexpected argument "b"`},
		{"tail -o xml", `--output "xml": use json, yaml`},
		{"kubectl attempts crm -o wide", `--output "wide": use json`},
		{"debug lane", "lanes, config or pprof/NAME"},
		{"get sources -o xml", "use wide, name, yaml, json or jsonpath=TEMPLATE"},
		{"send identify --event E", "--event is not for identify; it is for track"},
		{"send track --name N", "--name is not for track; it is for page and screen"},
		{"sink --listen 9000", `--listen "9000": use HOST:PORT or :PORT`},
		{"send trak", `"trak" is not one of identify, track`},
	} {
		t.Run(c.line, func(t *testing.T) {
			var out bytes.Buffer
			code := execute(strings.Fields(c.line), nil, &out, &out)
			if code != command.ExitUsage || !strings.Contains(out.String(), c.want) || !strings.Contains(out.String(), "--help'") {
				t.Errorf("exit %d, want %q in:\n%s", code, c.want, out.String())
			}
		})
	}
}

// A cluster without the kinds gives another error than one without the destination.
func TestKubectlWithoutCRDs(t *testing.T) {
	server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer, ok := map[string]string{"/api": `{"kind": "APIVersions", "versions": ["v1"]}`,
			"/apis": `{"kind": "APIGroupList", "apiVersion": "v1", "groups": []}`}[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
		}
		fmt.Fprint(w, answer)
	}))
	t.Cleanup(server.Close)
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	var out bytes.Buffer
	if code := execute([]string{"kubectl", "--server", server.URL, "why", "crm"}, nil, &out, &out); code != command.ExitFailure || !strings.Contains(out.String(), "is Posthorn installed in this cluster?") {
		t.Errorf("exit %d: %s", code, out.String())
	}
}

// A kind whose CustomResourceDefinition was deleted is a problem, and the commands work with the others.
func TestKubectlWithoutOneKind(t *testing.T) {
	for _, c := range []struct {
		gone, args string
		want       []string
	}{
		{"webhookdestinations", "why crm", []string{"does not serve the kind WebhookDestination", "kept for 7 days"}},
		{"webhookdestinations", "why", []string{"CustomResourceDefinition webhookdestinations.posthorn.dev: ",
			"does not serve the kind WebhookDestination", "Source shop/web: all calls"}},
		{"webhookdestinations", "why whd", []string{"does not serve the kind WebhookDestination"}},
		{"webhookdestinations", "why source/web", []string{"Source shop/web: all calls"}},
		{"sources", "why crm", []string{"does not serve the kind Source", `no WebhookDestination "crm"`}},
		{"sources", "why source/web", []string{"does not serve the kind Source"}},
		{"redeliveries", "why -A", []string{"does not serve the kind Redelivery", "Source shop/web: all calls"}},
	} {
		server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			switch resource := path.Base(r.URL.Path); {
			case resource == c.gone || !strings.HasPrefix(r.URL.Path, apiPrefix):
				w.Header().Set("Content-Type", "text/plain")
				http.Error(w, "404 page not found", http.StatusNotFound)
			case resource == "sources":
				fmt.Fprintf(w, `{"apiVersion":"posthorn.dev/v1beta1","kind":"SourceList","items":[{"metadata":{"name":"web","namespace":"shop"},"status":{"conditions":[{"type":"Receiving","status":"False","reason":"RejectingCalls","message":"all calls are rejected"}]}}]}`)
			default:
				fmt.Fprintf(w, `{"apiVersion":"posthorn.dev/v1beta1","kind":%q,"items":[]}`, kindOf(resource)+"List")
			}
		}))
		t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
		var out bytes.Buffer
		args := append([]string{"kubectl", "--server", server.URL}, append(strings.Fields(c.args), "--live=false")...)
		if !strings.Contains(c.args, "-A") {
			args = append(args, "-n", "shop")
		}
		check.Equal(t, c.args+": exit code", execute(args, nil, &out, &out), command.ExitFailure)
		for _, want := range c.want {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s without %s does not print %q:\n%s", c.args, c.gone, want, out.String())
			}
		}
		server.Close()
	}
}

// An operator that has not renewed its Lease for minutes is a problem, because the statuses are outdated.
func TestKubectlWithoutOperator(t *testing.T) {
	for _, c := range []struct {
		age, args string
		code      int
	}{
		{"1m", "why", command.ExitOK}, {"1m", "why source/web", command.ExitOK},
		{"4m", "why", command.ExitFailure}, {"4m", "why source/web", command.ExitFailure}, {"4m", "why crm", command.ExitFailure},
		{"", "why", command.ExitOK},
	} {
		server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			switch resource := path.Base(r.URL.Path); {
			case resource == operatorLease && c.age != "":
				age, err := time.ParseDuration(c.age)
				check.NoError(t, "age", err)
				fmt.Fprintf(w, `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"posthorn-operator"},"spec":{"renewTime":%q}}`, time.Now().Add(-age).UTC().Format("2006-01-02T15:04:05.000000Z"))
			case resource == "sources":
				fmt.Fprintf(w, `{"apiVersion":"posthorn.dev/v1beta1","kind":"SourceList","items":[{"metadata":{"name":"web","namespace":"shop"},"status":{"conditions":%s}}]}`, healthy)
			case strings.HasPrefix(r.URL.Path, apiPrefix):
				fmt.Fprintf(w, `{"apiVersion":"posthorn.dev/v1beta1","kind":%q,"items":[]}`, kindOf(resource)+"List")
			default:
				w.WriteHeader(http.StatusForbidden)
				fmt.Fprint(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"Forbidden","code":403}`)
			}
		}))
		t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
		var out bytes.Buffer
		args := append([]string{"kubectl", "--server", server.URL, "-n", "shop"}, append(strings.Fields(c.args), "--live=false")...)
		check.Equal(t, c.age+" "+c.args+": exit code", execute(args, nil, &out, &out), c.code)
		check.Equal(t, c.age+" "+c.args+": names the operator",
			strings.Contains(out.String(), "the operator does not run: it was last active 4m0s ago"), c.age == "4m")
		server.Close()
	}
}

// prints is a writer of what is printed, a write each.
type prints chan string

func (l prints) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

// TestKubectl runs the plugin against a real API server, without operator and dispatcher.
func TestKubectl(t *testing.T) {
	server, kubectl := env.For(t)
	if err := server.Install(); err != nil {
		t.Fatal(err)
	}
	kubectl("", "create", "namespace", "shop")
	kubectl(`
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: crm, namespace: shop}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: primary, url: "https://hooks.example/in"}]
`, "apply", "-f", "-")
	// ann may edit her namespace, and nothing else.
	kubectl("", "create", "serviceaccount", "ann", "-n", "shop")
	kubectl("", "create", "rolebinding", "ann", "--clusterrole=posthorn-edit", "--serviceaccount=shop:ann", "-n", "shop")
	kubectl("", "create", "role", "secrets", "--verb=get", "--resource=secrets", "-n", "shop")
	kubectl("", "create", "rolebinding", "ann-secrets", "--role=secrets", "--serviceaccount=shop:ann", "-n", "shop")
	call := func(want int, args ...string) string {
		t.Helper()
		var out bytes.Buffer
		args = append([]string{"kubectl", "--kubeconfig", server.Kubeconfig(), "--as", "system:serviceaccount:shop:ann", "-n", "shop"}, args...)
		if code := execute(args, nil, &out, &out); code != want {
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
	has(call(command.ExitFailure, "why", "cmr"), `there is no WebhookDestination "cmr" in namespace "shop"`)
	has(call(command.ExitFailure, "why", "crm"), "shop/crm: the operator has not processed this version of the destination yet.\nTo do: check the operator's log")
	has(call(command.ExitFailure, "why", "crm", "-o", "json"), `"name":"crm","level":"PROBLEM","about":"Destination"`)
	// Without the Role, the stored status is shown, and a notice names the permission.
	for _, args := range [][]string{{"why", "crm"}, {"why"}, {"why", "source/web"}} {
		out := call(command.ExitFailure, args...)
		if got := strings.Count(out, "Notice:"); got != 1 {
			t.Errorf("%v: got %d notices, want 1:\n%s", args, got, out)
		}
		line, _, _ := strings.Cut(out[strings.Index(out, "Notice:"):], "\n")
		has(line, "the numbers are from the stored status, which can be minutes old: pods is forbidden")
		has(line, "bind the Role posthorn-support-user in namespace posthorn-system to this user; --live=false omits this request.")
		if out := call(command.ExitFailure, append(args, "--live=false")...); strings.Contains(out, "Notice:") {
			t.Errorf("%v --live=false: got a notice, want none:\n%s", args, out)
		}
		has(call(command.ExitFailure, append(args, "--live")...), "posthorn: pods is forbidden")
	}
	has(call(command.ExitFailure, "why", "crm", "-n", "default"), "forbidden")
	has(call(command.ExitFailure, "why"), "WebhookDestination shop/crm: the operator has not processed this version of the destination yet.")
	has(call(command.ExitFailure, "why"), "1 of 1 object in namespace shop has a problem.")
	has(call(command.ExitFailure, "why", "-n", "default"), "forbidden")
	has(call(command.ExitFailure, "why", "source/web"), `there is no Source "web" in namespace "shop"`)
	has(call(command.ExitUsage, "why", "-A"), "set either --namespace or --all-namespaces")
	has(call(command.ExitUsage, "status", "-A"), "set either --namespace or --all-namespaces")
	has(call(command.ExitFailure, "status"), "posthorn-support-user")
	var completed bytes.Buffer
	execute([]string{"__complete", "kubectl", "--kubeconfig", server.Kubeconfig(), "-n", "shop", "attempts", ""}, nil, &completed, io.Discard)
	if got, want := completed.String(), "crm\n:4\n"; got != want {
		t.Errorf("completion: got %q, want %q", got, want)
	}

	has(call(command.ExitUsage, "redeliver", "crm"), "--all")
	has(call(command.ExitOK, "redeliver", "crm", "--reason", "Rejected", "--status-code", "422", "--no-response", "--since", "2h",
		"--rate", "7",
		"--wait=false"), "created")
	if got := kubectl("", "get", "redeliveries", "-n", "shop", "-o", "jsonpath={.items[*].spec.destinationRef.name} {.items[*].spec.deadLettersPerSecond} {.items[*].spec.match.reasons} {.items[*].spec.match.statusCodes} {.items[*].spec.match.noResponse}"); got != `crm 7 ["Rejected"] [422] true` {
		t.Errorf("the Redelivery: %s", got)
	}
	// The command prints the progress and the result.
	said, ended := make(prints, 10), make(chan int)
	go func() {
		ended <- execute([]string{"kubectl", "--kubeconfig", server.Kubeconfig(), "-n", "shop", "redeliver", "crm", "--all"}, nil, said, said)
	}()
	has(<-said, "created")
	var name string
	for deadline := time.Now().Add(wait.Limit); name == ""; time.Sleep(50 * time.Millisecond) {
		name = kubectl("", "get", "redeliveries", "-n", "shop", "-o", "jsonpath={.items[?(@.spec.deadLettersPerSecond==100)].metadata.name}")
		if time.Now().After(deadline) {
			t.Fatal("no Redelivery was created")
		}
	}
	for _, c := range [][2]string{{`WebhookDestination "crm" does not exist`, "False"}, {"2 of 9 dead letters redelivered", "True"}} {
		kubectl("", "patch", "redelivery", name, "-n", "shop", "--subresource=status", "--type=merge", "--patch", fmt.Sprintf(`{"status": {"conditions": [
			{"type": "Failed", "status": %q, "reason": "NotRedelivered", "message": %q, "lastTransitionTime": "2026-01-02T03:04:05Z"},
			{"type": "Ready", "status": "False", "reason": "NotRedelivered", "message": %q, "lastTransitionTime": "2026-01-02T03:04:05Z"}]}}`, c[1], c[0], c[0]))
		line := <-said
		for strings.Contains(line, "waiting for the operator") { // The command read the object before.
			line = <-said
		}
		has(line, c[0])
	}
	if code := <-ended; code != command.ExitFailure {
		t.Errorf("exit %d of a Redelivery that failed", code)
	}

	// A call is sent as the namespace's Source, if there is one to choose, with its key.
	has(call(command.ExitFailure, "send", "track"), `there is no Source in namespace "shop"`)
	kubectl(`
apiVersion: v1
kind: Secret
metadata: {name: web, namespace: shop}
stringData: {key: demo-write-key}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: web, namespace: shop}
spec: {writeKeys: [{name: main, secretKeyRef: {name: web, key: key}}]}
`, "apply", "-f", "-")
	has(call(command.ExitFailure, "send", "track"), "posthorn-support-user")
	kubectl(`{apiVersion: posthorn.dev/v1beta1, kind: Source, metadata: {name: ios, namespace: shop}, spec: {writeKeys: [{name: main, secretKeyRef: {name: web, key: other}}]}}`, "apply", "-f", "-")
	has(call(command.ExitUsage, "send", "track"), "choose one of the Sources ios, web with --source")
	has(call(command.ExitFailure, "send", "track", "--source", "ios"), `Secret "web" has no key "other"`)
	has(call(command.ExitFailure, "send", "track", "--source", "mac"), `there is no Source "mac"`)
	has(call(command.ExitFailure, "audience", "sync", "vip", "-", "--source", "web"), "posthorn-support-user")
	// A user with view permission cannot read the namespace's Secrets, but can set the key.
	kubectl("", "create", "serviceaccount", "bob", "-n", "shop")
	kubectl("", "create", "rolebinding", "bob", "--clusterrole=posthorn-view", "--serviceaccount=shop:bob", "-n", "shop")
	has(call(command.ExitFailure, "send", "track", "--source", "web", "--as", "system:serviceaccount:shop:bob"), "or set --write-key")
	has(call(command.ExitFailure, "send", "track", "--write-key", "k", "--as", "system:serviceaccount:shop:bob"), "posthorn-support-user")

	has(call(command.ExitFailure, "attempts", "crm"), "posthorn-support-user")
	// With the Role, and no pods: the next thing that is missing.
	kubectl("", "create", "rolebinding", "ann", "--role=posthorn-support-user", "--serviceaccount=shop:ann", "-n", "posthorn-system")
	for deadline := time.Now().Add(wait.Limit); ; time.Sleep(100 * time.Millisecond) {
		var out bytes.Buffer
		execute([]string{"kubectl", "--kubeconfig", server.Kubeconfig(), "--as", "system:serviceaccount:shop:ann", "-n", "shop", "attempts",
			"crm"}, nil, &out, &out)
		if strings.Contains(out.String(), "no dispatcher pod runs in namespace posthorn-system") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("attempts: %s", out.String())
		}
	}
	has(call(command.ExitFailure, "why", "crm"), "minutes old: no dispatcher pod runs in namespace posthorn-system; if Posthorn is installed in another namespace, set --system-namespace. To do: check the dispatcher pods in namespace posthorn-system")
}

// The notice about stored numbers has one line with the cause and the fix.
func TestNoticeWithoutLiveNumbers(t *testing.T) {
	c := &clusterConnector{system: "ops", account: "helper"}
	denied := apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", errors.New("no"))
	const prefix, suffix = "the numbers are from the stored status, which can be minutes old: ", "; --live=false omits this request."
	for _, test := range []struct {
		err  error
		want string
	}{
		{c.explain(denied), `pods is forbidden: no. To do: bind the Role helper-user in namespace ops to this user`},
		{fmt.Errorf("forward a port of pod a: %w", c.explain(denied)), `forward a port of pod a: pods is forbidden: no. To do: bind the Role helper-user in namespace ops to this user`},
		{fmt.Errorf("pod a: %w", context.DeadlineExceeded), `no answer within 20s: pod a: context deadline exceeded. To do: check the dispatcher pods in namespace ops`},
		{errors.New("pod a: 500 Internal Server Error"), `pod a: 500 Internal Server Error. To do: check the dispatcher pods in namespace ops`},
	} {
		if diff := cmp.Diff(prefix+test.want+suffix, c.withoutLive(test.err)); diff != "" {
			t.Errorf("notice (-want +got):\n%s", diff)
		}
	}
}

// The live state replaces nothing while a pod does not answer: sums without it would be wrong.
func TestLiveStateOfAllPodsOrNone(t *testing.T) {
	reports := func(name string) target {
		server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/report":
				_ = json.NewEncoder(w).Encode(adminapi.Report{Pod: name, Configs: []adminapi.ConfigReport{{Namespace: "shop"}}})
			case "/unknownkeys":
				_ = json.NewEncoder(w).Encode(adminapi.UnknownKey{Address: name, Requests: 1})
			default:
				_ = json.NewEncoder(w).Encode(adminapi.Attempt{MessageID: event.ID(name)})
			}
		}))
		t.Cleanup(server.Close)
		return target{name, &adminapi.Client{URL: server.URL}}
	}
	down := target{"down", &adminapi.Client{URL: "http://127.0.0.1:1"}}
	for name, c := range map[string]struct {
		targets []target
		want    int
		fails   string
	}{
		"all answer":   {[]target{reports("a"), reports("b")}, 2, ""},
		"one does not": {[]target{reports("a"), down}, 0, "pod down: "},
	} {
		facts, v := why.Facts{Namespace: "shop", Name: "crm"}, &inventory{}
		for _, err := range []error{addLive(t.Context(), &facts, c.targets), v.addLive(t.Context(), c.targets)} {
			if (err != nil) != (c.fails != "") || err != nil && !strings.Contains(err.Error(), c.fails) {
				t.Errorf("%s: got error %v, want %q", name, err, c.fails)
			}
		}
		got := []int{len(facts.Reports), len(facts.UnknownKeys), len(facts.Attempts), len(v.reports), len(v.unknownKeys)}
		if diff := cmp.Diff([]int{c.want, c.want, c.want, c.want, c.want}, got); diff != "" {
			t.Errorf("%s: numbers of reports, unknown keys and attempts (-want +got):\n%s", name, diff)
		}
	}
}

// trace asks every pod, and shows the others while one fails.
func TestTraceAsksEveryPod(t *testing.T) {
	answers := func(name string, status int, trace adminapi.MessageTrace) target {
		server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/trace" || r.FormValue("id") != "m1" {
				status = http.StatusBadRequest
			}
			w.WriteHeader(status)
			_ = json.NewEncoder(w).Encode(trace)
		}))
		t.Cleanup(server.Close)
		return target{name, &adminapi.Client{URL: server.URL}}
	}
	found := answers("a", http.StatusOK, adminapi.MessageTrace{MessageID: "m1", Incomplete: "the search ended",
		Accepted: []adminapi.AcceptedMessage{{Source: "shop/web"}, {Source: "shop/app", Stored: true, Type: "page"}}})
	bounded := answers("d", http.StatusOK, adminapi.MessageTrace{MessageID: "m1", Incomplete: "the search ended after 7 messages"})
	if _, err := run(newTrace(func(*cobra.Command) connector { return pods{[]target{bounded}} }), "m1"); err == nil || err.Error() != "the message may exist, because not all messages were searched" {
		t.Errorf("an incomplete search without a result: got error %v, want one that does not deny the message", err)
	}
	other := answers("e", http.StatusOK, adminapi.MessageTrace{MessageID: "m1", Accepted: []adminapi.AcceptedMessage{{Source: "other/web"}}})
	byPod := func(*cobra.Command) connector { return pods{[]target{other}} }
	if out, err := run(newTrace(byPod), "m1"); err == nil || err.Error() != "no message in namespace shop; found in namespace other: set -n, or -A" {
		t.Errorf("a message of another namespace: got error %v and\n%s", err, out)
	}
	if out, err := run(newTrace(byPod), "m1", "-A"); err != nil || !strings.Contains(out, "other/web") {
		t.Errorf("a message of another namespace, with -A: got error %v and\n%s", err, out)
	}
	none, fails := answers("b", http.StatusOK, adminapi.MessageTrace{MessageID: "m1"}),
		answers("c", http.StatusInternalServerError, adminapi.MessageTrace{})
	for name, c := range map[string]struct {
		pods []target
		ok   bool
		want []string
	}{
		"found": {[]target{none, found}, true, []string{"pod a: m1: accepted by Source shop/web", "All destinations are done with it",
			"m1: page, accepted by Source shop/app", "No destination gets it", "pod a: not complete: the search ended"}},
		"a pod fails": {[]target{fails, found}, false, []string{"accepted by Source shop/web"}},
		"not found":   {[]target{none}, false, nil},
	} {
		out, err := run(newTrace(func(*cobra.Command) connector { return pods{c.pods} }), "m1")
		if (err == nil) != c.ok {
			t.Errorf("%s: got error %v, want %t", name, err, !c.ok)
		}
		for _, want := range c.want {
			if !strings.Contains(out, want) {
				t.Errorf("%s: got\n%s\nwant %q", name, out, want)
			}
		}
	}
}

// trace --user-id shows each message of a user with its states and dead letters, also as JSON and YAML, and
// reports an incomplete search.
func TestTraceOfAUser(t *testing.T) {
	asked := make(chan string, 10)
	server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.URL.Query().Encode()
		_ = json.NewEncoder(w).Encode(adminapi.MessageTrace{
			UserID: "u 1", Incomplete: "the search ended after 7 messages",
			Accepted: []adminapi.AcceptedMessage{
				{MessageID: "m1", Source: "shop/web", Stored: true, Type: "page",
					Destinations: []adminapi.MessageAtEndpoint{{Destination: "shop/crm", State: adminapi.MessageWaiting}}},
				{MessageID: "m2", Source: "shop/web", Stored: true, Type: "page",
					Destinations: []adminapi.MessageAtEndpoint{{Destination: "shop/crm", State: adminapi.MessageDelivered}}},
			},
			Attempts: []adminapi.Attempt{{MessageID: "m2", Destination: "shop/crm", StatusCode: 204},
				{MessageID: "m1", Destination: "shop/crm", StatusCode: 200}},
			DeadLetters: []adminapi.DeadLetter{{MessageID: "m3", Destination: "shop/crm", Key: "k", Reason: "Rejected", StatusCode: 422}},
		})
	}))
	t.Cleanup(server.Close)
	for format, want := range map[string][]string{
		"": {"pod p: m1: page, accepted by", "shop/crm      -          Waiting", "pod p: m2: page", "answered 204",
			"Dead letter of shop/crm with message m3 since", "kubectl posthorn deadletters show crm k -n shop",
			"not complete: the search ended after 7 messages"},
		"json": {`{"pod":"p","userId":"u 1","accepted":[{"messageId":"m1",`},
		"yaml": {"pod: p\n", "accepted:\n- acceptedAt:", "  messageId: m1\n", "---\n"},
	} {
		pod := target{"p", &adminapi.Client{URL: server.URL}}
		args := []string{"--user-id", "u 1"}
		if format != "" {
			args = append(args, "-o", format)
		}
		out, err := run(newTrace(func(*cobra.Command) connector { return pods{[]target{pod, pod}} }), args...)
		if err != nil {
			t.Errorf("format %q: got error %v, want none", format, err)
		}
		if got := <-asked + <-asked; got != "userId=u+1userId=u+1" {
			t.Errorf("format %q: got the queries %s, want userId=u+1 from each pod", format, got)
		}
		for _, w := range want {
			if !strings.Contains(out, w) {
				t.Errorf("format %q: got\n%s\nwant %q", format, out, w)
			}
		}
	}
	for name, args := range map[string][]string{"both": {"m1", "--user-id", "u"}, "neither": nil, "empty": {"--user-id", ""}} {
		if _, err := run(newTrace(func(*cobra.Command) connector { return pods{} }), args...); err == nil ||
			!strings.Contains(err.Error(), "--user-id") {
			t.Errorf("%s: got error %v, want one about --user-id", name, err)
		}
	}
}

// Message bodies are requested with a token of their own. Without the permission to create it, the
// dispatcher is not asked, and the error names the Role.
func TestTokenForBodies(t *testing.T) {
	var got []string
	server := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
		got = append(got, r.URL.Path+" "+r.Header.Get("Authorization"))
		_, _ = w.Write([]byte("{}"))
	}))
	t.Cleanup(server.Close)
	support := "support"
	auth := &podAuth{next: http.DefaultTransport, bodiesToken: func() (string, error) { return "bodies", nil }}
	auth.token.Store(&support)
	client := &adminapi.Client{URL: server.URL, HTTP: &http.Client{Transport: auth}}
	_, err := client.DeadLetterWithBody(t.Context(), "shop/crm", "k")
	if err != nil {
		t.Errorf("with the permission: got error %v, want none", err)
	}
	if _, err := client.DeadLetter(t.Context(), "shop/crm", "k"); err != nil {
		t.Errorf("without the body: got error %v, want none", err)
	}
	auth.bodiesToken = func() (string, error) { return "", errors.New("message bodies need the Role posthorn-bodies-user") }
	_, err = client.DeadLetterWithBody(t.Context(), "shop/crm", "k")
	if !forbidden(err) || err.Error() != "403 Forbidden: message bodies need the Role posthorn-bodies-user" {
		t.Errorf("without the permission: got error %v, want 403 that names the Role", err)
	}
	if diff := cmp.Diff([]string{"/bodies/deadletters/k Bearer bodies", "/deadletters/k Bearer support"}, got); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}

// A token for bodies is created once for all pods, again at half of its lifetime, and again after a failure.
func TestTokenForBodiesIsReused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		created, failing := 0, true
		token := reuseToken(func() (string, error) {
			if failing {
				return "", errors.New("forbidden")
			}
			created++
			return fmt.Sprint("token ", created), nil
		})
		if _, err := token(); err == nil {
			t.Error("while it fails: got no error, want one")
		}
		failing = false
		for _, want := range []string{"token 1", "token 2"} {
			for range 3 {
				if got, err := token(); got != want || err != nil {
					t.Errorf("got %q, %v, want %q", got, err, want)
				}
				time.Sleep(supportTokenSeconds * time.Second / 6)
			}
		}
	})
}

// The name of an object that why is asked about can be any bytes.
func TestWhyEscapesItsArgument(t *testing.T) {
	for _, findings := range [][]why.Finding{{{Level: why.Problem, Text: "text", Fix: "fix"}}, {{Level: why.Fine, Text: "text"}}} {
		var out strings.Builder
		if err := printFindings(&out, &command.Objects{}, trouble{Kind: "WebhookDestination", Namespace: "shop", Name: "\x1b[31mx\x9b31m\u202e"},
			findings); err != nil && !errors.Is(err, command.ErrFailed) {
			t.Fatal(err)
		}
		if !strings.HasPrefix(out.String(), `shop/\x1b[31mx\x9b31m\u202e: `) || strings.ContainsAny(out.String(), "\x1b\u202e") ||
			strings.Contains(out.String(), "\x9b") {
			t.Errorf("got %q", out.String())
		}
	}
}
