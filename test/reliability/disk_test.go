package reliability

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/need"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// smallDisk mounts a file system of 100 MB.
func smallDisk(t *testing.T) string {
	t.Helper()
	dir, err := process.SmallDisk(t, 100)
	if err != nil {
		need.Skip(t, err)
	}
	return dir
}

func freeBytes(t *testing.T, dir string) int64 {
	t.Helper()
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		t.Fatal(err)
	}
	return int64(fs.Bavail) * fs.Bsize
}

// diskOptions returns options with which a fatal error of the store fails the test. One
// Source may fill the disk up to the high-water mark.
func diskOptions(t *testing.T, dir string) dispatcher.Options {
	return options(t, filepath.Join(dir, "data"), pebblestore.Options{MaxBytesPerSource: pebblestore.NoQuota, Fatal: func(err error) {
		t.Errorf("fatal error of the store: got %v, want none", err)
		select {}
	}})
}

// traffic sends batches of incompressible calls, and records the ids of those that were
// answered 200.
type traffic struct {
	t *testing.T
	// source is the name of the Source, "web" if empty.
	source string
	mu     sync.Mutex
	ok     map[string]bool
	n      int
}

// batch sends 20 calls of 8 KB.
func (s *traffic) batch(c *client, r target) (answer, error) {
	s.mu.Lock()
	var ids, calls []string
	for range 20 {
		s.n++
		ids = append(ids, fmt.Sprint("m", s.n))
	}
	s.mu.Unlock()
	for _, id := range ids {
		noise := make([]byte, 6<<10)
		_, _ = rand.Read(noise)
		calls = append(calls, call(id, `,"properties":{"noise":"`+base64.StdEncoding.EncodeToString(noise)+`"}`))
	}
	a, err := c.batch(s.t.Context(), r.Addr(), cmp.Or(s.source, "web"), calls...)
	if err != nil {
		return a, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch a.status {
	case http.StatusOK:
		if s.ok == nil {
			s.ok = map[string]bool{}
		}
		for _, id := range ids {
			s.ok[id] = true
		}
	case http.StatusServiceUnavailable:
		if a.retryAfter == "" {
			s.t.Errorf("Retry-After of a 503: got none, want one; body: %s", a.body)
		}
	default:
		s.t.Errorf("batch: got status %d, want 200 or 503; body: %s", a.status, a.body)
	}
	return a, nil
}

// flood sends calls until one is answered 503.
func (s *traffic) flood(c *client, r target) {
	s.t.Helper()
	for begin := time.Now(); ; {
		a, err := s.batch(c, r)
		if err != nil {
			s.t.Fatal(err)
		}
		if a.status == http.StatusServiceUnavailable {
			return
		}
		if time.Since(begin) > waitLimit {
			s.t.Fatalf("no call was answered 503 within %s", waitLimit)
		}
	}
}

func (s *traffic) accepted() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.ok)
}

// missing returns an error if calls that were answered 200 are not delivered.
func (s *traffic) missing(b *inbox) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for id := range s.ok {
		if b.seen[id] == 0 {
			n++
		}
	}
	if n > 0 {
		return fmt.Errorf("%d of %d calls are not delivered", n, len(s.ok))
	}
	return nil
}

func storagePressure(r target) (pod, source bool) {
	report := r.Report()
	for _, tr := range report.Namespaces {
		for _, s := range tr.Sources {
			source = source || s.StoragePressure
		}
	}
	return report.Storage.Pressure, source
}

// acceptsCalls waits until calls are accepted and the report has no storage pressure.
func acceptsCalls(t *testing.T, s *traffic, c *client, r target) {
	t.Helper()
	wait.For(t, "an accepted batch", func() error {
		a, err := s.batch(c, r)
		if err == nil && a.status != http.StatusOK {
			err = fmt.Errorf("%d %s", a.status, a.body)
		}
		if err != nil {
			time.Sleep(200 * time.Millisecond)
		}
		return err
	})
	wait.For(t, "a report without storage pressure", func() error {
		if pod, source := storagePressure(r); pod || source {
			return fmt.Errorf("pressure on the pod: %t, on the Source: %t", pod, source)
		}
		return nil
	})
}

// TestBacklogFillsTheDisk tests a long outage of a destination. Calls are rejected
// with 503 and Retry-After while the disk still has space, the report gives the reason,
// deliveries to a healthy destination continue, and calls are accepted again after the
// outage.
func TestBacklogFillsTheDisk(t *testing.T) {
	disk := smallDisk(t)
	var up atomic.Bool
	var slow, healthy inbox
	dead := receive(t, func(w http.ResponseWriter, r *http.Request) {
		if !up.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		slow.ServeHTTP(w, r)
	})
	r := start(t, diskOptions(t, disk), config([]liveconfig.Source{source("web")},
		destination("dead", "web", dead.url), destination("healthy", "web", receive(t, healthy.ServeHTTP).url)))
	s, c := &traffic{t: t}, newClient()
	defer c.close()
	for round := range 3 {
		up.Store(false)
		s.flood(c, r)
		free := freeBytes(t, disk)
		t.Logf("round %d: rejected after %d accepted calls in total, with %d MB free", round, s.accepted(), free>>20)
		if free < 4<<20 {
			t.Errorf("free bytes when calls are rejected: got %d, want at least %d", free, 4<<20)
		}
		pod, source := storagePressure(r)
		check.Equal(t, "storage pressure of the pod", pod, true)
		check.Equal(t, "storage pressure of the Source", source, true)
		wait.For(t, "all calls at the healthy destination", func() error { return s.missing(&healthy) })
		up.Store(true)
		acceptsCalls(t, s, c, r)
	}
	for name, box := range map[string]*inbox{"dead": &slow, "healthy": &healthy} {
		wait.For(t, "all accepted calls at "+name, func() error { return s.missing(box) })
		wait.For(t, "all accepted calls in the ledger of "+name, func() error {
			report := ledger(t, r, name)
			if err := balance(report); err != nil {
				t.Fatal(err)
			}
			if int(report.Delivered) != s.accepted() {
				return fmt.Errorf("%d delivered of %d", report.Delivered, s.accepted())
			}
			return nil
		})
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}

// TestNamespaceFillsItsShare tests two Sources of one namespace whose receiver is down. They leave space to a
// Source of another namespace, and the report has the share.
func TestNamespaceFillsItsShare(t *testing.T) {
	disk := smallDisk(t)
	down := receive(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	o := options(t, filepath.Join(disk, "data"), pebblestore.Options{})
	r := start(t, o, config([]liveconfig.Source{source("web"), source("ios")}, destination("dead", "web", down.url),
		destination("dead2", "ios", down.url)))
	bank := config([]liveconfig.Source{source("bank")}, destination("down", "bank", down.url))
	bank.Namespace = "bank"
	data, _, err := liveconfig.Encode(bank)
	if err != nil {
		t.Fatal(err)
	}
	r.Set("bank", liveconfig.Stored{Config: data})
	var floods sync.WaitGroup
	for _, name := range []string{"web", "ios"} {
		floods.Go(func() {
			c := newClient()
			defer c.close()
			(&traffic{t: t, source: name}).flood(c, r)
		})
	}
	floods.Wait()
	t.Logf("rejected with %d MB free", freeBytes(t, disk)>>20)
	c := newClient()
	defer c.close()
	other := &traffic{t: t, source: "bank"}
	for range 5 {
		if a, err := other.batch(c, r); err != nil || a.status != http.StatusOK {
			t.Errorf("batch of another namespace: got status %d, error %v and %s, want 200", a.status, err, a.body)
		}
	}
	pod, _ := storagePressure(r)
	check.Equal(t, "storage pressure of the pod", pod, false)
	for _, n := range r.Report().Namespaces {
		for _, s := range n.Sources {
			check.Equal(t, "storage pressure of "+s.Name, s.StoragePressure, n.Namespace != "bank")
			// The store's own files fill a part of the disk, so the last call was refused below the share.
			if n.Namespace != "bank" && (s.Share == nil || s.Share.Quota || s.Share.UsedBytes < s.Share.MaxBytes*3/4) {
				t.Errorf("share of the namespace of %s: got %+v, want one that is nearly used up", s.Name, s.Share)
			}
		}
	}
}

// TestForeignFilesFillTheDisk fills the disk with another file under load. The process neither
// ends nor loses a call, and accepts calls again when the disk has space. It can be stopped
// on the full disk, and the next process starts when the disk has space.
func TestForeignFilesFillTheDisk(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart=%t", restart), func(t *testing.T) {
			disk := smallDisk(t)
			var box inbox
			r := &child{t: t, dir: disk, url: receive(t, box.ServeHTTP).url, changing: true}
			if err := r.start(); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = r.stop() }()
			s := &traffic{t: t}
			load := func() (stop func()) {
				var stopping atomic.Bool
				var senders sync.WaitGroup
				for range 3 {
					senders.Go(func() {
						c := newClient()
						defer c.close()
						for !stopping.Load() {
							a, err := s.batch(c, r)
							if err != nil || a.status != http.StatusOK {
								time.Sleep(20 * time.Millisecond)
							}
						}
					})
				}
				return func() { stopping.Store(true); senders.Wait() }
			}
			endLoad := load()
			wait.For(t, "200 accepted calls", func() error {
				if n := s.accepted(); n < 200 {
					return fmt.Errorf("got %d", n)
				}
				return nil
			})
			free := process.Fill(t, disk)
			wait.For(t, "storage pressure in the report", func() error {
				if pod, _ := storagePressure(r); !pod {
					return fmt.Errorf("%d bytes free and no pressure", freeBytes(t, disk))
				}
				return nil
			})
			c := newClient()
			defer c.close()
			if a, err := s.batch(c, r); err != nil || a.status != http.StatusServiceUnavailable {
				t.Errorf("batch on a full disk: got status %d, body %s and error %v, want 503", a.status, a.body, err)
			}
			if restart {
				err := r.stop()
				endLoad()
				t.Logf("stopped on a full disk: %v", err)
				t.Logf("started on a full disk: %v", r.start())
				free()
				wait.For(t, "a start on a disk with space", func() error {
					if r.isRunning() {
						return nil
					}
					return r.start() // Kubernetes would restart it.
				})
			} else {
				free()
				endLoad()
			}
			acceptsCalls(t, s, c, r)
			if !restart && r.starts != 1 {
				t.Errorf("starts: got %d, want 1", r.starts)
			}
			wait.For(t, "all accepted calls", func() error { return s.missing(&box) })
			wait.For(t, "no pending messages", func() error {
				report := ledger(t, r, "crm")
				if err := balance(report); err != nil {
					t.Fatal(err)
				}
				if report.Pending > 0 {
					return fmt.Errorf("%d pending", report.Pending)
				}
				return nil
			})
			if err := r.stop(); err != nil {
				t.Error(err)
			}
			t.Logf("%d accepted, %d delivered", s.accepted(), box.distinct())
		})
	}
}

// child is a dispatcher in a separate process, for tests in which the process may end.
type child struct {
	t        *testing.T
	dir, url string
	changing bool // Its config changes continuously.
	starts   int
	cmd      *exec.Cmd
	exited   chan error

	mu    sync.Mutex
	addrs childAddrs
}

type childAddrs struct{ Calls, Admin string }

const childDir, childURL, childChanging = "POSTHORN_CHILD_DIR", "POSTHORN_CHILD_URL", "POSTHORN_CHILD_CHANGING"

// TestChild is not a test. It is the process that child starts.
func TestChild(t *testing.T) {
	dir := os.Getenv(childDir)
	if dir == "" {
		t.Skip("this is the process of other tests")
	}
	o := options(t, filepath.Join(dir, "data"), pebblestore.Options{})
	o.OrphanGrace = time.Second
	d, err := dispatcher.New(o)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	set := func(destinations ...liveconfig.Destination) {
		data, _, err := liveconfig.Encode(config([]liveconfig.Source{source("web")}, destinations...))
		if err != nil {
			panic(err)
		}
		d.Set(namespace, liveconfig.Stored{Config: data})
	}
	crm := destination("crm", "web", os.Getenv(childURL))
	set(crm)
	d.Synced()
	if os.Getenv(childChanging) != "" {
		// Every change opens a lane and drops one.
		go func() {
			for n := 0; ; n++ {
				crm.Delivery.MaxInFlight = 1 + n%16
				set(crm, destination(fmt.Sprint("other-", n), "web", os.Getenv(childURL)))
				time.Sleep(200 * time.Millisecond)
			}
		}()
	}
	ctx, stop := signal.NotifyContext(t.Context(), syscall.SIGTERM)
	defer stop()
	line, _ := json.Marshal(childAddrs{d.Addr().String(), d.AdminAddr().String()})
	fmt.Println(string(line))
	if err := d.Run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// start starts the process. It returns when the process is ready or has ended, or after
// some seconds if the process waits for space.
func (c *child) start() error {
	c.starts++
	c.cmd = exec.CommandContext(context.Background(), os.Args[0], "-test.run=^TestChild$")
	c.cmd.Env = append(os.Environ(), childDir+"="+c.dir, childURL+"="+c.url)
	if c.changing {
		c.cmd.Env = append(c.cmd.Env, childChanging+"=yes")
	}
	var stderr bytes.Buffer
	c.cmd.Stderr = &stderr
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.cmd.Start(); err != nil {
		return err
	}
	c.exited = make(chan error, 1)
	up := make(chan struct{})
	go func() {
		line, err := bufio.NewReader(out).ReadBytes('\n')
		if err == nil {
			c.mu.Lock()
			err = json.Unmarshal(line, &c.addrs)
			c.mu.Unlock()
			close(up)
		}
		if ended := c.cmd.Wait(); ended != nil {
			err = fmt.Errorf("%w: %s", ended, stderr.String())
		}
		c.exited <- err
	}()
	select {
	case <-up:
		return nil
	case err := <-c.exited:
		c.exited <- err
		return fmt.Errorf("the process ended: %w", err)
	case <-time.After(5 * time.Second):
		return nil
	}
}

func (c *child) isRunning() bool {
	select {
	case err := <-c.exited:
		c.exited <- err
		return false
	default:
		return true
	}
}

// stop sends SIGTERM to the process, and returns the error of its end.
func (c *child) stop() error {
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-c.exited:
		c.exited <- err
		return err
	case <-time.After(waitLimit):
		c.t.Errorf("the dispatcher did not stop within %s; its goroutines are in the next error", waitLimit)
		_ = c.cmd.Process.Signal(syscall.SIGQUIT)
		defer time.AfterFunc(10*time.Second, func() { _ = c.cmd.Process.Kill() }).Stop()
		err := <-c.exited
		c.exited <- err
		return err
	}
}

// Addr implements target.
func (c *child) Addr() net.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	return childAddr(c.addrs.Calls)
}

// Report implements target.
func (c *child) Report() (report adminapi.Report) {
	c.mu.Lock()
	admin := c.addrs.Admin
	c.mu.Unlock()
	client := adminapi.Client{URL: "http://" + admin}
	r, err := client.Report(context.Background(), "")
	if err != nil {
		return report
	}
	return *r
}

type childAddr string

func (childAddr) Network() string  { return "tcp" }
func (a childAddr) String() string { return string(a) }
