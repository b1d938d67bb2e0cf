package controllers

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
)

// maxKeptBytes is the size limit of Secrets that are kept in memory. Larger ones are
// read again for each compilation, so that they cannot exhaust the operator's memory.
const maxKeptBytes = 64 << 10

// maxReadsAtOnce bounds the concurrent reads of a namespace's Secrets.
const maxReadsAtOnce = 16

// readTimeout bounds the read of a Secret, so that one that hangs does not delay the start.
const readTimeout = 10 * time.Second

// secretMetadata is metadataOf a Secret.
func secretMetadata() *metav1.PartialObjectMetadata { return metadataOf("Secret") }

// metadataOf returns an empty Secret or ConfigMap without data, the only form in which the
// operator watches them.
func metadataOf(kind string) *metav1.PartialObjectMetadata {
	m := &metav1.PartialObjectMetadata{}
	m.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(kind))
	return m
}

// listSecrets lists the metadata of Secrets in the cache. The caller must not change them.
func listSecrets(ctx context.Context, cached client.Reader, options ...client.ListOption) ([]metav1.PartialObjectMetadata, error) {
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("SecretList"))
	err := cached.List(ctx, list, append(options, client.UnsafeDisableDeepCopy)...)
	return list.Items, err
}

// stripSecret removes the metadata of watched Secrets and ConfigMaps that the controllers do not
// use, in particular annotations: kubectl stores the whole Secret in one of them.
func stripSecret(release string) toolscache.TransformFunc {
	return func(object any) (any, error) {
		m, ok := object.(*metav1.PartialObjectMetadata)
		if !ok {
			return nil, fmt.Errorf("cannot cache a %T; only metadata is cached", object)
		}
		kept := metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion, Generation: m.Generation}
		_, root := liveconfig.NamespaceOf(m.Name)
		_, part := liveconfig.PartNamespaceOf(m.Name)
		if m.Namespace == release && (root || part || m.Name == liveconfig.MarkerName) {
			kept.Labels, kept.OwnerReferences, kept.CreationTimestamp = m.Labels, m.OwnerReferences, m.CreationTimestamp
		}
		m.ObjectMeta = kept
		return m, nil
	}
}

// secretReader reads the Secrets and ConfigMaps that objects refer to, and no others; a ConfigMap
// has the name compile.ConfigMapName. It keeps a Secret or ConfigMap of up to maxKeptBytes while its version is
// current and an object refers to it.
type secretReader struct {
	metadata client.Reader // reads from the cache
	direct   client.Reader // reads from the API server

	mu sync.Mutex
	// names are the sorted names of the Secrets that a namespace's objects refer to.
	names map[string][]string
	kept  map[string]map[string]compile.Secret // namespace -> name
}

func newSecretReader(metadata, direct client.Reader) *secretReader {
	return &secretReader{metadata: metadata, direct: direct, names: map[string][]string{}, kept: map[string]map[string]compile.Secret{}}
}

// referenced reports whether a Secret was among the names of the namespace's last
// read. An object that refers to it later causes another read.
func (r *secretReader) referenced(namespace, name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, found := slices.BinarySearch(r.names[namespace], name)
	return found
}

// read returns the existing Secrets among names, which are sorted. It must not run
// concurrently for one namespace.
func (r *secretReader) read(ctx context.Context, namespace string, names []string) (map[string]compile.Secret, error) {
	r.mu.Lock()
	// Set before the first read, so that no later change is missed.
	r.names[namespace] = names
	kept := r.kept[namespace]
	r.mu.Unlock()

	var mu sync.Mutex
	found := make(map[string]compile.Secret, len(names))
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(maxReadsAtOnce)
	for _, name := range names {
		group.Go(func() error {
			key := types.NamespacedName{Namespace: namespace, Name: name}
			m := secretMetadata()
			if configMap, ok := compile.CutConfigMap(name); ok {
				m, key.Name = metadataOf("ConfigMap"), configMap
			}
			err := r.metadata.Get(groupCtx, key, m)
			if err != nil && !apierrors.IsNotFound(err) {
				return fmt.Errorf("look up %s %s: %w", m.Kind, key, err)
			}
			secret, ok := kept[name]
			if err != nil || !ok || secret.Version != m.ResourceVersion {
				// The cache may lag behind the object that refers to the Secret, so only
				// the API server can confirm that the Secret does not exist.
				switch secret, err = r.get(groupCtx, m.Kind, key); {
				case apierrors.IsNotFound(err):
					return nil
				case err != nil:
					return fmt.Errorf("read %s %s: %w", m.Kind, key, err)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			found[name] = secret
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	keep := make(map[string]compile.Secret, len(found))
	for name, secret := range found {
		size := 0
		for _, value := range secret.Data {
			size += len(value)
		}
		if size <= maxKeptBytes {
			keep[name] = secret
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept[namespace] = keep
	return found, nil
}

// get reads a Secret or a ConfigMap from the API server.
func (r *secretReader) get(ctx context.Context, kind string, key types.NamespacedName) (compile.Secret, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if kind == "Secret" {
		var full corev1.Secret
		err := r.direct.Get(ctx, key, &full)
		return compile.Secret{Version: full.ResourceVersion, Data: full.Data}, err
	}
	var full corev1.ConfigMap
	err := r.direct.Get(ctx, key, &full)
	values := compile.Secret{Version: full.ResourceVersion, Data: map[string][]byte{}}
	for name, text := range full.Data {
		values.Data[name] = []byte(text)
	}
	return values, err
}

func (r *secretReader) forget(namespace string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.names, namespace)
	delete(r.kept, namespace)
}
