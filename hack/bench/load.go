package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// Values of orderId in a call: a string, and a number that JavaScript would change.
const (
	plainID = `"50314b8e9bcf000000000000"`
	longID  = `50314809012345678901234567`
)

// appendBody appends a call of about 1 KB.
func appendBody(dst []byte, id int64, orderID string) []byte {
	return fmt.Appendf(dst, `{"type":"track","event":"Order Completed","userId":"user-%d","messageId":"bench-%d-%d","timestamp":"%s",`+
		`"properties":{%s%d,"orderId":%s,"total":27.5,"revenue":25,"currency":"USD","coupon":"hasbros","discount":2.5,`+
		`"products":[{"productId":"507f1f77bcf86cd799439011","sku":"45790-32","name":"Monopoly: 3rd Edition","price":19,"quantity":1,"category":"Games"},`+
		`{"productId":"505bd76785ebb509fc183733","sku":"46493-32","name":"Uno Card Game","price":3,"quantity":2,"category":"Games"}]},`+
		`"context":{"library":{"name":"analytics-go","version":"2.1.0"},"userAgent":"Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15",`+
		`"locale":"en-US","page":{"path":"/checkout","title":"Checkout","url":"https://shop.example/checkout"}}}`,
		id%1000, os.Getpid(), id, time.Now().UTC().Format("2006-01-02T15:04:05.000Z"), stamp, time.Now().UnixMicro(), orderID)
}

// counters has the resource use of a process since its start.
type counters struct {
	allocations, bytes                                        float64 // of memory
	reads, writes, waits                                      float64 // system calls; waits of threads
	commits, commitMessages, commitSeconds, syncs, syncSecond float64
}

// slotLabel is the label of the metrics of a process with a replicated log.
const slotLabel = `{slot="0"}`

// counters reads the counters of the kernel and of the dispatcher's metrics.
func (p *dispatcherProcess) counters() (c counters, err error) {
	proc := fmt.Sprintf("/proc/%d/", p.cmd.Process.Pid)
	number := func(text, name string) float64 {
		_, rest, _ := strings.Cut(text, "\n"+name)
		rest = strings.TrimPrefix(rest, slotLabel)
		value, _, _ := strings.Cut(strings.TrimLeft(rest, ": \t"), "\n")
		n, _ := strconv.ParseFloat(value, 64)
		return n
	}
	text, err := os.ReadFile(proc + "io")
	if err != nil {
		return c, err
	}
	c.reads, c.writes = number(string(text), "syscr"), number(string(text), "syscw")
	threads, err := filepath.Glob(proc + "task/*/status")
	if err != nil {
		return c, err
	}
	for _, thread := range threads {
		if text, err := os.ReadFile(thread); err == nil {
			c.waits += number(string(text), "voluntary_ctxt_switches")
		}
	}
	api := adminapi.Client{URL: "http://" + p.Admin}
	metrics, err := api.Metrics(context.Background())
	if err != nil {
		return c, err
	}
	for name, value := range map[string]*float64{
		"go_memstats_mallocs_total": &c.allocations, "go_memstats_alloc_bytes_total": &c.bytes,
		"posthorn_queue_commit_seconds_count": &c.commits, "posthorn_queue_commit_seconds_sum": &c.commitSeconds,
		"posthorn_queue_commit_messages_sum": &c.commitMessages,
		"posthorn_queue_sync_seconds_count":  &c.syncs, "posthorn_queue_sync_seconds_sum": &c.syncSecond,
	} {
		*value = number(metrics, name)
	}
	return c, nil
}

// sample is a measurement.
type sample struct {
	rate, cpu     float64  // per second; microseconds per message, of the measured process
	standby       float64  // microseconds per message of the standby
	senders, sink float64  // microseconds per message of the other processes
	connections   float64  // accepted by the sink, per 1,000 messages
	wire          float64  // bytes of bodies at the sink, per message
	cost          counters // of the measured process, per message
	commits       string   // the size and the duration of a commit
	p50, p99      time.Duration
	rss           int64
	delivered     int64 // since the start of the process
	most          int64 // requests at once at the sink's Workers
}

func (s sample) mean(t sample) sample {
	return sample{rate: (s.rate + t.rate) / 2, cpu: (s.cpu + t.cpu) / 2, p50: (s.p50 + t.p50) / 2, p99: (s.p99 + t.p99) / 2}
}

// load describes the calls of a benchmark.
type load struct {
	batch, clients int
	perSecond      float64       // 0: as fast as they are accepted
	longNumbers    bool          // true if each message has a long number
	log            string        // "URL NAME" of a replicated log; empty for the store's own
	forwarded      bool          // true if the calls go to the standby
	standby        bool          // true if a second process follows the log
	ahead          int64         // calls of each Source that may be pending; default 8,000
	warm           time.Duration // before the measurement; default a quarter of it
}

// throughput runs a dispatcher under a load. Senders pause while too many messages are
// pending, so that the result applies to the whole pipeline and not only to ingest.
func (b *bench) throughput(ctx context.Context, l load, list []destination) (sample, error) {
	dir := b.dir(fmt.Sprint("run-", time.Now().UnixNano()))
	defer os.RemoveAll(dir)
	p, err := b.startWithLog(ctx, list, dir, l.log)
	if err != nil {
		return sample{}, err
	}
	defer p.stop()
	var follower *dispatcherProcess
	if l.standby {
		defer os.RemoveAll(dir + "-standby")
		follower, err = b.startStandby(ctx, p)
		if err != nil {
			return sample{}, err
		}
		defer follower.stop() // Before the owner: it would take over.
	}
	to := p
	if l.forwarded {
		to = follower
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var group sync.WaitGroup
	var sent, delivered atomic.Int64
	good := 0
	for _, d := range list {
		if b.sink.counts(d.addr) {
			good++
		}
	}
	perSource := max(1, good/p.sources)
	var id atomic.Int64
	gap := time.Duration(0)
	if l.perSecond > 0 {
		gap = time.Duration(float64(l.batch*l.clients) / l.perSecond * float64(time.Second))
	}
	orderID := plainID
	if l.longNumbers {
		orderID = longID
	}
	for n := range l.clients {
		group.Go(func() {
			s := newSender(to)
			defer s.close()
			time.Sleep(gap * time.Duration(n) / time.Duration(l.clients)) // The senders start one after the other.
			for i := n; ctx.Err() == nil; i += l.clients {
				if gap > 0 {
					select {
					case <-time.After(gap):
					case <-ctx.Done():
						return
					}
				}
				for sent.Load()*int64(perSource)-delivered.Load() > cmp.Or(l.ahead, 8000)*int64(perSource) && ctx.Err() == nil {
					time.Sleep(time.Millisecond)
				}
				if err := s.send(i%p.sources, l.batch, orderID, &id); err != nil && ctx.Err() == nil {
					fmt.Fprintln(os.Stderr, "send:", err)
					return
				}
				sent.Add(int64(l.batch))
			}
		})
	}
	drain := func(window time.Duration) (sinkStats, time.Duration, error) {
		var all sinkStats
		begin := time.Now()
		for time.Since(begin) < window {
			time.Sleep(20 * time.Millisecond)
			s, err := b.sink.take()
			if err != nil {
				return all, 0, err
			}
			delivered.Add(s.Count)
			all.Count += s.Count
			all.Connections += s.Connections
			all.Bytes += s.Bytes
			all.Most = max(all.Most, s.Most)
			all.Samples = append(all.Samples, s.Samples...)
		}
		return all, time.Since(begin), nil
	}
	// Warm up, then measure.
	if _, _, err := drain(cmp.Or(l.warm, b.window()/4)); err != nil {
		return sample{}, err
	}
	before, err := p.counters()
	if err != nil {
		return sample{}, err
	}
	cpu, own, sink := p.cpu(), ownCPU(), b.sink.cpu()
	var behind time.Duration
	if follower != nil {
		behind = follower.cpu()
	}
	stats, took, err := drain(b.window())
	used, own, sink := p.cpu()-cpu, ownCPU()-own, b.sink.cpu()-sink
	if follower != nil {
		behind = follower.cpu() - behind
	}
	if err != nil {
		return sample{}, err
	}
	after, err := p.counters()
	rss := p.rss()
	cancel()
	group.Wait()
	if err != nil {
		return sample{}, err
	}
	if stats.Count == 0 {
		return sample{}, fmt.Errorf("no message was delivered")
	}
	sortDurations(stats.Samples)
	each := func(d time.Duration) float64 { return float64(d.Microseconds()) / float64(stats.Count) }
	n := float64(stats.Count)
	return sample{
		cost: counters{
			allocations: (after.allocations - before.allocations) / n, bytes: (after.bytes - before.bytes) / n,
			reads: (after.reads - before.reads) / n, writes: (after.writes - before.writes) / n, waits: (after.waits - before.waits) / n,
		},
		commits: fmt.Sprintf("%.0f calls, %.2f ms; sync %.2f ms", (after.commitMessages-before.commitMessages)/(after.commits-before.commits),
			1000*(after.commitSeconds-before.commitSeconds)/(after.commits-before.commits),
			1000*(after.syncSecond-before.syncSecond)/(after.syncs-before.syncs)),
		rate: n / took.Seconds(), cpu: each(used), standby: each(behind), senders: each(own), sink: each(sink),
		connections: 1000 * float64(stats.Connections) / float64(stats.Count), wire: float64(stats.Bytes) / float64(stats.Count),
		p50: quantile(stats.Samples, 0.5), p99: quantile(stats.Samples, 0.99), rss: rss, most: stats.Most,
		delivered: delivered.Load(),
	}, nil
}

// fill sends n messages of the first Source and returns the duration.
func (b *bench) fill(p *dispatcherProcess, n int) (time.Duration, error) {
	return b.fillSource(p, 0, n)
}

func (b *bench) fillSource(p *dispatcherProcess, source, n int) (time.Duration, error) {
	begin := time.Now()
	var id atomic.Int64
	var group sync.WaitGroup
	var failed atomic.Pointer[error]
	for range 8 {
		group.Go(func() {
			s := newSender(p)
			defer s.close()
			for id.Load() < int64(n) {
				if err := s.send(source, 100, plainID, &id); err != nil {
					failed.Store(&err)
					return
				}
			}
		})
	}
	group.Wait()
	if err := failed.Load(); err != nil {
		return 0, *err
	}
	return time.Since(begin), nil
}

// sender posts calls on one connection. It needs less CPU time than net/http's client, because
// it shares the machine with the measured process.
type sender struct {
	addr    string
	conn    net.Conn
	answers *bufio.Reader
	request []byte
	calls   []byte
}

func newSender(p *dispatcherProcess) *sender { return &sender{addr: p.Addr} }

func (s *sender) close() {
	if s.conn != nil {
		_ = s.conn.Close()
	}
}

func (s *sender) send(source, batch int, orderID string, id *atomic.Int64) error {
	if s.conn == nil {
		conn, err := net.Dial("tcp", s.addr)
		if err != nil {
			return err
		}
		s.conn, s.answers = conn, bufio.NewReader(conn)
	}
	path := "/v1/track"
	if batch == 1 {
		s.calls = appendBody(s.calls[:0], id.Add(1), orderID)
	} else {
		path = "/v1/batch"
		s.calls = append(s.calls[:0], `{"batch":[`...)
		for i := range batch {
			if i > 0 {
				s.calls = append(s.calls, ',')
			}
			s.calls = appendBody(s.calls, id.Add(1), orderID)
		}
		s.calls = append(s.calls, `]}`...)
	}
	s.request = fmt.Appendf(s.request[:0], "POST %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: bench\r\nAuthorization: Basic %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n",
		path, s.addr, base64.StdEncoding.EncodeToString([]byte(writeKey(source)+":")), len(s.calls))
	s.request = append(s.request, s.calls...)
	_ = s.conn.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := s.conn.Write(s.request); err != nil {
		return err
	}
	status, answer, err := readAnswer(s.answers)
	if err == nil && !strings.Contains(status, " 200 ") {
		err = fmt.Errorf("%s: %s", status, answer)
	}
	return err
}

// readAnswer reads an answer with a Content-Length.
func readAnswer(r *bufio.Reader) (status string, body []byte, err error) {
	length := 0
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return "", nil, err
		}
		if status == "" {
			status = string(line)
			continue
		}
		if len(line) <= 2 {
			break
		}
		if name, value, _ := bytes.Cut(line, []byte(":")); bytes.EqualFold(name, []byte("Content-Length")) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return "", nil, err
			}
		}
	}
	body = make([]byte, length)
	_, err = io.ReadFull(r, body)
	return strings.TrimSpace(status), body, err
}
