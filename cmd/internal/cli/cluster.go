package cli

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/adminapi"
)

// clusterConnector connects to the dispatchers of a cluster with the user's permissions: a token of
// the support account, and a forwarded port to each pod.
type clusterConnector struct {
	kubeconfig      string
	overrides       clientcmd.ConfigOverrides
	system, account string
	bodiesAccount   string
	selector        string
	adminPort       int
	callsPort       int
	plain           bool
}

const supportTokenSeconds = 600

func (c *clusterConnector) register(cmd *cobra.Command) {
	f := cmd.PersistentFlags()
	f.StringVar(&c.kubeconfig, "kubeconfig", "", "kubeconfig file; default: KUBECONFIG, or ~/.kube/config")
	names := clientcmd.RecommendedConfigOverrideFlags("")
	clientcmd.BindOverrideFlags(&c.overrides, f, names)
	f.StringVar(&c.system, "system-namespace", "posthorn-system", "namespace of Posthorn's release")
	f.StringVar(&c.account, "support-account", "posthorn-support", "ServiceAccount, in the release's namespace, that authenticates to the dispatchers")
	f.StringVar(&c.bodiesAccount, "bodies-account", "posthorn-bodies", "ServiceAccount, in the release's namespace, that may read message bodies")
	f.StringVar(&c.selector, "dispatcher-selector", "app.kubernetes.io/name=posthorn,app.kubernetes.io/component=dispatcher", "label selector of the dispatcher pods")
	f.IntVar(&c.adminPort, "dispatcher-admin-port", 8081, "port of the dispatchers' admin API")
	f.IntVar(&c.callsPort, "dispatcher-calls-port", 8080, "port of the dispatchers' tracking API")
	f.BoolVar(&c.plain, "dispatcher-plain", false, "the dispatchers run with --admin-auth=none")
	for _, name := range []string{"cluster", "user", "server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority",
		"client-certificate", "client-key", "token", "username", "password", "as", "as-group", "as-uid", "as-user-extra", "request-timeout",
		"proxy-url", "disable-compression", "dispatcher-selector", "dispatcher-admin-port", "dispatcher-calls-port", "dispatcher-plain"} {
		_ = f.MarkHidden(name) // hidden as in kubectl
	}
}

func (c *clusterConnector) config() clientcmd.ClientConfig {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = c.kubeconfig
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &c.overrides)
}

func (c *clusterConnector) rest() (*rest.Config, error) {
	config, err := c.config().ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, errors.New("there is no kubeconfig; set KUBECONFIG or --kubeconfig. Without a cluster, the commands of posthorn itself are for posthorn run: 'posthorn why'")
	}
	if err != nil {
		return nil, fmt.Errorf("cannot connect to a cluster: %w", err)
	}
	config.UserAgent = "kubectl-posthorn/" + strings.ReplaceAll(command.BuildVersion(), " ", "-")
	return config, nil
}

// resources returns a client of Posthorn's kinds in the namespace that the user selected.
func (c *clusterConnector) resources() (*resources, error) {
	config, err := c.rest()
	if err != nil {
		return nil, err
	}
	namespace, err := c.namespace()
	if err != nil {
		return nil, err
	}
	return newResources(config, namespace)
}

func (c *clusterConnector) namespace() (string, error) {
	ns, _, err := c.config().Namespace()
	return ns, err
}

func (c *clusterConnector) names(ctx context.Context, resource string) ([]string, error) {
	posthorn, err := c.resources()
	if err != nil {
		return nil, err
	}
	body, err := posthorn.listJSON(ctx, resource)
	if err != nil {
		return nil, err
	}
	var list metav1.PartialObjectMetadataList
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("%s: %w", resource, err)
	}
	var names []string
	for _, o := range list.Items {
		names = append(names, o.Name)
	}
	return names, nil
}

// pods lists the running dispatcher pods.
func (c *clusterConnector) pods(ctx context.Context) (*rest.Config, kubernetes.Interface, []corev1.Pod, error) {
	config, err := c.rest()
	if err != nil {
		return nil, nil, nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, nil, err
	}
	pods, err := client.CoreV1().Pods(c.system).List(ctx, metav1.ListOptions{LabelSelector: c.selector})
	if err != nil {
		return nil, nil, nil, c.explain(err)
	}
	running := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.Status.Phase != corev1.PodRunning })
	if len(running) == 0 {
		return nil, nil, nil, fmt.Errorf("no dispatcher pod runs in namespace %s; if Posthorn is installed in another namespace, set --system-namespace", c.system)
	}
	return config, client, running, nil
}

// operatorLease is the name of the Lease of the operator, which every authenticated user may read.
const operatorLease = "posthorn-operator"

// operatorRenewed returns when the operator last renewed its Lease; zero if that is not known, for example because
// the Role is not bound.
func (c *clusterConnector) operatorRenewed(ctx context.Context) time.Time {
	config, err := c.rest()
	if err != nil {
		return time.Time{}
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return time.Time{}
	}
	lease, err := client.CoordinationV1().Leases(c.system).Get(ctx, operatorLease, metav1.GetOptions{})
	if err != nil || lease.Spec.RenewTime == nil {
		return time.Time{}
	}
	return lease.Spec.RenewTime.Time
}

// connect connects to the dispatchers that can have messages.
func (c *clusterConnector) connect(ctx context.Context) ([]target, func(), error) {
	targets, stop, err := c.connectAll(ctx)
	if err != nil {
		return nil, nil, err
	}
	targets, err = owners(ctx, targets)
	if err != nil {
		stop()
		return nil, nil, err
	}
	return targets, stop, nil
}

// connectAll connects to the running dispatchers.
func (c *clusterConnector) connectAll(ctx context.Context) ([]target, func(), error) {
	config, client, pods, err := c.pods(ctx)
	if err != nil {
		return nil, nil, err
	}
	auth := newPodAuth(c.plain)
	auth.bodiesToken = reuseToken(func() (string, error) { return c.bodiesToken(ctx, client) })
	if err := c.renew(ctx, client, auth); err != nil {
		return nil, nil, err
	}
	ctx, stop := context.WithCancel(ctx)
	var targets []target
	for _, pod := range pods {
		port, _, err := c.forward(ctx, config, client, pod.Name, c.adminPort)
		if err != nil {
			stop()
			return nil, nil, err
		}
		targets = append(targets, target{pod.Name, auth.client(port)})
	}
	return targets, stop, nil
}

// owners returns the stores of the dispatchers, without the standbys of a replicated log.
func owners(ctx context.Context, targets []target) (list []target, err error) {
	for _, t := range targets {
		of, err := t.stores(ctx)
		if err != nil {
			return nil, err
		}
		list = append(list, of...)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("all %d dispatcher pods are standbys of the replicated log: one of them takes over the messages within about 15 s; try again", len(targets))
	}
	return list, nil
}

// renew requests a new token of the support account.
func (c *clusterConnector) renew(ctx context.Context, client kubernetes.Interface, auth *podAuth) error {
	if auth.plain {
		return nil
	}
	token, err := c.createToken(ctx, client, c.account)
	if err != nil {
		return c.explain(err)
	}
	auth.token.Store(&token)
	return nil
}

// bodiesToken requests a token of the account that may read message bodies.
func (c *clusterConnector) bodiesToken(ctx context.Context, client kubernetes.Interface) (string, error) {
	token, err := c.createToken(ctx, client, c.bodiesAccount)
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		err = fmt.Errorf("message bodies need the Role %s-user in namespace %s: %w", c.bodiesAccount, c.system, err)
	}
	return token, err
}

// reuseToken returns the last created token for half of its lifetime.
func reuseToken(create func() (string, error)) func() (string, error) {
	var mu sync.Mutex
	var token string
	var renew time.Time
	return func() (string, error) {
		mu.Lock()
		defer mu.Unlock()
		now := time.Now()
		if now.Before(renew) {
			return token, nil
		}
		created, err := create()
		if err != nil {
			return "", err
		}
		token, renew = created, now.Add(supportTokenSeconds/2*time.Second)
		return token, nil
	}
}

func (c *clusterConnector) createToken(ctx context.Context, client kubernetes.Interface, account string) (string, error) {
	seconds := int64(supportTokenSeconds)
	token, err := client.CoreV1().ServiceAccounts(c.system).CreateToken(ctx, account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: []string{adminapi.TokenAudience}, ExpirationSeconds: &seconds},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return token.Status.Token, nil
}

// explain names the missing permission of a forbidden error, and the flags to check after a
// not-found error.
func (c *clusterConnector) explain(err error) error {
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%w in namespace %s; if Posthorn is installed in another namespace, set --system-namespace and --support-account", err, c.system)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w\nThis command needs the Role %s-user in namespace %s; 'why' and 'redeliver' do not", err, c.account, c.system)
	}
	return err
}

// forward forwards a free local port to a pod's port until ctx is done or the connection ends; then
// ended gets a value.
func (c *clusterConnector) forward(ctx context.Context, config *rest.Config, client kubernetes.Interface, pod string,
	port int) (local uint16, ended <-chan error, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("forward a port of pod %s: %w", pod, c.explain(err))
		}
	}()
	address := client.CoreV1().RESTClient().Post().Resource("pods").Namespace(c.system).Name(pod).SubResource("portforward").URL()
	transport, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		return 0, nil, err
	}
	old := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, address)
	dialer, err := portforward.NewSPDYOverWebsocketDialer(address, config)
	if err != nil {
		return 0, nil, err
	}
	dialer = portforward.NewFallbackDialer(dialer, old, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	ready := make(chan struct{})
	forwarder, err := portforward.NewOnAddressesWithContext(ctx, dialer, []string{"127.0.0.1"}, []string{fmt.Sprintf("0:%d", port)}, ready,
		io.Discard, io.Discard)
	if err != nil {
		return 0, nil, err
	}
	done := make(chan error, 1)
	go func() { done <- forwarder.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-done:
		return 0, nil, cmp.Or(err, ctx.Err())
	case <-ctx.Done():
		return 0, nil, ctx.Err()
	case <-time.After(30 * time.Second):
		return 0, nil, fmt.Errorf("no response within 30 s")
	}
	ports, err := forwarder.GetPorts()
	if err != nil {
		return 0, nil, err
	}
	return ports[0].Local, done, nil
}

// podAuth authenticates requests to the dispatcher pods: it adds a token to each, unless plain.
type podAuth struct {
	plain bool
	token atomic.Pointer[string]
	// bodiesToken returns a token for the paths with message bodies.
	bodiesToken func() (string, error)
	next        http.RoundTripper
}

func newPodAuth(plain bool) *podAuth {
	t := &http.Transport{}
	if !plain {
		t.TLSClientConfig = &tls.Config{
			MinVersion: tls.VersionTLS13,
			// The forwarded port ends at the pod's own loopback interface. Only the API server and
			// the kubelet are in between, and both are authenticated.
			InsecureSkipVerify: true,
		}
	}
	return &podAuth{plain: plain, next: t}
}

func (a *podAuth) RoundTrip(r *http.Request) (*http.Response, error) {
	token := a.token.Load()
	if !a.plain && a.bodiesToken != nil && strings.HasPrefix(r.URL.Path, adminapi.BodiesPath+"/") {
		bodies, err := a.bodiesToken()
		if err != nil { // The dispatcher would refuse the request.
			text := io.NopCloser(strings.NewReader(err.Error()))
			return &http.Response{Status: "403 Forbidden", StatusCode: http.StatusForbidden, Header: http.Header{}, Body: text, Request: r}, nil
		}
		token = &bodies
	}
	if token != nil {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer "+*token)
	}
	return a.next.RoundTrip(r)
}

// client requests the admin API at a forwarded port.
func (a *podAuth) client(port uint16) *adminapi.Client {
	scheme := "https"
	if a.plain {
		scheme = "http"
	}
	return &adminapi.Client{URL: fmt.Sprintf("%s://127.0.0.1:%d", scheme, port), HTTP: &http.Client{Transport: a}}
}

// clusterSender sends to a ready dispatcher pod, with the write key of a Source of the user's
// namespace.
type clusterSender struct {
	*clusterConnector
	source, writeKey string
}

func (c *clusterConnector) call(cmd *cobra.Command) sender {
	s := &clusterSender{clusterConnector: c}
	f := cmd.Flags()
	f.StringVar(&s.source, "source", "", "the Source to send as; its write key is read from its Secret (default: the only Source of the namespace)")
	f.StringVar(&s.writeKey, "write-key", "", "send with this write key instead (default: the environment variable POSTHORN_WRITE_KEY)")
	return s
}

func (c *clusterSender) connect(ctx context.Context) (to trackingAPI, stop func(), err error) {
	to.writeKey = c.writeKey
	if to.writeKey == "" && c.source == "" {
		to.writeKey = os.Getenv("POSTHORN_WRITE_KEY")
	}
	if to.writeKey == "" {
		if to.writeKey, err = c.readKey(ctx); err != nil {
			return to, nil, err
		}
	}
	config, client, pods, err := c.pods(ctx)
	if err != nil {
		return to, nil, err
	}
	ready := slices.IndexFunc(pods, func(p corev1.Pod) bool {
		return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
	})
	if ready < 0 {
		return to, nil, fmt.Errorf("none of the %d dispatcher pods in namespace %s is ready: kubectl -n %[2]s get pods", len(pods), c.system)
	}
	ctx, stop = context.WithCancel(ctx)
	port, _, err := c.forward(ctx, config, client, pods[ready].Name, c.callsPort)
	if err != nil {
		stop()
		return to, nil, err
	}
	to.url = fmt.Sprintf("http://127.0.0.1:%d", port)
	return to, stop, nil
}

// readKey reads the Source's write key with the user's permissions.
func (c *clusterSender) readKey(ctx context.Context) (string, error) {
	posthorn, err := c.resources()
	if err != nil {
		return "", err
	}
	config, err := c.rest()
	if err != nil {
		return "", err
	}
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		return "", err
	}
	source, err := c.chosenSource(ctx, posthorn)
	if err != nil {
		return "", err
	}
	var errs []error
	for _, entry := range source.Spec.WriteKeys {
		ref := entry.SecretKeyRef
		secret, err := core.CoreV1().Secrets(posthorn.namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		if err != nil {
			errs = append(errs, fmt.Errorf("the write key of Source %q: %w; or set --write-key", source.Name, err))
		} else if key := strings.TrimSpace(string(secret.Data[ref.Key])); key != "" {
			return key, nil
		} else {
			errs = append(errs, fmt.Errorf("the write key of Source %q: Secret %q has no key %q", source.Name, ref.Name, ref.Key))
		}
	}
	if len(errs) == 0 {
		return "", fmt.Errorf("spec.writeKeys of Source %q is empty; add a write key, or set --write-key", source.Name)
	}
	return "", errors.Join(errs...)
}

// chosenSource returns the Source of the flag --source, or the only Source of the namespace.
func (c *clusterSender) chosenSource(ctx context.Context, posthorn *resources) (*v1beta1.Source, error) {
	if c.source != "" {
		var source v1beta1.Source
		err := posthorn.get(ctx, "sources", c.source, &source)
		if apierrors.IsNotFound(err) {
			err = fmt.Errorf("there is no Source %q in namespace %q", c.source, posthorn.namespace)
		}
		return &source, err
	}
	var all v1beta1.SourceList
	if err := posthorn.list(ctx, "sources", &all); err != nil {
		return nil, err
	}
	var names []string
	for _, s := range all.Items {
		names = append(names, s.Name)
	}
	switch len(names) {
	case 0:
		return nil, fmt.Errorf("there is no Source in namespace %q", posthorn.namespace)
	case 1:
		return &all.Items[0], nil
	}
	return nil, command.Usagef("choose one of the Sources %s with --source", strings.Join(names, ", "))
}
