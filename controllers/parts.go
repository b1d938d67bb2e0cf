package controllers

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// maxSuperseded bounds the parts of a namespace that its root does not list any more, and that are
// kept because not every pod has confirmed the root.
const maxSuperseded = liveconfig.MaxParts

// partSecrets writes and removes the Secrets of the parts of live configs.
type partSecrets struct {
	client  client.Client // reads metadata from the cache
	direct  client.Reader // reads from the API server
	release string
	owner   secretOwner

	mu sync.Mutex
	// versions are the resource versions of the parts that this process has written or verified, by
	// namespace and name.
	versions map[string]map[string]string
	// superseded are the namespaces that have parts which their root does not list.
	superseded map[string]bool
}

func newPartSecrets(c client.Client, direct client.Reader, release string, owner secretOwner) *partSecrets {
	return &partSecrets{client: c, direct: direct, release: release, owner: owner, versions: map[string]map[string]string{},
		superseded: map[string]bool{}}
}

// list returns the metadata of the existing parts of a namespace, by name.
func (p *partSecrets) list(ctx context.Context, namespace string) (map[string]metav1.PartialObjectMetadata, error) {
	all, err := listSecrets(ctx, p.client, client.InNamespace(p.release), client.MatchingLabels{liveconfig.LabelPart: namespace})
	if err != nil {
		return nil, fmt.Errorf("list the parts of the live config of namespace %s: %w", namespace, err)
	}
	found := map[string]metav1.PartialObjectMetadata{}
	for _, m := range all {
		if of, ok := liveconfig.PartNamespaceOf(m.Name); ok && of == namespace {
			found[m.Name] = m
		}
	}
	return found, nil
}

// verified reports whether a Secret is as this process has written or verified it.
func (p *partSecrets) verified(name, resourceVersion string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	namespace, _ := liveconfig.PartNamespaceOf(name)
	return resourceVersion != "" && p.versions[namespace][name] == resourceVersion
}

// missing returns the parts that do not exist, or that are not verified.
func (p *partSecrets) missing(existing map[string]metav1.PartialObjectMetadata, parts []liveconfig.Part) []liveconfig.Part {
	return slices.DeleteFunc(slices.Clone(parts), func(part liveconfig.Part) bool {
		return p.verified(part.Name, existing[part.Name].ResourceVersion)
	})
}

// write writes or verifies parts. It returns the number of written ones.
func (p *partSecrets) write(ctx context.Context, namespace string, parts []liveconfig.Part) (int, error) {
	if len(parts) == 0 {
		return 0, nil
	}
	var mu sync.Mutex
	count := 0
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(maxPartWrites)
	for _, part := range parts {
		group.Go(func() error {
			written, err := p.writeOne(groupCtx, namespace, part)
			if err != nil {
				return fmt.Errorf("write part %s of the live config of namespace %s: %w", part.Name, namespace, err)
			}
			if written {
				mu.Lock()
				count++
				mu.Unlock()
			}
			return nil
		})
	}
	return count, group.Wait()
}

// maxPartWrites bounds the concurrent writes of parts, and thus the memory that they need.
const maxPartWrites = 4

func (p *partSecrets) writeOne(ctx context.Context, namespace string, part liveconfig.Part) (written bool, err error) {
	key := types.NamespacedName{Namespace: p.release, Name: part.Name}
	data := part.Data()
	var current corev1.Secret
	if err := p.direct.Get(ctx, key, &current); client.IgnoreNotFound(err) != nil {
		return false, err
	}
	_, live := current.Labels[liveconfig.LabelLive]
	same := maps.EqualFunc(current.Data, data, bytes.Equal)
	if same && live && current.Labels[liveconfig.LabelPart] == namespace && p.owner.owns(&current) {
		p.record(namespace, part.Name, current.ResourceVersion)
		return false, nil
	}
	if current.ResourceVersion != "" && !same {
		// Another client has written it. An immutable Secret must be deleted first.
		if err := p.delete(ctx, namespace, part.Name, current.ResourceVersion); err != nil {
			return false, err
		}
	}
	wanted := corev1ac.Secret(key.Name, key.Namespace).
		WithLabels(map[string]string{liveconfig.LabelLive: "part", liveconfig.LabelPart: namespace}).
		WithImmutable(true).
		WithData(data)
	if err := p.owner.apply(ctx, p.client, wanted); err != nil {
		return false, err
	}
	p.record(namespace, part.Name, *wanted.ResourceVersion)
	return true, nil
}

func (p *partSecrets) record(namespace, name, resourceVersion string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.versions[namespace] == nil {
		p.versions[namespace] = map[string]string{}
	}
	p.versions[namespace][name] = resourceVersion
}

func (p *partSecrets) delete(ctx context.Context, namespace, name, resourceVersion string) error {
	secret := &corev1.Secret{}
	secret.Namespace, secret.Name = p.release, name
	if err := p.client.Delete(ctx, secret, client.Preconditions{ResourceVersion: &resourceVersion}); client.IgnoreNotFound(err) != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.versions[namespace], name)
	return nil
}

// prune removes the parts of a namespace that are not listed by its root: all if every pod has confirmed
// the root, else the oldest ones beyond maxSuperseded. A pod that has not applied the root then keeps the
// config that it has.
func (p *partSecrets) prune(ctx context.Context, namespace string, existing map[string]metav1.PartialObjectMetadata,
	listed []liveconfig.Part, confirmed bool) error {
	old := map[string]metav1.PartialObjectMetadata{}
	p.mu.Lock()
	for name, version := range p.versions[namespace] { // The cache may lack the newest ones.
		m := metav1.PartialObjectMetadata{}
		m.Name, m.ResourceVersion, m.CreationTimestamp = name, version, metav1.Now()
		old[name] = m
	}
	p.mu.Unlock()
	maps.Copy(old, existing)
	for _, part := range listed {
		delete(old, part.Name)
	}
	list := slices.SortedFunc(maps.Values(old), func(a, b metav1.PartialObjectMetadata) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	kept := 0
	if !confirmed {
		kept = min(len(list), maxSuperseded)
	}
	list = list[:len(list)-kept]
	for _, m := range list {
		if err := p.delete(ctx, namespace, m.Name, m.ResourceVersion); err != nil {
			return fmt.Errorf("delete Secret %s, an old part of the live config of namespace %s: %w", m.Name, namespace, err)
		}
	}
	if len(list) > 0 {
		log.FromContext(ctx).Info("old parts of the live config deleted", "count", len(list))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.versions[namespace]) == 0 {
		delete(p.versions, namespace)
	}
	delete(p.superseded, namespace)
	if kept > 0 {
		p.superseded[namespace] = true
	}
	return nil
}

// supersededIn reports whether a namespace has parts that its root does not list.
func (p *partSecrets) supersededIn(namespace string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.superseded[namespace]
}

// assemble returns the live config of a root Secret, which is incomplete if a part does not exist.
func (p *partSecrets) assemble(ctx context.Context, namespace string, root *corev1.Secret) (liveconfig.Stored, error) {
	names := liveconfig.PartNames(namespace, root.Data)
	parts := make([]corev1.Secret, len(names))
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(maxReadsAtOnce)
	for i, name := range names {
		group.Go(func() error {
			key := types.NamespacedName{Namespace: p.release, Name: name}
			if err := p.direct.Get(groupCtx, key, &parts[i]); client.IgnoreNotFound(err) != nil {
				return fmt.Errorf("read Secret %s: %w", key, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return liveconfig.Stored{}, err
	}
	return liveconfig.Assemble(namespace, root.Data, func(name string) map[string][]byte { return parts[slices.Index(names, name)].Data }), nil
}
