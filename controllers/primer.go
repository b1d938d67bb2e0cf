package controllers

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
)

// primer loads the live configs, the write keys and the expressions of all namespaces before the first
// compilation: with an incomplete index, a Source could get the key of another namespace, and a new expression the budget
// of one that was accepted.
type primer struct {
	inputs *configInputs
	live   *liveSecrets
	heads  *heads
	keys   *writeKeys
	marker *marker
	own    *trigger

	mu sync.Mutex
	// started is the time of the first reconciliation.
	started time.Time
	primed  bool
}

// maxReportWait bounds the wait for the first reports.
const maxReportWait = 5 * time.Second

// awaitsReports reports whether the first reports of the pods are missing. With them the operator
// detects that the live configs are from a backup; a pod that does not answer delays the start by
// maxReportWait.
func (p *primer) awaitsReports() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.primed {
		return false
	}
	if p.started.IsZero() {
		p.started = time.Now()
	}
	_, complete := p.heads.reports()
	return !complete && time.Since(p.started) < maxReportWait
}

// prime does the work, once.
func (p *primer) prime(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.primed {
		return nil
	}
	objects, err := p.inputs.all(ctx)
	if err != nil {
		return err
	}
	secrets, configs, err := p.readAll(ctx)
	if err != nil {
		return err
	}
	p.setOwners(secrets)
	for namespace, secret := range secrets {
		if secret.resourceVersion != "" {
			p.live.record(namespace, secret)
		}
		p.own.fire(namespace)
	}
	if err := p.setHolders(ctx, objects, configs); err != nil {
		return err
	}
	p.inputs.setAllExpressions(objects)
	p.marker.begin(objects)
	p.primed = true
	return nil
}

// setHolders loads the write keys of the namespaces with objects.
func (p *primer) setHolders(ctx context.Context, objects map[string][]compile.Object, configs map[string]liveconfig.Config) error {
	var group errgroup.Group
	group.SetLimit(maxReadsAtOnce)
	for name := range objects {
		group.Go(func() error {
			_, s, err := p.inputs.gather(ctx, name)
			if err != nil {
				// The compilation of this namespace retries. The others do not wait for it.
				log.FromContext(ctx).Error(err, "loading the write keys of a namespace failed; using the keys of its live config", "namespace", name)
				p.keys.set(name, liveHolders(configs[name], s.Objects))
				return nil
			}
			p.keys.set(name, holders(s))
			return nil
		})
	}
	_ = group.Wait()
	return ctx.Err()
}

// readAll reads the live configs of all namespaces. It fails if it cannot read one: a namespace whose live config is not
// known releases no key.
func (p *primer) readAll(ctx context.Context) (map[string]liveSecret, map[string]liveconfig.Config, error) {
	all, err := listSecrets(ctx, p.live.client, client.InNamespace(p.live.release))
	if err != nil {
		return nil, nil, fmt.Errorf("list the live configs: %w", err)
	}
	var mu sync.Mutex
	secrets, configs := map[string]liveSecret{}, map[string]liveconfig.Config{}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(maxReadsAtOnce)
	for _, m := range all {
		if namespace, ok := liveconfig.PartNamespaceOf(m.Name); ok {
			p.own.fire(namespace) // The part may belong to no root.
		}
		namespace, ok := liveconfig.NamespaceOf(m.Name)
		if !ok {
			continue
		}
		group.Go(func() error {
			found, config, err := p.live.read(groupCtx, namespace)
			if err != nil || found.resourceVersion == "" {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			secrets[namespace], configs[namespace] = found, config
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, nil, err
	}
	return secrets, configs, nil
}

// setOwners adds the namespaces that only the pods report, and loads the owners of the write keys. A key that several
// live configs have in effect belongs to the oldest Source. One that is in effect in one of them belongs to this one,
// even if another one reserves it.
func (p *primer) setOwners(secrets map[string]liveSecret) {
	pods, complete := p.heads.reports()
	for _, pod := range pods {
		for _, report := range []*podreport.Index{pod.Report, pod.Configs} {
			if report == nil {
				continue
			}
			for _, n := range report.Configs {
				if _, known := secrets[n.Namespace]; !known {
					secrets[n.Namespace] = liveSecret{}
				}
			}
		}
	}
	live := map[string]map[string]compile.KeyUse{}
	users := map[string]int{}
	for namespace, secret := range secrets {
		live[namespace] = secret.history.WriteKeys(dispatchersOf(pods, complete, namespace), p.heads.now())
		for hash, use := range live[namespace] {
			if use == compile.KeyInUse {
				users[hash]++
			}
		}
	}
	for namespace, keys := range live {
		maps.DeleteFunc(keys, func(hash string, use compile.KeyUse) bool {
			return users[hash] > 1 || use == compile.KeyReserved && users[hash] > 0
		})
		p.keys.setLive(namespace, keys)
	}
}
