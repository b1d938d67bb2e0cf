package main

import (
	"os"
	"runtime/debug"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/cmd/internal/logs"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers"
	"github.com/posthorn/posthorn/dispatcher/admin/kubeauth"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
)

// operatorHeapGrowth is the growth of the heap, in percent, at which the garbage collector runs.
const operatorHeapGrowth = 40

func newOperator() *cobra.Command {
	var logging logs.Flags
	var o controllers.Options
	var kubeconfig string
	var allow []string
	var ceilings ceilingFlags
	cmd := &cobra.Command{
		Use:   "operator",
		Short: "Run the operator (control plane): compile custom resources into live config and write their status",
		Long: `Watches Sources, WebhookDestinations, Audiences and the Secrets that they name in
all namespaces, compiles them into the live-config Secrets of the dispatchers, and
writes the dispatchers' reports into status. The chart runs it; see
docs/install.md.`,
		Example: `  posthorn operator --system-namespace posthorn-system --leader-elect --egress-allow 10.20.0.0/16`,
		Args:    command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logging.Logger(cmd.ErrOrStderr())
			if err != nil {
				return command.UsageError(err)
			}
			bridgeLogs(log.Handler())
			if o.Namespace == "" {
				return command.Usagef("the release's namespace is missing; set --system-namespace or POD_NAMESPACE")
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
			if o.Policy, err = ceilings.policy(policy); err != nil {
				return err
			}
			config, err := restConfig(kubeconfig)
			if err != nil {
				return err
			}
			// Most of the heap lives for long, the objects and the pods' reports, so a smaller growth costs
			// little CPU time. GOGC takes precedence.
			if os.Getenv("GOGC") == "" {
				debug.SetGCPercent(operatorHeapGrowth)
			}
			logStart(log, debug.SetMemoryLimit(-1))
			group, ctx := errgroup.WithContext(cmd.Context())
			if o.DispatcherTokenFile != "" && o.MetricsBindAddress != "0" {
				client, err := kubernetes.NewForConfig(config)
				if err != nil {
					return err
				}
				// The metrics are guarded like the dispatchers' metrics, with the same certificate.
				var certificate kubeauth.Certificate
				o.MetricsTLS, o.MetricsGuard = certificate.Config(), kubeauth.New(client, log).Wrap
				group.Go(func() error { return certificate.Watch(ctx, client, o.Namespace, log) })
			}
			group.Go(func() error { return controllers.Run(ctx, config, o) })
			return group.Wait()
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Namespace, "system-namespace", os.Getenv("POD_NAMESPACE"), "namespace of the release, with its dispatchers and live-config Secrets (default: the environment variable POD_NAMESPACE)")
	f.StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file; default: the pod's service account, or KUBECONFIG")
	f.StringVar(&o.DispatcherSelector, "dispatcher-selector", "app.kubernetes.io/name=posthorn,app.kubernetes.io/component=dispatcher", "label selector of the dispatcher pods")
	f.StringVar(&o.DispatcherStatefulSet, "dispatcher-statefulset", "", "StatefulSet of the dispatchers, which owns the Secrets that the operator writes: Kubernetes deletes them with it; empty: they remain")
	f.IntVar(&o.DispatcherAdminPort, "dispatcher-admin-port", 8081, "port of the dispatchers' reports")
	f.StringVar(&o.DispatcherTokenFile, "dispatcher-token-file", "/var/run/secrets/posthorn.dev/dispatcher/token", "file with a token of the audience "+adminapi.TokenAudience+"; empty: the dispatchers run with --admin-auth=none, and the operator's metrics need no authentication")
	f.StringSliceVar(&allow, "egress-allow", nil, "non-public addresses that deliveries may use; must equal the dispatchers' flag")
	ceilings.register(cmd)
	f.BoolVar(&o.LeaderElection, "leader-elect", false, "elect a leader, so that one of several replicas is active")
	f.StringVar(&o.MetricsBindAddress, "admin-listen", ":8080", "address of the metrics, protected like the dispatchers' admin API; 0 disables them")
	f.StringVar(&o.HealthProbeBindAddress, "probe-listen", ":8081", "address of /healthz and /readyz, for the kubelet's probes; 0 disables them")
	logging.Register(cmd)
	return cmd
}
