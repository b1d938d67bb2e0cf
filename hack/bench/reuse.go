package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/memory"
)

const (
	// reuseHosts are the receivers of the row, and reusePerSecond the messages to all of them. The traffic to
	// the host of rank k is proportional to 1/k.
	reuseHosts     = 10_000
	reusePerSecond = 1000
	// oftenPerSecond is the traffic of a host whose connection should be kept.
	oftenPerSecond = 0.1
	// reuseWarmUp is how long the traffic runs before it is measured: longer than an unused connection is kept.
	reuseWarmUp = 20 * time.Second
)

// measureReuse sends Zipf-distributed messages to many hosts over TLS, from one dispatcher and from three that
// share the calls.
func measureReuse(ctx context.Context, b *bench) ([]row, error) {
	b = &bench{root: b.root, sink: b.sink, memory: memory.Default}
	var rows []row
	for _, dispatchers := range []int{1, 3} {
		got, err := b.reuse(ctx, dispatchers)
		if err != nil {
			return nil, err
		}
		rows = append(rows, got...)
	}
	return rows, nil
}

func (b *bench) reuse(ctx context.Context, dispatchers int) ([]row, error) {
	sink, err := b.startTLSSinks(ctx, dispatchers)
	defer sink.stop()
	if err != nil {
		return nil, err
	}
	var processes []*dispatcherProcess
	for i := range dispatchers {
		dir := b.dir(fmt.Sprint("reuse-", time.Now().UnixNano(), i))
		defer os.RemoveAll(dir)
		p, err := b.start(ctx, sink.destinations(reuseHosts), dir)
		if err != nil {
			return nil, err
		}
		defer p.stop()
		processes = append(processes, p)
	}
	t := &traffic{to: processes}
	if err := t.once(ctx); err != nil {
		return nil, err
	}
	for total := 0; total < reuseHosts*dispatchers; time.Sleep(20 * time.Millisecond) {
		counts, err := sink.take()
		if err != nil {
			return nil, err
		}
		total += counts.sum(0, reuseHosts).Messages
	}
	if err := t.zipf(ctx, reuseWarmUp); err != nil {
		return nil, err
	}
	if _, err := sink.take(); err != nil {
		return nil, err
	}
	begin, used := time.Now(), cpuOf(processes)
	if err := t.zipf(ctx, b.window()); err != nil {
		return nil, err
	}
	used = cpuOf(processes) - used
	counts, err := sink.take()
	if err != nil {
		return nil, err
	}
	return reuseRows(counts, processes, used, time.Since(begin)), nil
}

// reuseRows compares the hosts with a message in 10 s or more with the others.
func reuseRows(counts hostCounts, processes []*dispatcherProcess, used, took time.Duration) []row {
	often := slices.IndexFunc(zipfShares(reuseHosts), func(share float64) bool { return share*reusePerSecond < oftenPerSecond })
	top, rest := counts.sum(0, often), counts.sum(often, reuseHosts)
	each := float64(top.Handshakes) / float64(max(1, top.Messages))
	resumed := float64(rest.Resumed) / float64(max(1, rest.Handshakes))
	var rss int64
	for _, p := range processes {
		rss = max(rss, p.rss())
	}
	from := fmt.Sprintf("%d dispatchers: ", len(processes))
	return []row{
		atMost(from+"handshakes of a message, hosts with one in 10 s", each, 0.02,
			fmt.Sprintf("%.4f (%d of %d)", each, top.Handshakes, top.Messages), "<= 0.02"),
		atLeast(from+"resumed handshakes of the other hosts", resumed, 0.95,
			fmt.Sprintf("%.3f (%d of %d)", resumed, rest.Resumed, rest.Handshakes)),
		{Name: "  of their messages with a handshake; all messages/s; CPU, RSS", Met: true, Number: resumed,
			Value: fmt.Sprintf("%.2f; %.0f/s; %.0f us, %d MB", float64(rest.Handshakes)/float64(max(1, rest.Messages)),
				float64(top.Messages+rest.Messages)/took.Seconds(), float64(used.Microseconds())/float64(top.Messages+rest.Messages), rss>>20)},
	}
}

func cpuOf(processes []*dispatcherProcess) (used time.Duration) {
	for _, p := range processes {
		used += p.cpu()
	}
	return used
}

// zipfShares are the shares of n hosts in the traffic.
func zipfShares(n int) []float64 {
	shares, sum := make([]float64, n), 0.0
	for i := range shares {
		shares[i] = 1 / float64(i+1)
		sum += shares[i]
	}
	for i := range shares {
		shares[i] /= sum
	}
	return shares
}

// traffic sends single calls to dispatchers in turn; the Source of a call has one destination, at the host of its number.
type traffic struct {
	to []*dispatcherProcess
	id atomic.Int64
}

// trafficClients is the number of connections to each dispatcher.
const trafficClients = 64

// each runs clients, each with its number and a function that sends a call of a Source to one of the dispatchers.
func (t *traffic) each(run func(client int, send func(to, source int) error) error) error {
	var group errgroup.Group
	for client := range trafficClients {
		group.Go(func() error {
			senders := make([]*sender, len(t.to))
			for i, p := range t.to {
				senders[i] = newSender(p)
				defer senders[i].close()
			}
			return run(client, func(to, source int) error { return senders[to].send(source, 1, plainID, &t.id) })
		})
	}
	return group.Wait()
}

// once sends a call of each Source to each dispatcher.
func (t *traffic) once(ctx context.Context) error {
	return t.each(func(client int, send func(to, source int) error) error {
		for source := client; source < reuseHosts && ctx.Err() == nil; source += trafficClients {
			for to := range t.to {
				if err := send(to, source); err != nil {
					return err
				}
			}
		}
		return ctx.Err()
	})
}

// zipf sends reusePerSecond calls a second for a time, each to a random dispatcher.
func (t *traffic) zipf(ctx context.Context, d time.Duration) error {
	until := zipfShares(reuseHosts) // The sum of the shares up to each host.
	for i := 1; i < len(until); i++ {
		until[i] += until[i-1]
	}
	gap := trafficClients * time.Second / reusePerSecond
	return t.each(func(client int, send func(to, source int) error) error {
		begin := time.Now().Add(gap * time.Duration(client) / trafficClients)
		for n := time.Duration(0); n*gap < d && ctx.Err() == nil; n++ {
			time.Sleep(time.Until(begin.Add(n * gap)))
			source, _ := slices.BinarySearch(until, rand.Float64()*until[len(until)-1])
			if err := send(rand.IntN(len(t.to)), source); err != nil {
				return err
			}
		}
		return ctx.Err()
	})
}

// tlsSink is a receiver with many hosts, each at a loopback address and with a certificate of its own.
type tlsSink struct {
	*child
	Port, Control string
}

// hostCount counts the messages and the handshakes of a host.
type hostCount struct{ Messages, Handshakes, Resumed int }

type hostCounts []hostCount

func (c hostCounts) sum(from, to int) (sum hostCount) {
	for _, host := range c[from:to] {
		sum.Messages += host.Messages
		sum.Handshakes += host.Handshakes
		sum.Resumed += host.Resumed
	}
	return sum
}

// tlsSinks divide the hosts, because a process has too few open files for all connections.
type tlsSinks []*tlsSink

// startTLSSinks starts receivers. Processes that are started later trust their authorities.
func (b *bench) startTLSSinks(ctx context.Context, n int) (sinks tlsSinks, err error) {
	roots := b.dir("roots.pem")
	for range n {
		p, err := spawn(ctx, "tlssink", roots)
		if err != nil {
			return sinks, err
		}
		s := &tlsSink{child: p}
		sinks = append(sinks, s)
		if err := json.Unmarshal(p.hello, s); err != nil {
			return sinks, err
		}
	}
	return sinks, os.Setenv("SSL_CERT_FILE", roots)
}

func (s tlsSinks) stop() {
	for _, sink := range s {
		sink.stop()
	}
}

// destinations returns n destinations, each at a host of its own and with a Source of its own.
func (s tlsSinks) destinations(n int) []destination {
	list := make([]destination, n)
	for i := range list {
		url := "https://" + net.JoinHostPort(hostAddress(i).String(), s[i%len(s)].Port) + "/in"
		list[i] = destination{source: i, change: func(d *liveconfig.Destination) { d.Endpoints[0].URL = liveconfig.NewSecret(url) }}
	}
	return list
}

// take returns the counts since the previous take.
func (s tlsSinks) take() (hostCounts, error) {
	all := make(hostCounts, reuseHosts)
	for _, sink := range s {
		resp, err := http.Get("http://" + sink.Control) //nolint:noctx // a local control request
		if err != nil {
			return nil, err
		}
		var counts hostCounts
		err = json.NewDecoder(resp.Body).Decode(&counts)
		resp.Body.Close()
		if err != nil {
			return nil, err
		}
		for i, count := range counts {
			all[i] = hostCounts{all[i], count}.sum(0, 2)
		}
	}
	return all, nil
}
