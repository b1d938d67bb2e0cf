package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// The sink is a minimal HTTP/1.1 receiver that counts messages and samples latencies.

type sinkAddrs struct {
	Addr, BlackHole, Failing, Slow, Delayed, Control string
	// Second responds after a second; Workers has a number of workers that need a time each (sinkWorkers, sinkWork).
	Second, Workers string
	// Ports are further receivers like Addr, each with its own port.
	Ports []string
}

type sinkProcess struct {
	*child
	sinkAddrs
	// next is the process with the rest of Ports; nil if this one has all.
	next *sinkProcess
}

type sinkStats struct {
	Count       int64
	Connections int64 // accepted
	Bytes       int64 // of the counted bodies
	Most        int64 // the most requests at once of Workers
	Samples     []time.Duration
}

// failing returns the addresses of failing receivers.
func (s *sinkProcess) failing() []struct{ name, addr string } {
	return []struct{ name, addr string }{{"refused", "127.0.0.1:1"}, {"black hole", s.BlackHole}, {"5 s slow", s.Slow}, {"500s", s.Failing}}
}

const (
	sinkWorkers = 20
	sinkWork    = 50 * time.Millisecond
)

// counts reports whether the sink counts the messages to an address.
func (s *sinkProcess) counts(addr string) bool {
	return addr == s.Addr || addr == s.Second || addr == s.Workers || slices.Contains(s.Ports, addr)
}

// portsOfASink bounds the ports of a process, so that its ports and connections do not need more than 10,000 files.
const portsOfASink = 4000

// startSink starts a sink with a number of Ports.
func startSink(ctx context.Context, ports int) (*sinkProcess, error) {
	own := min(ports, portsOfASink)
	p, err := spawn(ctx, "sink", strconv.Itoa(own))
	if err != nil {
		return nil, err
	}
	s := &sinkProcess{child: p}
	if err := json.Unmarshal(p.hello, &s.sinkAddrs); err != nil || ports == own {
		return s, err
	}
	if s.next, err = startSink(ctx, ports-own); err != nil {
		p.stop()
		return nil, err
	}
	s.Ports = append(s.Ports, s.next.Ports...)
	return s, nil
}

func (s *sinkProcess) stop() {
	if s.next != nil {
		s.next.stop()
	}
	s.child.stop()
}

func (s *sinkProcess) cpu() time.Duration {
	used := s.child.cpu()
	if s.next != nil {
		used += s.next.cpu()
	}
	return used
}

// take returns the sink's counts since the previous take.
func (s *sinkProcess) take() (stats sinkStats, err error) {
	resp, err := http.Get("http://" + s.Control) //nolint:noctx // a local control request
	if err != nil {
		return stats, err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&stats); err != nil || s.next == nil {
		return stats, err
	}
	more, err := s.next.take()
	stats.Count += more.Count
	stats.Connections += more.Connections
	stats.Bytes += more.Bytes
	stats.Samples = append(stats.Samples, more.Samples...)
	return stats, err
}

// messages returns the number of messages in the body of a request: of one with lines, their number.
func messages(body []byte, lines, compressed bool) int64 {
	if !lines {
		return 1
	}
	if compressed {
		r, err := gzip.NewReader(bytes.NewReader(body))
		if err != nil {
			panic(err) // The dispatcher made it.
		}
		if body, err = io.ReadAll(r); err != nil {
			panic(err)
		}
	}
	return int64(bytes.Count(body, []byte("\n")))
}

// sinkRole runs the sink; its argument is the number of Ports.
func sinkRole(args []string) error {
	var count, size, connections, waiting, most atomic.Int64
	free := make(chan struct{}, sinkWorkers)
	var mu sync.Mutex
	var samples []time.Duration
	listen := func(handle func(net.Conn)) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			panic(err)
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				connections.Add(1)
				go handle(c)
			}
		}()
		return l.Addr().String()
	}
	answer := func(response string, counted bool, work func()) func(net.Conn) {
		return func(c net.Conn) {
			defer c.Close()
			r := bufio.NewReaderSize(c, 4<<10)
			var body []byte
			for {
				length, lines, compressed := 0, false, false
				for {
					line, err := r.ReadSlice('\n')
					if err != nil {
						return
					}
					if len(line) <= 2 {
						break
					}
					if len(line) > 15 && strings.EqualFold(string(line[:15]), "content-length:") {
						length, _ = strconv.Atoi(strings.TrimSpace(string(line[15:])))
					}
					lines = lines || bytes.HasPrefix(line, []byte("Content-Type: application/x-ndjson"))
					compressed = compressed || bytes.HasPrefix(line, []byte("Content-Encoding: gzip"))
				}
				body = slices.Grow(body[:0], length)[:length]
				if _, err := io.ReadFull(r, body); err != nil {
					return
				}
				if counted {
					size.Add(int64(length))
					// One message in 4 is a latency sample; of a batch, the first one in 4.
					if n := count.Add(messages(body, lines, compressed)); n%4 == 0 {
						if d := age(body); d > 0 {
							mu.Lock()
							samples = append(samples, d)
							mu.Unlock()
						}
					}
				}
				work()
				if _, err := io.WriteString(c, response); err != nil {
					return
				}
			}
		}
	}
	const ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	none := func() {}
	after := func(d time.Duration) func() { return func() { time.Sleep(d) } }
	worker := func() {
		if n := waiting.Add(1); n > most.Load() {
			most.Store(n)
		}
		free <- struct{}{}
		time.Sleep(sinkWork)
		<-free
		waiting.Add(-1)
	}
	addrs := sinkAddrs{
		Addr:    listen(answer(ok, true, none)),
		Failing: listen(answer("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\nno", false, none)),
		Delayed: listen(answer(ok, false, after(200*time.Millisecond))),
		Second:  listen(answer(ok, true, after(time.Second))),
		Workers: listen(answer(ok, true, worker)),
		Slow: listen(func(c net.Conn) {
			time.Sleep(4900 * time.Millisecond)
			answer("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", false, none)(c)
		}),
		BlackHole: listen(func(c net.Conn) { _, _ = io.Copy(io.Discard, c); c.Close() }),
	}
	ports, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	for range ports {
		addrs.Ports = append(addrs.Ports, listen(answer(ok, true, none)))
	}
	control, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	addrs.Control = control.Addr().String()
	hello, _ := json.Marshal(addrs)
	fmt.Println(string(hello))
	return http.Serve(control, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { //nolint:gosec // a local control listener
		mu.Lock()
		defer mu.Unlock()
		_ = json.NewEncoder(w).Encode(sinkStats{Count: count.Swap(0), Bytes: size.Swap(0), Connections: connections.Swap(0),
			Most: most.Swap(0), Samples: samples})
		samples = nil
	}))
}

const stamp = `"sent":`

// age returns the time since a message was sent, by its body.
func age(body []byte) time.Duration {
	_, rest, ok := bytes.Cut(body, []byte(stamp))
	if !ok {
		return 0
	}
	end := bytes.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	sent, err := strconv.ParseInt(string(rest[:max(end, 0)]), 10, 64)
	if err != nil {
		return 0
	}
	return time.Duration(time.Now().UnixMicro()-sent) * time.Microsecond
}
