// Package configsource watches the live-config Secrets of a namespace and
// feeds them to the dispatcher.
package configsource

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// Sink takes tenants' live configs, encoded.
type Sink interface {
	// Set gives a tenant's newest config.
	Set(tenant string, data []byte)
	// Delete says that a tenant has no config any more.
	Delete(tenant string)
	// Synced says that every tenant's config has been given at least once.
	Synced()
}

// Watch feeds sink with the live-config Secrets of a namespace until ctx is
// done. It needs the right to list and watch Secrets in that namespace only.
// Synced is called once the operator's marker Secret says that it has compiled
// every tenant at least once, so that a dispatcher that starts before the
// operator does not take an empty namespace for an empty config. While the API
// server cannot be reached the last configs stay in effect.
func Watch(ctx context.Context, client kubernetes.Interface, namespace string, sink Sink, log *slog.Logger) error {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.LabelSelector = liveconfig.LabelLive
		}))
	informer := factory.Core().V1().Secrets().Informer()
	// The API server's own words help more than the reflector's generic log line.
	if err := informer.SetWatchErrorHandler(func(_ *cache.Reflector, err error) {
		log.Warn("watching live-config Secrets failed; the last configs stay in effect", "namespace", namespace, "error", err)
	}); err != nil {
		return fmt.Errorf("watch live-config Secrets: %w", err)
	}
	marked := make(chan struct{}, 1)
	set := func(obj any) {
		secret, ok := obj.(*corev1.Secret)
		if !ok {
			return
		}
		// By its name, which is of one Secret; somebody's copy has the labels, too.
		if tenant, ok := liveconfig.TenantOf(secret.Name); ok {
			sink.Set(tenant, secret.Data[liveconfig.DataKey])
		} else if secret.Name == liveconfig.MarkerName {
			select {
			case marked <- struct{}{}:
			default:
			}
		}
	}
	registration, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: set,
		UpdateFunc: func(before, after any) {
			// A relist delivers every object again; only a changed one matters.
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
				if tenant, ok := liveconfig.TenantOf(secret.Name); ok {
					sink.Delete(tenant)
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
	remind := time.NewTicker(time.Minute)
	defer remind.Stop()
	for waiting := true; waiting; {
		select {
		case <-marked:
			waiting = false
		case <-remind.C:
			log.Warn("waiting for the operator's first full config; calls are answered 503 until then",
				"namespace", namespace, "secret", liveconfig.MarkerName, "selector", labels.Set{liveconfig.LabelLive: ""}.String())
		case <-ctx.Done():
			return nil
		}
	}
	sink.Synced()
	<-ctx.Done()
	return nil
}
