package system

import (
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/posthorn/posthorn/test/process"
)

// spans is an OTLP receiver, as collectors are.
type spans struct {
	*httptest.Server
	mu      sync.Mutex
	got     []*tracev1.Span
	service string
}

func newSpans(t *testing.T) *spans {
	s := &spans{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var export tracev1.TracesData // The same bytes as those of an ExportTraceServiceRequest.
		if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &export) != nil {
			http.Error(w, "not an export of traces", http.StatusBadRequest)
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, resource := range export.ResourceSpans {
			for _, a := range resource.Resource.Attributes {
				if a.Key == "service.name" {
					s.service = a.Value.GetStringValue()
				}
			}
			for _, scope := range resource.ScopeSpans {
				s.got = append(s.got, scope.Spans...)
			}
		}
	}))
	t.Cleanup(s.Close)
	return s
}

// of returns the spans of a kind and what is told of one of them.
func (s *spans) of(kind tracev1.Span_SpanKind) (list []*tracev1.Span) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, span := range s.got {
		if span.Kind == kind {
			list = append(list, span)
		}
	}
	return list
}

func attributes(span *tracev1.Span) string {
	var all []string
	for _, a := range span.Attributes {
		value := a.Value.GetStringValue()
		if value == "" {
			value = fmt.Sprint(a.Value.GetIntValue())
		}
		all = append(all, a.Key+"="+value)
	}
	return strings.Join(all, " ")
}

func parentOf(span *tracev1.Span) string {
	return "00-" + hex.EncodeToString(span.TraceId) + "-" + hex.EncodeToString(span.ParentSpanId) + "-01"
}

func nameOf(span *tracev1.Span) string {
	return "00-" + hex.EncodeToString(span.TraceId) + "-" + hex.EncodeToString(span.SpanId) + "-01"
}

// heard is a webhook that answers as told and keeps the traceparent of every attempt.
type heard struct {
	*httptest.Server
	mu      sync.Mutex
	answer  int
	parents []string
}

func newHeard(t *testing.T) *heard {
	h := &heard{answer: http.StatusServiceUnavailable}
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.parents = append(h.parents, r.Header.Get("Traceparent"))
		w.WriteHeader(h.answer)
	}))
	t.Cleanup(h.Close)
	return h
}

func (h *heard) set(answer int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answer = answer
}

func (h *heard) all() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]string(nil), h.parents...)
}

const caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// traced sends a call as an app does that has a trace of its own.
func traced(t *testing.T, p *posthorn, id string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, "http://"+p.Addr+"/v1/track", strings.NewReader(fmt.Sprintf(`{"userId":"ada","event":"Order Completed","messageId":%q}`, id))) //nolint:noctx // a test
	if err != nil {
		t.Fatal(err)
	}
	req.SetBasicAuth(key, "")
	req.Header.Set("Traceparent", caller)
	resp, err := http.DefaultClient.Do(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatal(resp, err)
	}
	resp.Body.Close()
}

// A trace goes from the caller over ingest to every attempt and on to the
// receiver, also when the process dies in between.
func TestTraceFromCallerToReceiver(t *testing.T) {
	collector, webhook := newSpans(t), newHeard(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", webhook.URL+"/hush-path", "")})
	traced(t, p, "m1")
	attempts := func(n int) func() error {
		return func() error {
			if got := len(collector.of(tracev1.Span_SPAN_KIND_CLIENT)); got < n {
				return fmt.Errorf("%d arrived", got)
			}
			return nil
		}
	}
	p.eventually("the first attempt's span", attempts(1))
	p.kill(syscall.SIGKILL)
	first := len(collector.of(tracev1.Span_SPAN_KIND_CLIENT))
	webhook.set(http.StatusOK)
	p.run()
	p.eventually("the span of an attempt of the next run", attempts(first+1))

	servers := collector.of(tracev1.Span_SPAN_KIND_SERVER)
	if len(servers) != 1 {
		t.Fatalf("%d spans of requests", len(servers))
	}
	ingest := servers[0]
	if parentOf(ingest) != caller || ingest.Name != "POST /v1/track" || collector.service != "posthorn" {
		t.Errorf("span %q of %q has the parent %s", ingest.Name, collector.service, parentOf(ingest))
	}
	if got, want := attributes(ingest), "http.request.method=POST http.route=/v1/track http.response.status_code=200 posthorn.calls=1 posthorn.namespace=default posthorn.source=web"; got != want {
		t.Errorf("ingest tells %s, want %s", got, want)
	}
	var told []string
	clients := collector.of(tracev1.Span_SPAN_KIND_CLIENT)
	for _, attempt := range clients {
		if attempt.Name != "POST default/crm" || hex.EncodeToString(attempt.TraceId) != hex.EncodeToString(ingest.TraceId) || hex.EncodeToString(attempt.ParentSpanId) != hex.EncodeToString(ingest.SpanId) {
			t.Errorf("attempt %q is not a child of %s but of %s", attempt.Name, nameOf(ingest), parentOf(attempt))
		}
		if attempt.EndTimeUnixNano <= attempt.StartTimeUnixNano || attempt.StartTimeUnixNano < ingest.StartTimeUnixNano {
			t.Errorf("the attempt lasts from %d to %d", attempt.StartTimeUnixNano, attempt.EndTimeUnixNano)
		}
		for _, word := range []string{"hush-path", "ada", "Order", key, secret} {
			if strings.Contains(attempt.String()+ingest.String(), word) {
				t.Errorf("a span tells %q", word)
			}
		}
		told = append(told, nameOf(attempt))
	}
	begin, end := clients[0], clients[len(clients)-1]
	if got := attributes(begin); !strings.Contains(got, "resend_count=0 ") || !strings.Contains(got, "posthorn.outcome=retried http.response.status_code=503") || !strings.Contains(got, "error.type=ServerError") || begin.Status.Code != tracev1.Status_STATUS_CODE_ERROR {
		t.Errorf("the first attempt tells %s, %v", got, begin.Status)
	}
	if got := attributes(end); !strings.Contains(got, "posthorn.message_id=m1 posthorn.outcome=delivered http.response.status_code=200") || strings.Contains(got, "error.type") || end.Status.Code != tracev1.Status_STATUS_CODE_UNSET {
		t.Errorf("the last attempt tells %s, %v", got, end.Status)
	}
	// A span that was not exported before the kill is one that the webhook knows alone.
	received := strings.Join(webhook.all(), " ")
	for _, name := range told {
		if !strings.Contains(received, name) {
			t.Errorf("the webhook was told %s, not %s", received, name)
		}
	}
}

// Who samples no trace still hands the caller's on; who traces nothing sends
// nothing of it, also for messages that were stored with a trace.
func TestTraceUnsampledAndOff(t *testing.T) {
	collector, webhook := newSpans(t), newHeard(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_TRACES_SAMPLER", "traceidratio")
	t.Setenv("OTEL_TRACES_SAMPLER_ARG", "0")
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", webhook.URL, "")})
	traced(t, p, "m1")
	p.eventually("an attempt", func() error {
		if len(webhook.all()) == 0 {
			return fmt.Errorf("none yet")
		}
		return nil
	})
	p.kill(syscall.SIGTERM)
	unsampled := webhook.all()
	for _, parent := range unsampled {
		if !strings.HasPrefix(parent, caller[:36]) || !strings.HasSuffix(parent, "-00") || parent[36:52] == caller[36:52] {
			t.Errorf("the webhook was told %q", parent)
		}
	}
	if n := len(collector.of(tracev1.Span_SPAN_KIND_CLIENT)) + len(collector.of(tracev1.Span_SPAN_KIND_SERVER)); n != 0 {
		t.Errorf("%d spans were exported", n)
	}

	t.Setenv("OTEL_SDK_DISABLED", "true")
	webhook.set(http.StatusOK)
	p.run()
	traced(t, p, "m2")
	p.ledger("crm")
	plain := webhook.all()[len(unsampled):]
	if len(plain) < 2 {
		t.Fatalf("%d attempts without tracing", len(plain))
	}
	for _, parent := range plain {
		if parent != "" {
			t.Errorf("the webhook was told %q without tracing", parent)
		}
	}
}

// A collector that is away harms nothing, and is told of in few lines.
func TestTraceWithoutCollector(t *testing.T) {
	webhook := newReceiver(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+process.FreeAddr())
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100")
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", webhook.URL, "")})
	for i := range 20 {
		traced(t, p, fmt.Sprint("m", i))
	}
	p.arrive(webhook, 20)
	p.eventually("a word on the collector", func() error {
		if !strings.Contains(p.log.String(), "span export failed") {
			return fmt.Errorf("nothing in the log")
		}
		return nil
	})
	begin := time.Now()
	p.kill(syscall.SIGTERM)
	if took := time.Since(begin); took > 30*time.Second {
		t.Errorf("stopping took %v", took)
	}
}

func TestTraceSettingsThatCannotWork(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
	for name, value := range map[string]string{
		"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_TRACES_EXPORTER": "jaeger", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "collector:4318",
		"OTEL_EXPORTER_OTLP_TIMEOUT": "10s", "OTEL_EXPORTER_OTLP_COMPRESSION": "zstd", "OTEL_EXPORTER_OTLP_HEADERS": "hush-token",
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, value)
			_, stderr, code := cli(t, "", "run", "--manifests", t.TempDir(), "--data", t.TempDir(), "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
			if code != 2 || !strings.Contains(stderr, name) || !strings.Contains(stderr, "use ") || strings.Contains(stderr, "hush") {
				t.Errorf("exit %d: %s", code, stderr)
			}
		})
	}
}
