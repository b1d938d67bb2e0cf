package controllers

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/health"
)

// existingObjects is a reader of objects that have only a name, "Source namespace/name".
type existingObjects struct {
	client.Reader
	names map[string]bool
}

func (e existingObjects) Get(_ context.Context, key client.ObjectKey, object client.Object, _ ...client.GetOption) error {
	kind := "WebhookDestination"
	if _, ok := object.(*v1beta1.Source); ok {
		kind = "Source"
	}
	if !e.names[kind+" "+key.String()] {
		return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
	}
	object.SetNamespace(key.Namespace)
	object.SetName(key.Name)
	return nil
}

// recordedEvents records Events as "type namespace/name: note".
type recordedEvents []string

func (r *recordedEvents) Eventf(regarding, _ runtime.Object, _, _, _, note string, args ...any) {
	object, _ := regarding.(client.Object)
	*r = append(*r, fmt.Sprintf("%T %s/%s: ", object, object.GetNamespace(), object.GetName())+fmt.Sprintf(note, args...))
}

func TestDiscardEvents(t *testing.T) {
	at := time.Date(2026, 3, 1, 12, 10, 0, 0, time.UTC)
	ahead := func(namespace, source string, n int, prefix string) adminapi.ConfigReport {
		c := adminapi.ConfigReport{Namespace: namespace}
		for i := range n {
			c.Discards = append(c.Discards, adminapi.Discard{Source: source, Destination: fmt.Sprint(prefix, i), Messages: 2,
				At: at.Add(time.Duration(i) * time.Minute)})
		}
		return c
	}
	var got recordedEvents
	a := discardAnnouncer{reader: existingObjects{names: map[string]bool{"WebhookDestination many/d2": true,
		"WebhookDestination many/d3": true, "Source few/web": true}}, events: &got, announced: map[discardKey]bool{}}
	const because = ", because one of them, their connection or an endpoint was deleted; create it again to keep them"
	const together = ", because one of each pair, their connection or an endpoint was deleted; create it again to keep them; the condition Ready of the objects that exist has each time"
	for _, step := range []struct {
		name    string
		configs []adminapi.ConfigReport
		want    []string
	}{
		{"nothing", nil, nil},
		{"few in a namespace, many in others", []adminapi.ConfigReport{ahead("many", "gone", 50, "d"), ahead("few", "web", 3, "d"),
			ahead("none", "gone", 4, "d")}, []string{
			`*v1beta1.Source few/web: 2 pending messages of Source "web" for WebhookDestination "d0" will be discarded at 2026-03-01T12:10:00Z` + because,
			`*v1beta1.Source few/web: 2 pending messages of Source "web" for WebhookDestination "d1" will be discarded at 2026-03-01T12:11:00Z` + because,
			`*v1beta1.Source few/web: 2 pending messages of Source "web" for WebhookDestination "d2" will be discarded at 2026-03-01T12:12:00Z` + because,
			`*v1beta1.WebhookDestination many/d2: 100 pending messages will be discarded, the first at 2026-03-01T12:10:00Z: messages of Source "gone" for WebhookDestination "d0" and of 49 other pairs` + together,
			`*v1.Namespace /none: 8 pending messages will be discarded, the first at 2026-03-01T12:10:00Z: messages of Source "gone" for WebhookDestination "d0" and of 3 other pairs` + together,
		}},
		{"the same", []adminapi.ConfigReport{ahead("many", "gone", 50, "d"), ahead("few", "web", 3, "d"), ahead("none", "gone", 4, "d")}, nil},
		{"one more", []adminapi.ConfigReport{ahead("many", "gone", 51, "d"), ahead("few", "web", 2, "d")}, []string{
			`*v1.Namespace /many: 2 pending messages of Source "gone" for WebhookDestination "d50" will be discarded at 2026-03-01T13:00:00Z` + because,
		}},
		{"again after an end", []adminapi.ConfigReport{ahead("few", "web", 3, "d")}, []string{
			`*v1beta1.Source few/web: 2 pending messages of Source "web" for WebhookDestination "d2" will be discarded at 2026-03-01T12:12:00Z` + because,
		}},
	} {
		got = nil
		a.announce(t.Context(), []health.Pod{{Report: podreport.NewIndex(adminapi.Report{Configs: step.configs})}})
		if diff := cmp.Diff(step.want, []string(got)); diff != "" {
			t.Errorf("%s: Events (-want +got):\n%s", step.name, diff)
		}
	}
}
