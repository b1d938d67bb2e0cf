package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/controllers/why"
)

const healthy = `[{"type":"Accepted","status":"True","reason":"Accepted","message":"the spec is valid"},{"type":"Ready","status":"True","reason":"Ready","message":"fine"}]`

// oneRun is the admin address of a posthorn run with the Source web, whose conditions are given, and
// a Redelivery that has not ended.
func oneRun(t *testing.T, conditions, problems string, report adminapi.Report) string {
	mux := http.NewServeMux()
	for _, prefix := range []string{apiPrefix, apiPrefix + "/namespaces/default"} {
		mux.HandleFunc("GET "+prefix+"/sources", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"items":[{"metadata":{"name":"web","namespace":"default"},"status":{"conditions":%s}}]}`, conditions)
		})
		mux.HandleFunc("GET "+prefix+"/redeliveries", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, `{"items":[{"metadata":{"name":"again","namespace":"default"},"status":{"conditions":[{"type":"Ready","status":"False","reason":"InProgress","message":"1 of 9"}]}}]}`)
		})
		mux.HandleFunc("GET "+prefix+"/{resource}", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"items":[]}`) })
	}
	mux.HandleFunc("GET /problems", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"problems":%s}`, problems) })
	mux.HandleFunc("GET /report", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(report) })
	mux.HandleFunc("GET /unknownkeys", func(http.ResponseWriter, *http.Request) {})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL
}

func TestStatus(t *testing.T) {
	const mib = 1 << 20
	report := adminapi.Report{Ready: true, Storage: adminapi.StorageReport{UsedBytes: 4 * mib, FreeBytes: 5 * mib, TotalBytes: 9 * mib},
		Namespaces: []adminapi.NamespaceReport{
			{Namespace: "default", Sources: []adminapi.SourceReport{{Name: "web", Accepted: 7, Rejected: 2}}, Destinations: []adminapi.DestinationReport{{Name: "crm", Retrying: 1, DeadLettersStored: 3, Ledger: adminapi.Ledger{Delivered: 4, Pending: 2}}}},
			{Namespace: "shop", Sources: []adminapi.SourceReport{{Name: "web", Accepted: 100}}},
		}}
	starting, full, refusing := report, report, report
	refusing.Namespaces = []adminapi.NamespaceReport{{Namespace: "default", Sources: []adminapi.SourceReport{{Name: "web", Accepted: 7, Rejected: 3, LastAccepted: time.Now(), LastRejected: time.Now(), LastRejection: "storage_full: storage is full; send it again later"}}}}
	starting.Ready = false
	full.Pod, full.Storage.Pressure, full.Storage.LackingBytes = "d2", true, 3*mib
	const pressure = `[{"type":"Receiving","status":"False","reason":"StoragePressure","message":"calls are answered 503"}]`
	const refused = `[{"type":"ResolvedRefs","status":"False","reason":"SecretNotFound","message":"Secret \"gone\" does not exist"}]`
	const rejecting = `[{"type":"Accepted","status":"True","reason":"Accepted","message":"the spec is valid"},{"type":"Receiving","status":"False","reason":"RejectingCalls","message":"all of the latest calls were rejected: no userId"}]`
	const unread = `[{"type":"Accepted","status":"True","reason":"Accepted","message":"the spec is valid"},{"type":"Programmed","status":"False","reason":"ConfigRefused","message":"a dispatcher rejected the config"}]`
	const outdated = `[{"type":"Accepted","status":"True","reason":"Accepted","message":"the spec is valid"},{"type":"Ready","status":"False","reason":"ManifestRejected","message":"a.yaml:4: Source default/web: unknown field"}]`
	const discards = `[{"type":"Ready","status":"True","reason":"DiscardAhead","message":"ready; pending messages for WebhookDestination \"old\" will be discarded at 2026-03-01T12:10:00Z"}]`
	since := time.Now().Add(time.Hour).Format(time.RFC3339) // A clock that differs must not change the text.
	rejected := `[{"file":"a.yaml","line":4,"object":"Source default/web","message":"unknown field","since":"` + since + `","outdated":["Source default/web"],"effect":"the last valid version remains in effect"}]`
	unreadable := `[{"file":"b.yaml","message":"not YAML","since":"` + since + `","outdated":["Source default/web","WebhookDestination default/crm"]}]`
	const elsewhere = `[{"file":"a.yaml","line":4,"object":"Source shop/ios","message":"unknown field"}]`
	audience := `[{"file":"a.yaml","line":9,"object":"Audience default/vip","message":"unknown field","since":"` + since + `"}]`
	for _, c := range []struct {
		name, args, conditions, problems string
		report                           adminapi.Report
		code                             int
		want                             string
	}{
		{"healthy, one namespace", "status -n default", healthy, "[]", report, command.ExitOK, `Accepts calls   yes
Storage         4 MiB used, 5 MiB free of 9 MiB
Sources         1; 7 calls accepted, 2 rejected
Destinations    0; 4 messages delivered, 2 pending (1 retry), 3 dead letters stored
Problems        0 in namespace default
`},
		{"healthy, a problem in another namespace", "status -n default", healthy, elsewhere, report, command.ExitOK, `Accepts calls   yes
Storage         4 MiB used, 5 MiB free of 9 MiB
Sources         1; 7 calls accepted, 2 rejected
Destinations    0; 4 messages delivered, 2 pending (1 retry), 3 dead letters stored
Problems        0 in namespace default, 1 in others
`},
		{"a missing Secret, all namespaces", "status -A", refused, "[]", report, command.ExitFailure, `Accepts calls   yes
Storage         4 MiB used, 5 MiB free of 9 MiB
Sources         1; 107 calls accepted, 2 rejected
Destinations    0; 4 messages delivered, 2 pending (1 retry), 3 dead letters stored
Problems        1

Source default/web: Secret "gone" does not exist.
  To do: create the Secret in this namespace; no restart is necessary.
`},
		{"starting", "status -A -o json", healthy, "[]", starting, command.ExitFailure, `{"ready":false,"storage":{"usedBytes":4194304,"freeBytes":5242880,"totalBytes":9437184},"sources":1,"accepted":107,"rejected":2,"destinations":0,"delivered":4,"pending":2,"retrying":1,"deadLettersStored":3,"problems":[],"notices":[]}
`},
		{"the disk is full", "status -A", pressure, "[]", full, command.ExitFailure, `Accepts calls   no, the disk is full
Storage         4 MiB used, 5 MiB free of 9 MiB
Sources         1; 107 calls accepted, 2 rejected
Destinations    0; 4 messages delivered, 2 pending (1 retry), 3 dead letters stored
Problems        1

Dispatcher d2: the disk of dispatcher d2 is full, so new calls are answered 503 until 3 MiB become free; of 9 MiB, Posthorn uses 4 MiB and other files 0 MiB; the largest backlogs are default/crm (2 pending, 3 dead letters).
  To do: fix the receivers with the largest backlog, purge dead letters, or enlarge the volume.
`},
		{"why, the disk is full", "why -A", pressure, "[]", full, command.ExitFailure, `Dispatcher d2: the disk of dispatcher d2 is full, so new calls are answered 503 until 3 MiB become free; of 9 MiB, Posthorn uses 4 MiB and other files 0 MiB; the largest backlogs are default/crm (2 pending, 3 dead letters).
  To do: fix the receivers with the largest backlog, purge dead letters, or enlarge the volume.
0 of 2 objects have a problem; 1 other problem above.
`},
		{"large calls are refused", "status -A", healthy, "[]", refusing, command.ExitFailure, `Accepts calls   no, calls are answered 503
Storage         4 MiB used, 5 MiB free of 9 MiB
Sources         1; 7 calls accepted, 3 rejected
Destinations    0; 0 messages delivered, 0 pending (0 retries), 0 dead letters stored
Problems        1

Source default/web: Source "web": calls are answered 503, the last one just now: storage_full: storage is full; send it again later.
  To do: fix the destinations with the largest backlog, or ask an administrator for disk space.
`},
		{"why of a Source whose large calls are refused", "why source/web", healthy, "[]", refusing, command.ExitFailure, `Source default/web: Source "web": calls are answered 503, the last one just now: storage_full: storage is full; send it again later.
To do: fix the destinations with the largest backlog, or ask an administrator for disk space.

OK        Accepted   the spec is valid
OK        Ready      fine
PROBLEM   Disk       Source "web": calls are answered 503, the last one just now: storage_full: storage is full; send it again later
`},
		{"why, a full share", "why -A", pressure, "[]", report, command.ExitFailure, `Source default/web: calls are answered 503.
  To do: fix the destinations with the largest backlog, or ask an administrator for disk space.
1 of 2 objects has a problem.
`},
		{"why, healthy", "why -A", healthy, "[]", report, command.ExitOK, "0 of 2 objects have a problem.\n"},
		{"why, a rejected manifest", "why -A", healthy, `[{"file":"a.yaml","line":4,"object":"Source default/ios","message":"unknown field"}]`, report, command.ExitFailure, `Manifest a.yaml:4: Source default/ios: unknown field.
  To do: correct the manifest.
0 of 2 objects have a problem; 1 other problem above.
`},
		{"why, of another namespace", "why -n default", healthy, elsewhere, report, command.ExitOK, "0 of 2 objects in namespace default have a problem. 1 problem in other namespaces: see 'why -A'.\n"},
		{"why of a kind, of another namespace", "why sources -n default", healthy, elsewhere, report, command.ExitOK, "Source default/web: no problem found.\n0 of 1 object in namespace default has a problem. 1 problem in other namespaces: see 'why -A'.\n"},
		{"why, the namespace by default", "why", healthy, elsewhere, report, command.ExitOK, "0 of 2 objects in namespace default have a problem. 1 problem in other namespaces: see 'why -A'.\n"},
		{"why, as JSON", "why -o json", refused, "[]", report, command.ExitFailure, `{"kind":"Source","namespace":"default","name":"web","level":"PROBLEM","about":"SecretNotFound","text":"Secret \"gone\" does not exist","fix":"create the Secret in this namespace; no restart is necessary","reason":"SecretNotFound"}
`},
		{"why of a Source", "why source.posthorn.dev/web", refused, "[]", report, command.ExitFailure, `Source default/web: Secret "gone" does not exist.
To do: create the Secret in this namespace; no restart is necessary.

PROBLEM   ResolvedRefs   Secret "gone" does not exist
`},
		{"why of a Source whose calls are rejected", "why source/web", rejecting, "[]", report, command.ExitFailure, `Source default/web: all of the latest calls were rejected: no userId.
To do: fix the sender; the message gives the reason.

OK        Accepted    the spec is valid
PROBLEM   Receiving   all of the latest calls were rejected: no userId
`},
		{"why of a Source whose config a dispatcher rejects", "why source/web", unread, "[]", report, command.ExitFailure, `Source default/web: a dispatcher rejected the config.

OK        Accepted     the spec is valid
PROBLEM   Programmed   a dispatcher rejected the config
`},
		{"why of a Source that waits for the dispatchers", "why source/web", strings.ReplaceAll(unread, "ConfigRefused", "Pending"), "[]", report, command.ExitOK, `Source default/web: no problem found.

OK       Accepted     the spec is valid
NOTICE   Programmed   a dispatcher rejected the config
`},
		{"why, a Source whose calls are rejected", "why -A", rejecting, "[]", report, command.ExitFailure, `Source default/web: all of the latest calls were rejected: no userId.
  To do: fix the sender; the message gives the reason.
1 of 2 objects has a problem.
`},
		{"why, a manifest of another namespace, all", "why -A", healthy, `[{"file":"a.yaml","line":4,"object":"Source shop/ios","message":"unknown field"}]`, report, command.ExitFailure, `Manifest a.yaml:4: Source shop/ios: unknown field.
  To do: correct the manifest.
0 of 2 objects have a problem; 1 other problem above.
`},
		{"why of a kind", "why -A sources", healthy, "[]", report, command.ExitOK, "Source default/web: no problem found.\n0 of 1 object has a problem.\n"},
		{"why of a kind with a problem", "why -A psrc", rejecting, `[{"file":"a.yaml","line":4,"object":"Source default/ios","message":"unknown field"},{"file":"a.yaml","line":9,"object":"Audience default/all","message":"unknown field"}]`, report, command.ExitFailure, `Manifest a.yaml:4: Source default/ios: unknown field.
  To do: correct the manifest.
Source default/web: all of the latest calls were rejected: no userId.
  To do: fix the sender; the message gives the reason.
1 of 1 object has a problem.
`},
		{"why of a kind without objects", "why -A deletions", healthy, "[]", report, command.ExitOK, "0 of 0 objects have a problem.\n"},
		{"why, all and a name", "why -A source/web", healthy, "[]", report, command.ExitUsage, "posthorn: -A is for all objects; leave out -A or the name \"web\"\nSee 'posthorn why --help'.\n"},
		{"why, all and a namespace", "why -A -n default", healthy, "[]", report, command.ExitUsage, "posthorn: set either --namespace or --all-namespaces\nSee 'posthorn why --help'.\n"},
		{"status, all and a namespace", "status -A -n default", healthy, "[]", report, command.ExitUsage, "posthorn: set either --namespace or --all-namespaces\nSee 'posthorn status --help'.\n"},
		{"why of an unknown Source", "why source/wen", healthy, "[]", report, command.ExitFailure, `Source default/wen: there is no Source "wen" in namespace "default".
To do: did you mean web?

PROBLEM   Source   there is no Source "wen" in namespace "default"
`},
		{"why of an unknown Audience", "why audience/vip", healthy, "[]", report, command.ExitFailure, `Audience default/vip: there is no Audience "vip" in namespace "default".
To do: create it.

PROBLEM   Audience   there is no Audience "vip" in namespace "default"
`},
		{"why of a Source whose manifest is rejected", "why source/web", outdated, rejected, report, command.ExitFailure, `Source default/web: rejected just now: a.yaml:4: Source default/web: unknown field (the last valid version remains in effect).
To do: correct the manifest.

PROBLEM   Manifest   rejected just now: a.yaml:4: Source default/web: unknown field (the last valid version remains in effect)
OK        Accepted   the spec is valid
`},
		{"why of a Source whose file cannot be read", "why source/web", healthy, unreadable, report, command.ExitFailure, `Source default/web: rejected just now: b.yaml: not YAML.
To do: correct the manifest.

PROBLEM   Manifest   rejected just now: b.yaml: not YAML
OK        Accepted   the spec is valid
OK        Ready      fine
`},
		{"why of a Source next to another rejected manifest", "why source/web", healthy, audience, report, command.ExitOK, `Source default/web: no problem found.

NOTICE   Manifest   rejected just now: a.yaml:9: Audience default/vip: unknown field
                    -> correct the manifest
OK       Accepted   the spec is valid
OK       Ready      fine
`},
		{"why of an Audience that never existed", "why audience/vip", healthy, audience, report, command.ExitFailure, `Audience default/vip: rejected just now: a.yaml:9: Audience default/vip: unknown field.
To do: correct the manifest.

PROBLEM   Manifest   rejected just now: a.yaml:9: Audience default/vip: unknown field
`},
		{"why of an Audience that never existed, as JSON", "why audience/vip -o json", healthy, audience, report, command.ExitFailure, `{"kind":"Audience","namespace":"default","name":"vip","level":"PROBLEM","about":"Manifest","text":"rejected just now: a.yaml:9: Audience default/vip: unknown field","fix":"correct the manifest","reason":"ManifestRejected","since":"` + since + `"}
`},
		{"why of a Redelivery whose manifest is rejected", "why redelivery/again", healthy, strings.ReplaceAll(rejected, "Source default/web", "Redelivery default/again"), report, command.ExitFailure, `Redelivery default/again: rejected just now: a.yaml:4: Redelivery default/again: unknown field (the last valid version remains in effect).
To do: correct the manifest.

PROBLEM   Manifest   rejected just now: a.yaml:4: Redelivery default/again: unknown field (the last valid version remains in effect)
NOTICE    Ready      1 of 9
`},
		{"why of a kind with a file that cannot be read", "why -A sources", healthy, unreadable, report, command.ExitFailure, `Manifest b.yaml: not YAML.
  To do: correct the manifest.
1 of 1 object has a problem.
`},
		{"why of another kind with that file", "why -A redeliveries", healthy, unreadable, report, command.ExitFailure, `Manifest b.yaml: not YAML.
  To do: correct the manifest.
Redelivery default/again: no problem found.
0 of 1 object has a problem; 1 other problem above.
`},
		{"why of a kind with problems of other kinds", "why -A redeliveries", healthy, `[{"file":"a.yaml","line":1,"object":"Sorce default/ios","message":"kind: unknown"},{"file":"a.yaml","line":9,"object":"Secret default/key","message":"unknown field"},{"file":"c.yaml","line":2,"object":"Audience default/vip","message":"twice","outdated":["Redelivery default/again"]}]`, report, command.ExitFailure, `Manifest a.yaml:1: Sorce default/ios: kind: unknown.
  To do: correct the manifest.
Manifest c.yaml:2: Audience default/vip: twice.
  To do: correct the manifest.
1 of 1 object has a problem.
`},
		{"why with a rejected manifest of an object", "why -A", outdated, rejected, report, command.ExitFailure, `Manifest a.yaml:4: Source default/web: unknown field (the last valid version remains in effect).
  To do: correct the manifest.
1 of 2 objects has a problem.
`},
		{"why of a Source with discards ahead", "why source/web", discards, "[]", report, command.ExitOK, `Source default/web: no problem found.

NOTICE   Ready   ready; pending messages for WebhookDestination "old" will be discarded at 2026-03-01T12:10:00Z
`},
		{"why of all", "why all/web", healthy, "[]", report, command.ExitUsage, "posthorn: \"all/web\": use KIND/NAME, with one kind\nSee 'posthorn why --help'.\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			code := execute(append(strings.Fields(c.args), "--admin", oneRun(t, c.conditions, c.problems, c.report)), nil, &out, &out)
			if code != c.code {
				t.Errorf("exit code: got %d, want %d", code, c.code)
			}
			if diff := cmp.Diff(c.want, out.String()); diff != "" {
				t.Errorf("output (-want +got):\n%s", diff)
			}
		})
	}
}

// destinationsOf returns n accepted destinations of the Source web.
func destinationsOf(n int, suspended bool) (list []v1beta1.WebhookDestination) {
	for i := range n {
		d := v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("d%03d", i), Namespace: "shop"}}
		d.Spec.SourceRefs, d.Spec.Suspend = []v1beta1.SourceReference{{Name: "web"}}, &suspended
		d.Status.Conditions = []metav1.Condition{{Type: v1beta1.ConditionAccepted, Status: metav1.ConditionTrue}}
		list = append(list, d)
	}
	return list
}

// A Source without calls is one notice of a new installation, however many destinations it has.
func TestStatusOfANewInstallation(t *testing.T) {
	v := &inventory{destinations: destinationsOf(1000, false),
		sources: []v1beta1.Source{{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "shop"}}}, now: time.Now()}
	s := v.state("shop")
	if len(s.Problems) != 0 {
		t.Errorf("problems: got %d, want 0; the first is %+v", len(s.Problems), s.Problems[0])
	}
	if diff := cmp.Diff([]string{`no call has ever been accepted for Source "web" in namespace shop`}, s.Notices); diff != "" {
		t.Errorf("notices (-want +got):\n%s", diff)
	}
}

// Status fits on a screen; its JSON has all problems.
func TestStatusIsBounded(t *testing.T) {
	v := &inventory{destinations: destinationsOf(1000, true),
		sources: []v1beta1.Source{{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "shop"}}}, now: time.Now()}
	s := v.state("")
	var out bytes.Buffer
	s.print(&out)
	if got := strings.Count(out.String(), "WebhookDestination shop/"); got != maxShown || len(s.Problems) != 1000 {
		t.Errorf("problems: got %d printed of %d, want %d of 1000", got, len(s.Problems), maxShown)
	}
	if want := "… and 980 more problems; 'why -A' prints all.\n"; !strings.Contains(out.String(), want) {
		t.Errorf("got no %q in\n%s", want, out.String())
	}
}

// An empty namespace may be a mistyped one.
func TestStatusOfAnEmptyNamespace(t *testing.T) {
	s := (&inventory{now: time.Now()}).state("shpo")
	if diff := cmp.Diff([]string{`there are no objects in namespace "shpo"; set another --namespace, or all with -A`}, s.Notices); diff != "" {
		t.Errorf("notices (-want +got):\n%s", diff)
	}
}

// A value that no dead letter can have selects nothing, so it is a mistake.
func TestUnknownSelection(t *testing.T) {
	reasons, types := strings.Join(v1beta1.DeadLetterReasons, ", "), strings.Join(callTypes, ", ")
	for args, want := range map[string]string{
		"deadletters redeliver crm --reason expired":            `--reason "expired" is not one of ` + reasons + "; did you mean Expired?",
		"deadletters purge crm --reason Rejected,Expird":        `--reason "Expird" is not one of ` + reasons + "; did you mean Expired?",
		"deadletters redeliver crm --type trak":                 `--type "trak" is not one of ` + types + "; did you mean track?",
		"kubectl redeliver crm --reason Exp --kubeconfig /none": `--reason "Exp" is not one of ` + reasons + "; did you mean Expired?",
		"deadletters list crm --limit 0":                        "--limit 0: use 1 to 10000",
		"deadletters list crm --limit 10001":                    "--limit 10001: use 1 to 10000",
		"completion fsh":                                        `unknown command "fsh"; did you mean bash or fish or zsh?`,
	} {
		var out bytes.Buffer
		code := execute(strings.Fields(args), nil, &out, &out)
		if got, _, _ := strings.Cut(out.String(), "\n"); code != command.ExitUsage || got != "posthorn: "+want {
			t.Errorf("%s: got exit code %d and %q, want %d and %q", args, code, got, command.ExitUsage, want)
		}
	}
}

func TestVersion(t *testing.T) {
	var out bytes.Buffer
	code := execute([]string{"version", "-o", "json"}, nil, &out, &out)
	got := map[string]string{}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || code != command.ExitOK {
		t.Fatalf("exit code %d, %v: %s", code, err, out.String())
	}
	for _, key := range []string{"version", "goVersion", "platform"} {
		if got[key] == "" {
			t.Errorf("no %q in %s", key, out.String())
		}
	}
}

// A parked object is a problem, once for all pods. A manifest of posthorn run explains it better.
func TestParkedObjects(t *testing.T) {
	parked := func(pod string) *podreport.Index {
		return podreport.NewIndex(adminapi.Report{Pod: pod, Configs: []adminapi.ConfigReport{
			{Namespace: "shop", Parked: []adminapi.ParkedObject{{Object: "destinations/crm"}, {Object: "sources/web"}}},
			{Namespace: "news", Parked: []adminapi.ParkedObject{{Object: "audiences/buyers"}}},
		}})
	}
	for name, c := range map[string]struct {
		namespace, resource string
		manifests           []manifest.Problem
		want                []string
	}{
		"all":         {"", "", nil, []string{"WebhookDestination shop/crm", "Source shop/web", "Audience news/buyers"}},
		"a namespace": {"news", "", nil, []string{"Audience news/buyers"}},
		"a kind":      {"", "sources", nil, []string{"Source shop/web"}},
		"manifest of an object": {"shop", "", []manifest.Problem{{Object: "Source shop/web", Parked: true}},
			[]string{"Source shop/web", "WebhookDestination shop/crm"}},
		"another namespace":      {"other", "", nil, nil},
		"destinations":           {"", "webhookdestinations", nil, []string{"WebhookDestination shop/crm"}},
		"no object of this kind": {"shop", "audiences", nil, nil},
	} {
		v := &inventory{manifests: c.manifests, liveState: liveState{reports: []*podreport.Index{parked("d-0"), parked("d-1")}}, now: time.Now()}
		v.only(c.resource)
		found, _ := v.troubles(c.namespace)
		var got []string
		for _, f := range found {
			got = append(got, f.Kind+" "+f.Namespace+"/"+f.Name)
			if f.Level != why.Problem || !strings.Contains(f.Text, "parked") && !strings.Contains(f.Text, "kept and not sent") {
				t.Errorf("%s: got the finding %+v, want a problem with its effect", name, f.Finding)
			}
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: problems (-want +got):\n%s", name, diff)
		}
	}
}
