// Package dispatcher is the data plane as a library: it accepts calls, stores
// them durably before it answers, and delivers them as signed POSTs.
//
//	ingest -> queue -> delivery -> egress
//
// New opens the store, Run serves until its context is done. The caller provides
// the config by Set, Delete and Synced (package configsource in a cluster,
// package standalone without one).
package dispatcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/writekey"
	"github.com/posthorn/posthorn/dispatcher/admin"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/delivery"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/ingest"
	"github.com/posthorn/posthorn/dispatcher/jobs/audience"
	"github.com/posthorn/posthorn/dispatcher/jobs/deletion"
	"github.com/posthorn/posthorn/dispatcher/jobs/forward"
	"github.com/posthorn/posthorn/dispatcher/jobs/notices"
	"github.com/posthorn/posthorn/dispatcher/jobs/records"
	"github.com/posthorn/posthorn/dispatcher/jobs/redelivery"
	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/internal/promtext"
)

// Options configure a Dispatcher. Optional fields have working defaults.
type Options struct {
	// DataDir holds the store. Required; New creates it with mode 0700 if it is missing.
	DataDir string
	ServerOptions
	ProcessOptions
	// Pod is the name of this dispatcher in reports.
	Pod string
	// Namespace gets the notices about this dispatcher's disk; empty for none.
	Namespace string
	// Egress lists the non-public addresses that deliveries may use.
	Egress egress.Policy
	// Proxy for deliveries and token requests; nil for none.
	Proxy *egress.Proxy
	// Client sends the requests to receivers; an egress.Client with Egress and Proxy if it is nil.
	Client delivery.Poster
	// OrphanGrace is how long the messages of a deleted destination are kept, and
	// how long calls with a removed write key are answered 503. Default 10 min.
	OrphanGrace time.Duration
	// TrustedProxies are the proxies whose X-Forwarded-For is used.
	TrustedProxies []netip.Prefix
	// PublicHost is the host of the tracking API, with an optional port, in the settings documents of
	// client libraries. Empty: the Host header of the request.
	PublicHost string
	// AudienceOwner is the URL of the pod that stores the audiences' members and sends deletion
	// notifications; empty if it is this pod.
	AudienceOwner string
	// Memory bounds the resident memory of the process, which must run nothing but the dispatcher:
	// at least memory.Min bytes. 0 sizes all buffers for memory.Default and does not set the garbage
	// collector's limit.
	Memory int64
	// Queue configures the store.
	Queue pebblestore.Options
	// Drain delivers what the store has, and adds nothing: no listener for calls, no notices, and of
	// the DeletionRequests only those that this store has begun. The admin listener is optional.
	// Nothing is discarded: OrphanGrace has no end, and all retry windows begin again. Backlog returns the rest.
	Drain bool
	// Version is the release, for backups.
	Version string
	// Debug adds /debug to the admin listener: lanes, live config, profiles.
	Debug bool
	// DetailedMetrics adds histograms, failure reasons and lanes to the metrics of each destination.
	DetailedMetrics bool
	// Tracer continues the callers' traces to the receivers; nil disables tracing.
	Tracer trace.Tracer
	// Logger; default slog.Default().
	Logger *slog.Logger
}

// Dispatcher is a running data plane.
type Dispatcher struct {
	options Options
	log     *slog.Logger
	store   *pebblestore.Store
	client  *egress.Client
	engine  *delivery.Engine
	ingest  *ingest.Handler
	members *audience.Service
	forget  *deletion.Service
	// redeliveries runs this dispatcher's parts of Redelivery objects.
	redeliveries *redelivery.Service
	// forwards sends dead letters to other destinations.
	forwards     *forward.Service
	notices      *notices.Service
	memberFiles  *holdFS
	backingUp    sync.Mutex
	backupToken  admin.BackupToken
	gate         *admission.Gate
	changes      *changes.Log
	storage      storage
	configStates configStates
	shares       shares
	configs      *admission.Configs
	metrics      *prometheus.Registry
	registerer   prometheus.Registerer // registers in metrics
	// sourcesAtStart are the ledgers of the Sources at the start, for counters that begin at 0.
	sourcesAtStart map[string]queue.Ledger

	listeners *Listeners
	stopping  chan struct{}
}

// New opens the store and the listeners. Run or Close releases them.
func New(o Options) (*Dispatcher, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	d := &Dispatcher{options: o, log: o.Logger, stopping: make(chan struct{})}
	if o.Share == nil {
		d.metrics = NewRegistry()
		d.registerer = d.metrics
	} else {
		d.metrics = prometheus.NewRegistry()
		d.registerer = prometheus.WrapRegistererWith(o.Share.Labels, d.metrics)
	}
	// Listeners are opened before the store: a second dispatcher on the same address should fail
	// before it waits for the store's lock.
	var err error
	if d.listeners = o.Listeners; d.listeners == nil {
		if d.listeners, err = Listen(o); err != nil {
			return nil, err
		}
	}
	share := cmp.Or(o.Share, &Share{Stores: 1})
	plan, err := memory.PlanFor(o.Memory).FitFiles(memory.OpenFiles())
	if err != nil && o.Share == nil {
		d.log.Warn("too few open files", "error", err)
	}
	plan = plan.Share(share.Stores)
	if err := d.open(plan); err != nil {
		d.listeners.Close()
		return nil, err
	}
	d.changes = changes.New(func() changes.Lanes { return d.engine })
	d.gate = admission.New(admission.Options{
		Changes: d.changes, Listed: share.Listed, Decoder: share.Decoder,
		Store: d.store, DataDir: o.DataDir, HighWater: cmp.Or(o.Queue.HighWater, pebblestore.DefaultHighWater), Logger: o.Logger,
		Registerer: d.registerer, Now: o.Queue.Now,
	})
	d.ingest = ingest.New(ingest.Options{
		Gate: d.gate, Logger: o.Logger, Registerer: d.registerer, TrustedProxies: o.TrustedProxies, PublicHost: o.PublicHost, Tracer: o.Tracer,
		MaxBuffered: plan.Requests,
	})
	if err := errors.Join(d.gate.RecoverCounters(d.store), d.addDelivery(plan.InFlight)); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// complete checks the options, and sets defaults.
func (o *Options) complete() error {
	if o.DataDir == "" {
		return errors.New("dispatcher: the data directory is missing; set --data")
	}
	if o.Memory != 0 && o.Memory < memory.Min {
		return fmt.Errorf("dispatcher: memory of %d bytes is too small; set --memory to %d or more", o.Memory, memory.Min)
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.DrainTimeout <= 0 {
		o.DrainTimeout = DefaultDrain
	}
	if o.HandOver > 0 {
		o.DrainTimeout = min(o.DrainTimeout, o.HandOver)
	}
	if o.Lease == nil {
		o.Lease = permanent{}
	}
	if o.Drain {
		o.OrphanGrace = keepOrphans
	}
	return nil
}

// open opens the store.
func (d *Dispatcher) open(plan memory.Plan) (err error) {
	o := d.options
	q := o.Queue
	q.Logger, q.Registerer = o.Logger, d.registerer
	q.DataDir = o.DataDir
	if log := o.Lease.Log(); log != nil {
		q.Log = log
	}
	q.MemTableBytes = cmp.Or(q.MemTableBytes, plan.MemTable)
	q.CacheBytes = cmp.Or(q.CacheBytes, plan.Cache)
	q.DuplicateMemory = cmp.Or(q.DuplicateMemory, plan.Duplicates)
	if o.Memory != 0 && o.Share == nil {
		plan.Bound()
		q.Quiet = memory.OnQuiet()
	}
	if d.store, err = pebblestore.Open(filepath.Join(o.DataDir, backup.QueueFolder), q); err != nil {
		return err
	}
	// The lock of the store excludes other processes.
	if err := backup.RemoveRest(o.DataDir); err != nil {
		d.log.Warn("remove the rest of an interrupted backup", "error", err)
	}
	if o.AdminGuard == nil {
		// On a full disk the file cannot be written, and a backup is not possible anyway.
		if d.backupToken, err = newBackupToken(o.DataDir); err != nil {
			d.log.Warn("write of the token for backups failed; they are refused until a restart", "path", d.backupToken.File, "error", err)
		}
	}
	d.sourcesAtStart = ledgersOfSources(d.store)
	d.warnOfOpenFolder()
	return nil
}

// addDelivery makes what reads the store: the engine and the jobs.
func (d *Dispatcher) addDelivery(inFlight int) (err error) {
	o := d.options
	var windowsSince time.Time
	if o.Drain {
		windowsSince = time.Now()
	}
	d.client = egress.New(egress.Options{Policy: o.Egress, Proxy: o.Proxy, MaxOpen: inFlight, Logger: o.Logger})
	tracker := deletion.NewOutcomeTracker(d.store)
	d.engine = delivery.New(delivery.Options{
		Store: tracker, Client: cmp.Or[delivery.Poster](o.Client, d.client), Logger: o.Logger, Registerer: d.registerer, Tracer: o.Tracer,
		OrphanGrace: o.OrphanGrace, WindowsSince: windowsSince, DrainTimeout: o.DrainTimeout, DeadLetterBytes: d.gate.RoomForDeadLetters,
		MaxInFlight:     inFlight,
		DetailedMetrics: o.DetailedMetrics, MaySend: o.Lease.MaySend, MayExpire: o.Lease.MayExpire,
		Changes: d.changes, Now: o.Queue.Now,
	})
	tracker.Buried = d.engine.CountDead
	if d.forwards, err = forward.New(forward.Options{Gate: d.gate, Store: d.store, Changes: d.changes, Logger: o.Logger}); err != nil {
		return err
	}
	if d.configs, err = admission.NewConfigs(d.gate, cmp.Or(o.OrphanGrace, delivery.DefaultOrphanGrace), d.store, d.apply); err != nil {
		return err
	}
	d.memberFiles = &holdFS{FS: cmp.Or(o.Queue.FS, vfs.Default)}
	if d.members, err = audience.New(audience.Options{
		Dir: filepath.Join(o.DataDir, backup.MembersFolder), Store: d.store, Gate: d.gate, Lanes: d.store, Copies: o.Lease.Members(),
		Owner: o.AudienceOwner, OrphanGrace: o.OrphanGrace, Changes: d.changes, Logger: o.Logger, Registerer: d.registerer, FS: d.memberFiles,
	}); err != nil {
		return err
	}
	jobRecords, err := records.Open(d.store, time.Now)
	if err != nil {
		return err
	}
	d.redeliveries = redelivery.New(redelivery.ServiceOptions{Gate: d.gate, Store: d.letters(), Records: jobRecords, Takes: d.engine.Takes,
		Changes: d.changes, Logger: o.Logger})
	if d.notices, err = notices.New(notices.Options{
		Gate: d.gate, Store: d.store, Changes: d.Changes, Pod: o.Pod, Namespace: o.Namespace,
		DiskLeft: d.gate.DiskLeft, Logger: o.Logger,
	}); err != nil {
		return err
	}
	d.forget, err = deletion.New(deletion.Options{
		Gate: d.gate, Store: tracker, Records: jobRecords,
		Passive: o.AudienceOwner != "", BegunOnly: o.Drain, OrphanGrace: o.OrphanGrace, Changes: d.changes, Logger: o.Logger,
	})
	return err
}

// apply puts a view into effect for deliveries.
func (d *Dispatcher) apply(view *liveconfig.View) error {
	if err := d.forwards.Apply(view); err != nil {
		return err
	}
	if err := d.engine.Apply(view); err != nil {
		return err
	}
	suspended := map[string]bool{}
	for _, namespace := range view.Namespaces() {
		config, _ := view.Namespace(namespace)
		for i := range config.Destinations { // A copy of each would cost more than the rest of a change.
			if config.Destinations[i].State == liveconfig.Suspended {
				suspended[namespace] = true
				break
			}
		}
	}
	d.store.SetSuspended(suspended)
	return nil
}

// warnOfOpenFolder logs that other users can change stored data, and how to prevent it.
func (d *Dispatcher) warnOfOpenFolder() {
	// Files and folders inside have modes 0600 and 0700, so only write permission matters.
	if info, err := os.Stat(d.options.DataDir); err == nil && info.Mode().Perm()&0o002 != 0 && info.Mode()&os.ModeSticky == 0 {
		d.log.Warn("every user may replace files of the data directory; remove that permission: chmod o-w", "path", d.options.DataDir, "mode", info.Mode().String())
	}
}

// Addr returns the address of the tracking API, or nil.
func (d *Dispatcher) Addr() net.Addr { return addr(d.listeners.calls) }

// TLSAddr returns the address of the tracking API over TLS, or nil.
func (d *Dispatcher) TLSAddr() net.Addr { return addr(d.listeners.callsTLS) }

// ProbeAddr returns the address of the listener for probes, or nil.
func (d *Dispatcher) ProbeAddr() net.Addr { return addr(d.listeners.probes) }

// AdminAddr returns the address of the admin listener, or nil.
func (d *Dispatcher) AdminAddr() net.Addr { return addr(d.listeners.admin) }

// Listeners returns the listeners of this Dispatcher.
func (d *Dispatcher) Listeners() *Listeners { return d.listeners }

// Store gives access to the queue and its dead letters.
func (d *Dispatcher) Store() *pebblestore.Store { return d.store }

// Set provides the newest encoded live config of a namespace.
func (d *Dispatcher) Set(namespace string, stored liveconfig.Stored) {
	d.configs.Set(namespace, stored)
}

// Delete reports that a namespace has no live config.
func (d *Dispatcher) Delete(namespace string) { d.configs.Delete(namespace) }

// Synced reports that the config of every namespace is set, except for the failed
// namespaces; from now on calls are accepted.
func (d *Dispatcher) Synced(failed ...string) {
	d.configs.Synced(failed...)
	d.store.ReclaimWhenQuiet() // The garbage of the start is many times the size of the configs.
}

// Run serves until ctx is done, then stops in order: it refuses new calls, answers calls in
// progress, finishes deliveries in flight, and persists the positions.
func (d *Dispatcher) Run(ctx context.Context) error {
	engine, stopEngine := context.WithCancel(context.WithoutCancel(ctx))
	defer stopEngine()
	deliveries, stopDeliveries := context.WithCancel(engine)
	defer stopDeliveries()
	h := d.handlers()
	if e := d.options.Entrance; e != nil {
		h.Drain = e.Close
		e.Open(d, h)
	}
	written := make(chan error, 1)
	go func() { written <- d.write(engine, deliveries) }()
	group, serving := errgroup.WithContext(ctx)
	group.Go(func() error {
		defer stopEngine()
		return d.listeners.Serve(serving, d.options, h, func() time.Duration {
			close(d.stopping)
			if ctx.Err() != nil && !d.options.Lease.Ended() {
				time.Sleep(d.options.ShutdownDelay)
			}
			d.log.Info("stopping: no new calls, draining")
			if d.options.HandOver > 0 {
				stopDeliveries()
			}
			d.members.Stop()
			return d.options.DrainTimeout
		})
	})
	group.Go(func() error {
		select {
		case err := <-written:
			written <- err
			return err
		case <-engine.Done():
			return nil
		}
	})
	err := group.Wait()
	select {
	case writeErr := <-written:
		err = errors.Join(err, writeErr)
	case <-time.After(d.options.DrainTimeout + closeGrace):
		d.log.Warn("drain timeout: closing the store with unsettled deliveries, probably because the disk is full; they will be sent again")
	}
	pending := int64(0)
	for _, name := range d.store.Destinations() {
		pending += d.store.DestinationStats(name).Ledger.Pending
	}
	// A log that does not answer must not delay the end: the calls that wait for it are refused.
	abandon := time.AfterFunc(closeGrace, d.options.Lease.Abandon)
	closeErr := d.Close()
	abandon.Stop()
	if err == nil {
		err = closeErr
	}
	if err == nil {
		d.log.Info("stopped; pending messages are stored", "pending", pending)
	}
	return err
}

// write runs what writes to the store: deliveries until their context is done, and the rest until ctx is. On a full
// disk a write waits until there is space, or until the store is closed.
func (d *Dispatcher) write(ctx, deliveries context.Context) error {
	var writers errgroup.Group
	writers.Go(func() error {
		defer d.log.Debug("deliveries stopped")
		return d.engine.Run(deliveries)
	})
	writers.Go(func() error { return d.members.Run(ctx) })
	writers.Go(func() error { return d.forget.Run(ctx) })
	writers.Go(func() error { return d.redeliveries.Run(ctx) })
	writers.Go(func() error { return d.forwards.Run(ctx) })
	if !d.options.Drain {
		writers.Go(func() error { return d.notices.Run(ctx) })
	}
	writers.Go(func() error { return d.gate.RunCounters(ctx, d.store) })
	return writers.Wait()
}

// handlers returns the handlers of this Dispatcher.
func (d *Dispatcher) handlers() Handlers {
	calls := http.NewServeMux()
	d.ingest.Mount(calls)
	d.members.Mount(calls)
	admin.MountHealth(calls, d.Ready)
	gathered, written := d.Metrics()
	o := admin.Options{
		Changes: d.Changes, Metrics: promtext.Handler(gathered, written...),
		Engine: d.engine, Gate: d.gate, Store: d.letters(), Trace: d.store, Ready: d.Ready, Extra: d.options.Extra, Guard: d.options.AdminGuard,
		Backup: d.Backup, BackupToken: d.backupToken, Audit: d.log,
		Replication: d.ReplicationState,
	}
	if d.options.Debug {
		o.View = d.gate.View
	}
	return Handlers{Calls: calls, Admin: admin.NewHandler(o), Ready: d.Ready}
}

// DefaultDrain is the default of Options.DrainTimeout.
const DefaultDrain = 10 * time.Second

// closeGrace is the time limit for deliveries to record their outcomes after the drain.
const closeGrace = 5 * time.Second

// Close releases the store and the listeners of a Dispatcher that was not run.
func (d *Dispatcher) Close() error {
	d.listeners.Close()
	d.client.Close()
	return d.store.Close()
}

// Ready returns the reason why this pod must not get calls, or nil.
func (d *Dispatcher) Ready() error {
	select {
	case <-d.stopping:
		return errors.New("stopping")
	default:
	}
	if d.gate.View() == nil {
		return errors.New("waiting for the first full config")
	}
	if !d.configs.Usable() {
		return ErrNoUsableConfig
	}
	return d.shares.ready()
}

// ErrNoUsableConfig is shown to everyone, so it names no namespace.
var ErrNoUsableConfig = errors.New("no live config is usable; the log has the errors")

// Namespaces returns the namespaces that the store has, sorted: those with messages, dead letters or ledgers, and those
// whose live config was in effect.
func (d *Dispatcher) Namespaces() []string {
	names := slices.Concat(d.store.Namespaces(), d.configs.Namespaces())
	slices.Sort(names)
	return slices.Compact(names)
}

// NamespaceOf returns the namespace of the Source with a write key.
func (d *Dispatcher) NamespaceOf(key writekey.Hash) (namespace string, ok bool) {
	return d.gate.NamespaceOf(key)
}

// HasUnlistedKeys reports whether this Dispatcher knows write keys that its newest live configs lack.
func (d *Dispatcher) HasUnlistedKeys() bool { return d.configs.HasUnlistedKeys() }

// LostMembers names the audiences' files whose copies outside of the data directory are missing.
func (d *Dispatcher) LostMembers() []string { return d.members.Gaps() }

// ReplicationState describes the lease of the store; nil if no other process can take it over.
func (d *Dispatcher) ReplicationState() *adminapi.ReplicationState {
	return d.options.Lease.State(d.Ready())
}

// Metrics returns the metrics of this Dispatcher: the ones in a registry, and the ones that are written at each scrape.
func (d *Dispatcher) Metrics() (prometheus.Gatherer, []func(*promtext.Writer)) {
	return d.metrics, []func(*promtext.Writer){d.writeMetrics, d.engine.WriteMetrics}
}

// UnknownKeys returns the recent requests with an unknown write key, those with the most requests
// first.
func (d *Dispatcher) UnknownKeys() []adminapi.UnknownKey {
	return d.gate.UnknownKeys.List(d.gate.Now())
}
