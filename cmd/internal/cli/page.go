package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/controllers/page"
)

const (
	// podsInterval is the time between two lists of the dispatcher pods.
	podsInterval = 5 * time.Second
	// pageObjectsAge bounds the load that a page is for the API server.
	pageObjectsAge = 10 * time.Second
)

func newKubectlPage(c *clusterConnector) *cobra.Command {
	var port uint16
	var all bool
	cmd := &cobra.Command{
		Use:   "page",
		Short: "Serve the status page of a cluster to your browser",
		Long: `Serves the status page on this machine, until Ctrl-C: problems, flow, destinations,
dead letters in groups, and a live tail. It reads the objects with your own
permissions, and the dispatcher pods as the support account. The printed link is
valid for one browser. The page is read-only and has no message bodies.`,
		Example: "  posthorn page -n shop\n  posthorn page --all-namespaces --port 8090",
		Args:    command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			namespace, shown := "", "all namespaces"
			if !all {
				var err error
				if namespace, err = c.namespace(); err != nil {
					return err
				}
				shown = "namespace " + namespace
			}
			return c.servePage(cmd, namespace, shown, port)
		},
	}
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "show all namespaces; requires the permission to list the objects of all")
	cmd.Flags().Uint16Var(&port, "port", 0, "local port; 0 is any free port")
	return cmd
}

func (c *clusterConnector) servePage(cmd *cobra.Command, namespace, shown string, port uint16) error {
	config, client, first, err := c.pods(cmd.Context())
	if err != nil {
		return err
	}
	base, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return err
	}
	web, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	watched := &podWatch{c: c, config: config, client: client, auth: newPodAuth(c.plain), pods: map[types.UID]*connectedPod{}}
	if err := c.renew(cmd.Context(), client, watched.auth); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(cmd.Context())
	watched.update(ctx, first, nil)
	if len(watched.pods) == 0 {
		return watched.err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	key := rand.Text()
	status := page.New(page.Options{
		Objects: &adminapi.Client{URL: strings.TrimSuffix(base.String(), "/"), HTTP: web}, ObjectsAge: pageObjectsAge,
		Namespace: namespace, Dispatchers: watched.clients, Key: key,
		Command: "kubectl posthorn", Version: command.BuildVersion(),
	})
	server := &http.Server{Handler: status, ReadHeaderTimeout: 10 * time.Second, BaseContext: func(net.Listener) context.Context {
		return ctx
	}}
	group.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error { <-ctx.Done(); return server.Close() })
	group.Go(func() error { return status.Run(ctx) })
	group.Go(func() error { return watched.run(ctx) })
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "Status page of %s, until Ctrl-C:\nhttp://%s/?key=%s\n", shown, listener.Addr(), key)
	if err != nil {
		return err
	}
	return group.Wait()
}

// podWatch keeps a forwarded port to each running dispatcher pod.
type podWatch struct {
	c      *clusterConnector
	config *rest.Config
	client kubernetes.Interface
	auth   *podAuth

	mu   sync.Mutex // guards what is below
	pods map[types.UID]*connectedPod
	err  error
}

type connectedPod struct {
	name   string
	client *adminapi.Client
	ended  <-chan error // has a value when the connection ended
	stop   context.CancelFunc
}

// clients returns the connected pods, and why others are not connected.
func (w *podWatch) clients() (map[string]*adminapi.Client, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	clients := make(map[string]*adminapi.Client, len(w.pods))
	for _, p := range w.pods {
		clients[p.name] = p.client
	}
	return clients, w.err
}

// run follows the pods, and renews the token at half of its time, until ctx is done.
func (w *podWatch) run(ctx context.Context) error {
	tick := time.NewTicker(podsInterval)
	defer tick.Stop()
	renew := time.Now().Add(supportTokenSeconds / 2 * time.Second)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		var failed error
		if !time.Now().Before(renew) {
			if failed = w.c.renew(ctx, w.client, w.auth); failed == nil {
				renew = time.Now().Add(supportTokenSeconds / 2 * time.Second)
			}
		}
		if _, _, pods, err := w.c.pods(ctx); err != nil {
			w.mu.Lock()
			w.err = errors.Join(failed, err)
			w.mu.Unlock()
		} else {
			w.update(ctx, pods, failed)
		}
	}
}

// update connects to new pods, and again to those whose connection ended, all at once. It adds its
// errors to failed.
func (w *podWatch) update(ctx context.Context, pods []corev1.Pod, failed error) {
	w.mu.Lock()
	before := maps.Clone(w.pods)
	w.mu.Unlock()
	next, errs := make([]*connectedPod, len(pods)), make([]error, len(pods))
	var group sync.WaitGroup
	for i, pod := range pods {
		if p := before[pod.UID]; p != nil {
			delete(before, pod.UID)
			select {
			case <-p.ended: //nolint:errcheck // the new connection reports its own
				p.stop()
			default:
				next[i] = p
				continue
			}
		}
		group.Go(func() { next[i], errs[i] = w.connect(ctx, pod.Name) })
	}
	group.Wait()
	for _, gone := range before {
		gone.stop()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.pods)
	for i, p := range next {
		if p != nil {
			w.pods[pods[i].UID] = p
		}
	}
	w.err = errors.Join(append(errs, failed)...)
}

func (w *podWatch) connect(ctx context.Context, pod string) (*connectedPod, error) {
	ctx, stop := context.WithCancel(ctx)
	port, ended, err := w.c.forward(ctx, w.config, w.client, pod, w.c.adminPort)
	if err != nil {
		stop()
		return nil, err
	}
	return &connectedPod{name: pod, client: w.auth.client(port), ended: ended, stop: stop}, nil
}
