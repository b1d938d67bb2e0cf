package dispatcher

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
)

// nowhere discards spans without encoding them; the rest is the cost of creating them.
type nowhere struct{}

func (nowhere) ExportSpans(context.Context, []sdktrace.ReadOnlySpan) error { return nil }
func (nowhere) Shutdown(context.Context) error                             { return nil }

// BenchmarkTracing measures the cost of tracing per message from its acceptance to its
// delivery: without tracing, with all traces dropped by sampling, and with all traces kept. The
// processor time includes sender and receiver.
func BenchmarkTracing(b *testing.B) {
	tracer := func(ratio float64) trace.Tracer {
		provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(nowhere{}), sdktrace.WithSampler(sdktrace.TraceIDRatioBased(ratio)))
		b.Cleanup(func() { _ = provider.Shutdown(context.Background()) })
		return provider.Tracer("bench")
	}
	for _, mode := range []struct {
		name   string
		tracer trace.Tracer
	}{{"off", nil}, {"sampled=0", tracer(0)}, {"sampled=1", tracer(1)}} {
		b.Run(mode.name, func(b *testing.B) { benchmarkPipeline(b, mode.tracer) })
	}
}

func benchmarkPipeline(b *testing.B, tracer trace.Tracer) {
	var arrived atomic.Int64
	sink := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { arrived.Add(1) }))
	defer sink.Close()
	policy, err := egress.ParsePolicy([]string{"127.0.0.0/8"})
	if err != nil {
		b.Fatal(err)
	}
	d, err := New(Options{DataDir: b.TempDir(), ServerOptions: ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0"},
		Egress: policy, Tracer: tracer, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			b.Error(err)
		}
	}()
	config := liveconfigtest.Config(sink.URL)
	config.Destinations[0].Delivery.MaxInFlight = 64
	config.Destinations[0].Signing = nil
	d.Set("shop", liveconfigtest.Encode(b, config))
	d.Synced()

	const size = 20
	const call = `{"type":"track","userId":"u1","event":"Order Completed","properties":{"total":99.5,"currency":"EUR","items":["a","b","c"]}}`
	body, _ := json.Marshal(struct {
		Batch []json.RawMessage `json:"batch"`
	}{repeated(call, size)})
	var before, after syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &before)
	b.ReportAllocs()
	b.ResetTimer()
	for sent := 0; sent < b.N; sent += size {
		req, _ := http.NewRequest(http.MethodPost, fmt.Sprintf("http://%s/v1/batch", d.Addr()), bytes.NewReader(body))
		req.SetBasicAuth(liveconfigtest.Key, "")
		req.Header.Set("Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
		resp, err := http.DefaultClient.Do(req)
		if err != nil || resp.StatusCode != http.StatusOK {
			b.Fatal(resp, err)
		}
		resp.Body.Close()
	}
	for arrived.Load() < int64(b.N) {
		time.Sleep(time.Millisecond)
	}
	b.StopTimer()
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &after)
	cpu := time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
	b.ReportMetric(float64(cpu.Nanoseconds())/float64(b.N), "cpu-ns/op")
}

func repeated(call string, n int) (all []json.RawMessage) {
	for range n {
		all = append(all, json.RawMessage(call))
	}
	return all
}
