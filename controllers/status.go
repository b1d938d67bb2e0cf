package controllers

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/controllers/kinds"
)

const (
	// recheckInterval is the wait before the next status pass over an object whose
	// recovery, or whose confirmation by a pod that starts, is delayed.
	recheckInterval = 2 * time.Second
	// confirmInterval is the longest time between two requests for a pod's report
	// while a change waits for the pods to confirm it.
	confirmInterval = 200 * time.Millisecond
	// errorWait is the wait after a failed write, doubled with every further one up to
	// maxErrorWait.
	errorWait    = time.Second
	maxErrorWait = 30 * time.Second
	// conflictWait is the wait for the cache after a conflict.
	conflictWait = 200 * time.Millisecond
	// reportsWait delays the pass over a namespace whose reports changed, so that the
	// reports of many pods cause one pass.
	reportsWait = 500 * time.Millisecond
	// numbersWait delays the pass over a namespace in whose reports only numbers changed, which
	// happens all the time under traffic. Numbers are written rarely, see numbersInterval.
	numbersWait = 2 * time.Second
	// writtenKept is the time for which a written object is kept; by then the cache has it.
	writtenKept = time.Minute
	// numbersPause is the shortest time between two passes over a namespace in which only
	// numbers are due.
	numbersPause = time.Second
	// idleFactor multiplies the interval between the writes of the numbers of an object to which nothing is sent,
	// such as a destination whose filter excludes all calls.
	idleFactor = 10
	// maxWritesAtOnce bounds the concurrent status writes of a namespace.
	maxWritesAtOnce = 8
)

// statusReconciler computes the status of a namespace's objects and writes those
// that differ. A pass skips the objects whose inputs have not changed since the previous
// pass and for which nothing is due.
type statusReconciler struct {
	client.Client
	kinds    kinds.Table
	verdicts *verdictCache
	reports  *prober
	changes  *reportChanges
	events   events.EventRecorder
	budget   writeBudget
	now      func() time.Time

	numbersInterval, confirmGrace time.Duration // see Options

	mu    sync.Mutex
	memos map[string]map[types.UID]*memo // by namespace
}

// memo is the data about one object that status passes share.
type memo struct {
	// resourceVersion, verdict and reports are the inputs of the last pass at checked; a
	// zero time means that the next pass must not skip the object.
	resourceVersion string
	verdict         generationVerdict
	reports         uint64
	checked         time.Time
	// recheck is the time from checked until the object must be processed although its
	// inputs did not change; zero if there is no such time.
	recheck time.Duration
	// pods is the version of the pods of the last pass. If settled is true, a change of them does
	// not change the status: every pod answered, and its report confirms the object.
	pods    uint64
	settled bool

	// stale are the resource versions that the last writes replaced, and written is
	// the result of the last write. While the cache returns a stale version, written is
	// the current object.
	stale   []string
	written client.Object
	// numbersTime is when the numbers were last written.
	numbersTime time.Time
	// transition and numbers are the permits of a status that waits to be written.
	transition, numbers permit
	// unconfirmedSince is when a pod first had not confirmed the object; zero when
	// every pod has.
	unconfirmedSince time.Time
	// failures counts the failed passes in a row.
	failures int
	seen     bool
}

// after makes a pass process the object after a wait, or earlier.
func (m *memo) after(wait time.Duration) {
	if wait = max(wait, 1); m.recheck == 0 || wait < m.recheck {
		m.recheck = wait
	}
}

// unchanged reports whether a pass can skip the object.
func (m *memo) unchanged(o client.Object, v generationVerdict, reports, pods uint64, now time.Time) bool {
	return !m.checked.IsZero() && m.resourceVersion == o.GetResourceVersion() && m.reports == reports && (m.settled || m.pods == pods) &&
		(m.recheck == 0 || remaining(m.recheck, m.checked, now) > 0) && reflect.DeepEqual(m.verdict, v)
}

// reportChange is a change of the dispatchers or of their reports. Its zero value is none.
type reportChange struct {
	// namespaces are those whose reports changed, and numbers those in whose reports only numbers did;
	// all means every namespace.
	namespaces, numbers []string
	all                 bool
	// pods means that pods started, ended, became silent or answer, with or without other reports.
	pods bool
}

// reportChanges counts the changes of the reports about each namespace, and the changes of the pods.
type reportChanges struct {
	mu          sync.Mutex
	all, pods   uint64
	byNamespace map[string]uint64
}

// add counts a change.
func (c *reportChanges) add(change reportChange) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if change.all {
		c.all++
	}
	if change.pods {
		c.pods++
	}
	for _, namespace := range slices.Concat(change.namespaces, change.numbers) {
		c.byNamespace[namespace]++
	}
}

// of returns two numbers: reports is larger after each change of the reports about a namespace, and
// pods after each change of the pods.
func (c *reportChanges) of(namespace string) (reports, pods uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.all + c.byNamespace[namespace], c.pods
}

func setupStatus(mgr manager.Manager, o Options, verdicts *verdictCache, reports *prober, changes *reportChanges, own *trigger) error {
	r := &statusReconciler{
		Client: mgr.GetClient(), kinds: o.kinds, verdicts: verdicts, reports: reports, changes: changes, now: o.Now,
		numbersInterval: o.numbersInterval, confirmGrace: o.confirmGrace,
		events: mgr.GetEventRecorder(eventSource), budget: newWriteBudget(),
		memos: map[string]map[types.UID]*memo{},
	}
	return builder.ControllerManagedBy(mgr).
		Named("status").
		WatchesRawSource(own).
		WithOptions(controllerOptions(mgr, "status")).
		Complete(r)
}

// +kubebuilder:rbac:groups=posthorn.dev,resources=sources/status;webhookdestinations/status;audiences/status;deletionrequests/status;redeliveries/status,verbs=patch
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
	version, podsVersion := r.changes.of(namespace) // Before the reports, so that no change is missed.
	pods, complete := r.reports.reports()
	if !complete {
		return reconcile.Result{}, nil // The prober triggers a reconciliation when they are complete.
	}
	pods = storesOf(pods, namespace)
	objects, err := listNamespace(ctx, r, r.kinds, namespace, client.UnsafeDisableDeepCopy)
	if err != nil {
		return reconcile.Result{}, err
	}
	p := statusPass{
		statusReconciler: r, namespace: namespace, verdicts: verdicts, pods: pods, version: version, podsVersion: podsVersion,
		answering: !slices.ContainsFunc(pods, func(pod health.Pod) bool { return !pod.Removed && (!pod.Answers() || pod.Outdated) }),
		now:       r.now(), memos: r.memosOf(namespace),
	}
	p.group.SetLimit(maxWritesAtOnce)
	for i, k := range r.kinds {
		p.updateAll(ctx, objects[i], k.Health)
	}
	_ = p.group.Wait() // updateAll logs the errors.
	priority := otherPriority
	if p.awaiting.Load() {
		priority = changePriority
	}
	return reconcile.Result{RequeueAfter: p.end(), Priority: &priority}, nil
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
	// version is the version of the reports in pods, and podsVersion the version of the pods.
	version, podsVersion uint64
	// answering is true if every pod answers.
	answering bool
	now       time.Time
	memos     map[types.UID]*memo
	group     errgroup.Group
	// awaiting is true if the pods have more time to confirm an object.
	awaiting atomic.Bool
}

// end removes the memos of deleted objects, and returns the wait until the next pass; zero
// if none is necessary.
func (p *statusPass) end() (wait time.Duration) {
	for uid, m := range p.memos {
		if !m.seen {
			delete(p.memos, uid)
			continue
		}
		m.seen = false
		if m.recheck > 0 && !m.checked.IsZero() {
			if w := max(1, remaining(m.recheck, m.checked, p.now)); wait == 0 || w < wait {
				wait = w
			}
		}
	}
	return wait
}

// updateAll updates the objects of one kind, which it must not change. It skips objects
// without a verdict on their present generation: the config controller triggers another
// pass for them.
func (p *statusPass) updateAll(ctx context.Context, objects []compile.Object, k health.Kind) {
	for _, o := range objects {
		v, ok := p.verdicts[o.GetUID()]
		m := memoOf(p.memos, o)
		if !ok || v.generation != o.GetGeneration() || m.unchanged(o, v, p.version, p.podsVersion, p.now) {
			continue
		}
		m.resourceVersion, m.verdict, m.reports, m.checked, m.recheck = o.GetResourceVersion(), v, p.version, p.now, 0
		m.pods, m.settled = p.podsVersion, false
		p.group.Go(func() error {
			deleted, err := p.expire(ctx, m, o, k)
			if !deleted && err == nil {
				err = p.update(ctx, m, o, v.Verdict, k)
			}
			// One object that cannot be written must not delay the others of its namespace.
			if err == nil {
				m.failures = 0
				return nil
			}
			log.FromContext(ctx).Error(err, "updating a status failed; retrying")
			m.after(min(errorWait<<min(m.failures, 10), maxErrorWait))
			m.failures++
			return nil
		})
	}
}

// expire deletes an object whose TTL has ended, or rechecks it at the end of the TTL.
func (p *statusPass) expire(ctx context.Context, m *memo, o client.Object, k health.Kind) (deleted bool, err error) {
	at, ok := k.Expires(o)
	if !ok {
		return false, nil
	}
	if wait := at.Sub(p.now); wait > 0 {
		m.after(wait)
		return false, nil
	}
	// Delete this version only: a later version may have another TTL.
	uid, version := o.GetUID(), o.GetResourceVersion()
	err = p.Delete(ctx, o, client.Preconditions{UID: &uid, ResourceVersion: &version})
	if apierrors.IsConflict(err) {
		m.after(conflictWait)
		return false, nil
	}
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("delete expired %s %s/%s: %w", k.Name, o.GetNamespace(), o.GetName(), err)
	}
	return true, nil
}

// update writes one object's status if it differs and the budget permits it, or rechecks
// the object later. It replaces fields of o, which is a shallow copy of the cached object.
func (p *statusPass) update(ctx context.Context, m *memo, o client.Object, verdict compile.Verdict, k health.Kind) error {
	if m.written != nil && slices.Contains(m.stale, o.GetResourceVersion()) {
		o = m.written.DeepCopyObject().(client.Object)
	} else {
		m.stale, m.written = nil, nil
	}
	before, conditions := k.Status(o)
	*conditions = health.Own(*conditions, k.Conditions)
	next, latest := k.Next(o, verdict, p.namespace, p.pods, p.now)
	after, conditionsAfter := k.Status(next)
	m.settled = p.answering && meta.IsStatusConditionTrue(*conditionsAfter, v1beta1.ConditionProgrammed)
	if at, ok := k.ChangesAt(next); ok {
		m.after(max(at.Sub(p.now), recheckInterval))
	}
	pending := health.Pending(*conditionsAfter)
	if !pending {
		m.unconfirmedSince = time.Time{}
	} else if m.unconfirmedSince.IsZero() {
		m.unconfirmedSince = p.now
	}
	if equality.Semantic.DeepEqual(before, after) {
		m.transition = permit{}
		return p.updateNumbers(ctx, m, o, latest, k)
	}
	if pending && p.awaitConfirmation(m, o, verdict, k) {
		return nil
	}
	if wait := m.transition.wait(p.budget.transitions, p.now); wait > 0 {
		m.after(wait)
		return nil
	}
	return p.write(ctx, m, o, next, k)
}

// updateNumbers writes the numbers of an object without a transition when they are due.
func (p *statusPass) updateNumbers(ctx context.Context, m *memo, o, next client.Object, k health.Kind) error {
	before, conditions := k.Status(o)
	after, conditionsAfter := k.Status(next)
	if equality.Semantic.DeepEqual(before, after) {
		m.numbers = permit{}
		return nil
	}
	interval := p.numbersInterval
	if k.NumbersInterval > 0 {
		interval = min(interval, k.NumbersInterval)
	}
	if k.Idle(o, next) {
		interval *= idleFactor
	}
	wait := remaining(interval+jitter(o.GetUID(), interval), m.numbersTime, p.now)
	if wait <= 0 {
		wait = m.numbers.wait(p.budget.numbers, p.now)
	}
	if wait <= 0 {
		return p.write(ctx, m, o, next, k)
	}
	m.after(max(wait, numbersPause))
	if !health.SameStatuses(*conditions, *conditionsAfter) {
		m.after(recheckInterval) // A delayed recovery.
	}
	return nil
}

// write writes an object's status, with an Event for each transition.
func (p *statusPass) write(ctx context.Context, m *memo, o, next client.Object, k health.Kind) error {
	_, before := k.Status(o)
	_, after := k.Status(next)
	events := health.Transitions(*before, *after)
	next = next.DeepCopyObject().(client.Object) // It shares parts with the cache, and apply replaces it.
	switch err := apply(ctx, p.Client, next, k); {
	case apierrors.IsConflict(err):
		m.after(conflictWait)
		return nil
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("write the status of %s %s/%s: %w", k.Name, o.GetNamespace(), o.GetName(), err)
	}
	statusWrites.WithLabelValues(k.Name).Inc()
	m.stale, m.written = append(m.stale, o.GetResourceVersion()), next
	m.numbersTime, m.transition, m.numbers = p.now, permit{}, permit{}
	m.after(writtenKept)
	for _, e := range events {
		p.events.Eventf(next, nil, e.Type, e.Reason, e.Action, "%s", e.Message)
	}
	return nil
}

// awaitConfirmation reports whether the pods have more time to confirm an object. It then
// requests their reports, and rechecks the object. If only pods that start have not confirmed it, they
// have startGrace.
func (p *statusPass) awaitConfirmation(m *memo, o client.Object, verdict compile.Verdict, k health.Kind) bool {
	if grace := remaining(p.confirmGrace, m.unconfirmedSince, p.now); grace > 0 {
		p.awaiting.Store(true)
		p.reports.refreshNow()
		m.after(min(grace, confirmInterval))
		return true
	}
	if remaining(startGrace, m.unconfirmedSince, p.now) <= 0 {
		return false
	}
	started := slices.DeleteFunc(slices.Clone(p.pods), func(pod health.Pod) bool { return pod.Starting })
	if len(started) < len(p.pods) {
		next, _ := k.Next(o, verdict, p.namespace, started, p.now)
		_, conditions := k.Status(next)
		if !health.Pending(*conditions) {
			m.after(recheckInterval)
			return true
		}
	}
	return false
}

// apply writes an object's status by server-side apply and reads the result into o.
// It returns a conflict if the object has another resource version. Conditions of
// other field managers are kept. The apply removes the fields that the operator owns
// and does not apply any more. A field that another client wrote, for example a restore of a
// backup, has another field manager, so a merge patch removes it.
func apply(ctx context.Context, c client.Client, o client.Object, k health.Kind) error {
	want := o.DeepCopyObject().(client.Object)
	status, _ := k.Status(want)
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(status)
	if err != nil {
		return err
	}
	u := &unstructured.Unstructured{Object: map[string]any{"status": fields}}
	u.SetGroupVersionKind(v1beta1.GroupVersion.WithKind(k.Name))
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
	found := o.DeepCopyObject().(client.Object)
	stored, conditions := k.Status(o)
	foreign := slices.DeleteFunc(slices.Clone(*conditions), func(c metav1.Condition) bool { return slices.Contains(k.Conditions, c.Type) })
	*conditions = health.Own(*conditions, k.Conditions)
	if equality.Semantic.DeepEqual(stored, status) {
		return nil
	}
	k.CopyStatus(o, want)
	*conditions = slices.Concat(*conditions, foreign)
	return c.Status().Patch(ctx, o, client.MergeFromWithOptions(found, client.MergeFromWithOptimisticLock{}), fieldOwner)
}

// remaining returns the remainder of a duration that began at start. It is zero if
// the clock was set back to a time before start, so that this cannot prolong a wait.
func remaining(d time.Duration, start, now time.Time) time.Duration {
	if now.Before(start) {
		return 0
	}
	return d - now.Sub(start)
}
