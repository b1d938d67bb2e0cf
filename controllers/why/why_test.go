package why

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/manifest"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func at(ago time.Duration) *metav1.Time { t := metav1.NewTime(now.Add(-ago)); return &t }

func condition(kind, reason, message string) metav1.Condition {
	status := metav1.ConditionFalse
	if reason == kind {
		status = metav1.ConditionTrue
	}
	return metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message, ObservedGeneration: 1}
}

// healthy returns a namespace without problems; each case changes one fact.
func healthy() Facts {
	return Facts{
		Namespace: "shop", Name: "crm", Now: now,
		Sources: []v1beta1.Source{{
			ObjectMeta: metav1.ObjectMeta{Name: "web", Generation: 1, Labels: map[string]string{"team": "shop"}},
			Status: v1beta1.SourceStatus{
				Conditions:       []metav1.Condition{condition("Accepted", "Accepted", ""), condition("Receiving", "Receiving", "")},
				LastReceivedTime: at(3 * time.Second), Calls: &v1beta1.CallCounts{Accepted: 120},
			},
		}},
		Destinations: []v1beta1.WebhookDestination{{
			ObjectMeta: metav1.ObjectMeta{Name: "crm", Generation: 1},
			Spec: v1beta1.WebhookDestinationSpec{SourceRefs: []v1beta1.SourceReference{{Name: "web"}},
				Endpoints: []v1beta1.Endpoint{{Name: "primary"}}},
			Status: v1beta1.WebhookDestinationStatus{
				Conditions: []metav1.Condition{condition("Accepted", "Accepted", ""), condition("Programmed", "Programmed", "")},
				Endpoints:  []v1beta1.EndpointStatus{{Name: "primary", State: v1beta1.EndpointHealthy, LastSuccessTime: at(3 * time.Second)}},
				Delivery:   &v1beta1.DeliveryStatus{Delivered: 120},
			},
		}},
	}
}

func TestExplain(t *testing.T) {
	d := func(change func(d *v1beta1.WebhookDestination)) func(*Facts) {
		return func(f *Facts) { change(&f.Destinations[0]) }
	}
	s := func(change func(s *v1beta1.Source)) func(*Facts) { return func(f *Facts) { change(&f.Sources[0]) } }
	refused := func(reason, message string) func(*Facts) {
		return d(func(d *v1beta1.WebhookDestination) {
			accepted, resolved := condition("Accepted", reason, message), condition("ResolvedRefs", "ResolvedRefs", "")
			switch reason {
			case "SecretNotFound", "SecretKeyMissing", "InvalidSecret", "NoSource", "InvalidForwardTarget":
				accepted, resolved = condition("Accepted", "Accepted", ""), condition("ResolvedRefs", reason, message)
			}
			d.Status.Conditions = []metav1.Condition{accepted, condition("Programmed", "Programmed", ""), resolved}
		})
	}
	yes := true
	failing := func(state v1beta1.EndpointState, reason, message string) func(*Facts) {
		return d(func(d *v1beta1.WebhookDestination) {
			d.Status.Endpoints[0].State = state
			d.Status.Endpoints[0].LastFailure = &v1beta1.DeliveryFailure{Time: *at(2 * time.Second), Reason: reason, Message: message}
		})
	}
	report := func(change func(t *adminapi.NamespaceReport, r *adminapi.Report)) func(*Facts) {
		return func(f *Facts) {
			for _, pod := range []string{"a", "b"} {
				r := adminapi.Report{Pod: pod, Namespaces: []adminapi.NamespaceReport{{
					Namespace: "shop", Sources: []adminapi.SourceReport{{Name: "web", Accepted: 70, LastAccepted: now}},
					Destinations: []adminapi.DestinationReport{{Name: "crm", Ledger: adminapi.Ledger{Delivered: 65, Pending: 5}, Retrying: 5,
						OldestPending: now.Add(-time.Minute), OldestExpires: now.Add(239 * time.Minute), NextAttempt: now.Add(20 * time.Second)}},
				}, {Namespace: "other", Refused: &adminapi.RefusedConfig{Error: "not ours"}}}}
				if change != nil {
					change(&r.Namespaces[0], &r)
				}
				f.Reports = append(f.Reports, podreport.NewIndex(r))
			}
		}
	}
	fullDisk := func(f *Facts) {
		report(func(_ *adminapi.NamespaceReport, r *adminapi.Report) {
			r.Storage = adminapi.StorageReport{UsedBytes: 40 << 20, FreeBytes: 10 << 20, TotalBytes: 64 << 20, LackingBytes: 12 << 20,
				Pressure: true}
		})(f)
	}
	// reported adds reports with the endpoints of one pod, and of the other.
	reported := func(a, b []adminapi.EndpointReport) func(*Facts) {
		return report(func(t *adminapi.NamespaceReport, r *adminapi.Report) {
			t.Destinations[0].Endpoints = map[string][]adminapi.EndpointReport{"a": a, "b": b}[r.Pod]
		})
	}
	twoEndpoints := func(f *Facts) {
		d := &f.Destinations[0]
		d.Spec.Endpoints = append(d.Spec.Endpoints, v1beta1.Endpoint{Name: "b"})
		d.Status.Endpoints = append(d.Status.Endpoints, v1beta1.EndpointStatus{Name: "b", State: v1beta1.EndpointHealthy})
	}
	healthyNow := adminapi.EndpointReport{Name: "primary", State: adminapi.EndpointHealthy, LastSuccess: now}
	openNow := adminapi.EndpointReport{
		Name: "primary", State: adminapi.EndpointCircuitOpen, Since: now.Add(-time.Minute), ConsecutiveFailures: 10,
		LastSuccess: now.Add(-time.Hour),
		LastFailure: &adminapi.Failure{Time: now.Add(-5 * time.Second), Reason: "Rejected", StatusCode: 422, Message: "answered 422"},
	}
	for _, c := range []struct {
		name   string
		change func(*Facts)
		// about, cause and fix are of the first Problem ("" = none); another finding contains also.
		about, cause, fix, also string
	}{
		{"no problems", nil, "", "", "", `OK Source Source "web" has accepted 120 calls, the last one 3s ago`},
		{"no backlog", nil, "", "", "", "OK Backlog no backlog; 120 messages delivered so far"},
		{"a filter that fails", report(func(n *adminapi.NamespaceReport, _ *adminapi.Report) {
			n.Destinations[0].FilterFailure = &adminapi.Failure{Time: now.Add(-time.Minute),
				Message: "character 5 (call.properties.parts): division by zero"}
		}), "Filter", "the expression fails for some calls, which become dead letters; the last one 1m0s ago: character 5 (call.properties.parts): division by zero", "correct spec.filter.expression, then redeliver the dead letters: posthorn redeliver crm --reason FilterFailed", ""},
		{"a filter that fails, without reports", d(func(d *v1beta1.WebhookDestination) {
			failed := condition("Delivering", "FilterFailed", "spec.filter.expression fails for some calls: division by zero")
			d.Status.Conditions = append(d.Status.Conditions, failed)
		}), "Filter", "division by zero", "redeliver the dead letters", ""},
		{"a path of redaction that matches nothing", report(func(n *adminapi.NamespaceReport, _ *adminapi.Report) {
			n.Destinations[0].Unmatched = &adminapi.UnmatchedPaths{Messages: 1000, Paths: []string{"drop[context.IP]"}}
		}), "", "", "", "NOTICE Redact drop[context.IP] in spec.redact matched no value in 2000 messages since the last change"},
		{"no such destination", func(f *Facts) { f.Name = "cmr" }, "Destination", `no WebhookDestination "cmr" in namespace "shop"`, "crm", ""},
		{"no destination at all", func(f *Facts) { f.Destinations = nil }, "Destination", "no WebhookDestination", "create it", ""},
		{"a rejected manifest", func(f *Facts) {
			f.Manifests = []manifest.Problem{
				{File: "m/b.yaml", Line: 3, Object: "Source shop/web", Message: "spec: bad", Since: now.Add(-time.Hour)},
				{File: "m/crm.yaml", Line: 6, Object: "WebhookDestination shop/crm", Message: "unknown field", Since: now.Add(-time.Minute),
					Effect: "an old version remains in effect"},
			}
		}, "Manifest", "rejected 1m0s ago: m/crm.yaml:6: WebhookDestination shop/crm: unknown field (an old version remains in effect)", "correct the manifest", "NOTICE Manifest rejected 1h0m0s ago: m/b.yaml:3: Source shop/web: spec: bad"},
		{"an unreadable file with the destination", func(f *Facts) {
			f.Manifests = []manifest.Problem{{File: "m/a.yaml", Message: "not YAML",
				Outdated: []string{"Source shop/web", "WebhookDestination shop/crm"}}}
		}, "Manifest", "m/a.yaml: not YAML", "", ""},
		{"an unreadable file", func(f *Facts) { f.Manifests = []manifest.Problem{{File: "m/a.yaml", Message: "not YAML"}} }, "", "", "",
			"NOTICE Manifest"},
		{"a manifest that was never valid", func(f *Facts) {
			f.Destinations = nil
			f.Manifests = []manifest.Problem{{File: "m/a.yaml", Line: 1, Object: "WebhookDestination shop/crm", Message: "unknown field"}}
		}, "Manifest", "m/a.yaml:1: WebhookDestination shop/crm: unknown field", "correct the manifest", ""},
		{"a missing destination and an unreadable file", func(f *Facts) {
			f.Destinations = nil
			f.Manifests = []manifest.Problem{{File: "m/a.yaml", Line: 1, Message: "not YAML"}}
		}, "Destination", "no WebhookDestination", "", "NOTICE Manifest"},
		{"a rejected manifest in another namespace", func(f *Facts) {
			f.Manifests = []manifest.Problem{{File: "m/a.yaml", Object: "WebhookDestination other/crm", Message: "unknown field"}}
		}, "", "", "", "OK Destination"},
		{"suspended", d(func(d *v1beta1.WebhookDestination) { d.Spec.Suspend = &yes }), "Destination", "suspended; messages wait", "spec.suspend", ""},
		{"no Secret", refused("SecretNotFound", `Secret "crm" does not exist`), "Secret", `Secret "crm" does not exist (SecretNotFound); messages are kept, not sent`, "create the Secret", ""},
		{"no key", refused("SecretKeyMissing", "no key"), "Secret", "SecretKeyMissing", "add the key", ""},
		{"no Source", refused("NoSource", `no Source "ios"`), "Source", `no Source "ios" (NoSource)`, "spec.sourceRefs",
			`PROBLEM Source no Source "ios" (NoSource)` + "\n"},
		{"a built-in Source only", d(func(d *v1beta1.WebhookDestination) {
			d.Spec.SourceRefs = []v1beta1.SourceReference{{Name: "posthorn-dead-letters"}}
		}), "", "", "", `OK Source Source "posthorn-dead-letters" is built in`},
		{"dead letters that cannot be forwarded", refused("InvalidForwardTarget", `"ops" forwards its own dead letters`), "Dead letters", "(InvalidForwardTarget)", "name another", `PROBLEM Dead letters "ops" forwards its own dead letters (InvalidForwardTarget)` + "\n"},
		{"a bad filter", refused("InvalidFilter", "syntax"), "Filter", "syntax", "spec.filter", ""},
		{"an address denied", refused("EgressDenied", "10.0.0.1"), "Destination", "10.0.0.1", "--egress-allow", ""},
		{"an unknown reason", refused("Novelty", "some text"), "Destination", "some text (Novelty)", "", ""},
		{"the operator does not run", d(func(d *v1beta1.WebhookDestination) { d.Generation = 2 }), "Destination", "operator has not processed", "operator's log", ""},
		{"created a moment ago", d(func(d *v1beta1.WebhookDestination) { d.Status = v1beta1.WebhookDestinationStatus{} }), "Destination", "operator has not processed", "", ""},
		{"no dispatcher", d(func(d *v1beta1.WebhookDestination) {
			d.Status.Conditions[1] = condition("Programmed", "NoDispatcher", "no dispatcher is ready")
		}), "Config", "no dispatcher is ready (NoDispatcher)", "contact an administrator", ""},
		{"no owner", d(func(d *v1beta1.WebhookDestination) {
			d.Status.Conditions[1] = condition("Programmed", "Unowned", "no dispatcher owns it")
		}), "Config", "no dispatcher owns it (Unowned)", "kubectl posthorn slots", ""},
		{"not everywhere yet", d(func(d *v1beta1.WebhookDestination) {
			d.Status.Conditions[1] = condition("Programmed", "Pending", "1 of 2")
		}), "Config", "1 of 2 (Pending)", "wait", ""},
		{"refused by a dispatcher", report(func(t *adminapi.NamespaceReport, _ *adminapi.Report) {
			t.Refused = &adminapi.RefusedConfig{Error: "unknown field"}
		}), "Config", "dispatcher a rejects the config and keeps the previous one: unknown field", "update", ""},
		{"a full disk", fullDisk, "Disk", "the disk of dispatcher a is full, so new calls are answered 503 until 12 MiB become free; of 64 MiB, Posthorn uses 40 MiB and other files 14 MiB; the largest backlogs are shop/crm (5 pending, 0 dead letters)", "fix the receivers with the largest backlog", ""},
		{"a full disk, because of other files", func(f *Facts) {
			report(func(_ *adminapi.NamespaceReport, r *adminapi.Report) {
				r.Storage = adminapi.StorageReport{UsedBytes: 8 << 20, FreeBytes: 10 << 20, TotalBytes: 64 << 20, Pressure: true}
			})(f)
		}, "Disk", "new calls are answered 503; of 64 MiB, Posthorn uses 8 MiB and other files 46 MiB", "remove other files", ""},
		{"a full disk and a broken receiver", func(f *Facts) {
			fullDisk(f)
			s(func(s *v1beta1.Source) {
				meta.SetStatusCondition(&s.Status.Conditions, condition("Receiving", "StoragePressure",
					"calls are answered 503: a dispatcher's storage is full"))
			})(f)
			failing(v1beta1.EndpointCircuitOpen, "ConnectionRefused", "connection refused")(f)
		}, "Endpoint", "connection refused", "that the receiver runs", "PROBLEM Disk the disk of dispatcher a is full"},
		{"large calls are refused", report(func(t *adminapi.NamespaceReport, _ *adminapi.Report) {
			t.Sources[0].LastRejected, t.Sources[0].LastRejection = now.Add(-time.Second*59), "storage_full: storage is full"
		}), "Disk", `Source "web": calls are answered 503, the last one 59s ago: storage_full: storage is full`, "fix the destinations with the largest backlog", ""},
		{"large calls were refused a minute ago", report(func(t *adminapi.NamespaceReport, _ *adminapi.Report) {
			t.Sources[0].LastRejected, t.Sources[0].LastRejection = now.Add(-time.Minute), "storage_full: storage is full"
		}), "", "", "", ""},
		{"invalid calls are refused", report(func(t *adminapi.NamespaceReport, _ *adminapi.Report) {
			t.Sources[0].LastRejected, t.Sources[0].LastRejection = now, "no_event: no event"
		}), "", "", "", ""},
		{"a full share", s(func(s *v1beta1.Source) {
			meta.SetStatusCondition(&s.Status.Conditions, condition("Receiving", "StoragePressure", "calls are answered 503"))
		}), "Disk", `Source "web": calls are answered 503 (StoragePressure)`, "fix the destinations with the largest backlog", ""},
		{"a disk that fills", report(func(_ *adminapi.NamespaceReport, r *adminapi.Report) { r.Storage.DaysLeft = 3 }), "", "", "", "NOTICE Config the disk of dispatcher a is full in at most 3 days at the present rate"},
		{"its Source is suspended", s(func(s *v1beta1.Source) { s.Spec.Suspend = &yes }), "Source", `Source "web" is suspended`,
			"spec.suspend", ""},
		{"two Sources with one key", s(func(s *v1beta1.Source) {
			s.Status.Conditions[0] = condition("Accepted", "WriteKeyConflict", "ios has it")
		}), "Source", "ios has it", "another write key", ""},
		{"calls are rejected", s(func(s *v1beta1.Source) {
			s.Status.Conditions[1] = condition("Receiving", "RejectingCalls", "the latest: no userId")
		}), "Source", "no userId", "fix the sender", ""},
		{"no call yet", s(func(s *v1beta1.Source) { s.Status = v1beta1.SourceStatus{} }), "Source", "no call has ever been accepted", "write key", ""},
		{"no call since the start", s(func(s *v1beta1.Source) { s.Status.LastReceivedTime = nil }), "", "", "", "none since the dispatchers started"},
		{"unknown write keys", func(f *Facts) {
			f.UnknownKeys = []adminapi.UnknownKey{
				{Prefix: "demo", Address: "10.1.2.3", Requests: 9, First: now.Add(-5 * time.Minute), Last: now.Add(-time.Minute)},
				{Address: "10.1.2.4", Requests: 3, First: now.Add(-4 * time.Minute), Last: now.Add(-3 * time.Second)},
			}
		}, "", "", "", `NOTICE Source 12 requests with an unknown write key since 02:59:05Z, the last one 3s ago: 9 from 10.1.2.3 with "demo…", 3 from 10.1.2.4` + "\n"},
		{"a selector that matches", d(func(d *v1beta1.WebhookDestination) {
			d.Spec.SourceRefs, d.Spec.SourceSelector = nil, &metav1.LabelSelector{MatchLabels: map[string]string{"team": "shop"}}
		}), "", "", "", `Source "web"`},
		{"a selector that matches none", d(func(d *v1beta1.WebhookDestination) {
			d.Spec.SourceRefs, d.Spec.SourceSelector = nil, &metav1.LabelSelector{MatchLabels: map[string]string{"team": "x"}}
		}), "Source", "matches no Source in this namespace", "spec.sourceSelector", ""},
		{"everything is filtered", d(func(d *v1beta1.WebhookDestination) {
			d.Spec.Filter = &v1beta1.Filter{Expression: "false"}
			d.Status.Delivery = &v1beta1.DeliveryStatus{Filtered: 120}
		}), "Filter", "the filter excluded every call so far (120 messages)", "relax spec.filter", ""},
		{"excluded by the calls", d(func(d *v1beta1.WebhookDestination) {
			d.Status.Delivery = &v1beta1.DeliveryStatus{Filtered: 1}
		}), "Filter", "the filter excluded every call so far (1 message)", "integrations", ""},
		{"some are filtered", d(func(d *v1beta1.WebhookDestination) { d.Status.Delivery.Filtered = 3 }), "", "", "", "NOTICE Filter 3 messages"},
		{"circuit open", failing(v1beta1.EndpointCircuitOpen, "ConnectionRefused", "nothing listens at 10.0.0.9:80"), "Endpoint", `circuit breaker of "primary" is open, and no message is pending; the next one is sent as a probe; last success 3s ago; the last failure was 2s ago: nothing listens at 10.0.0.9:80 (ConnectionRefused)`, "receiver runs", ""},
		{"circuit open, next probe", func(f *Facts) {
			failing(v1beta1.EndpointCircuitOpen, "ServerError", "answered 500")(f)
			f.Destinations[0].Status.Delivery = &v1beta1.DeliveryStatus{Pending: 3, Retrying: 1, NextAttemptTime: at(-40 * time.Second)}
		}, "Endpoint", `circuit breaker of "primary" is open, only probes are sent, the next one in 40s; all pending messages follow when it succeeds; last success`, "log", "3 messages pending, 1 of them is a retry"},
		{"circuit open, with a filter", func(f *Facts) {
			failing(v1beta1.EndpointCircuitOpen, "ServerError", "answered 500")(f)
			f.Destinations[0].Spec.Filter = &v1beta1.Filter{}
			f.Destinations[0].Status.Delivery = &v1beta1.DeliveryStatus{Pending: 3}
		}, "Endpoint", "circuit breaker", "log", "NOTICE Backlog 3 messages pending, including messages that the filter will exclude; 0 messages delivered so far"},
		{"a backlog, with a filter", d(func(d *v1beta1.WebhookDestination) {
			d.Spec.Filter, d.Status.Delivery.Pending = &v1beta1.Filter{}, 3
		}), "", "", "", "NOTICE Backlog 3 messages pending; 120 messages delivered so far"},
		{"gone", failing(v1beta1.EndpointGone, "Rejected", "answered 410 Gone"), "Endpoint", `"primary" answered 410 (Gone), one probe an hour is sent; last success 3s ago; the last failure was 2s ago: answered 410 Gone (Rejected)`, "correct the URL", ""},
		{"one endpoint of two", func(f *Facts) {
			failing(v1beta1.EndpointCircuitOpen, "ServerError", "answered 500")(f)
			s := &f.Destinations[0].Status
			s.Endpoints[0].LastSuccessTime = nil
			s.Endpoints = append(s.Endpoints, v1beta1.EndpointStatus{Name: "b", State: v1beta1.EndpointHealthy, LastSuccessTime: at(time.Second)})
			s.Conditions = append(s.Conditions, condition("Delivering", "Delivering", ""))
		}, "", "", "", "no successful delivery yet; the last failure was 2s ago: answered 500 (ServerError); another endpoint accepts the messages"},
		{"recovering", func(f *Facts) {
			failing(v1beta1.EndpointDegraded, "ServerError", "answered 500")(f)
			f.Destinations[0].Status.Endpoints[0].LastSuccessTime = at(time.Second)
		}, "", "", "", `NOTICE Endpoint "primary" fails now and then, or recovers; last success just now; the last failure was 2s ago`},
		{"certificate", failing(v1beta1.EndpointDegraded, "CertificateRejected", "self-signed"), "Endpoint", "self-signed (CertificateRejected)",
			"spec.endpoints[].tls.ca", ""},
		{"a failure without a message", failing(v1beta1.EndpointDegraded, "TimedOut", ""), "Endpoint", "TimedOut (TimedOut)", "timeout", ""},
		{"recovered", failing(v1beta1.EndpointHealthy, "TimedOut", ""), "", "", "", `OK Endpoint "primary" works`},
		{"nothing sent yet", d(func(d *v1beta1.WebhookDestination) {
			d.Status.Endpoints[0] = v1beta1.EndpointStatus{Name: "primary", State: v1beta1.EndpointIdle}
		}), "", "", "", `NOTICE Endpoint no deliveries to "primary"`},
		{"nothing sent since a restart", d(func(d *v1beta1.WebhookDestination) {
			d.Status.Endpoints[0].State = v1beta1.EndpointIdle
		}), "", "", "", `since the last change; last success 3s ago`},
		{"skipped first attempts", d(func(d *v1beta1.WebhookDestination) {
			d.Status.Endpoints[0].FirstAttemptsSkipped = 7
		}), "", "", "", `NOTICE Endpoint 7 messages were never sent to "primary": the retry window ended before their turn`},
		{"pending and skipped first attempts in a report", func(f *Facts) {
			twoEndpoints(f)
			reported([]adminapi.EndpointReport{{Name: "b", State: adminapi.EndpointHealthy, FirstAttemptsPending: 1, FirstAttemptsSkipped: 2}},
				nil)(f)
		}, "", "", "", "NOTICE Endpoint 1 message has not been sent to \"b\" yet\nNOTICE Endpoint 2 messages were never sent to \"b\""},
		{"an endpoint works again since the status", func(f *Facts) {
			failing(v1beta1.EndpointCircuitOpen, "ServerError", "answered 500")(f)
			reported([]adminapi.EndpointReport{healthyNow}, []adminapi.EndpointReport{healthyNow})(f)
		}, "", "", "", `OK Endpoint "primary" works; last success just now`},
		{"an endpoint fails since the status, at one pod of two", func(f *Facts) {
			f.Attempts = []adminapi.Attempt{{Endpoint: "primary", StatusCode: 422, Response: "no email"}}
			reported([]adminapi.EndpointReport{openNow}, []adminapi.EndpointReport{{Name: "primary", State: adminapi.EndpointHealthy,
				LastSuccess: now.Add(-time.Minute)}})(f)
		}, "Endpoint", `circuit breaker of "primary" is open, only probes are sent, the next one in 20s; all pending messages follow when it succeeds; last success 3s ago; the last failure was 5s ago: answered 422 (Rejected); it answered "no email"`, "what the receiver expects", "NOTICE Backlog 10 messages pending"},
		{"one endpoint of two fails since the status", func(f *Facts) {
			twoEndpoints(f)
			works := adminapi.EndpointReport{Name: "b", State: adminapi.EndpointHealthy, LastSuccess: now}
			reported([]adminapi.EndpointReport{openNow, works}, nil)(f)
		}, "", "", "", "NOTICE Endpoint circuit breaker of \"primary\" is open"},
		{"one endpoint of two fails since the status, each must accept", func(f *Facts) {
			twoEndpoints(f)
			f.Destinations[0].Spec.SuccessPolicy = v1beta1.EveryEndpoint
			works := adminapi.EndpointReport{Name: "b", State: adminapi.EndpointHealthy, LastSuccess: now}
			reported([]adminapi.EndpointReport{openNow, works}, nil)(f)
		}, "Endpoint", "circuit breaker of \"primary\" is open", "", `OK Endpoint "b" works`},
		{"the last working endpoint fails since the status", func(f *Facts) {
			twoEndpoints(f)
			f.Destinations[0].Status.Conditions = append(f.Destinations[0].Status.Conditions, condition("Delivering", "Delivering", ""))
			other := openNow
			other.Name = "b"
			reported([]adminapi.EndpointReport{openNow, other}, nil)(f)
		}, "Endpoint", "circuit breaker of \"primary\" is open", "", `PROBLEM Endpoint circuit breaker of "b" is open`},
		{"discards ahead in the status", d(func(d *v1beta1.WebhookDestination) {
			d.Status.Conditions = append(d.Status.Conditions, metav1.Condition{Type: "Ready", Status: "True", Reason: "DiscardAhead", Message: `accepted; pending messages of Source "ios" will be discarded at 2026-01-02T03:14:05Z`})
		}), "", "", "", "NOTICE Backlog pending messages of Source \"ios\" will be discarded at 2026-01-02T03:14:05Z\n"},
		{"discards ahead in reports", report(func(_ *adminapi.NamespaceReport, r *adminapi.Report) {
			r.Configs = []adminapi.ConfigReport{{Namespace: "shop",
				Discards: []adminapi.Discard{{Source: "ios", Destination: "crm", Messages: 2, At: now.Add(time.Minute)},
					{Source: "web", Destination: "other", Messages: 1, At: now}}}}
		}), "", "", "", "NOTICE Backlog 4 pending messages of Source \"ios\" will be discarded at 2026-01-02T03:05:05Z"},
		{"a backlog", d(func(d *v1beta1.WebhookDestination) {
			d.Status.Delivery.Pending, d.Status.Delivery.OldestPendingTime = 1, at(100*time.Hour)
		}), "", "", "", "NOTICE Backlog 1 message pending, the oldest was accepted 4 days ago; 120 messages delivered"},
		{"dead letters", d(func(d *v1beta1.WebhookDestination) {
			d.Status.Delivery.DeadLettered, d.Status.Delivery.DeadLettersStored = 5, 2
		}), "", "", "", "NOTICE DeadLetters 2 dead letters stored; 5 messages became dead letters so far\n"},
		{"redelivered dead letters", d(func(d *v1beta1.WebhookDestination) { d.Status.Delivery.DeadLettered = 5 }), "", "", "", "OK DeadLetters none stored; 5 messages became dead letters so far\n"},
		{"dead letters in reports", func(f *Facts) {
			report(func(t *adminapi.NamespaceReport, _ *adminapi.Report) {
				t.Destinations[0].DeadLettered, t.Destinations[0].DeadLettersStored = 4, 1
			})(f)
		}, "", "", "", "NOTICE DeadLetters 2 dead letters stored; 8 messages became dead letters so far\n"},
		{"a requested wait", waiting(), "", "", "", "the next attempt is in 40m0s: messages wait until " + now.Add(40*time.Minute).Format(time.RFC3339) + ` because "primary" answered 503 with Retry-After: 86400 20m0s ago; a success or an edit of the destination ends the wait earlier; 120 messages`},
		{"a requested wait that a success ended", waiting(adminapi.Attempt{Time: now.Add(-time.Minute), Endpoint: "primary", StatusCode: 200}), "", "", "", "the next attempt is in 40m0s; 120 messages"},
		{"a requested wait that has ended", waiting(adminapi.Attempt{Time: now.Add(-time.Hour), Endpoint: "primary", StatusCode: 503, Reason: "ServerError", RetryAfter: time.Minute}, adminapi.Attempt{Time: now.Add(-time.Minute), Endpoint: "primary", StatusCode: 200}), "", "", "", "the next attempt is in 40m0s; 120 messages"},
		{"reports are newer than status", report(nil), "", "", "", "NOTICE Backlog 10 messages pending, 10 of them are retries, the oldest was accepted 1m0s ago and expires in 3h59m0s, the next attempt is in 20s; 130 messages delivered so far"},
		{"reports of calls, too", report(nil), "", "", "", `Source "web" has accepted 140 calls, the last one just now`},
	} {
		t.Run(c.name, func(t *testing.T) {
			facts := healthy()
			if c.change != nil {
				c.change(&facts)
			}
			findings := Explain(facts)
			var text strings.Builder
			for _, f := range findings {
				text.WriteString(string(f.Level) + " " + f.About + " " + f.Text + "\n")
			}
			cause := Cause(findings)
			switch {
			case cause == nil && c.about != "":
				t.Errorf("no problem found:\n%s", text.String())
			case cause != nil && (c.about == "" || cause.About != c.about || !strings.Contains(cause.Text, c.cause) ||
				!strings.Contains(cause.Fix, c.fix)):
				t.Errorf("cause %+v, want %s: %s, fix: %s", *cause, c.about, c.cause, c.fix)
			}
			if !strings.Contains(text.String(), c.also) {
				t.Errorf("no finding contains %q:\n%s", c.also, text.String())
			}
		})
	}
}

// The reports must not change the objects of the caller.
func TestExplainChangesNoObject(t *testing.T) {
	f := healthy()
	f.Reports = []*podreport.Index{podreport.NewIndex(adminapi.Report{Namespaces: []adminapi.NamespaceReport{{Namespace: "shop",
		Destinations: []adminapi.DestinationReport{
			{Name: "crm", Ledger: adminapi.Ledger{Delivered: 7}, Endpoints: []adminapi.EndpointReport{{Name: "primary", State: adminapi.EndpointGone}}},
		}}}})}
	Explain(f)
	if diff := cmp.Diff(healthy().Destinations, f.Destinations); diff != "" {
		t.Errorf("destinations after Explain (-want +got):\n%s", diff)
	}
}

// The hint depends on the status code, the URL and the secret; the finding has the receiver's answer.
func TestHintOfAFailure(t *testing.T) {
	const again = "; rejected messages are dead letters until the circuit opens; redeliver them after the fix"
	lineBreak := "the spec is valid; spec.signing: key \"k\" of Secret \"s\" ends with a line break, which is not used"
	for _, c := range []struct {
		name, reason   string
		status         int32
		url, accepted  string
		answer         string
		text, fix, not string
		batch          *v1beta1.Batch
	}{
		{name: "unauthorized", reason: "Rejected", status: 401, fix: "check the signing secret"},
		{name: "unauthorized, with batches", reason: "Rejected", status: 401, fix: "check the signing secret", not: again,
			batch: &v1beta1.Batch{}},
		{name: "unauthorized, secret with a line break", reason: "Rejected", status: 401, accepted: lineBreak, fix: "let the receiver use the secret without the line break at its end"},
		{name: "not found, secret with a line break", reason: "Rejected", status: 404, accepted: lineBreak,
			fix: "check the path of the URL" + again},
		{name: "gone", reason: "Rejected", status: 410, fix: "the URL was removed"},
		{name: "unprocessable", reason: "Rejected", status: 422, fix: "posthorn deadletters show"},
		{name: "another status", reason: "Rejected", status: 418, fix: "check the URL, its credentials and headers" + again},
		{name: "the answer", reason: "Rejected", status: 422, answer: "no field\n email", text: `; it answered "no field email"`},
		{name: "a long answer", reason: "Rejected", status: 422, answer: strings.Repeat("ä", 300),
			text: `; it answered "` + strings.Repeat("ä", 200) + `…"`},
		{name: "http to a port with TLS", reason: "ConnectionFailed", url: "http://a.example", fix: "set a URL with https://"},
		{name: "http to a port with TLS that answers 400", reason: "Rejected", status: 400, url: "http://a.example",
			fix: "set a URL with https://"},
		{name: "no HTTP", reason: "InvalidResponse", url: "http://a.example", fix: "check the port; if the port uses TLS"},
		{name: "no list of rejected messages", reason: "InvalidResponse", status: 200, url: "http://a.example",
			fix: `{"failed": [{"index": 0, "status": 422}]}`, not: "https"},
		{name: "https", reason: "ConnectionFailed", url: "https://a.example", fix: "check the network", not: "https"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := healthy()
			d := &f.Destinations[0]
			d.Spec.Endpoints = []v1beta1.Endpoint{{Name: "primary", URL: c.url}}
			d.Spec.Delivery.Batch = c.batch
			d.Status.Conditions[0].Message = c.accepted
			d.Status.Endpoints[0].State = v1beta1.EndpointCircuitOpen
			d.Status.Endpoints[0].LastFailure = &v1beta1.DeliveryFailure{Time: *at(time.Second), Reason: c.reason, StatusCode: c.status}
			f.Attempts = []adminapi.Attempt{
				{Endpoint: "primary", StatusCode: int(c.status), Response: c.answer},
				{Endpoint: "primary", StatusCode: 500, Response: "another status"},
				{Endpoint: "b", StatusCode: int(c.status), Response: "another endpoint"},
			}
			cause := Cause(Explain(f))
			if cause == nil {
				t.Fatal("no problem found, want the failure")
			}
			if !strings.Contains(cause.Fix, c.fix) {
				t.Errorf("fix: got %q, want %q", cause.Fix, c.fix)
			}
			if c.not != "" && strings.Contains(cause.Fix, c.not) {
				t.Errorf("fix: got %q, want it without %q", cause.Fix, c.not)
			}
			if !strings.Contains(cause.Text, c.text) || c.answer == "" && strings.Contains(cause.Text, "it answered") {
				t.Errorf("text: got %q, want %q", cause.Text, c.text)
			}
		})
	}
}

// TestHints checks that every reason of a failed attempt has a hint.
func TestHints(t *testing.T) {
	for _, reason := range []string{
		v1beta1.ReasonTimedOut, v1beta1.ReasonConnectionRefused, v1beta1.ReasonConnectionFailed, v1beta1.ReasonDNSFailed,
		v1beta1.ReasonCertificateRejected,
		v1beta1.ReasonTLSFailed, v1beta1.ReasonAddressDenied, v1beta1.ReasonServerError, v1beta1.ReasonThrottled, v1beta1.ReasonRejected,
		v1beta1.ReasonRedirected, v1beta1.ReasonInvalidResponse,
	} {
		if hints[reason] == "" {
			t.Errorf("no hint for %s", reason)
		}
	}
}

func TestDiscardsAhead(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	configs := []adminapi.ConfigReport{
		{Namespace: "bank", Discards: []adminapi.Discard{{Source: "ios", Destination: "crm", Messages: 1, At: now.Add(-time.Second)}}},
		{Namespace: "shop", Discards: []adminapi.Discard{
			{Source: "empty", Destination: "crm", At: now.Add(time.Minute)},
			{Source: "web", Destination: "crm", Messages: 12, At: now.Add(9*time.Minute + 58*time.Second)},
		}},
	}
	bank := `1 pending message of Source "ios" for WebhookDestination "crm" in namespace bank will be discarded in 0s, at 2026-03-01T11:59:59Z; to keep them, create what was deleted again before that time`
	shop := `12 pending messages of Source "web" for WebhookDestination "crm" in namespace shop will be discarded in 9m58s, at 2026-03-01T12:09:58Z; to keep them, create what was deleted again before that time`
	for namespace, want := range map[string][]string{"": {bank, shop}, "shop": {shop}, "other": nil} {
		if diff := cmp.Diff(want, DiscardsAhead(configs, namespace, now)); diff != "" {
			t.Errorf("namespace %q (-want +got):\n%s", namespace, diff)
		}
	}
}

// A Source that has never had a call does not hide what is wrong with another one's messages.
func TestIdleSourceIsTheLastCause(t *testing.T) {
	idle := Finding{Level: Problem, About: "Source", Idle: true}
	broken := Finding{Level: Problem, About: "Endpoint"}
	for name, c := range map[string]struct {
		findings []Finding
		want     string
	}{
		"alone":              {[]Finding{{Level: Fine, About: "Config"}, idle}, "Source"},
		"before an endpoint": {[]Finding{idle, broken}, "Endpoint"},
		"after an endpoint":  {[]Finding{broken, idle}, "Endpoint"},
	} {
		if got := Cause(c.findings); got == nil || got.About != c.want {
			t.Errorf("%s: got %+v, want %s", name, got, c.want)
		}
	}
	if got := Cause([]Finding{{Level: Notice, Idle: true}}); got != nil {
		t.Errorf("a notice is a cause: %+v", got)
	}
}

// waiting makes a message wait because the receiver requested it; further are later attempts.
func waiting(further ...adminapi.Attempt) func(*Facts) {
	return func(f *Facts) {
		next := metav1.NewTime(now.Add(40 * time.Minute))
		f.Destinations[0].Status.Delivery.Pending, f.Destinations[0].Status.Delivery.NextAttemptTime = 1, &next
		f.Attempts = append([]adminapi.Attempt{{Time: now.Add(-20 * time.Minute), Endpoint: "primary", StatusCode: 503, Reason: "ServerError",
			RetryAfter: 24 * time.Hour}}, further...)
	}
}

// A stored status without its operator, or with a retry that was due long ago, is a problem; one of an idle
// destination is not.
func TestOldStatus(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	at := func(age time.Duration) *metav1.Time { return &metav1.Time{Time: now.Add(-age)} }
	for name, c := range map[string]struct {
		renewed, observed time.Duration // 0 is unknown.
		due               *metav1.Time
		live              bool
		want              string
	}{
		"an idle destination": {0, 10 * time.Hour, nil, false, ""},
		"the operator runs":   {time.Minute, 10 * time.Hour, at(time.Hour), false, ""},
		"the operator does not run": {4 * time.Minute, 4 * time.Minute, nil, false,
			"the operator does not run: it was last active 4m0s ago"},
		"also with live numbers":             {4 * time.Minute, 4 * time.Minute, nil, true, "the operator does not run"},
		"a retry was due":                    {0, 15 * time.Minute, at(14 * time.Minute), false, "the operator has not written this status for 15m0s"},
		"a retry was due, with live numbers": {0, 15 * time.Minute, at(14 * time.Minute), true, ""},
		"a retry was due a moment ago":       {0, 15 * time.Minute, at(time.Minute), false, ""},
	} {
		d := v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "crm"}}
		d.Status.ObservedTime, d.Status.Delivery = at(c.observed), &v1beta1.DeliveryStatus{NextAttemptTime: c.due}
		f := Facts{Namespace: "shop", Name: "crm", Destinations: []v1beta1.WebhookDestination{d}, Now: now}
		if c.renewed > 0 {
			f.OperatorRenewed = now.Add(-c.renewed)
		}
		if c.live {
			f.Reports = []*podreport.Index{podreport.NewIndex(adminapi.Report{})}
		}
		got := ""
		for _, found := range Explain(f) {
			if found.About == "Operator" && found.Level == Problem {
				got = found.Text
			}
		}
		if !strings.HasPrefix(got, c.want) || c.want == "" && got != "" {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

// Messages on the volume of a removed pod are a problem, beside live numbers, too.
func TestStranded(t *testing.T) {
	d := v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "crm"}}
	d.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: "True", Reason: "DiscardAhead", Message: "accepted; stranded: 9 messages on the volume of d-1, which does not run; pending messages of Source \"ios\" will be discarded at 2026-01-02T03:14:05Z"}}
	for _, reports := range [][]*podreport.Index{nil, {podreport.NewIndex(adminapi.Report{})}} {
		found := Explain(Facts{Namespace: "shop", Name: "crm", Destinations: []v1beta1.WebhookDestination{d}, Reports: reports})
		if !slices.ContainsFunc(found, func(f Finding) bool {
			return f.Level == Problem && f.Text == "9 messages on the volume of d-1, which does not run"
		}) {
			t.Errorf("%d reports: no problem names the messages: %+v", len(reports), found)
		}
	}
}

// DiskFull names the largest backlogs of a namespace, or of all, and why each is not delivered.
func TestDiskFullNamesWhoFillsIt(t *testing.T) {
	failed := func(reason string, at, success time.Time) []adminapi.EndpointReport {
		return []adminapi.EndpointReport{{Name: "primary", LastSuccess: success, LastFailure: &adminapi.Failure{Time: at, Reason: reason}}}
	}
	destination := func(name string, pending, stored int64, endpoints []adminapi.EndpointReport) adminapi.DestinationReport {
		return adminapi.DestinationReport{Name: name, Ledger: adminapi.Ledger{Pending: pending}, DeadLettersStored: stored, Endpoints: endpoints}
	}
	x := podreport.NewIndex(adminapi.Report{Pod: "a", Storage: adminapi.StorageReport{Pressure: true}, Namespaces: []adminapi.NamespaceReport{
		{Namespace: "shop", Destinations: []adminapi.DestinationReport{
			destination("crm", 9, 0, failed("ServerError", now, now.Add(time.Second))), destination("idle", 0, 0, nil),
			destination("few", 1, 0, nil), destination("dead", 0, 12, failed("Rejected", now, time.Time{})),
		}},
		{Namespace: "mail", Destinations: []adminapi.DestinationReport{destination("mailer", 1743, 1,
			failed("ConnectionRefused", now, now.Add(-time.Hour)))}},
	}})
	for namespace, want := range map[string]string{
		"":      "the largest backlogs are mail/mailer (1743 pending, 1 dead letter, ConnectionRefused), shop/dead (0 pending, 12 dead letters, Rejected), shop/crm (9 pending, 0 dead letters)",
		"shop":  "the largest backlogs are shop/dead (0 pending, 12 dead letters, Rejected), shop/crm (9 pending, 0 dead letters), shop/few (1 pending, 0 dead letters)",
		"other": "Posthorn uses 0 MiB and other files 0 MiB",
	} {
		if got := DiskFull(x, namespace).Text; !strings.HasSuffix(got, want) {
			t.Errorf("namespace %q:\ngot  %s\nwant %s at its end", namespace, got, want)
		}
	}
}

// A failing endpoint has its reason, its status code and the begin of the failure for programs.
func TestFindingOfAnEndpointForPrograms(t *testing.T) {
	since := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	d := v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "crm"}}
	d.Status.Conditions = []metav1.Condition{{Type: v1beta1.ConditionDelivering, Status: metav1.ConditionFalse, LastTransitionTime: since}}
	d.Status.Endpoints = []v1beta1.EndpointStatus{{Name: "primary", State: v1beta1.EndpointDegraded,
		LastFailure: &v1beta1.DeliveryFailure{Time: metav1.NewTime(since.Add(time.Minute)), Reason: v1beta1.ReasonRejected, StatusCode: 422}}}
	found := Explain(Facts{Namespace: "shop", Name: "crm", Destinations: []v1beta1.WebhookDestination{d}, Now: since.Add(time.Hour)})
	i := slices.IndexFunc(found, func(f Finding) bool { return f.About == "Endpoint" })
	if i < 0 {
		t.Fatalf("findings: got %+v, want one about the endpoint", found)
	}
	if f := found[i]; f.Reason != v1beta1.ReasonRejected || f.StatusCode != 422 || !f.Since.Equal(since.Time) {
		t.Errorf("finding: got reason %q, status code %d and since %v; want Rejected, 422 and %v", f.Reason, f.StatusCode, f.Since, since)
	}
}
