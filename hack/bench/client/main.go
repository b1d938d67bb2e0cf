// Command client compares the Go client library with the vendor's, version 3,
// in one run: the cost of a call for its caller, and the calls per second at a
// server.
//
//	GOWORK=off go run . [-endpoint http://127.0.0.1:8080 -write-key demo-write-key]
//
// Without -endpoint there are two servers: one in this process that reads and accepts each
// request, and Posthorn in a separate process, which stores the calls. Figures are
// comparable within one run, not between machines.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	vendors "gopkg.in/segmentio/analytics-go.v3"

	"github.com/posthorn/posthorn/analytics"
)

var (
	endpoint = flag.String("endpoint", "", "URL of the server; empty: a server in this process, then Posthorn")
	writeKey = flag.String("write-key", "bench", "the write key")
	calls    = flag.Int("calls", 100_000, "calls of one run")
	callers  = flag.Int("callers", 4, "goroutines that send calls")
	runs     = flag.Int("runs", 3, "runs of each client, alternating")
	batch    = flag.Int("batch", 20, "calls that start a flush, for both clients; 0: the default of each")
	perCall  = flag.Int("bytes", 300, "approximate bytes of JSON per call")
)

// client is the common interface of both clients.
type client struct {
	name  string
	track func() error
	close func() error
	lost  *atomic.Int64
}

type figures struct {
	callNS, allocs, bytes, perSecond float64
	rejected, lost                   int64
}

func main() {
	flag.Parse()
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(out io.Writer) error {
	if *endpoint != "" {
		return compare(out, *endpoint, *endpoint)
	}
	server := httptest.NewServer(http.HandlerFunc(accept))
	defer server.Close()
	if err := compare(out, "a server in this process", server.URL); err != nil {
		return err
	}
	url, stop, err := startPosthorn()
	if err != nil {
		return err
	}
	defer stop()
	return compare(out, "Posthorn", url)
}

// compare runs both clients against a server, taking turns.
func compare(out io.Writer, server, url string) error {
	makers := []func(string) (client, error){ours, theirs}
	results := make([][]figures, len(makers))
	names := make([]string, len(makers))
	for range *runs {
		for i, newClient := range makers {
			c, err := newClient(url)
			if err != nil {
				return err
			}
			names[i] = c.name
			results[i] = append(results[i], measure(c))
		}
	}
	fmt.Fprintf(out, "To %s: %d calls of about %d bytes by %d callers, flush at %d, median of %d runs\n\n", server, *calls, *perCall, *callers, *batch, *runs)
	fmt.Fprintf(out, "%-24s %12s %12s %12s %14s %9s\n", "", "ns/call", "allocs/call", "B/call", "delivered/s", "lost")
	medians := make([]figures, len(makers))
	for i, r := range results {
		m := &medians[i]
		m.callNS, m.allocs = median(r, func(f figures) float64 { return f.callNS }), median(r, func(f figures) float64 { return f.allocs })
		m.bytes, m.perSecond = median(r, func(f figures) float64 { return f.bytes }), median(r, func(f figures) float64 { return f.perSecond })
		for _, f := range r {
			m.lost += f.lost + f.rejected
		}
		fmt.Fprintf(out, "%-24s %12.0f %12.2f %12.0f %14.0f %9d\n", names[i], m.callNS, m.allocs, m.bytes, m.perSecond, m.lost)
	}
	fmt.Fprintf(out, "%-24s %11.2fx %11.2fx %11.2fx %13.2fx\n", "ours / theirs", medians[0].callNS/medians[1].callNS,
		medians[0].allocs/medians[1].allocs, medians[0].bytes/medians[1].bytes, medians[0].perSecond/medians[1].perSecond)
	fmt.Fprintln(out)
	return nil
}

func median(r []figures, of func(figures) float64) float64 {
	values := make([]float64, len(r))
	for i, f := range r {
		values[i] = of(f)
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// measure sends all calls and closes the client. Allocations are those of the
// process from the first call to the end of Close, including background work and, for
// both clients, a server in this process.
func measure(c client) figures {
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var rejected, inCalls atomic.Int64
	start := time.Now()
	var group sync.WaitGroup
	for range *callers {
		group.Go(func() {
			began := time.Now()
			for range *calls / *callers {
				if c.track() != nil {
					rejected.Add(1)
				}
			}
			inCalls.Add(int64(time.Since(began)))
		})
	}
	group.Wait()
	if err := c.close(); err != nil {
		fmt.Fprintln(os.Stderr, c.name+":", err)
	}
	took := time.Since(start)
	runtime.ReadMemStats(&after)
	n := float64(*calls)
	return figures{
		callNS: float64(inCalls.Load()) / n, allocs: float64(after.Mallocs-before.Mallocs) / n, bytes: float64(after.TotalAlloc-before.TotalAlloc) / n,
		perSecond: (n - float64(rejected.Load()) - float64(c.lost.Load())) / took.Seconds(), rejected: rejected.Load(), lost: c.lost.Load(),
	}
}

func properties() map[string]interface{} {
	return map[string]interface{}{
		"orderId": "50314b8e9bcf000000000000", "total": 27.5, "currency": "EUR", "items": 3, "express": true,
		"note": strings.Repeat("x", max(*perCall-300, 0)),
	}
}

func ours(url string) (client, error) {
	lost := new(atomic.Int64)
	c := analytics.New(*writeKey, analytics.WithEndpoint(url), analytics.FlushAt(*batch), analytics.Blocking(),
		analytics.OnResult(func(r analytics.Result) {
			if r.Err != nil {
				lost.Add(1)
			}
		}))
	p := properties()
	return client{
		name: "posthorn analytics " + analytics.Version, lost: lost, close: c.Close,
		track: func() error {
			return c.Track(&analytics.Track{UserId: "019mr8mf4r", Event: "Order Completed", Properties: p})
		},
	}, nil
}

type callback struct{ lost *atomic.Int64 }

func (callback) Success(vendors.Message)          {}
func (c callback) Failure(vendors.Message, error) { c.lost.Add(1) }

func theirs(url string) (client, error) {
	lost := new(atomic.Int64)
	c, err := vendors.NewWithConfig(*writeKey, vendors.Config{Endpoint: url, BatchSize: *batch, Callback: callback{lost}, Logger: silent{}})
	if err != nil {
		return client{}, err
	}
	p := vendors.Properties(properties())
	return client{
		name: "vendor analytics-go " + vendors.Version, lost: lost, close: c.Close,
		track: func() error {
			return c.Enqueue(vendors.Track{UserId: "019mr8mf4r", Event: "Order Completed", Properties: p})
		},
	}, nil
}

type silent struct{}

func (silent) Logf(string, ...interface{})   {}
func (silent) Errorf(string, ...interface{}) {}

// accept reads a request to its end, checks that it is JSON, and accepts it.
func accept(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err == nil && !json.Valid(body) {
		err = errors.New("not JSON")
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	io.WriteString(w, `{"success":true}`) //nolint:errcheck // the client has disconnected
}
