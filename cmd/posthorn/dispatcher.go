package main

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/cmd/internal/logs"
	"github.com/posthorn/posthorn/cmd/internal/otlp"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/admin/kubeauth"
	"github.com/posthorn/posthorn/dispatcher/configsource"
)

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
		Example: `  posthorn dispatcher --system-namespace posthorn-system --egress-allow 10.20.0.0/16
  posthorn dispatcher --system-namespace posthorn-system --kubeconfig ~/.kube/config --data ./data`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logging.Logger(cmd.ErrOrStderr())
			if err != nil {
				return command.UsageError(err)
			}
			bridgeLogs(log.Handler())
			if namespace == "" {
				return command.Usagef("the release's namespace is missing; set --system-namespace or POD_NAMESPACE")
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
			data.options.Logger, data.options.Namespace = log, namespace
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
			if data.options.AudienceOwner == "" && !data.isReplicated() {
				data.options.AudienceOwner = audienceOwner(data.options.Pod, namespace, peers, data.options.Listen)
			}
			tracer, stopTracer, err := otlp.NewTracer(cmd.Context(), command.BuildVersion(), data.options.Pod, log)
			if err != nil {
				return command.UsageError(err)
			}
			defer stopTracer()
			data.options.Tracer, data.options.Version = tracer, command.BuildVersion()
			others := []func(context.Context) error{watchCertificate}
			if data.options.AdminTLS != nil {
				others = append(others, func(ctx context.Context) error { return certificate.Watch(ctx, client, namespace, log) })
			}
			watch := func(ctx context.Context, to liveconfig.Sink) error {
				return configsource.Watch(ctx, client, namespace, to, log)
			}
			return data.serve(cmd.Context(), log, service{watch: watch, others: others, lockWait: lockWait})
		},
	}
	f := cmd.Flags()
	f.StringVar(&namespace, "system-namespace", os.Getenv("POD_NAMESPACE"), "namespace of the live-config Secrets (default: the environment variable POD_NAMESPACE)")
	f.StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file; default: the pod's service account, or KUBECONFIG")
	f.StringVar(&data.options.Pod, "pod-name", os.Getenv("POD_NAME"), "name of this pod in reports (default: the environment variable POD_NAME)")
	f.StringVar(&adminAuth, "admin-auth", "kubernetes", "access to the admin listener: kubernetes (TLS, authorized by the API server) or none (no authentication)")
	f.StringVar(&peers, "peer-service", "", "headless Service of the pods (default: the one in /etc/hosts)")
	f.StringVar(&data.options.AudienceOwner, "audience-owner", "", "URL of the pod that stores the audiences' members (default: pod 0 of this StatefulSet)")
	f.StringVar(&data.options.ProbeListen, "probe-listen", "", "address of /healthz and /readyz alone, for the kubelet's probes; they are also at --listen")
	f.DurationVar(&data.options.ShutdownDelay, "shutdown-delay", 0, "how long calls are accepted after the stop signal, until the Service has removed the pod")
	data.register(cmd, "/var/lib/posthorn", ":8080", ":8081")
	data.log.registerSlots(cmd)
	logging.Register(cmd)
	return cmd
}
