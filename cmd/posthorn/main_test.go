package main

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

// An address in use is named in the error, with the fix.
func TestInUse(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	dir := t.TempDir()
	for _, args := range [][]string{
		{"sink", "--listen", taken.Addr().String()},
		{"run", "-f", dir, "--data", t.TempDir(), "--listen", taken.Addr().String()},
		{"run", "-f", dir, "--data", t.TempDir(), "--listen", "127.0.0.1:0", "--admin-listen", taken.Addr().String()},
	} {
		var out bytes.Buffer
		code := Main(args, strings.NewReader(""), &out, &out)
		if code != command.ExitFailure || !strings.Contains(out.String(), taken.Addr().String()) ||
			!strings.Contains(out.String(), "Stop it, or set another address: 'posthorn "+args[0]+" --help'") {
			t.Errorf("%v: exit code %d:\n%s", args, code, out.String())
		}
	}
}

// Mistakes on the command line are refused before any connection is opened, and the error names the fix.
func TestRefusedFlags(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "")
	for _, c := range []struct{ line, want string }{
		{"runn", `unknown command "runn"; did you mean run?`},
		{"run --filenam .", "unknown flag: --filenam; did you mean --filename?"},
		{"run -x", "unknown shorthand flag: 'x' in -x"},
		{"compile .", `unexpected argument "."`},
		{"compile", "set -f DIR or -f FILE"},
		{"dispatcher", "set --system-namespace or POD_NAMESPACE"},
		{"operator", "set --system-namespace or POD_NAMESPACE"},
		{"dispatcher --system-namespace x --trusted-proxies 10.0.0.0/8,nonsense", `--trusted-proxies: "nonsense" is neither a network (10.0.0.0/8, fd00::/8) nor an address`},
		{"run -f . --egress-allow https://hooks.example", "--egress-allow: egress entry"},
		{"run -f . --drain-timeout 10", `--drain-timeout "10": use a duration like 90s, 10m or 2h`},
		{"run -f . --drain-timeout -1s", "--drain-timeout -1s: use 0 to 1h0m0s"},
		{"run -f . --duplicate-window 48h", "--duplicate-window 48h0m0s: use 0 to 24h0m0s"},
		{"run -f . --source-quota -1", "auto for shares of the namespaces, or none"},
		{"run -f . --source-quota 5Gi", `--source-quota "5Gi": use a whole number of bytes`},
		{"run -f . --debug=maybe", `--debug "maybe": use true or false`},
		{"run -f . --listen 8080", `--listen "8080": use HOST:PORT or :PORT`},
		{"run -f . --log-level loud", "use debug, info, warn or error"},
		{"run", "set -f DIR"},
		{"run -f . --secret default/crm/secret=hunter2", "--secret: use NAMESPACE/NAME/KEY=file:PATH or NAMESPACE/NAME/KEY=env:NAME"},
		{"compile -f . --secret default/crm/secret=env:POSTHORN_UNSET", "the environment variable POSTHORN_UNSET is not set"},
		{"run -f nowhere", `-f "nowhere" is not a folder`},
		{"dispatcher --system-namespace x --admin-auth basic --kubeconfig KUBECONFIG", "use kubernetes or none"},
		{"operator --system-namespace x --dispatcher-selector a=b=c", `--dispatcher-selector "a=b=c"`},
		{"operator --system-namespace x --dispatcher-admin-port 0", "use 1 to 65535"},
	} {
		t.Run(c.line, func(t *testing.T) {
			kubeconfig := filepath.Join(t.TempDir(), "config")
			text := "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]}"
			if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			code := Main(strings.Fields(strings.ReplaceAll(c.line, "KUBECONFIG", kubeconfig)), nil, &out, &out)
			if code != command.ExitUsage || !strings.Contains(out.String(), c.want) || !strings.Contains(out.String(), "--help'") {
				t.Errorf("exit %d, want %q in:\n%s", code, c.want, out.String())
			}
		})
	}
}

// The program is the plugin under the name by which kubectl finds it.
func TestPluginName(t *testing.T) {
	args := os.Args
	t.Cleanup(func() { os.Args = args })
	os.Args = []string{"/usr/local/bin/kubectl-posthorn"}
	var out bytes.Buffer
	if code := Main([]string{"why", "--help"}, nil, &out, &out); code != command.ExitOK {
		t.Errorf("exit code: got %d, want 0; output:\n%s", code, out.String())
	}
	for _, want := range []string{"kubectl posthorn why [DESTINATION|KIND|KIND/NAME] [flags]", "kubectl posthorn why crm -n shop"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("help: got\n%s\nwant a text with %q", out.String(), want)
		}
	}
}
