// Package process builds the posthorn binary and runs it in processes, for tests and
// tools. Its main type is Posthorn.
package process

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/wait"
)

const module = "github.com/posthorn/posthorn"

// Build builds posthorn into a directory and returns the binary's path.
func Build(dir string) (string, error) {
	// The directory also differs in other modules that use this one, such as benchmarks.
	root, err := moduleDir(module)
	if err != nil {
		return "", err
	}
	binary := filepath.Join(dir, "posthorn")
	return binary, Compile(root, "./cmd/posthorn", binary)
}

// Compile builds a main package of the module in a directory. It uses the flags of
// the Makefile, so that it reuses the packages that `make build` compiled, and further ones.
func Compile(dir, pkg, binary string, flags ...string) error {
	binary, err := filepath.Abs(binary)
	if err != nil {
		return err
	}
	args := append([]string{"build", "-C", dir, "-trimpath", "-ldflags", "-s -w", "-o", binary}, flags...)
	cmd := exec.Command("go", append(args, pkg)...)
	// The module's flags, not the flags of the caller, which can be in another one.
	workspace, err := filepath.Abs(filepath.Join(dir, "go.work"))
	if err != nil {
		return err
	}
	if _, err := os.Stat(workspace); err != nil {
		workspace = "off"
	}
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK="+workspace)
	_, err = run(cmd)
	return err
}

// Main implements TestMain: it builds posthorn, runs the tests, and removes the binary.
func Main(m interface{ Run() int }, binary *string) {
	dir, err := os.MkdirTemp("", "posthorn-test-")
	if err == nil {
		*binary, err = Build(dir)
	}
	code := 1
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

func run(cmd *exec.Cmd) (string, error) {
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, out)
	}
	return string(out), nil
}

// given are the ports that FreeAddr has returned.
var given sync.Map

// FreeAddr returns an unused address of the loopback interface, another one in each call. Its port is outside of
// the kernel's range for automatic ports, so it remains free until it is used.
func FreeAddr() string {
	for {
		port := 10000 + rand.IntN(20000)
		if _, before := given.LoadOrStore(port, true); before {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			panic(err)
		}
		defer l.Close()
		return l.Addr().String()
	}
}

// Posthorn is a process of the binary.
type Posthorn struct {
	Binary string
	Args   []string
	// Env is added to the environment.
	Env []string
	// Addr is the address for calls. Start polls /readyz there; if Addr is empty, it does not
	// wait.
	Addr string
	// Admin is the admin address. Start does not use it.
	Admin string
	// Log gets the output; nil discards it.
	Log io.Writer

	cmd    *exec.Cmd
	exited chan struct{}
}

// AdminAPI returns a client of the process's admin API.
func (p *Posthorn) AdminAPI() *adminapi.Client { return &adminapi.Client{URL: "http://" + p.Admin} }

// Run returns a process for `posthorn run` with a manifest directory and a data directory, at
// free addresses of the loopback interface, to which it may also send. It is not started.
func Run(binary, manifests, data string, flags ...string) *Posthorn {
	p := &Posthorn{Binary: binary, Addr: FreeAddr(), Admin: FreeAddr()}
	p.Args = append([]string{"run", "-f", manifests, "--data", data,
		"--listen", p.Addr, "--admin-listen", p.Admin, "--egress-allow", "127.0.0.0/8"}, flags...)
	return p
}

// Start starts the process and waits until it is ready. It can start a stopped process
// again. After an error no process runs.
func (p *Posthorn) Start() error {
	cmd, exited := exec.Command(p.Binary, p.Args...), make(chan struct{})
	cmd.Stdout, cmd.Stderr, cmd.Env = p.Log, p.Log, append(os.Environ(), p.Env...)
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmd, p.exited = cmd, exited
	go func() { _ = cmd.Wait(); close(exited) }()
	if p.Addr == "" {
		return nil
	}
	err := wait.Until(func() error {
		select {
		case <-exited:
			return wait.Stop(errors.New("the process ended"))
		default:
		}
		client := http.Client{Timeout: 20 * time.Second}
		resp, err := client.Get("http://" + p.Addr + "/readyz") //nolint:noctx // a local poll
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if body, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", resp.Status, body)
		}
		return nil
	})
	if err != nil {
		return errors.Join(fmt.Errorf("posthorn is not ready: %w", err), p.Stop(os.Kill))
	}
	return nil
}

// Stop sends a signal and waits for the end of the process, if it has not ended before.
func (p *Posthorn) Stop(signal os.Signal) error {
	if p.cmd == nil {
		return nil
	}
	_ = p.cmd.Process.Signal(signal)
	select {
	case <-p.exited:
		return nil
	case <-time.After(wait.Limit):
		_ = p.cmd.Process.Kill()
		return fmt.Errorf("posthorn did not stop within %v of %v", wait.Limit, signal)
	}
}

// Exited is closed when the process of the last Start has ended.
func (p *Posthorn) Exited() <-chan struct{} { return p.exited }

// Pid is the id of the process of the last Start.
func (p *Posthorn) Pid() int { return p.cmd.Process.Pid }

// Replace replaces a file atomically, as editors and kubelets do.
func Replace(path, text string) error {
	dir, name := filepath.Split(path)
	next := filepath.Join(dir, "."+name+".tmp")
	return errors.Join(os.WriteFile(next, []byte(text), 0o600), os.Rename(next, path))
}

// Log collects the output of several goroutines.
type Log struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Tail returns the last 8,000 bytes, for a failed test.
func (l *Log) Tail() string {
	text := l.String()
	return text[max(0, len(text)-8000):]
}
