package controllers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/health"
)

const (
	// numbersInterval is the shortest time between two writes of an object's
	// numbers. Transitions do not wait for it.
	numbersInterval = 30 * time.Second
	// lookInterval is when to look again at an object that has news which health
	// holds back for a while.
	lookInterval = 2 * time.Second
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

	mu    sync.Mutex
	memos map[string]map[types.UID]*memo // by tenant
}

// memo is what is remembered of one object between two looks at it.
type memo struct {
	// stale are the versions that our last writes replaced, and after is what
	// came of them: as long as the cache still shows a stale one, after is the truth.
	stale []string
	after client.Object
	// numbers is when the numbers were written last.
	numbers time.Time
	seen    bool
}

func setupStatus(mgr manager.Manager, o Options, known *verdictBook, reports *prober, own *trigger) error {
	r := &statusReconciler{
		Client: mgr.GetClient(), known: known, reports: reports, now: o.Now,
		events: mgr.GetEventRecorder("posthorn.dev/operator"),
		memos:  map[string]map[types.UID]*memo{},
	}
	return builder.ControllerManagedBy(mgr).
		Named("status").
		WatchesRawSource(own).
		WithLogConstructor(logConstructor(mgr, "status")).
		WithOptions(controllerOptions()).
		Complete(r)
}

// +kubebuilder:rbac:groups=posthorn.dev,resources=sources/status;webhookdestinations/status;audiences/status;deletionrequests/status,verbs=update
// +kubebuilder:rbac:groups=posthorn.dev,resources=deletionrequests,verbs=delete
// +kubebuilder:rbac:groups=events.k8s.io,resources=events,verbs=create;patch

// Reconcile brings the status of one tenant's objects up to date.
func (r *statusReconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	tenant := request.Name
	judged, ok := r.known.get(tenant)
	if !ok {
		r.mu.Lock()
		delete(r.memos, tenant)
		r.mu.Unlock()
		return reconcile.Result{}, nil
	}
	pods, settled := r.reports.reports()
	if !settled {
		return reconcile.Result{}, nil // the prober calls again when it knows
	}
	var sources v1alpha1.SourceList
	var destinations v1alpha1.WebhookDestinationList
	var audiences v1alpha1.AudienceList
	var deletions v1alpha1.DeletionRequestList
	if err := errors.Join(
		r.List(ctx, &sources, client.InNamespace(tenant)),
		r.List(ctx, &destinations, client.InNamespace(tenant)),
		r.List(ctx, &audiences, client.InNamespace(tenant)),
		r.List(ctx, &deletions, client.InNamespace(tenant)),
	); err != nil {
		return reconcile.Result{}, fmt.Errorf("list the objects of namespace %s: %w", tenant, err)
	}
	now := r.now()
	memos := r.memosOf(tenant)
	var group errgroup.Group
	group.SetLimit(maxWritesAtOnce)
	var again shortest
	for i := range sources.Items {
		o := &sources.Items[i]
		verdict, ok := judged.Sources[o.Name]
		if m := memoOf(memos, o); ok && judged.sources[o.Name] == versionOf(o) {
			group.Go(func() error {
				return update(ctx, r, m, o, &again, now, subject[*v1alpha1.Source, v1alpha1.SourceStatus]{
					kind:   "Source",
					status: func(o *v1alpha1.Source) *v1alpha1.SourceStatus { return &o.Status },
					compute: func(o *v1alpha1.Source, numbersDue bool) v1alpha1.SourceStatus {
						return health.Source(*o, verdict, tenant, pods, now, numbersDue)
					},
					transitions: health.SourceTransitions,
				})
			})
		}
	}
	for i := range destinations.Items {
		o := &destinations.Items[i]
		verdict, ok := judged.Destinations[o.Name]
		if m := memoOf(memos, o); ok && judged.destinations[o.Name] == versionOf(o) {
			group.Go(func() error {
				return update(ctx, r, m, o, &again, now, subject[*v1alpha1.WebhookDestination, v1alpha1.WebhookDestinationStatus]{
					kind:   "WebhookDestination",
					status: func(o *v1alpha1.WebhookDestination) *v1alpha1.WebhookDestinationStatus { return &o.Status },
					compute: func(o *v1alpha1.WebhookDestination, numbersDue bool) v1alpha1.WebhookDestinationStatus {
						return health.Destination(*o, verdict, tenant, pods, now, numbersDue)
					},
					transitions: health.DestinationTransitions,
				})
			})
		}
	}
	for i := range audiences.Items {
		o := &audiences.Items[i]
		verdict, ok := judged.Audiences[o.Name]
		if m := memoOf(memos, o); ok && judged.audiences[o.Name] == versionOf(o) {
			group.Go(func() error {
				return update(ctx, r, m, o, &again, now, subject[*v1alpha1.Audience, v1alpha1.AudienceStatus]{
					kind:   "Audience",
					status: func(o *v1alpha1.Audience) *v1alpha1.AudienceStatus { return &o.Status },
					compute: func(o *v1alpha1.Audience, numbersDue bool) v1alpha1.AudienceStatus {
						return health.Audience(*o, verdict, tenant, pods, now, numbersDue)
					},
					transitions: health.AudienceTransitions,
				})
			})
		}
	}
	for i := range deletions.Items {
		o := &deletions.Items[i]
		verdict, ok := judged.Deletions[o.Name]
		if m := memoOf(memos, o); ok && judged.deletions[o.Name] == versionOf(o) {
			group.Go(func() error {
				if gone, err := r.expire(ctx, o, now, &again); gone || err != nil {
					return err
				}
				return update(ctx, r, m, o, &again, now, subject[*v1alpha1.DeletionRequest, v1alpha1.DeletionRequestStatus]{
					kind:   "DeletionRequest",
					status: func(o *v1alpha1.DeletionRequest) *v1alpha1.DeletionRequestStatus { return &o.Status },
					compute: func(o *v1alpha1.DeletionRequest, numbersDue bool) v1alpha1.DeletionRequestStatus {
						return health.DeletionRequest(*o, verdict, tenant, pods, now, numbersDue)
					},
					transitions: health.DeletionRequestTransitions,
				})
			})
		}
	}
	err := group.Wait()
	for uid, m := range memos {
		if !m.seen {
			delete(memos, uid)
		}
		m.seen = false
	}
	return reconcile.Result{RequeueAfter: again.d}, err
}

// expire deletes a request whose time after its end is over, or says when to look again.
func (r *statusReconciler) expire(ctx context.Context, o *v1alpha1.DeletionRequest, now time.Time, again *shortest) (gone bool, err error) {
	at, ok := health.DeletionRequestExpires(*o)
	if !ok {
		return false, nil
	}
	if wait := at.Sub(now); wait > 0 {
		again.in(wait)
		return false, nil
	}
	// Of this version only: it may have been changed to suppress meanwhile.
	uid, version := o.GetUID(), o.GetResourceVersion()
	err = r.Delete(ctx, o, client.Preconditions{UID: &uid, ResourceVersion: &version})
	if apierrors.IsConflict(err) {
		again.in(conflictWait)
		return false, nil
	}
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("delete DeletionRequest %s/%s, which has expired: %w", o.Namespace, o.Name, err)
	}
	return true, nil
}

// memosOf returns a tenant's memos. Only its own reconciliation uses them, and
// of one tenant there is one at a time.
func (r *statusReconciler) memosOf(tenant string) map[types.UID]*memo {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.memos[tenant] == nil {
		r.memos[tenant] = map[types.UID]*memo{}
	}
	return r.memos[tenant]
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

// subject is how to treat one kind of object.
type subject[O client.Object, S any] struct {
	kind        string
	status      func(O) *S
	compute     func(o O, numbersDue bool) S
	transitions func(before, after S) []health.Event
}

// update writes one object's status if it differs, and says when to look again.
func update[O client.Object, S any](ctx context.Context, r *statusReconciler, m *memo, o O, again *shortest, now time.Time, s subject[O, S]) error {
	if after, ok := m.after.(O); ok && slices.Contains(m.stale, o.GetResourceVersion()) {
		o = after.DeepCopyObject().(O)
	} else {
		m.stale, m.after = nil, nil
	}
	before := *s.status(o)
	wait := numbersInterval - now.Sub(m.numbers)
	due := wait <= 0
	next := s.compute(o, due)
	if equality.Semantic.DeepEqual(before, next) {
		if !due && !equality.Semantic.DeepEqual(next, s.compute(o, true)) {
			again.in(min(wait, lookInterval))
		}
		return nil
	}
	version := o.GetResourceVersion()
	*s.status(o) = next
	switch err := r.Status().Update(ctx, o); {
	case apierrors.IsConflict(err):
		again.in(conflictWait)
		return nil
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("write the status of %s %s/%s: %w", s.kind, o.GetNamespace(), o.GetName(), err)
	}
	statusWrites.WithLabelValues(s.kind).Inc()
	m.stale, m.after = append(m.stale, version), o
	if due {
		m.numbers = now
	} else {
		again.in(min(wait, lookInterval))
	}
	for _, e := range s.transitions(before, next) {
		r.events.Eventf(o, nil, e.Type, e.Reason, e.Action, "%s", e.Message)
	}
	return nil
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
