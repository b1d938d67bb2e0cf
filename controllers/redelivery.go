package controllers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
)

const (
	// maxNamespaceRedeliveries bounds the concurrent runs of a namespace, with one run
	// for each destination. maxNamespaceRate bounds the sum of their rates, in dead
	// letters a second.
	maxNamespaceRedeliveries = 4
	maxNamespaceRate         = 10_000
	// maxRedeliveryCalls bounds the concurrent requests to dispatcher pods, over all
	// namespaces. A request usually lasts redeliverySlice; then the next request in the
	// queue follows, so no run waits for the end of another one.
	maxRedeliveryCalls    = 64
	redeliverySlice       = 10 * time.Second
	redeliveryCallTimeout = 10 * time.Minute
	// redeliveryStep is the interval of progress updates in the status, and of the checks
	// whether a waiting Redelivery can start.
	redeliveryStep = 2 * time.Second
	// redeliveryTries is the number of consecutive failures of a pod after which its part
	// fails: with redeliveryBackoff, after a little more than five minutes.
	redeliveryTries = 11
	maxPodMessage   = 512
)

// redeliveryBackoff returns the wait after the n-th consecutive failure; n starts at 1.
func redeliveryBackoff(n int) time.Duration { return min(time.Second<<(n-1), time.Minute) }

// redeliveryReconciler runs Redeliveries. Each dispatcher pod records the progress of
// its part of a run. A new operator continues a run with these records and with
// status.startTime, which bounds the set of dead letters.
type redeliveryReconciler struct {
	client.Client
	pods    Pods
	http    *http.Client
	events  events.EventRecorder
	now     func() time.Time
	backoff func(n int) time.Duration
	calls   chan struct{}

	mu   sync.Mutex
	runs map[types.NamespacedName]*redeliveryRun
	// ctx is done when the manager stops.
	ctx context.Context
}

func setupRedelivery(mgr manager.Manager, o Options, transport http.RoundTripper) error {
	r := &redeliveryReconciler{
		Client: mgr.GetClient(), pods: o.Pods, http: &http.Client{Transport: transport}, now: o.Now, backoff: redeliveryBackoff,
		events: mgr.GetEventRecorder("posthorn.dev/operator"),
		calls:  make(chan struct{}, maxRedeliveryCalls),
		runs:   map[types.NamespacedName]*redeliveryRun{},
	}
	var stop context.CancelFunc
	r.ctx, stop = context.WithCancel(context.Background())
	if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		<-ctx.Done()
		stop()
		return nil
	})); err != nil {
		return err
	}
	return builder.ControllerManagedBy(mgr).
		Named("redelivery").
		For(&v1alpha1.Redelivery{}).
		WithOptions(controllerOptions(mgr, "redelivery")).
		Complete(r)
}

// +kubebuilder:rbac:groups=posthorn.dev,resources=redeliveries,verbs=list;watch;delete
// +kubebuilder:rbac:groups=posthorn.dev,resources=redeliveries/status,verbs=update;patch
// +kubebuilder:rbac:urls=/deadletters/redeliver,verbs=post

// Reconcile starts a Redelivery, updates its status, and deletes it when its TTL ends.
func (r *redeliveryReconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	var o v1alpha1.Redelivery
	if err := r.Get(ctx, request.NamespacedName, &o); err != nil {
		r.stop(request.NamespacedName, "")
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	r.stop(request.NamespacedName, o.UID) // The run of a deleted object with the same name.
	if !o.DeletionTimestamp.IsZero() {
		r.stop(request.NamespacedName, "")
		return reconcile.Result{}, nil
	}
	o.Status.Conditions = health.Own(o.Status.Conditions, health.Redeliveries.Conditions)
	before := o.Status.DeepCopy()
	if v1alpha1.JobEnded(o.Status.JobStatus) {
		r.stop(request.NamespacedName, "")
		o.Status.JobStatus = health.ObserveEnded(o.Status.JobStatus, o.Generation)
		if written, err := r.write(ctx, &o, before); err != nil || !written {
			return reconcile.Result{RequeueAfter: conflictWait}, err
		}
		return r.expire(ctx, &o)
	}
	run, outcome, err := r.prepare(ctx, &o)
	if err != nil {
		return reconcile.Result{}, err
	}
	if run != nil {
		run.setStatus(&o, r.now())
	} else {
		r.setStatus(&o, outcome)
	}
	if written, err := r.write(ctx, &o, before); err != nil || !written {
		return reconcile.Result{RequeueAfter: conflictWait}, err
	}
	if run != nil {
		// After the write: another operator needs the stored start time to continue the run.
		run.start.Do(func() { go run.execute(r) })
	}
	return reconcile.Result{RequeueAfter: redeliveryStep}, nil
}

// write stores the status if it changed. It returns false on a conflict.
func (r *redeliveryReconciler) write(ctx context.Context, o *v1alpha1.Redelivery, before *v1alpha1.RedeliveryStatus) (bool, error) {
	if equality.Semantic.DeepEqual(before, &o.Status) {
		return true, nil
	}
	transitions := health.Transitions(before.Conditions, o.Status.Conditions)
	switch err := apply(ctx, r.Client, o, health.Redeliveries); {
	case apierrors.IsConflict(err):
		return false, nil
	case err != nil:
		return true, client.IgnoreNotFound(err)
	}
	statusWrites.WithLabelValues("Redelivery").Inc()
	for _, e := range transitions {
		r.events.Eventf(o, nil, e.Type, e.Reason, e.Action, "%s", e.Message)
		log.FromContext(ctx).Info("redelivery changed", "destination", o.Spec.DestinationRef.Name, "reason", e.Reason, "matched", o.Status.Matched, "redelivered", o.Status.Redelivered)
	}
	return true, nil
}

// expire deletes a Redelivery whose TTL has ended.
func (r *redeliveryReconciler) expire(ctx context.Context, o *v1alpha1.Redelivery) (reconcile.Result, error) {
	at, ok := v1alpha1.JobExpires(o.Spec.TTLSecondsAfterFinished, o.Status.JobStatus)
	if !ok {
		return reconcile.Result{}, nil
	}
	if wait := at.Sub(r.now()); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	// Delete this version only: a later version may have another TTL.
	err := r.Delete(ctx, o, client.Preconditions{UID: &o.UID, ResourceVersion: &o.ResourceVersion})
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: conflictWait}, nil
	}
	return reconcile.Result{}, client.IgnoreNotFound(err)
}

// stop cancels the run with a name, unless it belongs to the object with this UID.
func (r *redeliveryReconciler) stop(name types.NamespacedName, unless types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if run := r.runs[name]; run != nil && run.uid != unless {
		run.cancel()
		delete(r.runs, name)
	}
}

// prepare returns the object's run. If there is none and none can start, it returns
// the outcome for the status instead.
func (r *redeliveryReconciler) prepare(ctx context.Context, o *v1alpha1.Redelivery) (*redeliveryRun, health.Outcome, error) {
	wait := func(reason, format string, args ...any) (*redeliveryRun, health.Outcome, error) {
		return nil, health.Outcome{Reason: reason, Message: fmt.Sprintf(format, args...)}, nil
	}
	key := client.ObjectKeyFromObject(o)
	r.mu.Lock()
	run := r.runs[key]
	r.mu.Unlock()
	if run != nil {
		return run, health.Outcome{}, nil
	}
	end := deadlineOf(o)
	if !end.IsZero() && !r.now().Before(end) {
		return nil, exceeded(o.Status), nil
	}
	name := o.Spec.DestinationRef.Name
	var destination v1alpha1.WebhookDestination
	err := r.Get(ctx, types.NamespacedName{Namespace: o.Namespace, Name: name}, &destination)
	if client.IgnoreNotFound(err) != nil {
		return nil, health.Outcome{}, fmt.Errorf("look up WebhookDestination %s: %w", name, err)
	}
	if err != nil {
		return wait(v1alpha1.ReasonDestinationNotFound, "spec.destinationRef.name: WebhookDestination %q does not exist in this namespace; create it", name)
	}
	pods, err := r.pods.Ready(ctx)
	if err != nil {
		return nil, health.Outcome{}, err
	}
	if len(pods) == 0 {
		return wait(v1alpha1.ReasonWaiting, "no dispatcher pod is ready")
	}
	var others v1alpha1.RedeliveryList
	if err := r.List(ctx, &others, client.InNamespace(o.Namespace)); err != nil {
		return nil, health.Outcome{}, fmt.Errorf("list Redeliveries: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if o.Status.StartTime == nil {
		// A run that an earlier operator started continues before a new one starts.
		active := map[string]v1alpha1.RedeliverySpec{}
		for _, other := range others.Items {
			if s := other.Status.JobStatus; s.StartTime != nil && !v1alpha1.JobEnded(s) && other.DeletionTimestamp.IsZero() {
				active[other.Name] = other.Spec
			}
		}
		for other, run := range r.runs {
			if other.Namespace == o.Namespace && !run.hasEnded() {
				active[other.Name] = run.spec
			}
		}
		delete(active, o.Name)
		perSecond := o.Spec.Rate
		for other, spec := range active {
			if spec.DestinationRef == o.Spec.DestinationRef {
				return wait(v1alpha1.ReasonWaiting, "Redelivery %q of the same destination runs", other)
			}
			perSecond += spec.Rate
		}
		switch {
		case len(active) >= maxNamespaceRedeliveries:
			return wait(v1alpha1.ReasonWaiting, "%d other Redeliveries of this namespace run", len(active))
		case len(active) > 0 && perSecond > maxNamespaceRate:
			return wait(v1alpha1.ReasonWaiting, "with the Redeliveries of this namespace that run, spec.rate would exceed %d dead letters a second", maxNamespaceRate)
		}
		start := metav1.NewTime(r.now().Add(time.Second - 1).Truncate(time.Second)) // Rounded up to seconds, so that no dead letter is excluded.
		o.Status.StartTime = &start
		end = deadlineOf(o)
	}
	run = newRedeliveryRun(r.ctx, o, end, r.now())
	r.runs[key] = run
	return run, health.Outcome{}, nil
}

// deadlineOf returns the deadline of a run that has started; zero means none.
func deadlineOf(o *v1alpha1.Redelivery) time.Time {
	if o.Status.StartTime == nil || o.Spec.ActiveDeadlineSeconds == nil {
		return time.Time{}
	}
	return o.Status.StartTime.Add(time.Duration(*o.Spec.ActiveDeadlineSeconds) * time.Second)
}

func exceeded(s v1alpha1.RedeliveryStatus) health.Outcome {
	return health.Outcome{Failed: true, Reason: v1alpha1.ReasonDeadlineExceeded, Message: fmt.Sprintf("the run did not end within spec.activeDeadlineSeconds; %d of %d dead letters were redelivered", s.Redelivered, s.Matched)}
}

// setStatus sets the status of an object without a run.
func (r *redeliveryReconciler) setStatus(o *v1alpha1.Redelivery, outcome health.Outcome) {
	accepted := acceptedRedelivery
	if outcome.Reason == v1alpha1.ReasonDestinationNotFound {
		accepted = metav1.Condition{Status: metav1.ConditionFalse, Reason: outcome.Reason, Message: outcome.Message}
	}
	if outcome.Failed {
		o.Status.NotRedelivered = max(0, o.Status.Matched-o.Status.Redelivered)
	}
	health.SetJobConditions(&o.Status.JobStatus, o.Generation, metav1.NewTime(r.now().Truncate(time.Second)), accepted, outcome)
}

var acceptedRedelivery = metav1.Condition{Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAccepted, Message: "the destination exists"}

// redeliveryRun is a Redelivery in progress.
type redeliveryRun struct {
	id        string
	uid       types.UID
	namespace string
	name      string
	spec      v1alpha1.RedeliverySpec
	started   time.Time
	ctx       context.Context
	cancel    context.CancelFunc
	start     sync.Once

	mu    sync.Mutex
	parts map[string]*redeliveryPart // by pod name
	// ended is true after the end of the run. Then at most one of alreadyDone and
	// exceeded is true.
	ended       bool
	alreadyDone bool
	exceeded    bool
	// err is the error that failed the run as a whole.
	err error
}

// redeliveryPart is the last known state of one pod's part.
type redeliveryPart struct {
	matched, redelivered, left int64
	begun, done, failed        bool
	problem                    string
}

// newRedeliveryRun returns a run that ends at a deadline, unless the deadline is zero.
func newRedeliveryRun(ctx context.Context, o *v1alpha1.Redelivery, deadline, now time.Time) *redeliveryRun {
	run := &redeliveryRun{
		id: compile.RedeliveryID(o), uid: o.UID, namespace: o.Namespace, name: o.Name, spec: *o.Spec.DeepCopy(), started: o.Status.StartTime.Time,
		parts: map[string]*redeliveryPart{},
	}
	if deadline.IsZero() {
		run.ctx, run.cancel = context.WithCancel(ctx)
	} else {
		run.ctx, run.cancel = context.WithTimeout(ctx, deadline.Sub(now))
	}
	return run
}

func (run *redeliveryRun) hasEnded() bool {
	run.mu.Lock()
	defer run.mu.Unlock()
	return run.ended
}

// setStatus sets the object's status to the state of the run.
func (run *redeliveryRun) setStatus(o *v1alpha1.Redelivery, now time.Time) {
	run.mu.Lock()
	defer run.mu.Unlock()
	s := &o.Status
	start, stamp := metav1.NewTime(run.started), metav1.NewTime(now.Truncate(time.Second))
	s.StartTime = &start
	var matched, redelivered int64
	failed, problem := false, ""
	for _, name := range slices.Sorted(maps.Keys(run.parts)) {
		p := run.parts[name]
		matched += p.matched
		redelivered += p.redelivered
		failed = failed || p.failed
		if p.problem != "" && problem == "" {
			problem = "; " + p.problem
		}
	}
	// The status may include the numbers of pods that have not answered this operator yet.
	s.Matched, s.Redelivered = max(s.Matched, matched), max(s.Redelivered, redelivered)
	outcome := health.Outcome{Reason: v1alpha1.ReasonRunning, Message: fmt.Sprintf("%d of %d dead letters redelivered so far%s", s.Redelivered, s.Matched, problem)}
	switch {
	case !run.ended:
	case run.alreadyDone:
		s.Matched, s.Redelivered = 0, 0
		outcome = health.Outcome{Complete: true, Reason: v1alpha1.ReasonAlreadyDone, Message: "a Redelivery with the same name and spec completed within the last 30 days, so nothing was redelivered; set spec.requestId to run it again"}
	case run.exceeded:
		outcome = exceeded(*s)
	case failed || run.err != nil:
		if run.err != nil {
			problem = "; " + run.err.Error()
		}
		outcome = health.Outcome{Failed: true, Reason: v1alpha1.ReasonNotRedelivered, Message: fmt.Sprintf("%d of %d dead letters redelivered%s; the operator's log names the dispatcher", s.Redelivered, s.Matched, problem)}
	case run.spec.DryRun:
		outcome = health.Outcome{Complete: true, Reason: v1alpha1.ReasonCounted, Message: fmt.Sprintf("%d dead letters would be redelivered", s.Matched)}
	default:
		outcome = health.Outcome{Complete: true, Reason: v1alpha1.ReasonRedelivered, Message: fmt.Sprintf("%d dead letters redelivered", s.Redelivered)}
	}
	if outcome.Failed && !run.spec.DryRun {
		s.NotRedelivered = max(0, s.Matched-s.Redelivered)
	}
	if outcome.Complete {
		s.CompletionTime = &stamp
	}
	health.SetJobConditions(&s.JobStatus, o.Generation, stamp, acceptedRedelivery, outcome)
}

// execute runs every pod's part, and then has the pods record the end of the run.
func (run *redeliveryRun) execute(r *redeliveryReconciler) {
	defer run.cancel()
	if run.begin(r) {
		var group sync.WaitGroup
		for _, name := range run.pods() {
			group.Go(func() { run.executePart(r, name) })
		}
		group.Wait()
		run.complete(r)
	}
	run.mu.Lock()
	defer run.mu.Unlock()
	switch {
	case run.alreadyDone || run.ctx.Err() == nil:
		run.ended = true
	case errors.Is(run.ctx.Err(), context.DeadlineExceeded):
		run.ended, run.exceeded = true, true
	default:
		return // Another operator continues.
	}
	logger := log.Log.WithName("redelivery").WithValues("namespace", run.namespace, "name", run.name)
	for name, p := range run.parts {
		logger.Info("redelivery part ended", "pod", name, "matched", p.matched, "redelivered", p.redelivered, "left", p.left, "done", p.done, "error", p.problem)
	}
}

// pods returns the names of the pods that take part.
func (run *redeliveryRun) pods() []string {
	run.mu.Lock()
	defer run.mu.Unlock()
	return slices.Sorted(maps.Keys(run.parts))
}

// record stores a pod's progress. It reports whether the pod's part has ended.
func (run *redeliveryRun) record(name string, a adminapi.DeadLetterProgress) (ended bool) {
	run.mu.Lock()
	defer run.mu.Unlock()
	p := run.parts[name]
	if p == nil {
		p = &redeliveryPart{}
		run.parts[name] = p
	}
	run.alreadyDone = run.alreadyDone || a.Job.AlreadyDone
	p.matched, p.redelivered, p.left = a.Matched, a.Redelivered, a.Job.Left
	p.begun, p.done, p.problem = true, a.Job.PartDone, ""
	if p.done && p.left > 0 {
		p.failed, p.problem = true, fmt.Sprintf("%d dead letters belong to a Source or an endpoint that was removed from the destination", p.left)
	}
	for _, other := range a.Job.Pods {
		if run.parts[other] == nil {
			run.parts[other] = &redeliveryPart{}
		}
	}
	return run.alreadyDone || p.done
}

// recordError stores an error of a pod's part; final means that the part has failed.
func (run *redeliveryRun) recordError(name string, err error, final bool) {
	run.mu.Lock()
	defer run.mu.Unlock()
	p := run.parts[name]
	p.problem, p.failed = publicError(err), final
}

// publicError returns the text of an error without addresses, for the status.
func publicError(err error) string {
	if _, ok := errors.AsType[net.Error](err); ok {
		return "cannot connect to the dispatcher"
	}
	return truncate(err.Error(), maxPodMessage)
}

// begin records the run on all ready pods before any of them redelivers, because a
// pod may have the record that the run has completed, or the names of all pods that
// take part. It returns false if there is nothing to redeliver, or if the run failed.
func (run *redeliveryRun) begin(r *redeliveryReconciler) bool {
	for failures := 1; ; failures++ {
		pods, err := r.pods.Ready(run.ctx)
		if err == nil && len(pods) > 0 {
			run.mu.Lock()
			for _, p := range pods {
				if run.parts[p.Name] == nil {
					run.parts[p.Name] = &redeliveryPart{}
				}
			}
			run.mu.Unlock()
			names := run.pods()
			var group sync.WaitGroup
			for _, pod := range pods {
				group.Go(func() {
					a, err := r.act(run.ctx, pod, run.action(adminapi.JobBegin, names), nil)
					if err != nil {
						run.recordError(pod.Name, err, false)
						return
					}
					run.record(pod.Name, a)
				})
			}
			group.Wait()
		}
		run.mu.Lock()
		begun, ended := false, run.alreadyDone
		for _, p := range run.parts {
			begun = begun || p.begun
		}
		if !begun && failures >= redeliveryTries {
			ended, run.err = true, errors.New("no dispatcher could begin")
			for _, p := range run.parts {
				if p.problem != "" {
					run.err = errors.New(p.problem)
				}
			}
		}
		run.mu.Unlock()
		if ended || run.ctx.Err() != nil {
			return false
		}
		if begun {
			return true
		}
		select {
		case <-time.After(r.backoff(failures)):
		case <-run.ctx.Done():
			return false
		}
	}
}

// executePart runs one pod's part in time slices. It retries up to redeliveryTries
// consecutive failures.
func (run *redeliveryRun) executePart(r *redeliveryReconciler, name string) {
	for failures := 0; run.ctx.Err() == nil; {
		progressed, done, err := run.executeSlice(r, name)
		if done || run.ctx.Err() != nil {
			return
		}
		if progressed || err == nil {
			failures = 0
		}
		if err == nil {
			continue
		}
		failures++
		run.recordError(name, err, failures >= redeliveryTries)
		if failures == 1 || failures >= redeliveryTries {
			log.Log.WithName("redelivery").Error(err, "redelivery failed on a dispatcher pod", "namespace", run.namespace, "name", run.name, "pod", name, "last", failures >= redeliveryTries)
		}
		if failures >= redeliveryTries {
			return
		}
		select {
		case <-time.After(r.backoff(failures)):
		case <-run.ctx.Done():
			return
		}
	}
}

// executeSlice runs a pod's part for one time slice. progressed is true if a dead
// letter was redelivered.
func (run *redeliveryRun) executeSlice(r *redeliveryReconciler, name string) (progressed, done bool, err error) {
	pods, err := r.pods.Ready(run.ctx)
	if err != nil {
		return false, false, err
	}
	at := slices.IndexFunc(pods, func(p Pod) bool { return p.Name == name })
	if at < 0 {
		return false, false, errors.New("the dispatcher is not ready")
	}
	run.mu.Lock()
	begun, done := run.parts[name].begun, run.parts[name].done
	run.mu.Unlock()
	if !begun {
		a, err := r.act(run.ctx, pods[at], run.action(adminapi.JobBegin, run.pods()), nil)
		if err != nil {
			return false, false, err
		}
		done = run.record(name, a)
		run.mu.Lock()
		if run.alreadyDone {
			run.cancel() // This ends the parts of the other pods, too.
		}
		run.mu.Unlock()
	}
	if done {
		return true, true, nil
	}
	run.mu.Lock()
	before := run.parts[name].redelivered
	run.mu.Unlock()
	a, err := r.act(run.ctx, pods[at], run.action(adminapi.JobRun, nil), func(a adminapi.DeadLetterProgress) {
		if a.Job != nil {
			progressed = progressed || a.Redelivered > before
			run.record(name, a)
		}
	})
	if err != nil {
		return progressed, false, err
	}
	return progressed, run.record(name, a), nil
}

// complete has the pods record the end of a run without failures, so that it is not
// repeated. The record of one pod is sufficient.
func (run *redeliveryRun) complete(r *redeliveryReconciler) {
	run.mu.Lock()
	for _, p := range run.parts {
		if p.failed || !p.done {
			run.mu.Unlock()
			return
		}
	}
	run.mu.Unlock()
	for failures := 1; ; failures++ {
		pods, err := r.pods.Ready(run.ctx)
		recorded := false
		for _, pod := range pods {
			_, actErr := r.act(run.ctx, pod, run.action(adminapi.JobComplete, nil), nil)
			recorded, err = recorded || actErr == nil, errors.Join(err, actErr)
		}
		switch {
		case recorded:
			return
		case run.ctx.Err() != nil:
			return
		case failures >= redeliveryTries:
			run.mu.Lock()
			defer run.mu.Unlock()
			run.err = errors.New("no dispatcher could record the end")
			log.Log.WithName("redelivery").Error(err, "recording the end of a redelivery failed on all dispatcher pods", "namespace", run.namespace, "name", run.name)
			return
		}
		select {
		case <-time.After(r.backoff(failures)):
		case <-run.ctx.Done():
			return
		}
	}
}

// action returns the request to a pod for a step of the run.
func (run *redeliveryRun) action(step string, pods []string) adminapi.DeadLetterAction {
	run.mu.Lock()
	parts := max(1, len(run.parts))
	run.mu.Unlock()
	a := adminapi.DeadLetterAction{
		Destination: run.namespace + "/" + run.spec.DestinationRef.Name, DryRun: run.spec.DryRun, Rate: float64(run.spec.Rate) / float64(parts),
		Job: &adminapi.DeadLetterJob{ID: run.id, UID: string(run.uid), Step: step, Pods: pods, SliceMS: redeliverySlice.Milliseconds()},
	}
	// Exclude dead letters that failed after the start: the run may have redelivered them before.
	a.Selector.Until = run.started
	if s := run.spec.Selector; s != nil {
		a.Selector.Reasons, a.Selector.Events = s.Reasons, s.Events
		for _, t := range s.Types {
			a.Selector.Types = append(a.Selector.Types, string(t))
		}
		if s.Since != nil {
			a.Selector.Since = s.Since.Time
		}
		if s.Until != nil && s.Until.Time.Before(run.started) {
			a.Selector.Until = s.Until.Time
		}
	}
	return a
}

// act sends a request to a pod and reads the progress to its end. It waits while
// maxRedeliveryCalls requests are in progress.
func (r *redeliveryReconciler) act(ctx context.Context, pod Pod, a adminapi.DeadLetterAction, onProgress func(adminapi.DeadLetterProgress)) (adminapi.DeadLetterProgress, error) {
	var p adminapi.DeadLetterProgress
	select {
	case r.calls <- struct{}{}:
		defer func() { <-r.calls }()
	case <-ctx.Done():
		return p, ctx.Err()
	}
	ctx, cancel := context.WithTimeout(ctx, redeliveryCallTimeout)
	defer cancel()
	body, err := json.Marshal(a)
	if err != nil {
		return p, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, pod.URL+"/deadletters/redeliver", bytes.NewReader(body))
	if err != nil {
		return p, err
	}
	response, err := r.http.Do(request)
	if err != nil {
		return p, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, maxPodMessage))
		return p, fmt.Errorf("%s: %s", response.Status, strings.TrimSpace(string(text)))
	}
	if p, err = adminapi.FollowDeadLetters(response.Body, onProgress); errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("the dispatcher stopped before the end of the request")
	}
	if err == nil && p.Job == nil {
		err = errors.New("the dispatcher does not support Redelivery objects; update it")
	}
	return p, err
}

// truncate returns at most n bytes of a text, and no part of a rune.
func truncate(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "")
}
