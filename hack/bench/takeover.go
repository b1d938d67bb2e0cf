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
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue/slots/jetstream"
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
	// recoverWithin bounds a wait for the processes of a log.
	recoverWithin = 3 * time.Minute
)

// measureTakeover measures a pair of processes on a replicated log while a dead destination has a backlog.
func measureTakeover(ctx context.Context, b *bench) ([]row, error) {
	log, err := b.startLog()
	if err != nil {
		return nil, err
	}
	defer log.stop()
	p := &pair{b: b, log: log.url + " pair"}
	list := destinations(2, b.sink.Addr)
	list[1].addr = process.FreeAddr() // Nothing listens there.
	if err := p.writeConfig(list); err != nil {
		return nil, err
	}
	defer p.stop()
	owner, err := p.start(ctx)
	if err == nil {
		err = p.waitFor(owner, true)
	}
	if err != nil {
		return nil, err
	}
	filled, err := b.fill(owner, *waiting)
	if err != nil {
		return nil, err
	}
	accepted := float64(*waiting) * float64(len(appendBody(nil, 1, plainID)))
	begin := time.Now()
	standby, err := p.start(ctx)
	if err == nil {
		err = p.waitFor(standby, false)
	}
	if err != nil {
		return nil, err
	}
	restored := time.Since(begin)
	uploaded, err := owner.snapshotBytes()
	if err != nil {
		return nil, err
	}

	stop := p.probe()
	defer stop()
	// replace ends the owner, waits until the standby is the owner, and starts another standby. It returns the
	// longest time between two answered calls.
	replace := func(signal syscall.Signal) (time.Duration, error) {
		begin := time.Now()
		_ = owner.cmd.Process.Signal(signal)
		_ = owner.cmd.Wait()
		p.remove(owner)
		if err := os.RemoveAll(owner.cmd.Args[1]); err != nil {
			return 0, err
		}
		owner = standby
		if err := p.waitFor(owner, true); err != nil {
			return 0, err
		}
		longest, err := p.longestSince(begin)
		if err == nil {
			if standby, err = p.start(ctx); err == nil {
				err = p.waitFor(standby, false)
			}
		}
		return longest, err
	}
	var lost, ended []time.Duration
	for range *kills {
		d, err := replace(syscall.SIGKILL)
		if err != nil {
			return nil, err
		}
		lost = append(lost, d)
	}
	for range handOvers {
		d, err := replace(syscall.SIGTERM)
		if err != nil {
			return nil, err
		}
		ended = append(ended, d)
	}
	inTime := 0
	for _, d := range lost {
		if d <= 15*time.Second {
			inTime++
		}
	}
	gb := accepted / 1e9
	text := func(d []time.Duration) string {
		slices.Sort(d)
		return fmt.Sprintf("%.1f to %.1f s", d[0].Seconds(), d[len(d)-1].Seconds())
	}
	lostText, endedText := text(lost), text(ended)
	return []row{
		{Name: fmt.Sprintf("takeover after kill -9 with %.1f GB waiting", gb), Value: fmt.Sprintf("%s, %d of %d in 15 s", lostText, inTime, len(lost)), Goal: "49 of 50 in 15 s", Met: inTime*50 >= len(lost)*49, Number: lost[len(lost)-1].Seconds()},
		below("hand-over with as much waiting", ended[len(ended)-1].Seconds(), 2, endedText, "<= 2 s"),
		{Name: "  restore of a standby until it is ready", Value: fmt.Sprintf("%.1f s (%.0f MB/s)", restored.Seconds(), accepted/1e6/restored.Seconds()), Met: true, Number: restored.Seconds()},
		below("bytes uploaded for snapshots per accepted byte", uploaded/accepted, 2, fmt.Sprintf("%.2f (%.0f MB in %.0f s)", uploaded/accepted, uploaded/1e6, filled.Seconds()), "<= 2"),
	}, nil
}

// pair are the processes of a log.
type pair struct {
	b         *bench
	log, file string
	started   int

	mu      sync.Mutex
	members []*dispatcherProcess
	// answered are the times of the answers to probes, with those when the calls were sent.
	answered []time.Time
}

func (p *pair) writeConfig(list []destination) error {
	data, _, err := liveconfig.Encode(config(list))
	if err != nil {
		return err
	}
	p.file = p.b.dir("pair.config")
	return os.WriteFile(p.file, data, 0o600)
}

// start starts a process without files.
func (p *pair) start(ctx context.Context) (*dispatcherProcess, error) {
	p.started++
	c, err := spawn(ctx, "dispatcher", p.b.dir(fmt.Sprint("pair-", p.started)), p.file, "", "", p.log, "standby")
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
	for deadline := time.Now().Add(recoverWithin); ; time.Sleep(50 * time.Millisecond) {
		state, err := api.Log(context.Background())
		if err == nil && state != nil && state.Owner == owner && state.Ready {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("a process is not ready after %s: %+v, %w", recoverWithin, state, err)
		}
	}
}

// probe sends small calls to the processes in turn, until stop is called.
func (p *pair) probe() (stop func()) {
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
				req.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(writeKey(0)+":")))
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
	for deadline := now.Add(recoverWithin); last.Before(now); time.Sleep(20 * time.Millisecond) {
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
	_, rest, ok := strings.Cut(text, "\nposthorn_log_snapshot_bytes_total ")
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
	for deadline := time.Now().Add(recoverWithin); ; time.Sleep(100 * time.Millisecond) {
		states, err := api.Slots(ctx)
		if err == nil && len(states) == idleSlots && !slices.ContainsFunc(states, func(s adminapi.LogState) bool { return !s.Owner }) {
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
		below(fmt.Sprintf("%d idle slots, memory more than a volume's", idleSlots), float64(bytes), 100e6, fmt.Sprintf("%.0f MB", float64(bytes)/1e6), "<= 100 MB"),
	}, nil
}

// slotsRole runs a process with several slots. Its arguments are the data directory, the file of the config,
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
	o := dispatcher.Options{
		DataDir: args[0], Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0", PeerListen: "127.0.0.1:0", Pod: "bench", Egress: policy,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	}
	url, name, _ := strings.Cut(args[2], " ")
	client, err := jetstream.New(jetstream.Config{URL: url, Name: name, Replicas: logServers, MaxBytes: jetstream.MinBytes}, o.Logger)
	if err != nil {
		return err
	}
	defer client.Close()
	if o.Listeners, err = dispatcher.Listen(o); err != nil {
		return err
	}
	hello(o.Listeners.Addr().String(), o.Listeners.AdminAddr().String())
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return dispatcher.RunSlots(ctx, o, dispatcher.Slots{
		Number: number, Standbys: 1, Bus: client, Open: client.OpenSlot, OpenDirectory: client.OpenDirectory,
		Watch: func(ctx context.Context, to liveconfig.Sink) error {
			to.Set("bench", liveconfig.Stored{Config: data})
			to.Synced()
			<-ctx.Done()
			return nil
		},
	})
}
