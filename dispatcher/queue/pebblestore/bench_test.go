package pebblestore

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
)

// benchBody is a call of 1 KB.
var benchBody = []byte(`{"properties":{"text":"` + strings.Repeat("posthorn ", 108) + `"}}`)

func benchMessage(i int64) queue.Message {
	return queue.Message{Source: web, ID: "018f3c1e-7b1a-7c3e-9d6f-" + strconv.FormatInt(i+1e11, 10), Type: "track", Event: "Order Completed",
		AcceptedAt: time.Now(), Body: benchBody}
}

// BenchmarkAppend measures durable messages per second by producers and batch size. Its
// baseline is a file with the same group commit.
func BenchmarkAppend(b *testing.B) {
	for _, batch := range []int{1, 20} {
		for _, producers := range []int{1, 16, 256} {
			name := fmt.Sprintf("batch=%d/producers=%d", batch, producers)
			b.Run("floor/"+name, func(b *testing.B) {
				f := newFloor(b)
				produce(b, producers, batch, func(msgs []queue.Message) error { return f.append(msgs) })
				f.close()
			})
			b.Run("queue/"+name, func(b *testing.B) {
				s := open(b, b.TempDir(), Options{DuplicateWindow: DefaultDuplicateWindow})
				produce(b, producers, batch, func(msgs []queue.Message) error {
					_, err := s.Append(context.Background(), msgs)
					return err
				})
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
			})
		}
	}
}

func produce(b *testing.B, producers, batch int, do func([]queue.Message) error) {
	b.ReportAllocs()
	var next atomic.Int64
	var wait sync.WaitGroup
	before := cpuTime()
	b.ResetTimer()
	for range producers {
		wait.Go(func() {
			msgs := make([]queue.Message, batch)
			for {
				first := next.Add(int64(batch)) - int64(batch)
				if first >= int64(b.N) {
					return
				}
				for i := range msgs {
					msgs[i] = benchMessage(first + int64(i))
				}
				if err := do(msgs); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wait.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
	b.ReportMetric(float64(cpuTime()-before)/float64(b.N)/1e3, "cpu-us/msg")
}

func cpuTime() time.Duration {
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// floor is the minimal cost of a durable append: one write and one sync for all waiting
// requests.
type floor struct {
	f    *os.File
	in   chan floorRequest
	done chan struct{}
}

type floorRequest struct {
	msgs []queue.Message
	done chan error
}

func newFloor(b *testing.B) *floor {
	file, err := os.Create(filepath.Join(b.TempDir(), "floor"))
	if err != nil {
		b.Fatal(err)
	}
	f := &floor{f: file, in: make(chan floorRequest, 1024), done: make(chan struct{})}
	go func() {
		defer close(f.done)
		var buf []byte
		var waiters []chan error
		for r := range f.in {
			buf, waiters = buf[:0], waiters[:0]
			for more := true; more; {
				for _, m := range r.msgs {
					buf = append(append(buf, m.ID...), m.Body...)
				}
				waiters = append(waiters, r.done)
				select {
				case r, more = <-f.in:
				default:
					more = false
				}
			}
			_, err := f.f.Write(buf)
			if err == nil {
				err = unix.Fdatasync(int(f.f.Fd()))
			}
			for _, w := range waiters {
				w <- err
			}
		}
	}()
	return f
}

func (f *floor) append(msgs []queue.Message) error {
	r := floorRequest{msgs, make(chan error, 1)}
	f.in <- r
	return <-r.done
}

func (f *floor) close() {
	close(f.in)
	<-f.done
	_ = f.f.Close()
}

func fill(b testing.TB, s *Store, n int) {
	b.Helper()
	for i := 0; i < n; i += 1000 {
		msgs := make([]queue.Message, min(1000, n-i))
		for j := range msgs {
			msgs[j] = benchMessage(int64(i + j))
		}
		if _, err := s.Append(context.Background(), msgs); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkLeaseAck measures reading and settling a message.
func BenchmarkLeaseAck(b *testing.B) {
	for _, size := range []int{1, 8, 64} {
		b.Run(fmt.Sprint("lease=", size), func(b *testing.B) {
			s := open(b, b.TempDir(), Options{})
			if err := s.OpenLane(lane1); err != nil {
				b.Fatal(err)
			}
			fill(b, s, b.N)
			b.ReportAllocs()
			var buf []queue.Delivery
			before := cpuTime()
			b.ResetTimer()
			for n := 0; n < b.N; {
				var err error
				if buf, err = s.Lease(lane1, size, buf[:0]); err != nil {
					b.Fatal(err)
				}
				for _, d := range buf {
					s.Ack(d)
				}
				n += len(buf)
			}
			b.StopTimer()
			b.ReportMetric(float64(cpuTime()-before)/float64(b.N)/1e3, "cpu-us/msg")
			if err := s.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkSettle measures settling 100 leased messages one by one, and together.
func BenchmarkSettle(b *testing.B) {
	for _, together := range []bool{false, true} {
		b.Run(fmt.Sprint("together=", together), func(b *testing.B) {
			s := open(b, b.TempDir(), Options{})
			if err := s.OpenLane(lane1); err != nil {
				b.Fatal(err)
			}
			fill(b, s, b.N)
			b.ReportAllocs()
			var buf []queue.Delivery
			var all []queue.Settlement
			b.ResetTimer()
			for n := 0; n < b.N; n += len(buf) {
				b.StopTimer()
				var err error
				if buf, err = s.Lease(lane1, 100, buf[:0]); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				if all = all[:0]; !together {
					for _, d := range buf {
						s.Ack(d)
					}
					continue
				}
				for _, d := range buf {
					all = append(all, queue.Settlement{Delivery: d, Outcome: queue.Acked})
				}
				if err := s.SettleAll(lane1, all); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			if err := s.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkRetry measures a message that fails once.
func BenchmarkRetry(b *testing.B) {
	s := open(b, b.TempDir(), Options{})
	if err := s.OpenLane(lane1); err != nil {
		b.Fatal(err)
	}
	fill(b, s, b.N)
	b.ReportAllocs()
	b.ResetTimer()
	f := queue.Failure{Time: time.Now(), Reason: "ServerError", StatusCode: 503, Message: "503 Service Unavailable"}
	for n := 0; n < b.N; {
		got, err := s.Lease(lane1, 64, nil)
		if err != nil {
			b.Fatal(err)
		}
		for _, d := range got {
			if d.Attempt == 0 {
				s.Retry(d, time.Now(), f)
			} else {
				s.Ack(d)
				n++
			}
		}
	}
	b.StopTimer()
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
}

func rss(t *testing.T) int64 {
	runtime.GC()
	debug.FreeOSMemory()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip(err)
	}
	for _, line := range strings.Split(string(b), "\n") {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")), 10, 64)
			return kb >> 10
		}
	}
	t.Skip("no VmRSS")
	return 0
}

// TestParked measures the memory and start time of a backlog; POSTHORN_PARKED is the number of
// pending messages.
func TestParked(t *testing.T) {
	n := env("POSTHORN_PARKED", 0)
	if n == 0 {
		t.Skip("POSTHORN_PARKED is not set")
	}
	dir, o := t.TempDir(), Options{DuplicateWindow: DefaultDuplicateWindow}
	s := open(t, dir, o)
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	t.Logf("empty: %d MB resident", rss(t))
	start := time.Now()
	fill(t, s, n)
	t.Logf("%d messages parked in %v: %d MB resident, %d MB on disk", n, time.Since(start), rss(t), s.db.Metrics().DiskSpaceUsage()>>20)
	// The state after a kill, with a log to replay.
	copied := filepath.Join(t.TempDir(), "copy")
	if err := s.db.Checkpoint(copied); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for what, dir := range map[string]string{"after a clean stop": dir, "after a kill": copied} {
		start = time.Now()
		s = open(t, dir, o)
		if err := s.OpenLane(lane1); err != nil {
			t.Fatal(err)
		}
		got, err := s.Lease(lane1, 64, nil)
		if err != nil || len(got) != 64 {
			t.Fatalf("leased %d: %v", len(got), err)
		}
		t.Logf("%s: ready and leased in %v, %d MB resident", what, time.Since(start), rss(t))
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkPositions measures the writes of the files of positions for one commit with messages
// of one Source.
func BenchmarkPositions(b *testing.B) {
	s := open(b, b.TempDir(), Options{})
	defer func() { _ = s.Close() }()
	appendAll(b, s, 1)
	l := s.sourceLog(web)
	for i := range b.N {
		s.positions.Synced("999999.log", int64(i))
		s.accepted.Put(l.entry, integrity.AcceptedEntry{Source: web, Number: l.number, Head: uint64(i), Bytes: uint64(i)})
		s.accepted.Write()
		_ = s.positions.Mark()
	}
}
