package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/test/process"
)

// slopeSizes are the numbers of destinations of a fit.
var slopeSizes = []int{1_000, 10_000, 50_000}

const (
	// slopeNamespace is the number of destinations of a namespace, all of one Source.
	slopeNamespace = 200
	// slopeRest is how long a process is idle before its memory is read: it returns memory after 10 s.
	slopeRest = 20 * time.Second
	// slopeMemory is the limit of the memory: the default is too small for the most destinations.
	slopeMemory = 2 * memory.Default
)

// measureSlopes measures the memory of a further destination.
func measureSlopes(ctx context.Context, b *bench) ([]row, error) {
	b = &bench{root: b.root, sink: b.sink, memory: slopeMemory}
	var rows []row
	for _, kind := range []struct {
		name   string
		goal   float64 // KB; 0 for none
		memory func(context.Context, *bench, int) (int64, error)
	}{{"a dispatcher", 8, idleDispatcher}, {"posthorn run", 0, idleRun}} {
		var bytes []int64
		for _, n := range slopeSizes {
			rss, err := kind.memory(ctx, b, n)
			if err != nil {
				return nil, fmt.Errorf("%s with %d destinations: %w", kind.name, n, err)
			}
			bytes = append(bytes, rss)
		}
		kb := slope(slopeSizes, bytes) / 1000
		r := row{Name: "memory of a further destination in " + kind.name, Met: kb <= kind.goal || kind.goal == 0, Number: kb,
			Value: fmt.Sprintf("%.1f KB (%d, %d, %d MB)", kb, bytes[0]/1e6, bytes[1]/1e6, bytes[2]/1e6)}
		if kind.goal > 0 {
			r.Goal = fmt.Sprintf("<= %.0f KB", kind.goal)
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// slope returns the slope of the line of least squares.
func slope(x []int, y []int64) float64 {
	var sx, sy, sxx, sxy float64
	for i := range x {
		px, py := float64(x[i]), float64(y[i])
		sx, sy, sxx, sxy = sx+px, sy+py, sxx+px*px, sxy+px*py
	}
	n := float64(len(x))
	return (n*sxy - sx*sy) / (n*sxx - sx*sx)
}

// idleDispatcher returns the resident memory of a dispatcher that has delivered a message to each of n
// destinations and is idle.
func idleDispatcher(ctx context.Context, b *bench, n int) (int64, error) {
	dir := b.dir(fmt.Sprint("slope-", n))
	defer os.RemoveAll(dir)
	list := destinations(n, b.sink.Addr)
	for i := range list {
		list[i].source = i / slopeNamespace
	}
	if err := writeNamespaces(dir, config(list)); err != nil {
		return 0, err
	}
	p, err := b.startFiles(ctx, dir, ".config-*", "", "")
	if err != nil {
		return 0, err
	}
	defer p.stop()
	_, _ = b.sink.take()
	s := newSender(p)
	defer s.close()
	t := &traffic{}
	for source := range n / slopeNamespace {
		if err := s.send(source, 1, plainID, &t.id); err != nil {
			return 0, err
		}
	}
	for delivered := int64(0); delivered < int64(n); time.Sleep(20 * time.Millisecond) {
		stats, err := b.sink.take()
		if err != nil {
			return 0, err
		}
		delivered += stats.Count
	}
	time.Sleep(slopeRest)
	return p.rss(), nil
}

// writeNamespaces writes a config for each Source of c, with its destinations, to a file of its own.
func writeNamespaces(dir string, c liveconfig.Config) error {
	for i, source := range c.Sources {
		part := c
		part.Namespace, part.Sources = fmt.Sprintf("bench-%d", i), c.Sources[i:i+1]
		part.Destinations = nil
		for _, d := range c.Destinations {
			if d.Sources[0] == source.Name {
				part.Destinations = append(part.Destinations, d)
			}
		}
		data, _, err := liveconfig.Encode(part)
		if err != nil {
			return err
		}
		if err := os.WriteFile(fmt.Sprintf("%s.config-%d", dir, i), data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// idleRun returns the resident memory of `posthorn run` with n destinations that is idle.
func idleRun(_ context.Context, b *bench, n int) (int64, error) {
	dir := b.dir(fmt.Sprint("slope-run-", n))
	data, manifests := filepath.Join(dir, "data"), filepath.Join(dir, "manifests")
	defer os.RemoveAll(dir)
	if err := os.MkdirAll(manifests, 0o700); err != nil {
		return 0, err
	}
	header, each, _ := strings.Cut(burstManifests, "---\napiVersion: posthorn.dev/v1beta1\nkind: WebhookDestination\n")
	for i := range n / slopeNamespace {
		text := header
		for d := range slopeNamespace {
			text += "---\napiVersion: posthorn.dev/v1beta1\nkind: WebhookDestination\n" +
				strings.Replace(fmt.Sprintf(each, b.sink.Addr), "d0000", fmt.Sprintf("d%04d", d), 1)
		}
		text = strings.ReplaceAll(text, "namespace: bench", fmt.Sprintf("namespace: bench-%d", i))
		text = strings.ReplaceAll(text, "key-0", fmt.Sprintf("key-%d", i))
		if err := os.WriteFile(filepath.Join(manifests, fmt.Sprintf("%d.yaml", i)), []byte(text), 0o600); err != nil {
			return 0, err
		}
	}
	bin, err := b.posthorn()
	if err != nil {
		return 0, err
	}
	p := process.Run(bin, manifests, data, "--memory", fmt.Sprint(slopeMemory))
	log := &process.Log{}
	p.Log = log
	if err := p.Start(); err != nil {
		return 0, fmt.Errorf("%w\n%s", err, log.Tail())
	}
	defer func() { _ = p.Stop(syscall.SIGTERM) }()
	time.Sleep(slopeRest)
	now, _ := process.Memory(p.Pid())
	return now, nil
}
