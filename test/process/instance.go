package process

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/test/wait"
)

// Instance is a `posthorn run` of a test, with a folder of manifests and a data directory.
type Instance struct {
	*Posthorn
	T               *testing.T
	Manifests, Data string
	Output          Log
}

// NewInstance writes manifests (file name -> text) to a folder of the test, and returns a process for them and
// a data directory. It is not started.
func NewInstance(t *testing.T, binary, data string, manifests map[string]string, flags ...string) *Instance {
	t.Helper()
	p := &Instance{T: t, Manifests: t.TempDir(), Data: data}
	p.Posthorn = Run(binary, p.Manifests, data, flags...)
	p.Log = &p.Output
	for name, text := range manifests {
		p.Write(name, text)
	}
	return p
}

// Launch starts the process. The test fails if it is not ready.
func (p *Instance) Launch() {
	p.T.Helper()
	if err := p.Start(); err != nil {
		p.T.Fatalf("start: got error %v, want none; the log:\n%s", err, p.Output.Tail())
	}
}

// End ends the process with a signal, and waits for its end.
func (p *Instance) End(signal os.Signal) {
	p.T.Helper()
	if err := p.Stop(signal); err != nil {
		p.T.Error(err)
	}
}

// Leave ends the process with the test, also a stopped one, and prints its log if the test has failed.
func (p *Instance) Leave() {
	_ = syscall.Kill(p.Pid(), syscall.SIGCONT)
	p.End(syscall.SIGTERM)
	if p.T.Failed() {
		p.T.Logf("log of the process %s:\n%s", p.Data, p.Output.Tail())
	}
}

// Write writes a manifest.
func (p *Instance) Write(name, text string) {
	p.T.Helper()
	if err := Replace(filepath.Join(p.Manifests, name), text); err != nil {
		p.T.Fatal(err)
	}
}

// Remove removes a manifest.
func (p *Instance) Remove(name string) {
	p.T.Helper()
	if err := os.Remove(filepath.Join(p.Manifests, name)); err != nil {
		p.T.Fatal(err)
	}
}

// Post sends a call and returns the status and the answer.
func (p *Instance) Post(path, writeKey, body string) (status int, answer string, err error) {
	req, err := http.NewRequest(http.MethodPost, "http://"+p.Addr+path, strings.NewReader(body)) //nolint:noctx // a test
	if err != nil {
		return 0, "", err
	}
	req.SetBasicAuth(writeKey, "")
	req.Header.Set("Content-Type", "application/json")
	client := http.Client{Timeout: wait.Limit}
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}
