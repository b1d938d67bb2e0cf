// Package otlp exports spans by OpenTelemetry's protocol over HTTP, as its environment variables
// configure it.
package otlp

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"golang.org/x/net/http/httpguts"
	"google.golang.org/protobuf/proto"
)

// NewTracer makes a Tracer that exports spans as configured by OpenTelemetry's environment
// variables. It is nil, which disables tracing, unless they name an endpoint; everything else has
// the SDK's defaults. stop exports the remaining spans. An error names a variable. version is
// Posthorn's, pod the name of the process.
func NewTracer(ctx context.Context, version, pod string, log *slog.Logger) (tracer trace.Tracer, stop func(), err error) {
	exporter := cmp.Or(os.Getenv("OTEL_TRACES_EXPORTER"), "otlp")
	_, endpoint := env("ENDPOINT")
	switch {
	case strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") || exporter == "none" || endpoint == "":
		return nil, func() {}, nil
	case exporter != "otlp":
		return nil, nil, fmt.Errorf("OTEL_TRACES_EXPORTER %q: use otlp or none", exporter)
	}
	uploads, err := newClient(version)
	if err != nil {
		return nil, nil, err
	}
	about, err := resource.New(ctx,
		resource.WithTelemetrySDK(),
		resource.WithAttributes(attribute.String("service.name", "posthorn"), attribute.String("service.version", version),
			attribute.String("service.instance.id", pod)),
		resource.WithFromEnv())
	if err != nil {
		return nil, nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	otel.SetLogger(logr.FromSlogHandler(log.Handler()))
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("span export failed", "error", err) }))
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(otlptrace.NewUnstarted(uploads)), sdktrace.WithResource(about))
	return provider.Tracer("github.com/posthorn/posthorn"), func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTracing)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			log.Warn("export of the last spans failed", "error", err)
		}
	}, nil
}

// stopTracing bounds the export of the last spans at shutdown.
const stopTracing = 3 * time.Second

// env reads a variable of the exporter: the variable for traces takes precedence over the one
// for all signals.
func env(name string) (variable, value string) {
	for _, prefix := range []string{"OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"} {
		if variable = prefix + name; os.Getenv(variable) != "" {
			return variable, strings.TrimSpace(os.Getenv(variable))
		}
	}
	return variable, ""
}

// client posts spans to a collector as OTLP over HTTP. The SDK's own client would link gRPC,
// which adds 32 MB to the binary and 20 MB to the resident memory.
type client struct {
	url     string
	header  http.Header
	gzip    bool
	timeout time.Duration
	http    *http.Client
}

func newClient(version string) (*client, error) {
	if name, v := env("PROTOCOL"); v != "" && v != "http/protobuf" {
		return nil, fmt.Errorf("%s %q: use http/protobuf, and the collector's port for it (4318)", name, v)
	}
	c := &client{timeout: 10 * time.Second, header: http.Header{"Content-Type": {"application/x-protobuf"},
		"User-Agent": {"posthorn/" + version}}}
	name, v := env("ENDPOINT")
	u, err := url.Parse(v)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("%s: use a full URL, for example http://collector.monitoring:4318", name)
	}
	if !strings.Contains(name, "TRACES") {
		u = u.JoinPath("v1", "traces")
	}
	c.url = u.String()
	name, v = env("HEADERS")
	for pair := range strings.SplitSeq(v, ",") {
		key, value, ok := strings.Cut(pair, "=")
		key = strings.TrimSpace(key)
		value, err := url.PathUnescape(strings.TrimSpace(value))
		if strings.TrimSpace(pair) == "" {
			continue
		}
		if !ok || err != nil || !httpguts.ValidHeaderFieldName(key) || !httpguts.ValidHeaderFieldValue(value) {
			return nil, fmt.Errorf("%s: use NAME=VALUE,NAME=VALUE with values percent-encoded", name)
		}
		c.header.Set(key, value)
	}
	if name, v = env("TIMEOUT"); v != "" {
		ms, err := strconv.Atoi(v)
		if err != nil || ms <= 0 {
			return nil, fmt.Errorf("%s %q: use milliseconds, for example 10000", name, v)
		}
		c.timeout = time.Duration(ms) * time.Millisecond
	}
	switch name, v = env("COMPRESSION"); v {
	case "", "none":
	case "gzip":
		c.gzip = true
		c.header.Set("Content-Encoding", "gzip")
	default:
		return nil, fmt.Errorf("%s %q: use gzip or none", name, v)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	if name, v = env("CERTIFICATE"); v != "" {
		pem, err := os.ReadFile(v)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		transport.TLSClientConfig.RootCAs = x509.NewCertPool()
		if !transport.TLSClientConfig.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s: %s holds no certificate in PEM form", name, v)
		}
	}
	if name, v = env("CLIENT_CERTIFICATE"); v != "" {
		_, key := env("CLIENT_KEY")
		pair, err := tls.LoadX509KeyPair(v, key)
		if err != nil {
			return nil, fmt.Errorf("%s and its CLIENT_KEY: %w", name, err)
		}
		transport.TLSClientConfig.Certificates = []tls.Certificate{pair}
	}
	c.http = &http.Client{Transport: transport}
	return c, nil
}

// Start implements otlptrace.Client.
func (c *client) Start(context.Context) error { return nil }

// Stop implements otlptrace.Client.
func (c *client) Stop(context.Context) error {
	c.http.CloseIdleConnections()
	return nil
}

// UploadTraces implements otlptrace.Client. It retries temporary errors of the collector until the
// timeout.
func (c *client) UploadTraces(ctx context.Context, spans []*tracev1.ResourceSpans) error {
	// TracesData has the same encoding as an ExportTraceServiceRequest.
	body, err := proto.Marshal(&tracev1.TracesData{ResourceSpans: spans})
	if err != nil {
		return err
	}
	if c.gzip {
		var b bytes.Buffer
		w := gzip.NewWriter(&b)
		_, err := w.Write(body)
		if err := errors.Join(err, w.Close()); err != nil {
			return err
		}
		body = b.Bytes()
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	for pause := time.Second; ; pause *= 2 {
		again, err := c.post(ctx, body)
		if err == nil || !again {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

func (c *client) post(ctx context.Context, body []byte) (again bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return false, err
	}
	req.Header = c.header.Clone()
	resp, err := c.http.Do(req)
	if err != nil {
		return true, err
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
	switch resp.StatusCode {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		again = true
	default:
		if resp.StatusCode/100 == 2 {
			return false, nil
		}
	}
	return again, fmt.Errorf("the collector answered %s", resp.Status)
}
