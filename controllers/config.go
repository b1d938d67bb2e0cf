package controllers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
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

// configReconciler maintains the live config of each namespace that has objects: one Secret, or a
// root and its parts if it does not fit into one. The Secret of a namespace whose objects were deleted has only tombstones; it is deleted
// when every dispatcher pod has removed the namespace's data.
//
// Its permissions to create, patch and delete Secrets are limited to the release's
// namespace. It lists and watches only the metadata of Secrets, which RBAC cannot
// express; it reads the contents only of Secrets that an object refers to.
type configReconciler struct {
	client.Client               // reads from the cache; of Secrets, only metadata
	direct        client.Reader // reads from the API server
	kinds         kinds.Table
	release       string
	owner         secretOwner
	policy        compile.Policy
	limit         compile.Limit
	parts         *partSecrets
	secrets       *secretReader
	keys          *writeKeys
	served        *servedKinds
	verdicts      *verdictCache
	own, statuses *trigger
	// reports returns the newest reports of the dispatcher pods; complete is false until every pod
	// had a request.
	reports        func() (pods []health.Pod, complete bool)
	events         events.EventRecorder
	now            func() time.Time
	tombstoneGrace time.Duration

	mu sync.Mutex
	// started is the time of the first reconciliation.
	started time.Time
	// primed is true when the write keys of every namespace are loaded.
	primed bool
	// pending are the namespaces that have not been compiled since the start.
	pending map[string]bool
	// failed are the namespaces that could not be compiled since the start.
	failed map[string]bool
	// marked is the content of the marker Secret that this process has written; nil before.
	marked *string
	// written are the live-config Secrets that this process has written or verified.
	written map[string]liveSecret
	// memos are the results of the last compilations. Only the reconciliation of a namespace uses
	// its memo, and there is one at a time.
	memos map[string]*compile.Memo
	// expressions has the expressions of all namespaces from the start.
	expressions compile.Expressions

	budget *configBudget
}

// liveSecret identifies the content of a live-config Secret.
type liveSecret struct {
	revision, resourceVersion string
	history                   compile.History
	// release is the value of the annotation that ends reservations of write keys; empty if it is
	// processed.
	release string
}

// released reports whether an administrator has ended the reservation of a write key.
func (s liveSecret) released(hash string) bool {
	list := strings.FieldsFunc(s.release, func(r rune) bool { return r == ',' || unicode.IsSpace(r) })
	return slices.Contains(list, hash) || slices.Contains(list, liveconfig.ReleaseAll)
}

func setupConfig(mgr manager.Manager, o Options, verdicts *verdictCache, statuses *trigger, reports func() ([]health.Pod, bool), served *servedKinds) error {
	r := &configReconciler{
		served: served,
		Client: mgr.GetClient(), direct: mgr.GetAPIReader(), kinds: o.kinds, release: o.Namespace, owner: o.secretOwner(mgr), policy: o.Policy, limit: o.limit,
		parts:   newPartSecrets(mgr.GetClient(), mgr.GetAPIReader(), o.Namespace, o.secretOwner(mgr)),
		secrets: newSecretReader(mgr.GetClient(), mgr.GetAPIReader()),
		keys:    newWriteKeys(), verdicts: verdicts, own: &trigger{}, statuses: statuses,
		written: map[string]liveSecret{}, memos: map[string]*compile.Memo{}, budget: newConfigBudget(o.configRate, o.configBurst), failed: map[string]bool{}, reports: reports, events: mgr.GetEventRecorder(eventSource), now: o.Now, tombstoneGrace: o.tombstoneGrace,
	}
	if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error { r.followReports(ctx, o.followInterval); return nil })); err != nil {
		return err
	}
	served.changed = r.recompile
	r.own.fire(markerRequest.Name)
	controller := builder.ControllerManagedBy(mgr).Named("config")
	for _, k := range o.kinds {
		controller.Watches(k.New(), enqueue(namespaceOf), builder.WithPredicates(inputChanged(k)))
	}
	return controller.
		WatchesMetadata(&corev1.Secret{}, enqueue(r.namespacesOfSecret), builder.WithPredicates(r.notOwnWrite())).
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
	if secret.GetNamespace() == r.release {
		if secret.GetName() == liveconfig.MarkerName {
			return []reconcile.Request{markerRequest}
		}
		if namespace, ok := liveNamespaceOf(secret.GetName()); ok {
			return []reconcile.Request{namespaceRequest(namespace)}
		}
	}
	if r.secrets.referenced(secret.GetNamespace(), secret.GetName()) {
		return []reconcile.Request{namespaceRequest(secret.GetNamespace())}
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

// notOwnWrite accepts every change of a Secret, except for the reconciler's own writes
// of a live config. It accepts every deletion, because the resource version of a
// deleted Secret may be the one of the last write.
func (r *configReconciler) notOwnWrite() predicate.Predicate {
	foreign := func(o client.Object) bool {
		if o.GetNamespace() != r.release || r.parts.verified(o.GetName(), o.GetResourceVersion()) {
			return o.GetNamespace() != r.release
		}
		namespace, ok := liveconfig.NamespaceOf(o.GetName())
		return !ok || !r.wrote(namespace, o.GetResourceVersion())
	}
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return foreign(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return e.ObjectOld.GetResourceVersion() != e.ObjectNew.GetResourceVersion() && foreign(e.ObjectNew)
		},
	}
}

// wrote reports whether the reconciler's last write of a live-config Secret had this version.
func (r *configReconciler) wrote(namespace, resourceVersion string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.written[namespace].resourceVersion == resourceVersion
}

// +kubebuilder:rbac:groups=posthorn.dev,resources=sources;webhookdestinations;audiences;deletionrequests;redeliveries,verbs=list;watch
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=secrets,namespace=posthorn-system,verbs=create;patch;delete
// +kubebuilder:rbac:groups=coordination.k8s.io,resources=leases,namespace=posthorn-system,verbs=get;create;update
// +kubebuilder:rbac:groups="",resources=events,namespace=posthorn-system,verbs=create;patch

// Reconcile compiles one namespace, or creates the marker Secret.
func (r *configReconciler) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	if r.awaitsReports() {
		return reconcile.Result{RequeueAfter: 50 * time.Millisecond}, nil
	}
	if err := r.prime(ctx); err != nil {
		return reconcile.Result{}, err
	}
	if request != markerRequest {
		if wait := r.budget.wait(request.Name); wait > 0 {
			compiles.WithLabelValues("delayed").Inc()
			return reconcile.Result{RequeueAfter: wait}, nil
		}
		result, err := r.compile(ctx, request.Name)
		if err != nil {
			result = "error"
		}
		compiles.WithLabelValues(result).Inc()
		if err != nil {
			marking := r.mark(ctx, request.Name, true)
			if marking != nil && ctx.Err() != nil {
				r.own.fire(markerRequest.Name) // The time of this request has ended; that one has its own.
			}
			return reconcile.Result{}, errors.Join(err, marking)
		}
	}
	return reconcile.Result{}, r.mark(ctx, request.Name, false)
}

// compile updates the live-config Secret and the verdicts of a namespace.
func (r *configReconciler) compile(ctx context.Context, namespace string) (result string, err error) {
	objects, snapshot, err := r.gather(ctx, namespace)
	if err != nil {
		return "", err
	}
	last, err := r.history(ctx, namespace)
	if err != nil {
		return "", err
	}
	if len(snapshot.Objects) == 0 {
		return r.remove(ctx, namespace, last)
	}
	for _, other := range r.keys.set(namespace, holders(snapshot)) {
		r.own.fire(other)
	}
	snapshot.ForeignWriteKeys, snapshot.Memo = r.keys.foreign(namespace), r.memoOf(namespace)
	snapshot.ExpressionsOver = r.setExpressions(namespace, snapshot.Objects)
	compilers := r.kinds.Compilers()
	config, verdicts := compilers.Compile(snapshot)
	r.logReserved(ctx, snapshot.ForeignWriteKeys)
	present, err := r.present(ctx, namespace, config, compilers.Existing(snapshot.Objects), last)
	if err != nil {
		return "", err
	}
	var encoded compile.Encoded
	encoded, last.history, err = compilers.EncodeWithHead(snapshot.Memo, config, verdicts, r.limit, last.history, r.headBytes(namespace, present),
		func() (liveconfig.Config, bool, error) { return r.last(ctx, namespace) })
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

// present returns the part of the next head that depends on the namespace's objects. If one of the last config
// does not exist, it reads the definitions of the kinds, because the reason can be that they are deleted.
func (r *configReconciler) present(ctx context.Context, namespace string, config liveconfig.Config, uids map[liveconfig.Ref]string, last liveSecret) (compile.Present, error) {
	served := r.served.current
	if last.history.Misses(uids) {
		served = r.served.read
	}
	kinds, err := served(ctx)
	return compile.Present{UIDs: uids, Kinds: kinds, Reserved: last.history.Reserve(config, r.dispatchers(namespace), last.released, r.now())}, err
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

// headBytes returns a function that returns the size of a namespace's next head.
func (r *configReconciler) headBytes(namespace string, present compile.Present) func(compile.History, bool) (int, error) {
	d, now := r.dispatchers(namespace), r.now()
	return func(h compile.History, exact bool) (int, error) {
		return h.HeadBytes(exact, present, d, now, r.tombstoneGrace)
	}
}

// setExpressions records the filter expressions of a namespace, and compiles the namespaces whose expressions may fit
// now. It returns those above a budget.
func (r *configReconciler) setExpressions(namespace string, objects []compile.Object) map[string]string {
	r.mu.Lock()
	again, over := r.expressions.Set(map[string][]compile.Object{namespace: objects}), r.expressions.Over(namespace)
	r.mu.Unlock()
	for _, other := range again {
		r.own.fire(other)
	}
	return over
}

// memoOf returns the memo of a namespace.
func (r *configReconciler) memoOf(namespace string) *compile.Memo {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.memos[namespace] == nil {
		r.memos[namespace] = &compile.Memo{}
	}
	return r.memos[namespace]
}

// gather reads a namespace's objects and the Secrets that they refer to.
func (r *configReconciler) gather(ctx context.Context, namespace string) (objects, compile.Snapshot, error) {
	// The compiler does not change its input, so the objects of the cache need no copies.
	all, err := listNamespace(ctx, r, r.kinds, namespace, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, compile.Snapshot{}, err
	}
	s := all.snapshot(namespace)
	s.Policy = r.policy
	s.Secrets, err = r.secrets.read(ctx, namespace, r.kinds.Compilers().SecretRefs(s.Objects...))
	return all, s, err
}

// remove replaces the live config of a namespace without objects by tombstones and reserved write
// keys, and deletes it when they are no longer needed.
func (r *configReconciler) remove(ctx context.Context, namespace string, last liveSecret) (string, error) {
	if d := r.dispatchers(namespace); last.resourceVersion == "" && !last.history.Known && !d.Parks() && !d.Reserves(r.now()) {
		r.forget(namespace)
		return "unchanged", r.pruneParts(ctx, namespace, nil, true)
	}
	// The dispatchers discard the messages of a removed namespace. The cache may lag, so
	// only the API server can confirm that the namespace has no objects.
	served, err := r.served.current(ctx)
	if err != nil {
		return "", err
	}
	for _, k := range r.kinds {
		list := k.NewList()
		if err := r.direct.List(ctx, list, client.InNamespace(namespace), client.Limit(1)); apierrors.IsNotFound(err) && served[k.Compile.Section] == "" {
			continue
		} else if err != nil {
			return "", fmt.Errorf("confirm that namespace %s has no objects: %w", namespace, err)
		}
		if meta.LenList(list) > 0 {
			return "", fmt.Errorf("the cache of namespace %s lags behind the API server", namespace)
		}
	}
	config, verdicts := r.kinds.Compilers().Compile(compile.Snapshot{Namespace: namespace})
	present, err := r.present(ctx, namespace, config, nil, last)
	if err != nil {
		return "", err
	}
	none := func() (liveconfig.Config, bool, error) { return liveconfig.Config{}, false, nil }
	encoded, history, err := r.kinds.Compilers().EncodeWithHead(r.memoOf(namespace), config, verdicts, r.limit, last.history, r.headBytes(namespace, present), none)
	if err != nil {
		return "", err
	}
	if encoded.TooLarge {
		return "", fmt.Errorf("the tombstones of namespace %s do not fit into a Secret", namespace)
	}
	reserved := len(last.history.Head.Reserved) > 0
	last.history = history
	head, _ := last.history.Next(encoded.Revision, present, r.dispatchers(namespace), r.now(), r.tombstoneGrace)
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
		return "unchanged", r.pruneParts(ctx, namespace, nil, true)
	}
	// A pod that has not applied the last config still knows the reservations before it, and would
	// report them after the deletion.
	if !last.history.Confirmed(r.dispatchers(namespace)) {
		return "unchanged", nil
	}
	secret := &corev1.Secret{}
	secret.Namespace, secret.Name = r.release, liveconfig.SecretName(namespace)
	if err := r.Delete(ctx, secret, client.Preconditions{ResourceVersion: &last.resourceVersion}); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("delete the live config of namespace %s: %w", namespace, err)
	}
	log.FromContext(ctx).Info("live config deleted; the namespace has no objects")
	r.forget(namespace)
	return "removed", r.pruneParts(ctx, namespace, nil, true)
}

// pruneParts removes the parts of a live config that its root does not list.
func (r *configReconciler) pruneParts(ctx context.Context, namespace string, listed []liveconfig.Part, confirmed bool) error {
	existing, err := r.parts.list(ctx, namespace)
	if err != nil {
		return err
	}
	return r.parts.prune(ctx, namespace, existing, listed, confirmed)
}

// forget removes the data about a namespace without a live config.
func (r *configReconciler) forget(namespace string) {
	r.forgetObjects(namespace)
	r.setLiveKeys(namespace, compile.History{})
	r.budget.forget(namespace)
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.written, namespace)
}

// forgetObjects removes the data about a namespace without objects.
func (r *configReconciler) forgetObjects(namespace string) {
	r.secrets.forget(namespace)
	r.verdicts.remove(namespace)
	r.setExpressions(namespace, nil)
	r.mu.Lock()
	delete(r.memos, namespace)
	r.mu.Unlock()
	for _, other := range r.keys.set(namespace, nil) {
		r.own.fire(other)
	}
	r.statuses.fireChange(namespace) // The status controller removes its data, too.
}

// awaitsReports reports whether the first reports of the pods are missing. With them the operator
// detects that the live configs are from a backup; a pod that does not answer delays the start by
// maxReportWait.
func (r *configReconciler) awaitsReports() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.primed {
		return false
	}
	if r.started.IsZero() {
		r.started = time.Now()
	}
	_, complete := r.reports()
	return !complete && time.Since(r.started) < maxReportWait
}

// maxReportWait bounds the wait for the first reports.
const maxReportWait = 5 * time.Second

// dispatchers returns what the pods report about the live config of a namespace.
func (r *configReconciler) dispatchers(namespace string) compile.Dispatchers {
	pods, complete := r.reports()
	return dispatchersOf(pods, complete, namespace)
}

// dispatchersOf is dispatchers with given reports.
func dispatchersOf(pods []health.Pod, complete bool, namespace string) compile.Dispatchers {
	reports := compile.Reports{Silent: !complete}
	for _, pod := range storesOf(pods, namespace) {
		if pod.Removed { // Its store has no config to compare until the pod exists again.
			continue
		}
		reports.Unknown = reports.Unknown || !hasConfigs(pod.Report) && !hasConfigs(pod.Configs)
		config := pod.Report.Config(namespace)
		switch {
		case !pod.Absent:
			reports.Silent = reports.Silent || pod.Silent || pod.Report == nil
			reports.Ready = append(reports.Ready, config)
		case hasConfigs(pod.Configs):
			reports.Unready = append(reports.Unready, pod.Configs.Config(namespace))
		case pod.Report != nil: // An old report. Only the number cannot be outdated.
			reports.Unready = append(reports.Unready, adminapi.ConfigReport{Namespace: namespace, Number: config.Number})
		}
	}
	return compile.DispatchersOf(reports)
}

// hasConfigs reports whether a report has the numbers of the live configs. A pod that starts does not
// report them.
func hasConfigs(report *podreport.Index) bool {
	return report != nil && (report.Ready || len(report.Configs) > 0)
}

// followReports compiles the namespaces whose live config depends on the pods' reports, until ctx is
// done: they have tombstones or parked objects, a pod has applied a newer config than the last, or the
// last one can be compared with all pods now. It also announces the discards ahead.
func (r *configReconciler) followReports(ctx context.Context, interval time.Duration) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	announcer := discardAnnouncer{reader: r, events: r.events, announced: map[discardKey]bool{}}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		pods, complete := r.reports()
		announcer.announce(ctx, pods)
		r.expireReservations()
		for _, namespace := range r.unsettled(pods, complete) {
			r.own.fire(namespace)
		}
	}
}

// recompile compiles all namespaces with a live config again.
func (r *configReconciler) recompile() {
	r.mu.Lock()
	namespaces := slices.Collect(maps.Keys(r.written))
	r.mu.Unlock()
	for _, namespace := range namespaces {
		r.own.fire(namespace)
	}
}

// expireReservations compiles the namespaces that may use write keys whose reservation has ended. It
// does not wait for a write of the live config that has the reservation: that write can fail.
func (r *configReconciler) expireReservations() {
	now := r.now()
	ended := map[string][]string{}
	r.mu.Lock()
	for namespace, secret := range r.written {
		if hashes := secret.history.Expired(now); len(hashes) > 0 {
			ended[namespace] = hashes
		}
	}
	r.mu.Unlock()
	for namespace, hashes := range ended {
		for _, other := range r.keys.expire(namespace, hashes) {
			r.own.fire(other)
		}
	}
}

// unsettled returns the namespaces whose live config may change because of the pods' reports. Of a
// namespace without a Secret it needs parked objects or reserved write keys: the pods report the number of a removed
// namespace for a long time.
func (r *configReconciler) unsettled(pods []health.Pod, complete bool) (list []string) {
	r.mu.Lock()
	histories := make(map[string]compile.History, len(r.written))
	for namespace, secret := range r.written {
		histories[namespace] = secret.history
	}
	r.mu.Unlock()
	for namespace, history := range histories {
		d := dispatchersOf(pods, complete, namespace)
		if !history.Settled(d, r.now()) || history.Confirmed(d) && r.parts.supersededIn(namespace) {
			list = append(list, namespace)
		}
	}
	for _, pod := range pods {
		report := pod.Report
		if pod.Absent {
			report = pod.Configs
		}
		if report == nil {
			continue
		}
		for _, n := range report.Configs {
			reserves := func() bool {
				return compile.DispatchersOf(compile.Reports{Unready: []adminapi.ConfigReport{n}}).Reserves(r.now())
			}
			if _, known := histories[n.Namespace]; !known && (len(n.Parked) > 0 || reserves()) && !slices.Contains(list, n.Namespace) {
				list = append(list, n.Namespace)
			}
		}
	}
	return list
}

// history returns the namespace's last live config. Its resource version is empty if there is no
// Secret. The newer one of the Secret's config and the last one of this process counts: another
// client may have replaced the Secret by one from a backup, or deleted it.
func (r *configReconciler) history(ctx context.Context, namespace string) (liveSecret, error) {
	key := types.NamespacedName{Namespace: r.release, Name: liveconfig.SecretName(namespace)}
	m := secretMetadata()
	if err := r.Get(ctx, key, m); client.IgnoreNotFound(err) != nil {
		return liveSecret{}, fmt.Errorf("look up Secret %s: %w", key, err)
	}
	r.mu.Lock()
	last := r.written[namespace]
	r.mu.Unlock()
	if last.resourceVersion != "" && last.resourceVersion == m.ResourceVersion {
		return last, nil
	}
	var current corev1.Secret
	err := r.direct.Get(ctx, key, &current)
	switch {
	case apierrors.IsNotFound(err):
		return liveSecret{history: last.history}, nil
	case err != nil:
		return liveSecret{}, fmt.Errorf("read Secret %s: %w", key, err)
	}
	found, _, err := r.readLive(ctx, &current, namespace)
	if err != nil {
		return liveSecret{}, err
	}
	if last.history.Known && (!found.history.Known || found.history.Head.Number < last.history.Head.Number) {
		found.history = last.history
	} else {
		found.history.Verified = last.history.Verified && found.history.Head.Number == last.history.Head.Number
	}
	return found, nil
}

// readLive returns the live config in a root Secret. Its history is unknown if it does not decode, or
// belongs to another namespace.
func (r *configReconciler) readLive(ctx context.Context, secret *corev1.Secret, namespace string) (liveSecret, liveconfig.Config, error) {
	found := liveSecret{resourceVersion: secret.ResourceVersion, release: secret.Annotations[liveconfig.AnnotationRelease]}
	stored, err := r.parts.assemble(ctx, namespace, secret)
	if err != nil {
		return found, liveconfig.Config{}, err
	}
	live, err := stored.Decode()
	if err != nil || live.Namespace != namespace {
		return found, liveconfig.Config{}, nil
	}
	found.history = compile.HistoryOf(live)
	return found, live.Config, nil
}

// write applies the Secrets of a namespace's live config if their content differs: the parts, and then
// the root that lists them.
func (r *configReconciler) write(ctx context.Context, namespace string, encoded compile.Encoded, present compile.Present, last liveSecret) (string, error) {
	d := r.dispatchers(namespace)
	head, changed := last.history.Next(encoded.Revision, present, d, r.now(), r.tombstoneGrace)
	text, err := liveconfig.EncodeHead(head)
	if err != nil {
		return "", err
	}
	data, parts := liveconfig.RootData(encoded.Chunks, encoded.Parts, text), encoded.Parts.List
	existing, err := r.parts.list(ctx, namespace)
	if err != nil {
		return "", err
	}
	missing := r.parts.missing(existing, parts)
	key := types.NamespacedName{Namespace: r.release, Name: liveconfig.SecretName(namespace)}
	next := liveSecret{
		revision: encoded.Revision, resourceVersion: last.resourceVersion,
		history: compile.HistoryOf(liveconfig.Revisioned{Config: encoded.Config, Revision: encoded.Revision, Head: head}),
	}
	next.history.Verified = changed || last.history.Unbroken(d)
	if !changed && last.resourceVersion != "" && last.revision == encoded.Revision && last.release == "" && len(missing) == 0 {
		r.record(namespace, next)
		return "unchanged", r.parts.prune(ctx, namespace, existing, parts, next.history.Confirmed(d))
	}
	// Another client has written the Secret, or the cache lags. Compare the content.
	var current corev1.Secret
	if err := r.direct.Get(ctx, key, &current); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("read Secret %s: %w", key, err)
	}
	result := "unchanged"
	written, err := r.parts.write(ctx, namespace, missing)
	if err != nil {
		return "", err
	}
	if written > 0 {
		result = "written"
		log.FromContext(ctx).Info("parts of the live config written", "count", written, "of", len(parts))
	}
	next.resourceVersion, next.release = current.ResourceVersion, current.Annotations[liveconfig.AnnotationRelease]
	root := changed || last.release != "" || !isLive(&current, namespace, data, encoded.Revision) || !r.owner.owns(&current)
	if root || written > 0 {
		r.budget.take(namespace)
	}
	if root {
		owners, err := r.owner.references(ctx)
		if err != nil {
			return "", err
		}
		result = "written"
		annotations := map[string]string{liveconfig.AnnotationRevision: encoded.Revision}
		if last.release != "" {
			// The write that ends the reservations also empties the annotation, so that it does
			// not end later ones.
			annotations[liveconfig.AnnotationRelease] = ""
			log.FromContext(ctx).Info("reservations of write keys released by annotation", "annotation", liveconfig.AnnotationRelease, "value", last.release, "remaining", len(head.Reserved))
		}
		wanted := corev1ac.Secret(key.Name, key.Namespace).
			WithLabels(map[string]string{
				liveconfig.LabelLive: "true", liveconfig.LabelNamespace: namespace,
				labelName: "posthorn", labelManagedBy: managedBy,
			}).
			WithAnnotations(annotations).
			WithOwnerReferences(owners...).
			WithData(data)
		if err := r.Apply(ctx, wanted, fieldOwner, client.ForceOwnership); err != nil {
			return "", fmt.Errorf("apply the live config of namespace %s: %w", namespace, err)
		}
		next.resourceVersion, next.release = *wanted.ResourceVersion, wanted.Annotations[liveconfig.AnnotationRelease]
		log.FromContext(ctx).Info("live config written", "revision", encoded.Revision, "number", head.Number, "bytes", encoded.Chunks.Len(), "parts", len(parts))
	}
	r.record(namespace, next)
	if next.release != "" { // It was set after this compilation read the Secret.
		r.own.fire(namespace)
	}
	return result, r.parts.prune(ctx, namespace, existing, parts, next.history.Confirmed(d))
}

// record records the content of a live-config Secret.
func (r *configReconciler) record(namespace string, secret liveSecret) {
	r.setLiveKeys(namespace, secret.history)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.written[namespace] = secret
}

// setLiveKeys records the write keys of a live config, and compiles the namespaces that may use the
// keys that it no longer has.
func (r *configReconciler) setLiveKeys(namespace string, history compile.History) {
	for _, other := range r.keys.setLive(namespace, history.WriteKeys(compile.Dispatchers{}, r.now())) {
		r.own.fire(other)
	}
}

// isLive reports whether a Secret is the namespace's live config with this content.
func isLive(s *corev1.Secret, namespace string, data map[string][]byte, revision string) bool {
	_, labelled := s.Labels[liveconfig.LabelLive]
	return labelled && s.Labels[liveconfig.LabelNamespace] == namespace && s.Annotations[liveconfig.AnnotationRevision] == revision &&
		maps.EqualFunc(s.Data, data, bytes.Equal)
}

// last returns the namespace's present live config; false if there is none. For a
// config that does not decode it returns the zero Config, because no dispatcher
// runs such a config.
func (r *configReconciler) last(ctx context.Context, namespace string) (liveconfig.Config, bool, error) {
	key := types.NamespacedName{Namespace: r.release, Name: liveconfig.SecretName(namespace)}
	var current corev1.Secret
	if err := r.direct.Get(ctx, key, &current); apierrors.IsNotFound(err) {
		return liveconfig.Config{}, false, nil
	} else if err != nil {
		return liveconfig.Config{}, false, fmt.Errorf("read Secret %s: %w", key, err)
	}
	stored, err := r.parts.assemble(ctx, namespace, &current)
	if err != nil {
		return liveconfig.Config{}, false, err
	}
	live, _ := stored.Decode()
	return live.Config, true, nil
}

// prime loads the write keys and the filter expressions of all namespaces. It runs before the first compilation:
// with an incomplete index, a Source could get the key of another namespace, and a new expression the budget of one
// that was accepted.
func (r *configReconciler) prime(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.primed {
		return nil
	}
	pending, objects := map[string]bool{}, map[string][]compile.Object{}
	for _, k := range r.kinds {
		list := k.NewList()
		if err := r.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return fmt.Errorf("list all objects: %w", err)
		}
		for _, o := range kinds.Objects(list) {
			pending[o.GetNamespace()] = true
			objects[o.GetNamespace()] = append(objects[o.GetNamespace()], o)
		}
	}
	live, err := r.primeLive(ctx)
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(maxReadsAtOnce)
	for name := range pending {
		group.Go(func() error {
			_, s, err := r.gather(ctx, name)
			if err != nil {
				// The compilation of this namespace retries. The others do not wait for it.
				log.FromContext(ctx).Error(err, "loading the write keys of a namespace failed; using the keys of its live config", "namespace", name)
				r.keys.set(name, liveHolders(live[name], s.Objects))
				return nil
			}
			r.keys.set(name, holders(s))
			return nil
		})
	}
	_ = group.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	r.expressions.Set(objects)
	r.pending, r.primed = pending, true
	return nil
}

// primeLive loads the live configs of all namespaces, and the owners of the write keys. It fails if it
// cannot read one: a namespace whose live config is not known releases no key. It returns the
// configs. The mutex is held.
func (r *configReconciler) primeLive(ctx context.Context) (map[string]liveconfig.Config, error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("SecretList"))
	if err := r.List(ctx, list, client.InNamespace(r.release)); err != nil {
		return nil, fmt.Errorf("list the live configs: %w", err)
	}
	var mu sync.Mutex
	configs, secrets := map[string]liveconfig.Config{}, map[string]liveSecret{}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(maxReadsAtOnce)
	for _, m := range list.Items {
		if namespace, ok := liveconfig.PartNamespaceOf(m.Name); ok {
			r.own.fire(namespace) // The part may belong to no root.
		}
		namespace, ok := liveconfig.NamespaceOf(m.Name)
		if !ok {
			continue
		}
		group.Go(func() error {
			var secret corev1.Secret
			if err := r.direct.Get(groupCtx, client.ObjectKeyFromObject(&m), &secret); apierrors.IsNotFound(err) {
				return nil
			} else if err != nil {
				return fmt.Errorf("read Secret %s: %w", m.Name, err)
			}
			found, live, err := r.readLive(groupCtx, &secret, namespace)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			configs[namespace], secrets[namespace] = live, found
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	pods, complete := r.reports()
	for _, pod := range pods {
		for _, report := range []*podreport.Index{pod.Report, pod.Configs} {
			if report == nil {
				continue
			}
			for _, n := range report.Configs {
				if _, known := secrets[n.Namespace]; !known {
					secrets[n.Namespace] = liveSecret{}
				}
			}
		}
	}
	live := map[string]map[string]compile.KeyUse{}
	users := map[string]int{}
	for namespace, secret := range secrets {
		live[namespace] = secret.history.WriteKeys(dispatchersOf(pods, complete, namespace), r.now())
		for hash, use := range live[namespace] {
			if use == compile.KeyInUse {
				users[hash]++
			}
		}
	}
	// A key that several live configs have in effect belongs to the oldest Source. One that is in
	// effect in one of them belongs to this one, even if another one reserves it.
	for namespace, keys := range live {
		maps.DeleteFunc(keys, func(hash string, use compile.KeyUse) bool {
			return users[hash] > 1 || use == compile.KeyReserved && users[hash] > 0
		})
		r.keys.setLive(namespace, keys)
	}
	for namespace, secret := range secrets {
		if secret.resourceVersion != "" {
			r.written[namespace] = secret
		}
		r.own.fire(namespace)
	}
	return configs, nil
}

// mark records that a namespace is compiled, or failed. When all namespaces are, it writes the
// marker Secret, which names the failed ones. A dispatcher that starts waits for the marker before
// it treats its set of live configs as complete.
func (r *configReconciler) mark(ctx context.Context, namespace string, failed bool) error {
	r.mu.Lock()
	delete(r.pending, namespace)
	if _, compiled := r.verdicts.get(namespace); failed && !compiled {
		r.failed[namespace] = true
	} else {
		delete(r.failed, namespace)
	}
	waiting := len(r.pending)
	names, marked := slices.Sorted(maps.Keys(r.failed)), r.marked
	r.mu.Unlock()
	if waiting > 0 {
		return nil
	}
	content := strings.Join(names, " ")
	key := types.NamespacedName{Namespace: r.release, Name: liveconfig.MarkerName}
	m := secretMetadata()
	if err := r.Get(ctx, key, m); err == nil {
		if _, ok := m.Labels[liveconfig.LabelLive]; ok && r.owner.owns(m) && marked != nil && *marked == content {
			return nil
		}
	} else if !apierrors.IsNotFound(err) {
		return fmt.Errorf("look up Secret %s: %w", key, err)
	}
	owners, err := r.owner.references(ctx)
	if err != nil {
		return err
	}
	marker := corev1ac.Secret(key.Name, key.Namespace).WithOwnerReferences(owners...).WithData(liveconfig.MarkerData(names)).WithLabels(map[string]string{
		liveconfig.LabelLive: "true", labelName: "posthorn", labelManagedBy: managedBy,
	})
	if err := r.Apply(ctx, marker, fieldOwner, client.ForceOwnership); err != nil {
		return fmt.Errorf("apply Secret %s: %w", key, err)
	}
	r.mu.Lock()
	r.marked = &content
	r.mu.Unlock()
	log.FromContext(ctx).Info("marker Secret written", "secret", key.Name, "failedNamespaces", content)
	return nil
}

// holders returns the hashes of a namespace's write keys, each with the oldest
// Source that uses the key.
func holders(s compile.Snapshot) map[string]keyHolder {
	found := map[string]keyHolder{}
	for _, o := range s.Objects {
		source, ok := o.(*v1alpha1.Source)
		if !ok {
			continue
		}
		holder := keyHolder{namespace: s.Namespace, name: source.Name, created: source.CreationTimestamp.Time}
		for _, hash := range compile.WriteKeySHA256(source, s.Secrets) {
			if other, taken := found[hash]; !taken || holder.compare(other) < 0 {
				found[hash] = holder
			}
		}
	}
	return found
}

// liveHolders is holders for a namespace whose Secrets cannot be read: it takes the write keys of
// its live config.
func liveHolders(live liveconfig.Config, objects []compile.Object) map[string]keyHolder {
	found := map[string]keyHolder{}
	for _, o := range objects {
		i := slices.IndexFunc(live.Sources, func(s liveconfig.Source) bool { return s.Name == o.GetName() })
		if _, ok := o.(*v1alpha1.Source); !ok || i < 0 {
			continue
		}
		for _, hash := range live.Sources[i].WriteKeySHA256 {
			found[hash] = keyHolder{namespace: o.GetNamespace(), name: o.GetName(), created: o.GetCreationTimestamp().Time}
		}
	}
	return found
}
