// Package monitoring tests the chart's alerts and dashboard with Prometheus'
// parser and engine. It is a separate module because these are large.
package monitoring

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"go.yaml.in/yaml/v3"
)

const files = "../../charts/posthorn/files/"

type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         model.Duration    `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func alerts(t *testing.T) (rules []rule) {
	t.Helper()
	data, err := os.ReadFile(files + "alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Rules []rule `yaml:"rules"`
		} `yaml:"groups"`
	}
	if err := yaml.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		rules = append(rules, g.Rules...)
	}
	if len(rules) < 10 {
		t.Fatalf("alerts: got %d, want at least 10", len(rules))
	}
	return rules
}

type panel struct {
	Title, Type string
	Targets     []struct{ Expr, LegendFormat string }
	FieldConfig struct{ Defaults struct{ Unit string } }
	GridPos     struct{ X, Y, W, H int }
}

func panels(t *testing.T) []panel {
	t.Helper()
	data, err := os.ReadFile(files + "dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct{ Panels []panel }
	if err := json.Unmarshal(data, &dashboard); err != nil {
		t.Fatal(err)
	}
	if len(dashboard.Panels) < 20 {
		t.Fatalf("panels: got %d, want at least 20", len(dashboard.Panels))
	}
	return dashboard.Panels
}

// variables replaces Grafana's variables by their values when all objects are selected.
var variables = strings.NewReplacer("$__rate_interval", "5m", "$namespace", ".*", "$destination", ".*")

// documented returns the labels of the metrics in docs/metrics.md, by metric name.
func documented(t *testing.T) map[string][]string {
	t.Helper()
	page, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{"process_resident_memory_bytes": nil, "process_cpu_seconds_total": nil}
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(line, "|")
		if len(cells) != 5 {
			continue
		}
		for _, name := range regexp.MustCompile("`(posthorn_[a-z_]+)`").FindAllStringSubmatch(cells[1], -1) {
			all[name[1]] = strings.FieldsFunc(cells[2], func(r rune) bool { return r == ' ' || r == ',' })
		}
	}
	return all
}

// Every expression parses, and uses only metrics and labels of docs/metrics.md.
func TestExpressions(t *testing.T) {
	known := documented(t)
	check := func(where, expr string) {
		parsed, err := parser.NewParser(parser.Options{}).ParseExpr(variables.Replace(expr))
		if err != nil {
			t.Errorf("%s: parse: got error %v, want none", where, err)
			return
		}
		// Scrapes add the label pod, histograms the label le.
		labels := map[string]bool{"pod": true, "le": true}
		var used []string
		parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
			switch n := node.(type) {
			case *parser.VectorSelector:
				has, ok := known[n.Name]
				if !ok {
					has, ok = known[regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(n.Name, "")]
				}
				if !ok {
					t.Errorf("%s: docs/metrics.md lacks the metric %s", where, n.Name)
				}
				for _, l := range has {
					labels[l] = true
				}
				for _, m := range n.LabelMatchers {
					used = append(used, m.Name)
				}
			case *parser.AggregateExpr:
				if s, ok := n.Expr.(*parser.VectorSelector); ok && n.Op == parser.SUM && s.Name == "posthorn_ready" {
					t.Errorf("%s: a pod with several slots has a series for itself and for each slot; use min by (pod) before the sum: %s", where, expr)
				}
				used = append(used, n.Grouping...)
			}
			return nil
		})
		for _, l := range used {
			if l != model.MetricNameLabel && !labels[l] {
				t.Errorf("%s: no metric of the expression has the label %s: %s", where, l, expr)
			}
		}
	}
	for _, r := range alerts(t) {
		check(r.Alert, r.Expr)
	}
	for _, p := range panels(t) {
		for _, target := range p.Targets {
			check(p.Title, target.Expr)
			for _, l := range regexp.MustCompile(`{{(\w+)}}`).FindAllStringSubmatch(target.LegendFormat, -1) {
				if !strings.Contains(target.Expr, l[1]) {
					t.Errorf("%s: the legend has the label %s, which the result lacks", p.Title, l[1])
				}
			}
		}
	}
}

// Panels do not overlap, have units, and bounded legends, so that they are readable with a
// thousand destinations.
func TestPanels(t *testing.T) {
	taken := map[[2]int]string{}
	for _, p := range panels(t) {
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other, ok := taken[[2]int{x, y}]; ok {
					t.Fatalf("the panels %q and %q overlap", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.FieldConfig.Defaults.Unit == "" {
			t.Errorf("the panel %q has no unit", p.Title)
		}
		for _, target := range p.Targets {
			if regexp.MustCompile(`by \([^)]*(source|destination|endpoint|namespace)`).MatchString(target.Expr) &&
				!strings.Contains(target.Expr, "topk(") {
				t.Errorf("the panel %q has a line for every object; bound it with topk", p.Title)
			}
		}
	}
}

// situation is a set of series in the format of promtool's tests, and the expected state of
// an alert after an hour.
type situation struct {
	alert, series string
	fires         bool
}

var situations = []situation{
	{"PosthornDispatcherDown", `posthorn_operator_dispatchers{responding="true"} 0x60`, true},
	{"PosthornDispatcherDown", `posthorn_ready{pod="d-0"} 1x60`, true}, // No operator.
	{"PosthornDispatcherDown", `posthorn_operator_dispatchers{responding="true"} 1x60`, false},
	{"PosthornDispatcherDown", `posthorn_operator_dispatchers{responding="true"} 1x57 0x3`, false}, // A restart.
	{"PosthornDispatcherNotAnswering", `posthorn_operator_dispatchers{responding="false"} 1x60`, true},
	{"PosthornDispatcherNotAnswering", `posthorn_operator_dispatchers{responding="false"} 0x60`, false},
	{"PosthornVolumeWithoutPod", `posthorn_operator_orphaned_pending_messages{pod="operator-1",dispatcher="d-2"} 12x30 _x5 12x25`, true}, // A restart of the operator.
	{"PosthornVolumeWithoutPod", `posthorn_operator_orphaned_pending_messages{pod="operator-1",dispatcher="d-2"} _x50 12x10`, false},     // The pod is replaced.
	{"PosthornKindNotServed", `posthorn_operator_kind_served{pod="operator-1",kind="Source"} 0x60`, true},
	{"PosthornKindNotServed", `posthorn_operator_kind_served{pod="operator-1",kind="Source"} 1x60`, false},
	{"PosthornPodNotReady", `posthorn_ready{pod="d-0"} 0x60`, true},
	{"PosthornPodNotReady", `posthorn_ready{pod="d-0"} 0x57 1x3`, false},
	{"PosthornConfigRefused", `posthorn_config_refused{namespace="shop"} 0x10 1x50`, true},
	{"PosthornConfigRefused", `posthorn_config_refused{namespace="shop"} 0x60`, false},
	{"PosthornConfigMissing", `posthorn_config_missing{namespace="shop"} 0x50 1x10`, true},
	{"PosthornConfigMissing", `posthorn_config_parked_objects{namespace="shop"} 0x50 2x10`, true},
	{"PosthornConfigMissing", `posthorn_config_missing{namespace="shop"} 0x60
		posthorn_config_parked_objects{namespace="shop"} 0x60`, false},
	{"PosthornStorageFull", `posthorn_queue_full{pod="d-0"} 0x50 1x10`, true},
	{"PosthornStorageFull", `posthorn_queue_full{pod="d-0"} 0x60`, false},
	{"PosthornStorageFilling", `posthorn_storage_days_left{pod="d-0"} 31x10 3x50`, true},
	{"PosthornStorageFilling", `posthorn_storage_days_left{pod="d-0"} 4x60`, false},
	{"PosthornStorageDamaged", `posthorn_queue_corrupt{pod="d-0"} 0x50 1x10`, true},
	{"PosthornStorageDamaged", `posthorn_queue_corrupt{pod="d-0"} 0x60`, false},
	{"PosthornStorageSlow", `posthorn_queue_commit_seconds_bucket{pod="d-0",le="0.5"} 0x60
		posthorn_queue_commit_seconds_bucket{pod="d-0",le="1"} 0+60x60
		posthorn_queue_commit_seconds_bucket{pod="d-0",le="+Inf"} 0+60x60`, true},
	{"PosthornStorageSlow", `posthorn_queue_commit_seconds_bucket{pod="d-0",le="0.5"} 0+60x60
		posthorn_queue_commit_seconds_bucket{pod="d-0",le="1"} 0+60x60
		posthorn_queue_commit_seconds_bucket{pod="d-0",le="+Inf"} 0+60x60`, false},
	{"PosthornNotDelivering", `posthorn_destination_pending_messages{namespace="shop",destination="crm"} 0+10x60
		posthorn_destination_messages_total{namespace="shop",destination="crm",outcome="delivered"} 5x60`, true},
	{"PosthornNotDelivering", `posthorn_destination_pending_messages{namespace="shop",destination="crm"} 0+10x60
		posthorn_destination_messages_total{namespace="shop",destination="crm",outcome="delivered"} 0+1x60`, false}, // Deliveries are slow, but not stopped.
	{"PosthornNotDelivering", `posthorn_destination_pending_messages{namespace="shop",destination="crm"} 0x60
		posthorn_destination_messages_total{namespace="shop",destination="crm",outcome="delivered"} 5x60`, false}, // No message is pending.
	{"PosthornMessagesOld", `posthorn_destination_oldest_pending_seconds{namespace="shop",destination="crm"} 7000+60x60`, true},
	{"PosthornMessagesOld", `posthorn_destination_oldest_pending_seconds{namespace="shop",destination="crm"} 0+60x60`, false},
	{"PosthornCircuitOpen", `posthorn_endpoint_circuit_open{namespace="shop",destination="crm",endpoint="a"} 0x30 1x30`, true},
	{"PosthornCircuitOpen", `posthorn_endpoint_circuit_open{namespace="shop",destination="crm",endpoint="a"} 0x55 1x5`, false},
	{"PosthornDeadLetters", `posthorn_destination_messages_total{namespace="shop",destination="crm",outcome="dead_lettered"} 0x55 1x5`, true},
	{"PosthornDeadLetters", `posthorn_destination_messages_total{namespace="shop",destination="crm",outcome="dead_lettered"} 7x60`, false},
	{"PosthornCallsRefused", `posthorn_ingest_rejected_total{namespace="shop",source="web",code="no_event"} 0+6x60
		posthorn_ingest_calls_total{namespace="shop",source="web",result="accepted"} 0+10x60`, true},
	{"PosthornCallsRefused", `posthorn_ingest_rejected_total{namespace="shop",source="web",code="no_event"} 0+4x60
		posthorn_ingest_calls_total{namespace="shop",source="web",result="accepted"} 0+10x60`, false},
	{"PosthornCallsRefused", `posthorn_ingest_rejected_total{namespace="",source="",code="unknown_write_key"} 0+100x60`, false}, // The calls have no Source.
	{"PosthornConfigNotWritten", `posthorn_operator_compiles_total{result="too_large"} 0+1x60`, true},
	{"PosthornConfigNotWritten", `posthorn_operator_compiles_total{result="written"} 0+10x60
		posthorn_operator_compiles_total{result="error"} 1x60`, false},
	{"PosthornReplicationWithoutOwner", `posthorn_replication_owner{pod="d-0"} 1x57 0x3
		posthorn_replication_owner{pod="d-1"} 0x60`, true},
	{"PosthornReplicationWithoutOwner", `posthorn_replication_owner{pod="d-0"} 1x58 0x2
		posthorn_replication_owner{pod="d-1"} 0x58 1x2`, false}, // A takeover.
	{"PosthornReplicationNotAnswering", `posthorn_replication_unacknowledged_seconds{pod="d-0"} 0x50 10+60x10`, true},
	{"PosthornReplicationNotAnswering", `posthorn_replication_unacknowledged_seconds{pod="d-0"} 1x60`, false},
	{"PosthornReplicationWithoutOwner", `posthorn_replication_owner{pod="d-0",slot="0"} 1x60
		posthorn_replication_owner{pod="d-0",slot="1"} 0x60`, true},
	{"PosthornReplicationWithoutOwner", `posthorn_replication_owner{pod="d-0",slot="0"} 1x60
		posthorn_replication_owner{pod="d-0",slot="1"} 0x60
		posthorn_replication_owner{pod="d-1",slot="1"} 1x60`, false},
	{"PosthornReplicationWithoutStandby", `posthorn_replication_owner{pod="d-0"} 1x60
		posthorn_replication_sequence{pod="d-0"} 5x60`, true},
	{"PosthornReplicationWithoutStandby", `posthorn_replication_owner{pod="d-0"} 1x60
		posthorn_replication_sequence{pod="d-0"} 5x60
		posthorn_replication_owner{pod="d-1"} 0x60
		posthorn_replication_sequence{pod="d-1"} 5x60`, false},
	{"PosthornReplicationWithoutStandby", `posthorn_replication_owner{pod="d-0",slot="1"} 1x60
		posthorn_replication_sequence{pod="d-0",slot="1"} 5x60
		posthorn_replication_owner{pod="d-1",slot="1"} 0x60`, true}, // The other pod has no copy.
	{"PosthornReplicationStandbyBehind", `posthorn_replication_sequence{pod="d-0",slot="0"} 0+10000x60
		posthorn_replication_sequence{pod="d-0",slot="1"} 5x60`, false},
	{"PosthornReplicationStandbyBehind", `posthorn_replication_sequence{pod="d-0"} 0+10000x60
		posthorn_replication_sequence{pod="d-1"} 5x60`, true},
	{"PosthornReplicationStandbyBehind", `posthorn_replication_sequence{pod="d-0"} 0+10000x60
		posthorn_replication_sequence{pod="d-1"} 0+9999x60`, false},
	{"PosthornReplicationWeak", `posthorn_replication_weak_settings{pod="d-0"} 0x50 1x10`, true},
	{"PosthornReplicationWeak", `posthorn_replication_weak_settings{pod="d-0"} 0x60`, false},
	{"PosthornReplicationSyncUnverified", `posthorn_replication_sync_verified{pod="d-0"} 0x60
		posthorn_replication_weak_settings{pod="d-0"} 0x60`, true},
	{"PosthornReplicationSyncUnverified", `posthorn_replication_sync_verified{pod="d-0"} 0x60
		posthorn_replication_weak_settings{pod="d-0"} 1x60`, false}, // PosthornReplicationWeak.
	{"PosthornReplicationSyncUnverified", `posthorn_replication_sync_verified{pod="d-0"} 0x50 1x10
		posthorn_replication_weak_settings{pod="d-0"} 0x60`, false}, // An owner that has checked it now.
	{"PosthornReplicationCopyMissing", `posthorn_replication_current_replicas{pod="d-0"} 2x60
		posthorn_replication_replicas{pod="d-0"} 3x60`, true},
	{"PosthornReplicationCopyMissing", `posthorn_replication_current_replicas{pod="d-0"} 3x55 2x4
		posthorn_replication_replicas{pod="d-0"} 3x60`, false}, // An update of the servers.
	{"PosthornReplicationGap", `posthorn_replication_gaps_total{pod="d-0"} 0x50 1x10`, true},
	{"PosthornReplicationGap", `posthorn_replication_gaps_total{pod="d-0"} 0x30 1x30`, false}, // Repaired half an hour ago.
	{"PosthornStandbyLacksObjects", `posthorn_replication_lacking_objects{instance="a"} 0x60
		posthorn_replication_lacking_objects{instance="b"} 0x50 2x10`, true},
	{"PosthornStandbyLacksObjects", `posthorn_replication_lacking_objects{instance="a"} 2x4 0x6 3x4 0x46`, false}, // Manifests that are copied one by one.
	{"PosthornReplicationClockSkew", `posthorn_replication_clock_skew_seconds{pod="d-0"} 0x60
		posthorn_replication_clock_skew_seconds{pod="d-1"} 0x50 -31x10`, true},
	{"PosthornReplicationClockSkew", `posthorn_replication_clock_skew_seconds{pod="d-0"} 30x60
		posthorn_replication_clock_skew_seconds{pod="d-1"} -30x60`, false},
	{"PosthornReplicationFilling", `posthorn_replication_stream_bytes{pod="d-0"} 65x60
		posthorn_replication_stream_max_bytes{pod="d-0"} 100x60`, true},
	{"PosthornReplicationFilling", `posthorn_replication_stream_bytes{pod="d-0"} 65x60
		posthorn_replication_stream_max_bytes{pod="d-0"} 0x60`, false}, // Without a bound.
	{"PosthornReplicationSnapshotOld", `posthorn_replication_snapshot_timestamp_seconds{pod="d-0"} 0x60
		posthorn_replication_stream_bytes{pod="d-0"} 2e9x60`, true}, // None yet.
	{"PosthornReplicationSnapshotOld", `posthorn_replication_snapshot_timestamp_seconds{pod="d-0"} 0x40 3000x20
		posthorn_replication_stream_bytes{pod="d-0"} 2e9x60`, false}, // The first one took a while.
	{"PosthornReplicationSnapshotOld", `posthorn_replication_snapshot_timestamp_seconds{pod="d-0"} 0x60
		posthorn_replication_snapshot_timestamp_seconds{pod="d-1"} 3000x60
		posthorn_replication_stream_bytes{pod="d-0"} 2e9x60`, false}, // A standby has none.
	{"PosthornReplicationSnapshotOld", `posthorn_replication_snapshot_timestamp_seconds{pod="d-0"} 1x60
		posthorn_replication_stream_bytes{pod="d-0"} 2e9x60`, true},
}

// optional matches the part of an annotation with a label that some results lack.
var optional = regexp.MustCompile(`{{ if \$labels\.(\w+) }}.*?{{ end }}`)

func TestAlerts(t *testing.T) {
	engine := promqltest.NewTestEngine(t, false, 0, promqltest.DefaultMaxSamplesPerQuery)
	tested := map[string]map[bool]bool{}
	for i, s := range situations {
		t.Run(fmt.Sprint(i, " ", s.alert), func(t *testing.T) {
			storage := promqltest.LoadedStorage(t, "load 1m\n\t"+s.series)
			for _, r := range alerts(t) {
				if r.Alert != s.alert {
					continue
				}
				end := time.Unix(0, 0).Add(time.Hour)
				query, err := engine.NewRangeQuery(context.Background(), storage, nil, r.Expr, end.Add(-time.Duration(r.For)), end, 30*time.Second)
				if err != nil {
					t.Fatal(err)
				}
				defer query.Close()
				matrix, err := query.Exec(context.Background()).Matrix()
				if err != nil {
					t.Fatal(err)
				}
				steps := int(time.Duration(r.For)/(30*time.Second)) + 1
				if fires := slices.ContainsFunc(matrix, func(series promql.Series) bool { return len(series.Floats) == steps }); fires != s.fires {
					t.Errorf("alert fires: got %v, want %v: %v", fires, s.fires, matrix)
				}
				for _, series := range matrix {
					for _, l := range regexp.MustCompile(`\$labels\.(\w+)`).FindAllStringSubmatch(optional.ReplaceAllString(r.Annotations["summary"]+r.Annotations["description"], ""), -1) {
						if series.Metric.Get(l[1]) == "" && s.fires {
							t.Errorf("the annotations have the label %s, which the result lacks: %v", l[1], series.Metric)
						}
					}
				}
			}
		})
		if tested[s.alert] == nil {
			tested[s.alert] = map[bool]bool{}
		}
		tested[s.alert][s.fires] = true
	}
	for _, r := range alerts(t) {
		if !tested[r.Alert][true] || !tested[r.Alert][false] {
			t.Errorf("cases of %s: got firing %v and not firing %v, want both", r.Alert, tested[r.Alert][true], tested[r.Alert][false])
		}
		if r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("%s lacks severity, summary or description", r.Alert)
		}
	}
	if len(tested) != len(alerts(t)) {
		t.Errorf("alerts with cases: got %v, want the %d alerts of the chart", slices.Sorted(maps.Keys(tested)), len(alerts(t)))
	}
}
