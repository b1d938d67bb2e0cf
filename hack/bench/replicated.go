package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/replicated/host"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/jetstream"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// logServers is the number of servers of the replicated log.
const logServers = 3

// replicatedLog is the log of the measurements: processes of the NATS server.
type replicatedLog struct {
	url, dir string
	servers  []*process.Posthorn
}

func (b *bench) startLog() (*replicatedLog, error) {
	binary, err := process.BuildNATS(b.root)
	if err != nil {
		return nil, err
	}
	l := replicatedLog{dir: b.dir("log")}
	if err := os.MkdirAll(l.dir, 0o755); err != nil {
		return nil, err
	}
	if l.servers, l.url, err = process.NATSServers(binary, l.dir, logServers); err != nil {
		return nil, err
	}
	for i, s := range l.servers {
		if err := s.Start(); err != nil {
			l.servers = l.servers[:i]
			l.stop()
			return nil, err
		}
	}
	return &l, nil
}

// stop ends the servers and deletes their files: each stream reserves its largest size.
func (l *replicatedLog) stop() {
	for _, s := range l.servers {
		_ = s.Stop(syscall.SIGTERM)
	}
	_ = os.RemoveAll(l.dir)
}

// disk returns the bytes of the servers' files.
func (l *replicatedLog) disk() (bytes int64, err error) {
	return bytes, filepath.WalkDir(l.dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return existing(err)
		}
		info, err := e.Info()
		if err == nil {
			bytes += info.Size()
		}
		return existing(err)
	})
}

// existing returns an error unless it means that a server has removed the file.
func existing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (l *replicatedLog) cpu() (total time.Duration) {
	for _, s := range l.servers {
		total += process.CPU(s.Pid())
	}
	return total
}

// runReplicated runs a dispatcher whose log is "URL NAME". configure is called when the process owns the
// slot. A standby prints its addresses before.
func runReplicated(ctx context.Context, o dispatcher.Options, log string, standby bool,
	configure func(*dispatcher.Dispatcher, *dispatcher.Listeners)) error {
	url, name, _ := strings.Cut(log, " ")
	client, err := jetstream.New(jetstream.Config{URL: url, Name: name, Installation: "bench", Replicas: logServers,
		MaxBytes: 4 << 30}, o.Logger)
	if err != nil {
		return err
	}
	defer client.Close()
	o.Pod = "" // Each process has another name.
	member := host.Options{Options: o, PeerListen: "127.0.0.1:0"}
	if member.Listeners, err = host.Listen(member); err != nil {
		return err
	}
	if standby {
		hello(member.Listeners.Addr().String(), member.Listeners.AdminAddr().String())
	}
	return host.Run(ctx, member, host.Slots{
		Number: 1, Standbys: 1, Bus: client, Open: client.OpenSlot, OpenDirectory: client.OpenDirectory,
		Control: func(ctx context.Context, d *dispatcher.Dispatcher) error {
			configure(d, member.Listeners.Listeners)
			<-ctx.Done()
			return nil
		},
	})
}

// measureReplicated measures the replicated log with and without a standby.
func measureReplicated(ctx context.Context, b *bench) ([]row, error) {
	log, err := b.startLog()
	if err != nil {
		return nil, err
	}
	defer log.stop()
	run := func(l load, standby bool) (sample, time.Duration, error) {
		l.log = fmt.Sprintf("%s b%d", log.url, time.Now().UnixNano())
		l.standby = standby
		before := log.cpu()
		s, err := b.throughput(ctx, l, destinations(1, b.sink.Addr))
		return s, log.cpu() - before, err
	}
	batches, singles := load{batch: 20, clients: 8}, load{batch: 1, clients: 64}
	direct, err := b.directLoop(1)
	if err != nil {
		return nil, err
	}
	volume, err := b.throughput(ctx, batches, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	alone, _, err := run(batches, false)
	if err != nil {
		return nil, err
	}
	followed, servers, err := run(batches, true)
	if err != nil {
		return nil, err
	}
	one, _, err := run(singles, true)
	if err != nil {
		return nil, err
	}
	batches.forwarded, singles.forwarded = true, true
	forwarded, _, err := run(batches, true)
	if err != nil {
		return nil, err
	}
	oneForwarded, _, err := run(singles, true)
	if err != nil {
		return nil, err
	}
	batches.forwarded = false
	again, err := b.directLoop(1)
	if err != nil {
		return nil, err
	}
	direct = direct.mean(again)
	batches.perSecond = followed.rate / 4
	local, err := b.throughput(ctx, batches, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	stop := measureSyncs(b.dir("syncs"))
	calm, _, err := run(batches, true)
	syncs, syncErr := stop()
	if err := errors.Join(err, syncErr); err != nil {
		return nil, err
	}
	ratio := func(s sample) (float64, string) {
		return s.rate / direct.rate, fmt.Sprintf("%.2f (%.0f/s)", s.rate/direct.rate, s.rate)
	}
	var rows []row
	add := func(name string, s sample, goal float64) {
		value, text := ratio(s)
		rows = append(rows, atLeast(name, value, goal, text))
	}
	add("replicated log, batches of 20, of direct", alone, 0.35)
	add("the same with a standby", followed, 0.25)
	add("replicated log, standby, single calls, of direct", one, 0.15)
	addForwarded := func(name string, all, owned sample) {
		ratio := (all.cpu + all.standby) / (owned.cpu + owned.standby)
		rows = append(rows, below(name, ratio, 1.25, fmt.Sprintf("%.2f (%.1f us; %.0f/s)", ratio, all.cpu+all.standby, all.rate), "<= 1.25"))
	}
	addForwarded("all batches forwarded, CPU of both, of not forwarded", forwarded, followed)
	addForwarded("all single calls forwarded, the same", oneForwarded, one)
	cpu := alone.cpu / volume.cpu
	return append(rows,
		below("owner's CPU per message, of the local log", cpu, 1.4, fmt.Sprintf("%.2f (%.1f us)", cpu, alone.cpu), "<= 1.4"),
		row{Name: "  CPU of three servers, of all cores", Value: fmt.Sprintf("%.2f cores", servers.Seconds()/(b.window().Seconds()+2)), Met: true,
			Number: servers.Seconds()},
		below("replicated log at a quarter of peak, p50", calm.p50.Seconds(), 0.006, calm.p50.Round(10*time.Microsecond).String(), "<= 6ms"),
		below("replicated log at a quarter of peak, p99", calm.p99.Seconds(), 0.040, calm.p99.Round(10*time.Microsecond).String(), "<= 40ms"),
		row{Name: "  the local log at this rate, p50 and p99", Value: fmt.Sprintf("%v, %v", short(local.p50), short(local.p99)), Met: true,
			Number: local.p99.Seconds()},
		row{Name: "  syncs of another file meanwhile, p50 and longest",
			Value: fmt.Sprintf("%v, %v", short(quantile(syncs, 0.5)), short(quantile(syncs, 1))), Met: true, Number: quantile(syncs, 1).Seconds()},
	), nil
}

// measureSyncs appends 4 KB to a new file and syncs it, every 10 ms until stop is called. stop removes the file, and
// returns the sorted durations of the syncs: the latency of the disk itself.
func measureSyncs(path string) (stop func() ([]time.Duration, error)) {
	ctx, cancel := context.WithCancel(context.Background())
	var group errgroup.Group
	var took []time.Duration
	group.Go(func() error {
		f, err := os.Create(path)
		if err != nil {
			return err
		}
		defer f.Close()
		for block := make([]byte, 4096); ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
			begin := time.Now()
			if _, err := f.Write(block); err != nil {
				return err
			}
			if err := f.Sync(); err != nil {
				return err
			}
			took = append(took, time.Since(begin))
		}
		return os.Remove(path)
	})
	return func() ([]time.Duration, error) {
		cancel()
		err := group.Wait()
		sortDurations(took)
		return took, err
	}
}

// startStandby runs a process that follows the log of a dispatcher, and returns when it is ready.
func (b *bench) startStandby(ctx context.Context, owner *dispatcherProcess) (*dispatcherProcess, error) {
	args := append([]string{}, owner.cmd.Args[1:]...)
	args[0] += "-standby"
	if args[2] != "" {
		args[2] = filepath.Join(args[2], "standby")
	}
	args[5] = "standby"
	p, err := spawn(ctx, "dispatcher", args...)
	if err != nil {
		return nil, err
	}
	d := &dispatcherProcess{child: p, sources: owner.sources}
	if err := json.Unmarshal(p.hello, d); err != nil {
		return nil, err
	}
	return d, wait.Until(func() error {
		resp, err := http.Get("http://" + d.Admin + "/readyz") //nolint:noctx // a local poll
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("the standby is not ready: %s", resp.Status)
		}
		return nil
	})
}

// hello prints the line by which the parent process knows the addresses.
func hello(addr, admin string) {
	line, _ := json.Marshal(map[string]string{"Addr": addr, "Admin": admin})
	fmt.Fprintln(os.Stdout, string(line))
}
