package ingest

import (
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/internal/tracing"
)

// trace starts a request's span, as a child of the caller's span. The messages of the request carry
// the span context to their deliveries.
func (h *Handler) trace(q *request, path string, begin time.Time) {
	_, q.span = h.Tracer.Start(tracing.FromRequest(q.Context(), q.Header), q.Method+" "+path,
		trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(begin),
		trace.WithAttributes(attribute.String("http.request.method", q.Method), attribute.String("http.route", path)))
	q.traceParent = tracing.Parent(q.span)
}

// endTrace ends the span. The span holds no request data.
func (q *request) endTrace(bad *admission.Refusal) {
	status := 200
	if bad != nil {
		status = bad.Status
		q.span.SetAttributes(attribute.String("error.type", bad.Code))
		if status >= 500 { // An invalid call is not a server error.
			q.span.SetStatus(otelcodes.Error, bad.Message)
		}
	}
	q.span.SetAttributes(
		attribute.Int("http.response.status_code", status), attribute.Int("posthorn.calls", q.calls),
		attribute.String("posthorn.namespace", q.source.Namespace), attribute.String("posthorn.source", q.source.Name))
	q.span.End()
}
