package controllers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
)

// marker writes the marker Secret when all namespaces are compiled or have failed; it names the failed ones. A dispatcher
// that starts waits for it before it treats its set of live configs as complete.
type marker struct {
	client  client.Client // reads from the cache, only metadata
	release string
	owner   secretOwner

	mu sync.Mutex
	// pending are the namespaces that have not been compiled since the start.
	pending map[string]bool
	// failed are the namespaces that could not be compiled since the start.
	failed map[string]bool
	// marked is the content of the marker Secret that this process has written; nil before.
	marked *string
}

// begin sets the namespaces to compile.
func (m *marker) begin(objects map[string][]compile.Object) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for namespace := range objects {
		m.pending[namespace] = true
	}
}

// mark records that a namespace is compiled, or failed. When all namespaces are, it writes the
// marker Secret.
func (m *marker) mark(ctx context.Context, namespace string, failed bool) error {
	m.mu.Lock()
	delete(m.pending, namespace)
	if failed {
		m.failed[namespace] = true
	} else {
		delete(m.failed, namespace)
	}
	waiting := len(m.pending)
	names, marked := slices.Sorted(maps.Keys(m.failed)), m.marked
	m.mu.Unlock()
	if waiting > 0 {
		return nil
	}
	content := strings.Join(names, " ")
	key := types.NamespacedName{Namespace: m.release, Name: liveconfig.MarkerName}
	present := secretMetadata()
	if err := m.client.Get(ctx, key, present); err == nil {
		if _, ok := present.Labels[liveconfig.LabelLive]; ok && m.owner.owns(present) && marked != nil && *marked == content {
			return nil
		}
	} else if !apierrors.IsNotFound(err) {
		return fmt.Errorf("look up Secret %s: %w", key, err)
	}
	secret := corev1ac.Secret(key.Name,
		key.Namespace).WithData(liveconfig.MarkerData(names)).WithLabels(map[string]string{liveconfig.LabelLive: "true"})
	if err := m.owner.apply(ctx, m.client, secret); err != nil {
		return err
	}
	m.mu.Lock()
	m.marked = &content
	m.mu.Unlock()
	log.FromContext(ctx).Info("marker Secret written", "secret", key.Name, "failedNamespaces", content)
	return nil
}
