package peer

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// groups lets handlers wait for the end of a group, as calls wait for a commit of the log.
type groups struct{ current atomic.Pointer[chan struct{}] }

func newGroups(b *testing.B, every time.Duration) *groups {
	g := &groups{}
	next := func() *chan struct{} { c := make(chan struct{}); return &c }
	g.current.Store(next())
	go func() {
		for tick := time.NewTicker(every); b.Context().Err() == nil; <-tick.C {
			close(*g.current.Swap(next()))
		}
	}()
	return g
}

func (g *groups) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	<-*g.current.Load()
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"success":true}`)
}

// BenchmarkForward measures the CPU time of both processes for a single call of 1 KB that a standby forwards: the
// whole program's, with 64 senders and an owner that answers every 4 ms.
func BenchmarkForward(b *testing.B) {
	g := newGroups(b, 4*time.Millisecond)
	o := serveOwner(b, g.ServeHTTP)
	f, _ := newForwarder(b)
	setOwner(f, o.Announce())
	body := strings.Repeat("a", 1000)
	for name, h := range map[string]http.Handler{"forwarded": f, "handled": g} {
		b.Run(name, func(b *testing.B) {
			b.SetParallelism((64 + runtime.GOMAXPROCS(0) - 1) / runtime.GOMAXPROCS(0))
			b.ReportAllocs()
			before := cpuTime()
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					r := httptest.NewRequest(http.MethodPost, "/v1/track", strings.NewReader(body)) //nolint:noctx // without an end
					r.Header.Set("Authorization", "Basic d3JpdGUta2V5LW9mLWEtc291cmNlOg==")
					r.Header.Set("Content-Type", "application/json")
					w := httptest.NewRecorder()
					if h.ServeHTTP(w, r); w.Code != http.StatusOK {
						b.Error(fmt.Sprint("got ", w.Code, " ", w.Body))
						return
					}
				}
			})
			b.ReportMetric(float64((cpuTime()-before).Nanoseconds())/1e3/float64(b.N), "cpu-us/op")
		})
	}
}

// cpuTime is the CPU time of the program.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
