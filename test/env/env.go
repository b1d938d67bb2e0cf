// Package env starts a kube-apiserver and etcd with Posthorn's kinds, for tests.
package env

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/posthorn/posthorn/test/need"
	"github.com/posthorn/posthorn/test/wait"
)

// Env is a running API server.
type Env struct {
	// Config is the client config of an administrator.
	Config *rest.Config

	env        *envtest.Environment
	assets     string
	kubeconfig string
}

// Start starts an API server with the kinds of the experimental channel; configure may change its
// settings. A start takes seconds, so start one per test binary (TestMain, BeforeSuite) and
// Stop it at the end.
func Start(configure ...func(*envtest.Environment)) (*Env, error) {
	root, err := Root()
	if err != nil {
		return nil, err
	}
	assets, err := findAssets()
	if err != nil {
		return nil, err
	}
	e := &Env{assets: assets, env: &envtest.Environment{
		BinaryAssetsDirectory:    assets,
		CRDDirectoryPaths:        []string{filepath.Join(root, "config", "crd", "experimental")},
		ErrorIfCRDPathMissing:    true,
		ControlPlaneStartTimeout: wait.Limit,
		ControlPlaneStopTimeout:  wait.Limit,
		CRDInstallOptions:        envtest.CRDInstallOptions{MaxTime: wait.Limit},
	}}
	for _, f := range configure {
		f(e.env)
	}
	if e.Config, err = e.env.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start the API server: %w", err), e.env.Stop())
	}
	// The requests of tests must not be rate-limited.
	e.Config.QPS, e.Config.Burst = -1, -1
	file, err := os.CreateTemp("", "posthorn-kubeconfig-")
	if err != nil {
		return nil, errors.Join(err, e.Stop())
	}
	e.kubeconfig = file.Name()
	_, err = file.Write(e.env.KubeConfig)
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, errors.Join(err, e.Stop())
	}
	return e, nil
}

// Missing returns an error if Start cannot find the programs of an API server.
func Missing() error {
	_, err := findAssets()
	return err
}

// Need skips a test that starts an API server, with -short and without its programs (see package
// need).
func Need(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short is set, and the test starts an API server")
	}
	if err := Missing(); err != nil {
		need.Skip(t, err)
	}
}

// For starts an API server and stops it at the end of the test. kubectl calls Kubectl and
// ends the test after an error.
func For(t testing.TB) (e *Env, kubectl func(stdin string, args ...string) string) {
	t.Helper()
	Need(t)
	e, err := Start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Stop() })
	return e, func(stdin string, args ...string) string {
		t.Helper()
		out, err := e.Kubectl(stdin, args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
}

// Release is the namespace of Install.
const Release = "posthorn-system"

// Install applies the release's namespace, accounts, permissions and dispatcher objects
// of config/.
func (e *Env) Install() error {
	root, err := Root()
	if err != nil {
		return err
	}
	namespace, err := os.ReadFile(filepath.Join(root, "config", "default", "namespace.yaml"))
	if err != nil {
		return err
	}
	manifests := []string{string(namespace)}
	for _, dir := range []string{"rbac", "dispatcher"} {
		text, err := e.Kubectl("", "kustomize", filepath.Join(root, "config", dir))
		if err != nil {
			return err
		}
		manifests = append(manifests, text)
	}
	_, err = e.Kubectl(strings.Join(manifests, "\n---\n"), "apply", "--server-side", "-f", "-")
	return err
}

// As returns the client config of a service account of the release.
func (e *Env) As(account string) *rest.Config {
	config := rest.CopyConfig(e.Config)
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + Release + ":" + account,
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:" + Release, "system:authenticated"},
	}
	return config
}

// Stop stops the API server. It does nothing on a nil Env.
func (e *Env) Stop() error {
	if e == nil {
		return nil
	}
	if e.kubeconfig != "" {
		_ = os.Remove(e.kubeconfig)
		_ = os.RemoveAll(e.kubeconfig + cache)
	}
	return e.env.Stop()
}

// Kubeconfig returns the path of an administrator's kubeconfig file.
func (e *Env) Kubeconfig() string { return e.kubeconfig }

// cache is the end of the name of kubectl's cache, which is by address: two servers can have one in turn.
const cache = ".cache"

// Kubectl runs kubectl against the API server and returns its output. The error contains
// its standard error.
func (e *Env) Kubectl(stdin string, args ...string) (string, error) {
	if len(args) > 0 && args[0] == "wait" {
		args = append(args, "--timeout="+wait.Limit.String())
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(filepath.Join(e.assets, "kubectl"),
		append([]string{"--kubeconfig", e.kubeconfig, "--cache-dir", e.kubeconfig + cache}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewBufferString(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("kubectl %v: %w: %s", args, err, stderr.String())
	}
	return stdout.String(), nil
}

// Binary returns the path of a program that is installed with the API server, such as kubectl.
func Binary(name string) (string, error) {
	assets, err := findAssets()
	return filepath.Join(assets, name), err
}

// Root returns the root directory of the repository.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "PROJECT")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("no directory above the working directory has a PROJECT file")
		}
	}
}

// findAssets returns KUBEBUILDER_ASSETS, or the output directory of hack/cluster/build, so
// that a plain `go test` works after `make test`.
func findAssets() (string, error) {
	if dir := os.Getenv("KUBEBUILDER_ASSETS"); dir != "" {
		return dir, nil
	}
	home, _ := os.UserHomeDir()
	found, _ := filepath.Glob(filepath.Join(home, ".cache", "local-cluster", "*", "bin", "kube-apiserver"))
	if len(found) == 0 {
		return "", errors.New("kube-apiserver not found: run `make test`, which finds, downloads or builds one, or set KUBEBUILDER_ASSETS to the output of hack/envtest-assets")
	}
	return filepath.Dir(found[len(found)-1]), nil
}
