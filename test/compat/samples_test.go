package compat

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// The requests of config/samples are valid by the libraries, or the types, of the vendors whose receivers they are for.
func TestSamplesByVendors(t *testing.T) {
	needNode(t)
	binary, err := built.posthorn()
	if err != nil {
		t.Fatal(err)
	}
	const order = `{"type":"track","event":"Örder <Paid> & \"Sent\"","userId":"u1","messageId":"m1","properties":{"total":150.50,"orderId":"A-17","10":1}}`
	for _, test := range []struct {
		vendor, call string
		// from and to make the request invalid.
		from, to string
	}{
		{"segment", order, `"total\":150.5`, `"total\":150.50`},
	} {
		t.Run(test.vendor, func(t *testing.T) {
			var errs bytes.Buffer
			render := exec.Command(binary, "render", "-f", "../../config/samples/"+test.vendor+".yaml", "--call", test.call, "-o", "json")
			render.Stderr = &errs
			requests, err := render.Output()
			if err != nil {
				t.Fatalf("render: got error %v and %s", err, errs.String())
			}
			if out, err := validate(test.vendor, string(requests)); err != nil {
				t.Errorf("%s: got error %v and\n%s\nwant it to be valid", requests, err, out)
			}
			invalid := strings.Replace(string(requests), test.from, test.to, 1)
			if out, err := validate(test.vendor, invalid); err == nil || out == "" || invalid == string(requests) {
				t.Errorf("%s: got no error, want one", invalid)
			}
		})
	}
}

// validate returns why requests are not valid, with an error.
func validate(vendor, requests string) (why string, err error) {
	cmd := exec.Command("node", "node/samples.js")
	cmd.Env = append(os.Environ(), "VENDOR="+vendor, "SECRET=demo-shared-secret")
	cmd.Stdin = strings.NewReader(requests)
	out, err := cmd.CombinedOutput()
	return string(out), err
}
