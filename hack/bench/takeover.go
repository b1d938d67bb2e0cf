package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/replicated/host"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/jetstream"
	"github.com/posthorn/posthorn/test/process"
)

var (
	waiting = flag.Int("waiting", 1_000_000, "messages of 1 KB that wait for a dead destination in the rows of takeovers")
	kills   = flag.Int("kills", 3, "owners that are killed and lose their disk in the rows of takeovers")
)

const (
	handOvers = 3
	// idleSlots is the number of slots of the row of idle slots.
	idleSlots = 8
	// settleTime is longer than the time after which a process takes slots.
	settleTime = 15 * time.Second
	// leastRestored is the least rate, in bytes of waiting messages per second, at which a standby gets its copy.
	leastRestored = 16e6
)

// recoverWithin bounds a wait for the processes of a log. A standby gets its copy meanwhile.
func recoverWithin() time.Duration {
	return 3*time.Minute + time.Duration(acceptedBytes()/leastRestored*float64(time.Second))
}

// measureTakeover measures a pair of processes on a replicated log while a dead destination has a backlog.
func measureTakeover(ctx context.Context, b *bench) ([]row, error) {
	log, err := b.startLog()
	if err != nil {
		return nil, err
	}
	defer log.stop()
	list := destinations(2, b.sink.Addr)
	list[1].addr = process.FreeAddr() // Nothing listens there.
	p := &pair{b: b, log: log.url + " pair"}
	defer p.stop()
	if err := p.startOwner(ctx, config(list)); err != nil {
		return nil, err
	}
	filled, err := b.fill(p.owner, *waiting)
	if err != nil {
		return nil, err
	}
	restored, err := p.startStandby(ctx)
	if err != nil {
		return nil, err
	}
	uploaded, err := p.owner.snapshotBytes()
	if err != nil {
		return nil, err
	}
	stop := p.probe(0)
	defer stop()
	lost, err := p.replace(ctx, syscall.SIGKILL, *kills)
	if err != nil {
		return nil, err
	}
	ended, err := p.replace(ctx, syscall.SIGTERM, handOvers)
	if err != nil {
		return nil, err
	}
	accepted := acceptedBytes()
	return []row{
		takeovers(fmt.Sprintf("takeover after kill -9 with %.1f GB waiting", accepted/1e9), lost),
		below("hand-over with as much waiting", ended[len(ended)-1].Seconds(), 2, span(ended), "<= 2 s"),
		{Name: "  restore of a standby until it is ready",
			Value: fmt.Sprintf("%.1f s (%.0f MB/s)", restored.Seconds(), accepted/1e6/restored.Seconds()), Met: true, Number: restored.Seconds()},
		below("bytes uploaded for snapshots per accepted byte", uploaded/accepted, 2,
			fmt.Sprintf("%.2f (%.0f MB in %.0f s)", uploaded/accepted, uploaded/1e6, filled.Seconds()), "<= 2"),
	}, nil
}

// acceptedBytes is the size of the waiting messages.
func acceptedBytes() float64 { return float64(*waiting) * float64(len(appendBody(nil, 1, plainID))) }

// takeovers is the row of sorted durations of takeovers.
func takeovers(name string, sorted []time.Duration) row {
	inTime := sort.Search(len(sorted), func(i int) bool { return sorted[i] > 15*time.Second })
	return row{
		Name: name, Value: fmt.Sprintf("%s, %d of %d in 15 s", span(sorted), inTime, len(sorted)),
		Goal: "49 of 50 in 15 s", Met: inTime*50 >= len(sorted)*49, Number: sorted[len(sorted)-1].Seconds(),
	}
}

// span formats the shortest and the longest one of sorted durations.
func span(sorted []time.Duration) string {
	return fmt.Sprintf("%.1f to %.1f s", sorted[0].Seconds(), sorted[len(sorted)-1].Seconds())
}

// darkNamespaces is the number of namespaces beside the one of the dark destination, darkRate the number of
// calls that they get in a second, and darkSettle the wait after the backlog was written.
const (
	darkNamespaces = 50
	darkRate       = 1000
	darkSettle     = time.Minute
)

// measureDark measures 50 namespaces beside one whose destination never answers and has a backlog.
func measureDark(ctx context.Context, b *bench) ([]row, error) {
	log, err := b.startLog()
	if err != nil {
		return nil, err
	}
	defer log.stop()
	var configs []liveconfig.Config
	for i := range 1 + darkNamespaces {
		addr := b.sink.Addr
		if i == 0 {
			addr = b.sink.BlackHole
		}
		list := destinations(i+1, addr)
		list[0].source = i
		c := config(list[:1])
		c.Namespace, c.Sources = fmt.Sprintf("bench-%d", i), c.Sources[i:]
		configs = append(configs, c)
	}
	p := &pair{b: b, log: log.url + " dark"}
	defer p.stop()
	if err := p.startOwner(ctx, configs...); err != nil {
		return nil, err
	}
	if _, err := p.startStandby(ctx); err != nil {
		return nil, err
	}
	alone, coresAlone, err := p.paced(ctx, log)
	if err != nil {
		return nil, err
	}
	begin, usedBefore := time.Now(), log.cpu()
	if _, err := b.fill(p.owner, *waiting); err != nil {
		return nil, err
	}
	filled, used := time.Since(begin), log.cpu()-usedBefore
	after, _, err := p.paced(ctx, log)
	if err != nil {
		return nil, err
	}
	// The store has sorted the backlog, and its snapshot is uploaded.
	time.Sleep(darkSettle)
	beside, cores, err := p.paced(ctx, log)
	if err != nil {
		return nil, err
	}
	uploaded, err := p.owner.snapshotBytes()
	if err != nil {
		return nil, err
	}
	disk, err := log.disk()
	if err != nil {
		return nil, err
	}
	stop := p.probe(1)
	defer stop()
	lost, err := p.replace(ctx, syscall.SIGKILL, *kills)
	if err != nil {
		return nil, err
	}
	accepted := acceptedBytes()
	ratio, ratioAfter := beside.p99.Seconds()/alone.p99.Seconds(), after.p99.Seconds()/alone.p99.Seconds()
	return []row{
		below(fmt.Sprintf("p99 of %d namespaces beside %.1f GB for a dark URL, of alone", darkNamespaces, accepted/1e9), ratio, 1.5,
			fmt.Sprintf("%.2f (p99 %v of %v, p50 %v of %v)", ratio, short(beside.p99), short(alone.p99), short(beside.p50), short(alone.p50)), "<= 1.5"),
		{Name: "  the same immediately after the backlog was written", Value: fmt.Sprintf("%.2f (p99 %v)", ratioAfter, short(after.p99)),
			Met: true, Number: ratioAfter},
		takeovers("  takeover of all namespaces", lost),
		below("  bytes uploaded for snapshots per accepted byte", uploaded/accepted, 2,
			fmt.Sprintf("%.2f (%.0f MB)", uploaded/accepted, uploaded/1e6), "<= 2"),
		{Name: "  CPU of three servers: before, backlog written, waiting",
			Value: fmt.Sprintf("%.2f, %.2f, %.2f cores", coresAlone, used.Seconds()/filled.Seconds(), cores), Met: true, Number: cores},
		{Name: "  disk of three servers per accepted byte", Value: fmt.Sprintf("%.1f (%.1f GB)", float64(disk)/accepted, float64(disk)/1e9),
			Met: true, Number: float64(disk) / accepted},
	}, nil
}

// paced sends single calls of all namespaces but the first one to the owner. It returns the latencies of the
// deliveries, and the cores that the servers use.
func (p *pair) paced(ctx context.Context, log *replicatedLog) (s sample, cores float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*p.b.window())
	defer cancel()
	if _, err := p.b.sink.take(); err != nil {
		return s, 0, err
	}
	const clients = 10
	var group errgroup.Group
	var id atomic.Int64
	begin, used := time.Now(), log.cpu()
	for n := range clients {
		group.Go(func() error {
			out := newSender(p.owner)
			defer out.close()
			for i := n; ctx.Err() == nil; i += clients {
				time.Sleep(time.Until(begin.Add(time.Duration(i) * time.Second / darkRate)))
				if err := out.send(1+i%darkNamespaces, 1, plainID, &id); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return s, 0, err
	}
	cores = (log.cpu() - used).Seconds() / time.Since(begin).Seconds()
	stats, err := p.b.sink.take()
	if err == nil && len(stats.Samples) == 0 {
		err = errors.New("no message was delivered")
	}
	if err != nil {
		return s, 0, err
	}
	sortDurations(stats.Samples)
	return sample{p50: quantile(stats.Samples, 0.5), p99: quantile(stats.Samples, 0.99)}, cores, nil
}

// pair are the processes of a log.
type pair struct {
	b              *bench
	log, configs   string
	started        int
	owner, standby *dispatcherProcess

	mu      sync.Mutex
	members []*dispatcherProcess
	// answered are the times of the answers to probes, with those when the calls were sent.
	answered []time.Time
}

// startOwner starts the first process, with the configs of one or more namespaces.
func (p *pair) startOwner(ctx context.Context, configs ...liveconfig.Config) (err error) {
	p.configs = p.b.dir("pair.config")
	for i, c := range configs {
		data, _, err := liveconfig.Encode(c)
		if err != nil {
			return err
		}
		if err := os.WriteFile(fmt.Sprint(p.configs, i), data, 0o600); err != nil {
			return err
		}
	}
	if p.owner, err = p.start(ctx); err != nil {
		return err
	}
	return p.waitFor(p.owner, true)
}

// startStandby starts the second process, and returns the time until it is ready.
func (p *pair) startStandby(ctx context.Context) (took time.Duration, err error) {
	begin := time.Now()
	if p.standby, err = p.start(ctx); err != nil {
		return 0, err
	}
	err = p.waitFor(p.standby, false)
	return time.Since(begin), err
}

// replace ends the owner, removes its files, waits until the standby is the owner, and starts another standby,
// several times. It returns the longest time between two answered probes of each time, sorted.
func (p *pair) replace(ctx context.Context, signal syscall.Signal, times int) (sorted []time.Duration, err error) {
	for range times {
		begin := time.Now()
		_ = p.owner.cmd.Process.Signal(signal)
		_ = p.owner.cmd.Wait()
		p.remove(p.owner)
		if err := os.RemoveAll(p.owner.cmd.Args[1]); err != nil {
			return nil, err
		}
		p.owner = p.standby
		if err := p.waitFor(p.owner, true); err != nil {
			return nil, err
		}
		longest, err := p.longestSince(begin)
		if err != nil {
			return nil, err
		}
		if _, err := p.startStandby(ctx); err != nil {
			return nil, err
		}
		sorted = append(sorted, longest)
	}
	slices.Sort(sorted)
	return sorted, nil
}

// start starts a process without files.
func (p *pair) start(ctx context.Context) (*dispatcherProcess, error) {
	p.started++
	c, err := spawn(ctx, "dispatcher", p.b.dir(fmt.Sprint("pair-", p.started)), p.configs+"*", "", "", p.log, "standby")
	if err != nil {
		return nil, err
	}
	d := &dispatcherProcess{child: c, sources: 1}
	if err := json.Unmarshal(c.hello, d); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.members = append(p.members, d)
	return d, nil
}

func (p *pair) remove(d *dispatcherProcess) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.members = slices.DeleteFunc(p.members, func(m *dispatcherProcess) bool { return m == d })
}

func (p *pair) stop() {
	for _, m := range p.members {
		m.stop()
	}
}

// waitFor waits until a process is the owner, or a ready standby.
func (p *pair) waitFor(d *dispatcherProcess, owner bool) error {
	api := &adminapi.Client{URL: "http://" + d.Admin}
	for deadline := time.Now().Add(recoverWithin()); ; time.Sleep(50 * time.Millisecond) {
		states, err := api.Slots(context.Background())
		if err == nil && len(states) == 1 && states[0].Owner == owner && states[0].Ready {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("a process is not ready after %s: %+v, %w", recoverWithin(), states, err)
		}
	}
}

// probe sends small calls of a Source to the processes in turn, until stop is called.
func (p *pair) probe(source int) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	client := &http.Client{Timeout: time.Second}
	var group sync.WaitGroup
	var n atomic.Int64
	for range 4 {
		group.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
				id := n.Add(1)
				p.mu.Lock()
				addr := p.members[int(id)%len(p.members)].Addr
				p.mu.Unlock()
				body := fmt.Sprintf(`{"userId":"u","event":"Probe","messageId":"probe-%d-%d"}`, os.Getpid(), id)
				req, _ := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/v1/track", strings.NewReader(body))
				req.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(writeKey(source)+":")))
				resp, err := client.Do(req)
				if err != nil {
					continue
				}
				resp.Body.Close()
				if resp.StatusCode == http.StatusOK {
					p.mu.Lock()
					p.answered = append(p.answered, time.Now())
					p.mu.Unlock()
				}
			}
		})
	}
	return sync.OnceFunc(func() { cancel(); group.Wait() })
}

// longestSince waits for an answer from now on, and returns the longest time between two answers since begin.
func (p *pair) longestSince(begin time.Time) (longest time.Duration, err error) {
	now, last := time.Now(), begin
	for deadline := now.Add(recoverWithin()); last.Before(now); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			return 0, errors.New("no call was answered")
		}
		last, longest = begin, 0
		p.mu.Lock()
		for _, at := range p.answered {
			if at.After(begin) {
				longest, last = max(longest, at.Sub(last)), at
			}
		}
		p.mu.Unlock()
	}
	return longest, nil
}

// snapshotBytes returns the bytes that an owner has uploaded.
func (p *dispatcherProcess) snapshotBytes() (float64, error) {
	text, err := (&adminapi.Client{URL: "http://" + p.Admin}).Metrics(context.Background())
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut(text, "\nposthorn_replication_snapshot_bytes_total"+slotLabel+" ")
	if !ok {
		return 0, errors.New("the owner has no metric of uploaded bytes")
	}
	value, _, _ := strings.Cut(rest, "\n")
	return strconv.ParseFloat(value, 64)
}

// measureSlots measures a process with idle slots, compared with one whose log is a local volume.
func measureSlots(ctx context.Context, b *bench) ([]row, error) {
	log, err := b.startLog()
	if err != nil {
		return nil, err
	}
	defer log.stop()
	list := destinations(20, b.sink.Addr)
	volume, err := b.start(ctx, list, b.dir("idle-volume"))
	if err != nil {
		return nil, err
	}
	defer volume.stop()
	c, err := spawn(ctx, "slots", b.dir("idle-slots"), b.dir("idle-volume")+".config", log.url+" slots", strconv.Itoa(idleSlots))
	if err != nil {
		return nil, err
	}
	defer c.stop()
	hosted := &dispatcherProcess{child: c}
	if err := json.Unmarshal(c.hello, hosted); err != nil {
		return nil, err
	}
	api := &adminapi.Client{URL: "http://" + hosted.Admin}
	for deadline := time.Now().Add(recoverWithin()); ; time.Sleep(100 * time.Millisecond) {
		states, err := api.Slots(ctx)
		if err == nil && len(states) == idleSlots && !slices.ContainsFunc(states, func(s adminapi.ReplicationState) bool { return !s.Owner }) {
			break
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("not all slots have an owner: %+v, %w", states, err)
		}
	}
	time.Sleep(settleTime)
	begin, one, all := time.Now(), volume.cpu(), hosted.cpu()
	time.Sleep(5 * b.window())
	took := time.Since(begin).Seconds()
	cores := ((hosted.cpu() - all) - (volume.cpu() - one)).Seconds() / took
	bytes := hosted.rss() - volume.rss()
	return []row{
		below(fmt.Sprintf("%d idle slots, CPU more than a volume's", idleSlots), cores, 0.03, fmt.Sprintf("%.3f cores", cores), "<= 0.03"),
		below(fmt.Sprintf("%d idle slots, memory more than a volume's", idleSlots), float64(bytes), 100e6,
			fmt.Sprintf("%.0f MB", float64(bytes)/1e6), "<= 100 MB"),
	}, nil
}

// slotsRole runs a process of a log. Its arguments are the data directory, the file of the config,
// "URL NAME" of the log, and the number of slots.
func slotsRole(args []string) error {
	data, err := os.ReadFile(args[1])
	if err != nil {
		return err
	}
	policy, err := egress.ParsePolicy([]string{netip.PrefixFrom(netip.MustParseAddr("127.0.0.0"), 8).String()})
	if err != nil {
		return err
	}
	number, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	o := host.Options{PeerListen: "127.0.0.1:0", Options: dispatcher.Options{
		DataDir: args[0], ServerOptions: dispatcher.ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0"}, Pod: "bench",
		Egress: policy,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	}}
	url, name, _ := strings.Cut(args[2], " ")
	client, err := jetstream.New(jetstream.Config{URL: url, Name: name, Installation: "bench", Replicas: logServers,
		MaxBytes: jetstream.MinBytes}, o.Logger)
	if err != nil {
		return err
	}
	defer client.Close()
	if o.Listeners, err = host.Listen(o); err != nil {
		return err
	}
	hello(o.Listeners.Addr().String(), o.Listeners.AdminAddr().String())
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return host.Run(ctx, o, host.Slots{
		Number: number, Standbys: 1, Bus: client, Open: client.OpenSlot, OpenDirectory: client.OpenDirectory,
		Watch: func(ctx context.Context, to liveconfig.Sink) error {
			to.Set("bench", liveconfig.Stored{Config: data})
			to.Synced()
			<-ctx.Done()
			return nil
		},
	})
}
