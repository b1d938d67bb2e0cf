// Package standalone is the control plane without a cluster: it reads the objects from a
// folder of manifests instead of the API server. As in a cluster, the schemas and rules of
// the CRDs validate and default the objects, controllers/compile compiles them, and
// controllers/health computes their status.
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
	"github.com/posthorn/posthorn/controllers/kinds"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

const (
	// settleTime is the time without changes after which the folder is loaded: editors and
	// git write files in several steps.
	settleTime = 100 * time.Millisecond
	// maxSettleTime is the time after the first change after which the folder is loaded
	// even if it still changes.
	maxSettleTime = 2 * time.Second
	// pollInterval bounds the delay of changes that the file system does not report.
	pollInterval   = 2 * time.Second
	statusInterval = time.Second
)

// Sink receives encoded live configs; the dispatcher implements it.
type Sink interface {
	// Set provides the newest config of a namespace.
	Set(namespace string, data []byte)
	// Delete reports that a namespace has no config any more.
	Delete(namespace string)
	// Synced reports that Set was called for every namespace.
	Synced()
}

// Options configure a Control.
type Options struct {
	// Dir is the folder of manifests.
	Dir string
	// StateFile stores the last valid objects, so that an object whose manifest is invalid
	// after a restart does not count as deleted. If it is empty, the objects are in memory
	// only.
	StateFile string
	// CheckHost returns the reason why deliveries to a URL's host are denied; nil allows
	// every host.
	CheckHost func(host string) error
	Sink      Sink
	// Report returns the dispatcher's report; it is called every second.
	Report func() adminapi.Report
	// Logger; default slog.Default().
	Logger *slog.Logger
}

// Control is the control plane of a folder.
type Control struct {
	options Options
	log     *slog.Logger

	// mu guards store, which Run changes and other goroutines read.
	mu    sync.RWMutex
	store *store

	// Only Run uses the following fields.
	verdicts map[string]compile.Verdicts
	sent     map[string]liveconfig.Revisioned
	// logged are the problems that the log already has.
	logged map[string]bool
	// kept are the expired requests that are kept, which the log already has.
	kept map[id]bool
}

// compilers is the compiler's table of the kinds.
var compilers = kinds.All.Compilers()

// New returns a Control; call its Run.
func New(o Options) *Control {
	return &Control{
		options: o, log: cmp.Or(o.Logger, slog.Default()), store: newStore(),
		verdicts: map[string]compile.Verdicts{}, sent: map[string]liveconfig.Revisioned{}, logged: map[string]bool{}, kept: map[id]bool{},
	}
}

// Run loads the folder, passes its configs to the sink, and processes changes and reports
// until ctx is done. It returns an error if it cannot read the folder at the start. After
// the start it logs such an error and keeps the last valid objects.
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
	// timer fires after settleTime; last is the state of the folder when it was set.
	timer := time.NewTimer(0)
	<-timer.C
	var last []mark
	// changing is the time of the first change that is not loaded; zero if there is none.
	var changing time.Time
	unreadable := false
	check := func() {
		marks, err := manifests(c.options.Dir)
		if (err != nil) != unreadable {
			unreadable = err != nil
			if unreadable {
				c.log.Error("reading the folder of manifests failed; keeping the last valid objects", "dir", c.options.Dir, "error", err)
			}
		}
		switch {
		case err != nil:
		case slices.Equal(marks, loaded):
			changing = time.Time{}
		case changing.IsZero():
			changing, last = time.Now(), marks
			timer.Reset(settleTime)
		case slices.Equal(marks, last) || time.Since(changing) > maxSettleTime:
			changing, loaded = time.Time{}, c.load(marks)
			c.observe()
		default:
			last = marks
			timer.Reset(settleTime)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-events:
			if changing.IsZero() {
				check()
			}
		case <-poll.C:
			if changing.IsZero() {
				check()
			}
		case <-timer.C:
			check()
		case <-status.C:
			c.observe()
		}
	}
}

// watch returns the events of the file system. They can be incomplete; polling finds the
// remaining changes.
func (c *Control) watch() (<-chan fsnotify.Event, func()) {
	watcher, err := fsnotify.NewWatcher()
	if err == nil {
		if err = watcher.Add(c.options.Dir); err != nil {
			_ = watcher.Close()
		}
	}
	if err != nil {
		c.log.Warn("watching the manifests failed; polling instead", "dir", c.options.Dir, "interval", pollInterval, "error", err)
		return nil, func() {}
	}
	done := make(chan struct{})
	go func() {
		// Ignore errors: an overflow loses events, but polling finds the changes.
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

// load loads the manifests, compiles them, and passes changed configs to the sink. It
// returns marks, or nil if the manifests must be loaded again.
func (c *Control) load(marks []mark) []mark {
	c.mu.Lock()
	if len(marks) == 0 && len(c.store.objects) > 0 {
		// The volume may not be mounted. Without the objects, their messages would be discarded.
		c.log.Error("folder of manifests is empty; keeping the last valid objects; to remove all objects, write an empty List to a file (apiVersion: v1, kind: List, items: [])", "dir", c.options.Dir)
	} else {
		c.store.load(marks, time.Now())
	}
	problems, ignored := c.store.problems, c.store.ignored
	c.mu.Unlock()
	c.logProblems(problems, ignored)
	c.apply()
	if c.store.unread {
		return nil
	}
	return marks
}

// apply compiles the objects, passes changed configs to the sink, and saves the state.
func (c *Control) apply() {
	c.mu.Lock()
	snapshots := c.store.snapshots(c.options.CheckHost)
	c.mu.Unlock()
	for _, namespace := range slices.Sorted(maps.Keys(snapshots)) {
		config, verdicts := compilers.Compile(*snapshots[namespace])
		sent, exists := c.sent[namespace]
		encoded, err := compilers.Encode(config, verdicts, liveconfig.MaxEncodedBytes, func() (liveconfig.Config, bool, error) { return sent.Config, exists, nil })
		switch {
		case err != nil:
			c.log.Error("encoding the live config failed; the last one remains in effect", "namespace", namespace, "error", err)
			continue
		case encoded.Data != nil && sent.Revision != encoded.Revision:
			c.sent[namespace] = liveconfig.Revisioned{Config: encoded.Config, Revision: encoded.Revision}
			c.options.Sink.Set(namespace, encoded.Data)
		}
		c.verdicts[namespace] = encoded.Verdicts
		c.mu.Lock()
		c.store.keepAudienceKeys(namespace, encoded.Verdicts[compile.Audiences.Section])
		c.mu.Unlock()
	}
	c.save()
	for namespace := range c.verdicts {
		if snapshots[namespace] == nil {
			delete(c.verdicts, namespace)
			delete(c.sent, namespace)
			c.options.Sink.Delete(namespace)
		}
	}
}

// save saves the state.
func (c *Control) save() {
	if c.options.StateFile == "" {
		return
	}
	if err := c.store.save(c.options.StateFile); err != nil {
		c.log.Error("saving the state of the manifests failed; after a restart, objects with an invalid manifest are missing", "error", err)
	}
}

// logProblems logs each problem once.
func (c *Control) logProblems(problems, ignored []Problem) {
	logged := map[string]bool{}
	once := func(log func(string, ...any), message string, list []Problem) {
		for _, p := range list {
			logged[p.String()] = true
			if !c.logged[p.String()] {
				log(message, "file", filepath.Base(p.File), "document", p.Document, "object", p.Object, "problem", p.Message)
			}
		}
	}
	once(c.log.Warn, "manifest ignored", ignored)
	once(c.log.Error, "manifest rejected; keeping its last valid form", problems)
	c.logged = logged
}

// observe updates the status of every object with the dispatcher's report.
func (c *Control) observe() {
	if c.updateStatus() {
		c.save() // Before the dispatcher acts on it, so that a run continues after a restart.
		c.apply()
	}
}

// updateStatus updates the status of every object. It reports whether a part of a status
// changed that the compiler reads.
func (c *Control) updateStatus() (compile bool) {
	report := c.options.Report()
	pods := []health.Pod{{Name: report.Pod, Report: &report}}
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.store.sorted() {
		if o.resource == nil {
			continue
		}
		before := o.resource
		for _, e := range c.update(o, pods, now) {
			log := c.log.Info
			if e.Type == health.EventWarning {
				log = c.log.Warn
			}
			log("status changed", "kind", o.kind, "namespace", o.namespace, "name", o.name, "reason", e.Reason, "message", e.Message)
		}
		compile = compile || o.of.Input != nil && o.of.Input(before) != o.of.Input(o.resource)
	}
	c.expire(now)
	return compile
}

// update replaces an object by a copy with the present status, and returns the Events of
// the change.
func (c *Control) update(o *stored, pods []health.Pod, now time.Time) []health.Event {
	verdict, ok := c.verdicts[o.namespace][o.of.Compile.Section][o.name]
	if !ok {
		return nil
	}
	next := o.of.Health.Next(o.resource, verdict, o.namespace, pods, now, true).(client.Object)
	before, conditions := o.of.Health.Status(o.resource)
	after, conditionsAfter := o.of.Health.Status(next)
	if equality.Semantic.DeepEqual(before, after) {
		return nil
	}
	next.SetResourceVersion(c.store.version())
	o.resource = next
	return health.Transitions(*conditions, *conditionsAfter)
}

// list returns copies of the selected objects of a kind, sorted by namespace and name. An
// empty namespace means all namespaces.
func (c *Control) list(kind kinds.Kind, namespace string, selected func(client.Object) bool) client.ObjectList {
	c.mu.RLock()
	defer c.mu.RUnlock()
	items := []runtime.Object{}
	for _, o := range c.store.sorted() {
		if o.resource != nil && o.kind == kind.Name() && (namespace == "" || namespace == o.namespace) && selected(o.resource) {
			item := o.resource.DeepCopyObject()
			item.GetObjectKind().SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind.Name()))
			items = append(items, item)
		}
	}
	list := kind.NewList()
	list.GetObjectKind().SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(kind.Name() + "List"))
	list.SetResourceVersion(strconv.FormatInt(c.store.writes, 10))
	if err := meta.SetList(list, items); err != nil {
		panic(fmt.Sprintf("standalone: %v", err)) // Impossible: the items are of the list's kind.
	}
	return list
}

// Problems returns the present problems of the manifests, and the ignored objects of
// other kinds.
func (c *Control) Problems() (problems, ignored []Problem) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.Clone(c.store.problems), slices.Clone(c.store.ignored)
}

// Compiled is the result of Compile.
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
		for _, verdicts := range n.Verdicts {
			for _, v := range verdicts {
				if !v.OK() {
					return false
				}
			}
		}
	}
	return true
}

// Compile compiles a folder of manifests, or one file, without running a Control. The
// result prints and marshals without secrets. Compile returns an error only if the folder
// cannot be read or has no manifest.
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
		config, verdicts := compilers.Compile(*snapshots[namespace])
		encoded, err := compilers.Encode(config, verdicts, liveconfig.MaxEncodedBytes, func() (liveconfig.Config, bool, error) { return liveconfig.Config{}, false, nil })
		if err != nil {
			return Compiled{}, fmt.Errorf("namespace %s: %w", namespace, err)
		}
		out.Namespaces = append(out.Namespaces, CompiledNamespace{Namespace: namespace, Revision: encoded.Revision, EncodedBytes: len(encoded.Data), Config: encoded.Config, Verdicts: encoded.Verdicts})
	}
	return out, nil
}
