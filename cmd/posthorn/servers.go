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

	"github.com/posthorn/posthorn/controllers"
	"github.com/posthorn/posthorn/controllers/standalone"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/admin/kubeauth"
	"github.com/posthorn/posthorn/dispatcher/configsource"
	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/ingest"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// dataFlags are the flags of every process that delivers.
type dataFlags struct {
	options           dispatcher.Options
	egress, proxies   []string
	certFile, keyFile string
	sourceQuota       string
	memory            string
}

func (d *dataFlags) register(cmd *cobra.Command, data, listen, admin string) {
	f := cmd.Flags()
	f.StringVar(&d.options.DataDir, "data", data, "folder of the store; everything that was accepted lives here")
	f.StringVar(&d.options.Listen, "listen", listen, "address to take calls on")
	f.StringVar(&d.options.TLSListen, "tls-listen", "", "address to take calls on over TLS, besides --listen")
	f.StringVar(&d.certFile, "tls-cert", "", "PEM file of the certificate (and its chain) for --tls-listen; read again when it changes")
	f.StringVar(&d.keyFile, "tls-key", "", "PEM file of its key")
	f.StringVar(&d.options.AdminListen, "admin-listen", admin, "address of reports, metrics and the admin API")
	f.StringSliceVar(&d.egress, "egress-allow", nil, "addresses to deliver to besides public ones: CIDRs, addresses or host names (*.example too); !CIDR denies. Metadata addresses must be named exactly")
	f.StringSliceVar(&d.proxies, "trusted-proxies", nil, "proxies whose X-Forwarded-For is believed: CIDRs or addresses")
	f.DurationVar(&d.options.DrainTimeout, "drain-timeout", 10*time.Second, "how long calls and deliveries in progress may take to finish at shutdown")
	f.DurationVar(&d.options.OrphanGrace, "orphan-grace", 10*time.Minute, "how long the messages of a deleted destination are kept, and calls with a removed write key are answered 503")
	f.DurationVar(&d.options.Queue.DuplicateWindow, "duplicate-window", 10*time.Minute, "how long a messageId is remembered, up to 24h; a call that repeats it is dropped")
	f.StringVar(&d.memory, "memory", strconv.Itoa(dispatcher.DefaultMemory/1_000_000)+"M", "bound of the resident memory, for example 400M or 1Gi; all buffers follow from it. The limit of the container lowers it")
	f.BoolVar(&d.options.Repair, "repair", false, "when a file of the store is damaged, keep what can be read and start, as posthorn repair --apply does, instead of refusing to")
	f.BoolVar(&d.options.Debug, "debug", false, "add /debug to the admin listener: lanes, live config without secrets, profiles")
	f.StringVar(&d.sourceQuota, "source-quota", "auto", "bytes of undelivered calls that one Source may keep on disk; beyond that its calls are answered 503 until some are delivered. auto: half of the room below the high-water mark of 85 %; none or 0: no limit but that mark")
}

// parse checks the flags and makes the options of them.
func (d *dataFlags) parse() (err error) {
	if d.options.Egress, err = egress.ParsePolicy(d.egress); err != nil {
		return usagef("--egress-allow: %v", err)
	}
	if d.options.TrustedProxies, err = ingest.ParseProxies(d.proxies); err != nil {
		return usagef("--trusted-proxies: %v", err)
	}
	for _, l := range []struct{ flag, address string }{{"--listen", d.options.Listen}, {"--tls-listen", d.options.TLSListen}, {"--admin-listen", d.options.AdminListen}} {
		if err := checkListen(l.address); err != nil {
			return usagef("%s %q: %v", l.flag, l.address, err)
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
			return usagef("%s %v: use 0 to %v", t.flag, t.value, t.most)
		}
	}
	switch d.sourceQuota {
	case "auto":
	case "none", "0":
		d.options.Queue.MaxBytesPerSource = pebblestore.NoQuota
	default:
		bytes, err := strconv.ParseInt(d.sourceQuota, 10, 64)
		if err != nil || bytes < 0 {
			return usagef("--source-quota %q: use a whole number of bytes, auto for half of the room on the disk, or none", d.sourceQuota)
		}
		d.options.Queue.MaxBytesPerSource = bytes
	}
	if d.options.Memory, err = memoryBound(d.memory, memlimit.FromCgroup); err != nil {
		return err
	}
	return nil
}

// memoryBound returns the bytes that --memory allows, at most nine tenths of the
// container's limit: the rest is the kernel's, for sockets and files.
func memoryBound(flag string, containerLimit func() (uint64, error)) (int64, error) {
	quantity, err := resource.ParseQuantity(flag)
	if err != nil {
		return 0, usagef("--memory %q: use a size such as 400M or 1Gi", flag)
	}
	bound := quantity.Value()
	if bound < dispatcher.MinMemory {
		return 0, usagef("--memory %s: too small; use %dM or more", flag, dispatcher.MinMemory/1_000_000)
	}
	// A limit that cannot be read is none.
	if limit, err := containerLimit(); err == nil && limit/10*9 < uint64(bound) {
		if bound = int64(limit / 10 * 9); bound < dispatcher.MinMemory {
			return 0, fmt.Errorf("the container's memory limit of %d bytes is too small; set it to %dMi or more", limit, (dispatcher.MinMemory*10/9)>>20+1)
		}
	}
	return bound, nil
}

// checkListen holds an address to [HOST]:PORT; empty is fine.
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

// tls reads the certificate for calls; run keeps it as its files are.
func (d *dataFlags) tls() (run func(context.Context) error, err error) {
	if d.options.TLSListen == "" && d.certFile == "" && d.keyFile == "" {
		return func(context.Context) error { return nil }, nil
	}
	if d.options.TLSListen == "" || d.certFile == "" || d.keyFile == "" {
		return nil, usagef("--tls-listen, --tls-cert and --tls-key belong together")
	}
	certificate, err := certwatcher.New(d.certFile, d.keyFile)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	d.options.TLS = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: certificate.GetCertificate}
	return certificate.Start, nil
}

func newRun() *cobra.Command {
	var logs logFlags
	var data dataFlags
	var manifests string
	cmd := &cobra.Command{
		Use:   "run --manifests DIR",
		Short: "Run Posthorn from a folder of manifests, without a cluster",
		Long: `Runs operator and dispatcher in one process from a folder of manifests: Source,
WebhookDestination, Audience, DeletionRequest and Secret, in YAML or JSON, several
documents a file. They are checked and compiled as in a cluster, and taken up again
when a file changes.

Deliveries to loopback and private addresses are denied unless --egress-allow
names them. Status is read with 'posthorn get'.`,
		Example: `  posthorn run --manifests ./webhooks
  posthorn run --manifests ./webhooks --data /var/lib/posthorn --listen :8080 --egress-allow 10.0.0.0/8`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if manifests == "" {
				return usagef("the folder of manifests is missing; set --manifests DIR")
			}
			if info, err := os.Stat(manifests); err != nil || !info.IsDir() {
				return usagef("--manifests %q is not a folder", manifests)
			}
			if err := data.parse(); err != nil {
				return err
			}
			watchCertificate, err := data.tls()
			if err != nil {
				return err
			}
			data.options.Logger, data.options.Pod = log, "standalone"
			// Two links of a ring: the resources show the dispatcher's reports,
			// and the dispatcher's admin listener shows the resources.
			resources := &lateHandler{}
			data.options.Extra = resources
			tracer, stopTracer, err := newTracer(cmd.Context(), data.options.Pod, log)
			if err != nil {
				return err
			}
			defer stopTracer()
			data.options.Tracer = tracer
			d, err := dispatcher.New(data.options)
			if err != nil {
				return err
			}
			control := standalone.New(standalone.Options{Dir: manifests, StateFile: filepath.Join(data.options.DataDir, "manifests.json"), CheckHost: data.options.Egress.CheckHost, Logger: log, Sink: d, Report: d.Report})
			resources.set(control.Handler())
			log.Info("posthorn takes calls", "listen", d.Addr().String(), "admin", d.AdminAddr().String(), "manifests", manifests, "data", data.options.DataDir, "memoryLimit", data.options.Memory)
			group, ctx := errgroup.WithContext(cmd.Context())
			group.Go(func() error { return d.Run(ctx) })
			group.Go(func() error { return control.Run(ctx) })
			group.Go(func() error { return watchCertificate(ctx) })
			return group.Wait()
		},
	}
	cmd.Flags().StringVar(&manifests, "manifests", "", "folder of the manifests; required")
	data.register(cmd, defaultDataDir(), "127.0.0.1:8080", "127.0.0.1:8081")
	logs.register(cmd)
	return cmd
}

// defaultDataDir is where a user's data belongs when nothing else was said.
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
	var logs logFlags
	var data dataFlags
	var namespace, kubeconfig, adminAuth, peers string
	cmd := &cobra.Command{
		Use:   "dispatcher",
		Short: "Take, store and deliver calls (a pod of the data plane)",
		Long: `Takes calls, stores and delivers them, as the live-config Secrets of its namespace
say. It reads nothing else of the cluster and goes on without the operator.
The chart runs it; see docs/install.md.`,
		Example: `  posthorn dispatcher --namespace posthorn-system --egress-allow 10.20.0.0/16
  posthorn dispatcher --namespace posthorn-system --kubeconfig ~/.kube/config --data ./data`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			bridgeLogs(log.Handler())
			if namespace == "" {
				return usagef("the release's namespace is missing; set --namespace or POD_NAMESPACE")
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
			case "none": // The dispatcher warns when the address is open to the network.
			default:
				return usagef("--admin-auth %q: use kubernetes or none", adminAuth)
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
			tracer, stopTracer, err := newTracer(cmd.Context(), data.options.Pod, log)
			if err != nil {
				return err
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
	f.StringVar(&namespace, "namespace", os.Getenv("POD_NAMESPACE"), "namespace of the live-config Secrets (default: the environment's POD_NAMESPACE)")
	f.StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file; default: the pod's service account, or KUBECONFIG")
	f.StringVar(&data.options.Pod, "pod-name", os.Getenv("POD_NAME"), "name of this pod in reports (default: the environment's POD_NAME)")
	f.StringVar(&adminAuth, "admin-auth", "kubernetes", "who may use the admin listener: those that the API server allows, over TLS (kubernetes), or everybody (none)")
	f.StringVar(&peers, "peer-service", "", "headless Service that gives the pods names (default: the one in /etc/hosts)")
	f.StringVar(&data.options.AudienceOwner, "audience-owner", "", "URL of the pod that keeps the members of audiences (default: pod 0 of this StatefulSet)")
	f.DurationVar(&data.options.ShutdownDelay, "shutdown-delay", 0, "how long to take calls after the order to stop, so that the Service takes the pod out first")
	data.register(cmd, "/var/lib/posthorn", ":8080", ":8081")
	logs.register(cmd)
	return cmd
}

func newOperator() *cobra.Command {
	var logs logFlags
	var o controllers.Options
	var kubeconfig string
	var allow []string
	cmd := &cobra.Command{
		Use:   "operator",
		Short: "Compile custom resources into live config and write their status (the control plane)",
		Long: `Watches Sources, WebhookDestinations and the Secrets that they name in all
namespaces, compiles them into the live-config Secrets that the dispatchers run,
and writes what the dispatchers report into status. The chart runs it; see
docs/install.md.`,
		Example: `  posthorn operator --namespace posthorn-system --leader-elect --egress-allow 10.20.0.0/16`,
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			bridgeLogs(log.Handler())
			if o.Namespace == "" {
				return usagef("the release's namespace is missing; set --namespace or POD_NAMESPACE")
			}
			policy, err := egress.ParsePolicy(allow)
			if err != nil {
				return usagef("--egress-allow: %v", err)
			}
			if _, err := labels.Parse(o.DispatcherSelector); err != nil {
				return usagef("--dispatcher-selector %q: %v", o.DispatcherSelector, err)
			}
			if o.DispatcherAdminPort < 1 || o.DispatcherAdminPort > 65535 {
				return usagef("--dispatcher-admin-port %d: use 1 to 65535", o.DispatcherAdminPort)
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
				// As the dispatchers guard theirs, with the same certificate.
				var certificate kubeauth.Certificate
				o.MetricsTLS, o.MetricsGuard = certificate.Config(), kubeauth.New(client, log).Wrap
				group.Go(func() error { return certificate.Watch(ctx, client, o.Namespace, log) })
			}
			group.Go(func() error { return controllers.Run(ctx, config, o) })
			return group.Wait()
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Namespace, "namespace", os.Getenv("POD_NAMESPACE"), "namespace of the release: its dispatchers and live-config Secrets (default: the environment's POD_NAMESPACE)")
	f.StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file; default: the pod's service account, or KUBECONFIG")
	f.StringVar(&o.DispatcherSelector, "dispatcher-selector", "app.kubernetes.io/name=posthorn,app.kubernetes.io/component=dispatcher", "label selector of the dispatcher pods")
	f.IntVar(&o.DispatcherAdminPort, "dispatcher-admin-port", 8081, "port of the dispatchers' reports")
	f.StringVar(&o.DispatcherTokenFile, "dispatcher-token-file", "/var/run/secrets/posthorn.dev/dispatcher/token", "file with a token of the audience "+liveconfig.AdminAudience+"; empty: the dispatchers run with --admin-auth=none, and the metrics are open, too")
	f.StringSliceVar(&allow, "egress-allow", nil, "what the dispatchers may deliver to besides public addresses; must be as theirs")
	f.BoolVar(&o.LeaderElection, "leader-elect", false, "let one of several replicas work at a time")
	f.StringVar(&o.MetricsBindAddress, "metrics-bind-address", ":8080", "address of the metrics, guarded as the dispatchers' are; 0 switches them off")
	f.StringVar(&o.HealthProbeBindAddress, "health-probe-bind-address", ":8081", "address of /healthz and /readyz")
	logs.register(cmd)
	return cmd
}

// logStart logs the start of a server that keeps to memoryLimit bytes.
func logStart(log *slog.Logger, memoryLimit int64) {
	log.Info("posthorn starts", "version", version, "memoryLimit", memoryLimit)
}

// bridgeLogs sends what Kubernetes' libraries log to our handler: the first one of
// the process, for they may be at work when there is another.
func bridgeLogs(handler slog.Handler) {
	bridged.Do(func() {
		logger := logr.FromSlogHandler(handler)
		klog.SetLogger(logger)
		ctrl.SetLogger(logger)
	})
}

var bridged sync.Once

// lateHandler answers 503 until it is set.
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
		return nil, fmt.Errorf("no way to a cluster: %w; run in a pod, or set --kubeconfig or KUBECONFIG", err)
	}
	config.UserAgent = "posthorn/" + strings.ReplaceAll(buildVersion(), " ", "-")
	return config, nil
}

func kubeClient(kubeconfig string) (kubernetes.Interface, error) {
	config, err := restConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}
