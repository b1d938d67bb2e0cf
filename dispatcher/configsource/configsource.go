// Package configsource watches the live-config Secrets of a namespace and
// feeds them to the dispatcher.
package configsource

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// Watch sends the live-config Secrets of a namespace to sink until ctx is done. It needs permission
// to list and watch Secrets in that namespace only. Synced is called after the operator's marker
// Secret shows that the operator has compiled every namespace at least once. So a dispatcher that
// starts before the operator does not mistake an empty namespace for an empty config. While the API
// server is unreachable, the last configs remain in effect.
func Watch(ctx context.Context, client kubernetes.Interface, namespace string, sink liveconfig.Sink, log *slog.Logger) error {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.LabelSelector = liveconfig.LabelLive
		}))
	informer := factory.Core().V1().Secrets().Informer()
	// Log the API server's message instead of the reflector's generic line.
	if err := informer.SetWatchErrorHandler(func(_ *cache.Reflector, err error) {
		log.Warn("watching live-config Secrets failed; the last configs remain in effect", "namespace", namespace, "error", err)
	}); err != nil {
		return fmt.Errorf("watch live-config Secrets: %w", err)
	}
	marked := make(chan []string, 1) // The failed namespaces of the newest marker.
	configs := assembler{store: informer.GetStore(), release: namespace, sink: sink, incomplete: map[string]liveconfig.Stored{}}
	set := func(obj any) {
		secret, ok := obj.(*corev1.Secret)
		if !ok {
			return
		}
		// The name is decisive, because a copy of a Secret has the same labels.
		if owner, ok := liveconfig.NamespaceOf(secret.Name); ok {
			configs.set(owner, secret)
		} else if owner, ok := liveconfig.PartNamespaceOf(secret.Name); ok {
			configs.addPart(owner)
		} else if secret.Name == liveconfig.SharesName {
			setShares(sink, secret, log)
		} else if secret.Name == liveconfig.MarkerName {
			select {
			case <-marked:
			default:
			}
			marked <- liveconfig.FailedNamespaces(secret.Data) // The only sender has emptied it.
		}
	}
	registration, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: set,
		UpdateFunc: func(before, after any) {
			// A relist delivers every object again; only changed objects matter.
			if b, ok := before.(*corev1.Secret); ok {
				if a, ok := after.(*corev1.Secret); ok && a.ResourceVersion == b.ResourceVersion {
					return
				}
			}
			set(after)
		},
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			if secret, ok := obj.(*corev1.Secret); ok {
				if owner, ok := liveconfig.NamespaceOf(secret.Name); ok {
					configs.delete(owner)
				} else if owner, ok := liveconfig.PartNamespaceOf(secret.Name); ok {
					configs.deletePart(owner, secret.Name)
				}
			}
		},
	})
	if err != nil {
		return fmt.Errorf("watch live-config Secrets: %w", err)
	}
	factory.StartWithContext(ctx)
	defer factory.Shutdown()

	if !cache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
		return nil // ctx is done
	}
	configs.sync()
	remind := time.NewTicker(time.Minute)
	defer remind.Stop()
	for {
		select {
		case failed := <-marked:
			remind.Stop()
			sink.Synced(failed...)
		case <-remind.C:
			log.Warn("waiting for the operator's first full config; calls are answered 503 until then",
				"namespace", namespace, "secret", liveconfig.MarkerName, "selector", labels.Set{liveconfig.LabelLive: ""}.String())
		case <-ctx.Done():
			return nil
		}
	}
}

// setShares sends the shares of limits to a sink that uses them. The last valid ones remain in effect.
func setShares(sink liveconfig.Sink, secret *corev1.Secret, log *slog.Logger) {
	to, ok := sink.(liveconfig.SharesSink)
	if !ok {
		return
	}
	shares, err := liveconfig.DecodeShares(secret.Data)
	if err != nil {
		log.Error("shares of limits rejected; the last ones remain in effect", "secret", secret.Name, "error", err)
		return
	}
	to.SetShares(shares)
}

// assembler joins the parts of live configs that are in several Secrets. It reads the parts from the
// informer's store, so it keeps no data. The operator writes the parts before the root, and the
// informer has the Secrets in this order, except at its start.
type assembler struct {
	store   cache.Store
	release string
	sink    liveconfig.Sink

	mu sync.Mutex
	// incomplete are the namespaces with a missing part.
	incomplete map[string]liveconfig.Stored
	synced     bool
}

// set sends the live config of a root Secret to the sink. Before sync it waits for missing parts.
func (a *assembler) set(namespace string, root *corev1.Secret) {
	a.mu.Lock()
	defer a.mu.Unlock()
	stored := liveconfig.Assemble(namespace, root.Data, func(name string) map[string][]byte {
		if part := a.secret(name); part != nil {
			return part.Data
		}
		return nil
	})
	delete(a.incomplete, namespace)
	if stored.Incomplete() {
		if newest := a.secret(root.Name); newest == nil || newest.ResourceVersion != root.ResourceVersion {
			return // The operator has removed the part after this root; the event of the newer root follows.
		}
		a.incomplete[namespace] = stored
		if !a.synced {
			return
		}
	}
	a.sink.Set(namespace, stored)
}

// addPart sends the live config of a namespace if it was incomplete.
func (a *assembler) addPart(namespace string) {
	a.mu.Lock()
	_, waiting := a.incomplete[namespace]
	a.mu.Unlock()
	if root := a.secret(liveconfig.SecretName(namespace)); waiting && root != nil {
		a.set(namespace, root)
	}
}

// deletePart sends the live config of a namespace without a part, if its root lists it.
func (a *assembler) deletePart(namespace, name string) {
	if root := a.secret(liveconfig.SecretName(namespace)); root != nil && slices.Contains(liveconfig.PartNames(namespace, root.Data), name) {
		a.set(namespace, root)
	}
}

func (a *assembler) delete(namespace string) {
	a.mu.Lock()
	delete(a.incomplete, namespace)
	a.mu.Unlock()
	a.sink.Delete(namespace)
}

// sync sends the live configs that are incomplete after the informer's start.
func (a *assembler) sync() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.synced = true
	for namespace, stored := range a.incomplete {
		a.sink.Set(namespace, stored)
	}
}

// secret returns a Secret of the informer's store; nil if there is none.
func (a *assembler) secret(name string) *corev1.Secret {
	object, _, err := a.store.GetByKey(a.release + "/" + name)
	secret, ok := object.(*corev1.Secret)
	if err != nil || !ok {
		return nil
	}
	return secret
}
