package controllers

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/plural"
)

// discardAnnouncer announces the discards ahead by one Event each; package health announces them in the
// condition Ready. Only one goroutine may use it.
type discardAnnouncer struct {
	reader client.Reader
	events events.EventRecorder
	// announced are the discards that the pods report and that have an Event.
	announced map[discardKey]bool
}

type discardKey struct{ namespace, source, destination string }

// announce sends an Event for each new discard of the pods' reports. The object of the Event is the
// Source or the destination whose ledger will count the messages, or the namespace if neither exists.
func (a *discardAnnouncer) announce(ctx context.Context, pods []health.Pod) {
	ahead := discardsAhead(pods)
	for key := range a.announced {
		if _, still := ahead[key]; !still {
			delete(a.announced, key)
		}
	}
	for key, d := range ahead {
		if a.announced[key] {
			continue
		}
		a.announced[key] = true
		a.events.Eventf(a.object(ctx, key), nil, corev1.EventTypeWarning, v1alpha1.ReasonDiscardAhead, "Discard",
			"%s of Source %q for WebhookDestination %q will be discarded at %s, because one of them, their connection or an endpoint was deleted; create it again to keep them",
			plural.Count(d.Messages, "pending message"), key.source, key.destination, d.At.UTC().Format(time.RFC3339))
	}
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
	source, destination := &v1alpha1.Source{}, &v1alpha1.WebhookDestination{}
	if a.reader.Get(ctx, types.NamespacedName{Namespace: key.namespace, Name: key.source}, source) == nil {
		return source
	}
	if a.reader.Get(ctx, types.NamespacedName{Namespace: key.namespace, Name: key.destination}, destination) == nil {
		return destination
	}
	return &corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: key.namespace}}
}
