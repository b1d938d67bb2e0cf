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
)

const (
	// lookInterval is when to look again at an object that has news which health
	// holds back for a while.
	lookInterval = 2 * time.Second
	// confirmInterval is the longest time between two reports of a pod while a
	// change waits for its confirmation.
	confirmInterval = 200 * time.Millisecond
	// conflictWait is how long the cache may take to catch up after a conflict.
	conflictWait = 200 * time.Millisecond
	// maxWritesAtOnce bounds the status writes of one namespace.
	maxWritesAtOnce = 8
)

// statusReconciler writes the status of a namespace's objects, of those whose
// status is another than the one they have.
type statusReconciler struct {
	client.Client
	known   *verdictBook
	reports *prober
	events  events.EventRecorder
	now     func() time.Time

	numbersInterval, confirmGrace time.Duration // see Options

	mu    sync.Mutex
	memos map[string]map[types.UID]*memo // by namespace
}

// memo is what is remembered of one object between two looks at it.
type memo struct {
	// stale are the versions that our last writes replaced, and after is what
	// came of them: as long as the cache still shows a stale one, after is the truth.
	stale []string
	after client.Object
	// numbers is when the numbers were written last.
	numbers time.Time
	// unconfirmed is since when not every pod has confirmed the object.
	unconfirmed time.Time
	seen        bool
}

func setupStatus(mgr manager.Manager, o Options, known *verdictBook, reports *prober, own *trigger) error {
	r := &statusReconciler{
		Client: mgr.GetClient(), known: known, reports: reports, now: o.Now, numbersInterval: o.numbersInterval, confirmGrace: o.confirmGrace,
		events: mgr.GetEventRecorder("posthorn.dev/operator"),
		memos:  map[string]map[types.UID]*memo{},
	}
	return builder.ControllerManagedBy(mgr).
		Named("status").
		WatchesRawSource(own).
		WithOptions(controllerOptions(mgr, "status")).
		Complete(r)
}

// +kubebuilder:rbac:groups=posthorn.dev,resources=sources/status;webhookdestinations/status;audiences/status;deletionrequests/status,verbs=patch;update
// +kubebuilder:rbac:groups=posthorn.dev,resources=deletionrequests,verbs=delete
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// Reconcile brings the status of one namespace's objects up to date.
func (r *statusReconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	namespace := request.Name
	judged, ok := r.known.get(namespace)
	if !ok {
		r.mu.Lock()
		delete(r.memos, namespace)
		r.mu.Unlock()
		return reconcile.Result{}, nil
	}
	pods, settled := r.reports.reports()
	if !settled {
		return reconcile.Result{}, nil // the prober calls again when it knows
	}
	objects, err := listNamespace(ctx, r, namespace)
	if err != nil {
		return reconcile.Result{}, err
	}
	l := look{statusReconciler: r, namespace: namespace, judged: judged, pods: pods, now: r.now(), memos: r.memosOf(namespace)}
	l.group.SetLimit(maxWritesAtOnce)
	lookAt(ctx, &l, objects.Sources, health.Sources)
	lookAt(ctx, &l, objects.Destinations, health.Destinations)
	lookAt(ctx, &l, objects.Audiences, health.Audiences)
	lookAt(ctx, &l, objects.Deletions, health.DeletionRequests)
	err = l.group.Wait()
	for uid, m := range l.memos {
		if !m.seen {
			delete(l.memos, uid)
		}
		m.seen = false
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: l.again.d}, nil
}

// memosOf returns a namespace's memos. Only its own reconciliation uses them, and
// of one namespace there is one at a time.
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

// look is one look at a namespace's objects.
type look struct {
	*statusReconciler
	namespace string
	judged    judged
	pods      []health.Pod
	now       time.Time
	memos     map[types.UID]*memo
	group     errgroup.Group
	again     shortest
}

// lookAt looks at the objects of one kind, but for those of which there is no
// verdict as they are now: the config controller calls again.
func lookAt[T, S any, O object[T]](ctx context.Context, l *look, objects []T, k health.Kind[T, S]) {
	for i := range objects {
		o := O(&objects[i])
		j, ok := l.judged[o.GetUID()]
		if m := memoOf(l.memos, o); ok && j.generation == o.GetGeneration() {
			l.group.Go(func() error {
				if gone, err := expire(ctx, l, o, k); gone || err != nil {
					return err
				}
				return update(ctx, l, m, o, j.Verdict, k)
			})
		}
	}
}

// expire deletes an object whose time after its end is over, or says when to look again.
func expire[T, S any, O object[T]](ctx context.Context, l *look, o O, k health.Kind[T, S]) (gone bool, err error) {
	if k.Expires == nil {
		return false, nil
	}
	at, ok := k.Expires(*o)
	if !ok {
		return false, nil
	}
	if wait := at.Sub(l.now); wait > 0 {
		l.again.in(wait)
		return false, nil
	}
	// Of this version only: it may have been changed to stay meanwhile.
	uid, version := o.GetUID(), o.GetResourceVersion()
	err = l.Delete(ctx, o, client.Preconditions{UID: &uid, ResourceVersion: &version})
	if apierrors.IsConflict(err) {
		l.again.in(conflictWait)
		return false, nil
	}
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("delete %s %s/%s, which has expired: %w", k.Name, o.GetNamespace(), o.GetName(), err)
	}
	return true, nil
}

// update writes one object's status if it differs, and says when to look again.
func update[T, S any, O object[T]](ctx context.Context, l *look, m *memo, o O, verdict compile.Verdict, k health.Kind[T, S]) error {
	if after, ok := m.after.(O); ok && slices.Contains(m.stale, o.GetResourceVersion()) {
		o = after.DeepCopyObject().(O)
	} else {
		m.stale, m.after = nil, nil
	}
	status, conditions := k.Status(o)
	*conditions = health.Own(*conditions, k.Conditions)
	before, conditionsBefore := *status, *conditions
	wait := left(l.numbersInterval, m.numbers, l.now)
	due := wait <= 0
	next := k.Compute(*o, verdict, l.namespace, l.pods, l.now, due)
	version := o.GetResourceVersion()
	*status = next
	pending := health.Pending(*conditions)
	if !pending {
		m.unconfirmed = time.Time{}
	} else if m.unconfirmed.IsZero() {
		m.unconfirmed = l.now
	}
	if equality.Semantic.DeepEqual(before, next) {
		if !due && !equality.Semantic.DeepEqual(next, k.Compute(*o, verdict, l.namespace, l.pods, l.now, true)) {
			l.again.in(min(wait, lookInterval))
		}
		return nil
	}
	if grace := left(l.confirmGrace, m.unconfirmed, l.now); pending && grace > 0 {
		l.reports.hurry()
		l.again.in(min(grace, confirmInterval))
		return nil
	}
	events := health.Transitions(conditionsBefore, *conditions)
	switch err := apply(ctx, l.Client, o, k); {
	case apierrors.IsConflict(err):
		l.again.in(conflictWait)
		return nil
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("write the status of %s %s/%s: %w", k.Name, o.GetNamespace(), o.GetName(), err)
	}
	statusWrites.WithLabelValues(k.Name).Inc()
	m.stale, m.after = append(m.stale, version), o
	if due {
		m.numbers = l.now
	} else {
		l.again.in(min(wait, lookInterval))
	}
	for _, e := range events {
		l.events.Eventf(o, nil, e.Type, e.Reason, e.Action, "%s", e.Message)
	}
	return nil
}

// apply writes an object's status by server-side apply, of this version of the
// object only, and reads the result into o. The operator owns what it applies;
// conditions of other types stay. A field that it applies no more is removed by
// the apply, unless an earlier release, which wrote by update, owns it as well:
// then an update removes it.
func apply[T, S any, O object[T]](ctx context.Context, c client.Client, o O, k health.Kind[T, S]) error {
	status, _ := k.Status(o)
	want := *status
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
	status, conditions := k.Status(o)
	foreign := slices.DeleteFunc(slices.Clone(*conditions), func(c metav1.Condition) bool { return slices.Contains(k.Conditions, c.Type) })
	*conditions = health.Own(*conditions, k.Conditions)
	if equality.Semantic.DeepEqual(*status, want) {
		return nil
	}
	*status = want
	*conditions = slices.Concat(*conditions, foreign)
	return c.Status().Update(ctx, o, fieldOwner)
}

// left is what is left of a time that began at start: nothing also when the clock
// was set back before the start, which must not make it longer.
func left(d time.Duration, start, now time.Time) time.Duration {
	if now.Before(start) {
		return 0
	}
	return d - now.Sub(start)
}

// shortest is the shortest of several waits; zero is none.
type shortest struct {
	mu sync.Mutex
	d  time.Duration
}

func (s *shortest) in(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.d == 0 || d < s.d {
		s.d = d
	}
}
