package controllers

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/shares"
)

// shareKeeper gives the dispatchers their shares of the limits of objects, in one Secret. Dispatchers of a replicated log
// need none: the owner of a namespace has the whole limits.
type shareKeeper struct {
	client   client.Client
	direct   client.Reader
	release  string
	owner    secretOwner
	pods     Pods
	interval time.Duration
	reports  *prober
	now      func() time.Time

	plan shares.Plan
	// version is the resource version of the Secret that this process has read or written.
	version string
	// loaded is false before the Secret was read, and after a write whose result is not known.
	loaded    bool
	writtenAt time.Time
}

// lagOfSecrets is the time that the cache has to contain an own write.
const lagOfSecrets = 10 * time.Second

// Start follows the dispatchers until ctx is done. It implements manager.Runnable.
func (k *shareKeeper) Start(ctx context.Context) error {
	wait.NonSlidingUntilWithContext(ctx, func(ctx context.Context) {
		if err := k.pass(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "dividing the limits among the dispatchers failed; it is retried")
		}
	}, k.interval)
	return nil
}

// pass writes the next document if there is one.
func (k *shareKeeper) pass(ctx context.Context) error {
	listed, err := k.pods.List(ctx)
	if err != nil {
		return err
	}
	pods, demand, ok := k.reports.limitUses(listed)
	if !ok {
		return nil
	}
	lost, err := k.follow(ctx)
	if err != nil {
		return err
	}
	changed := lost
	if !lost {
		k.plan, changed = k.plan.Next(pods, demand, k.now())
	}
	if !changed {
		return nil
	}
	return k.write(ctx)
}

func (k *shareKeeper) key() types.NamespacedName {
	return types.NamespacedName{Namespace: k.release, Name: liveconfig.SharesName}
}

// follow reads the document if it is not known. lost is true if another client has changed or deleted the Secret: the
// document is then written again, and which one the dispatchers apply is not known.
func (k *shareKeeper) follow(ctx context.Context) (lost bool, err error) {
	if !k.loaded {
		return k.load(ctx)
	}
	m := secretMetadata()
	if err := k.client.Get(ctx, k.key(), m); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("look up Secret %s: %w", k.key(), err)
	}
	if m.ResourceVersion == k.version || k.now().Sub(k.writtenAt) < lagOfSecrets {
		return false, nil
	}
	k.plan, k.version = shares.Load(k.plan.Shares), m.ResourceVersion
	return k.plan.Shares.Number > 0, nil
}

// load reads the document of an earlier operator, or of a write whose result is not known.
func (k *shareKeeper) load(ctx context.Context) (lost bool, err error) {
	var secret corev1.Secret
	if err := k.direct.Get(ctx, k.key(), &secret); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read Secret %s: %w", k.key(), err)
	}
	k.version, k.loaded, k.writtenAt = secret.ResourceVersion, true, k.now()
	document, err := liveconfig.DecodeShares(secret.Data)
	if err != nil { // Dispatchers do not use it either.
		k.plan = shares.Load(k.plan.Shares)
		return k.plan.Shares.Number > 0, nil
	}
	k.plan = shares.Load(document)
	return false, nil
}

// write stores the newest document. It fails if another client has written the Secret in between.
func (k *shareKeeper) write(ctx context.Context) error {
	data, err := liveconfig.EncodeShares(k.plan.Shares)
	if err != nil {
		return err
	}
	secret := corev1ac.Secret(liveconfig.SharesName, k.release).WithData(data).WithLabels(map[string]string{liveconfig.LabelLive: "true"})
	if k.version != "" {
		secret.WithResourceVersion(k.version)
	}
	k.loaded = false
	if err := k.owner.apply(ctx, k.client, secret); err != nil {
		return err
	}
	k.version, k.loaded, k.writtenAt = *secret.ResourceVersion, true, k.now()
	k.reports.refreshNow()
	log.FromContext(ctx).V(1).Info("shares of limits written", "number", k.plan.Shares.Number, "pods", len(k.plan.Shares.Pods),
		"objects", len(k.plan.Shares.Objects))
	return nil
}

// limitUses returns the dispatchers with their use of limits: those that exist, and those that the StatefulSet
// will have. A pod without a node does not exist yet. ok is false before the first report, and for a replicated log.
func (p *prober) limitUses(existing []Pod) (pods []shares.Pod, demand func() shares.Demand, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	probes, names := map[string]*probe{}, map[string]bool{}
	for pod, probe := range p.probes {
		probes[pod.Name] = probe
	}
	states := map[string]*podreport.Index{}
	for _, pod := range existing {
		names[pod.Name] = true
		one := shares.Pod{Name: pod.Name, Exists: !pod.Unscheduled}
		if probe := probes[pod.Name]; probe != nil && probe.state != nil {
			if ok = true; probe.state.Replication != nil {
				return nil, nil, false
			}
			one.Applied, one.Above, one.Reports = probe.state.Shares, probe.state.AboveShares, !probe.failing
			states[pod.Name] = probe.state
		}
		pods = append(pods, one)
	}
	for _, name := range p.expected {
		if !names[name] {
			pods = append(pods, shares.Pod{Name: name})
		}
	}
	return pods, func() shares.Demand { return demandOf(states) }, ok
}

// demandOf returns what the dispatchers use of the limits of objects.
func demandOf(states map[string]*podreport.Index) shares.Demand {
	demand := shares.Demand{}
	for pod, state := range states {
		for namespace, n := range state.Namespaces() {
			for object, use := range n.LimitUses() {
				demand.Add(namespace+"/"+object, pod, shares.Use{Used: float64(use.Used) / 1e6, Limited: use.Limited})
			}
		}
	}
	return demand
}
