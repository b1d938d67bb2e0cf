package compat

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/process"
)

// The requests of config/samples are valid by the libraries, or the types, of the vendors whose receivers they are for.
func TestSamplesByVendors(t *testing.T) {
	needNode(t)
	binary, err := built.posthorn()
	if err != nil {
		t.Fatal(err)
	}
	const order = `{"type":"track","event":"Order <Paid> & \"Sent\" ö","userId":"u1","messageId":"m1","properties":{"total":150.50,"orderId":"A-17","10":1}}`
	for _, test := range []struct {
		// sample is the name of the file, which begins with the vendor's name.
		sample, call string
		// from and to make the request invalid.
		from, to string
	}{
		{"segment", order, `"total\":150.5`, `"total\":150.50`},
		{"slack", order, `plain_text`, `plain`},
		{"slack_dead_letters", `{"type":"track","event":"E","userId":"u1","deadLetter":{"destination":"crm","reason":"Rejected"}}`, `"context\"`, `"contexts\"`},
		{"teams", order, `Bolder`, `Boldest`},
	} {
		t.Run(test.sample, func(t *testing.T) {
			requests := rendered(t, binary, test.sample, test.call)
			vendor, _, _ := strings.Cut(test.sample, "_")
			if out, err := validate(vendor, requests); err != nil {
				t.Errorf("%s: got error %v and\n%s\nwant it to be valid", requests, err, out)
			}
			invalid := strings.Replace(requests, test.from, test.to, 1)
			if out, err := validate(vendor, invalid); err == nil || out == "" || invalid == requests {
				t.Errorf("%s: got no error, want one", invalid)
			}
		})
	}
}

// The SDK of CloudEvents reads an event in each mode.
func TestCloudEventsBySDK(t *testing.T) {
	binary, err := built.posthorn()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "cloudevents")
	if err := process.Compile("testdata/cloudevents", ".", program); err != nil {
		t.Fatal(err)
	}
	for call, want := range map[string]string{
		`{"type":"page","userId":"ü 1","messageId":"m 1"}`: "binary com.example.posthorn.page m%201 page\nstructured com.example.posthorn.page m 1 page\nbatch com.example.posthorn.page m 1 page\n",
		`{"type":"delete","userId":"u1"}`:                  "binary com.example.posthorn.delete delete%20u1 delete\nstructured com.example.posthorn.delete delete u1 delete\nbatch com.example.posthorn.delete delete u1 delete\n",
	} {
		read := exec.Command(program)
		read.Stdin = strings.NewReader(rendered(t, binary, "cloudevents", call) + rendered(t, binary, "batch", call))
		out, err := read.CombinedOutput()
		if err != nil || string(out) != want {
			t.Errorf("%s: got error %v and\n%s\nwant\n%s", call, err, out, want)
		}
	}
	read := exec.Command(program)
	read.Stdin = strings.NewReader(rendered(t, binary, "segment", `{"type":"page","userId":"u"}`))
	if out, err := read.CombinedOutput(); err == nil {
		t.Errorf("a request that is no event: got no error and %s", out)
	}
}

// rendered returns the requests of a sample for a call, as lines of JSON.
func rendered(t *testing.T, binary, sample, call string) string {
	t.Helper()
	var errs bytes.Buffer
	render := exec.Command(binary, "render", "-f", "../../config/samples/"+sample+".yaml", "--call", call, "-o", "json")
	if name := map[string]string{"slack_dead_letters": "slack-dead-letters", "batch": "cloudevents-batched"}[sample]; name != "" {
		render.Args = append(render.Args, "--destination", name)
	}
	render.Stderr = &errs
	requests, err := render.Output()
	if err != nil {
		t.Fatalf("render: got error %v and %s", err, errs.String())
	}
	return string(requests)
}

// validate returns why requests are not valid, with an error.
func validate(vendor, requests string) (why string, err error) {
	cmd := exec.Command("node", "node/samples.js")
	cmd.Env = append(os.Environ(), "VENDOR="+vendor, "SECRET=demo-shared-secret")
	cmd.Stdin = strings.NewReader(requests)
	out, err := cmd.CombinedOutput()
	return string(out), err
}
