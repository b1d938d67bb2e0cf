package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/controllers/kinds"
)

// Each kind can be shown by its name.
func TestGetKnowsEveryKind(t *testing.T) {
	for _, k := range kinds.All {
		if name := strings.ToLower(k.Name()); resourceNames[name] == "" {
			t.Errorf("posthorn get does not know %s", name)
		}
	}
}

// fakeRun is the admin address of a posthorn run with the Source web and the destinations crm and
// warehouse. Each request raises the number of messages that crm has delivered, up to 3.
func fakeRun(t *testing.T) string {
	var requests atomic.Int64
	mux := http.NewServeMux()
	serve := func(w http.ResponseWriter, r *http.Request) {
		kind, all := "Source", []string{"web"}
		switch r.PathValue("resource") {
		case "sources":
		case "webhookdestinations":
			kind, all = "WebhookDestination", []string{"crm", "warehouse"}
		default:
			all = nil
		}
		delivered := min(requests.Add(1), 3)
		var objects, rows []string
		for _, name := range all {
			if want := r.PathValue("name"); want != "" && want != name {
				continue
			}
			metadata := fmt.Sprintf(`{"name":%q,"namespace":"default"}`, name)
			objects = append(objects, fmt.Sprintf(`{"apiVersion":"posthorn.dev/v1beta1","kind":%q,"metadata":%s,"status":{"delivered":%d}}`, kind, metadata, delivered))
			count := delivered
			if name != "crm" {
				count = 0
			}
			rows = append(rows, fmt.Sprintf(`{"cells":[%q,%d,"%ds"],"object":{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":%s}}`, name, count, requests.Load(), metadata))
		}
		switch {
		case r.PathValue("name") != "" && len(objects) == 0:
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprintf(w, `{"kind":"Status","message":"%s.posthorn.dev \"%s\" not found"}`, r.PathValue("resource"), r.PathValue("name"))
		case strings.Contains(r.Header.Get("Accept"), "as=Table"):
			fmt.Fprintf(w, `{"kind":"Table","apiVersion":"meta.k8s.io/v1","columnDefinitions":[{"name":"Name","type":"string"},{"name":"Delivered","type":"integer"},{"name":"Age","type":"string"}],"rows":[%s]}`, strings.Join(rows, ","))
		case r.PathValue("name") != "":
			fmt.Fprint(w, objects[0])
		default:
			fmt.Fprintf(w, `{"apiVersion":"posthorn.dev/v1beta1","kind":%q,"items":[%s]}`, kind+"List", strings.Join(objects, ","))
		}
	}
	for _, path := range []string{"/{resource}", "/{resource}/{name}", "/namespaces/{namespace}/{resource}",
		"/namespaces/{namespace}/{resource}/{name}"} {
		mux.HandleFunc("GET "+apiPrefix+path, serve)
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL
}

func TestGet(t *testing.T) {
	admin := fakeRun(t)
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"sources,whd -o name", command.ExitOK, "source.posthorn.dev/web\nwebhookdestination.posthorn.dev/crm\nwebhookdestination.posthorn.dev/warehouse\n"},
		{"all -o name", command.ExitOK, "source.posthorn.dev/web\nwebhookdestination.posthorn.dev/crm\nwebhookdestination.posthorn.dev/warehouse\n"},
		{"whd crm -o jsonpath={.metadata.name}{.metadata.missing}", command.ExitOK, "crm"},
		{"whd -o jsonpath={.items[*].metadata.name}", command.ExitOK, "crm warehouse"},
		{"whd crm warehouse -o name", command.ExitOK, "webhookdestination.posthorn.dev/crm\nwebhookdestination.posthorn.dev/warehouse\n"},
		{"source web --no-headers -o name", command.ExitOK, "source.posthorn.dev/web\n"},
		{"audiences", command.ExitOK, "No resources found in namespace default; -A shows all namespaces.\n"},
		{"audiences -A", command.ExitOK, "No resources found.\n"},
		{"source web -A", command.ExitUsage, "posthorn: -A is for all objects; leave out -A or the name \"web\"\nSee 'posthorn get --help'.\n"},
		{"whd crmm", command.ExitFailure, "posthorn: webhookdestinations.posthorn.dev \"crmm\" not found; did you mean crm?\n"},
		{"sourcs", command.ExitUsage, "posthorn: \"sourcs\" is not one of sources, destinations, audiences, deletions, redeliveries or all; did you mean source or sources?\nSee 'posthorn get --help'.\n"},
		{"sources,whd web", command.ExitUsage, "posthorn: set one kind when you set the name \"web\"\nSee 'posthorn get --help'.\n"},
		{"whd -A -n shop", command.ExitUsage, "posthorn: set either --namespace or --all-namespaces\nSee 'posthorn get --help'.\n"},
		{"whd -o xml", command.ExitUsage, "posthorn: --output \"xml\": use wide, name, yaml, json or jsonpath=TEMPLATE\nSee 'posthorn get --help'.\n"},
		{"whd -o jsonpath={", command.ExitUsage, "posthorn: --output \"jsonpath={\": the template is invalid: unclosed action\nSee 'posthorn get --help'.\n"},
	} {
		t.Run(c.args, func(t *testing.T) {
			var out bytes.Buffer
			code := execute(append([]string{"get", "--admin", admin}, strings.Fields(c.args)...), nil, &out, &out)
			if code != c.code {
				t.Errorf("exit code: got %d, want %d", code, c.code)
			}
			if diff := cmp.Diff(c.want, out.String()); diff != "" {
				t.Errorf("output (-want +got):\n%s", diff)
			}
		})
	}
}

// The JSON of one object is the object, the JSON of several kinds is one List.
func TestGetJSON(t *testing.T) {
	admin := fakeRun(t)
	for args, want := range map[string]struct {
		kind  string
		items int
	}{"whd crm -o json": {"WebhookDestination", 0}, "all -o json": {"List", 3}, "whd -o json": {"List", 2}} {
		var out bytes.Buffer
		code := execute(append([]string{"get", "--admin", admin}, strings.Fields(args)...), nil, &out, &out)
		var got struct {
			Kind  string
			Items []any
		}
		if err := json.Unmarshal(out.Bytes(), &got); err != nil || code != command.ExitOK {
			t.Fatalf("%s: exit code %d, %v:\n%s", args, code, err, out.String())
		}
		if got.Kind != want.kind || len(got.Items) != want.items {
			t.Errorf("%s: got kind %s with %d items, want %+v", args, got.Kind, len(got.Items), want)
		}
	}
}

// get --watch prints the rows that changed, without those whose age alone did, and ends with exit
// code 0 when it is interrupted.
func TestGetWatch(t *testing.T) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	out := &until{text: "crm   3", then: stop}
	cmd := newGet()
	cmd.SetArgs([]string{"whd", "--watch", "-A", "--admin", fakeRun(t)})
	cmd.SetOut(out)
	cmd.SetErr(out)
	if err := cmd.ExecuteContext(ctx); err != nil {
		t.Fatal(err)
	}
	rows := map[string]int{}
	for line := range strings.Lines(out.String()) {
		fields := strings.Fields(line)
		rows[strings.Join(fields[:len(fields)-1], " ")]++
	}
	want := map[string]int{"NAMESPACE NAME DELIVERED": 1, "default crm 1": 1, "default warehouse 0": 1, "default crm 2": 1, "default crm 3": 1}
	if diff := cmp.Diff(want, rows); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}

// until is a buffer that calls a function once it contains a text.
type until struct {
	bytes.Buffer
	text string
	then func()
}

func (u *until) Write(p []byte) (int, error) {
	n, err := u.Buffer.Write(p)
	if strings.Contains(u.String(), u.text) {
		u.then()
	}
	return n, err
}

// Kinds and then the names of objects are completed; those that are typed already are not.
func TestGetCompletion(t *testing.T) {
	admin := fakeRun(t)
	for typed, want := range map[string]string{
		"get":                                    "all\nsources\ndestinations\naudiences\ndeletions\nredeliveries\n:4\n",
		"get whd":                                "crm\nwarehouse\n:4\n",
		"get whd crm":                            "warehouse\n:4\n",
		"get whd,psrc":                           ":4\n",
		"why":                                    "crm\nwarehouse\nsources/\ndestinations/\naudiences/\ndeletions/\nredeliveries/\n:6\n",
		"why crm":                                ":4\n",
		"why +whd/":                              "whd/crm\nwhd/warehouse\n:4\n",
		"why +webhookdestinations.posthorn.dev/": "webhookdestinations.posthorn.dev/crm\nwebhookdestinations.posthorn.dev/warehouse\n:4\n",
		"why +sources/w":                         "sources/web\n:4\n",
		"why +cats/":                             ":4\n",
		"attempts":                               "crm\nwarehouse\n:4\n",
	} {
		var out bytes.Buffer
		line := append(append([]string{"__complete"}, strings.Fields(typed)...), "--admin", admin, "")
		if _, part, ok := strings.Cut(typed, "+"); ok { // The typed part of the last word.
			line = []string{"__complete", "why", "--admin", admin, part}
		}
		if code := execute(line, nil, &out, &bytes.Buffer{}); code != command.ExitOK || out.String() != want {
			t.Errorf("%s: exit code %d, got %q, want %q", typed, code, out.String(), want)
		}
	}
}

// A destination may have its kind, by each of its names, as in the output of get -o name.
func TestDestinationWithItsKind(t *testing.T) {
	for _, kind := range []string{"", "whd/", "destination/", "destinations/", "WebhookDestinations/", "webhookdestination.posthorn.dev/"} {
		if name, err := destinationArg(kind + "crm"); name != "crm" || err != nil {
			t.Errorf("%scrm: got %q, %v, want crm", kind, name, err)
		}
	}
	for _, arg := range []string{"sources/web", "cats/x", "whd/", "all/x"} {
		if name, err := destinationArg(arg); err == nil {
			t.Errorf("%s: got %q, want an error", arg, name)
		}
	}
}

// A warning whose remaining time shrinks is one warning, also for hours of --watch.
func TestWatchPrintsAWarningOnce(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var requests atomic.Int64
	server := httptest.NewServer(oneStore(func(w http.ResponseWriter, _ *http.Request) {
		n := requests.Add(1)
		w.Header().Add("Warning", fmt.Sprintf(`299 - "3 pending messages will be discarded in %s, at 2026-11-23T15:25:46Z"`, []string{"8m33s", "8m32s", "1h0m0.5s"}[min(n-1, 2)]))
		if n >= 2 {
			w.Header().Add("Warning", `299 - "4 pending messages will be discarded in 1s, at 2026-11-23T15:25:46Z"`)
		}
		if n == 4 {
			cancel()
		}
		fmt.Fprint(w, `{"kind":"Table","apiVersion":"meta.k8s.io/v1","rows":[]}`)
	}))
	defer server.Close()
	cmd := newGet()
	var out, errs bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	cmd.SetArgs([]string{"destinations", "--watch", "--admin", server.URL})
	if err := cmd.ExecuteContext(ctx); err != nil {
		t.Fatal(err)
	}
	const want = "Warning: 3 pending messages will be discarded in 8m33s, at 2026-11-23T15:25:46Z\nWarning: 4 pending messages will be discarded in 1s, at 2026-11-23T15:25:46Z\n"
	if diff := cmp.Diff(want, errs.String()); diff != "" || requests.Load() < 3 {
		t.Errorf("warnings of %d requests (-want +got):\n%s", requests.Load(), diff)
	}
}
