package page

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/podreport"
)

const (
	// interval and points make 60 minutes.
	interval, points = 15 * time.Second, 240
	// maxSeries bounds the destinations with a past: the worst and the busiest ones.
	maxSeries = 200
)

// point is what happened in one interval, and what was pending at its end.
type point struct{ accepted, delivered, failed, pending int64 }

// history is the past of the whole and of maxSeries destinations; about 8 KB a destination.
type history struct {
	total  series
	series map[key]*series
	before map[string]*podreport.Index
	at     time.Time
}

type series struct {
	ring [points]point
	n    int
}

func newHistory() history { return history{series: map[key]*series{}} }

func (s *series) add(p point) { s.ring[s.n%points] = p; s.n++ }

// list returns the points, oldest first; nil without a past.
func (s *series) list() (all []point) {
	if s == nil {
		return nil
	}
	for i := max(0, s.n-points); i < s.n; i++ {
		all = append(all, s.ring[i%points])
	}
	return all
}

// Run samples the dispatchers until ctx is done. It reads only what changed, and no objects.
func (p *Page) Run(ctx context.Context) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		p.mu.Lock()
		p.readReports(ctx)
		p.past.sample(p.live.view)
		p.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// sample adds a point to the whole and to the destinations that are worth it. The first sample only
// sets the start.
func (h *history) sample(v view) {
	before := view{indices: h.before}
	defer func() { h.before = v.indices }()
	if h.at.IsZero() {
		h.at = v.now
		return
	}
	h.at = v.now
	type one struct {
		key
		point
		trouble bool
	}
	var all []one
	var total point
	seen := map[key]bool{}
	for _, x := range v.indices {
		for namespace, n := range v.namespaces(x) {
			for d := range n.Destinations() {
				k := key{namespace, d.Name}
				if seen[k] {
					continue
				}
				seen[k] = true
				now, then := v.numbers(k), before.numbers(k)
				if !before.has(k) { // Its ledger is older than its first sample.
					then = now
				}
				o := one{k, point{
					accepted: grown(now.Accepted, then.Accepted), delivered: grown(now.Delivered, then.Delivered),
					failed: grown(now.DeadLettered, then.DeadLettered), pending: now.Pending,
				}, now.Open || now.Retrying > 0}
				total.delivered, total.failed, total.pending = total.delivered+o.delivered, total.failed+o.failed, total.pending+o.pending
				all = append(all, o)
			}
		}
	}
	for pod, x := range v.indices {
		for namespace, n := range v.namespaces(x) {
			old := h.before[pod].Namespace(namespace)
			for name, s := range n.Sources {
				if old != nil && old.Sources[name] != nil {
					total.accepted += grown(s.Accepted, old.Sources[name].Accepted)
				}
			}
		}
	}
	h.total.add(total)
	slices.SortFunc(all, func(a, b one) int {
		return cmp.Or(compareBools(b.trouble, a.trouble), cmp.Compare(b.delivered+b.pending, a.delivered+a.pending),
			compareBools(h.series[b.key] != nil, h.series[a.key] != nil), compareKeys(a.key, b.key))
	})
	next := map[key]*series{}
	for _, o := range all[:min(len(all), maxSeries)] {
		s := h.series[o.key]
		if s == nil {
			s = &series{}
		}
		s.add(o.point)
		next[o.key] = s
	}
	h.series = next
}

// has reports whether a dispatcher reports the destination.
func (v *view) has(k key) bool {
	var d adminapi.DestinationReport
	for _, x := range v.indices {
		if x.Namespace(k.Namespace).ReadDestination(k.Name, &d) {
			return true
		}
	}
	return false
}

// grown is the growth of a counter; 0 if a pod that had counted is missing now.
func grown(now, before int64) int64 { return max(0, now-before) }

func compareBools(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// calls are the sums of the Sources.
func (v *view) calls() (sum adminapi.SourceReport) {
	for _, x := range v.indices {
		for _, n := range v.namespaces(x) {
			for _, s := range n.Sources {
				sum.Accepted += s.Accepted
				sum.Rejected += s.Rejected
				sum.Duplicates += s.Duplicates
			}
		}
	}
	return sum
}
