package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// A target is the admin API of one dispatcher.
type target struct {
	// name of the pod; empty without a cluster.
	name   string
	client *http.Client
	url    string
}

// get returns what the target answers to a path.
func (t target) get(ctx context.Context, path, accept string) ([]byte, error) {
	resp, err := t.do(ctx, http.MethodGet, path, accept, nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(io.LimitReader(resp.Body, 64<<20))
}

// do sends a request; an answer that is not 200 is an *answer.
func (t target) do(ctx context.Context, method, path, accept string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, adminURL(t.url, path), body)
	if err != nil {
		return nil, usagef("--admin %q: %v", t.url, err)
	}
	req.Header.Set("Accept", accept)
	resp, err := t.client.Do(req)
	if err != nil {
		if t.name == "" {
			err = fmt.Errorf("%w\nIs Posthorn running there? Start it with 'posthorn run', or set --admin", err)
		}
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		return nil, &answer{resp.StatusCode, answerError(resp.Status, text)}
	}
	return resp, nil
}

// answer is an error that a dispatcher answered with.
type answer struct {
	code int
	error
}

func (a *answer) Unwrap() error { return a.error }

// reach is a way to dispatchers, and to a namespace of theirs.
type reach interface {
	// open finds the dispatchers; close what it returns.
	open(ctx context.Context) (targets []target, closeAll func(), err error)
	// namespace that the user means.
	namespace() (string, error)
}

// A reaching registers a command's flags for a reach and returns it.
type reaching func(cmd *cobra.Command) reach

// direct reaches one dispatcher by its address.
type direct struct{ admin, ns string }

func reachDirect(cmd *cobra.Command) reach {
	d := &direct{}
	adminFlag(cmd, &d.admin)
	cmd.Flags().StringVarP(&d.ns, "namespace", "n", "default", "the destination's namespace")
	return d
}

func (d *direct) namespace() (string, error) { return d.ns, nil }

func (d *direct) open(context.Context) ([]target, func(), error) {
	return []target{{client: http.DefaultClient, url: d.admin}}, func() {}, nil
}

// throughCluster reaches the dispatchers of a cluster with what the user may
// do: a token of the support account, and a forwarded port of each pod.
type throughCluster struct {
	kubeconfig      string
	overrides       clientcmd.ConfigOverrides
	system, account string
	selector        string
	adminPort       int
	plain           bool
}

const supportTokenSeconds = 600

func (c *throughCluster) register(cmd *cobra.Command) {
	f := cmd.PersistentFlags()
	f.StringVar(&c.kubeconfig, "kubeconfig", "", "kubeconfig file; default: KUBECONFIG, or ~/.kube/config")
	names := clientcmd.RecommendedConfigOverrideFlags("")
	clientcmd.BindOverrideFlags(&c.overrides, f, names)
	f.StringVar(&c.system, "system-namespace", "posthorn-system", "namespace of Posthorn's release")
	f.StringVar(&c.account, "support-account", "posthorn-support", "ServiceAccount of the release's namespace to speak to the dispatchers as")
	f.StringVar(&c.selector, "dispatcher-selector", "app.kubernetes.io/name=posthorn,app.kubernetes.io/component=dispatcher", "label selector of the dispatcher pods")
	f.IntVar(&c.adminPort, "dispatcher-admin-port", 8081, "port of the dispatchers' admin API")
	f.BoolVar(&c.plain, "dispatcher-plain", false, "the dispatchers run with --admin-auth=none")
	for _, name := range []string{"cluster", "user", "server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority", "client-certificate", "client-key", "token", "username", "password", "as", "as-group", "as-uid", "as-user-extra", "request-timeout", "proxy-url", "disable-compression", "dispatcher-selector", "dispatcher-admin-port", "dispatcher-plain"} {
		_ = f.MarkHidden(name) // as kubectl knows them
	}
}

func (c *throughCluster) config() clientcmd.ClientConfig {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = c.kubeconfig
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &c.overrides)
}

func (c *throughCluster) rest() (*rest.Config, error) {
	config, err := c.config().ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("no way to a cluster: %w", err)
	}
	config.UserAgent = "kubectl-posthorn/" + strings.ReplaceAll(buildVersion(), " ", "-")
	return config, nil
}

func (c *throughCluster) namespace() (string, error) {
	ns, _, err := c.config().Namespace()
	return ns, err
}

func (c *throughCluster) open(ctx context.Context) ([]target, func(), error) {
	config, err := c.rest()
	if err != nil {
		return nil, nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, err
	}
	pods, err := client.CoreV1().Pods(c.system).List(ctx, metav1.ListOptions{LabelSelector: c.selector})
	if err != nil {
		return nil, nil, c.explain(err)
	}
	pods.Items = slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.Status.Phase != corev1.PodRunning })
	if len(pods.Items) == 0 {
		return nil, nil, fmt.Errorf("no dispatcher pod runs in namespace %s; set --system-namespace", c.system)
	}
	base, scheme := http.RoundTripper(&http.Transport{}), "http"
	if !c.plain {
		seconds := int64(supportTokenSeconds)
		token, err := client.CoreV1().ServiceAccounts(c.system).CreateToken(ctx, c.account, &authenticationv1.TokenRequest{
			Spec: authenticationv1.TokenRequestSpec{Audiences: []string{liveconfig.AdminAudience}, ExpirationSeconds: &seconds},
		}, metav1.CreateOptions{})
		if err != nil {
			return nil, nil, c.explain(err)
		}
		scheme = "https"
		base = bearer{token.Status.Token, &http.Transport{TLSClientConfig: &tls.Config{
			MinVersion: tls.VersionTLS13,
			// The forwarded port ends in the pod's own loopback, and API server and
			// kubelet, both authenticated, are all there is in between.
			InsecureSkipVerify: true,
		}}}
	}
	ctx, stop := context.WithCancel(ctx)
	var targets []target
	for _, pod := range pods.Items {
		port, err := c.forward(ctx, config, client, pod.Name)
		if err != nil {
			stop()
			return nil, nil, fmt.Errorf("forward a port of pod %s: %w", pod.Name, c.explain(err))
		}
		targets = append(targets, target{name: pod.Name, client: &http.Client{Transport: base}, url: fmt.Sprintf("%s://127.0.0.1:%d", scheme, port)})
	}
	return targets, stop, nil
}

// explain adds to a refusal what grants the right.
func (c *throughCluster) explain(err error) error {
	if apierrors.IsForbidden(err) {
		return fmt.Errorf("%w\nThis needs the Role posthorn-support-user in namespace %s; 'why' and 'redeliver' do without", err, c.system)
	}
	return err
}

// forward forwards a free local port to a pod's admin port until ctx is done.
func (c *throughCluster) forward(ctx context.Context, config *rest.Config, client kubernetes.Interface, pod string) (uint16, error) {
	address := client.CoreV1().RESTClient().Post().Resource("pods").Namespace(c.system).Name(pod).SubResource("portforward").URL()
	transport, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		return 0, err
	}
	old := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, address)
	dialer, err := portforward.NewSPDYOverWebsocketDialer(address, config)
	if err != nil {
		return 0, err
	}
	dialer = portforward.NewFallbackDialer(dialer, old, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	ready := make(chan struct{})
	forwarder, err := portforward.NewOnAddressesWithContext(ctx, dialer, []string{"127.0.0.1"}, []string{fmt.Sprintf("0:%d", c.adminPort)}, ready, io.Discard, io.Discard)
	if err != nil {
		return 0, err
	}
	done := make(chan error, 1)
	go func() { done <- forwarder.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-done:
		return 0, cmp.Or(err, ctx.Err())
	case <-time.After(30 * time.Second):
		return 0, fmt.Errorf("no answer within 30 s")
	}
	ports, err := forwarder.GetPorts()
	if err != nil {
		return 0, err
	}
	return ports[0].Local, nil
}

// bearer sends a token with each request.
type bearer struct {
	token string
	next  http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+b.token)
	return b.next.RoundTrip(r)
}

// each asks every dispatcher for a path and joins the answers, which are lines.
func each(ctx context.Context, r reach, path string, query url.Values) ([]byte, error) {
	targets, closeAll, err := r.open(ctx)
	if err != nil {
		return nil, err
	}
	defer closeAll()
	var all []byte
	for _, t := range targets {
		body, err := t.get(ctx, path+"?"+query.Encode(), "application/x-ndjson")
		if err != nil {
			return nil, named(t, err)
		}
		all = append(all, body...)
	}
	return all, nil
}

// named says which pod an error is of.
func named(t target, err error) error {
	if t.name == "" || err == nil {
		return err
	}
	return fmt.Errorf("pod %s: %w", t.name, err)
}
