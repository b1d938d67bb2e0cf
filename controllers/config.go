package controllers

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
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
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/kinds"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
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

// configReconciler maintains one live-config Secret for each namespace that has
// objects.
//
// Its permissions to create, patch and delete Secrets are limited to the release's
// namespace. It lists and watches only the metadata of Secrets, which RBAC cannot
// express; it reads the contents only of Secrets that an object refers to.
type configReconciler struct {
	client.Client               // reads from the cache; of Secrets, only metadata
	direct        client.Reader // reads from the API server
	kinds         kinds.Table
	release       string
	checkHost     func(host string) error
	// maxConfigBytes bounds an encoded live config.
	maxConfigBytes int
	secrets        *secretReader
	keys           *writeKeys
	verdicts       *verdictCache
	own, statuses  *trigger

	mu sync.Mutex
	// primed is true when the write keys of every namespace are loaded.
	primed bool
	// pending are the namespaces that have not been compiled since the start.
	pending map[string]bool
	// written are the live-config Secrets that this process has written or verified.
	written map[string]liveSecret
}

// liveSecret identifies the content of a live-config Secret.
type liveSecret struct{ revision, resourceVersion string }

func setupConfig(mgr manager.Manager, o Options, verdicts *verdictCache, statuses *trigger) error {
	r := &configReconciler{
		Client: mgr.GetClient(), direct: mgr.GetAPIReader(), kinds: o.kinds, release: o.Namespace, checkHost: o.CheckHost, maxConfigBytes: o.maxConfigBytes,
		secrets: newSecretReader(mgr.GetClient(), mgr.GetAPIReader()),
		keys:    newWriteKeys(), verdicts: verdicts, own: &trigger{}, statuses: statuses,
		written: map[string]liveSecret{},
	}
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

// namespacesOfSecret returns the namespace to compile when a Secret changes: that of
// the objects that refer to the Secret, or that of the live config in the Secret.
func (r *configReconciler) namespacesOfSecret(_ context.Context, secret client.Object) []reconcile.Request {
	if secret.GetNamespace() == r.release {
		if secret.GetName() == liveconfig.MarkerName {
			return []reconcile.Request{markerRequest}
		}
		if namespace, ok := liveconfig.NamespaceOf(secret.GetName()); ok {
			return []reconcile.Request{namespaceRequest(namespace)}
		}
	}
	if r.secrets.referenced(secret.GetNamespace(), secret.GetName()) {
		return []reconcile.Request{namespaceRequest(secret.GetNamespace())}
	}
	return nil
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
// deleted Secret may be that of the last write.
func (r *configReconciler) notOwnWrite() predicate.Predicate {
	foreign := func(o client.Object) bool {
		namespace, ok := liveconfig.NamespaceOf(o.GetName())
		return o.GetNamespace() != r.release || !ok || !r.wrote(namespace, o.GetResourceVersion())
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
	if err := r.prime(ctx); err != nil {
		return reconcile.Result{}, err
	}
	if request != markerRequest {
		result, err := r.compile(ctx, request.Name)
		if err != nil {
			result = "error"
		}
		compiles.WithLabelValues(result).Inc()
		if err != nil {
			return reconcile.Result{}, err
		}
	}
	return reconcile.Result{}, r.mark(ctx, request.Name)
}

// compile updates the live-config Secret and the verdicts of a namespace.
func (r *configReconciler) compile(ctx context.Context, namespace string) (result string, err error) {
	objects, snapshot, err := r.gather(ctx, namespace)
	if err != nil {
		return "", err
	}
	if len(snapshot.Objects) == 0 {
		return r.remove(ctx, namespace)
	}
	for _, other := range r.keys.set(namespace, holders(snapshot)) {
		r.own.fire(other)
	}
	snapshot.ForeignWriteKeys = r.keys.older(namespace)
	compilers := r.kinds.Compilers()
	config, verdicts := compilers.Compile(snapshot)
	encoded, err := compilers.Encode(config, verdicts, r.maxConfigBytes, func() (liveconfig.Config, bool, error) { return r.last(ctx, namespace) })
	if err != nil {
		return "", err
	}
	if encoded.Data != nil {
		if result, err = r.write(ctx, namespace, encoded.Data, encoded.Revision); err != nil {
			return "", err
		}
	}
	if encoded.TooLarge {
		result = "too_large"
		log.FromContext(ctx).Info("live config too large for a Secret; objects that are not in effect have the reason ConfigTooLarge")
	}
	r.verdicts.set(namespace, objects.verdicts(r.kinds, encoded.Verdicts))
	r.statuses.fire(namespace)
	return result, nil
}

// gather reads a namespace's objects and the Secrets that they refer to.
func (r *configReconciler) gather(ctx context.Context, namespace string) (objects, compile.Snapshot, error) {
	all, err := listNamespace(ctx, r, r.kinds, namespace)
	if err != nil {
		return nil, compile.Snapshot{}, err
	}
	s := all.snapshot(namespace)
	s.CheckHost = r.checkHost
	s.Secrets, err = r.secrets.read(ctx, namespace, r.kinds.Compilers().SecretRefs(s.Objects...))
	return all, s, err
}

// remove deletes the live config of a namespace without objects.
func (r *configReconciler) remove(ctx context.Context, namespace string) (string, error) {
	key := types.NamespacedName{Namespace: r.release, Name: liveconfig.SecretName(namespace)}
	m := secretMetadata()
	r.mu.Lock()
	_, written := r.written[namespace]
	r.mu.Unlock()
	if err := r.Get(ctx, key, m); apierrors.IsNotFound(err) && !written {
		r.forget(namespace)
		return "unchanged", nil
	}
	// The dispatchers discard the messages of a removed namespace. The cache may lag, so
	// only the API server can confirm that the namespace has no objects.
	for _, k := range r.kinds {
		list := k.NewList()
		if err := r.direct.List(ctx, list, client.InNamespace(namespace), client.Limit(1)); err != nil {
			return "", fmt.Errorf("confirm that namespace %s has no objects: %w", namespace, err)
		}
		if meta.LenList(list) > 0 {
			return "", fmt.Errorf("the cache of namespace %s lags behind the API server", namespace)
		}
	}
	secret := &corev1.Secret{}
	secret.Namespace, secret.Name = key.Namespace, key.Name
	if err := r.Delete(ctx, secret); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("delete the live config of namespace %s: %w", namespace, err)
	}
	log.FromContext(ctx).Info("live config deleted; the namespace has no objects")
	r.forget(namespace)
	return "removed", nil
}

// forget removes the data about a namespace without objects.
func (r *configReconciler) forget(namespace string) {
	r.secrets.forget(namespace)
	r.verdicts.remove(namespace)
	for _, other := range r.keys.set(namespace, nil) {
		r.own.fire(other)
	}
	r.mu.Lock()
	delete(r.written, namespace)
	r.mu.Unlock()
	r.statuses.fire(namespace) // The status controller removes its data, too.
}

// write applies a namespace's live-config Secret if its content differs.
func (r *configReconciler) write(ctx context.Context, namespace string, data []byte, revision string) (string, error) {
	key := types.NamespacedName{Namespace: r.release, Name: liveconfig.SecretName(namespace)}
	m := secretMetadata()
	if err := r.Get(ctx, key, m); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("look up Secret %s: %w", key, err)
	}
	r.mu.Lock()
	last := r.written[namespace]
	r.mu.Unlock()
	if last == (liveSecret{revision, m.ResourceVersion}) {
		return "unchanged", nil
	}
	// Another client has written the Secret, or the cache lags. Compare the content.
	var current corev1.Secret
	err := r.direct.Get(ctx, key, &current)
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("read Secret %s: %w", key, err)
	}
	result := "unchanged"
	if !isLive(&current, namespace, data, revision) {
		result = "written"
		wanted := corev1ac.Secret(key.Name, key.Namespace).
			WithLabels(map[string]string{
				liveconfig.LabelLive: "true", liveconfig.LabelNamespace: namespace,
				"app.kubernetes.io/name": "posthorn", "app.kubernetes.io/managed-by": "posthorn-operator",
			}).
			WithAnnotations(map[string]string{liveconfig.AnnotationRevision: revision}).
			WithData(map[string][]byte{liveconfig.DataKey: data})
		if err := r.Apply(ctx, wanted, fieldOwner, client.ForceOwnership); err != nil {
			return "", fmt.Errorf("apply the live config of namespace %s: %w", namespace, err)
		}
		current.ResourceVersion = *wanted.ResourceVersion
		log.FromContext(ctx).Info("live config written", "revision", revision, "bytes", len(data))
	}
	r.mu.Lock()
	r.written[namespace] = liveSecret{revision, current.ResourceVersion}
	r.mu.Unlock()
	return result, nil
}

// isLive reports whether a Secret is the namespace's live config with this content.
func isLive(s *corev1.Secret, namespace string, data []byte, revision string) bool {
	_, labelled := s.Labels[liveconfig.LabelLive]
	return labelled && s.Labels[liveconfig.LabelNamespace] == namespace && s.Annotations[liveconfig.AnnotationRevision] == revision &&
		bytes.Equal(s.Data[liveconfig.DataKey], data)
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
	config, _, _ := liveconfig.Decode(current.Data[liveconfig.DataKey])
	return config, true, nil
}

// prime loads the write keys of all namespaces. It runs before the first compilation:
// with an incomplete index, a younger Source could get the key of an older one.
func (r *configReconciler) prime(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.primed {
		return nil
	}
	pending := map[string]bool{}
	for _, k := range r.kinds {
		list := k.NewList()
		if err := r.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return fmt.Errorf("list all objects: %w", err)
		}
		for _, o := range kinds.Objects(list) {
			pending[o.GetNamespace()] = true
		}
	}
	var group errgroup.Group
	group.SetLimit(maxReadsAtOnce)
	for name := range pending {
		group.Go(func() error {
			_, s, err := r.gather(ctx, name)
			if err != nil {
				// The compilation of this namespace retries. The others do not wait for it.
				log.FromContext(ctx).Error(err, "loading the write keys of a namespace failed", "namespace", name)
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
	r.pending, r.primed = pending, true
	return nil
}

// mark records that a namespace is compiled. When all namespaces are, it creates the
// marker Secret. A dispatcher that starts waits for the marker before it treats its
// set of live configs as complete.
func (r *configReconciler) mark(ctx context.Context, namespace string) error {
	r.mu.Lock()
	delete(r.pending, namespace)
	waiting := len(r.pending)
	r.mu.Unlock()
	if waiting > 0 {
		return nil
	}
	key := types.NamespacedName{Namespace: r.release, Name: liveconfig.MarkerName}
	m := secretMetadata()
	if err := r.Get(ctx, key, m); err == nil {
		if _, ok := m.Labels[liveconfig.LabelLive]; ok {
			return nil
		}
	} else if !apierrors.IsNotFound(err) {
		return fmt.Errorf("look up Secret %s: %w", key, err)
	}
	marker := corev1ac.Secret(key.Name, key.Namespace).WithLabels(map[string]string{
		liveconfig.LabelLive: "true", "app.kubernetes.io/name": "posthorn", "app.kubernetes.io/managed-by": "posthorn-operator",
	})
	if err := r.Apply(ctx, marker, fieldOwner, client.ForceOwnership); err != nil {
		return fmt.Errorf("apply Secret %s: %w", key, err)
	}
	log.FromContext(ctx).Info("marker Secret written; every namespace is compiled", "secret", key.Name)
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
