package otlp

import (
	"bytes"
	"compress/gzip"
	"encoding/pem"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// A collector with a private certificate that wants a token, takes gzip, and is
// not ready at first, gets every span.
func TestSpansReachTheCollector(t *testing.T) {
	var posts, spans atomic.Int64
	collector := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if posts.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		var data tracev1.TracesData
		unzipped, err := gzip.NewReader(r.Body)
		if err != nil {
			t.Error(err)
			return
		}
		body, err := io.ReadAll(unzipped)
		if err != nil || proto.Unmarshal(body, &data) != nil || r.Header.Get("Authorization") != "Bearer a,b" ||
			r.Header.Get("X-Scope") != "shop" || r.URL.Path != "/v1/traces" {
			t.Errorf("%s %v: %v", r.URL.Path, r.Header, err)
		}
		for _, s := range data.ResourceSpans[0].ScopeSpans {
			spans.Add(int64(len(s.Spans)))
		}
	}))
	t.Cleanup(collector.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: collector.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", ca)
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20a%2Cb, X-Scope=shop")
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "gzip")
	var log bytes.Buffer
	tracer, stop, err := NewTracer(t.Context(), "dev", "p0", slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil || tracer == nil {
		t.Fatal(tracer, err)
	}
	for range 3 {
		_, span := tracer.Start(t.Context(), "x")
		span.End()
	}
	stop()
	if spans.Load() != 3 || log.Len() != 0 {
		t.Errorf("%d spans in %d posts; %s", spans.Load(), posts.Load(), log.String())
	}
}
