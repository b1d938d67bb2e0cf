package dispatcher

import (
	"context"
	"encoding/json"
	"hash/fnv"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// Report returns the config in effect and the traffic of this dispatcher. It builds the reports of
// all objects; Changes is cheaper.
func (d *Dispatcher) Report() adminapi.Report {
	r := adminapi.Report{Cursor: d.changes.Cursor()} // Before the objects are read, so that no change is missed.
	d.setPod(&r)
	view := d.gate.View()
	if view == nil {
		return r
	}
	refused := d.configs.Rejected()
	for _, name := range view.Namespaces() {
		config, _ := view.Namespace(name)
		n := d.namespaceReport(config)
		if refusal, ok := refused[name]; ok {
			n.Refused = &refusal
			delete(refused, name)
		}
		r.Namespaces = append(r.Namespaces, n)
	}
	for name, refusal := range refused {
		r.Namespaces = append(r.Namespaces, adminapi.NamespaceReport{Namespace: name, Refused: &refusal})
	}
	sortNamespaces(r.Namespaces)
	return r
}

// Changes returns what changed since the cursor of an earlier report, or nil if nothing did. If it
// does not know the cursor, the report is full.
func (d *Dispatcher) Changes(cursor string) *adminapi.Report {
	var r adminapi.Report
	version := d.setPod(&r)
	changed, ok := d.changes.Since(cursor, changes.Pod{Ready: r.Ready, Storage: r.Storage, Configs: version, Shares: r.Shares,
		AboveShares: strings.Join(r.AboveShares, " ")})
	switch {
	case !ok:
		return nil
	case changed.Full:
		full := d.Report()
		return &full
	}
	r.Cursor, r.Delta, r.RemovedNamespaces = changed.Cursor, true, changed.Removed
	view, refused := d.gate.View(), d.configs.Rejected()
	for name, n := range changed.Namespaces {
		config, _ := view.Namespace(name)
		config.Namespace, config.Config = name, n.Select(config.Config)
		report := d.namespaceReport(config)
		report.Complete, report.Removed = n.Complete, n.Removed
		if refusal, ok := refused[name]; ok {
			report.Refused = &refusal
		}
		r.Namespaces = append(r.Namespaces, report)
	}
	sortNamespaces(r.Namespaces)
	return &r
}

// setPod sets the parts of a report that belong to no namespace. configs is another number after
// each change of the states of the live configs.
func (d *Dispatcher) setPod(r *adminapi.Report) (configs uint64) {
	r.Pod, r.Storage = d.options.Pod, d.storage.get(d.gate)
	if r.Storage.Pressure {
		r.Storage.LackingBytes = (d.store.Lacking() + 1<<20 - 1) &^ (1<<20 - 1)
	}
	r.Replication = d.options.Lease.Report()
	r.Shares, r.AboveShares = d.shares.applied(d.engine)
	r.Ready = d.gate.View() != nil && d.Ready() == nil
	r.Configs, configs = d.configStates.get(d.configs, d.engine.Discards())
	return configs
}

// configStates has the states of the live configs for reports, while there are no discards ahead.
type configStates struct {
	mu      sync.Mutex
	version uint64
	reports []adminapi.ConfigReport
}

// get returns the states of the live configs, sorted by namespace, and another version after each
// change. Only discards ahead, whose messages can expire meanwhile, must be compared each time.
func (s *configStates) get(configs *admission.Configs, discards map[string][]adminapi.Discard) ([]adminapi.ConfigReport, uint64) {
	states, version := configs.States()
	if len(discards) > 0 {
		h := fnv.New64a()
		_ = json.NewEncoder(h).Encode(discards) // Neither the hash nor a field can fail.
		return configReports(states, discards), h.Sum64() + version
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.version != version {
		s.version, s.reports = version, configReports(states, nil)
	}
	return s.reports, version
}

func configReports(states map[string]admission.ConfigState, discards map[string][]adminapi.Discard) (list []adminapi.ConfigReport) {
	add := func(namespace string, s admission.ConfigState) {
		c := adminapi.ConfigReport{Namespace: namespace, Number: s.Number, Missing: s.Missing, Parked: s.Parked, Discards: discards[namespace],
			Reserved: s.Reserved}
		if c.Number > 0 && !s.Removed || !c.Missing.IsZero() || len(c.Parked)+len(c.Discards)+len(c.Reserved) > 0 {
			list = append(list, c)
		}
	}
	for namespace, s := range states {
		add(namespace, s)
	}
	for namespace := range discards {
		if _, known := states[namespace]; !known {
			add(namespace, admission.ConfigState{})
		}
	}
	slices.SortFunc(list, func(a, b adminapi.ConfigReport) int { return strings.Compare(a.Namespace, b.Namespace) })
	return list
}

// namespaceReport returns the reports of a config's objects.
func (d *Dispatcher) namespaceReport(config liveconfig.Revisioned) adminapi.NamespaceReport {
	n := adminapi.NamespaceReport{
		Namespace: config.Namespace, Revision: config.Revision, Destinations: d.engine.Report(config.Config),
		Audiences: d.members.Report(config.Config),
		Deletions: d.forget.Report(config.Config), Redeliveries: d.redeliveries.Report(config.Config),
	}
	for i := range n.Destinations {
		to := &n.Destinations[i]
		to.DeadLettersForwarded = d.forwards.Forwarded(config.Namespace, to.Name)
	}
	for _, s := range config.Sources {
		key := config.Namespace + "/" + s.Name
		stats, counters := d.store.SourceStats(key), d.gate.Counters(key)
		var share *adminapi.StorageShare
		if counters.StoragePressure {
			d.changes.Object(changes.Sources, config.Namespace, s.Name).TransitionAt(counters.PressureEnds)
			share = &adminapi.StorageShare{Quota: d.options.Queue.MaxBytesPerSource != 0}
			share.UsedBytes, share.MaxBytes = d.store.Share(key)
		}
		n.Sources = append(n.Sources, adminapi.SourceReport{
			Name: s.Name, Generation: s.Generation, Revision: s.Revision,
			Accepted: stats.Accepted, Duplicates: counters.Duplicates, Rejected: counters.Rejected,
			LastAccepted: counters.LastAccepted, LastRejected: counters.LastRejected, LastRejection: counters.LastRejection,
			Defects:         counters.Defects,
			StoragePressure: counters.StoragePressure, Share: share, Messages: adminapi.Ledger(stats.Ledger),
			Limit: d.gate.LimitUse(config.Namespace, &s),
		})
	}
	return n
}

func sortNamespaces(list []adminapi.NamespaceReport) {
	slices.SortFunc(list, func(a, b adminapi.NamespaceReport) int { return strings.Compare(a.Namespace, b.Namespace) })
}

// storageInterval is how long the report has the same disk usage, which is costly to measure.
const storageInterval = 10 * time.Second

// storage is the disk usage for reports.
type storage struct {
	mu       sync.Mutex
	at       time.Time
	report   adminapi.StorageReport
	forecast forecast
}

// get returns the disk usage, rounded: the free space of a shared disk changes all the time, which
// must not change the report of an idle pod. Pressure is always up to date.
func (s *storage) get(gate *admission.Gate) adminapi.StorageReport {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); s.at.IsZero() || now.Sub(s.at) >= storageInterval {
		s.at, s.report = now, gate.Storage()
		if left, total, ok := gate.DiskLeft(); ok {
			s.report.DaysLeft = s.forecast.days(now, int64(left), int64(total))
		}
		s.report.FreeBytes -= s.report.FreeBytes % min(64<<20, max(s.report.TotalBytes/64, 1))
		s.report.UsedBytes -= s.report.UsedBytes % (1 << 20)
	}
	s.report.Pressure = gate.Store.Full()
	return s.report
}

// letters returns the store for the removal of dead letters, whose number is in the report.
func (d *Dispatcher) letters() deadLetters { return deadLetters{d.store, d.changes} }

// deadLetters marks the destinations whose dead letters are removed.
type deadLetters struct {
	*pebblestore.Store
	changes *changes.Log
}

// DeleteDeadLetters implements queue.DeadLetters.
func (s deadLetters) DeleteDeadLetters(ctx context.Context, destination string, keys ...string) error {
	err := s.Store.DeleteDeadLetters(ctx, destination, keys...)
	namespace, name, _ := strings.Cut(destination, "/")
	s.changes.Object(changes.Destinations, namespace, name).Numbers()
	return err
}
