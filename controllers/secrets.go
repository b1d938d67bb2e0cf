package controllers

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// maxKeptBytes is how large a Secret may be to be kept in memory. A larger one is
// read again each time, so that nobody fills the operator's memory with a few.
const maxKeptBytes = 64 << 10

// maxReadsAtOnce bounds how many Secrets of a namespace are read at the same time.
const maxReadsAtOnce = 16

// secretMetadata is a Secret without its data: the only form in which Secrets are watched.
func secretMetadata() *metav1.PartialObjectMetadata {
	m := &metav1.PartialObjectMetadata{}
	m.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	return m
}

// stripSecret leaves of a watched Secret's metadata what the controllers use.
// Annotations above all go: kubectl keeps the whole Secret in one of them.
func stripSecret(release string) toolscache.TransformFunc {
	return func(object any) (any, error) {
		m, ok := object.(*metav1.PartialObjectMetadata)
		if !ok {
			return nil, fmt.Errorf("a %T was about to be cached; Secrets are cached by metadata only", object)
		}
		kept := metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion, Generation: m.Generation}
		if _, live := liveconfig.NamespaceOf(m.Name); m.Namespace == release && (live || m.Name == liveconfig.MarkerName) {
			kept.Labels = m.Labels
		}
		m.ObjectMeta = kept
		return m, nil
	}
}

// secretReader reads the Secrets that objects refer to, and only those. What it
// read it keeps as long as the Secret's version stays and something refers to it,
// unless it is large.
type secretReader struct {
	// metadata is the cache, direct the API server.
	metadata, direct client.Reader

	mu sync.Mutex
	// named are the names that a namespace's objects refer to, sorted.
	named map[string][]string
	kept  map[string]map[string]compile.Secret // namespace -> name
}

func newSecretReader(metadata, direct client.Reader) *secretReader {
	return &secretReader{metadata: metadata, direct: direct, named: map[string][]string{}, kept: map[string]map[string]compile.Secret{}}
}

// matters reports whether a namespace's objects refer to a Secret, as far as they
// have been read. What refers to it later reads it anew.
func (r *secretReader) matters(namespace, name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, found := slices.BinarySearch(r.named[namespace], name)
	return found
}

// read returns those of a namespace's Secrets, names sorted, that exist. One call
// per namespace at a time.
func (r *secretReader) read(ctx context.Context, namespace string, names []string) (map[string]compile.Secret, error) {
	r.mu.Lock()
	// Before anything is read, so that no change after that is missed.
	r.named[namespace] = names
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
			err := r.metadata.Get(groupCtx, key, m)
			if err != nil && !apierrors.IsNotFound(err) {
				return fmt.Errorf("look up Secret %s: %w", key, err)
			}
			secret, ok := kept[name]
			if err != nil || !ok || secret.Version != m.ResourceVersion {
				// The cache may lag behind the object that refers to the Secret,
				// so only the API server can say that there is none.
				var full corev1.Secret
				switch err := r.direct.Get(groupCtx, key, &full); {
				case apierrors.IsNotFound(err):
					return nil
				case err != nil:
					return fmt.Errorf("read Secret %s: %w", key, err)
				}
				secret = compile.Secret{Version: full.ResourceVersion, Data: full.Data}
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

func (r *secretReader) forget(namespace string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.named, namespace)
	delete(r.kept, namespace)
}
