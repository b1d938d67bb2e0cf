// Package controllers is the control plane. It compiles the custom resources of each
// namespace into a live config for the dispatchers, and writes the dispatchers' reports
// to the status of the resources.
//
//	config: one namespace's objects and Secrets -> compile -> the live-config Secret
//	prober: GET /report of every ready dispatcher pod, every second
//	status: verdicts and reports -> health -> status, written only when it differs
//
// The reconcilers read and write; the pure packages compile and health make the
// decisions.
package controllers

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/time/rate"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/kinds"
)

// Options configure the control plane.
type Options struct {
	// Namespace of the release: the dispatcher pods and the live-config Secrets are in it. Required.
	Namespace string
	// DispatcherSelector is a label selector for the dispatcher pods. Required, unless Pods is set.
	DispatcherSelector string
	// DispatcherAdminPort is the port of the pods' GET /report. Required, unless Pods is set.
	DispatcherAdminPort int
	// DispatcherTokenFile contains a token for the pods' admin listeners, with the
	// audience adminapi.TokenAudience; the requests then use TLS. If it is empty, they
	// use plain HTTP, to dispatchers that run with --admin-auth=none.
	DispatcherTokenFile string
	// DispatcherStatefulSet is the name of the dispatchers' StatefulSet in Namespace, which owns
	// the Secrets that the operator writes. If it is empty, they have no owner and remain when
	// the release is deleted.
	DispatcherStatefulSet string
	// Pods lists the dispatchers. Default: the pods that DispatcherSelector selects.
	Pods Pods
	// Policy applies to every destination.
	Policy compile.Policy
	// LeaderElection makes one of several replicas active, by a Lease in Namespace.
	LeaderElection bool
	// MetricsBindAddress and HealthProbeBindAddress are host:port; "0" disables them.
	MetricsBindAddress, HealthProbeBindAddress string
	// MetricsTLS is the certificate of the metrics server, and MetricsGuard authorizes
	// its requests. If they are nil, the metrics are public and in clear text.
	MetricsTLS   *tls.Config
	MetricsGuard func(http.Handler) http.Handler
	// PollInterval is the time between two requests for a pod's report. Default 1 s.
	PollInterval time.Duration
	// Now is the clock. Default time.Now.
	Now func() time.Time
	// leaseDuration is the time after which a Lease that is not renewed expires. Default
	// 30 s: without a leader deliveries continue, and an operator that stops releases the
	// Lease.
	leaseDuration time.Duration
	// numbersInterval is the shortest time between two writes of an object's numbers;
	// transitions do not wait for it. Default 30 s.
	numbersInterval time.Duration
	// tombstoneGrace is how long a tombstone is kept at least, and followInterval how often a live
	// config is compared with the pods' reports.
	tombstoneGrace, followInterval time.Duration
	// backlogInterval is how often the backlogs of the pods are recorded, and servedInterval how often the
	// CustomResourceDefinitions are read.
	backlogInterval, servedInterval time.Duration
	// downAfter is the time without a ready pod after which the status reports it. Default 2 min.
	downAfter time.Duration
	// confirmGrace is the time that the pods have to confirm a change before the status
	// shows it as pending, so that a change causes one write instead of one for each pod.
	// During this time the pods are polled more often. Default 2 s.
	confirmGrace time.Duration
	// limit bounds an encoded live config. Default compile.DefaultLimit.
	limit compile.Limit
	// configBurst and configRate bound the writes of a namespace's live config.
	configBurst int
	configRate  rate.Limit
	// kinds are the processed kinds. Default kinds.All.
	kinds kinds.Table
}

// Run runs the control plane until ctx is done. It waits for missing CRDs, missing
// permissions and the API server. After the loss of the Lease, for example because the
// API server was unreachable, it starts again and waits for the Lease.
//
// It returns an error if another release is active.
func Run(ctx context.Context, cfg *rest.Config, o Options) error {
	other, err := newOtherRelease(cfg, o.Namespace)
	if err != nil {
		return err
	}
	for {
		if o.LeaderElection {
			if err := other.check(ctx); err != nil {
				return err
			}
		}
		mgr, err := NewManager(cfg, o)
		if err != nil {
			return err
		}
		if o.LeaderElection {
			if err := mgr.Add(other); err != nil {
				return err
			}
		}
		err = mgr.Start(ctx)
		if ctx.Err() != nil {
			if err != nil { // For example, a controller waits for an unreachable API server.
				mgr.GetLogger().Info("some controllers did not stop within the shutdown timeout", "error", err)
			}
			return nil
		}
		select {
		case <-mgr.Elected():
		default:
			return err
		}
		mgr.GetLogger().Error(err, "the controllers stopped; starting them again")
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return nil
		}
	}
}

// NewManager returns the control plane for Run. The kubebuilder markers on the
// reconcilers list the permissions that it needs.
func NewManager(cfg *rest.Config, o Options) (manager.Manager, error) {
	if o.Namespace == "" {
		return nil, errors.New("controllers: Options.Namespace is empty; name the release's namespace")
	}
	selector, err := labels.Parse(o.DispatcherSelector)
	if err != nil {
		return nil, fmt.Errorf("dispatcher selector %q: %w", o.DispatcherSelector, err)
	}
	if o.Pods == nil && (selector.Empty() || o.DispatcherAdminPort < 1 || o.DispatcherAdminPort > 65535) {
		return nil, errors.New("controllers: set Options.DispatcherSelector to the dispatchers' labels and Options.DispatcherAdminPort to their admin port")
	}
	o.PollInterval = cmp.Or(o.PollInterval, time.Second)
	o.leaseDuration = cmp.Or(o.leaseDuration, 30*time.Second)
	o.numbersInterval = cmp.Or(o.numbersInterval, 30*time.Second)
	o.tombstoneGrace = cmp.Or(o.tombstoneGrace, compile.TombstoneGrace)
	o.followInterval = cmp.Or(o.followInterval, 10*time.Second)
	o.backlogInterval = cmp.Or(o.backlogInterval, 10*time.Second)
	o.servedInterval = cmp.Or(o.servedInterval, 10*time.Second)
	o.confirmGrace = cmp.Or(o.confirmGrace, 2*time.Second)
	o.limit = cmp.Or(o.limit, compile.DefaultLimit)
	o.configBurst, o.configRate = cmp.Or(o.configBurst, configBurst), cmp.Or(o.configRate, configsPerSecond)
	renewDeadline, retryPeriod := o.leaseDuration*2/3, o.leaseDuration/6
	gracefulShutdown := 10 * time.Second // Every reconciliation can be interrupted without loss.
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.kinds == nil {
		o.kinds = kinds.All
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), v1beta1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	for _, k := range o.kinds {
		scheme.AddKnownTypes(v1beta1.GroupVersion, k.New(), k.NewList())
	}
	cfg = rest.CopyConfig(cfg)
	if cfg.QPS == 0 {
		cfg.QPS = -1 // Priority and fairness of the API server apply; a client-side limit would only delay large namespaces.
	}
	yes := true
	mgr, err := manager.New(cfg, manager.Options{
		Scheme:         scheme,
		MapperProvider: newMapper,
		Cache: cache.Options{
			DefaultTransform: cache.TransformStripManagedFields(),
			ByObject: map[client.Object]cache.ByObject{
				&corev1.Secret{}:    {Transform: stripSecret(o.Namespace)},
				&corev1.ConfigMap{}: {Transform: stripSecret(o.Namespace)},
				&corev1.Pod{}:       {Namespaces: map[string]cache.Config{o.Namespace: {LabelSelector: selector}}},
			},
		},
		LeaderElection:                o.LeaderElection,
		LeaderElectionID:              leaseName,
		LeaderElectionNamespace:       o.Namespace,
		LeaderElectionReleaseOnCancel: true,
		LeaseDuration:                 &o.leaseDuration,
		RenewDeadline:                 &renewDeadline,
		RetryPeriod:                   &retryPeriod,
		GracefulShutdownTimeout:       &gracefulShutdown,
		Metrics:                       metricsOptions(o),
		HealthProbeBindAddress:        o.HealthProbeBindAddress,
		// EnableWarmup fills the caches of a replica that waits for the Lease.
		// SkipNameValidation allows several managers in one process; names are unique by
		// construction. The CacheSyncTimeout is a year, so that the controllers wait for
		// missing CRDs and permissions.
		Controller: config.Controller{EnableWarmup: &yes, SkipNameValidation: &yes, CacheSyncTimeout: 365 * 24 * time.Hour},
	})
	if err != nil {
		return nil, fmt.Errorf("create the controller manager: %w", err)
	}
	return mgr, setup(mgr, o)
}

// secretOwner returns the owner of the operator's Secrets.
func (o Options) secretOwner(mgr manager.Manager) secretOwner {
	return secretOwner{direct: mgr.GetAPIReader(), namespace: o.Namespace, statefulSet: o.DispatcherStatefulSet}
}

// mapper contains the built-in kinds that the operator reads, so that a manager can be
// created while the API server is unreachable.
type mapper struct {
	meta.RESTMapper
	core *meta.DefaultRESTMapper
}

func newMapper(cfg *rest.Config, client *http.Client) (meta.RESTMapper, error) {
	discovered, err := apiutil.NewDynamicRESTMapper(cfg, client)
	core := meta.NewDefaultRESTMapper(nil)
	for _, kind := range []schema.GroupVersionKind{
		corev1.SchemeGroupVersion.WithKind("Secret"), corev1.SchemeGroupVersion.WithKind("ConfigMap"), corev1.SchemeGroupVersion.WithKind("Pod"),
		appsv1.SchemeGroupVersion.WithKind("StatefulSet"),
	} {
		core.Add(kind, meta.RESTScopeNamespace)
	}
	core.Add(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"), meta.RESTScopeRoot)
	return mapper{discovered, core}, err
}

func (m mapper) RESTMapping(kind schema.GroupKind, versions ...string) (*meta.RESTMapping, error) {
	if mapping, err := m.core.RESTMapping(kind, versions...); err == nil {
		return mapping, nil
	}
	return m.RESTMapper.RESTMapping(kind, versions...)
}

func metricsOptions(o Options) metricsserver.Options {
	m := metricsserver.Options{BindAddress: o.MetricsBindAddress}
	if o.MetricsTLS != nil {
		m.SecureServing = true
		m.TLSOpts = []func(*tls.Config){func(c *tls.Config) {
			c.MinVersion, c.GetCertificate = o.MetricsTLS.MinVersion, o.MetricsTLS.GetCertificate
		}}
	}
	if o.MetricsGuard != nil {
		m.FilterProvider = func(*rest.Config, *http.Client) (metricsserver.Filter, error) {
			return func(_ logr.Logger, next http.Handler) (http.Handler, error) { return o.MetricsGuard(next), nil }, nil
		}
	}
	return m
}

func setup(mgr manager.Manager, o Options) error {
	scheme, transport := "http", plainTransport()
	if o.DispatcherTokenFile != "" {
		certificate := newAdminCertificate(mgr.GetClient(), o.secretOwner(mgr), o.Now)
		if err := mgr.Add(certificate); err != nil {
			return fmt.Errorf("set up the admin certificate: %w", err)
		}
		scheme, transport = "https", certificate.transport(o.DispatcherTokenFile)
	}
	if o.Pods == nil {
		o.Pods = clusterPods{reader: mgr.GetCache(), namespace: o.Namespace, scheme: scheme, port: o.DispatcherAdminPort}
	}
	verdicts := newVerdictCache()
	statuses := &trigger{}
	changes := &reportChanges{byNamespace: map[string]uint64{}}
	reports := newProber(o.Pods, o.PollInterval, transport, func(change reportChange) {
		changes.add(change)
		namespaces := change.namespaces
		if change.all || change.pods {
			namespaces = verdicts.namespaces()
		}
		for _, namespace := range namespaces {
			statuses.fireAfter(namespace, reportsWait)
		}
		for _, namespace := range change.numbers {
			statuses.fireAfter(namespace, numbersWait)
		}
	}, silentPodEvents(mgr.GetEventRecorder(eventSource)))
	served := &servedKinds{direct: mgr.GetAPIReader(), kinds: o.kinds, interval: o.servedInterval}
	reports.after, reports.awaitsRemoved = cmp.Or(o.downAfter, downAfter), true
	if err := setupConfig(mgr, o, verdicts, statuses, reports.reports, served); err != nil {
		return fmt.Errorf("set up the config controller: %w", err)
	}
	if err := setupStatus(mgr, o, verdicts, reports, changes, statuses); err != nil {
		return fmt.Errorf("set up the status controller: %w", err)
	}
	if err := mgr.Add(reports); err != nil {
		return fmt.Errorf("set up the prober: %w", err)
	}
	if err := mgr.Add(served); err != nil {
		return fmt.Errorf("set up the check of the kinds: %w", err)
	}
	if err := mgr.Add(&backlogKeeper{client: mgr.GetClient(), direct: mgr.GetAPIReader(), release: o.Namespace, owner: o.secretOwner(mgr),
		pods: o.Pods, interval: o.backlogInterval, reports: reports, events: mgr.GetEventRecorder(eventSource), ledgers: map[string]*ledgers{},
		announced: map[string]bool{}}); err != nil {
		return fmt.Errorf("set up the record of backlogs: %w", err)
	}
	if err := mgr.Add(&shareKeeper{client: mgr.GetClient(), direct: mgr.GetAPIReader(), release: o.Namespace, owner: o.secretOwner(mgr),
		pods: o.Pods, interval: o.PollInterval, reports: reports, now: o.Now}); err != nil {
		return fmt.Errorf("set up the shares of limits: %w", err)
	}
	return errors.Join(
		mgr.AddHealthzCheck("ping", healthz.Ping),
		mgr.AddReadyzCheck("kinds", served.check),
		mgr.AddReadyzCheck("caches", func(r *http.Request) error {
			ctx, cancel := context.WithTimeout(r.Context(), time.Second)
			defer cancel()
			for _, k := range o.kinds {
				if err := mgr.GetCache().List(ctx, k.NewList(), client.Limit(1), client.UnsafeDisableDeepCopy); meta.IsNoMatchError(err) {
					return fmt.Errorf("%w: install the CustomResourceDefinitions", err)
				} else if err != nil {
					return fmt.Errorf("the caches are not filled yet: %w", err)
				}
			}
			if !mgr.GetCache().WaitForCacheSync(ctx) {
				return errors.New("the caches are not filled yet; check that the operator may list and watch Secrets")
			}
			return nil
		}),
	)
}

const (
	// workers is the number of namespaces that a controller reconciles concurrently.
	workers = 4
	// maxBackoff bounds the backoff of a namespace whose reconciliation failed.
	maxBackoff = 30 * time.Second
	// reconcileTimeout bounds one reconciliation, so that a request that hangs does
	// not block a worker.
	reconcileTimeout = time.Minute
)

func controllerOptions(mgr manager.Manager, name string) controller.Options {
	return controller.Options{
		MaxConcurrentReconciles: workers,
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](50*time.Millisecond, maxBackoff),
		ReconciliationTimeout:   reconcileTimeout,
		LogConstructor:          logConstructor(mgr, name),
	}
}

// logConstructor logs the namespace of a request as the attribute namespace.
// controller-runtime would log it as the attribute name.
func logConstructor(mgr manager.Manager, controller string) func(*reconcile.Request) logr.Logger {
	base := mgr.GetLogger().WithValues("controller", controller)
	return func(request *reconcile.Request) logr.Logger {
		if request == nil || request.Name == "" {
			return base
		}
		return base.WithValues("namespace", request.Name)
	}
}
