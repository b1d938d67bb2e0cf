// Package standalone is the control plane without a cluster: a folder of
// manifests takes the place of the API server. Objects are validated and
// defaulted by the CRDs' own schemas and rules, compiled by controllers/compile,
// and their status is computed by controllers/health; all as in a cluster.
package standalone

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1alpha1"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

const (
	// settle is how long the folder must be at rest before it is read: editors
	// and git write files in several steps.
	settle = 100 * time.Millisecond
	// maxUnsettled is after which time it is read nevertheless.
	maxUnsettled = 2 * time.Second
	// pollInterval finds changes that the file system does not tell of.
	pollInterval   = 2 * time.Second
	statusInterval = time.Second
)

// Sink takes live configs, encoded; the dispatcher is one.
type Sink interface {
	// Set gives a namespace's newest config.
	Set(namespace string, data []byte)
	// Delete says that a namespace has no config any more.
	Delete(namespace string)
	// Synced says that every namespace's config has been given.
	Synced()
}

// Options configure a Control.
type Options struct {
	// Dir is the folder of manifests.
	Dir string
	// StateFile keeps the last valid objects over a restart, so that a manifest
	// that is broken then does not look deleted. Empty: they are kept in memory only.
	StateFile string
	// CheckHost says why a URL's host may not be delivered to; nil allows all.
	CheckHost func(host string) error
	Sink      Sink
	// Report is what the dispatcher reports; it is asked every second.
	Report func() liveconfig.Report
	// Logger; default slog.Default().
	Logger *slog.Logger
}

// Control is the control plane of a folder.
type Control struct {
	options Options
	log     *slog.Logger

	// mu guards what Run changes and others read.
	mu    sync.RWMutex
	store *store

	// Used by Run alone.
	verdicts map[string]compile.Verdicts
	sent     map[string]liveconfig.Revisioned
	told     map[string]bool
	// kept are expired requests of which it was said that they stay.
	kept map[id]bool
}

// New makes a Control. Run it.
func New(o Options) *Control {
	return &Control{
		options: o, log: cmp.Or(o.Logger, slog.Default()), store: newStore(),
		verdicts: map[string]compile.Verdicts{}, sent: map[string]liveconfig.Revisioned{}, told: map[string]bool{}, kept: map[id]bool{},
	}
}

// Run loads the folder, gives its configs to the sink, and follows changes and
// reports until ctx is done. It fails when the folder cannot be read at the
// start; later that is logged and the last good objects stay.
func (c *Control) Run(ctx context.Context) error {
	if _, err := definitions(); err != nil {
		return err
	}
	if c.options.StateFile != "" {
		if err := c.store.restore(c.options.StateFile); err != nil {
			return err
		}
	}
	marks, err := manifests(c.options.Dir)
	if err != nil {
		return err
	}
	loaded := c.load(marks)
	c.options.Sink.Synced()
	c.observe()

	events, stop := c.watch()
	defer stop()
	poll, status := time.NewTicker(pollInterval), time.NewTicker(statusInterval)
	defer poll.Stop()
	defer status.Stop()
	// timer fires when the folder may have settled; seen is how it looked when it was set.
	timer := time.NewTimer(0)
	<-timer.C
	var seen []mark
	var restless time.Time
	unreadable := false
	look := func() {
		marks, err := manifests(c.options.Dir)
		if (err != nil) != unreadable {
			unreadable = err != nil
			if unreadable {
				c.log.Error("the folder of manifests cannot be read; the last good objects stay", "dir", c.options.Dir, "error", err)
			}
		}
		switch {
		case err != nil:
		case slices.Equal(marks, loaded):
			restless = time.Time{}
		case restless.IsZero():
			restless, seen = time.Now(), marks
			timer.Reset(settle)
		case slices.Equal(marks, seen) || time.Since(restless) > maxUnsettled:
			restless, loaded = time.Time{}, c.load(marks)
			c.observe()
		default:
			seen = marks
			timer.Reset(settle)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-events:
			if restless.IsZero() {
				look()
			}
		case <-poll.C:
			if restless.IsZero() {
				look()
			}
		case <-timer.C:
			look()
		case <-status.C:
			c.observe()
		}
	}
}

// watch tells of changes in the folder as far as the system can; polling finds the rest.
func (c *Control) watch() (<-chan fsnotify.Event, func()) {
	watcher, err := fsnotify.NewWatcher()
	if err == nil {
		if err = watcher.Add(c.options.Dir); err != nil {
			_ = watcher.Close()
		}
	}
	if err != nil {
		c.log.Warn("changes of manifests are found by polling alone", "dir", c.options.Dir, "interval", pollInterval, "error", err)
		return nil, func() {}
	}
	done := make(chan struct{})
	go func() {
		// An overflow loses events; polling finds what they told of.
		for {
			select {
			case _, ok := <-watcher.Errors:
				if !ok {
					return
				}
			case <-done:
				return
			}
		}
	}()
	return watcher.Events, func() {
		close(done)
		_ = watcher.Close()
	}
}

// load takes over the manifests, compiles, and gives the sink what changed. It
// returns the marks that need not be loaded again.
func (c *Control) load(marks []mark) []mark {
	c.mu.Lock()
	if len(marks) == 0 && len(c.store.objects) > 0 {
		// A volume that is not mounted looks like this, and what waits for deleted objects is given up.
		c.log.Error("the folder of manifests is empty, which is probably a mistake: Posthorn keeps the last good objects; to remove them all, leave a file with an empty List (apiVersion: v1, kind: List, items: [])", "dir", c.options.Dir)
	} else {
		c.store.load(marks, time.Now())
	}
	problems, ignored := c.store.problems, c.store.ignored
	c.mu.Unlock()
	c.tell(problems, ignored)
	c.apply()
	if c.store.unread {
		return nil
	}
	return marks
}

// apply compiles the objects, gives the sink what changed, and saves the state.
func (c *Control) apply() {
	c.mu.Lock()
	snapshots := c.store.snapshots(c.options.CheckHost)
	c.mu.Unlock()
	for _, namespace := range slices.Sorted(maps.Keys(snapshots)) {
		config, verdicts := compile.Compile(*snapshots[namespace])
		sent, exists := c.sent[namespace]
		encoded, err := compile.Encode(config, verdicts, liveconfig.MaxEncodedBytes, func() (liveconfig.Config, bool, error) { return sent.Config, exists, nil })
		switch {
		case err != nil:
			c.log.Error("live config could not be encoded; the last one stays in effect", "namespace", namespace, "error", err)
			continue
		case encoded.Data != nil && sent.Revision != encoded.Revision:
			c.sent[namespace] = liveconfig.Revisioned{Config: encoded.Config, Revision: encoded.Revision}
			c.options.Sink.Set(namespace, encoded.Data)
		}
		c.verdicts[namespace] = encoded.Verdicts
		c.mu.Lock()
		c.store.keepAudienceKeys(namespace, encoded.Verdicts.Audiences)
		c.mu.Unlock()
	}
	if c.options.StateFile != "" {
		if err := c.store.save(c.options.StateFile); err != nil {
			c.log.Error("saving the state of the manifests failed; after a restart, objects of a broken manifest may be missing", "error", err)
		}
	}
	for namespace := range c.verdicts {
		if snapshots[namespace] == nil {
			delete(c.verdicts, namespace)
			delete(c.sent, namespace)
			c.options.Sink.Delete(namespace)
		}
	}
}

// tell logs what was not logged before.
func (c *Control) tell(problems, ignored []Problem) {
	told := map[string]bool{}
	once := func(log func(string, ...any), message string, list []Problem) {
		for _, p := range list {
			told[p.String()] = true
			if !c.told[p.String()] {
				log(message, "file", filepath.Base(p.File), "document", p.Document, "object", p.Object, "problem", p.Message)
			}
		}
	}
	once(c.log.Warn, "manifest ignored", ignored)
	once(c.log.Error, "manifest refused; the last good form of it stays", problems)
	c.told = told
}

// observe brings the status of every object up to date with the dispatcher's report.
func (c *Control) observe() {
	if c.updateStatus() {
		c.apply() // A run that has ended is not in the config, and ended also after a restart.
	}
}

// updateStatus reports whether the run of a DeletionRequest ended.
func (c *Control) updateStatus() (ended bool) {
	report := c.options.Report()
	pods := []health.Pod{{Name: report.Pod, Report: &report}}
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.store.sorted() {
		var events []health.Event
		switch r := o.resource.(type) {
		case *v1alpha1.Source:
			events = update(c, o, r, c.verdicts[o.namespace].Sources, health.Sources, pods, now)
		case *v1alpha1.WebhookDestination:
			events = update(c, o, r, c.verdicts[o.namespace].Destinations, health.Destinations, pods, now)
		case *v1alpha1.Audience:
			events = update(c, o, r, c.verdicts[o.namespace].Audiences, health.Audiences, pods, now)
		case *v1alpha1.DeletionRequest:
			events = update(c, o, r, c.verdicts[o.namespace].Deletions, health.DeletionRequests, pods, now)
			ended = ended || !v1alpha1.JobEnded(r.Status.JobStatus) && v1alpha1.JobEnded(o.resource.(*v1alpha1.DeletionRequest).Status.JobStatus)
		}
		for _, e := range events {
			log := c.log.Info
			if e.Type == health.EventWarning {
				log = c.log.Warn
			}
			log("status changed", "kind", o.kind, "namespace", o.namespace, "name", o.name, "reason", e.Reason, "message", e.Message)
		}
	}
	c.expire(now)
	return ended
}

// update brings one object's status up to date, on a copy of it, and returns what
// that is worth telling.
func update[T, S any, O interface {
	*T
	client.Object
}](c *Control, o *stored, r O, verdicts map[string]compile.Verdict, k health.Kind[T, S], pods []health.Pod, now time.Time) []health.Event {
	verdict, ok := verdicts[o.name]
	if !ok {
		return nil
	}
	next := *r
	status, conditions := k.Status(&next)
	before := *conditions
	fresh := k.Compute(*r, verdict, o.namespace, pods, now, true)
	if equality.Semantic.DeepEqual(fresh, *status) {
		return nil
	}
	*status = fresh
	O(&next).SetResourceVersion(c.store.version())
	o.resource = O(&next)
	return health.Transitions(before, *conditions)
}

// list returns copies of the objects of a kind that are chosen, status included,
// in a namespace ("" is all), sorted by namespace and name.
func (c *Control) list(kind, namespace string, chosen func(client.Object) bool) client.ObjectList {
	c.mu.RLock()
	defer c.mu.RUnlock()
	items := []runtime.Object{}
	for _, o := range c.store.sorted() {
		if o.resource != nil && o.kind == kind && (namespace == "" || namespace == o.namespace) && chosen(o.resource) {
			item := o.resource.DeepCopyObject()
			item.GetObjectKind().SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind))
			items = append(items, item)
		}
	}
	list := newOf(kind + "List").(client.ObjectList)
	list.GetObjectKind().SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind + "List"))
	list.SetResourceVersion(strconv.FormatInt(c.store.writes, 10))
	if err := meta.SetList(list, items); err != nil {
		panic(fmt.Sprintf("standalone: %v", err)) // the items are of the list's kind
	}
	return list
}

// Problems returns what is wrong with the manifests right now, and which
// objects of other kinds were ignored.
func (c *Control) Problems() (problems, ignored []Problem) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.Clone(c.store.problems), slices.Clone(c.store.ignored)
}

// Compiled is what a folder of manifests compiles to.
type Compiled struct {
	Namespaces []CompiledNamespace `json:"namespaces"`
	Problems   []Problem           `json:"problems,omitempty"`
	Ignored    []Problem           `json:"ignored,omitempty"`
}

// CompiledNamespace is one namespace's part.
type CompiledNamespace struct {
	Namespace string `json:"namespace"`
	// Revision and EncodedBytes are those of the live config.
	Revision     string            `json:"revision"`
	EncodedBytes int               `json:"encodedBytes"`
	Config       liveconfig.Config `json:"config"`
	// Verdicts are the conditions Accepted and ResolvedRefs of each object.
	Verdicts compile.Verdicts `json:"verdicts"`
}

// OK reports whether every manifest is valid, and every object is accepted and
// has its references resolved.
func (c Compiled) OK() bool {
	if len(c.Problems) > 0 {
		return false
	}
	for _, n := range c.Namespaces {
		for _, verdicts := range []map[string]compile.Verdict{n.Verdicts.Sources, n.Verdicts.Destinations, n.Verdicts.Audiences, n.Verdicts.Deletions} {
			for _, v := range verdicts {
				if !v.OK() {
					return false
				}
			}
		}
	}
	return true
}

// Compile compiles a folder of manifests, or one file, without running
// anything. Its result prints and marshals without secrets; the error is for a
// folder that cannot be read or has no manifest.
func Compile(path string, checkHost func(host string) error) (Compiled, error) {
	if _, err := definitions(); err != nil {
		return Compiled{}, err
	}
	marks, err := manifests(path)
	if err != nil {
		return Compiled{}, err
	}
	if len(marks) == 0 {
		return Compiled{}, fmt.Errorf("%s has no manifest (*.yaml, *.yml, *.json)", path)
	}
	s := newStore()
	s.load(marks, time.Now())
	out := Compiled{Namespaces: []CompiledNamespace{}, Problems: s.problems, Ignored: s.ignored}
	snapshots := s.snapshots(checkHost)
	for _, namespace := range slices.Sorted(maps.Keys(snapshots)) {
		config, verdicts := compile.Compile(*snapshots[namespace])
		encoded, err := compile.Encode(config, verdicts, liveconfig.MaxEncodedBytes, func() (liveconfig.Config, bool, error) { return liveconfig.Config{}, false, nil })
		if err != nil {
			return Compiled{}, fmt.Errorf("namespace %s: %w", namespace, err)
		}
		out.Namespaces = append(out.Namespaces, CompiledNamespace{Namespace: namespace, Revision: encoded.Revision, EncodedBytes: len(encoded.Data), Config: encoded.Config, Verdicts: encoded.Verdicts})
	}
	return out, nil
}
