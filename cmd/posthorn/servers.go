package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/cmd/internal/logs"
	"github.com/posthorn/posthorn/cmd/internal/otlp"
	"github.com/posthorn/posthorn/controllers"
	"github.com/posthorn/posthorn/controllers/standalone"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/admin/kubeauth"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/configsource"
	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/ingest"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// dataFlags are the flags of every process that contains a dispatcher.
type dataFlags struct {
	options           dispatcher.Options
	egress, proxies   []string
	certFile, keyFile string
	sourceQuota       string
	memory            string
}

func (d *dataFlags) register(cmd *cobra.Command, data, listen, admin string) {
	f := cmd.Flags()
	f.StringVar(&d.options.DataDir, "data", data, "data directory; it holds all accepted messages")
	f.StringVar(&d.options.Listen, "listen", listen, "address of the tracking API")
	f.StringVar(&d.options.TLSListen, "tls-listen", "", "address of the tracking API over TLS, in addition to --listen")
	f.StringVar(&d.certFile, "tls-cert", "", "PEM file of the certificate (and its chain) for --tls-listen; reloaded when it changes")
	f.StringVar(&d.keyFile, "tls-key", "", "PEM file of the certificate's key")
	f.StringVar(&d.options.AdminListen, "admin-listen", admin, "address of the admin API, reports and metrics")
	f.StringSliceVar(&d.egress, "egress-allow", nil, "non-public addresses that deliveries may use: CIDRs, addresses or host names (also *.example); !CIDR denies. Metadata addresses must be named exactly")
	f.StringSliceVar(&d.proxies, "trusted-proxies", nil, "trusted proxies, whose X-Forwarded-For is used: CIDRs or addresses")
	f.DurationVar(&d.options.DrainTimeout, "drain-timeout", 10*time.Second, "how long shutdown waits for calls and deliveries in progress")
	f.DurationVar(&d.options.OrphanGrace, "orphan-grace", 10*time.Minute, "how long messages of a deleted destination are kept, and calls with a removed write key are answered 503 instead of 401")
	f.DurationVar(&d.options.Queue.DuplicateWindow, "duplicate-window", 10*time.Minute, "how long messageIds are stored to drop duplicate calls, up to 24h")
	f.StringVar(&d.memory, "memory", strconv.Itoa(dispatcher.DefaultMemory/1_000_000)+"M", "limit of the resident memory, for example 400M or 1Gi; all buffer sizes derive from it. A lower memory limit of the container takes precedence")
	f.BoolVar(&d.options.Repair, "repair", false, "repair a damaged store at the start, like posthorn repair --apply; without it a dispatcher with a damaged store does not start")
	f.BoolVar(&d.options.Debug, "debug", false, "add /debug to the admin listener: lanes, live config without secrets, profiles")
	f.StringVar(&d.sourceQuota, "source-quota", "auto", "bytes of undelivered calls that one Source may keep on disk; above it the Source's calls are answered 503. auto: half of the disk space below the high-water mark of 85 %; none or 0: only the high-water mark")
}

// parse validates the flags and converts them to options.
func (d *dataFlags) parse() (err error) {
	if d.options.Egress, err = egress.ParsePolicy(d.egress); err != nil {
		return command.Usagef("--egress-allow: %v", err)
	}
	if d.options.TrustedProxies, err = ingest.ParseProxies(d.proxies); err != nil {
		return command.Usagef("--trusted-proxies: %v", err)
	}
	for _, l := range []struct{ flag, address string }{{"--listen", d.options.Listen}, {"--tls-listen", d.options.TLSListen}, {"--admin-listen", d.options.AdminListen}} {
		if err := checkListen(l.address); err != nil {
			return command.Usagef("%s %q: %v", l.flag, l.address, err)
		}
	}
	for _, t := range []struct {
		flag  string
		value time.Duration
		most  time.Duration
	}{
		{"--drain-timeout", d.options.DrainTimeout, time.Hour},
		{"--shutdown-delay", d.options.ShutdownDelay, time.Hour},
		{"--orphan-grace", d.options.OrphanGrace, 30 * 24 * time.Hour},
		{"--duplicate-window", d.options.Queue.DuplicateWindow, pebblestore.MaxDuplicateWindow},
	} {
		if t.value < 0 || t.value > t.most {
			return command.Usagef("%s %v: use 0 to %v", t.flag, t.value, t.most)
		}
	}
	switch d.sourceQuota {
	case "auto":
	case "none", "0":
		d.options.Queue.MaxBytesPerSource = pebblestore.NoQuota
	default:
		bytes, err := strconv.ParseInt(d.sourceQuota, 10, 64)
		if err != nil || bytes < 0 {
			return command.Usagef("--source-quota %q: use a whole number of bytes, auto for half of the disk space, or none", d.sourceQuota)
		}
		d.options.Queue.MaxBytesPerSource = bytes
	}
	if d.options.Memory, err = memoryBound(d.memory, memlimit.FromCgroup); err != nil {
		return err
	}
	return nil
}

// memoryBound returns the limit that --memory sets, and at most nine tenths of the container's
// limit: the rest is for the kernel's socket and file buffers.
func memoryBound(flag string, containerLimit func() (uint64, error)) (int64, error) {
	quantity, err := resource.ParseQuantity(flag)
	if err != nil {
		return 0, command.Usagef("--memory %q: use a size such as 400M or 1Gi", flag)
	}
	bound := quantity.Value()
	if bound < dispatcher.MinMemory {
		return 0, command.Usagef("--memory %s: too small; use %dM or more", flag, dispatcher.MinMemory/1_000_000)
	}
	// An unreadable limit counts as no limit.
	if limit, err := containerLimit(); err == nil && limit/10*9 < uint64(bound) {
		if bound = int64(limit / 10 * 9); bound < dispatcher.MinMemory {
			return 0, fmt.Errorf("the container's memory limit of %d bytes is too small; set it to %dMi or more", limit, (dispatcher.MinMemory*10/9)>>20+1)
		}
	}
	return bound, nil
}

// checkListen checks that an address is [HOST]:PORT or empty.
func checkListen(address string) error {
	if address == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(address)
	if n, bad := strconv.Atoi(port); err != nil || bad != nil || n < 0 || n > 65535 {
		return errors.New("use HOST:PORT or :PORT, for example :8080")
	}
	return nil
}

// tls reads the certificate of the tracking API; run reloads it when its files change.
func (d *dataFlags) tls() (run func(context.Context) error, err error) {
	if d.options.TLSListen == "" && d.certFile == "" && d.keyFile == "" {
		return func(context.Context) error { return nil }, nil
	}
	if d.options.TLSListen == "" || d.certFile == "" || d.keyFile == "" {
		return nil, command.Usagef("set --tls-listen, --tls-cert and --tls-key together")
	}
	certificate, err := certwatcher.New(d.certFile, d.keyFile)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	d.options.TLS = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: certificate.GetCertificate}
	return certificate.Start, nil
}

func newRun() *cobra.Command {
	var logging logs.Flags
	var data dataFlags
	var manifests string
	cmd := &cobra.Command{
		Use:   "run --manifests DIR",
		Short: "Run Posthorn from a folder of manifests, without a cluster",
		Long: `Runs operator and dispatcher in one process from a folder of manifests: Source,
WebhookDestination, Audience, DeletionRequest and Secret, in YAML or JSON, several
documents per file. They are validated and compiled as in a cluster, and reloaded
when a file changes.

Deliveries to loopback and private addresses are denied unless --egress-allow
names them. 'posthorn get' shows the status.`,
		Example: `  posthorn run --manifests ./webhooks
  posthorn run --manifests ./webhooks --data /var/lib/posthorn --listen :8080 --egress-allow 10.0.0.0/8`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logging.Logger(cmd.ErrOrStderr())
			if err != nil {
				return command.UsageError(err)
			}
			if manifests == "" {
				return command.Usagef("the folder of manifests is missing; set --manifests DIR")
			}
			if info, err := os.Stat(manifests); err != nil || !info.IsDir() {
				return command.Usagef("--manifests %q is not a folder", manifests)
			}
			if err := data.parse(); err != nil {
				return err
			}
			watchCertificate, err := data.tls()
			if err != nil {
				return err
			}
			data.options.Logger, data.options.Pod = log, "standalone"
			// The two depend on each other: the API of the resources shows the dispatcher's
			// reports, and the dispatcher's admin listener serves that API.
			resources := &lateHandler{}
			data.options.Extra = resources
			tracer, stopTracer, err := otlp.NewTracer(cmd.Context(), command.BuildVersion(), data.options.Pod, log)
			if err != nil {
				return command.UsageError(err)
			}
			defer stopTracer()
			data.options.Tracer = tracer
			d, err := dispatcher.New(data.options)
			if err != nil {
				return err
			}
			control := standalone.New(standalone.Options{Dir: manifests, StateFile: filepath.Join(data.options.DataDir, "manifests.json"), CheckHost: data.options.Egress.CheckHost, Logger: log, Sink: d, Report: d.Report})
			resources.set(control.Handler())
			log.Info("accepting calls", "listen", d.Addr().String(), "admin", d.AdminAddr().String(), "manifests", manifests, "data", data.options.DataDir, "memoryLimit", data.options.Memory)
			group, ctx := errgroup.WithContext(cmd.Context())
			group.Go(func() error { return d.Run(ctx) })
			group.Go(func() error { return control.Run(ctx) })
			group.Go(func() error { return watchCertificate(ctx) })
			return group.Wait()
		},
	}
	cmd.Flags().StringVar(&manifests, "manifests", "", "folder of the manifests; required")
	data.register(cmd, defaultDataDir(), "127.0.0.1:8080", "127.0.0.1:8081")
	logging.Register(cmd)
	return cmd
}

// defaultDataDir is the data directory of the current user.
func defaultDataDir() string {
	if dir := os.Getenv("XDG_DATA_HOME"); dir != "" {
		return filepath.Join(dir, "posthorn")
	}
	if home, err := os.UserHomeDir(); err == nil {
		return filepath.Join(home, ".local", "share", "posthorn")
	}
	return "posthorn-data"
}

func newDispatcher() *cobra.Command {
	var logging logs.Flags
	var data dataFlags
	var namespace, kubeconfig, adminAuth, peers string
	cmd := &cobra.Command{
		Use:   "dispatcher",
		Short: "Run the dispatcher (data plane): receive, store and deliver calls",
		Long: `Receives, stores and delivers calls, as configured by the live-config Secrets of its
namespace. It reads nothing else of the cluster and works without the operator.
The chart runs it; see docs/install.md.`,
		Example: `  posthorn dispatcher --namespace posthorn-system --egress-allow 10.20.0.0/16
  posthorn dispatcher --namespace posthorn-system --kubeconfig ~/.kube/config --data ./data`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logging.Logger(cmd.ErrOrStderr())
			if err != nil {
				return command.UsageError(err)
			}
			bridgeLogs(log.Handler())
			if namespace == "" {
				return command.Usagef("the release's namespace is missing; set --namespace or POD_NAMESPACE")
			}
			if err := data.parse(); err != nil {
				return err
			}
			watchCertificate, err := data.tls()
			if err != nil {
				return err
			}
			client, err := kubeClient(kubeconfig)
			if err != nil {
				return err
			}
			data.options.Logger = log
			var certificate kubeauth.Certificate
			switch adminAuth {
			case "kubernetes":
				data.options.AdminTLS, data.options.AdminGuard = certificate.Config(), kubeauth.New(client, log).Wrap
			case "none": // The dispatcher warns if the address is reachable from the network.
			default:
				return command.Usagef("--admin-auth %q: use kubernetes or none", adminAuth)
			}
			logStart(log, data.options.Memory)
			if data.options.Pod == "" {
				data.options.Pod, _ = os.Hostname()
			}
			if peers == "" {
				hosts, _ := os.ReadFile("/etc/hosts")
				peers = peerService(string(hosts), data.options.Pod, namespace)
			}
			if data.options.AudienceOwner == "" {
				data.options.AudienceOwner = audienceOwner(data.options.Pod, namespace, peers, data.options.Listen)
			}
			tracer, stopTracer, err := otlp.NewTracer(cmd.Context(), command.BuildVersion(), data.options.Pod, log)
			if err != nil {
				return command.UsageError(err)
			}
			defer stopTracer()
			data.options.Tracer = tracer
			d, err := dispatcher.New(data.options)
			if err != nil {
				return err
			}
			group, ctx := errgroup.WithContext(cmd.Context())
			group.Go(func() error { return d.Run(ctx) })
			group.Go(func() error { return configsource.Watch(ctx, client, namespace, d, log) })
			group.Go(func() error { return watchCertificate(ctx) })
			if data.options.AdminTLS != nil {
				group.Go(func() error { return certificate.Watch(ctx, client, namespace, log) })
			}
			return group.Wait()
		},
	}
	f := cmd.Flags()
	f.StringVar(&namespace, "namespace", os.Getenv("POD_NAMESPACE"), "namespace of the live-config Secrets (default: the environment variable POD_NAMESPACE)")
	f.StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file; default: the pod's service account, or KUBECONFIG")
	f.StringVar(&data.options.Pod, "pod-name", os.Getenv("POD_NAME"), "name of this pod in reports (default: the environment variable POD_NAME)")
	f.StringVar(&adminAuth, "admin-auth", "kubernetes", "access to the admin listener: kubernetes (TLS, authorized by the API server) or none (no authentication)")
	f.StringVar(&peers, "peer-service", "", "headless Service of the pods (default: the one in /etc/hosts)")
	f.StringVar(&data.options.AudienceOwner, "audience-owner", "", "URL of the pod that stores the audiences' members (default: pod 0 of this StatefulSet)")
	f.DurationVar(&data.options.ShutdownDelay, "shutdown-delay", 0, "how long calls are accepted after the stop signal, until the Service has removed the pod")
	data.register(cmd, "/var/lib/posthorn", ":8080", ":8081")
	logging.Register(cmd)
	return cmd
}

func newOperator() *cobra.Command {
	var logging logs.Flags
	var o controllers.Options
	var kubeconfig string
	var allow []string
	cmd := &cobra.Command{
		Use:   "operator",
		Short: "Run the operator (control plane): compile custom resources into live config and write their status",
		Long: `Watches Sources, WebhookDestinations, Audiences and the Secrets that they name in
all namespaces, compiles them into the live-config Secrets of the dispatchers, and
writes the dispatchers' reports into status. The chart runs it; see
docs/install.md.`,
		Example: `  posthorn operator --namespace posthorn-system --leader-elect --egress-allow 10.20.0.0/16`,
		Args:    command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logging.Logger(cmd.ErrOrStderr())
			if err != nil {
				return command.UsageError(err)
			}
			bridgeLogs(log.Handler())
			if o.Namespace == "" {
				return command.Usagef("the release's namespace is missing; set --namespace or POD_NAMESPACE")
			}
			policy, err := egress.ParsePolicy(allow)
			if err != nil {
				return command.Usagef("--egress-allow: %v", err)
			}
			if _, err := labels.Parse(o.DispatcherSelector); err != nil {
				return command.Usagef("--dispatcher-selector %q: %v", o.DispatcherSelector, err)
			}
			if o.DispatcherAdminPort < 1 || o.DispatcherAdminPort > 65535 {
				return command.Usagef("--dispatcher-admin-port %d: use 1 to 65535", o.DispatcherAdminPort)
			}
			o.CheckHost = policy.CheckHost
			config, err := restConfig(kubeconfig)
			if err != nil {
				return err
			}
			logStart(log, debug.SetMemoryLimit(-1))
			group, ctx := errgroup.WithContext(cmd.Context())
			if o.DispatcherTokenFile != "" && o.MetricsBindAddress != "0" {
				client, err := kubernetes.NewForConfig(config)
				if err != nil {
					return err
				}
				// The metrics are guarded like those of the dispatchers, with the same certificate.
				var certificate kubeauth.Certificate
				o.MetricsTLS, o.MetricsGuard = certificate.Config(), kubeauth.New(client, log).Wrap
				group.Go(func() error { return certificate.Watch(ctx, client, o.Namespace, log) })
			}
			group.Go(func() error { return controllers.Run(ctx, config, o) })
			return group.Wait()
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Namespace, "namespace", os.Getenv("POD_NAMESPACE"), "namespace of the release, with its dispatchers and live-config Secrets (default: the environment variable POD_NAMESPACE)")
	f.StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file; default: the pod's service account, or KUBECONFIG")
	f.StringVar(&o.DispatcherSelector, "dispatcher-selector", "app.kubernetes.io/name=posthorn,app.kubernetes.io/component=dispatcher", "label selector of the dispatcher pods")
	f.IntVar(&o.DispatcherAdminPort, "dispatcher-admin-port", 8081, "port of the dispatchers' reports")
	f.StringVar(&o.DispatcherTokenFile, "dispatcher-token-file", "/var/run/secrets/posthorn.dev/dispatcher/token", "file with a token of the audience "+adminapi.TokenAudience+"; empty: the dispatchers run with --admin-auth=none, and the operator's metrics need no authentication")
	f.StringSliceVar(&allow, "egress-allow", nil, "non-public addresses that deliveries may use; must equal the dispatchers' flag")
	f.BoolVar(&o.LeaderElection, "leader-elect", false, "elect a leader, so that one of several replicas is active")
	f.StringVar(&o.MetricsBindAddress, "metrics-bind-address", ":8080", "address of the metrics, protected like the dispatchers' metrics; 0 disables them")
	f.StringVar(&o.HealthProbeBindAddress, "health-probe-bind-address", ":8081", "address of /healthz and /readyz")
	logging.Register(cmd)
	return cmd
}

// logStart logs the start of a server and its memory limit in bytes.
func logStart(log *slog.Logger, memoryLimit int64) {
	log.Info("starting posthorn", "version", command.Version, "memoryLimit", memoryLimit)
}

// bridgeLogs sends the logs of the Kubernetes libraries to the handler. Only the first call has an
// effect, because the libraries may already use that handler.
func bridgeLogs(handler slog.Handler) {
	bridged.Do(func() {
		logger := logr.FromSlogHandler(handler)
		klog.SetLogger(logger)
		ctrl.SetLogger(logger)
	})
}

var bridged sync.Once

// lateHandler answers 503 until its handler is set.
type lateHandler struct{ handler atomic.Pointer[http.Handler] }

func (l *lateHandler) set(h http.Handler) { l.handler.Store(&h) }

func (l *lateHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if h := l.handler.Load(); h != nil {
		(*h).ServeHTTP(w, r)
		return
	}
	http.Error(w, "starting", http.StatusServiceUnavailable)
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("cannot connect to a cluster: %w; run in a pod, or set --kubeconfig or KUBECONFIG", err)
	}
	config.UserAgent = "posthorn/" + strings.ReplaceAll(command.BuildVersion(), " ", "-")
	return config, nil
}

func kubeClient(kubeconfig string) (kubernetes.Interface, error) {
	config, err := restConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}
