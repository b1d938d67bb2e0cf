package controllers

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// trigger is a source of requests from within the process. It keeps requests until
// its controller starts.
type trigger struct {
	mu      sync.Mutex
	queue   priorityqueue.PriorityQueue[reconcile.Request]
	waiting []waitingRequest
}

// The priorities of requests. A worker takes one with a higher priority first.
const (
	// changePriority is for a status pass over a namespace whose objects or Secrets changed, until
	// the dispatchers have confirmed the change, so that an edit does not wait for the passes that
	// traffic causes.
	changePriority = 1
	otherPriority  = 0
)

// waitingRequest is a request before the start of the controller.
type waitingRequest struct {
	request reconcile.Request
	priorityqueue.AddOpts
}

// namespaceRequest returns the queue key of a namespace. The controllers reconcile
// a namespace as a whole, so a key has only the namespace's name.
func namespaceRequest(namespace string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: namespace}}
}

// Start implements source.Source.
func (t *trigger) Start(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	priorities, ok := queue.(priorityqueue.PriorityQueue[reconcile.Request])
	if !ok {
		return errors.New("controllers: the queue of a controller has no priorities; set UsePriorityQueue")
	}
	t.queue = priorities
	for _, w := range t.waiting {
		t.queue.AddWithOpts(w.AddOpts, w.request)
	}
	t.waiting = nil
	return nil
}

// fire requests namespaces.
func (t *trigger) fire(namespaces ...string) {
	for _, namespace := range namespaces {
		t.fireAfter(namespace, 0)
	}
}

// fireAfter requests a namespace after a wait, or earlier.
func (t *trigger) fireAfter(namespace string, wait time.Duration) {
	t.add(waitingRequest{namespaceRequest(namespace), priorityqueue.AddOpts{After: wait, Priority: new(otherPriority)}})
}

// fireChange requests a namespace that has changed.
func (t *trigger) fireChange(namespace string) {
	t.add(waitingRequest{namespaceRequest(namespace), priorityqueue.AddOpts{Priority: new(changePriority)}})
}

func (t *trigger) add(w waitingRequest) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.queue == nil {
		t.waiting = append(t.waiting, w)
		return
	}
	t.queue.AddWithOpts(w.AddOpts, w.request)
}
