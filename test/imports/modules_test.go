package imports

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"

	"github.com/posthorn/posthorn/test/check"
)

const (
	client  = root + "analytics"
	version = "v0.9.9" // No release has this version.
)

// TestApplication publishes the Go client on a module proxy, as a release does, and builds and
// tests an application that requires it. Each module in the build list of an application takes part
// in the selection of its versions.
func TestApplication(t *testing.T) {
	app := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module app.test\n\ngo 1.24\n",
		"main.go": `package main

import "github.com/posthorn/posthorn/analytics"

func run(client *analytics.Client) error {
	defer client.Close()
	return client.Track(&analytics.Track{UserId: "u1", Event: "Order Completed"})
}

func main() {
	if err := run(analytics.New("write key")); err != nil {
		panic(err)
	}
}
`,
		"main_test.go": `package main

import (
	"testing"

	"github.com/posthorn/posthorn/analytics/analyticstest"
)

func TestRun(t *testing.T) {
	sink := analyticstest.New()
	if err := run(sink.Client()); err != nil || len(sink.Calls()) != 1 {
		t.Fatalf("calls: got %d and error %v, want 1", len(sink.Calls()), err)
	}
}
`,
	} {
		check.NoError(t, "write "+name, os.WriteFile(filepath.Join(app, name), []byte(text), 0o600))
	}
	settings := []string{"GOWORK=off", "GOFLAGS=-trimpath -modcacherw", "GOPROXY=file://" + publish(t), "GOSUMDB=off",
		"GOMODCACHE=" + t.TempDir(), "CGO_ENABLED=0"}
	for _, args := range [][]string{
		{"get", client + "@" + version}, {"mod", "tidy"}, {"build", "-o", os.DevNull, "."}, {"test", "."},
	} {
		run(t, app, settings, args...)
	}
	check.Same(t, "build list", lines(run(t, app, settings, "list", "-m", "all")), []string{"app.test", client + " " + version})
}

// publish writes a module proxy with the Go client, and returns its directory.
func publish(t *testing.T) string {
	t.Helper()
	dir := filepath.Join("..", "..", "analytics")
	proxy := t.TempDir()
	versions := filepath.Join(proxy, filepath.FromSlash(client), "@v")
	check.NoError(t, "create the proxy", os.MkdirAll(versions, 0o700))
	mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	check.NoError(t, "read go.mod", err)
	for suffix, data := range map[string]string{".mod": string(mod), ".info": `{"Version":"` + version + `"}`} {
		check.NoError(t, "write "+suffix, os.WriteFile(filepath.Join(versions, version+suffix), []byte(data), 0o600))
	}
	file, err := os.Create(filepath.Join(versions, version+".zip"))
	check.NoError(t, "create the zip file", err)
	check.NoError(t, "write the zip file", zip.CreateFromDir(file, module.Version{Path: client, Version: version}, dir))
	check.NoError(t, "close the zip file", file.Close())
	return proxy
}

// TestWorkspace compares the versions of the binary's modules in the workspace, in which tests and
// images are built, with those that go.mod selects alone. A workspace reads the go.mod files of more
// modules, so it can select other versions.
func TestWorkspace(t *testing.T) {
	list := func(workspace string) []string {
		modules := lines(run(t, ".", []string{"GOWORK=" + workspace}, "list", "-deps", "-f",
			"{{with .Module}}{{if not .Main}}{{if not .Replace}}{{.}}{{end}}{{end}}{{end}}", root+"cmd/posthorn"))
		slices.Sort(modules)
		return slices.Compact(modules)
	}
	check.Same(t, "modules in the workspace", list(""), list("off"))
}

// run returns the output of the go command.
func run(t *testing.T, dir string, settings []string, args ...string) string {
	t.Helper()
	var stderr strings.Builder
	cmd := exec.Command("go", args...)
	cmd.Dir, cmd.Env, cmd.Stderr = dir, append(os.Environ(), settings...), &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go %s: got error %v, want none\n%s%s", strings.Join(args, " "), err, out, stderr.String())
	}
	return string(out)
}

func lines(text string) []string { return strings.Split(strings.TrimSpace(text), "\n") }
