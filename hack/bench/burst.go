package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/posthorn/posthorn/test/process"
)

// The burst has calls in batches of 20 and 200 from several concurrent senders, as fast as they are accepted.
const (
	burstCalls = 100_000
	burstRest  = time.Minute // from the last delivery to the final measurement
)

const burstManifests = `apiVersion: v1
kind: Secret
metadata: {name: secrets, namespace: bench}
stringData: {write-key: key-0, signing: bench-shared-secret}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: s0000, namespace: bench}
spec:
  writeKeys: [{name: main, secretKeyRef: {name: secrets, key: write-key}}]
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: d0000, namespace: bench}
spec:
  sourceRefs: [{name: s0000}]
  endpoints: [{name: primary, url: "http://%s/in"}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: secrets, key: signing}}]}
`

// posthorn returns the path of the posthorn binary.
func (b *bench) posthorn() (string, error) {
	if *binary != "" {
		return *binary, nil
	}
	// Releases are built without cgo: then the memory of the store belongs to the Go heap.
	_ = os.Setenv("CGO_ENABLED", "0")
	return process.Build(b.root)
}

// measureBurst runs the real binary through one burst and measures memory and
// disk before, during and one minute after it.
func measureBurst(ctx context.Context, b *bench) ([]row, error) {
	dir := b.dir("burst")
	data, manifests := filepath.Join(dir, "data"), filepath.Join(dir, "manifests")
	defer os.RemoveAll(dir)
	if err := os.MkdirAll(manifests, 0o700); err != nil {
		return nil, err
	}
	bin, err := b.posthorn()
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(manifests, "all.yaml"), fmt.Appendf(nil, burstManifests, b.sink.Addr), 0o600); err != nil {
		return nil, err
	}
	var flags []string
	if *limit != "" {
		flags = append(flags, "--memory", *limit)
	}
	p := process.Run(bin, manifests, data, flags...)
	log := &process.Log{}
	p.Log = log
	if err := p.Start(); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, log.Tail())
	}
	defer func() { _ = p.Stop(syscall.SIGTERM) }()
	time.Sleep(3 * time.Second)
	empty, err := directoryBytes(data)
	if err != nil {
		return nil, err
	}
	_, _ = b.sink.take()

	// Compare the metric with the directory's size throughout the burst.
	var off deviation
	watching, stopWatching := context.WithCancel(ctx)
	var watcher sync.WaitGroup
	watcher.Go(func() { off.watch(watching, p, data) })
	defer func() { stopWatching(); watcher.Wait() }()

	begin := time.Now()
	if err := burst(ctx, p.Addr); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, log.Tail())
	}
	accepted := time.Since(begin)
	for delivered := int64(0); delivered < burstCalls; time.Sleep(50 * time.Millisecond) {
		stats, err := b.sink.take()
		if err != nil {
			return nil, err
		}
		if delivered += stats.Count; time.Since(begin) > 2*time.Minute {
			return nil, fmt.Errorf("%d of %d calls were delivered within 2 minutes\n%s", delivered, burstCalls, log.Tail())
		}
	}
	delivered := time.Since(begin)
	largest, _ := directoryBytes(data)
	time.Sleep(burstRest - 20*time.Second)
	stopWatching() // Its requests would use CPU time.
	watcher.Wait()
	cpu, since := process.CPU(p.Pid()), time.Now()
	time.Sleep(20 * time.Second)
	share := 100 * (process.CPU(p.Pid()) - cpu).Seconds() / time.Since(since).Seconds()
	rest, peak := process.Memory(p.Pid())
	disk, err := directoryBytes(data)
	if err != nil {
		return nil, err
	}
	off.sample(p, data)
	mb := func(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }
	name := fmt.Sprintf("a burst of %d calls", burstCalls)
	return []row{
		atMost("disk of an empty store", float64(empty), 16e6, mb(empty), "<= 16 MB"),
		atMost("peak memory in "+name, float64(peak), 400e6, mb(peak), "<= 400 MB"),
		atMost("memory one minute after "+name, float64(rest), 90e6, mb(rest), "<= 90 MB"),
		atMost("disk one minute after "+name, float64(disk), 64e6, fmt.Sprintf("%s (%s at its end)", mb(disk), mb(largest)), "<= 64 MB"),
		atMost("posthorn_queue_disk_bytes, deviation from the directory's size", 100*off.largest, 10, fmt.Sprintf("%.1f %% (worst of %d)", 100*off.largest, off.samples), "<= 10 %"),
		atMost("idle CPU in that minute, of one core", share, 0.5, fmt.Sprintf("%.2f %%", share), "<= 0.5 %"),
		{Name: "  accepted, delivered", Value: fmt.Sprintf("%.1f s, %.1f s", accepted.Seconds(), delivered.Seconds()), Met: true,
			Number: delivered.Seconds()},
	}, nil
}

func atMost(name string, value, goal float64, text, goalText string) row {
	return row{Name: name, Value: text, Goal: goalText, Met: value <= goal, Number: value}
}

// burst sends burstCalls, one half in batches of 20, the other in batches of 200.
func burst(ctx context.Context, addr string) error {
	var group sync.WaitGroup
	var id atomic.Int64
	var failed atomic.Pointer[error]
	for _, l := range []load{{batch: 20, clients: 8}, {batch: 200, clients: 4}} {
		var batches atomic.Int64
		for range l.clients {
			group.Go(func() {
				s := &sender{addr: addr}
				defer s.close()
				for batches.Add(1) <= int64(burstCalls/2/l.batch) && ctx.Err() == nil && failed.Load() == nil {
					if err := s.send(0, l.batch, plainID, &id); err != nil {
						failed.Store(&err)
					}
				}
			})
		}
	}
	group.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return ctx.Err()
}

// directoryBytes returns the disk usage of a directory, as du does.
func directoryBytes(dir string) (total int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil {
			var info fs.FileInfo
			if info, err = d.Info(); err == nil {
				total += info.Sys().(*syscall.Stat_t).Blocks * 512
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // The file was removed during the walk.
		}
		return err
	})
	return total, err
}

// deviation is the largest deviation of the metric from the directory's size.
type deviation struct {
	samples int
	largest float64
}

func (d *deviation) watch(ctx context.Context, p *process.Posthorn, data string) {
	for ctx.Err() == nil {
		d.sample(p, data)
		select {
		case <-time.After(250 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func (d *deviation) sample(p *process.Posthorn, data string) {
	before, err1 := directoryBytes(data)
	metric, err2 := diskMetric(p)
	after, err3 := directoryBytes(data)
	if errors.Join(err1, err2, err3) != nil {
		return
	}
	// The directory may change between the three readings.
	low, high := float64(min(before, after)), float64(max(before, after))
	off := max(1-metric/low, metric/high-1, 0)
	d.samples, d.largest = d.samples+1, max(d.largest, off)
}

func diskMetric(p *process.Posthorn) (float64, error) {
	text, err := p.AdminAPI().Metrics(context.Background())
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut(text, "\nposthorn_queue_disk_bytes ")
	if !ok {
		return 0, errors.New("the metric posthorn_queue_disk_bytes is missing")
	}
	value, _, _ := strings.Cut(rest, "\n")
	return strconv.ParseFloat(value, 64)
}
