package cli

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/manifest"
	"github.com/posthorn/posthorn/controllers/why"
)

// keysOf returns the names of the JSON fields of a struct, those of embedded ones included.
func keysOf(t reflect.Type) (keys []string) {
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && name == "":
			keys = append(keys, keysOf(f.Type)...)
		case f.IsExported() && name != "-":
			keys = append(keys, name)
		}
	}
	slices.Sort(keys)
	return keys
}

// Scripts use the names of the fields: one may be added here, and none removed or changed.
func TestOutputFieldsAreStable(t *testing.T) {
	for name, c := range map[string]struct{ object, want any }{
		"why, and problems of status": {trouble{}, "about fix idle kind level name namespace reason since statusCode text"},
		"status":                      {state{}, "accepted deadLettersStored delivered destinations notices pending problems problemsElsewhere ready refusing rejected replication retrying sources storage"},
		"problems":                    {manifest.Problem{}, "document effect file line message object outdated parked reason since"},
		"attempts and test":           {adminapi.Attempt{}, "certificateExpires destination durationNanos endpoint generation message messageId messages number probe reason remoteAddr response retryAfterNanos seq source statusCode test time timing"},
		"deadletters list":            {adminapi.DeadLetter{}, "acceptedAt attempts body destination endpoint event failedAt key message messageId reason response source statusCode type"},
		"send":                        {sendResult{}, "messageId response statusCode"},
		"import":                      {importState{}, "accepted line rejected sha256 undated unread"},
		"deadletters redeliver":       {adminapi.DeadLetterProgress{}, "asOf bytes done error matched redelivered"},
	} {
		if diff := cmp.Diff(c.want, any(strings.Join(keysOf(reflect.TypeOf(c.object)), " "))); diff != "" {
			t.Errorf("fields of %s (-want +got):\n%s", name, diff)
		}
	}
}

// -o json prints a line, -o yaml a document for each object, with the same fields.
func TestObjects(t *testing.T) {
	finding := trouble{Kind: "WebhookDestination", Namespace: "shop", Name: "crm", Finding: why.Finding{Level: why.Problem, About: "Endpoint",
		Text: "it fails\x1b", Reason: "Rejected", StatusCode: 422, Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}}
	for format, want := range map[string]string{
		"json": `{"kind":"WebhookDestination","namespace":"shop","name":"crm","level":"PROBLEM","about":"Endpoint","text":"it fails\u001b","reason":"Rejected","since":"2026-01-02T03:04:05Z","statusCode":422}
`,
		"yaml": `about: Endpoint
kind: WebhookDestination
level: PROBLEM
name: crm
namespace: shop
reason: Rejected
since: "2026-01-02T03:04:05Z"
statusCode: 422
text: "it fails\e"
`,
	} {
		cmd := &cobra.Command{}
		printer := command.ObjectsFlag(cmd)
		if err := cmd.Flags().Set("output", format); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		for range 2 {
			if err := printer.Print(&out, finding); err != nil {
				t.Fatal(err)
			}
		}
		separator := map[string]string{"json": "", "yaml": "---\n"}[format]
		if diff := cmp.Diff(want+separator+want, out.String()); diff != "" {
			t.Errorf("two objects as %s (-want +got):\n%s", format, diff)
		}
	}
}

// The response is part of the JSON of send, whatever it is.
func TestSendOutput(t *testing.T) {
	got := newSendResult(503, []byte("starting\n"), "m1")
	text, err := json.Marshal(got)
	if err != nil || string(text) != `{"statusCode":503,"messageId":"m1","response":"starting\n"}` {
		t.Errorf("a response that is no JSON: got %s and error %v", text, err)
	}
	got = newSendResult(200, []byte(`{"success":true}`), "")
	if text, err = json.Marshal(got); err != nil || string(text) != `{"statusCode":200,"response":{"success":true}}` {
		t.Errorf("a response in JSON: got %s and error %v", text, err)
	}
}
