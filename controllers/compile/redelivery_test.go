package compile

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

var redeliveryStart = metav1.NewTime(time.Unix(1_800_000_000, 0))

// redeliveryOf returns a Redelivery; a larger number is younger.
func redeliveryOf(number int, destination string, change ...func(*v1beta1.Redelivery)) v1beta1.Redelivery {
	o := v1beta1.Redelivery{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("r", number), UID: types.UID(fmt.Sprint(number)), Generation: 3,
			CreationTimestamp: metav1.NewTime(time.Unix(int64(1e9+number), 0))},
		Spec: v1beta1.RedeliverySpec{DestinationRef: v1beta1.ObjectReference{Name: destination}, DeadLettersPerSecond: 100},
	}
	for _, c := range change {
		c(&o)
	}
	return o
}

func started(o *v1beta1.Redelivery) {
	o.Status.StartTime = &redeliveryStart
	o.Status.Parts = &v1beta1.RedeliveryParts{Total: 4}
}

func ended(o *v1beta1.Redelivery) {
	started(o)
	o.Status.Conditions = []metav1.Condition{{Type: v1beta1.ConditionComplete, Status: metav1.ConditionTrue}}
}

// compileRedeliveries compiles Redeliveries in a namespace with these destinations, and
// checks the invariants of every result.
func compileRedeliveries(t *testing.T, destinations []string, objects ...v1beta1.Redelivery) ([]liveconfig.Redelivery,
	map[string]Verdict) {
	t.Helper()
	s := Snapshot{Namespace: "shop", Objects: pointers(objects...)}
	for _, name := range destinations {
		s.Objects = append(s.Objects, &v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	c, verdicts := table.Compile(s)
	data, _, err := liveconfig.Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := liveconfig.Decode(data); err != nil {
		t.Fatalf("the dispatcher rejects the config: %v", err)
	}
	for _, r := range c.Redeliveries {
		if v := verdicts["redeliveries"][r.Name]; !v.OK() || v.Waits != "" || v.Revision != r.Revision {
			t.Errorf("%s is in the config with the verdict %+v", r.Name, v)
		}
	}
	slices.Reverse(s.Objects)
	if again, _ := table.Compile(s); !cmp.Equal(c, again) {
		t.Error("the config depends on the order of the objects")
	}
	return c.Redeliveries, verdicts["redeliveries"]
}

// Each status has a phase, which selects the entry in the config.
func TestRedeliveryPhase(t *testing.T) {
	for name, c := range map[string]struct {
		status func(*v1beta1.Redelivery)
		want   liveconfig.RedeliveryPhase
	}{
		"new":       {func(*v1beta1.Redelivery) {}, liveconfig.RedeliveryBegin},
		"started":   {started, liveconfig.RedeliveryRun},
		"some done": {func(o *v1beta1.Redelivery) { started(o); o.Status.Parts.Done = 3 }, liveconfig.RedeliveryRun},
		"all done":  {func(o *v1beta1.Redelivery) { started(o); o.Status.Parts.Done = 4 }, liveconfig.RedeliveryRecord},
		"ended":     {ended, ""},
		"deleted":   {func(o *v1beta1.Redelivery) { started(o); o.DeletionTimestamp = &redeliveryStart }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, verdicts := compileRedeliveries(t, []string{"crm"}, redeliveryOf(1, "crm", c.status))
			var phase liveconfig.RedeliveryPhase
			for _, r := range got {
				phase = r.Phase
			}
			if phase != c.want {
				t.Errorf("phase: got %q, want %q", phase, c.want)
			}
			if v := verdicts["r1"]; !v.Accepted {
				t.Errorf("verdict: got %+v, want an accepted one", v)
			}
		})
	}
}

func TestRedeliveryEntry(t *testing.T) {
	at := func(s int64) *metav1.Time { m := metav1.NewTime(time.Unix(s, 0)); return &m }
	o := redeliveryOf(1, "crm", started, func(o *v1beta1.Redelivery) {
		o.Spec.DryRun = true
		o.Spec.Match = &v1beta1.DeadLetterMatch{Since: at(500), Until: at(1_900_000_000), Reasons: []string{"Rejected", "Expired"}, StatusCodes: []int32{422}, NoResponse: true, Types: []v1beta1.MessageType{"track"}, Events: []string{"E"}}
	})
	got, _ := compileRedeliveries(t, []string{"crm"}, o)
	want := liveconfig.Redelivery{
		Name: "r1", Generation: 3, Revision: got[0].Revision, ID: RedeliveryID("shop", &o), UID: "1", Destination: "crm", Phase: liveconfig.RedeliveryRun, DryRun: true,
		Rate: 25, Reasons: []string{"Expired", "Rejected"}, StatusCodes: []int{0, 422}, Types: []string{"track"}, Events: []string{"E"},
		Since: time.Unix(500, 0).UTC(), Until: redeliveryStart.UTC(), // not beyond the start
	}
	if diff := cmp.Diff([]liveconfig.Redelivery{want}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	o.Spec.Match.Until = at(900)
	got, _ = compileRedeliveries(t, []string{"crm"}, o)
	if !got[0].Until.Equal(time.Unix(900, 0)) {
		t.Errorf("until: got %s, want the match's until, which is before the start", got[0].Until)
	}
}

func TestRedeliveryWithoutDestination(t *testing.T) {
	got, verdicts := compileRedeliveries(t, nil, redeliveryOf(1, "crm"), redeliveryOf(2, ""), redeliveryOf(3, "crm", started))
	var names []string
	for _, r := range got {
		names = append(names, r.Name)
	}
	if diff := cmp.Diff([]string{"r3"}, names); diff != "" {
		t.Errorf("names in the config; a run that has started continues (-want +got):\n%s", diff)
	}
	for name, want := range map[string]string{"r1": v1beta1.ReasonDestinationNotFound, "r2": v1beta1.ReasonInvalidSpec,
		"r3": v1beta1.ReasonAccepted} {
		v := verdicts[name]
		if reason, _ := v.Cause(); reason != want {
			t.Errorf("%s: got reason %s, want %s", name, reason, want)
		}
	}
}

// Runs that have started continue; of the others the oldest start, within the limits.
func TestRedeliveryLimits(t *testing.T) {
	rate := func(n int32) func(*v1beta1.Redelivery) {
		return func(o *v1beta1.Redelivery) { o.Spec.DeadLettersPerSecond = n }
	}
	destinations := []string{"a", "b", "c", "d", "e"}
	for name, c := range map[string]struct {
		objects []v1beta1.Redelivery
		want    []string
		waits   map[string]string
	}{
		"one for each destination": {
			[]v1beta1.Redelivery{redeliveryOf(1, "a"), redeliveryOf(2, "a"), redeliveryOf(3, "b")}, []string{"r1", "r3"},
			map[string]string{"r2": `Redelivery "r1" of the same destination runs`},
		},
		"one that has started, before an older one": {
			[]v1beta1.Redelivery{redeliveryOf(1, "a"), redeliveryOf(2, "a", started)}, []string{"r2"},
			map[string]string{"r1": `Redelivery "r2" of the same destination runs`},
		},
		"after the end": {[]v1beta1.Redelivery{redeliveryOf(1, "a", ended), redeliveryOf(2, "a")}, []string{"r2"}, map[string]string{}},
		"four at a time": {
			[]v1beta1.Redelivery{redeliveryOf(1, "a"), redeliveryOf(2, "b"), redeliveryOf(3, "c"), redeliveryOf(4, "d"), redeliveryOf(5, "e")},
			[]string{"r1", "r2", "r3", "r4"},
			map[string]string{"r5": "4 other Redeliveries of this namespace run"},
		},
		"the sum of the rates": {
			[]v1beta1.Redelivery{redeliveryOf(1, "a", rate(6000)), redeliveryOf(2, "b", rate(6000)), redeliveryOf(3, "c", rate(4000))},
			[]string{"r1", "r3"},
			map[string]string{"r2": "with the Redeliveries of this namespace that run, spec.deadLettersPerSecond would exceed 10000 dead letters a second"},
		},
		"a missing destination": {[]v1beta1.Redelivery{redeliveryOf(1, "none"), redeliveryOf(2, "a")}, []string{"r2"}, map[string]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			got, verdicts := compileRedeliveries(t, destinations, c.objects...)
			var names []string
			for _, r := range got {
				names = append(names, r.Name)
			}
			if diff := cmp.Diff(c.want, names); diff != "" {
				t.Errorf("runs (-want +got):\n%s", diff)
			}
			waits := map[string]string{}
			for name, v := range verdicts {
				if v.Waits != "" {
					waits[name] = v.Waits
				}
			}
			if diff := cmp.Diff(c.waits, waits); diff != "" {
				t.Errorf("waiting (-want +got):\n%s", diff)
			}
		})
	}
}
