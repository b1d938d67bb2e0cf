// Command http compares Posthorn's HTTP client with net/http's, over HTTP/1.1
// and HTTP/2, and with fasthttp: the cost of a POST of 1 KB for its sender, and the results
// with faulty receivers.
//
//	GOWORK=off go run . [-time 2s -rounds 3]
//
// The clients run in turn, and the figures are medians over the rounds. Ratios are
// comparable within one run; times are not comparable between machines.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"
)

var (
	slice   = flag.Duration("time", 2*time.Second, "duration of a client's run in each round")
	rounds  = flag.Int("rounds", 3, "number of runs of each client")
	workers = flag.Int("workers", 64, "goroutines that post")
)

func main() {
	if role := os.Getenv("POSTHORN_BENCH_ROLE"); role != "" {
		serve(role)
		return
	}
	flag.Parse()
	log.SetOutput(io.Discard) // net/http logs events that the tables show.
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(out io.Writer) error {
	for _, c := range []struct {
		role, title string
		clients     []func(addr string) *client
	}{
		{"lean", "To a minimal receiver", []func(string) *client{posthorn, netHTTP, fastHTTP}},
		{"nethttp", "To a net/http server", []func(string) *client{posthorn, netHTTP, netHTTP2, fastHTTP}},
	} {
		addr, stop, err := spawn(c.role)
		if err != nil {
			return err
		}
		err = speed(out, c.title, addr, c.clients)
		stop()
		if err != nil {
			return err
		}
	}
	return faults(out)
}

// spawn starts a receiver in a separate process.
func spawn(role string) (addr string, stop func(), err error) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "POSTHORN_BENCH_ROLE="+role)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return "", nil, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return "", nil, err
	}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	addr, err = bufio.NewReader(stdout).ReadString('\n')
	return strings.TrimSpace(addr), func() { _ = stdin.Close(); _ = cmd.Wait() }, err
}

// serve runs a receiver that answers 200 until its stdin ends.
func serve(role string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(l.Addr())
	if role == "nethttp" {
		go netHTTPServer(func() {}).Serve(l) //nolint:errcheck // it ends with the process
	} else {
		go accept(l, func(_ int, c net.Conn) {
			for r := bufio.NewReader(c); skipRequest(r) == nil; {
				if _, err := io.WriteString(c, ok); err != nil {
					return
				}
			}
		})
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// netHTTPServer is a net/http server that calls wait before it answers 200.
func netHTTPServer(wait func()) *http.Server {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{Protocols: &protocols, ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		wait()
		_, _ = io.WriteString(w, "ok")
	})}
}

// accept calls handle for every connection, numbered from 0, and then closes it.
func accept(l net.Listener, handle func(n int, c net.Conn)) {
	for n := 0; ; n++ {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			handle(n, c)
		}()
	}
}

// skipRequest reads a request with a Content-Length.
func skipRequest(r *bufio.Reader) error {
	length := 0
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return err
		}
		if len(line) == 2 {
			_, err = r.Discard(length)
			return err
		}
		if name, value, _ := bytes.Cut(line, []byte(":")); bytes.EqualFold(name, []byte("Content-Length")) {
			length, _ = strconv.Atoi(string(bytes.TrimSpace(value)))
		}
	}
}

type figures struct{ cpu, allocs, bytes, rate float64 }

// speed measures the clients in turns.
func speed(out io.Writer, title, addr string, clients []func(string) *client) error {
	results := make([][]figures, len(clients))
	names := make([]string, len(clients))
	for range *rounds {
		for i, newClient := range clients {
			c := newClient(addr)
			names[i] = c.name
			f, err := measure(c)
			c.close()
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			results[i] = append(results[i], f)
		}
	}
	fmt.Fprintf(out, "%s: POSTs of 1 KB by %d goroutines, medians of %d\n\n", title, *workers, *rounds)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "client\tCPU per POST\tallocations\tbytes\tPOSTs/s\tof the first")
	first := median(results[0], func(f figures) float64 { return f.rate })
	for i, r := range results {
		rate := median(r, func(f figures) float64 { return f.rate })
		fmt.Fprintf(w, "%s\t%.1f us\t%.1f\t%.0f\t%.0f\t%.2f\n", names[i], median(r, func(f figures) float64 { return f.cpu }),
			median(r, func(f figures) float64 { return f.allocs }), median(r, func(f figures) float64 { return f.bytes }), rate, rate/first)
	}
	fmt.Fprintln(w)
	return w.Flush()
}

func median(r []figures, of func(figures) float64) float64 {
	values := make([]float64, len(r))
	for i, f := range r {
		values[i] = of(f)
	}
	slices.SortFunc(values, cmp.Compare)
	return values[len(values)/2]
}

// measure posts from all workers, after each has opened its connection.
func measure(c *client) (figures, error) {
	body := bytes.Repeat([]byte("x"), 1024)
	var count atomic.Int64
	var failed atomic.Pointer[error]
	post := func() bool {
		status, err := c.post(time.Now().Add(5*time.Second), body)
		if err == nil && status != 200 {
			err = fmt.Errorf("answered %d", status)
		}
		if err != nil {
			failed.Store(&err)
		}
		return err == nil
	}
	var warm, done sync.WaitGroup
	begin := make(chan struct{})
	var end time.Time
	for range *workers {
		warm.Add(1)
		done.Go(func() {
			post()
			warm.Done()
			<-begin
			n := int64(0)
			for time.Now().Before(end) && post() {
				n++
			}
			count.Add(n)
		})
	}
	warm.Wait()
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu, began := ownCPU(), time.Now()
	end = began.Add(*slice)
	close(begin)
	done.Wait()
	took := time.Since(began)
	cpu = ownCPU() - cpu
	runtime.ReadMemStats(&after)
	if err := failed.Load(); err != nil {
		return figures{}, *err
	}
	n := float64(count.Load())
	return figures{
		cpu: float64(cpu.Nanoseconds()) / 1e3 / n, allocs: float64(after.Mallocs-before.Mallocs) / n,
		bytes: float64(after.TotalAlloc-before.TotalAlloc) / n, rate: n / took.Seconds(),
	}, nil
}

func ownCPU() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
