package controllers

import (
	"cmp"
	"context"
	"errors"
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
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/kinds"
)

// namespaceRequest returns the queue key of a namespace. The controllers reconcile
// a namespace as a whole, so a key has only the namespace's name.
func namespaceRequest(namespace string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: namespace}}
}

const (
	// workers is the number of namespaces that a controller reconciles concurrently.
	workers = 4
	// maxBackoff bounds the backoff of a namespace whose reconciliation failed.
	maxBackoff = 30 * time.Second
	// reconcileTimeout bounds one reconciliation, so that a request that hangs does
	// not block a worker.
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

// logConstructor logs the namespace of a request as the attribute namespace.
// controller-runtime would log it as the attribute name.
func logConstructor(mgr manager.Manager, controller string) func(*reconcile.Request) logr.Logger {
	base := mgr.GetLogger().WithValues("controller", controller)
	return func(request *reconcile.Request) logr.Logger {
		if request == nil || request.Name == "" {
			return base
		}
		return base.WithValues("namespace", request.Name)
	}
}

// The priorities of requests. A worker takes one with a higher priority first.
const (
	// changePriority is for a status pass over a namespace whose objects or Secrets changed, until
	// the dispatchers have confirmed the change, so that an edit does not wait for the passes that
	// traffic causes.
	changePriority = 1
	otherPriority  = 0
)

// trigger is a source of requests from within the process. It keeps requests until
// its controller starts.
type trigger struct {
	mu      sync.Mutex
	queue   priorityqueue.PriorityQueue[reconcile.Request]
	waiting []waitingRequest
}

// waitingRequest is a request before the start of the controller.
type waitingRequest struct {
	request reconcile.Request
	priorityqueue.AddOpts
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

// fire requests a namespace.
func (t *trigger) fire(namespace string) { t.fireAfter(namespace, 0) }

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

// verdictCache holds the newest verdicts of each namespace. The config controller
// sets them, the status controller reads them.
type verdictCache struct {
	mu          sync.Mutex
	byNamespace map[string]verdictsByUID
}

// verdictsByUID are the verdicts of a namespace's objects.
type verdictsByUID map[types.UID]generationVerdict

// generationVerdict is the verdict on one generation of an object. It does not
// apply to other generations.
type generationVerdict struct {
	generation int64
	compile.Verdict
}

// objects are the objects of a namespace, by the index of their kind in the table.
type objects [][]compile.Object

// listNamespace lists a namespace's objects of all kinds.
func listNamespace(ctx context.Context, r client.Reader, table kinds.Table, namespace string, options ...client.ListOption) (objects, error) {
	all := make(objects, len(table))
	options = append(options, client.InNamespace(namespace))
	for i, k := range table {
		list := k.NewList()
		if err := r.List(ctx, list, options...); err != nil {
			return nil, fmt.Errorf("list the objects of namespace %s: %w", namespace, err)
		}
		all[i] = kinds.Objects(list)
	}
	return all, nil
}

// snapshot returns the objects as the input of the compiler.
func (o objects) snapshot(namespace string) compile.Snapshot {
	s := compile.Snapshot{Namespace: namespace}
	for _, ofKind := range o {
		s.Objects = append(s.Objects, ofKind...)
	}
	return s
}

// verdicts returns the verdicts on the objects by UID.
func (o objects) verdicts(table kinds.Table, v compile.Verdicts) verdictsByUID {
	all := verdictsByUID{}
	for i, k := range table {
		for _, object := range o[i] {
			all[object.GetUID()] = generationVerdict{object.GetGeneration(), v[k.Compile.Section][object.GetName()]}
		}
	}
	return all
}

func newVerdictCache() *verdictCache {
	return &verdictCache{byNamespace: map[string]verdictsByUID{}}
}

func (c *verdictCache) set(namespace string, verdicts verdictsByUID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.byNamespace[namespace] = verdicts
}

func (c *verdictCache) remove(namespace string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.byNamespace, namespace)
}

func (c *verdictCache) get(namespace string) (verdictsByUID, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	verdicts, ok := c.byNamespace[namespace]
	return verdicts, ok
}

func (c *verdictCache) namespaces() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.byNamespace))
}

// keyHolder is a Source that uses a write key.
type keyHolder struct {
	namespace, name string
	created         time.Time
}

func (a keyHolder) compare(b keyHolder) int {
	return cmp.Or(a.created.Compare(b.created), strings.Compare(a.namespace, b.namespace), strings.Compare(a.name, b.name))
}

// writeKeys indexes the write keys of all namespaces by their hash. A key belongs to the namespace
// whose live config has it in effect or reserved; other namespaces cannot take it over. A key
// without such an owner belongs to the namespace with the oldest Source that uses it.
type writeKeys struct {
	mu          sync.Mutex
	byHash      map[string]map[string]keyHolder // hash -> namespace -> the namespace's oldest holder
	byNamespace map[string]map[string]keyHolder // namespace -> hash -> the same holder
	owners      map[string]keyOwner             // hash -> owner
	owned       map[string]map[string]bool      // namespace -> hashes that it owns
}

// keyOwner is the namespace whose live config has a write key.
type keyOwner struct {
	namespace string
	use       compile.KeyUse
}

func newWriteKeys() *writeKeys {
	return &writeKeys{
		byHash: map[string]map[string]keyHolder{}, byNamespace: map[string]map[string]keyHolder{},
		owners: map[string]keyOwner{}, owned: map[string]map[string]bool{},
	}
}

// set replaces the keys of a namespace. It returns the other namespaces whose
// verdicts may change as a result.
func (k *writeKeys) set(namespace string, holders map[string]keyHolder) (affected []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var touched []string
	for hash := range k.byNamespace[namespace] {
		if _, still := holders[hash]; !still {
			touched = append(touched, hash)
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
		touched = append(touched, hash)
		if k.byHash[hash] == nil {
			k.byHash[hash] = map[string]keyHolder{}
		}
		k.byHash[hash][namespace] = holder
	}
	k.byNamespace[namespace] = holders
	if len(holders) == 0 {
		delete(k.byNamespace, namespace)
	}
	return k.others(namespace, touched)
}

// expire ends the reservations of a namespace for keys that no Source of the namespace uses. It returns
// the other namespaces whose verdicts may change as a result.
func (k *writeKeys) expire(namespace string, hashes []string) (affected []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var touched []string
	for _, hash := range hashes {
		_, used := k.byNamespace[namespace][hash]
		if !used && k.owners[hash] == (keyOwner{namespace, compile.KeyReserved}) {
			touched = append(touched, hash)
			delete(k.owners, hash)
			delete(k.owned[namespace], hash)
		}
	}
	return k.others(namespace, touched)
}

// others returns the other namespaces with a Source that has one of the keys, sorted.
func (k *writeKeys) others(namespace string, hashes []string) []string {
	all := map[string]bool{}
	for _, hash := range hashes {
		for other := range k.byHash[hash] {
			if other != namespace {
				all[other] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// foreign returns the keys of a namespace that belong to other namespaces. The namespace becomes the
// owner of its other keys, so only one of two concurrent compilations gets a key.
func (k *writeKeys) foreign(namespace string) map[string]compile.KeyUse {
	k.mu.Lock()
	defer k.mu.Unlock()
	found := map[string]compile.KeyUse{}
	for hash, own := range k.byNamespace[namespace] {
		if owner, owned := k.owners[hash]; owned {
			if owner.namespace != namespace {
				found[hash] = owner.use
			}
			continue
		}
		oldest := own
		for _, other := range k.byHash[hash] {
			if other.compare(oldest) < 0 {
				oldest = other
			}
		}
		if oldest.namespace != namespace {
			found[hash] = compile.KeyInUse
			continue
		}
		k.own(hash, keyOwner{namespace, compile.KeyInUse})
	}
	return found
}

// ownerOf returns the namespace that owns a key; empty if none does.
func (k *writeKeys) ownerOf(hash string) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.owners[hash].namespace
}

// own makes a namespace the owner of a key. The mutex is held.
func (k *writeKeys) own(hash string, owner keyOwner) {
	k.owners[hash] = owner
	if k.owned[owner.namespace] == nil {
		k.owned[owner.namespace] = map[string]bool{}
	}
	k.owned[owner.namespace][hash] = true
}

// setLive replaces the keys that a namespace's live config has in effect or reserved. It returns the
// other namespaces whose verdicts may change as a result. Keys that another namespace owns remain
// its own.
func (k *writeKeys) setLive(namespace string, live map[string]compile.KeyUse) (affected []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var touched []string
	for hash := range k.owned[namespace] {
		if live[hash] == "" {
			touched = append(touched, hash)
			delete(k.owners, hash)
			delete(k.owned[namespace], hash)
		}
	}
	for hash, use := range live {
		owner, owned := k.owners[hash]
		if owned && owner.namespace != namespace || owner.use == use {
			continue
		}
		touched = append(touched, hash)
		k.own(hash, keyOwner{namespace, use})
	}
	if len(k.owned[namespace]) == 0 {
		delete(k.owned, namespace)
	}
	return k.others(namespace, touched)
}
