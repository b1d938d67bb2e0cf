package analytics_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/analytics"
)

// These benchmarks measure the cost of a call for its caller. The requests use an HTTP client
// without a network, so that they do not slow down the caller.

func benchmarkClient() *analytics.Client {
	discard := roundTripper(func(r *http.Request) (*http.Response, error) {
		io.Copy(io.Discard, r.Body) //nolint:errcheck // memory
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(`{"success":true}`)),
			Request: r}, nil
	})
	return analytics.New("key", analytics.WithEndpoint("http://a.test"), analytics.WithHTTPClient(&http.Client{Transport: discard}),
		analytics.Blocking())
}

func benchmarkCall() *analytics.Track {
	return &analytics.Track{
		UserId: "019mr8mf4r", Event: "Order Completed",
		Properties: object{"orderId": "50314b8e9bcf000000000000", "total": 27.5, "currency": "EUR", "coupon": nil, "items": 3, "express": true},
		Context:    object{"ip": "192.0.2.1", "userAgent": "Mozilla/5.0 (X11; Linux x86_64)"},
	}
}

func BenchmarkTrack(b *testing.B) {
	client, call := benchmarkClient(), benchmarkCall()
	b.ReportAllocs()
	for b.Loop() {
		if err := client.Track(call); err != nil {
			b.Fatal(err)
		}
	}
	client.Close()
}

func BenchmarkTrackParallel(b *testing.B) {
	client, call := benchmarkClient(), benchmarkCall()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := client.Track(call); err != nil {
				b.Error(err)
			}
		}
	})
	client.Close()
}

// BenchmarkTrackQueueFull measures a call during an outage.
func BenchmarkTrackQueueFull(b *testing.B) {
	unavailable := roundTripper(func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusServiceUnavailable, Header: http.Header{"Retry-After": {"60"}}, Body: http.NoBody,
			Request: r}, nil
	})
	client := analytics.New("key", analytics.WithEndpoint("http://a.test"), analytics.WithHTTPClient(&http.Client{Transport: unavailable}),
		analytics.QueueLimit(1))
	client.Logger = nil
	call := benchmarkCall()
	must(b, client.Track(call))
	b.ReportAllocs()
	for b.Loop() {
		if client.Track(call) == nil {
			b.Fatal("call with a full queue: got no error, want one")
		}
	}
}
