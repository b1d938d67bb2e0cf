package controllers

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/controllers/kinds"
)

const (
	// recheckInterval is the wait before the next status pass over an object whose
	// changed numbers are not due yet.
	recheckInterval = 2 * time.Second
	// confirmInterval is the longest time between two requests for a pod's report
	// while a change waits for the pods to confirm it.
	confirmInterval = 200 * time.Millisecond
	// conflictWait is the wait for the cache after a conflict.
	conflictWait = 200 * time.Millisecond
	// maxWritesAtOnce bounds the concurrent status writes of a namespace.
	maxWritesAtOnce = 8
)

// statusReconciler computes the status of a namespace's objects and writes those
// that differ.
type statusReconciler struct {
	client.Client
	kinds    kinds.Table
	verdicts *verdictCache
	reports  *prober
	events   events.EventRecorder
	now      func() time.Time

	numbersInterval, confirmGrace time.Duration // see Options

	mu    sync.Mutex
	memos map[string]map[types.UID]*memo // by namespace
}

// memo is the data about one object that status passes share.
type memo struct {
	// stale are the resource versions that the last writes replaced, and written is
	// the result of the last write. While the cache returns a stale version, written is
	// the current object.
	stale   []string
	written client.Object
	// numbersTime is when the numbers were last written.
	numbersTime time.Time
	// unconfirmedSince is when a pod first had not confirmed the object; zero when
	// every pod has.
	unconfirmedSince time.Time
	seen             bool
}

func setupStatus(mgr manager.Manager, o Options, verdicts *verdictCache, reports *prober, own *trigger) error {
	r := &statusReconciler{
		Client: mgr.GetClient(), kinds: o.kinds, verdicts: verdicts, reports: reports, now: o.Now, numbersInterval: o.numbersInterval, confirmGrace: o.confirmGrace,
		events: mgr.GetEventRecorder("posthorn.dev/operator"),
		memos:  map[string]map[types.UID]*memo{},
	}
	return builder.ControllerManagedBy(mgr).
		Named("status").
		WatchesRawSource(own).
		WithOptions(controllerOptions(mgr, "status")).
		Complete(r)
}

// +kubebuilder:rbac:groups=posthorn.dev,resources=sources/status;webhookdestinations/status;audiences/status;deletionrequests/status;redeliveries/status,verbs=patch;update
// +kubebuilder:rbac:groups=posthorn.dev,resources=deletionrequests;redeliveries,verbs=delete
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// Reconcile updates the status of one namespace's objects.
func (r *statusReconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	namespace := request.Name
	verdicts, ok := r.verdicts.get(namespace)
	if !ok {
		r.mu.Lock()
		delete(r.memos, namespace)
		r.mu.Unlock()
		return reconcile.Result{}, nil
	}
	pods, complete := r.reports.reports()
	if !complete {
		return reconcile.Result{}, nil // The prober triggers a reconciliation when they are complete.
	}
	objects, err := listNamespace(ctx, r, r.kinds, namespace)
	if err != nil {
		return reconcile.Result{}, err
	}
	p := statusPass{statusReconciler: r, namespace: namespace, verdicts: verdicts, pods: pods, now: r.now(), memos: r.memosOf(namespace)}
	p.group.SetLimit(maxWritesAtOnce)
	for i, k := range r.kinds {
		p.updateAll(ctx, objects[i], k.Health)
	}
	err = p.group.Wait()
	for uid, m := range p.memos {
		if !m.seen {
			delete(p.memos, uid)
		}
		m.seen = false
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: p.requeue.d}, nil
}

// memosOf returns a namespace's memos. Only the reconciliation of the namespace uses
// them, and there is one at a time.
func (r *statusReconciler) memosOf(namespace string) map[types.UID]*memo {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.memos[namespace] == nil {
		r.memos[namespace] = map[types.UID]*memo{}
	}
	return r.memos[namespace]
}

func memoOf(memos map[types.UID]*memo, o client.Object) *memo {
	m := memos[o.GetUID()]
	if m == nil {
		m = &memo{}
		memos[o.GetUID()] = m
	}
	m.seen = true
	return m
}

// statusPass is one update of the statuses of a namespace's objects.
type statusPass struct {
	*statusReconciler
	namespace string
	verdicts  verdictsByUID
	pods      []health.Pod
	now       time.Time
	memos     map[types.UID]*memo
	group     errgroup.Group
	requeue   shortestWait
}

// updateAll updates the objects of one kind. It skips objects without a verdict on
// their present generation: the config controller triggers another pass for them.
func (p *statusPass) updateAll(ctx context.Context, objects []compile.Object, k health.Kind) {
	for _, o := range objects {
		v, ok := p.verdicts[o.GetUID()]
		if m := memoOf(p.memos, o); ok && v.generation == o.GetGeneration() {
			p.group.Go(func() error {
				if deleted, err := p.expire(ctx, o, k); deleted || err != nil {
					return err
				}
				return p.update(ctx, m, o, v.Verdict, k)
			})
		}
	}
}

// expire deletes an object whose TTL has ended, or requeues the namespace for the
// end of the TTL.
func (p *statusPass) expire(ctx context.Context, o client.Object, k health.Kind) (deleted bool, err error) {
	at, ok := k.Expires(o)
	if !ok {
		return false, nil
	}
	if wait := at.Sub(p.now); wait > 0 {
		p.requeue.add(wait)
		return false, nil
	}
	// Delete this version only: a later version may have another TTL.
	uid, version := o.GetUID(), o.GetResourceVersion()
	err = p.Delete(ctx, o, client.Preconditions{UID: &uid, ResourceVersion: &version})
	if apierrors.IsConflict(err) {
		p.requeue.add(conflictWait)
		return false, nil
	}
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("delete expired %s %s/%s: %w", k.Name, o.GetNamespace(), o.GetName(), err)
	}
	return true, nil
}

// update writes one object's status if it differs, and requeues the namespace if
// another pass is necessary.
func (p *statusPass) update(ctx context.Context, m *memo, o client.Object, verdict compile.Verdict, k health.Kind) error {
	if m.written != nil && slices.Contains(m.stale, o.GetResourceVersion()) {
		o = m.written.DeepCopyObject().(client.Object)
	} else {
		m.stale, m.written = nil, nil
	}
	before, conditions := k.Status(o)
	*conditions = health.Own(*conditions, k.Conditions)
	interval := p.numbersInterval
	if k.NumbersInterval > 0 {
		interval = min(interval, k.NumbersInterval)
	}
	wait := remaining(interval, m.numbersTime, p.now)
	due := wait <= 0
	next := k.Next(o, verdict, p.namespace, p.pods, p.now, due).(client.Object)
	after, conditionsAfter := k.Status(next)
	if at, ok := k.ChangesAt(next); ok {
		p.requeue.add(max(at.Sub(p.now), recheckInterval))
	}
	pending := health.Pending(*conditionsAfter)
	if !pending {
		m.unconfirmedSince = time.Time{}
	} else if m.unconfirmedSince.IsZero() {
		m.unconfirmedSince = p.now
	}
	if equality.Semantic.DeepEqual(before, after) {
		if !due {
			if numbers, _ := k.Status(k.Next(o, verdict, p.namespace, p.pods, p.now, true)); !equality.Semantic.DeepEqual(after, numbers) {
				p.requeue.add(min(wait, recheckInterval))
			}
		}
		return nil
	}
	if grace := remaining(p.confirmGrace, m.unconfirmedSince, p.now); pending && grace > 0 {
		p.reports.refreshNow()
		p.requeue.add(min(grace, confirmInterval))
		return nil
	}
	events := health.Transitions(*conditions, *conditionsAfter)
	switch err := apply(ctx, p.Client, next, k); {
	case apierrors.IsConflict(err):
		p.requeue.add(conflictWait)
		return nil
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("write the status of %s %s/%s: %w", k.Name, o.GetNamespace(), o.GetName(), err)
	}
	statusWrites.WithLabelValues(k.Name).Inc()
	m.stale, m.written = append(m.stale, o.GetResourceVersion()), next
	if due {
		m.numbersTime = p.now
	} else {
		p.requeue.add(min(wait, recheckInterval))
	}
	for _, e := range events {
		p.events.Eventf(next, nil, e.Type, e.Reason, e.Action, "%s", e.Message)
	}
	return nil
}

// apply writes an object's status by server-side apply and reads the result into o.
// It returns a conflict if the object has another resource version. Conditions of
// other field managers are kept. The apply removes the fields that the operator owns
// and does not apply any more. A field that an earlier release wrote by update has two
// field managers, so an update removes it.
func apply(ctx context.Context, c client.Client, o client.Object, k health.Kind) error {
	want := o.DeepCopyObject().(client.Object)
	status, _ := k.Status(want)
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(status)
	if err != nil {
		return err
	}
	u := &unstructured.Unstructured{Object: map[string]any{"status": fields}}
	u.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(k.Name))
	u.SetNamespace(o.GetNamespace())
	u.SetName(o.GetName())
	u.SetResourceVersion(o.GetResourceVersion())
	if err := c.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(u), fieldOwner, client.ForceOwnership); err != nil {
		return err
	}
	u.SetManagedFields(nil)
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, o); err != nil {
		return err
	}
	stored, conditions := k.Status(o)
	foreign := slices.DeleteFunc(slices.Clone(*conditions), func(c metav1.Condition) bool { return slices.Contains(k.Conditions, c.Type) })
	*conditions = health.Own(*conditions, k.Conditions)
	if equality.Semantic.DeepEqual(stored, status) {
		return nil
	}
	k.CopyStatus(o, want)
	*conditions = slices.Concat(*conditions, foreign)
	return c.Status().Update(ctx, o, fieldOwner)
}

// remaining returns the remainder of a duration that began at start. It is zero if
// the clock was set back to a time before start, so that this cannot prolong a wait.
func remaining(d time.Duration, start, now time.Time) time.Duration {
	if now.Before(start) {
		return 0
	}
	return d - now.Sub(start)
}

// shortestWait is the minimum of the added waits; zero means none.
type shortestWait struct {
	mu sync.Mutex
	d  time.Duration
}

func (s *shortestWait) add(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.d == 0 || d < s.d {
		s.d = d
	}
}
