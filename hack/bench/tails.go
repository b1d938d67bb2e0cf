package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

var backlog = flag.Int("backlog", 1_000_000, "messages of 1 KB of another namespace in the row of tails")

const (
	// tailsPerSecond is the rate of single calls whose latencies are measured.
	tailsPerSecond = 200
	// tailsClients suffice for each client to get its response before its next call is due, even after a stall.
	tailsClients = 100
	// stallSyncs is the environment variable that makes the syncs of a dispatcher stall.
	stallSyncs = "POSTHORN_BENCH_STALL_SYNCS"
	stallEvery = 5 * time.Second
	stallFor   = 200 * time.Millisecond
)

// measureTails measures the latencies of a slow sender while syncs stall, and while the backlog of another namespace is
// delivered and compacted.
func measureTails(ctx context.Context, b *bench) ([]row, error) {
	stalled, err := b.stalledTails(ctx)
	if err != nil {
		return nil, err
	}
	beside, err := b.tailsBesideBacklog(ctx)
	return append(stalled, beside...), err
}

func (b *bench) stalledTails(ctx context.Context) ([]row, error) {
	if err := os.Setenv(stallSyncs, "1"); err != nil {
		return nil, err
	}
	defer os.Unsetenv(stallSyncs)
	dir := b.dir(fmt.Sprint("stalled-", time.Now().UnixNano()))
	defer os.RemoveAll(dir)
	receiver, err := newAgeSink()
	if err != nil {
		return nil, err
	}
	defer receiver.Close()
	p, err := b.start(ctx, destinations(1, receiver.addr), dir)
	if err != nil {
		return nil, err
	}
	defer p.stop()
	if err := sendTails(p, closedAfter(b.window())); err != nil {
		return nil, err
	}
	return receiver.rows("a sync of 200 ms each 5 s", []tailGoal{{"p95", 0.95, 25}, {"p99", 0.99, 180}, {"p99.9", 0.999, 250}}), nil
}

// tailsBesideBacklog fills a namespace whose destination is suspended, resumes it, and measures another one until all is delivered.
func (b *bench) tailsBesideBacklog(ctx context.Context) ([]row, error) {
	dir := b.dir(fmt.Sprint("backlog-", time.Now().UnixNano()))
	defer os.RemoveAll(dir)
	receiver, err := newAgeSink()
	if err != nil {
		return nil, err
	}
	defer receiver.Close()
	start := func(suspended bool) (*dispatcherProcess, error) {
		list := destinations(2, b.sink.Addr)
		list[0].addr, list[1].source, list[1].suspended = receiver.addr, 1, suspended
		if err := writeNamespaces(dir, config(list)); err != nil {
			return nil, err
		}
		return b.startFiles(ctx, dir, ".config-*", "", "")
	}
	p, err := start(true)
	if err != nil {
		return nil, err
	}
	_, err = b.fillSource(p, 1, *backlog)
	p.stop()
	if err != nil {
		return nil, err
	}
	if p, err = start(false); err != nil {
		return nil, err
	}
	defer p.stop()
	begin, delivered := time.Now(), make(chan struct{})
	go func() {
		defer close(delivered)
		for left := int64(*backlog); left > 0 && ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
			stats, err := b.sink.take()
			if err != nil {
				return
			}
			left -= stats.Count
		}
	}()
	if err := sendTails(p, delivered); err != nil {
		return nil, err
	}
	took := time.Since(begin).Seconds()
	rows := receiver.rows(fmt.Sprintf("%d messages of another namespace", *backlog), []tailGoal{{"p99", 0.99, 25}, {"p99.9", 0.999, 250}})
	return append(rows, row{Name: "  deliveries of the other namespace", Met: true, Number: took,
		Value: fmt.Sprintf("%.0f/s", float64(*backlog)/took)}), nil
}

// sendTails sends tailsPerSecond single calls a second until ended is closed, and does not wait for slow ones.
func sendTails(p *dispatcherProcess, ended <-chan struct{}) error {
	var id atomic.Int64
	return paced(p, tailsClients, tailsClients*time.Second/tailsPerSecond, ended, func(s *sender) error {
		return s.send(0, 1, plainID, &id)
	})
}

// ageSink is a receiver in this process that keeps the age of each message.
type ageSink struct {
	http.Server
	addr string
	mu   sync.Mutex
	ages []time.Duration
}

func newAgeSink() (*ageSink, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &ageSink{addr: l.Addr().String()}
	s.Handler = http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		d := age(body)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ages = append(s.ages, d)
	})
	go func() { _ = s.Serve(l) }()
	return s, nil
}

// tailGoal is a goal in milliseconds for a quantile.
type tailGoal struct {
	name     string
	quantile float64
	goal     float64
}

func (s *ageSink) rows(during string, goals []tailGoal) (rows []row) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.Sort(s.ages)
	for _, g := range goals {
		ms := math.Inf(1) // A backlog that ended before the first message proves nothing.
		if len(s.ages) > 0 {
			ms = quantile(s.ages, g.quantile).Seconds() * 1000
		}
		rows = append(rows, below(fmt.Sprintf("%s at %d/s during %s", g.name, tailsPerSecond, during), ms, g.goal,
			fmt.Sprintf("%.1f ms of %d", ms, len(s.ages)), fmt.Sprintf("< %.0f ms", g.goal)))
	}
	return rows
}

// stallingFS is the operating system's file system; its syncs stall as a disk does that is busy with the writeback of others.
type stallingFS struct{ vfs.FS }

func (f stallingFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	file, err := f.FS.Create(name, category)
	return stallingFile{file}, err
}

func (f stallingFS) ReuseForWrite(from, to string, category vfs.DiskWriteCategory) (vfs.File, error) {
	file, err := f.FS.ReuseForWrite(from, to, category)
	return stallingFile{file}, err
}

type stallingFile struct{ vfs.File }

func (f stallingFile) Sync() error {
	stall()
	return f.File.Sync()
}

func (f stallingFile) SyncData() error {
	stall()
	return f.File.SyncData()
}

// stall waits until the end of the present stall, if there is one.
func stall() {
	time.Sleep(stallFor - time.Duration(time.Now().UnixNano())%stallEvery)
}
