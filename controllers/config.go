package controllers

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/controllers/kinds"
)

const (
	// fieldOwner is the field manager of the operator's applies.
	fieldOwner = client.FieldOwner("posthorn-operator")
	// settleTime delays the compilation of a changed namespace, so that an apply of
	// many objects causes a few compilations instead of one for each object.
	settleTime = 50 * time.Millisecond
)

// markerRequest is the queue key of the marker Secret.
var markerRequest = reconcile.Request{}

// configReconciler maintains the live config of each namespace that has objects: one Secret, or a root and its parts if it
// does not fit into one. The Secret of a namespace whose objects were deleted has only tombstones; it is deleted when every
// dispatcher pod has removed the namespace's data.
//
// Its permissions to create, patch and delete Secrets are limited to the release's namespace. It lists and watches only the
// metadata of Secrets and ConfigMaps, which RBAC cannot express; it reads the contents only of those that an object refers to.
type configReconciler struct {
	kinds         kinds.Table
	limit         compile.Limit
	inputs        *configInputs
	live          *liveSecrets
	heads         *heads
	primer        *primer
	marker        *marker
	keys          *writeKeys
	verdicts      *verdictCache
	announcer     *discardAnnouncer
	own, statuses *trigger
}

func setupConfig(mgr manager.Manager, o Options, verdicts *verdictCache, statuses *trigger, reports func() ([]health.Pod, bool),
	served *servedKinds) error {
	cached, direct, owner := mgr.GetClient(), mgr.GetAPIReader(), o.secretOwner(mgr)
	r := &configReconciler{
		kinds: o.kinds, limit: o.limit, keys: newWriteKeys(), verdicts: verdicts, own: &trigger{}, statuses: statuses,
		inputs: &configInputs{client: cached, direct: direct, kinds: o.kinds, policy: o.Policy, secrets: newSecretReader(cached, direct),
			memos: map[string]*compile.Memo{}},
		live: &liveSecrets{
			client: cached, direct: direct, release: o.Namespace, owner: owner, parts: newPartSecrets(cached, direct, o.Namespace, owner),
			budget: newConfigBudget(o.configRate, o.configBurst), written: map[string]liveSecret{},
		},
		heads:     &heads{reports, served, o.Now, o.tombstoneGrace},
		marker:    &marker{client: cached, release: o.Namespace, owner: owner, pending: map[string]bool{}, failed: map[string]bool{}},
		announcer: &discardAnnouncer{reader: cached, events: mgr.GetEventRecorder(eventSource), announced: map[discardKey]bool{}},
	}
	r.primer = &primer{inputs: r.inputs, live: r.live, heads: r.heads, keys: r.keys, marker: r.marker, own: r.own}
	if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		r.followReports(ctx, o.followInterval)
		return nil
	})); err != nil {
		return err
	}
	served.changed = func() { r.own.fire(r.live.namespaces()...) }
	r.own.fire(markerRequest.Name)
	controller := builder.ControllerManagedBy(mgr).Named("config")
	for _, k := range o.kinds {
		controller.Watches(k.New(), enqueue(namespaceOf), builder.WithPredicates(inputChanged(k)))
	}
	return controller.
		WatchesMetadata(&corev1.Secret{}, enqueue(r.namespacesOfSecret), builder.WithPredicates(r.live.notOwnWrite())).
		WatchesMetadata(&corev1.ConfigMap{}, enqueue(r.namespacesOfConfigMap)).
		WatchesRawSource(r.own).
		WithOptions(controllerOptions(mgr, "config")).
		Complete(r)
}

// enqueue returns a handler that enqueues the results of find after the settle time.
func enqueue(find func(context.Context, client.Object) []reconcile.Request) handler.EventHandler {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	add := func(ctx context.Context, o client.Object, q queue) {
		for _, request := range find(ctx, o) {
			q.AddAfter(request, settleTime)
		}
	}
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) { add(ctx, e.Object, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) { add(ctx, e.ObjectNew, q) },
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { add(ctx, e.Object, q) },
	}
}

func namespaceOf(_ context.Context, o client.Object) []reconcile.Request {
	return []reconcile.Request{namespaceRequest(o.GetNamespace())}
}

// namespacesOfSecret returns the namespace to compile when a Secret changes: the namespace of
// the objects that refer to the Secret, or of the live config in the Secret.
func (r *configReconciler) namespacesOfSecret(_ context.Context, secret client.Object) []reconcile.Request {
	if secret.GetNamespace() == r.live.release {
		if secret.GetName() == liveconfig.MarkerName {
			return []reconcile.Request{markerRequest}
		}
		if namespace, ok := liveNamespaceOf(secret.GetName()); ok {
			return []reconcile.Request{namespaceRequest(namespace)}
		}
	}
	if r.inputs.secrets.referenced(secret.GetNamespace(), secret.GetName()) {
		return []reconcile.Request{namespaceRequest(secret.GetNamespace())}
	}
	return nil
}

// namespacesOfConfigMap returns the namespace to compile when a ConfigMap changes.
func (r *configReconciler) namespacesOfConfigMap(_ context.Context, o client.Object) []reconcile.Request {
	if r.inputs.secrets.referenced(o.GetNamespace(), compile.ConfigMapName(o.GetName())) {
		return []reconcile.Request{namespaceRequest(o.GetNamespace())}
	}
	return nil
}

// liveNamespaceOf returns the namespace of the name of a live config's root or part.
func liveNamespaceOf(name string) (namespace string, ok bool) {
	if namespace, ok = liveconfig.NamespaceOf(name); !ok {
		namespace, ok = liveconfig.PartNamespaceOf(name)
	}
	return namespace, ok
}

// inputChanged accepts the updates that may change a config or a verdict: a new spec, new
// labels, a change of the status that the compiler reads, and another object with the same
// name, whose generation may be equal.
func inputChanged(k kinds.Kind) predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return k.Input != nil && k.Input(e.ObjectOld) != k.Input(e.ObjectNew) ||
			e.ObjectOld.GetUID() != e.ObjectNew.GetUID() || e.ObjectOld.GetGeneration() != e.ObjectNew.GetGeneration() ||
			!maps.Equal(e.ObjectOld.GetLabels(), e.ObjectNew.GetLabels())
	}}
}

// +kubebuilder:rbac:groups=posthorn.dev,resources=sources;webhookdestinations;audiences;deletionrequests;redeliveries,verbs=list;watch
// +kubebuilder:rbac:groups="",resources=secrets;configmaps,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=secrets,namespace=posthorn-system,verbs=create;patch;delete
// +kubebuilder:rbac:groups=coordination.k8s.io,resources=leases,namespace=posthorn-system,verbs=get;create;update
// +kubebuilder:rbac:groups="",resources=events,namespace=posthorn-system,verbs=create;patch

// Reconcile compiles one namespace, or creates the marker Secret.
func (r *configReconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if r.primer.awaitsReports() {
		return reconcile.Result{RequeueAfter: 50 * time.Millisecond}, nil
	}
	if err := r.primer.prime(ctx); err != nil {
		return reconcile.Result{}, err
	}
	if request != markerRequest {
		if wait := r.live.budget.wait(request.Name); wait > 0 {
			compiles.WithLabelValues("delayed").Inc()
			return reconcile.Result{RequeueAfter: wait}, nil
		}
		result, err := r.compile(ctx, request.Name)
		if err != nil {
			result = "error"
		}
		compiles.WithLabelValues(result).Inc()
		if err != nil {
			_, compiled := r.verdicts.get(request.Name)
			marking := r.marker.mark(ctx, request.Name, !compiled)
			if marking != nil && ctx.Err() != nil {
				r.own.fire(markerRequest.Name) // The time of this request has ended; that one has its own.
			}
			return reconcile.Result{}, errors.Join(err, marking)
		}
	}
	return reconcile.Result{}, r.marker.mark(ctx, request.Name, false)
}

// compile updates the live-config Secret and the verdicts of a namespace.
func (r *configReconciler) compile(ctx context.Context, namespace string) (result string, err error) {
	objects, snapshot, err := r.inputs.gather(ctx, namespace)
	if err != nil {
		return "", err
	}
	last, err := r.live.last(ctx, namespace)
	if err != nil {
		return "", err
	}
	if len(snapshot.Objects) == 0 {
		return r.remove(ctx, namespace, last)
	}
	r.own.fire(r.keys.set(namespace, holders(snapshot))...)
	var again []string
	snapshot.ForeignWriteKeys, snapshot.Memo = r.keys.foreign(namespace), r.inputs.memoOf(namespace)
	snapshot.ExpressionsOver, again = r.inputs.setExpressions(namespace, snapshot.Objects)
	r.own.fire(again...)
	compilers := r.kinds.Compilers()
	config, verdicts := compilers.Compile(snapshot)
	r.logReserved(ctx, snapshot.ForeignWriteKeys)
	present, err := r.heads.present(ctx, namespace, config, compilers.Existing(snapshot.Objects), last)
	if err != nil {
		return "", err
	}
	var encoded compile.Encoded
	encoded, last.history, err = compilers.EncodeWithHead(snapshot.Memo, config, verdicts, r.limit, last.history,
		r.heads.bytes(namespace, present),
		func() (liveconfig.Config, bool, error) {
			found, config, err := r.live.read(ctx, namespace)
			return config, found.resourceVersion != "", err
		})
	if err != nil {
		return "", err
	}
	if encoded.Chunks != nil {
		if result, err = r.write(ctx, namespace, encoded, present, last); err != nil {
			return "", err
		}
	}
	if encoded.TooLarge {
		result = "too_large"
		log.FromContext(ctx).Info("live config too large for its Secrets; objects that are not in effect have the reason ConfigTooLarge")
	}
	r.verdicts.set(namespace, objects.verdicts(r.kinds, encoded.Verdicts))
	r.statuses.fireChange(namespace)
	return result, nil
}

// logReserved logs for which namespaces the foreign keys of a namespace are reserved. Conditions do
// not name them, because names of other namespaces are confidential.
func (r *configReconciler) logReserved(ctx context.Context, foreign map[string]compile.KeyUse) {
	for hash, use := range foreign {
		if use == compile.KeyReserved {
			log.FromContext(ctx).Info("write key reserved for another namespace", "sha256", hash, "reservedFor", r.keys.ownerOf(hash))
		}
	}
}

// remove replaces the live config of a namespace without objects by tombstones and reserved write
// keys, and deletes it when they are no longer needed.
func (r *configReconciler) remove(ctx context.Context, namespace string, last liveSecret) (string, error) {
	if d := r.heads.dispatchers(namespace); last.resourceVersion == "" && !last.history.Known && !d.Parks() && !d.Reserves(r.heads.now()) {
		r.forget(namespace)
		return "unchanged", r.live.removeParts(ctx, namespace)
	}
	// The dispatchers discard the messages of a removed namespace. The cache may lag, so
	// only the API server can confirm that the namespace has no objects.
	served, err := r.heads.served.current(ctx)
	if err != nil {
		return "", err
	}
	if err := r.inputs.confirmNone(ctx, namespace, served); err != nil {
		return "", err
	}
	config, verdicts := r.kinds.Compilers().Compile(compile.Snapshot{Namespace: namespace})
	present, err := r.heads.present(ctx, namespace, config, nil, last)
	if err != nil {
		return "", err
	}
	none := func() (liveconfig.Config, bool, error) { return liveconfig.Config{}, false, nil }
	encoded, history, err := r.kinds.Compilers().EncodeWithHead(r.inputs.memoOf(namespace), config, verdicts, r.limit, last.history,
		r.heads.bytes(namespace, present), none)
	if err != nil {
		return "", err
	}
	if encoded.TooLarge {
		return "", fmt.Errorf("the tombstones of namespace %s do not fit into a Secret", namespace)
	}
	reserved := len(last.history.Head.Reserved) > 0
	last.history = history
	head, _ := r.heads.next(namespace, encoded.Revision, present, last)
	// The last reservations are removed by a config, too: a deletion would not end them in the
	// dispatchers, which report them to the operator when a live config is lost.
	if needed := len(head.Tombstones)+len(head.Reserved) > 0; needed || reserved {
		result, err := r.write(ctx, namespace, encoded, present, last)
		if err == nil {
			r.forgetObjects(namespace)
		}
		return result, err
	}
	if last.resourceVersion == "" {
		r.forget(namespace)
		return "unchanged", r.live.removeParts(ctx, namespace)
	}
	// A pod that has not applied the last config still knows the reservations before it, and would
	// report them after the deletion.
	if !last.history.Confirmed(r.heads.dispatchers(namespace)) {
		return "unchanged", nil
	}
	if err := r.live.remove(ctx, namespace, last); err != nil {
		return "", err
	}
	r.forget(namespace)
	return "removed", r.live.removeParts(ctx, namespace)
}

// write writes a namespace's live config if it differs, and records it.
func (r *configReconciler) write(ctx context.Context, namespace string, encoded compile.Encoded, present compile.Present,
	last liveSecret) (string, error) {
	u := liveUpdate{namespace: namespace, encoded: encoded, last: last}
	u.head, u.changed = r.heads.next(namespace, encoded.Revision, present, last)
	d := r.heads.dispatchers(namespace)
	u.next = liveSecret{revision: encoded.Revision, history: compile.HistoryOf(liveconfig.Revisioned{Config: encoded.Config,
		Revision: encoded.Revision, Head: u.head})}
	u.next.history.Verified = u.changed || last.history.Unbroken(d)
	result, err := r.live.write(ctx, &u)
	if err != nil {
		return "", err
	}
	r.setLiveKeys(namespace, u.next.history)
	r.live.record(namespace, u.next)
	if u.next.release != "" { // It was set after this compilation read the Secret.
		r.own.fire(namespace)
	}
	return result, r.live.parts.prune(ctx, namespace, u.existing, encoded.Parts.List, u.next.history.Confirmed(d))
}

// setLiveKeys records the write keys of a live config, and compiles the namespaces that may use the
// keys that it no longer has.
func (r *configReconciler) setLiveKeys(namespace string, history compile.History) {
	r.own.fire(r.keys.setLive(namespace, history.WriteKeys(compile.Dispatchers{}, r.heads.now()))...)
}

// forget removes the data about a namespace without a live config.
func (r *configReconciler) forget(namespace string) {
	r.forgetObjects(namespace)
	r.setLiveKeys(namespace, compile.History{})
	r.live.forget(namespace)
}

// forgetObjects removes the data about a namespace without objects.
func (r *configReconciler) forgetObjects(namespace string) {
	r.verdicts.remove(namespace)
	r.own.fire(r.inputs.forget(namespace)...)
	r.own.fire(r.keys.set(namespace, nil)...)
	r.statuses.fireChange(namespace) // The status controller removes its data, too.
}

// followReports compiles the namespaces whose live config depends on the pods' reports, until ctx is
// done: they have tombstones or parked objects, a pod has applied a newer config than the last, or the
// last one can be compared with all pods now. It also announces the discards ahead, and compiles the namespaces that may
// use write keys whose reservation has ended.
func (r *configReconciler) followReports(ctx context.Context, interval time.Duration) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		pods, complete := r.heads.reports()
		r.announcer.announce(ctx, pods)
		now := r.heads.now()
		// This does not wait for a write of the live config that has the reservation: that write can fail.
		for namespace, hashes := range r.live.expired(now) {
			r.own.fire(r.keys.expire(namespace, hashes)...)
		}
		r.own.fire(r.live.unsettled(pods, complete, now)...)
	}
}
