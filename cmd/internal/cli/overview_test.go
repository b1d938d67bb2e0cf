package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
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
	report := adminapi.Report{Ready: true, Storage: adminapi.StorageReport{UsedBytes: 4 * mib, FreeBytes: 5 * mib, TotalBytes: 9 * mib}, Namespaces: []adminapi.NamespaceReport{
		{Namespace: "default", Sources: []adminapi.SourceReport{{Name: "web", Accepted: 7, Rejected: 2}}, Destinations: []adminapi.DestinationReport{{Name: "crm", Retrying: 1, DeadLettersStored: 3, Ledger: adminapi.Ledger{Delivered: 4, Pending: 2}}}},
		{Namespace: "shop", Sources: []adminapi.SourceReport{{Name: "web", Accepted: 100}}},
	}}
	starting, full := report, report
	starting.Ready = false
	full.Storage.Pressure = true
	const refused = `[{"type":"ResolvedRefs","status":"False","reason":"SecretNotFound","message":"Secret \"gone\" does not exist"}]`
	for _, c := range []struct {
		name, args, conditions, problems string
		report                           adminapi.Report
		code                             int
		want                             string
	}{
		{"healthy, one namespace", "status -n default", healthy, "[]", report, command.ExitOK, `Accepts calls   yes
Storage         4 MiB used, 5 MiB free of 9 MiB
Sources         1; 7 calls accepted, 2 rejected
Destinations    0; 4 messages delivered, 2 pending (1 are retries), 3 dead letters stored
Problems        0
`},
		{"a missing Secret, all namespaces", "status", refused, "[]", report, command.ExitFailure, `Accepts calls   yes
Storage         4 MiB used, 5 MiB free of 9 MiB
Sources         1; 107 calls accepted, 2 rejected
Destinations    0; 4 messages delivered, 2 pending (1 are retries), 3 dead letters stored
Problems        1

Source default/web: Secret "gone" does not exist.
`},
		{"starting", "status -o json", healthy, "[]", starting, command.ExitFailure, `{"ready":false,"storage":{"usedBytes":4194304,"freeBytes":5242880,"totalBytes":9437184},"sources":1,"accepted":107,"rejected":2,"destinations":0,"delivered":4,"pending":2,"retrying":1,"deadLettersStored":3,"problems":[],"notices":[]}
`},
		{"the disk is full", "status -o json", healthy, "[]", full, command.ExitFailure, `{"ready":true,"storage":{"usedBytes":4194304,"freeBytes":5242880,"totalBytes":9437184,"pressure":true},"sources":1,"accepted":107,"rejected":2,"destinations":0,"delivered":4,"pending":2,"retrying":1,"deadLettersStored":3,"problems":[],"notices":[]}
`},
		{"why, healthy", "why", healthy, "[]", report, command.ExitOK, "0 of 2 objects have a problem.\n"},
		{"why, a rejected manifest", "why", healthy, `[{"file":"a.yaml","line":4,"object":"Source default/ios","message":"unknown field"}]`, report, command.ExitFailure, `Manifest a.yaml:4: Source default/ios: unknown field.
  To do: correct the manifest.
0 of 2 objects have a problem.
`},
		{"why, of another namespace", "why", healthy, `[{"file":"a.yaml","line":4,"object":"Source shop/ios","message":"unknown field"}]`, report, command.ExitOK, "0 of 2 objects have a problem.\n"},
		{"why, as JSON", "why -o json", refused, "[]", report, command.ExitFailure, `{"kind":"Source","namespace":"default","name":"web","level":"PROBLEM","about":"SecretNotFound","text":"Secret \"gone\" does not exist"}
`},
		{"why of a Source", "why source.posthorn.dev/web", refused, "[]", report, command.ExitFailure, `Source default/web: Secret "gone" does not exist.

PROBLEM   ResolvedRefs   Secret "gone" does not exist
`},
		{"why of an unknown Source", "why source/wen", healthy, "[]", report, command.ExitFailure, "posthorn: there is no Source \"wen\" in namespace \"default\"; did you mean web?\n"},
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
