package controllers

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Traffic requests passes over all namespaces all the time. One that has changed is taken before them,
// also if it waits for such a pass itself.
func TestChangesOvertakeReports(t *testing.T) {
	queue := priorityqueue.New[reconcile.Request]("test")
	defer queue.ShutDown()
	tr := &trigger{}
	if err := tr.Start(t.Context(), queue); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		tr.fireAfter(fmt.Sprintf("busy-%02d", i), 0)
	}
	tr.fireAfter("edited-first", time.Hour)
	tr.fireChange("edited-first")
	tr.fireChange("busy-49")
	var got []string
	for range 51 {
		request, _, _ := queue.GetWithPriority()
		got = append(got, request.Name)
	}
	want := []string{"edited-first", "busy-49"}
	for i := range 49 {
		want = append(want, fmt.Sprintf("busy-%02d", i))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("order of the passes (-want +got):\n%s", diff)
	}
}
