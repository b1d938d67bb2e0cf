package main

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/cmd/internal/logs"
	"github.com/posthorn/posthorn/cmd/internal/otlp"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/page"
	"github.com/posthorn/posthorn/controllers/standalone"
	"github.com/posthorn/posthorn/dispatcher"
)

func newRun() *cobra.Command {
	var logging logs.Flags
	var data dataFlags
	var ceilings ceilingFlags
	var manifests string
	var secrets []string
	cmd := &cobra.Command{
		Use:   "run -f DIR",
		Short: "Run Posthorn from a folder of manifests, without a cluster",
		Long: `Runs operator and dispatcher in one process from a folder of manifests: Source,
WebhookDestination, Audience, DeletionRequest and Secret, in YAML or JSON, several
documents per file. They are validated and compiled as in a cluster, and reloaded
when a file changes. --secret reads values of Secrets from files or environment
variables instead.

Deliveries to loopback and private addresses are denied unless --egress-allow
names them. The status page is at the root of the admin address, for browsers on
this machine; 'posthorn get' shows the status, too.`,
		Example: `  posthorn run -f ./webhooks
  posthorn run -f ./webhooks --secret default/crm/secret=file:/run/secrets/crm
  posthorn run -f ./webhooks --data /var/lib/posthorn --listen :8080 --egress-allow 10.0.0.0/8`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logging.Logger(cmd.ErrOrStderr())
			if err != nil {
				return command.UsageError(err)
			}
			if err := command.CheckManifests(manifests); err != nil {
				return err
			}
			if err := data.parse(); err != nil {
				return err
			}
			values, err := standalone.ReadSecretValues(secrets)
			if err != nil {
				return command.Usagef("--secret: %v", err)
			}
			policy, err := ceilings.policy(data.options.Egress)
			if err != nil {
				return err
			}
			data.options.DrainTimeout = ceilings.drain(data.options.DrainTimeout)
			watchCertificate, err := data.tls()
			if err != nil {
				return err
			}
			options := standalone.Options{Dir: manifests, StateFile: filepath.Join(data.options.DataDir, "manifests.json"), SecretValues: values,
				Policy: policy, Logger: log}
			if data.isReplicated() {
				data.lacks = standalone.NewLacks(options)
			}
			data.options.Logger, data.options.Namespace = log, standalone.DefaultNamespace
			if !data.isReplicated() { // Otherwise, each process has another name.
				data.options.Pod = standaloneName
			}
			// The two depend on each other: the API of the resources shows the dispatcher's
			// reports, and the dispatcher's admin listener serves that API.
			resources := &lateHandler{}
			data.options.Extra = resources
			tracer, stopTracer, err := otlp.NewTracer(cmd.Context(), command.BuildVersion(), standaloneName, log)
			if err != nil {
				return command.UsageError(err)
			}
			defer stopTracer()
			data.options.Tracer, data.options.Version = tracer, command.BuildVersion()
			return data.serve(cmd.Context(), log, service{others: []func(context.Context) error{
				watchCertificate}, control: func(ctx context.Context, d *dispatcher.Dispatcher, at *dispatcher.Listeners) error {
				options.Sink, options.Changes, options.UnknownKeys = d, d.Changes, d.UnknownKeys
				if data.isReplicated() {
					options.Records = d.Store()
				} else if err := standalone.ForgetRecords(d.Store()); err != nil {
					return err
				}
				control := standalone.New(options)
				status, err := newStatusPage(at.AdminAddr())
				if err != nil {
					return err
				}
				served := http.NewServeMux()
				served.Handle("/", control.Handler())
				served.Handle("/{$}", status)
				served.Handle(page.Prefix, status)
				resources.set(served)
				log.Info("listening", "version", command.BuildVersion(), "listen", at.Addr().String(), "admin", at.AdminAddr().String(), "manifests",
					manifests, "data", data.options.DataDir, "memoryLimit", data.options.Memory)
				group, ctx := errgroup.WithContext(ctx)
				group.Go(func() error { return control.Run(ctx) })
				group.Go(func() error { return status.Run(ctx) })
				return group.Wait()
			}})
		},
	}
	command.ManifestsFlag(cmd, &manifests, "folder of the manifests; required")
	registerSecrets(cmd, &secrets)
	ceilings.register(cmd)
	data.register(cmd, defaultDataDir(), "127.0.0.1:8080", "127.0.0.1:8081")
	logging.Register(cmd)
	return cmd
}

// standaloneName is the name of the process in reports and traces.
const standaloneName = "standalone"

// registerSecrets registers --secret.
func registerSecrets(cmd *cobra.Command, secrets *[]string) {
	cmd.Flags().StringArrayVar(secrets, "secret", nil, "value of a key of a Secret that no manifest has, NAMESPACE/NAME/KEY=file:PATH or NAMESPACE/NAME/KEY=env:NAME; repeat it for each key. A file is read again when it changes")
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

// newStatusPage makes the status page, which reads everything by the admin listener at an address.
func newStatusPage(admin net.Addr) (*page.Page, error) {
	host, port, err := net.SplitHostPort(admin.String())
	if err != nil {
		return nil, err
	}
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	client := &adminapi.Client{URL: "http://" + net.JoinHostPort(host, port)}
	dispatchers := map[string]*adminapi.Client{standaloneName: client}
	return page.New(page.Options{
		Objects: client, Dispatchers: func() (map[string]*adminapi.Client, error) { return dispatchers, nil },
		Standalone: true, Command: "posthorn", Version: command.BuildVersion(),
	}), nil
}

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
