package health

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/test/invariants"
)

func TestAudience(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	accepted := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "ok", State: liveconfig.Active, Revision: "r"}
	paused := compile.Verdict{Accepted: true, Reason: v1beta1.ReasonAccepted, Message: "ok", Unresolved: &compile.Unresolved{Reason: v1beta1.ReasonNoSource, Message: "no source"}, State: liveconfig.Paused, Revision: "r"}
	pods := func(owner adminapi.AudienceReport) []Pod {
		owner.Name, owner.Generation, owner.Revision, owner.Owner = "vip", 2, "r", true
		other := adminapi.AudienceReport{Name: "vip", Generation: 2, Revision: "r"}
		report := func(a adminapi.AudienceReport) *podreport.Index {
			return podreport.NewIndex(adminapi.Report{Ready: true,
				Namespaces: []adminapi.NamespaceReport{{Namespace: "shop", Audiences: []adminapi.AudienceReport{a}}}})
		}
		return []Pod{{Name: "a", Report: report(other)}, {Name: "b", Report: report(owner)}}
	}
	audience := v1beta1.Audience{ObjectMeta: metav1.ObjectMeta{Name: "vip", Generation: 2}, Spec: v1beta1.AudienceSpec{Key: "shoppers"}}
	for _, c := range []struct {
		name    string
		verdict compile.Verdict
		pods    []Pod
		status  metav1.ConditionStatus
		reason  string
		ready   bool
		members int64
	}{
		{"before the first sync", accepted, pods(adminapi.AudienceReport{}), metav1.ConditionUnknown, v1beta1.ReasonNoSyncYet, true, -1},
		{"synced", accepted, pods(adminapi.AudienceReport{Members: 7, Added: 2, LastSync: now}), metav1.ConditionTrue,
			v1beta1.ReasonSynced, true, 7},
		{"sending", accepted, pods(adminapi.AudienceReport{Members: 7, Unsent: 2, Waits: "storage is filling up", LastSync: now}), metav1.ConditionTrue, v1beta1.ReasonSending, true, 7},
		{"sending the calls of a sync with another key", accepted, pods(adminapi.AudienceReport{Unsent: 2, Waits: "storage is filling up"}),
			metav1.ConditionTrue, v1beta1.ReasonSending, true, -1},
		{"refused", accepted, pods(adminapi.AudienceReport{Members: 7, LastSync: now, LastRefused: now.Add(time.Second), Refusal: "invalid_json: line 7"}), metav1.ConditionFalse, v1beta1.ReasonSyncRefused, true, 7},
		{"refused before", accepted, pods(adminapi.AudienceReport{Members: 7, LastSync: now, LastRefused: now.Add(-time.Second)}),
			metav1.ConditionTrue, v1beta1.ReasonSynced, true, 7},
		{"paused", paused, pods(adminapi.AudienceReport{Members: 7, LastSync: now}), metav1.ConditionFalse,
			v1beta1.ReasonUnresolvedRefs, false, 7},
		{"no pod", accepted, nil, metav1.ConditionUnknown, v1beta1.ReasonNoSyncYet, false, -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := audience
			a.Status = pacedAudience(a, c.verdict, "shop", c.pods, now, true)
			if err := invariants.Audience(a); err != nil {
				t.Errorf("invariants: %v", err)
			}
			synced := meta.FindStatusCondition(a.Status.Conditions, v1beta1.ConditionSynced)
			if synced.Status != c.status || synced.Reason != c.reason {
				t.Errorf("%+v", synced)
			}
			if c.reason == v1beta1.ReasonSyncRefused && !strings.Contains(synced.Message, "line 7") {
				t.Errorf("message %q", synced.Message)
			}
			if c.reason == v1beta1.ReasonSending && (!strings.Contains(synced.Message, "2 identify calls not queued yet: storage is filling up") ||
				a.Status.LastSync.Pending != 2) {
				t.Errorf("message %q, lastSync %+v", synced.Message, a.Status.LastSync)
			}
			if ready := meta.IsStatusConditionTrue(a.Status.Conditions, v1beta1.ConditionReady); ready != c.ready {
				t.Errorf("ready %v", ready)
			}
			if members := a.Status.Members; c.members < 0 != (members == nil) || members != nil && *members != c.members {
				t.Errorf("members %v", members)
			}
			if again := pacedAudience(a, c.verdict, "shop", c.pods, now.Add(time.Hour), true); !equality.Semantic.DeepEqual(again, a.Status) {
				t.Error("equal inputs return another status")
			}
		})
	}
	// While the owner restarts, the numbers are kept. They change only when they are due.
	a := audience
	a.Status = pacedAudience(a, accepted, "shop", pods(adminapi.AudienceReport{Members: 7, LastSync: now}), now, true)
	gone := pacedAudience(a, accepted, "shop", nil, now, true)
	if gone.Members == nil || *gone.Members != 7 || meta.FindStatusCondition(gone.Conditions,
		v1beta1.ConditionSynced).Reason != v1beta1.ReasonSynced {
		t.Errorf("without pods: %+v", gone)
	}
	more := pods(adminapi.AudienceReport{Members: 8, LastSync: now.Add(time.Second)})
	if early := pacedAudience(a, accepted, "shop", more, now, false); *early.Members != 7 {
		t.Error("a number was written before it was due")
	}
	if due := pacedAudience(a, accepted, "shop", more, now, true); *due.Members != 8 {
		t.Error("a number that was due was not written")
	}
}
