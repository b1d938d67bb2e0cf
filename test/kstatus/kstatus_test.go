// Package kstatus tests the results of tools that wait for a rollout of Posthorn's
// objects: kstatus, which Flux and Helm use, and Argo CD's health scripts.
package kstatus

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	lua "github.com/yuin/gopher-lua"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/controllers/kinds"
)

const (
	root       = "../.."
	namespace  = "shop"
	generation = 7
)

var now = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

// argo maps a status of kstatus to the health of Argo CD.
var argo = map[status.Status]string{
	status.InProgressStatus: "Progressing", status.FailedStatus: "Degraded", status.CurrentStatus: "Healthy",
}

// byReason maps the reason of an object's verdict to its expected status.
var byReason = map[string]status.Status{
	v1beta1.ReasonAccepted:         status.CurrentStatus,
	v1beta1.ReasonSuspended:        status.CurrentStatus,
	v1beta1.ReasonInvalidSpec:      status.FailedStatus,
	v1beta1.ReasonInvalidURL:       status.FailedStatus,
	v1beta1.ReasonInvalidFilter:    status.FailedStatus,
	v1beta1.ReasonCeilingExceeded:  status.FailedStatus,
	v1beta1.ReasonEgressDenied:     status.FailedStatus,
	v1beta1.ReasonWriteKeyConflict: status.FailedStatus,
	v1beta1.ReasonWriteKeyReserved: status.FailedStatus,
	v1beta1.ReasonKeyConflict:      status.FailedStatus,
	v1beta1.ReasonExpressionBudget: status.FailedStatus,
	v1beta1.ReasonConfigTooLarge:   status.FailedStatus,
	v1beta1.ReasonInvalidSecret:    status.FailedStatus,
	v1beta1.ReasonInvalidConfigMap: status.FailedStatus,
	v1beta1.ReasonSecretNotFound:   status.InProgressStatus,
	v1beta1.ReasonSecretKeyMissing: status.InProgressStatus,
	v1beta1.ReasonNoSource:         status.InProgressStatus,

	v1beta1.ReasonDestinationNotFound:  status.InProgressStatus,
	v1beta1.ReasonInvalidForwardTarget: status.FailedStatus,
}

// Tests every object of the compiler's golden files, with its status when every pod runs it,
// and every reason of Accepted and ResolvedRefs.
func TestVerdicts(t *testing.T) {
	seen := map[string]bool{}
	check := func(name, kind string, v compile.Verdict) {
		reason, _ := v.Cause()
		want, ok := byReason[reason]
		if !ok {
			t.Errorf("%s: byReason lacks the reason %s", name, reason)
			return
		}
		seen[reason] = true
		t.Run(name, func(t *testing.T) { expect(t, compute(kind, v, running(kind, v, nil)), want) })
	}
	files, err := filepath.Glob(filepath.Join(root, "controllers/compile/testdata/*.out.yaml"))
	if err != nil || len(files) < 20 {
		t.Fatalf("golden files: got %d and error %v, want at least 20", len(files), err)
	}
	for _, file := range files {
		var golden struct {
			Verdicts compile.Verdicts `json:"verdicts"`
		}
		read(t, file, &golden)
		for kind, verdicts := range map[string]map[string]compile.Verdict{"Source": golden.Verdicts["sources"],
			"WebhookDestination": golden.Verdicts["destinations"]} {
			for name, v := range verdicts {
				check(strings.TrimSuffix(filepath.Base(file), ".out.yaml")+"/"+kind+"/"+name, kind, v)
			}
		}
	}
	audience := func(name, source, key string) *v1beta1.Audience {
		a := &v1beta1.Audience{ObjectMeta: metav1.ObjectMeta{Name: name}}
		a.Spec.SourceRef.Name, a.Spec.Key = source, key
		return a
	}
	redelivery := &v1beta1.Redelivery{ObjectMeta: metav1.ObjectMeta{Name: "r"}}
	redelivery.Spec.DestinationRef.Name = "none"
	_, verdicts := kinds.All.Compilers().Compile(compile.Snapshot{Namespace: namespace, Objects: []compile.Object{
		&v1beta1.Source{ObjectMeta: metav1.ObjectMeta{Name: "web"}}, redelivery,
		audience("a", "web", "vip"), audience("b", "web", "vip"), audience("c", "none", "others"), audience("d", "web", ""),
	}})
	check("Redelivery", "Redelivery", verdicts["redeliveries"]["r"])
	for name, v := range verdicts["audiences"] {
		check("Audience/"+name, "Audience", v)
	}
	for _, reason := range []string{v1beta1.ReasonConfigTooLarge, v1beta1.ReasonExpressionBudget} {
		check(reason, "WebhookDestination", compile.Verdict{Reason: reason, Message: "m", State: liveconfig.Paused, Revision: "r"})
	}
	for reason := range byReason {
		if !seen[reason] {
			t.Errorf("no object has the reason %s", reason)
		}
	}
}

// Tests every kind in every state that does not depend on the verdict.
func TestStates(t *testing.T) {
	traffic := map[string]map[string]func(*adminapi.NamespaceReport, *adminapi.Report){
		"Source": {
			"receiving": func(t *adminapi.NamespaceReport, _ *adminapi.Report) {
				t.Sources[0].Accepted, t.Sources[0].LastAccepted = 1, now
			},
			"rejecting calls": func(t *adminapi.NamespaceReport, _ *adminapi.Report) {
				t.Sources[0].Rejected, t.Sources[0].LastRejected = 1, now
			},
			"storage full": func(_ *adminapi.NamespaceReport, r *adminapi.Report) { r.Storage.Pressure = true },
		},
		"WebhookDestination": {
			"delivering":   endpoint(adminapi.EndpointHealthy, 0),
			"failing":      endpoint(adminapi.EndpointDegraded, 3),
			"circuit open": endpoint(adminapi.EndpointCircuitOpen, 10),
		},
		"Audience": {
			"synced": func(t *adminapi.NamespaceReport, _ *adminapi.Report) {
				t.Audiences[0].Owner, t.Audiences[0].LastSync = true, now
			},
			"sync rejected": func(t *adminapi.NamespaceReport, _ *adminapi.Report) {
				t.Audiences[0].Owner, t.Audiences[0].LastRefused = true, now
			},
		},
	}
	accepted := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "m", State: liveconfig.Active,
		Revision: "r"}
	newer := accepted
	newer.Revision = "r2"
	for kind, states := range traffic {
		run := func(name string, o *unstructured.Unstructured, want status.Status) {
			t.Run(kind+"/"+name, func(t *testing.T) { expect(t, o, want) })
		}
		created := compute(kind, accepted, nil)
		created.Object["status"] = defaultStatus(t, kind)
		run("created", created, status.InProgressStatus)
		changed := compute(kind, accepted, running(kind, accepted, nil))
		changed.SetGeneration(generation + 1)
		run("changed, not processed yet", changed, status.InProgressStatus)
		run("no dispatcher", compute(kind, accepted, nil), status.InProgressStatus)
		run("a dispatcher does not answer", compute(kind, accepted, append(running(kind, accepted, nil), health.Pod{Name: "b"})), status.InProgressStatus)
		run("not confirmed", compute(kind, newer, running(kind, accepted, nil)), status.InProgressStatus)
		run("config rejected", compute(kind, newer, running(kind, accepted, func(t *adminapi.NamespaceReport, _ *adminapi.Report) {
			t.Refused = &adminapi.RefusedConfig{Error: "unknown field"}
		})), status.InProgressStatus)
		run("idle", compute(kind, accepted, running(kind, accepted, nil)), status.CurrentStatus)
		for name, change := range states {
			o := compute(kind, accepted, running(kind, accepted, change))
			conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
			last := conditions[len(conditions)-1].(map[string]any)
			if failing := name != "receiving" && name != "delivering" && name != "synced"; (last["status"] == "False") != failing {
				t.Errorf("%s/%s: last condition: got %v, want status False: %v", kind, name, last, failing)
			}
			run(name, o, status.CurrentStatus)
		}
	}
}

// Tests the kinds that run once: they are in progress until the end of the run.
func TestJobs(t *testing.T) {
	accepted := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "m"}
	missing := accepted
	missing.Unresolved = &compile.Unresolved{Reason: v1beta1.ReasonDestinationNotFound, Message: "m"}
	invalid := compile.Verdict{Reason: v1beta1.ReasonInvalidSpec, Message: "m"}
	for _, kind := range []string{"Redelivery", "DeletionRequest"} {
		job := func(v compile.Verdict, observed int64, o health.Outcome) *unstructured.Unstructured {
			var s v1beta1.JobStatus
			o.Message = "m"
			health.SetJobConditions(&s, observed, metav1.NewTime(now), v, o)
			meta := metav1.ObjectMeta{Namespace: namespace, Name: "o", Generation: generation}
			if kind == "Redelivery" {
				return object(kind, &v1beta1.Redelivery{ObjectMeta: meta, Status: v1beta1.RedeliveryStatus{JobStatus: s}})
			}
			return object(kind, &v1beta1.DeletionRequest{ObjectMeta: meta, Status: v1beta1.DeletionRequestStatus{JobStatus: s}})
		}
		created := job(accepted, generation, health.Outcome{Reason: v1beta1.ReasonRunning})
		created.Object["status"] = defaultStatus(t, kind)
		for name, c := range map[string]struct {
			o    *unstructured.Unstructured
			want status.Status
		}{
			"created":             {created, status.InProgressStatus},
			"missing destination": {job(missing, generation, health.Outcome{Reason: v1beta1.ReasonDestinationNotFound}), status.InProgressStatus},
			"invalid":             {job(invalid, generation, health.Outcome{Reason: v1beta1.ReasonInvalidSpec}), status.FailedStatus},
			"waiting":             {job(accepted, generation, health.Outcome{Reason: v1beta1.ReasonWaiting}), status.InProgressStatus},
			"running":             {job(accepted, generation, health.Outcome{Reason: v1beta1.ReasonRunning}), status.InProgressStatus},
			"complete": {job(accepted, generation, health.Outcome{Complete: true, Reason: v1beta1.ReasonRedelivered}),
				status.CurrentStatus},
			"already done": {job(accepted, generation, health.Outcome{Complete: true, Reason: v1beta1.ReasonAlreadyDone}),
				status.CurrentStatus},
			"failed": {job(accepted, generation, health.Outcome{Failed: true, Reason: v1beta1.ReasonNotDelivered}),
				status.FailedStatus},
			"deadline": {job(accepted, generation, health.Outcome{Failed: true, Reason: v1beta1.ReasonDeadlineExceeded}),
				status.FailedStatus},
			"another TTL": {job(accepted, generation-1, health.Outcome{Complete: true, Reason: v1beta1.ReasonRedelivered}),
				status.InProgressStatus},
		} {
			t.Run(kind+"/"+name, func(t *testing.T) { expect(t, c.o, c.want) })
		}
	}
}

// endpoint returns a change that adds an endpoint in a state to a report.
func endpoint(state adminapi.EndpointState, failures int) func(*adminapi.NamespaceReport, *adminapi.Report) {
	return func(t *adminapi.NamespaceReport, _ *adminapi.Report) {
		t.Destinations[0].Endpoints = []adminapi.EndpointReport{{
			Name: "primary", State: state, Since: now, ConsecutiveFailures: failures,
			LastFailure: &adminapi.Failure{Time: now, Reason: v1beta1.ReasonTimedOut, Message: "m"},
		}}
	}
}

// running returns a pod that runs the object; change may change its report.
func running(kind string, v compile.Verdict, change func(*adminapi.NamespaceReport, *adminapi.Report)) []health.Pod {
	t := adminapi.NamespaceReport{Namespace: namespace}
	switch kind {
	case "Source":
		t.Sources = []adminapi.SourceReport{{Name: "o", Generation: generation, Revision: v.Revision}}
	case "WebhookDestination":
		t.Destinations = []adminapi.DestinationReport{{Name: "o", Generation: generation, Revision: v.Revision}}
	case "Audience":
		t.Audiences = []adminapi.AudienceReport{{Name: "o", Generation: generation, Revision: v.Revision}}
	}
	report := &adminapi.Report{Pod: "a", Ready: true}
	if change != nil {
		change(&t, report)
	}
	report.Namespaces = []adminapi.NamespaceReport{t}
	return []health.Pod{{Name: "a", Report: podreport.NewIndex(*report)}}
}

// compute returns an object with the status that the operator writes.
func compute(kind string, v compile.Verdict, pods []health.Pod) *unstructured.Unstructured {
	meta := metav1.ObjectMeta{Namespace: namespace, Name: "o", Generation: generation}
	var o any
	switch kind {
	case "Source":
		s := v1beta1.Source{ObjectMeta: meta}
		s.Status = health.Source(s, v, namespace, pods, now)
		o = &s
	case "WebhookDestination":
		d := v1beta1.WebhookDestination{ObjectMeta: meta}
		d.Spec.Endpoints = []v1beta1.Endpoint{{Name: "primary"}}
		d.Status = health.Destination(d, v, namespace, pods, now)
		o = &d
	case "Audience":
		a := v1beta1.Audience{ObjectMeta: meta}
		a.Status = health.Audience(a, v, namespace, pods, now)
		o = &a
	case "Redelivery":
		r := v1beta1.Redelivery{ObjectMeta: meta}
		r.Status = health.Redelivery(r, v, namespace, pods, now)
		o = &r
	}
	return object(kind, o)
}

// object converts an object to the form that tools read.
func object(kind string, o any) *unstructured.Unstructured {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		panic(err)
	}
	u := &unstructured.Unstructured{Object: fields}
	u.SetGroupVersionKind(v1beta1.GroupVersion.WithKind(kind))
	return u
}

// expect checks the results of kstatus and Argo CD for an object.
func expect(t *testing.T, o *unstructured.Unstructured, want status.Status) {
	t.Helper()
	result, err := status.Compute(o)
	if err != nil {
		t.Fatal(err)
	}
	if result.Status != want {
		t.Errorf("kstatus: got %s (%s), want %s", result.Status, result.Message, want)
	}
	got, message := argoHealth(t, o)
	if got != argo[want] || message == "" {
		t.Errorf("Argo CD: got %s (%q), want %s with a message", got, message, argo[want])
	}
}

// defaultStatus returns the CRD's default status.
func defaultStatus(t *testing.T, kind string) any {
	t.Helper()
	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct {
					OpenAPIV3Schema struct {
						Properties map[string]struct {
							Default any `json:"default"`
						} `json:"properties"`
					} `json:"openAPIV3Schema"`
				} `json:"schema"`
			} `json:"versions"`
		} `json:"spec"`
	}
	plural := map[string]string{"Redelivery": "redeliveries"}[kind]
	if plural == "" {
		plural = strings.ToLower(kind) + "s"
	}
	read(t, filepath.Join(root, "config/crd/standard/posthorn.dev_"+plural+".yaml"), &crd)
	s := crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["status"].Default
	if s == nil {
		t.Fatalf("the CRD of %s has no default status", kind)
	}
	return s
}

// scripts returns the health scripts by kind.
func scripts(t *testing.T) map[string]string {
	t.Helper()
	var cm struct {
		Data map[string]string `json:"data"`
	}
	read(t, filepath.Join(root, "config/argocd/argocd-cm.yaml"), &cm)
	byKind := map[string]string{}
	for key, script := range cm.Data {
		kind, ok := strings.CutPrefix(key, "resource.customizations.health."+v1beta1.GroupVersion.Group+"_")
		if !ok {
			t.Errorf("key %s: it is not a health script for one of Posthorn's kinds", key)
		}
		byKind[kind] = script
	}
	return byKind
}

// Exactly the kinds of the API have a script.
func TestEveryKindHasAScript(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, "config/crd/standard/posthorn.dev_*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("CRDs: got %d and error %v, want some", len(files), err)
	}
	have := scripts(t)
	for _, file := range files {
		var crd struct {
			Spec struct {
				Names struct {
					Kind string `json:"kind"`
				} `json:"names"`
			} `json:"spec"`
		}
		read(t, file, &crd)
		if have[crd.Spec.Names.Kind] == "" {
			t.Errorf("the kind %s lacks a health script", crd.Spec.Names.Kind)
		}
		delete(have, crd.Spec.Names.Kind)
	}
	for kind := range have {
		t.Errorf("health script for %s: the kind does not exist", kind)
	}
}

// The script works for objects without a status and with an unknown status.
func TestScriptWithoutStatus(t *testing.T) {
	for kind := range scripts(t) {
		for name, s := range map[string]any{"none": nil, "empty": map[string]any{}, "no conditions": map[string]any{"conditions": []any{}}} {
			o := &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"name": "o", "generation": int64(1)}, "status": s}}
			o.SetGroupVersionKind(v1beta1.GroupVersion.WithKind(kind))
			if got, message := argoHealth(t, o); got != "Progressing" || message == "" {
				t.Errorf("%s with the status %q: got %s (%q), want Progressing", kind, name, got, message)
			}
		}
	}
}

// argoHealth runs a kind's script as Argo CD does: with the libraries package, base
// and table only.
func argoHealth(t *testing.T, o *unstructured.Unstructured) (health, message string) {
	t.Helper()
	l := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer l.Close()
	for _, library := range []struct {
		name string
		open lua.LGFunction
	}{{lua.LoadLibName, lua.OpenPackage}, {lua.BaseLibName, lua.OpenBase}, {lua.TabLibName, lua.OpenTable}} {
		if err := l.CallByParam(lua.P{Fn: l.NewFunction(library.open), Protect: true}, lua.LString(library.name)); err != nil {
			t.Fatal(err)
		}
	}
	l.SetGlobal("obj", value(l, o.Object))
	if err := l.DoString(scripts(t)[o.GetKind()]); err != nil {
		t.Fatal(err)
	}
	result, ok := l.Get(-1).(*lua.LTable)
	if !ok {
		t.Fatalf("result of the script: got %v, want a table", l.Get(-1))
	}
	return lua.LVAsString(result.RawGetString("status")), lua.LVAsString(result.RawGetString("message"))
}

// value converts JSON to Lua's values.
func value(l *lua.LState, v any) lua.LValue {
	switch v := v.(type) {
	case nil:
		return lua.LNil
	case bool:
		return lua.LBool(v)
	case string:
		return lua.LString(v)
	case int64:
		return lua.LNumber(v)
	case float64:
		return lua.LNumber(v)
	case []any:
		table := l.NewTable()
		for _, item := range v {
			table.Append(value(l, item))
		}
		return table
	case map[string]any:
		table := l.NewTable()
		for key, item := range v {
			table.RawSetString(key, value(l, item))
		}
		return table
	}
	panic(fmt.Sprintf("%T is not a JSON type", v))
}

func read(t *testing.T, file string, into any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err == nil {
		err = yaml.Unmarshal(text, into)
	}
	if err != nil {
		t.Fatalf("reading %s: got error %v, want none", file, err)
	}
}
