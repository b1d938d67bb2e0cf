package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/intake/ingest"
	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// dataFlags are the flags of every process that contains a dispatcher.
type dataFlags struct {
	options    dispatcher.Options
	peerListen string
	// lacks is host.Options.Lacks.
	lacks             func(values map[string][]byte) []string
	egress, proxies   []string
	certFile, keyFile string
	proxyURL          string
	noProxy           []string
	proxyCredentials  string
	sourceQuota       string
	memory            string
	log               replicationFlags
}

func (d *dataFlags) register(cmd *cobra.Command, data, listen, admin string) {
	d.registerDelivery(cmd, data, admin)
	d.log.register(cmd)
	f := cmd.Flags()
	f.StringVar(&d.options.Listen, "listen", listen, "address of the tracking API")
	f.StringVar(&d.options.TLSListen, "tls-listen", "", "address of the tracking API over TLS, in addition to --listen")
	f.StringVar(&d.peerListen, "peer-listen", "", "address, HOST:PORT, at which the other processes of --replication-url reach this one: they forward requests there, over TLS, while this process is the owner. Required with it. The default of HOST is the environment variable POD_IP")
	f.StringVar(&d.certFile, "tls-cert", "", "PEM file of the certificate (and its chain) for --tls-listen; reloaded when it changes")
	f.StringVar(&d.keyFile, "tls-key", "", "PEM file of the certificate's key")
	f.StringSliceVar(&d.proxies, "trusted-proxies", nil, "trusted proxies, whose X-Forwarded-For is used: CIDRs or addresses")
	f.StringVar(&d.options.PublicHost, "public-host", "", "host of the tracking API, with an optional port, in the settings that browser and mobile libraries load; empty: the Host header of their request")
	f.DurationVar(&d.options.OrphanGrace, "orphan-grace", 10*time.Minute, "how long messages of a deleted destination are kept, and calls with a removed write key are answered 503 instead of 401")
	f.DurationVar(&d.options.Queue.DuplicateWindow, "duplicate-window", pebblestore.DefaultDuplicateWindow, "how long messageIds are stored to drop duplicate calls, up to 24h")
	f.BoolVar(&d.options.Debug, "debug", false, "add /debug to the admin listener: lanes, live config without secrets, profiles")
	f.StringVar(&d.sourceQuota, "source-quota", "auto", "bytes of undelivered calls that one Source may keep on disk, over all dispatchers of a release; above it the Source's calls are answered 503. auto: no quota, and the namespaces share the disk space below the high-water mark of 85 %; none or 0: only the high-water mark")
}

// registerDelivery registers the flags of a process that delivers messages, whether it receives calls
// or not.
func (d *dataFlags) registerDelivery(cmd *cobra.Command, data, admin string) {
	f := cmd.Flags()
	f.StringVar(&d.options.DataDir, "data", data, "data directory; it holds all accepted messages")
	f.StringVar(&d.options.AdminListen, "admin-listen", admin, "address of the admin API, reports and metrics")
	f.StringSliceVar(&d.egress, "egress-allow", nil, "non-public addresses that deliveries may use: CIDRs, addresses or host names (also *.example); !CIDR denies. Metadata addresses must be named exactly")
	f.StringVar(&d.proxyURL, "egress-proxy", "", "HTTP proxy of deliveries and token requests, http://HOST:PORT. The proxy resolves host names, so its rules must deny private addresses")
	f.StringSliceVar(&d.noProxy, "egress-no-proxy", nil, "hosts that are reached without --egress-proxy, as in NO_PROXY: names (with the names below them), .DOMAIN, addresses, CIDRs, each with an optional :PORT. Loopback addresses never use the proxy")
	f.StringVar(&d.proxyCredentials, "egress-proxy-credentials", "", "folder with the files username and password for --egress-proxy, read again when they change")
	f.DurationVar(&d.options.DrainTimeout, "drain-timeout", 10*time.Second, "how long shutdown waits for calls and deliveries in progress; posthorn run raises it to the longest delivery timeout and 5s")
	f.StringVar(&d.memory, "memory", strconv.Itoa(memory.Default/1_000_000)+"M", "limit of the resident memory, for example 400M or 1Gi; all buffer sizes derive from it. A lower memory limit of the container takes precedence")
	f.BoolVar(&d.options.DetailedMetrics, "detailed-metrics", false, "add histograms, failure reasons and lanes to the metrics of each destination, about 50 series per destination instead of 12")
}

// parse validates the flags and converts them to options.
func (d *dataFlags) parse() (err error) {
	if d.options.Egress, err = egress.ParsePolicy(d.egress); err != nil {
		return command.Usagef("--egress-allow: %v", err)
	}
	if d.options.Proxy, err = d.proxy(); err != nil {
		return err
	}
	if d.options.TrustedProxies, err = ingest.ParseProxies(d.proxies); err != nil {
		return command.Usagef("--trusted-proxies: %v", err)
	}
	if d.options.PublicHost != "" {
		if err := ingest.CheckPublicHost(d.options.PublicHost); err != nil {
			return command.Usagef("--public-host: %v", err)
		}
	}
	for _, l := range []struct{ flag, address string }{{"--listen", d.options.Listen}, {"--tls-listen", d.options.TLSListen},
		{"--admin-listen", d.options.AdminListen}, {"--probe-listen", d.options.ProbeListen}, {"--peer-listen", d.peerListen}} {
		if err := checkListen(l.address); err != nil {
			return command.Usagef("%s %q: %v", l.flag, l.address, err)
		}
	}
	if err := d.checkPeerListen(net.ResolveTCPAddr); err != nil {
		return err
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
			return command.Usagef("--source-quota %q: use a whole number of bytes, auto for shares of the namespaces, or none", d.sourceQuota)
		}
		d.options.Queue.MaxBytesPerSource = bytes
	}
	if d.options.Memory, err = memoryBound(d.memory, memlimit.FromCgroup); err != nil {
		return err
	}
	return d.log.parse()
}

// checkPeerListen checks that the other processes can connect to the address.
func (d *dataFlags) checkPeerListen(resolve func(network, address string) (*net.TCPAddr, error)) error {
	switch {
	case d.peerListen == "" && d.isReplicated():
		return command.Usagef("--replication-url needs --peer-listen: requests are forwarded to the process that has the slot of their namespace")
	case d.peerListen == "":
		return nil
	case !d.isReplicated():
		return command.Usagef("--peer-listen needs --replication-url")
	}
	host, port, _ := net.SplitHostPort(d.peerListen)
	if host == "" {
		host = os.Getenv("POD_IP")
		d.peerListen = net.JoinHostPort(host, port)
	}
	ip, err := netip.ParseAddr(host)
	if host == "" || err == nil && ip.IsUnspecified() {
		return command.Usagef("--peer-listen %q: name the host at which the other processes reach this one, for example 10.0.0.7:8444", d.peerListen)
	}
	if err == nil || host == "localhost" {
		return nil
	}
	// Many systems name themselves as 127.0.1.1 in /etc/hosts. The others would connect to themselves.
	if to, err := resolve("tcp", d.peerListen); err == nil && to.IP.IsLoopback() {
		return command.Usagef("--peer-listen %q: %s is %s on this machine, where other machines cannot connect; use the machine's address, for example 10.0.0.7:8444, or correct /etc/hosts", d.peerListen, host, to.IP)
	}
	return nil
}

// proxy returns the egress proxy, or nil.
func (d *dataFlags) proxy() (*egress.Proxy, error) {
	if d.proxyURL == "" {
		if len(d.noProxy) > 0 || d.proxyCredentials != "" {
			return nil, command.Usagef("--egress-no-proxy and --egress-proxy-credentials need --egress-proxy")
		}
		return nil, nil
	}
	proxy, err := egress.NewProxy(d.proxyURL, d.noProxy, d.proxyCredentials)
	if err != nil {
		return nil, command.Usagef("--egress-proxy, --egress-no-proxy, --egress-proxy-credentials: %v", err)
	}
	return proxy, nil
}

// memoryBound returns the limit that --memory sets, and at most nine tenths of the container's
// limit: the rest is for the kernel's socket and file buffers.
func memoryBound(flag string, containerLimit func() (uint64, error)) (int64, error) {
	quantity, err := resource.ParseQuantity(flag)
	if err != nil {
		return 0, command.Usagef("--memory %q: use a size such as 400M or 1Gi", flag)
	}
	bound := quantity.Value()
	if bound < memory.Min {
		return 0, command.Usagef("--memory %s: too small; use %dM or more", flag, memory.Min/1_000_000)
	}
	// An unreadable limit counts as no limit.
	if limit, err := containerLimit(); err == nil && limit/10*9 < uint64(bound) {
		if bound = int64(limit / 10 * 9); bound < memory.Min {
			return 0, fmt.Errorf("the container's memory limit of %d bytes is too small; set it to %dMi or more", limit, (memory.Min*10/9)>>20+1)
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

// ceilingFlags are the administrator's ceilings of what destinations may request.
type ceilingFlags struct{ timeout, retryWindow time.Duration }

func (c *ceilingFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.DurationVar(&c.timeout, "max-delivery-timeout", compile.DefaultMaxTimeout, "ceiling of spec.delivery.timeout, from 5s to 60s")
	f.DurationVar(&c.retryWindow, "max-retry-window", compile.DefaultMaxRetryWindow, "ceiling of spec.delivery.retry.window, from 4h to 720h")
}

// drain returns the drain timeout of a process with these ceilings: longer than the longest timeout,
// like the chart's, so that a stop cuts no request off.
func (c *ceilingFlags) drain(timeout time.Duration) time.Duration {
	return max(timeout, c.timeout+5*time.Second)
}

// policy returns the rules for destinations: the ceilings, and the hosts that egress permits.
func (c *ceilingFlags) policy(egress egress.Policy) (compile.Policy, error) {
	for _, ceiling := range []struct {
		flag             string
		value, low, high time.Duration
	}{
		{"--max-delivery-timeout", c.timeout, compile.DefaultMaxTimeout, liveconfig.MaxTimeout},
		{"--max-retry-window", c.retryWindow, compile.DefaultMaxRetryWindow, liveconfig.MaxRetryWindow},
	} {
		if ceiling.value < ceiling.low || ceiling.value > ceiling.high {
			return compile.Policy{}, command.Usagef("%s %v: use %v to %v", ceiling.flag, ceiling.value, ceiling.low, ceiling.high)
		}
	}
	return compile.Policy{CheckHost: egress.CheckHost, MaxTimeout: c.timeout, MaxRetryWindow: c.retryWindow}, nil
}
