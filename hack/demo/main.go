// Command demo shows Posthorn's main use on one machine: `make run`. It builds
// the binary, starts a receiver and Posthorn with the manifests of this directory,
// sends calls with the Go client, simulates the failure and recovery of an endpoint, and
// removes all files and processes.
package main

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/posthorn/posthorn/analytics"
	"github.com/posthorn/posthorn/test/process"
)

//go:embed manifests/*.yaml
var manifests embed.FS

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "posthorn-demo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	step("Building posthorn (about three minutes on the first run)")
	d := &demo{}
	if d.bin, err = process.Build(dir); err != nil {
		return err
	}
	defer d.stop()

	crm, warehouse := process.FreeAddr(), process.FreeAddr()
	manifestDir := filepath.Join(dir, "manifests")
	if err := writeManifests(manifestDir, strings.NewReplacer("127.0.0.1:9000", crm, "127.0.0.1:9001", warehouse)); err != nil {
		return err
	}

	step("Starting a receiver for crm, and Posthorn on hack/demo/manifests (a Source, two WebhookDestinations, two Secrets)")
	var authentic atomic.Int64
	if err := d.sink("crm      |", crm, &authentic); err != nil {
		return err
	}
	p := process.Run(d.bin, manifestDir, filepath.Join(dir, "data"), "--log-level", "warn")
	if err := d.start(p, &lines{name: "posthorn |"}); err != nil {
		return err
	}

	step("Sending one call of every type with the Go client")
	client := analytics.New("demo-write-key", analytics.WithEndpoint("http://"+p.Addr))
	for _, call := range []func() error{
		func() error {
			return client.Identify(&analytics.Identify{UserId: "u1", Traits: map[string]any{"email": "ada@example.com", "plan": "pro"}})
		},
		func() error {
			return client.Track(&analytics.Track{UserId: "u1", Event: "Order Completed", Properties: map[string]any{"total": 99.5}})
		},
		func() error {
			return client.Page(&analytics.Page{UserId: "u1", Name: "Pricing", Traits: map[string]any{"url": "https://shop.example/pricing"}})
		},
		func() error { return client.Screen(&analytics.Screen{UserId: "u1", Name: "Cart"}) },
		func() error {
			return client.Group(&analytics.Group{UserId: "u1", GroupId: "acme", Traits: map[string]any{"employees": 42}})
		},
		func() error { return client.Alias(&analytics.Alias{UserId: "u1", PreviousId: "anonymous-7"}) },
	} {
		if err := call(); err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
	if err := client.Close(); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	if err := until(ctx, "6 signed messages at crm", func() bool { return authentic.Load() >= 6 }); err != nil {
		return err
	}
	say("All 6 calls were delivered, and every X-Signature is the HMAC-SHA1 of its body.")

	step("The other destination, warehouse, has no receiver: its order is kept, and its status shows the reason")
	if err := until(ctx, "the failure in status", func() bool {
		return strings.Contains(d.get(ctx, p.Admin, "destinations", "-o", "yaml"), "ConnectionRefused")
	}); err != nil {
		return err
	}
	fmt.Println(d.get(ctx, p.Admin, "destinations", "-o", "wide"))

	step("Starting its receiver")
	var recovered atomic.Int64
	if err := d.sink("warehouse|", warehouse, &recovered); err != nil {
		return err
	}
	if err := until(ctx, "the kept order at warehouse", func() bool { return recovered.Load() >= 1 }); err != nil {
		return err
	}
	if err := until(ctx, "the recovery in status", func() bool {
		return !strings.Contains(d.get(ctx, p.Admin, "destinations"), "False")
	}); err != nil {
		return err
	}
	say("The pending order was delivered. Status:")
	fmt.Println(d.get(ctx, p.Admin, "sources"))
	fmt.Println(d.get(ctx, p.Admin, "destinations"))

	d.stop()
	step("Done; all processes are stopped and all files removed. Try it yourself:")
	fmt.Print(`  make build
  bin/posthorn sink --secret-value demo-shared-secret &
  bin/posthorn run -f hack/demo/manifests --egress-allow 127.0.0.0/8 &
  bin/posthorn send track --write-key demo-write-key --user-id u1 --event "Order Completed" -p total=99.5
  bin/posthorn get destinations -o wide
  bin/posthorn --help

In a cluster: see README.md. All fields: docs/webhookdestination.md.
`)
	return nil
}

type demo struct {
	bin     string
	running []*process.Posthorn
}

// start runs the binary until stop, and prints its output.
func (d *demo) start(p *process.Posthorn, out *lines) error {
	p.Log = out
	d.running = append(d.running, p)
	return p.Start()
}

// sink starts a receiver; authentic counts the valid signatures.
func (d *demo) sink(name, addr string, authentic *atomic.Int64) error {
	return d.start(&process.Posthorn{Binary: d.bin, Args: []string{"sink", "--listen", addr, "--secret-value", "demo-shared-secret"}},
		&lines{name: name, authentic: authentic})
}

func (d *demo) stop() {
	for _, p := range d.running {
		_ = p.Stop(syscall.SIGTERM)
	}
}

func (d *demo) get(ctx context.Context, admin string, args ...string) string {
	out, err := exec.CommandContext(ctx, d.bin, append([]string{"get", "--admin", admin}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("posthorn get: %v: %s", err, out)
	}
	return string(out)
}

func writeManifests(manifestDir string, addresses *strings.Replacer) error {
	if err := os.Mkdir(manifestDir, 0o700); err != nil {
		return err
	}
	files, err := manifests.ReadDir("manifests")
	if err != nil {
		return err
	}
	for _, f := range files {
		text, err := manifests.ReadFile("manifests/" + f.Name())
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(manifestDir, f.Name()), []byte(addresses.Replace(string(text))), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// lines prints the output of a process, line by line.
type lines struct {
	name      string
	authentic *atomic.Int64
	rest      string
}

func (l *lines) Write(p []byte) (int, error) {
	l.rest += string(p)
	for {
		line, rest, ok := strings.Cut(l.rest, "\n")
		if !ok {
			return len(p), nil
		}
		l.rest = rest
		fmt.Printf("  %s %s\n", l.name, line)
		if l.authentic != nil && strings.Contains(line, "signature ok") && strings.Contains(line, "200") {
			l.authentic.Add(1)
		}
	}
}

var steps int

func step(text string) {
	steps++
	fmt.Printf("\n%d. %s\n", steps, text)
}

func say(text string) { fmt.Println("  " + text) }

func until(ctx context.Context, event string, ok func() bool) error {
	deadline := time.Now().Add(60 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			return fmt.Errorf("no event within a minute: %s", event)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
