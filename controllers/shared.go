package controllers

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
)

// namespaceRequest is the key of one namespace. Keys have no namespace of their
// own, because all of a namespace is compiled as one.
func namespaceRequest(namespace string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: namespace}}
}

const (
	// workers is how many namespaces each controller works on at once.
	workers = 4
	// maxBackoff is how long a namespace that failed waits at most for its next try.
	maxBackoff = 30 * time.Second
	// reconcileTimeout bounds one try, so that a request that hangs does not take a worker for good.
	reconcileTimeout = time.Minute
)

func controllerOptions(mgr manager.Manager, name string) controller.Options {
	return controller.Options{
		MaxConcurrentReconciles: workers,
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](50*time.Millisecond, maxBackoff),
		ReconciliationTimeout:   reconcileTimeout,
		LogConstructor:          logConstructor(mgr, name),
	}
}

// logConstructor names the namespace as every other log line does, in place of
// controller-runtime's empty namespace and the namespace as name.
func logConstructor(mgr manager.Manager, controller string) func(*reconcile.Request) logr.Logger {
	base := mgr.GetLogger().WithValues("controller", controller)
	return func(request *reconcile.Request) logr.Logger {
		switch {
		case request == nil || request.Name == "":
			return base
		case request.Namespace != "": // one object of it
			return base.WithValues("namespace", request.Namespace, "name", request.Name)
		}
		return base.WithValues("namespace", request.Name)
	}
}

// trigger is a source of requests that this process makes itself. What is fired
// before its controller runs is kept.
type trigger struct {
	mu      sync.Mutex
	queue   workqueue.TypedRateLimitingInterface[reconcile.Request]
	waiting []reconcile.Request
}

// Start implements source.Source.
func (t *trigger) Start(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue = queue
	for _, r := range t.waiting {
		queue.Add(r)
	}
	t.waiting = nil
	return nil
}

func (t *trigger) fire(namespace string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.queue == nil {
		t.waiting = append(t.waiting, namespaceRequest(namespace))
		return
	}
	t.queue.Add(namespaceRequest(namespace))
}

// verdictBook hands the newest verdicts of each namespace from the config
// controller to the status controller.
type verdictBook struct {
	mu          sync.Mutex
	byNamespace map[string]judged
}

// judged holds the verdicts of a namespace by the object's UID, each with the
// generation that it was made of: it says nothing of another.
type judged map[types.UID]judgement

type judgement struct {
	generation int64
	compile.Verdict
}

// judge notes the verdicts of one kind's objects, which are by name.
func judge[T any, O object[T]](j judged, objects []T, verdicts map[string]compile.Verdict) {
	for i := range objects {
		o := O(&objects[i])
		j[o.GetUID()] = judgement{o.GetGeneration(), verdicts[o.GetName()]}
	}
}

// object is a pointer to one of our kinds.
type object[T any] interface {
	*T
	client.Object
}

// namespaceLists are empty lists of the kinds that a namespace's config is made of.
func namespaceLists() []client.ObjectList {
	return []client.ObjectList{&v1alpha1.SourceList{}, &v1alpha1.WebhookDestinationList{}, &v1alpha1.AudienceList{}, &v1alpha1.DeletionRequestList{}}
}

// listNamespace lists the objects that a namespace's config is made of.
func listNamespace(ctx context.Context, r client.Reader, namespace string) (compile.Snapshot, error) {
	var sources v1alpha1.SourceList
	var destinations v1alpha1.WebhookDestinationList
	var audiences v1alpha1.AudienceList
	var deletions v1alpha1.DeletionRequestList
	for _, list := range []client.ObjectList{&sources, &destinations, &audiences, &deletions} {
		if err := r.List(ctx, list, client.InNamespace(namespace)); err != nil {
			return compile.Snapshot{}, fmt.Errorf("list the objects of namespace %s: %w", namespace, err)
		}
	}
	return compile.Snapshot{Namespace: namespace, Sources: sources.Items, Destinations: destinations.Items, Audiences: audiences.Items, Deletions: deletions.Items}, nil
}

func newVerdictBook() *verdictBook { return &verdictBook{byNamespace: map[string]judged{}} }

func (b *verdictBook) set(namespace string, j judged) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.byNamespace[namespace] = j
}

func (b *verdictBook) forget(namespace string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.byNamespace, namespace)
}

func (b *verdictBook) get(namespace string) (judged, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	j, ok := b.byNamespace[namespace]
	return j, ok
}

func (b *verdictBook) namespaces() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Keys(b.byNamespace))
}

// keyHolder is a Source that uses a write key.
type keyHolder struct {
	namespace, name string
	created         time.Time
}

func (a keyHolder) compare(b keyHolder) int {
	return cmp.Or(a.created.Compare(b.created), strings.Compare(a.namespace, b.namespace), strings.Compare(a.name, b.name))
}

// writeKeys knows, over all namespaces, which Source is the oldest that uses a
// write key. Keys are known by their hash only.
type writeKeys struct {
	mu          sync.Mutex
	byHash      map[string]map[string]keyHolder // hash -> namespace -> its oldest holder
	byNamespace map[string]map[string]keyHolder // namespace -> hash -> the same
}

func newWriteKeys() *writeKeys {
	return &writeKeys{byHash: map[string]map[string]keyHolder{}, byNamespace: map[string]map[string]keyHolder{}}
}

// set replaces the keys of a namespace. It returns the other namespaces whose
// verdicts may change by that.
func (k *writeKeys) set(namespace string, holders map[string]keyHolder) (affected []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	touched := map[string]bool{}
	touch := func(hash string) {
		for other := range k.byHash[hash] {
			if other != namespace {
				touched[other] = true
			}
		}
	}
	for hash := range k.byNamespace[namespace] {
		if _, still := holders[hash]; !still {
			touch(hash)
			delete(k.byHash[hash], namespace)
			if len(k.byHash[hash]) == 0 {
				delete(k.byHash, hash)
			}
		}
	}
	for hash, holder := range holders {
		if k.byNamespace[namespace][hash] == holder {
			continue
		}
		touch(hash)
		if k.byHash[hash] == nil {
			k.byHash[hash] = map[string]keyHolder{}
		}
		k.byHash[hash][namespace] = holder
	}
	k.byNamespace[namespace] = holders
	if len(holders) == 0 {
		delete(k.byNamespace, namespace)
	}
	return slices.Sorted(maps.Keys(touched))
}

// older returns those of a namespace's keys that belong to an older Source of
// another namespace, with that Source's "namespace/name".
func (k *writeKeys) older(namespace string) map[string]string {
	k.mu.Lock()
	defer k.mu.Unlock()
	found := map[string]string{}
	for hash, own := range k.byNamespace[namespace] {
		oldest := own
		for _, other := range k.byHash[hash] {
			if other.compare(oldest) < 0 {
				oldest = other
			}
		}
		if oldest.namespace != namespace {
			found[hash] = oldest.namespace + "/" + oldest.name
		}
	}
	return found
}
