package replicated

import (
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/test/witness"
)

// takeAway removes a destination or a namespace under load, first at the owner, and applies it again within the grace
// period or after it.
func (w *world) takeAway() {
	w.repair()
	p := w.owner(10 * time.Second)
	if p == nil {
		return
	}
	pods := append([]*pod{p}, w.standbys(p)...)
	gone, source := []*target{w.destinations[w.rand.IntN(len(w.destinations))]}, ""
	works := w.failReceiver(gone[0].namespace) // Messages are pending.
	time.Sleep(time.Second)
	if w.rand.IntN(2) == 0 {
		source = gone[0].namespace + "/web"
		gone = slices.DeleteFunc(slices.Clone(w.destinations), func(d *target) bool { return d.namespace != gone[0].namespace })
	}
	again := slices.DeleteFunc(slices.Clone(w.deletions), func(user string) bool {
		return source == "" || !strings.HasPrefix(user, gone[0].namespace+"-") || w.completed(user)
	})
	w.absent(pods, gone, source)
	if w.rand.IntN(2) == 0 {
		works()
	}
	if w.rand.IntN(2) == 0 {
		time.Sleep(planGrace + deliveryTimeout)
	}
	for _, user := range again { // The objects are new ones, and a run that has not completed may be repeated.
		w.Sender.Write(witness.Line{Begin: w.Clock.Now(), Call: w.deletionOf(user)})
	}
	w.present(pods, gone, source)
	works()
}

// completed reports whether the deletion of a user has completed, so that another object for it changes nothing.
func (w *world) completed(user string) bool {
	namespace, number, _ := strings.Cut(user, "-")
	var o v1beta1.DeletionRequest
	return w.object("deletions", namespace, "d"+number, &o) == nil &&
		meta.IsStatusConditionTrue(o.Status.Conditions, v1beta1.ConditionComplete)
}

// absent removes destinations and their Source, if it is not empty, and notes when the owner uses them no more.
func (w *world) absent(pods []*pod, gone []*target, source string) {
	w.t.Logf("%v: %s %s is removed", w.Clock.Now().Round(time.Millisecond), gone[0].id(), source)
	for _, name := range names(gone, source) {
		w.Objects.Write(witness.Line{Object: &witness.Object{Name: name, Action: witness.Removing}})
		w.away[name] = true
	}
	w.away[gone[0].namespace] = source != ""
	w.write(pods)
	if !until(20*time.Second, func() bool { return !w.listed(gone) }) {
		return
	}
	for _, name := range names(gone, source) {
		w.Objects.Write(witness.Line{Object: &witness.Object{Name: name, Action: witness.Removed}})
	}
}

// present applies destinations and their Source again, and notes when they are confirmed.
func (w *world) present(pods []*pod, gone []*target, source string) {
	clear(w.away)
	if source != "" {
		w.audiences[gone[0].namespace].replace()
		w.Objects.Write(witness.Line{Object: &witness.Object{Name: source, Action: witness.Applied}})
	}
	for _, d := range gone {
		d.revision++
		w.apply(d)
	}
	w.write(pods)
	for _, d := range gone {
		w.confirm(d)
	}
	if source == "" {
		return
	}
	var o v1beta1.Source
	if until(20*time.Second, func() bool {
		return w.object("sources", gone[0].namespace, "web", &o) == nil && programmed(o.Status.Conditions, o.Generation)
	}) {
		w.Objects.Write(witness.Line{Object: &witness.Object{Name: source, Action: witness.Confirmed}})
	}
}

// listed reports whether the report of the owner may have one of the destinations.
func (w *world) listed(gone []*target) bool {
	p := w.owner(0)
	if p == nil {
		return true
	}
	reports, err := p.namespaces(w.t.Context())
	if err != nil {
		return true
	}
	for _, n := range reports {
		for _, d := range n.Destinations {
			if slices.ContainsFunc(gone, func(g *target) bool { return g.id() == n.Namespace+"/"+d.Name }) {
				return true
			}
		}
	}
	return false
}

// names are the names of destinations and their Source.
func names(gone []*target, source string) (all []string) {
	for _, d := range gone {
		all = append(all, d.id())
	}
	if source != "" {
		all = append(all, source)
	}
	return all
}

// cutOff lets nothing pass between a process, mostly the owner, and the servers, for some seconds or until another
// process owns the slot. Then its receivers work again, and a process without a lease sends nothing to them.
func (w *world) cutOff() {
	p := w.owner(10 * time.Second)
	if p == nil || w.rand.IntN(4) == 0 {
		p = w.pods[w.rand.IntN(len(w.pods))]
	}
	works := w.failReceiver(namespaces[w.rand.IntN(len(namespaces))])
	time.Sleep(2 * time.Second)
	w.fault("cut between a process and the servers", witness.Unrecorded, func() {
		w.holes[p].Lock()
		if w.rand.IntN(2) == 0 {
			time.Sleep(time.Duration(1+w.rand.IntN(6)) * time.Second)
		} else {
			until(2*takeover, func() bool {
				return slices.ContainsFunc(w.standbys(p), func(other *pod) bool { return other.isOwner() == nil })
			})
		}
		works()
		time.Sleep(2 * time.Second)
		w.holes[p].Unlock()
		w.progress(20 * time.Second)
	})
}
