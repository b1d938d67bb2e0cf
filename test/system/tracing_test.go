package system

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"

	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// spans is an OTLP receiver.
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
		var export tracev1.TracesData // It has the encoding of an ExportTraceServiceRequest.
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

// of returns the spans of a kind.
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

// traceReceiver is a webhook with a settable status that records the traceparent of every
// attempt.
type traceReceiver struct {
	*httptest.Server
	mu      sync.Mutex
	answer  int
	parents []string
}

func newTraceReceiver(t *testing.T) *traceReceiver {
	h := &traceReceiver{answer: http.StatusServiceUnavailable}
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.parents = append(h.parents, r.Header.Get("Traceparent"))
		w.WriteHeader(h.answer)
	}))
	t.Cleanup(h.Close)
	return h
}

func (h *traceReceiver) set(answer int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answer = answer
}

func (h *traceReceiver) all() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]string(nil), h.parents...)
}

const caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// sendTraced sends a call with the traceparent of its caller.
func sendTraced(t *testing.T, p *posthorn, id string) {
	t.Helper()
	//nolint:noctx // a test
	req, err := http.NewRequest(http.MethodPost, "http://"+p.Addr+"/v1/track",
		strings.NewReader(fmt.Sprintf(`{"userId":"ada","event":"Order Completed","messageId":%q}`, id)))
	if err != nil {
		t.Fatal(err)
	}
	req.SetBasicAuth(key, "")
	req.Header.Set("Traceparent", caller)
	resp, err := http.DefaultClient.Do(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("call: got answer %v and error %v, want 200", resp, err)
	}
	resp.Body.Close()
}

// A trace includes the caller, ingest, every attempt and the receiver, even if the process
// is killed in between.
func TestTraceFromCallerToReceiver(t *testing.T) {
	collector, webhook := newSpans(t), newTraceReceiver(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", webhook.URL+"/hush-path", "")})
	sendTraced(t, p, "m1")
	wait.For(p.T, "the spans of the call and of the first attempt", func() error {
		if calls, attempts := len(collector.of(tracev1.Span_SPAN_KIND_SERVER)), len(collector.of(tracev1.Span_SPAN_KIND_CLIENT)); calls == 0 ||
			attempts == 0 {
			return fmt.Errorf("got %d and %d spans", calls, attempts)
		}
		return nil
	})
	p.End(syscall.SIGKILL)
	webhook.set(http.StatusOK)
	p.Launch()
	var end *tracev1.Span
	wait.For(p.T, "the span of the delivery by the next run", func() error {
		for _, end = range collector.of(tracev1.Span_SPAN_KIND_CLIENT) {
			if strings.Contains(attributes(end), "posthorn.outcome=delivered") {
				return nil
			}
		}
		return errors.New("no span yet")
	})

	servers := collector.of(tracev1.Span_SPAN_KIND_SERVER)
	if len(servers) != 1 {
		t.Fatalf("spans of requests: got %d, want 1", len(servers))
	}
	ingest := servers[0]
	check.Equal(t, "parent of the ingest span", parentOf(ingest), caller)
	check.Equal(t, "name of the ingest span", ingest.Name, "POST /v1/track")
	check.Equal(t, "service.name", collector.service, "posthorn")
	check.Equal(t, "attributes of the ingest span", attributes(ingest), "http.request.method=POST http.route=/v1/track http.response.status_code=200 posthorn.calls=1 posthorn.namespace=default posthorn.source=web")
	var names []string
	clients := collector.of(tracev1.Span_SPAN_KIND_CLIENT)
	for _, attempt := range clients {
		if attempt.Name != "POST default/crm" || hex.EncodeToString(attempt.TraceId) != hex.EncodeToString(ingest.TraceId) ||
			hex.EncodeToString(attempt.ParentSpanId) != hex.EncodeToString(ingest.SpanId) {
			t.Errorf("attempt: got span %q with the parent %s, want POST default/crm with the parent %s", attempt.Name, parentOf(attempt), nameOf(ingest))
		}
		if attempt.EndTimeUnixNano <= attempt.StartTimeUnixNano || attempt.StartTimeUnixNano < ingest.StartTimeUnixNano {
			t.Errorf("times of the attempt: got %d to %d, want a duration after %d", attempt.StartTimeUnixNano, attempt.EndTimeUnixNano, ingest.StartTimeUnixNano)
		}
		for _, word := range []string{"hush-path", "ada", "Order", key, secret} {
			if strings.Contains(attempt.String()+ingest.String(), word) {
				t.Errorf("a span contains %q", word)
			}
		}
		names = append(names, nameOf(attempt))
	}
	begin := clients[0]
	if got := attributes(begin); !strings.Contains(got, "resend_count=0 ") ||
		!strings.Contains(got, "posthorn.outcome=retried http.response.status_code=503") || !strings.Contains(got, "error.type=ServerError") ||
		begin.Status.Code != tracev1.Status_STATUS_CODE_ERROR {
		t.Errorf("first attempt: got attributes %s and status %v, want a retried ServerError", got, begin.Status)
	}
	if got := attributes(end); !strings.Contains(got, "posthorn.message_id=m1 posthorn.outcome=delivered http.response.status_code=200") || strings.Contains(got, "error.type") || end.Status.Code != tracev1.Status_STATUS_CODE_UNSET {
		t.Errorf("last attempt: got attributes %s and status %v, want a delivery of m1", got, end.Status)
	}
	// The webhook also received the spans that were not exported before the kill.
	received := strings.Join(webhook.all(), " ")
	for _, name := range names {
		if !strings.Contains(received, name) {
			t.Errorf("traceparents at the webhook: got %s, want one with %s", received, name)
		}
	}
}

// Without sampling the caller's trace is still propagated. With tracing disabled no
// traceparent is sent, even for messages that were stored with one.
func TestTraceUnsampledAndDisabled(t *testing.T) {
	collector, webhook := newSpans(t), newTraceReceiver(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_TRACES_SAMPLER", "traceidratio")
	t.Setenv("OTEL_TRACES_SAMPLER_ARG", "0")
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", webhook.URL, "")})
	sendTraced(t, p, "m1")
	wait.For(p.T, "an attempt", func() error {
		if len(webhook.all()) == 0 {
			return fmt.Errorf("none yet")
		}
		return nil
	})
	p.End(syscall.SIGTERM)
	unsampled := webhook.all()
	for _, parent := range unsampled {
		if !strings.HasPrefix(parent, caller[:36]) || !strings.HasSuffix(parent, "-00") || parent[36:52] == caller[36:52] {
			t.Errorf("traceparent without sampling: got %q, want the caller's trace with another span, not sampled", parent)
		}
	}
	check.Equal(t, "exported spans of attempts", len(collector.of(tracev1.Span_SPAN_KIND_CLIENT)), 0)
	check.Equal(t, "exported spans of requests", len(collector.of(tracev1.Span_SPAN_KIND_SERVER)), 0)

	t.Setenv("OTEL_SDK_DISABLED", "true")
	webhook.set(http.StatusOK)
	p.Launch()
	sendTraced(t, p, "m2")
	p.ledger("crm")
	plain := webhook.all()[len(unsampled):]
	if len(plain) < 2 {
		t.Fatalf("attempts without tracing: got %d, want at least 2", len(plain))
	}
	for _, parent := range plain {
		check.Equal(t, "traceparent without tracing", parent, "")
	}
}

// Without a reachable collector calls are delivered, and the failed exports are logged.
func TestTraceWithoutCollector(t *testing.T) {
	webhook := newReceiver(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+process.FreeAddr())
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100")
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", webhook.URL, "")})
	for i := range 20 {
		sendTraced(t, p, fmt.Sprint("m", i))
	}
	p.arrive(webhook, 20)
	wait.For(p.T, "a log message about the collector", func() error {
		if !strings.Contains(p.Output.String(), "span export failed") {
			return fmt.Errorf("the log has no such message")
		}
		return nil
	})
	p.End(syscall.SIGTERM)
}

func TestInvalidTraceSettings(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
	for name, value := range map[string]string{
		"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_TRACES_EXPORTER": "jaeger", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "collector:4318",
		"OTEL_EXPORTER_OTLP_TIMEOUT": "10s", "OTEL_EXPORTER_OTLP_COMPRESSION": "zstd", "OTEL_EXPORTER_OTLP_HEADERS": "hush-token",
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, value)
			_, stderr, code := cli(t, "", "run", "-f", t.TempDir(), "--data", t.TempDir(), "--listen", "127.0.0.1:0", "--admin-listen",
				"127.0.0.1:0")
			if code != 2 || !strings.Contains(stderr, name) || !strings.Contains(stderr, "use ") || strings.Contains(stderr, "hush") {
				t.Errorf("start with %s=%s: got exit code %d and %s, want 2, the variable and the fix, without its value", name, value, code, stderr)
			}
		})
	}
}
