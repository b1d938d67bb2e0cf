package monitoring

import (
	"context"
	"os"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"go.yaml.in/yaml/v3"
	"sigs.k8s.io/prometheus-adapter/pkg/config"
)

// firstAttemptAge is the metric of the chart's HorizontalPodAutoscaler.
const firstAttemptAge = "posthorn_delivery_first_attempt_age_seconds"

// sample returns the block of YAML in docs/replication.md that begins with a text.
func sample(t *testing.T, begin string) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/replication.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(page), "```yaml\n"+begin)
	text, _, ended := strings.Cut(text, "```\n")
	if !found || !ended {
		t.Fatalf("docs/replication.md has no block of YAML that begins with %q", begin)
	}
	return begin + text
}

// query runs a query on the ages of two pods with two slots each. The result has the values by pod.
func query(t *testing.T, text string) map[string]float64 {
	t.Helper()
	engine := promqltest.NewTestEngine(t, false, 0, promqltest.DefaultMaxSamplesPerQuery)
	storage := promqltest.LoadedStorage(t, `load 1m
		`+firstAttemptAge+`{namespace="posthorn-system",pod="d-0",slot="0"} 3
		`+firstAttemptAge+`{namespace="posthorn-system",pod="d-0",slot="1"} 20
		`+firstAttemptAge+`{namespace="posthorn-system",pod="d-1",slot="0"} 0
		`+firstAttemptAge+`{namespace="posthorn-system",pod="d-1",slot="1"} 4
		`+firstAttemptAge+`{namespace="other",pod="d-0",slot="0"} 90`)
	q, err := engine.NewInstantQuery(context.Background(), storage, nil, text, time.Unix(0, 0))
	if err != nil {
		t.Fatalf("query %s: %v", text, err)
	}
	defer q.Close()
	vector, err := q.Exec(context.Background()).Vector()
	if err != nil {
		t.Fatalf("query %s: %v", text, err)
	}
	values := map[string]float64{}
	for _, s := range vector {
		values[s.Metric.Get("pod")] = s.F
	}
	return values
}

// The Prometheus adapter reads the rule of the docs, and its query, which is built as the adapter does, returns
// the largest value of the slots of each pod.
func TestAdapterRule(t *testing.T) {
	rules, err := config.FromYAML([]byte(sample(t, "rules:\n")))
	if err != nil {
		t.Fatal(err)
	}
	if len(rules.Rules) != 1 {
		t.Fatalf("rules: got %d, want 1", len(rules.Rules))
	}
	rule := rules.Rules[0]
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(rule.SeriesQuery)
	if err != nil {
		t.Fatalf("seriesQuery: %v", err)
	}
	if s, ok := expr.(*parser.VectorSelector); !ok || s.Name != firstAttemptAge || rule.Name.As != firstAttemptAge {
		t.Errorf("got the series %s with the name %s, want %s", expr, rule.Name.As, firstAttemptAge)
	}
	for _, label := range []string{"namespace", "pod"} {
		if got := rule.Resources.Overrides[label]; got != (config.GroupResource{Resource: label}) {
			t.Errorf("resource of the label %s: got %+v, want %s", label, got, label)
		}
	}
	metrics, err := template.New("").Delims("<<", ">>").Parse(rule.MetricsQuery)
	if err != nil {
		t.Fatalf("metricsQuery: %v", err)
	}
	var text strings.Builder
	if err := metrics.Execute(&text, map[string]string{
		"Series": firstAttemptAge, "LabelMatchers": `namespace="posthorn-system",pod=~"d-0|d-1"`, "GroupBy": "pod",
	}); err != nil {
		t.Fatal(err)
	}
	if got := query(t, text.String()); len(got) != 2 || got["d-0"] != 20 || got["d-1"] != 4 {
		t.Errorf("values of the pods: got %v, want 20 of d-0 and 4 of d-1", got)
	}
}

// The query of the KEDA sample returns the sum over the pods, which KEDA divides by their number.
func TestKEDAQuery(t *testing.T) {
	var object struct {
		Spec struct {
			Triggers []struct {
				Type       string
				MetricType string            `yaml:"metricType"`
				Metadata   map[string]string `yaml:"metadata"`
			}
		}
	}
	if err := yaml.Unmarshal([]byte(sample(t, "apiVersion: keda.sh/v1alpha1\n")), &object); err != nil {
		t.Fatal(err)
	}
	if len(object.Spec.Triggers) != 1 || object.Spec.Triggers[0].Type != "prometheus" || object.Spec.Triggers[0].MetricType != "AverageValue" {
		t.Fatalf("triggers: got %+v, want one of Prometheus with an average value", object.Spec.Triggers)
	}
	if got := query(t, object.Spec.Triggers[0].Metadata["query"]); len(got) != 1 || got[""] != 24 {
		t.Errorf("got %v, want one value, 24", got)
	}
}
