package controllers

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
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
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

const (
	// fieldOwner owns what the operator applies.
	fieldOwner = client.FieldOwner("posthorn-operator")
	// settleTime is how long a changed namespace waits for more changes, so
	// that one apply of many objects is compiled a few times and not once each.
	settleTime = 50 * time.Millisecond
)

// markerRequest is the key that stands for no namespace but for the marker Secret.
var markerRequest = reconcile.Request{}

// configReconciler keeps one live-config Secret per namespace that has objects.
//
// The rights to create, patch and delete Secrets are limited to the release's
// namespace. Listing and watching them is for metadata only (RBAC has no word
// for that); contents are read one by one, of Secrets that are referred to.
type configReconciler struct {
	client.Client               // reads from the cache, Secrets by metadata only
	direct        client.Reader // reads from the API server
	release       string
	checkHost     func(host string) error
	// maxConfigBytes bounds an encoded live config.
	maxConfigBytes int
	secrets        *secretReader
	keys           *writeKeys
	known          *verdictBook
	own, statuses  *trigger

	mu sync.Mutex
	// primed is true once the write keys of every namespace are known, and
	// pending are the namespaces that have not been compiled since the start.
	primed  bool
	pending map[string]bool
	written map[string]liveSecret
}

// liveSecret is what is known to be in a live-config Secret.
type liveSecret struct{ revision, resourceVersion string }

func setupConfig(mgr manager.Manager, o Options, known *verdictBook, statuses *trigger) error {
	r := &configReconciler{
		Client: mgr.GetClient(), direct: mgr.GetAPIReader(), release: o.Namespace, checkHost: o.CheckHost, maxConfigBytes: o.maxConfigBytes,
		secrets: newSecretReader(mgr.GetClient(), mgr.GetAPIReader()),
		keys:    newWriteKeys(), known: known, own: &trigger{}, statuses: statuses,
		written: map[string]liveSecret{},
	}
	r.own.fire(markerRequest.Name)
	changed := builder.WithPredicates(specChanged)
	return builder.ControllerManagedBy(mgr).
		Named("config").
		Watches(&v1alpha1.Source{}, enqueue(namespaceOf), changed).
		Watches(&v1alpha1.WebhookDestination{}, enqueue(namespaceOf), changed).
		Watches(&v1alpha1.Audience{}, enqueue(namespaceOf), changed).
		Watches(&v1alpha1.DeletionRequest{}, enqueue(namespaceOf), changed).
		WatchesMetadata(&corev1.Secret{}, enqueue(r.namespacesOfSecret), builder.WithPredicates(r.notOwnWrite())).
		WatchesRawSource(r.own).
		WithOptions(controllerOptions(mgr, "config")).
		Complete(r)
}

// enqueue is a handler that enqueues what find finds, after the settle time.
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

// namespacesOfSecret maps a Secret to the namespace it matters to: its own, when
// something there refers to it; the namespace's, when it is a live config.
func (r *configReconciler) namespacesOfSecret(_ context.Context, secret client.Object) []reconcile.Request {
	if secret.GetNamespace() == r.release {
		if secret.GetName() == liveconfig.MarkerName {
			return []reconcile.Request{markerRequest}
		}
		if namespace, ok := liveconfig.NamespaceOf(secret.GetName()); ok {
			return []reconcile.Request{namespaceRequest(namespace)}
		}
	}
	if r.secrets.matters(secret.GetNamespace(), secret.GetName()) {
		return []reconcile.Request{namespaceRequest(secret.GetNamespace())}
	}
	return nil
}

// specChanged lets through what may change a config or a verdict: a new spec, new
// labels, the end of a run, and another object of the same name, whose generation may be the same.
var specChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	ended := func(o client.Object) bool {
		d, ok := o.(*v1alpha1.DeletionRequest)
		return ok && v1alpha1.JobEnded(d.Status.JobStatus)
	}
	return ended(e.ObjectOld) != ended(e.ObjectNew) || e.ObjectOld.GetUID() != e.ObjectNew.GetUID() || e.ObjectOld.GetGeneration() != e.ObjectNew.GetGeneration() ||
		!maps.Equal(e.ObjectOld.GetLabels(), e.ObjectNew.GetLabels())
}}

// notOwnWrite lets every change of a Secret through but our own writes of a live
// config. A deletion always counts: its version may be that of our last write.
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

// wrote tells whether a version of a live-config Secret is the one that we wrote last.
func (r *configReconciler) wrote(namespace, resourceVersion string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.written[namespace].resourceVersion == resourceVersion
}

// +kubebuilder:rbac:groups=posthorn.dev,resources=sources;webhookdestinations;audiences;deletionrequests,verbs=list;watch
// +kubebuilder:rbac:groups="",resources=secrets,verbs=get;list;watch
// +kubebuilder:rbac:groups="",resources=secrets,namespace=posthorn-system,verbs=create;patch;delete
// +kubebuilder:rbac:groups=coordination.k8s.io,resources=leases,namespace=posthorn-system,verbs=get;create;update
// +kubebuilder:rbac:groups="",resources=events,namespace=posthorn-system,verbs=create;patch

// Reconcile compiles one namespace, or makes the marker.
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

// compile brings one namespace's live-config Secret and verdicts up to date.
func (r *configReconciler) compile(ctx context.Context, namespace string) (result string, err error) {
	snapshot, err := r.gather(ctx, namespace)
	if err != nil {
		return "", err
	}
	if len(snapshot.Sources)+len(snapshot.Destinations)+len(snapshot.Audiences)+len(snapshot.Deletions) == 0 {
		return r.remove(ctx, namespace)
	}
	for _, other := range r.keys.set(namespace, holders(snapshot)) {
		r.own.fire(other)
	}
	snapshot.ForeignWriteKeys = r.keys.older(namespace)
	config, verdicts := compile.Compile(snapshot)
	encoded, err := compile.Encode(config, verdicts, r.maxConfigBytes, func() (liveconfig.Config, bool, error) { return r.last(ctx, namespace) })
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
		log.FromContext(ctx).Info("The live config is too large for a Secret; the status of objects that are not in effect says ConfigTooLarge")
	}
	compiled := judged{}
	judge(compiled, snapshot.Sources, encoded.Verdicts.Sources)
	judge(compiled, snapshot.Destinations, encoded.Verdicts.Destinations)
	judge(compiled, snapshot.Audiences, encoded.Verdicts.Audiences)
	judge(compiled, snapshot.Deletions, encoded.Verdicts.Deletions)
	r.known.set(namespace, compiled)
	r.statuses.fire(namespace)
	return result, nil
}

// gather reads one namespace.
func (r *configReconciler) gather(ctx context.Context, namespace string) (compile.Snapshot, error) {
	s, err := listNamespace(ctx, r, namespace)
	if err != nil {
		return s, err
	}
	s.CheckHost = r.checkHost
	s.Secrets, err = r.secrets.read(ctx, namespace, secretNames(s))
	return s, err
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
	// Giving up a namespace gives up its messages: an empty cache is not proof enough.
	for _, list := range namespaceLists() {
		if err := r.direct.List(ctx, list, client.InNamespace(namespace), client.Limit(1)); err != nil {
			return "", fmt.Errorf("confirm that namespace %s has no objects: %w", namespace, err)
		}
		if meta.LenList(list) > 0 {
			return "", fmt.Errorf("the cache of namespace %s is behind the API server", namespace)
		}
	}
	secret := &corev1.Secret{}
	secret.Namespace, secret.Name = key.Namespace, key.Name
	if err := r.Delete(ctx, secret); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("delete the live config of namespace %s: %w", namespace, err)
	}
	log.FromContext(ctx).Info("Live config deleted: the namespace has no objects")
	r.forget(namespace)
	return "removed", nil
}

// forget drops what is remembered of a namespace without objects.
func (r *configReconciler) forget(namespace string) {
	r.secrets.forget(namespace)
	r.known.forget(namespace)
	for _, other := range r.keys.set(namespace, nil) {
		r.own.fire(other)
	}
	r.mu.Lock()
	delete(r.written, namespace)
	r.mu.Unlock()
	r.statuses.fire(namespace) // which forgets it then, too
}

// write applies a namespace's live-config Secret when it is not what it should be.
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
	// Not ours, not as we left it, or the cache is behind: only its content can tell.
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
		log.FromContext(ctx).Info("Live config written", "revision", revision, "bytes", len(data))
	}
	r.mu.Lock()
	r.written[namespace] = liveSecret{revision, current.ResourceVersion}
	r.mu.Unlock()
	return result, nil
}

// isLive tells whether a Secret is a namespace's live config as the dispatchers expect it.
func isLive(s *corev1.Secret, namespace string, data []byte, revision string) bool {
	_, labelled := s.Labels[liveconfig.LabelLive]
	return labelled && s.Labels[liveconfig.LabelNamespace] == namespace && s.Annotations[liveconfig.AnnotationRevision] == revision &&
		bytes.Equal(s.Data[liveconfig.DataKey], data)
}

// last returns the live config that a namespace has; false when it has none. One
// that does not decode is in effect nowhere.
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

// prime reads the write keys of all namespaces before the first one is compiled:
// with only some of them known, a younger Source could get an older one's key.
func (r *configReconciler) prime(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.primed {
		return nil
	}
	pending := map[string]bool{}
	for _, list := range namespaceLists() {
		if err := r.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return fmt.Errorf("list all objects: %w", err)
		}
		_ = meta.EachListItem(list, func(o runtime.Object) error {
			pending[o.(client.Object).GetNamespace()] = true
			return nil
		})
	}
	var group errgroup.Group
	group.SetLimit(maxReadsAtOnce)
	for name := range pending {
		group.Go(func() error {
			s, err := r.gather(ctx, name)
			if err != nil {
				// Its own compilation tries again; the others do not wait for it.
				log.FromContext(ctx).Error(err, "Reading the write keys of a namespace failed", "namespace", name)
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

// mark notes that a namespace is compiled. When all are it makes the marker Secret,
// without which a dispatcher that starts does not take the configs for all there are.
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
	log.FromContext(ctx).Info("Every namespace is compiled; dispatchers may start")
	return nil
}

func secretNames(s compile.Snapshot) []string {
	var names []string
	for i := range s.Sources {
		names = append(names, compile.SecretRefs(&s.Sources[i])...)
	}
	for i := range s.Destinations {
		names = append(names, compile.SecretRefs(&s.Destinations[i])...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// holders returns a namespace's write keys, each with the oldest Source that uses it.
func holders(s compile.Snapshot) map[string]keyHolder {
	found := map[string]keyHolder{}
	for i := range s.Sources {
		source := &s.Sources[i]
		holder := keyHolder{namespace: s.Namespace, name: source.Name, created: source.CreationTimestamp.Time}
		for _, hash := range compile.WriteKeySHA256(source, s.Secrets) {
			if other, taken := found[hash]; !taken || holder.compare(other) < 0 {
				found[hash] = holder
			}
		}
	}
	return found
}
