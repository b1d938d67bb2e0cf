package controllers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

const (
	// maxRedeliveries run at the same time; of one destination there is one.
	maxRedeliveries = 8
	// redeliveryStep is how often status says how far a redelivery is, and how
	// long one that waits does so before the next look.
	redeliveryStep = 2 * time.Second
	// redeliveryTries is how often in a row a pod may fail before it is given up:
	// with redeliveryBackoff, a bit more than five minutes.
	redeliveryTries   = 11
	maxRedeliveryPods = 256
	maxPodMessage     = 512
	defaultTTL        = 3600
)

// redeliveryBackoff is the wait after the n-th failure in a row, from 1.
func redeliveryBackoff(n int) time.Duration { return min(time.Second<<(n-1), time.Minute) }

// redeliveryReconciler runs Redeliveries. What runs is in memory; what a new
// operator needs to go on with it is in status: which pods take part and which
// of them are done, and the start, which bounds what is chosen. Dead letters that
// were redelivered are gone, so doing it again for a pod goes on where it was.
type redeliveryReconciler struct {
	client.Client
	pods    Pods
	http    *http.Client
	events  events.EventRecorder
	now     func() time.Time
	backoff func(n int) time.Duration

	mu   sync.Mutex
	runs map[types.NamespacedName]*redeliveryRun
	// life ends with the manager.
	life context.Context
}

func setupRedelivery(mgr manager.Manager, o Options, way http.RoundTripper) error {
	r := &redeliveryReconciler{
		Client: mgr.GetClient(), pods: o.Pods, http: &http.Client{Transport: way}, now: o.Now, backoff: redeliveryBackoff,
		events: mgr.GetEventRecorder("posthorn.dev/operator"),
		runs:   map[types.NamespacedName]*redeliveryRun{},
	}
	var stop context.CancelFunc
	r.life, stop = context.WithCancel(context.Background())
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
// +kubebuilder:rbac:groups=posthorn.dev,resources=redeliveries/status,verbs=update
// +kubebuilder:rbac:urls=/deadletters/redeliver,verbs=post

// Reconcile starts a Redelivery, brings its status up to date, and deletes it some time after its end.
func (r *redeliveryReconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	var o v1alpha1.Redelivery
	if err := r.Get(ctx, request.NamespacedName, &o); err != nil {
		r.stop(request.NamespacedName, "")
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	r.stop(request.NamespacedName, o.UID) // one of the same name that is gone
	if !o.DeletionTimestamp.IsZero() {
		r.stop(request.NamespacedName, "")
		return reconcile.Result{}, nil
	}
	if o.Status.FinishTime != nil {
		r.stop(request.NamespacedName, "")
		return r.expire(ctx, &o)
	}
	before := o.Status.DeepCopy()
	run, err := r.prepare(ctx, &o)
	if err != nil {
		return reconcile.Result{}, err
	}
	if run != nil {
		run.show(&o, r.now())
	}
	if !equality.Semantic.DeepEqual(before, &o.Status) {
		switch err := r.Status().Update(ctx, &o); {
		case apierrors.IsConflict(err):
			return reconcile.Result{RequeueAfter: conflictWait}, nil
		case err != nil:
			return reconcile.Result{}, client.IgnoreNotFound(err)
		}
		statusWrites.WithLabelValues("Redelivery").Inc()
		if c := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.ConditionComplete); o.Status.FinishTime != nil {
			kind := corev1.EventTypeNormal
			if o.Status.Phase == v1alpha1.RedeliveryFailed {
				kind = corev1.EventTypeWarning
			}
			r.events.Eventf(&o, nil, kind, c.Reason, "Redeliver", "%s", c.Message)
			log.FromContext(ctx).Info("Redelivery ended", "destination", o.Spec.Destination, "phase", o.Status.Phase, "matched", o.Status.Matched, "redelivered", o.Status.Redelivered)
		}
	}
	if run != nil {
		// Only now: what a successor goes by is stored.
		run.start.Do(func() { go run.work(r) })
	}
	return reconcile.Result{RequeueAfter: redeliveryStep}, nil
}

// expire deletes a Redelivery whose time after the end is over.
func (r *redeliveryReconciler) expire(ctx context.Context, o *v1alpha1.Redelivery) (reconcile.Result, error) {
	ttl := int32(defaultTTL)
	if o.Spec.TTLSecondsAfterFinished != nil {
		ttl = *o.Spec.TTLSecondsAfterFinished
	}
	if left := o.Status.FinishTime.Add(time.Duration(ttl) * time.Second).Sub(r.now()); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	return reconcile.Result{}, client.IgnoreNotFound(r.Delete(ctx, o, client.Preconditions{UID: &o.UID}))
}

// stop ends the run of a name, unless it is of the object with this UID.
func (r *redeliveryReconciler) stop(name types.NamespacedName, unless types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if run := r.runs[name]; run != nil && run.uid != unless {
		run.cancel()
		delete(r.runs, name)
	}
}

// prepare returns the object's run, a new one if need be, or nil when it has to wait.
func (r *redeliveryReconciler) prepare(ctx context.Context, o *v1alpha1.Redelivery) (*redeliveryRun, error) {
	key := client.ObjectKeyFromObject(o)
	r.mu.Lock()
	run := r.runs[key]
	r.mu.Unlock()
	if run != nil {
		return run, nil
	}
	var destination v1alpha1.WebhookDestination
	err := r.Get(ctx, types.NamespacedName{Namespace: o.Namespace, Name: o.Spec.Destination}, &destination)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("look up WebhookDestination %s: %w", o.Spec.Destination, err)
	}
	if err != nil {
		r.wait(o, metav1.ConditionFalse, v1alpha1.ReasonDestinationNotFound, fmt.Sprintf("there is no WebhookDestination %q in this namespace", o.Spec.Destination))
		return nil, nil
	}
	if o.Status.StartTime == nil {
		// One that an earlier operator began goes on before a new one starts.
		var all v1alpha1.RedeliveryList
		if err := r.List(ctx, &all, client.InNamespace(o.Namespace)); err != nil {
			return nil, fmt.Errorf("list Redeliveries: %w", err)
		}
		for _, other := range all.Items {
			if s := other.Status; other.Name != o.Name && other.Spec.Destination == o.Spec.Destination && s.StartTime != nil && s.FinishTime == nil && other.DeletionTimestamp.IsZero() {
				r.wait(o, metav1.ConditionTrue, v1alpha1.ReasonWaiting, fmt.Sprintf("Redelivery %q of the same destination runs", other.Name))
				return nil, nil
			}
		}
	}
	pods, err := r.pods.Ready(ctx)
	if err != nil {
		return nil, err
	}
	if len(pods) == 0 {
		r.wait(o, metav1.ConditionTrue, v1alpha1.ReasonWaiting, "no dispatcher pod is ready")
		return nil, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for other, run := range r.runs {
		if !run.ended() && other.Namespace == o.Namespace && run.spec.Destination == o.Spec.Destination {
			r.wait(o, metav1.ConditionTrue, v1alpha1.ReasonWaiting, fmt.Sprintf("Redelivery %q of the same destination runs", other.Name))
			return nil, nil
		}
	}
	if active := len(r.runs); active >= maxRedeliveries {
		r.wait(o, metav1.ConditionTrue, v1alpha1.ReasonWaiting, fmt.Sprintf("%d other Redeliveries run", active))
		return nil, nil
	}
	if o.Status.StartTime == nil {
		start := metav1.NewTime(r.now().Add(time.Second - 1).Truncate(time.Second)) // stored in seconds; none is left out
		o.Status.StartTime = &start
		o.Status.Dispatchers = nil
		for _, pod := range pods[:min(len(pods), maxRedeliveryPods)] {
			o.Status.Dispatchers = append(o.Status.Dispatchers, v1alpha1.RedeliveryDispatcher{Name: pod.Name})
		}
	}
	run = &redeliveryRun{uid: o.UID, namespace: o.Namespace, spec: *o.Spec.DeepCopy(), started: o.Status.StartTime.Time}
	for _, d := range o.Status.Dispatchers {
		run.parts = append(run.parts, redeliveryPart{RedeliveryDispatcher: d, resumed: d.Matched > 0})
	}
	run.ctx, run.cancel = context.WithCancel(r.life)
	r.runs[key] = run
	return run, nil
}

// wait says in status why nothing happens yet.
func (r *redeliveryReconciler) wait(o *v1alpha1.Redelivery, accepted metav1.ConditionStatus, reason, message string) {
	o.Status.ObservedGeneration = o.Generation
	if o.Status.StartTime == nil {
		o.Status.Phase = v1alpha1.RedeliveryPending
	}
	c := metav1.Condition{Type: v1alpha1.ConditionAccepted, Status: accepted, Reason: v1alpha1.ReasonAccepted, Message: "the destination exists", ObservedGeneration: o.Generation, LastTransitionTime: metav1.NewTime(r.now())}
	if accepted == metav1.ConditionFalse {
		c.Reason, c.Message = reason, message
	}
	meta.SetStatusCondition(&o.Status.Conditions, c)
	c.Type, c.Status, c.Reason, c.Message = v1alpha1.ConditionComplete, metav1.ConditionFalse, reason, message
	meta.SetStatusCondition(&o.Status.Conditions, c)
}

// redeliveryRun is a Redelivery that is being worked on.
type redeliveryRun struct {
	uid       types.UID
	namespace string
	spec      v1alpha1.RedeliverySpec
	started   time.Time
	ctx       context.Context
	cancel    context.CancelFunc
	start     sync.Once

	mu    sync.Mutex
	parts []redeliveryPart
}

// redeliveryPart is one pod's part.
type redeliveryPart struct {
	v1alpha1.RedeliveryDispatcher
	// resumed is true when matched is of an earlier try.
	resumed bool
	failed  bool
}

func (run *redeliveryRun) ended() bool {
	run.mu.Lock()
	defer run.mu.Unlock()
	return !slices.ContainsFunc(run.parts, func(p redeliveryPart) bool { return !p.Done })
}

// show writes the run into the object's status.
func (run *redeliveryRun) show(o *v1alpha1.Redelivery, now time.Time) {
	run.mu.Lock()
	defer run.mu.Unlock()
	s := &o.Status
	start := metav1.NewTime(run.started)
	*s = v1alpha1.RedeliveryStatus{Conditions: s.Conditions, ObservedGeneration: o.Generation, Phase: v1alpha1.RedeliveryRunning, StartTime: &start}
	ended, failed, problem := true, false, ""
	for _, p := range run.parts {
		s.Matched += p.Matched
		s.Redelivered += p.Redelivered
		s.Dispatchers = append(s.Dispatchers, p.RedeliveryDispatcher)
		ended = ended && p.Done
		failed = failed || p.failed
		if p.Message != "" && problem == "" {
			problem = fmt.Sprintf("; pod %s: %s", p.Name, p.Message)
		}
	}
	complete := metav1.Condition{
		Type: v1alpha1.ConditionComplete, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonRunning,
		Message: fmt.Sprintf("%d of %d dead letters redelivered so far%s", s.Redelivered, s.Matched, problem),
	}
	if ended {
		finish := metav1.NewTime(now.Truncate(time.Second))
		s.FinishTime, s.Phase = &finish, v1alpha1.RedeliverySucceeded
		complete.Status = metav1.ConditionTrue
		complete.Reason, complete.Message = v1alpha1.ReasonRedelivered, fmt.Sprintf("%d dead letters redelivered", s.Redelivered)
		if run.spec.DryRun {
			complete.Reason, complete.Message = v1alpha1.ReasonCounted, fmt.Sprintf("%d dead letters would be redelivered", s.Matched)
		} else {
			s.Failed = max(0, s.Matched-s.Redelivered)
		}
		if failed || s.Failed > 0 {
			s.Phase, complete.Status, complete.Reason = v1alpha1.RedeliveryFailed, metav1.ConditionFalse, v1alpha1.ReasonRedeliveryFailed
			complete.Message = fmt.Sprintf("%d of %d dead letters redelivered%s", s.Redelivered, s.Matched, problem)
		}
	}
	accepted := metav1.Condition{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAccepted, Message: "the destination exists"}
	for _, c := range []metav1.Condition{accepted, complete} {
		c.ObservedGeneration, c.LastTransitionTime = o.Generation, metav1.NewTime(now)
		meta.SetStatusCondition(&s.Conditions, c)
	}
}

// work has every pod do its part.
func (run *redeliveryRun) work(r *redeliveryReconciler) {
	defer run.cancel()
	var group sync.WaitGroup
	for i := range run.parts {
		group.Go(func() { run.workPod(r, i) })
	}
	group.Wait()
}

func (run *redeliveryRun) workPod(r *redeliveryReconciler, i int) {
	part := func(f func(p *redeliveryPart)) {
		run.mu.Lock()
		defer run.mu.Unlock()
		f(&run.parts[i])
	}
	var name string
	var done bool
	part(func(p *redeliveryPart) { name, done = p.Name, p.Done })
	for failures := 0; !done; {
		moved, err := run.try(r, name, part)
		if run.ctx.Err() != nil {
			return // a successor goes on
		}
		if err == nil {
			return
		}
		if failures++; moved {
			failures = 1
		}
		done = failures >= redeliveryTries
		part(func(p *redeliveryPart) {
			p.Message, p.Done, p.failed = bounded(err.Error(), maxPodMessage), done, done
		})
		select {
		case <-time.After(r.backoff(failures)):
		case <-run.ctx.Done():
			return
		}
	}
}

// try counts what a pod has and has it redelivered; moved is true when something was.
func (run *redeliveryRun) try(r *redeliveryReconciler, name string, part func(func(*redeliveryPart))) (moved bool, err error) {
	pods, err := r.pods.Ready(run.ctx)
	if err != nil {
		return false, err
	}
	at := slices.IndexFunc(pods, func(p Pod) bool { return p.Name == name })
	if at < 0 {
		return false, errors.New("the pod is not ready")
	}
	action := run.action(len(run.parts))
	action.DryRun = true
	counted, err := r.act(run.ctx, pods[at], action, nil)
	if err != nil {
		return false, err
	}
	var base int64
	part(func(p *redeliveryPart) {
		if !p.resumed {
			p.Matched, p.resumed = counted.Matched, true
		}
		// What was counted before and is not here any more has been redelivered.
		p.Redelivered = max(p.Redelivered, p.Matched-counted.Matched)
		if run.spec.DryRun {
			p.Redelivered = 0
		}
		base = p.Redelivered
		p.Message, p.Done = "", run.spec.DryRun || counted.Matched == 0
		done := p.Done
		moved = done
	})
	if moved {
		return true, nil
	}
	action.DryRun = false
	progress, err := r.act(run.ctx, pods[at], action, func(a liveconfig.DeadLetterProgress) {
		moved = moved || a.Redelivered > 0
		part(func(p *redeliveryPart) { p.Redelivered = base + a.Redelivered })
	})
	if err != nil {
		return moved, err
	}
	part(func(p *redeliveryPart) {
		p.Redelivered, p.Done = base+progress.Redelivered, true
		p.Matched = max(p.Matched, p.Redelivered)
		if left := progress.Matched - progress.Redelivered; left > 0 {
			p.failed, p.Message = true, fmt.Sprintf("%d are of a Source or an endpoint that the destination does not have any more", left)
		}
	})
	return true, nil
}

// action is what a pod is asked to do.
func (run *redeliveryRun) action(pods int) liveconfig.DeadLetterAction {
	a := liveconfig.DeadLetterAction{Destination: run.namespace + "/" + run.spec.Destination, Rate: float64(run.spec.Rate) / float64(pods)}
	// What failed after the start stays: it may have been redelivered already.
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

// act has a pod do something with its dead letters and follows it to the end.
func (r *redeliveryReconciler) act(ctx context.Context, pod Pod, a liveconfig.DeadLetterAction, onProgress func(liveconfig.DeadLetterProgress)) (liveconfig.DeadLetterProgress, error) {
	var p liveconfig.DeadLetterProgress
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
	if p, err = liveconfig.FollowDeadLetters(response.Body, onProgress); errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("the pod ended before it was done")
	}
	return p, err
}

// bounded cuts a text, not within a rune.
func bounded(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "")
}
