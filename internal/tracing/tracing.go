// Package tracing carries a trace from the caller of the tracking API through the queue to the
// receivers, in W3C's format (traceparent). It does nothing without a Tracer, and it does not know
// how spans are exported.
package tracing

import (
	"context"
	"net/http"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Header is the name of the header with the span context.
const Header = "Traceparent"

const key = "traceparent"

// FromRequest returns a context with the span of a request's headers, if there is one. A malformed
// header is ignored, as W3C requires.
func FromRequest(ctx context.Context, h http.Header) context.Context {
	return propagation.TraceContext{}.Extract(ctx, propagation.HeaderCarrier(h))
}

// From returns a context with the span of traceparent, if there is one.
func From(ctx context.Context, traceparent string) context.Context {
	if traceparent == "" {
		return ctx
	}
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{key: traceparent})
}

// Parent returns the traceparent of a span.
func Parent(span trace.Span) string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(trace.ContextWithSpan(context.Background(), span), carrier)
	return carrier[key]
}
