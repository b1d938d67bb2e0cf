package delivery

import (
	"context"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/internal/tracing"
)

// startTrace starts an attempt's span, as a child of the span of the message's acceptance, and sends its
// context to the receiver. A message without a span starts a new trace.
func startTrace(ctx context.Context, tracer trace.Tracer, w *worker, started time.Time) trace.Span {
	p := &w.post
	_, span := tracer.Start(tracing.From(ctx, p.message.TraceParent), "POST "+p.target.destination.key,
		trace.WithSpanKind(trace.SpanKindClient), trace.WithTimestamp(started))
	if parent := tracing.Parent(span); parent != "" {
		w.headers = append(w.headers, egress.Header{Name: tracing.Header, Value: parent})
	}
	return span
}

// endTrace ends the span. The URL is a credential and is not recorded.
func endTrace(span trace.Span, p *post, r *ended, s outcome) {
	if !span.IsRecording() {
		return
	}
	d := p.target.destination
	_, source := split(p.message.Lane.Source)
	span.SetAttributes(
		attribute.String("http.request.method", "POST"), attribute.Int("http.request.resend_count", p.message.Attempt),
		attribute.String("posthorn.namespace", d.namespace), attribute.String("posthorn.source", source),
		attribute.String("posthorn.destination", d.name), attribute.String("posthorn.endpoint", p.target.name),
		attribute.String("posthorn.message_id", strings.ToValidUTF8(p.message.ID, "\ufffd")), attribute.String("posthorn.outcome", s.String()))
	if n := len(p.batch); n > 0 {
		span.SetAttributes(attribute.Int("messaging.batch.message_count", n))
	}
	if r.StatusCode != 0 {
		span.SetAttributes(attribute.Int("http.response.status_code", r.StatusCode))
	}
	if r.RemoteAddr != "" {
		span.SetAttributes(attribute.String("network.peer.address", r.RemoteAddr))
	}
	if r.outcome().Failed() {
		span.SetAttributes(attribute.String("error.type", string(r.Reason)))
		span.SetStatus(codes.Error, r.Message)
	}
	span.End(trace.WithTimestamp(r.at))
}
