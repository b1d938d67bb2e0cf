package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/test/process"
)

// attack is the load of a Source with a public write key, beside a well-behaved Source.
type attack struct {
	name string
	// contextBytes, calls and size are the arguments of batchWithContext. The body is compressed if
	// gzip is true.
	contextBytes, calls, size int
	gzip                      bool
	// filters is the number of destinations with the most expensive accepted filter; the attacker is then another namespace.
	filters int
	// clients send requests one after the other, as many as they can.
	clients int
}

// batchWithContext returns a batch of calls, each padded to at least size bytes,
// with a large context that is merged into each of them.
func batchWithContext(contextBytes, calls, size int) []byte {
	b := append([]byte(`{"context":{"x":"`), bytes.Repeat([]byte{'x'}, contextBytes)...)
	b = append(b, `"},"batch":[`...)
	call := `{"type":"track","userId":"u","event":"E"}`
	if pad := size - len(call); pad > len(`,"p":""`) {
		call = call[:len(call)-1] + `,"p":"` + strings.Repeat("p", pad-len(`,"p":""`)) + `"}`
	}
	for i := range calls {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, call...)
	}
	return append(b, `]}`...)
}

// attacks has the attacks of the security review, and the largest accepted batches.
var attacks = []attack{
	{name: "batches of 269 calls, 31 KB context, gzip", contextBytes: 31_000, calls: 269, size: 0, gzip: true, clients: 1},
	{name: "batches of 2,500 calls, 31 KB context", contextBytes: 31_000, calls: 2500, size: 0, clients: 16},
	{name: "largest batches (8 MB of messages), gzip", contextBytes: 28_000, calls: 264, size: 1800, gzip: true, clients: 16},
	{name: "1 MiB of messages from 150 bytes, gzip", contextBytes: 31_000, calls: 33, size: 0, gzip: true, clients: 16},
	{name: "10 filters of another namespace, 9 KB context", contextBytes: 9_900, calls: 20, size: 0, filters: 10, clients: 16},
}

// attackStats is the output of an attack's process.
type attackStats struct {
	Requests, Accepted, WireBytes int64
	Rejections                    map[string]int64 // by code
}

// attackRole runs an attack. The arguments are the address, the attack's number, and its duration.
// It starts when a line arrives, so that the start of the process is not measured. Its priority is
// low, because the sender of a real attack uses the processor of another machine: each thread has its own priority.
func attackRole(args []string) error {
	index, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	window, err := time.ParseDuration(args[2])
	if err != nil {
		return err
	}
	a := attacks[index]
	body, encoding := batchWithContext(a.contextBytes, a.calls, a.size), ""
	if a.gzip {
		var packed bytes.Buffer
		z, _ := gzip.NewWriterLevel(&packed, gzip.BestCompression)
		_, _ = z.Write(body)
		_ = z.Close()
		body, encoding = packed.Bytes(), "Content-Encoding: gzip\r\n"
	}
	request := fmt.Appendf(nil, "POST /v1/batch HTTP/1.1\r\nHost: %s\r\nAuthorization: Basic %s\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n",
		args[0], base64.StdEncoding.EncodeToString([]byte(writeKey(1)+":")), encoding, len(body))
	request = append(request, body...)
	stats := attackStats{Rejections: map[string]int64{}}
	lower := func(thread int) error { return syscall.Setpriority(syscall.PRIO_PROCESS, thread, 10) }
	if err := eachThread(os.Getpid(), lower); err != nil {
		return err
	}
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return err
	}
	var mu sync.Mutex
	var sent, accepted atomic.Int64
	end := time.Now().Add(window)
	send := func(c *net.Conn, answers **bufio.Reader) error {
		if *c == nil {
			conn, err := net.Dial("tcp", args[0])
			if err != nil {
				return err
			}
			*c, *answers = conn, bufio.NewReader(conn)
		}
		_ = (*c).SetDeadline(time.Now().Add(60 * time.Second))
		if _, err := (*c).Write(request); err != nil {
			return err
		}
		status, answer, err := readAnswer(*answers)
		if err != nil {
			return err
		}
		sent.Add(1)
		var a struct {
			Error struct {
				Code string `json:"code"`
			} `json:"error"`
			Rejected []json.RawMessage `json:"rejected"`
		}
		_ = json.Unmarshal(answer, &a)
		switch {
		case strings.Contains(status, " 200 "):
			accepted.Add(1)
		case strings.Contains(status, " 413 "):
			_ = (*c).Close() // The server closes it too.
			*c = nil
			fallthrough
		default:
			mu.Lock()
			stats.Rejections[a.Error.Code]++
			mu.Unlock()
		}
		if len(a.Rejected) > 0 {
			mu.Lock()
			stats.Rejections["calls rejected in a 200"] += int64(len(a.Rejected))
			mu.Unlock()
		}
		return nil
	}
	var group errgroup.Group
	for range a.clients {
		group.Go(func() error {
			var conn net.Conn
			var answers *bufio.Reader
			for time.Now().Before(end) {
				if err := send(&conn, &answers); err != nil {
					if conn != nil {
						_ = conn.Close()
						conn = nil
					}
					mu.Lock()
					stats.Rejections["connection closed"]++
					mu.Unlock()
				}
			}
			if conn != nil {
				_ = conn.Close()
			}
			return nil
		})
	}
	_ = group.Wait()
	stats.Requests, stats.Accepted, stats.WireBytes = sent.Load(), accepted.Load(), sent.Load()*int64(len(body))
	return json.NewEncoder(os.Stdout).Encode(stats)
}

// goodLatencies sends single calls to the first Source, at a fixed rate that is
// far below the dispatcher's capacity, until ended is closed.
func goodLatencies(p *dispatcherProcess, id *atomic.Int64, ended <-chan struct{}) ([]time.Duration, error) {
	var mu sync.Mutex
	var all []time.Duration
	err := paced(p, 8, 20*time.Millisecond, ended, func(s *sender) error {
		begin := time.Now()
		if err := s.send(0, 1, plainID, id); err != nil {
			return fmt.Errorf("the well-behaved sender: %w", err)
		}
		took := time.Since(begin)
		mu.Lock()
		all = append(all, took)
		mu.Unlock()
		return nil
	})
	sortDurations(all)
	return all, err
}

// paced calls send for each of some clients with a gap between, until ended is closed.
func paced(p *dispatcherProcess, clients int, gap time.Duration, ended <-chan struct{}, send func(*sender) error) error {
	var group errgroup.Group
	for n := range clients {
		group.Go(func() error {
			s := newSender(p)
			defer s.close()
			time.Sleep(gap * time.Duration(n) / time.Duration(clients))
			tick := time.NewTicker(gap)
			defer tick.Stop()
			for {
				select {
				case <-ended:
					return nil
				case <-tick.C:
				}
				if err := send(s); err != nil {
					return err
				}
			}
		})
	}
	return group.Wait()
}

// measureAttack compares the latencies of a well-behaved sender during each attack
// with those before it, with the same dispatcher. As root, the sender and the receiver do not wait for processors, because
// they have others in practice.
func measureAttack(ctx context.Context, b *bench) ([]row, error) {
	var rows []row
	for i, a := range attacks {
		r, err := b.underAttack(ctx, i, a)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", a.name, err)
		}
		rows = append(rows, r...)
	}
	return rows, nil
}

func (b *bench) underAttack(ctx context.Context, index int, a attack) ([]row, error) {
	dir := b.dir(fmt.Sprint("attack-", time.Now().UnixNano()))
	defer os.RemoveAll(dir)
	list := destinations(2, b.sink.Addr)
	list[1].source = 1
	if a.filters > 0 {
		list = list[:1]
		if err := writeFilters(dir+".config-filters", destinations(a.filters, b.sink.Addr)); err != nil {
			return nil, err
		}
	}
	p, err := b.startPattern(ctx, list, dir, ".config*", "")
	if err != nil {
		return nil, err
	}
	defer p.stop()
	for _, pid := range []int{os.Getpid(), b.sink.cmd.Process.Pid} {
		if err := eachThread(pid, prefer); err != nil {
			return nil, err
		}
	}
	var id atomic.Int64
	during := func(f func() error) ([]time.Duration, error) {
		ended := make(chan struct{})
		var group errgroup.Group
		var got []time.Duration
		group.Go(func() (err error) {
			got, err = goodLatencies(p, &id, ended)
			return err
		})
		err := f()
		close(ended)
		if e := group.Wait(); err == nil {
			err = e
		}
		return got, err
	}
	quiet := func() error { time.Sleep(b.window()); return nil }
	if _, err := during(func() error { time.Sleep(b.window() / 4); return nil }); err != nil { // warm up
		return nil, err
	}
	alone, err := during(quiet)
	if err != nil {
		return nil, err
	}
	diskBefore := diskUsage(dir)
	var stats attackStats
	attacker, err := spawn(ctx, "attack", p.Addr, strconv.Itoa(index), b.window().String())
	if err != nil {
		return nil, err
	}
	defer attacker.stop()
	beside, err := during(func() error {
		if _, err := attacker.stdin.Write([]byte("\n")); err != nil {
			return err
		}
		return json.NewDecoder(attacker.rest).Decode(&stats)
	})
	if err != nil {
		return nil, err
	}
	growth := diskUsage(dir) - diskBefore
	_, peak := process.Memory(p.cmd.Process.Pid)
	p50, p99 := quantile(beside, 0.5), quantile(beside, 0.99)
	base50, base99 := quantile(alone, 0.5), quantile(alone, 0.99)
	ratio := p99.Seconds() / max(base99.Seconds(), 1e-6)
	text := fmt.Sprintf("%.2f (p99 %s of %s, p50 %s of %s)", ratio, short(p99), short(base99), short(p50), short(base50))
	return []row{
		below("p99 beside "+a.name+", of alone", ratio, 3, text, "<= 3"),
		below("peak RSS beside "+a.name, float64(peak), memory.Default, fmt.Sprintf("%d MB", peak>>20), "< 400 MB"),
		{Name: "  attack: requests, accepted, rejected", Value: fmt.Sprintf("%d, %d, %v", stats.Requests, stats.Accepted, stats.Rejections),
			Met: true, Number: ratio},
		{Name: "  disk growth, per byte of the attacker",
			Value: fmt.Sprintf("%.1f MB, %.1f", float64(growth)/1e6, float64(growth)/float64(max(stats.WireBytes, 1))), Met: true, Number: ratio},
	}, nil
}

// writeFilters writes the config of another namespace, whose destinations have the most expensive filters.
func writeFilters(file string, list []destination) error {
	for i := range list {
		list[i].source = 1
		list[i].change = func(d *liveconfig.Destination) {
			d.Filter = &liveconfig.Filter{Expression: fmt.Sprintf("call.context.x.matches('[xz]{198}%d')", i)}
		}
	}
	c := config(list)
	c.Namespace, c.Sources = "filters", c.Sources[1:]
	data, _, err := liveconfig.Encode(c)
	if err != nil {
		return err
	}
	return os.WriteFile(file, data, 0o600)
}

// eachThread calls f for each thread of a process.
func eachThread(pid int, f func(thread int) error) error {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return err
	}
	for _, t := range threads {
		thread, err := strconv.Atoi(t.Name())
		if err == nil {
			err = f(thread)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) { // It may have ended.
			return err
		}
	}
	return nil
}

// prefer lets a thread run before those of the default policy. Its children have the default. Only root can do this.
func prefer(thread int) error {
	a, err := unix.SchedGetAttr(thread, 0)
	if err != nil || a.Policy != unix.SCHED_NORMAL {
		return err
	}
	err = unix.SchedSetAttr(thread, &unix.SchedAttr{Policy: unix.SCHED_RR, Priority: 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK}, 0)
	if errors.Is(err, unix.EPERM) {
		return nil
	}
	return err
}

// diskUsage returns the disk usage of a directory, as du does.
func diskUsage(dir string) (total int64) {
	_ = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, _ error) error {
		var stat syscall.Stat_t
		if err := syscall.Lstat(path, &stat); err == nil { // The file may have been removed.
			total += stat.Blocks * 512
		}
		return nil
	})
	return total
}
