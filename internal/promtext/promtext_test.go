package promtext

import (
	"compress/gzip"
	"io"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

func write(w *Writer) {
	w.Family("one_total", Counter, "One.")
	w.Sample(3, NewLabels("namespace", `a "quoted" \ value`, "name", "x\ny"), "outcome", "delivered")
	w.Sample(0.25, "", "outcome", "failed")
	w.Family("two", Gauge, "Two.")
	w.Sample(1<<53-1, "")
	w.Family("three_seconds", Histogram, "Three.")
	w.Histogram([]float64{.5, 1}, []uint64{1, 2, 4}, 9.5, NewLabels("name", "a"))
	w.Histogram([]float64{.5, 1}, nil, 0, NewLabels("name", "b"))
}

func TestWriter(t *testing.T) {
	var out strings.Builder
	w := NewWriter(&out)
	write(w)
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	const want = `# HELP one_total One.
# TYPE one_total counter
one_total{namespace="a \"quoted\" \\ value",name="x\ny",outcome="delivered"} 3
one_total{outcome="failed"} 0.25
# HELP two Two.
# TYPE two gauge
two 9007199254740991
# HELP three_seconds Three.
# TYPE three_seconds histogram
three_seconds_bucket{name="a",le="0.5"} 1
three_seconds_bucket{name="a",le="1"} 3
three_seconds_bucket{name="a",le="+Inf"} 7
three_seconds_sum{name="a"} 9.5
three_seconds_count{name="a"} 7
three_seconds_bucket{name="b",le="+Inf"} 0
three_seconds_sum{name="b"} 0
three_seconds_count{name="b"} 0
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("output (-want +got):\n%s", diff)
	}
}

// Prometheus' own parser reads the registry's metrics and the streamed ones, with and without
// compression.
func TestHandler(t *testing.T) {
	registry := prometheus.NewRegistry()
	gauge := prometheus.NewGauge(prometheus.GaugeOpts{Name: "registered", Help: "Registered."})
	registry.MustRegister(gauge)
	for _, accept := range []string{"", "gzip", "deflate, gzip;q=1.0", "gzip;q=0"} {
		t.Run(accept, func(t *testing.T) {
			request := httptest.NewRequest("GET", "/metrics", nil)
			request.Header.Set("Accept-Encoding", accept)
			answer := httptest.NewRecorder()
			Handler(registry, write).ServeHTTP(answer, request)
			var body io.Reader = answer.Body
			if answer.Header().Get("Content-Encoding") == "gzip" {
				var err error
				if body, err = gzip.NewReader(body); err != nil {
					t.Fatal(err)
				}
			}
			if got, want := answer.Header().Get("Content-Encoding") == "gzip", accept == "gzip" || accept == "deflate, gzip;q=1.0"; got != want {
				t.Errorf("compressed: got %v, want %v", got, want)
			}
			parser := expfmt.NewTextParser(model.LegacyValidation)
			families, err := parser.TextToMetricFamilies(body)
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]string{}
			for name, family := range families {
				got[name] = family.GetType().String()
			}
			want := map[string]string{"registered": "GAUGE", "one_total": "COUNTER", "two": "GAUGE", "three_seconds": "HISTOGRAM"}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("families (-want +got):\n%s", diff)
			}
			if got := families["three_seconds"].Metric[0].Histogram.GetSampleCount(); got != 7 {
				t.Errorf("observations: got %d, want 7", got)
			}
		})
	}
}

// Each family of several parts is written once, with the labels of the parts.
func TestMerged(t *testing.T) {
	part := func(slot string) Part {
		return Part{Labels: NewLabels("slot", slot), Write: func(w *Writer) {
			w.Family("one_total", Counter, "One.")
			w.Sample(3, NewLabels("name", "a"))
			w.Family("two", Gauge, "Two.")
			w.Sample(1, "")
		}}
	}
	var out strings.Builder
	w := NewWriter(&out)
	Merged(Part{Write: func(w *Writer) {
		w.Family("ready", Gauge, "Ready.")
		w.Sample(1, "")
	}}, part("0"), part("1"))(w)
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	const want = `# HELP ready Ready.
# TYPE ready gauge
ready 1
# HELP one_total One.
# TYPE one_total counter
one_total{slot="0",name="a"} 3
one_total{slot="1",name="a"} 3
# HELP two Two.
# TYPE two gauge
two{slot="0"} 1
two{slot="1"} 1
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("output (-want +got):\n%s", diff)
	}
}
