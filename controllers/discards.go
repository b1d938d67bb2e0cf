package controllers

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/controllers/observed"
	"github.com/posthorn/posthorn/internal/plural"
)

// fewDiscards is the largest number of new discards of a namespace with an Event each. More of them have one
// Event together, so that the deletion of a Source with many destinations does not write one for each.
const fewDiscards = 3

// discardAnnouncer announces the discards ahead by Events; package health announces them in the
// condition Ready. Only one goroutine may use it.
type discardAnnouncer struct {
	reader client.Reader
	events events.EventRecorder
	// announced are the discards that the pods report and that an Event announces.
	announced map[discardKey]bool
}

type discardKey struct{ namespace, source, destination string }

func (k discardKey) compare(other discardKey) int {
	return cmp.Or(strings.Compare(k.namespace, other.namespace), strings.Compare(k.source, other.source),
		strings.Compare(k.destination, other.destination))
}

// announce sends Events for the new discards of the pods' reports. The object of the Event is the
// Source or the destination whose ledger will count the messages, or the namespace if neither exists.
func (a *discardAnnouncer) announce(ctx context.Context, pods []health.Pod) {
	ahead := discardsAhead(pods)
	maps.DeleteFunc(a.announced, func(key discardKey, _ bool) bool {
		_, still := ahead[key]
		return !still
	})
	added := map[string][]discardKey{} // by namespace
	for _, key := range slices.SortedFunc(maps.Keys(ahead), discardKey.compare) {
		if !a.announced[key] {
			a.announced[key] = true
			added[key.namespace] = append(added[key.namespace], key)
		}
	}
	for _, namespace := range slices.Sorted(maps.Keys(added)) {
		keys := added[namespace]
		if len(keys) > fewDiscards {
			a.announceTogether(ctx, keys, ahead)
			continue
		}
		for _, key := range keys {
			d := ahead[key]
			a.event(a.object(ctx, key), "%s of Source %q for WebhookDestination %q will be discarded at %s, because one of them, their connection or an endpoint was deleted; create it again to keep them",
				plural.Count(d.Messages, "pending message"), key.source, key.destination, d.At.UTC().Format(time.RFC3339))
		}
	}
}

// announceTogether sends one Event for discards of a namespace. Its object is the object of the first discard that
// has one that exists.
func (a *discardAnnouncer) announceTogether(ctx context.Context, keys []discardKey, ahead map[discardKey]adminapi.Discard) {
	var sum adminapi.Discard
	for _, key := range keys {
		sum.Messages += ahead[key].Messages
		sum.At = observed.Earlier(sum.At, ahead[key].At)
	}
	var object client.Object
	for _, key := range keys {
		object = a.object(ctx, key)
		if _, isNamespace := object.(*corev1.Namespace); !isNamespace {
			break
		}
	}
	// An Event has at most 1,024 bytes.
	a.event(object, "%s will be discarded, the first at %s: messages of Source %q for WebhookDestination %q and of %s, because one of each pair, their connection or an endpoint was deleted; create it again to keep them; the condition Ready of the objects that exist has each time",
		plural.Count(sum.Messages, "pending message"), sum.At.UTC().Format(time.RFC3339), keys[0].source, keys[0].destination, plural.Count(len(keys)-1, "other pair"))
}

func (a *discardAnnouncer) event(object client.Object, note string, args ...any) {
	a.events.Eventf(object, nil, corev1.EventTypeWarning, v1beta1.ReasonDiscardAhead, "Discard", note, args...)
}

// discardsAhead sums the discards with messages over the pods that are present, each with its earliest
// time.
func discardsAhead(pods []health.Pod) map[discardKey]adminapi.Discard {
	ahead := map[discardKey]adminapi.Discard{}
	for _, pod := range pods {
		if pod.Absent || pod.Report == nil {
			continue
		}
		for _, n := range pod.Report.Configs {
			for _, d := range n.Discards {
				if d.Messages == 0 {
					continue
				}
				key := discardKey{n.Namespace, d.Source, d.Destination}
				sum, known := ahead[key]
				if !known || d.At.Before(sum.At) {
					sum.At = d.At
				}
				sum.Messages += d.Messages
				ahead[key] = sum
			}
		}
	}
	return ahead
}

// object returns the object of an Event.
func (a *discardAnnouncer) object(ctx context.Context, key discardKey) client.Object {
	source, destination := &v1beta1.Source{}, &v1beta1.WebhookDestination{}
	if a.reader.Get(ctx, types.NamespacedName{Namespace: key.namespace, Name: key.source}, source) == nil {
		return source
	}
	if a.reader.Get(ctx, types.NamespacedName{Namespace: key.namespace, Name: key.destination}, destination) == nil {
		return destination
	}
	return &corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
		ObjectMeta: metav1.ObjectMeta{Name: key.namespace}}
}
