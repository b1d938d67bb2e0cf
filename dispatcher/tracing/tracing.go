// Package tracing carries a trace from the caller of the tracking API over the
// queue to the receivers, in W3C's form (traceparent). Without a Tracer nothing
// of it runs. Who exports the spans is decided outside of the dispatcher.
package tracing

import (
	"context"
	"net/http"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Header is the name of the header that names a span.
const Header = "Traceparent"

const key = "traceparent"

// FromRequest returns a context with the span that a request's headers name, if
// they name one. A malformed header is ignored, as W3C asks.
func FromRequest(ctx context.Context, h http.Header) context.Context {
	return propagation.TraceContext{}.Extract(ctx, propagation.HeaderCarrier(h))
}

// From returns a context with the span that traceparent names, if it names one.
func From(ctx context.Context, traceparent string) context.Context {
	if traceparent == "" {
		return ctx
	}
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{key: traceparent})
}

// Parent names a span to what comes after it.
func Parent(span trace.Span) string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(trace.ContextWithSpan(context.Background(), span), carrier)
	return carrier[key]
}
