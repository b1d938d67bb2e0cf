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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
	"github.com/posthorn/posthorn/controllers/kinds"
	"github.com/posthorn/posthorn/controllers/manifest"
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

// Options configure a Control.
type Options struct {
	// Dir is the folder of manifests.
	Dir string
	// StateFile stores the last valid objects, so that an object whose manifest is invalid
	// after a restart does not count as deleted. If it is empty, the objects are in memory
	// only.
	StateFile string
	// Records keeps the states of the objects in a replicated log; nil without one.
	Records Records
	// SecretValues are Secrets beside those in Dir.
	SecretValues []SecretValue
	// Policy applies to every destination.
	Policy compile.Policy
	Sink   liveconfig.Sink
	// Changes returns what changed in the dispatcher since the cursor of the last report, or nil; it
	// is called every second.
	Changes func(cursor string) *adminapi.Report
	// UnknownKeys returns the dispatcher's recent requests with an unknown write key; optional.
	UnknownKeys func() []adminapi.UnknownKey
	// Logger; default slog.Default().
	Logger *slog.Logger
}

// Control is the control plane of a folder.
type Control struct {
	options Options
	log     *slog.Logger

	// mu guards store, and the states of the live configs, which Run changes and other goroutines read.
	mu      sync.RWMutex
	store   *store
	configs []adminapi.ConfigReport

	// started and ended are closed when Run begins to call calls, and when it ends.
	started, ended chan struct{}
	// calls are functions that Run calls.
	calls chan func()

	// Only Run uses the following fields.
	verdicts map[string]compile.Verdicts
	sent     map[string]sentConfig
	// compiled are the inputs of the namespaces' last compilations; none for a result that depends on more.
	compiled map[string]inputs
	// expressions are the expressions of all namespaces.
	expressions compile.Expressions
	// logged are the problems that the log already has.
	logged map[string]bool
	// hadSources is true if the objects of the last load had a Source, and before the first load.
	hadSources bool
	// dispatcher is the dispatcher's state. due has the times at which the status of a namespace's
	// objects changes without a change of it.
	dispatcher *podreport.Index
	due        map[string]time.Time
	// isSaved is false if a live config was sent since the state was saved.
	isSaved bool
	// kept are the expired requests that are kept, which the log already has.
	kept map[id]bool
}

// sentConfig is the live config of a namespace that the sink has.
type sentConfig struct {
	compile.Encoded
	existing map[liveconfig.Ref]string
	history  compile.History
}

// compilers is the compiler's table of the kinds.
var compilers = kinds.All.Compilers()

// New returns a Control; call its Run.
func New(o Options) *Control {
	c := &Control{
		options: o, log: cmp.Or(o.Logger, slog.Default()), store: newStore(),
		started: make(chan struct{}), ended: make(chan struct{}), calls: make(chan func()),
		verdicts: map[string]compile.Verdicts{}, sent: map[string]sentConfig{}, compiled: map[string]inputs{}, logged: map[string]bool{},
		kept: map[id]bool{}, hadSources: true,
		due: map[string]time.Time{},
	}
	c.store.secretValues = slices.Clone(o.SecretValues)
	return c
}

// Run loads the folder, passes its configs to the sink, and processes changes and reports
// until ctx is done; call it once. It returns an error if it cannot read the folder at the
// start. After the start it logs such an error and keeps the last valid objects.
func (c *Control) Run(ctx context.Context) error {
	defer close(c.ended)
	loaded, err := c.start()
	if err != nil {
		return err
	}
	c.options.Sink.Synced()
	c.observe("")

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
		marks, err := c.marks()
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
			c.observe(c.cursor())
		default:
			last = marks
			timer.Reset(settleTime)
		}
	}
	close(c.started)
	for {
		select {
		case <-ctx.Done():
			return nil
		case call := <-c.calls:
			call()
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
			c.observe(c.cursor())
		}
	}
}

// start restores the state and loads the folder. It returns the result of load.
func (c *Control) start() (loaded []mark, err error) {
	if _, err := definitions(); err != nil {
		return nil, err
	}
	marks, err := c.marks()
	if err != nil {
		return nil, err
	}
	if c.options.StateFile != "" {
		if err := c.store.restore(c.options.StateFile, filesOf(marks)); err != nil {
			return nil, err
		}
		c.store.restoreSecretValues(time.Now())
		if report := c.options.Changes(""); report != nil { // With the numbers of the live configs.
			c.dispatcher, _ = c.dispatcher.Merge(*report, nil)
		}
		if c.options.Records != nil {
			if err := c.store.readRecords(c.options.Records); err != nil {
				return nil, err
			}
		}
		c.restoreHistories()
	}
	return c.load(marks), nil
}

// marks lists the manifests and the files of Secrets' values.
func (c *Control) marks() ([]mark, error) {
	marks, err := manifests(c.options.Dir)
	return append(marks, marksOfSecretValues(c.store.secretValues)...), err
}

// filesOf returns the marks of the manifests.
func filesOf(marks []mark) []mark {
	return slices.DeleteFunc(slices.Clone(marks), func(m mark) bool { return m.secret })
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
	before := c.store.problems
	files := filesOf(marks)
	if len(files) == 0 && len(c.store.objects) > 0 {
		// The volume may not be mounted. Without the objects, their messages would be discarded.
		c.log.Error("folder of manifests is empty; keeping the last valid objects; to remove all objects, write an empty List to a file (apiVersion: v1, kind: List, items: [])", "dir", c.options.Dir)
	} else {
		c.store.load(files, time.Now())
		c.store.explainProblems(before, time.Now())
	}
	problems, parked, warnings := c.store.problems, c.store.parked, c.store.warnings
	added := c.store.added
	c.store.added = nil
	sources := slices.ContainsFunc(slices.Collect(maps.Values(c.store.objects)), func(o *stored) bool { return o.kind == kindSource })
	c.mu.Unlock()
	c.logProblems(problems, parked, warnings)
	for _, o := range added {
		c.log.Warn("object created that the log does not have; if the last owner deleted it, remove its manifest here, too", "kind", o.kind, "namespace", o.namespace, "name", o.name)
	}
	if !sources && c.hadSources {
		c.log.Warn("the manifests have no valid Source; every call gets 401 until there is one", "dir", c.options.Dir)
	}
	c.hadSources = sources
	c.saveRecords() // Before the dispatcher has the UIDs.
	c.apply()
	if c.store.unread {
		return nil
	}
	return marks
}

// apply compiles the namespaces whose objects have changed, passes changed configs to the sink, and saves the
// state.
func (c *Control) apply() {
	c.mu.Lock()
	snapshots := c.store.snapshots(c.options.Policy)
	c.mu.Unlock()
	for namespace := range c.sent {
		if snapshots[namespace] == nil {
			snapshots[namespace] = &snapshot{Snapshot: compile.Snapshot{Namespace: namespace}}
		}
	}
	changed := maps.Clone(snapshots)
	maps.DeleteFunc(changed, func(namespace string, s *snapshot) bool { return c.isCompiled(namespace, s) })
	for _, namespace := range c.expressions.Set(objectsOf(changed)) {
		delete(c.compiled, namespace)
	}
	for _, namespace := range slices.Sorted(maps.Keys(snapshots)) {
		if c.store.lacksRun(namespace) {
			continue // Without its live config, the dispatcher parks the namespace.
		}
		snapshot := snapshots[namespace]
		sent, exists := c.sent[namespace]
		if c.isCompiled(namespace, snapshot) {
			c.compiled[namespace] = snapshot.inputs // The objects in the store are those in its manifests.
			continue                                // followReport sends a changed head.
		}
		delete(c.compiled, namespace)
		snapshot.ExpressionsOver = c.expressions.Over(namespace)
		config, verdicts := compilers.Compile(snapshot.Snapshot)
		encoded, err := compilers.Encode(nil, config, verdicts, compile.DefaultLimit, func() (liveconfig.Config, bool, error) {
			return sent.Config, exists, nil
		})
		if err != nil {
			c.log.Error("encoding the live config failed; the last one remains in effect", "namespace", namespace, "error", err)
			continue
		}
		isSent := encoded.Chunks != nil && c.send(namespace, sentConfig{encoded, compilers.Existing(snapshot.Objects), sent.history})
		if len(snapshot.Objects) == 0 {
			delete(c.verdicts, namespace)
			continue
		}
		c.verdicts[namespace] = encoded.Verdicts
		if isSent && !encoded.TooLarge { // Evictions depend on the last config.
			c.compiled[namespace] = snapshot.inputs
		}
	}
	c.save()
	c.dueNow()
}

// isCompiled reports whether the live config of a namespace was compiled from a snapshot.
func (c *Control) isCompiled(namespace string, s *snapshot) bool {
	last, ok := c.compiled[namespace]
	_, sent := c.sent[namespace]
	return ok && sent && last.equal(s.inputs)
}

// objectsOf returns the objects of snapshots.
func objectsOf(snapshots map[string]*snapshot) map[string][]compile.Object {
	all := map[string][]compile.Object{}
	for namespace, s := range snapshots {
		all[namespace] = s.Objects
	}
	return all
}

// restoreHistories makes the restored objects the last live configs, so that the objects whose manifests were removed
// in the meantime are deleted. If the dispatcher has a newer live config, which another process with the same log has
// sent, the missing objects are parked: see compile.History.Restored.
func (c *Control) restoreHistories() {
	c.store.unproved = map[string]bool{}
	snapshots := c.store.snapshots(c.options.Policy)
	for namespace, head := range c.store.heads {
		config := liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: namespace}
		if snapshot := snapshots[namespace]; snapshot != nil {
			config, _ = compilers.Compile(snapshot.Snapshot)
		}
		head.Revision = "" // Each live config is sent.
		history := compile.HistoryOf(liveconfig.Revisioned{Config: config, Head: head})
		history.Verified = true
		c.sent[namespace] = sentConfig{Encoded: compile.Encoded{Config: config}, history: history}
	}
	if c.dispatcher != nil {
		for _, reported := range c.dispatcher.Configs {
			c.store.unproved[reported.Namespace] = reported.Number > c.store.heads[reported.Namespace].Number
		}
	}
}

// send passes a live config to the sink if it or its head has changed. It removes the config of a
// namespace without objects when the dispatcher has removed their data. It returns false after an error.
func (c *Control) send(namespace string, next sentConfig) bool {
	head, changed := next.history.Next(next.Revision, compile.Present{UIDs: next.existing}, c.dispatchers(namespace), time.Now(),
		compile.TombstoneGrace)
	switch {
	case len(next.existing) == 0 && len(head.Tombstones) == 0 && len(next.Config.Deletions)+len(next.Config.Redeliveries) == 0:
		if _, sent := c.sent[namespace]; sent {
			delete(c.sent, namespace)
			c.isSaved = false
			c.options.Sink.Delete(namespace)
		}
		return true
	case !changed:
		return true
	}
	text, err := liveconfig.EncodeHead(head)
	if err != nil {
		c.log.Error("encoding the live config failed; the last one remains in effect", "namespace", namespace, "error", err)
		return false
	}
	next.history = compile.HistoryOf(liveconfig.Revisioned{Config: next.Config, Revision: next.Revision, Head: head})
	next.history.Verified = true
	c.sent[namespace], c.isSaved = next, false
	c.options.Sink.Set(namespace, liveconfig.Stored{Config: next.Chunks.Bytes(), Head: text})
	return true
}

// followReport sends the configs again whose heads depend on the dispatcher's report, and the configs of
// namespaces that only the dispatcher knows.
func (c *Control) followReport() {
	c.isSaved = true
	for _, namespace := range slices.Sorted(maps.Keys(c.sent)) {
		if sent := c.sent[namespace]; sent.Chunks != nil && !sent.history.Settled(c.dispatchers(namespace), time.Now()) {
			c.send(namespace, sent)
		}
	}
	if !c.isSaved {
		c.save()
	}
}

// dispatchers returns the dispatcher's report about the live config of a namespace. Parked objects remain parked for
// any time: another process with the same log may have their manifests.
func (c *Control) dispatchers(namespace string) compile.Dispatchers {
	report := c.dispatcher.Config(namespace)
	report.Parked = slices.Clone(report.Parked)
	for i := range report.Parked {
		report.Parked[i].Since = time.Now()
	}
	return compile.DispatchersOf(compile.Reports{Ready: []adminapi.ConfigReport{report}, Silent: c.dispatcher == nil})
}

// save saves the state.
func (c *Control) save() {
	c.saveRecords()
	if c.options.StateFile == "" {
		return
	}
	c.store.heads = map[string]liveconfig.Head{}
	for namespace, sent := range c.sent {
		c.store.heads[namespace] = sent.history.Head
	}
	if err := c.store.save(c.options.StateFile); err != nil {
		c.log.Error("saving the state of the manifests failed; after a restart, objects with an invalid manifest are missing", "error", err)
	}
}

// saveRecords saves the records. The log has them before what the dispatcher stores later.
func (c *Control) saveRecords() {
	if c.options.Records == nil {
		return
	}
	if err := c.store.writeRecords(c.options.Records); err != nil {
		c.log.Error("saving the records of the manifests failed; after a takeover, runs that failed are repeated", "error", err)
	}
}

// logProblems logs each problem once.
func (c *Control) logProblems(problems, parked, warnings []manifest.Problem) {
	logged := map[string]bool{}
	once := func(log func(string, ...any), message string, list []manifest.Problem) {
		for _, p := range list {
			logged[p.String()] = true
			if !c.logged[p.String()] {
				log(message, "file", filepath.Base(p.File), "line", p.Line, "object", p.Object, "problem", p.Message, "effect", p.Effect)
			}
		}
	}
	once(c.log.Warn, "manifest has a warning", warnings)
	once(c.log.Error, "manifest rejected", problems)
	once(c.log.Error, "object parked", parked)
	c.logged = logged
}

// refresh updates the status of every object now, so that an answer has no numbers of up to a
// second ago. It does nothing while Run does not run.
func (c *Control) refresh(ctx context.Context) {
	select {
	case <-c.started:
		_ = c.inRun(ctx, func() { c.observe("") }) // A full report has the present numbers; changes of numbers may be 2 s old.
	default:
	}
}

// observe updates the status of every object with the changes in the dispatcher since a cursor;
// "" means a full report.
func (c *Control) observe(cursor string) {
	if c.updateStatus(cursor) {
		c.save() // Before the dispatcher acts on it, so that a run continues after a restart.
		c.apply()
	}
	c.followReport()
}

// updateStatus updates the status of the objects that it may concern. It reports whether
// a part of a status changed that the compiler reads.
func (c *Control) updateStatus(cursor string) (recompile bool) {
	now := time.Now()
	namespaces := c.dueNamespaces(now, cursor)
	if len(namespaces) == 0 {
		return false
	}
	pods := []health.Pod{{Name: c.dispatcher.Pod, Report: c.dispatcher}}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.store.sortedIf(func(o *stored) bool { return o.resource != nil && namespaces[o.namespace] }) {
		before := o.resource
		for _, e := range c.update(o, pods, now) {
			log := c.log.Info
			if e.Type == health.EventWarning {
				log = c.log.Warn
			}
			log("status changed", "kind", o.kind, "namespace", o.namespace, "name", o.name, "reason", e.Reason, "message", e.Message)
		}
		recompile = recompile || o.of.Input != nil && o.of.Input(before) != o.of.Input(o.resource)
		for _, next := range []func(compile.Object) (time.Time, bool){o.of.Health.ChangesAt, o.of.Health.Expires} {
			if at, ok := next(o.resource); ok && (c.due[o.namespace].IsZero() || at.Before(c.due[o.namespace])) {
				c.due[o.namespace] = at
			}
		}
	}
	c.expire(namespaces, now)
	return recompile
}

// dueNamespaces returns the namespaces whose objects' status may change now: those whose
// reports changed, and those that are due.
func (c *Control) dueNamespaces(now time.Time, cursor string) map[string]bool {
	namespaces := map[string]bool{}
	if report := c.options.Changes(cursor); report != nil {
		next, changed := c.dispatcher.Merge(*report, nil)
		if c.dispatcher == nil || c.dispatcher.Storage.Pressure != next.Storage.Pressure {
			c.dueNow()
		}
		c.dispatcher = next
		c.mu.Lock()
		c.configs = next.Configs
		c.mu.Unlock()
		for _, namespace := range changed {
			namespaces[namespace] = true
		}
	}
	for namespace, at := range c.due {
		if !now.Before(at) {
			namespaces[namespace] = true
		}
	}
	for namespace := range namespaces {
		delete(c.due, namespace) // updateStatus sets the next time.
	}
	return namespaces
}

// cursor returns the cursor of the last report; "" before the first.
func (c *Control) cursor() string {
	if c.dispatcher == nil {
		return ""
	}
	return c.dispatcher.Cursor
}

// dueNow makes the status of all objects due.
func (c *Control) dueNow() {
	for id := range c.store.objects {
		c.due[id.namespace] = time.Time{}
	}
}

// update replaces an object by a copy with the present status, and returns the Events of
// the change.
func (c *Control) update(o *stored, pods []health.Pod, now time.Time) []health.Event {
	verdict, ok := c.verdicts[o.namespace][o.of.Compile.Section][o.name]
	if !ok {
		return nil
	}
	_, next := o.of.Health.Next(o.resource, verdict, o.namespace, pods, now)
	before, conditions := o.of.Health.Status(o.resource)
	after, conditionsAfter := o.of.Health.Status(next)
	if equality.Semantic.DeepEqual(before, after) {
		return nil
	}
	next.SetResourceVersion(c.store.nextVersion())
	o.resource = next
	return health.Transitions(*conditions, *conditionsAfter)
}

// list returns copies of the selected objects of a kind, sorted by namespace and name. An
// empty namespace means all namespaces. An object whose manifest was rejected is not Ready: an
// earlier version of it is in effect.
func (c *Control) list(kind kinds.Kind, namespace string, selected func(client.Object) bool) client.ObjectList {
	c.mu.RLock()
	defer c.mu.RUnlock()
	rejected := c.store.rejected()
	items := []runtime.Object{}
	for _, o := range c.store.sortedIf(func(o *stored) bool {
		return o.resource != nil && o.kind == kind.Name() && (namespace == "" || namespace == o.namespace) && selected(o.resource)
	}) {
		item := o.resource.DeepCopyObject().(compile.Object)
		item.GetObjectKind().SetGroupVersionKind(v1beta1.GroupVersion.WithKind(kind.Name()))
		if p, ok := rejected[o.String()]; ok {
			_, conditions := o.of.Health.Status(item)
			meta.SetStatusCondition(conditions, metav1.Condition{
				Type: v1beta1.ConditionReady, Status: metav1.ConditionFalse, Reason: v1beta1.ReasonManifestRejected, Message: p.Detail(),
				LastTransitionTime: metav1.NewTime(p.Since), ObservedGeneration: item.GetGeneration(),
			})
			o.of.Health.Summarize(item)
		}
		items = append(items, item)
	}
	list := kind.NewList()
	list.GetObjectKind().SetGroupVersionKind(v1beta1.GroupVersion.WithKind(kind.Name() + "List"))
	list.SetResourceVersion(strconv.FormatInt(c.store.writes, 10))
	if err := meta.SetList(list, items); err != nil {
		panic(fmt.Sprintf("standalone: %v", err)) // Impossible: the items are of the list's kind.
	}
	return list
}

// notAccepted returns a problem for each condition Accepted or ResolvedRefs of an object that is False.
func (c *Control) notAccepted() []manifest.Problem {
	c.mu.RLock()
	defer c.mu.RUnlock()
	found, at := []manifest.Problem{}, c.store.positions()
	for _, o := range c.store.sorted() {
		if o.resource == nil {
			continue
		}
		_, conditions := o.of.Health.Status(o.resource)
		for _, condition := range []string{v1beta1.ConditionAccepted, v1beta1.ConditionResolvedRefs} {
			if no := meta.FindStatusCondition(*conditions, condition); no != nil && no.Status == metav1.ConditionFalse {
				found = append(found, at.problems(o, no.Message, no.Reason)...)
			}
		}
	}
	return found
}

// Problems returns the present problems of the manifests, the parked objects among them, and the warnings: ignored
// objects of other kinds, and experimental fields.
func (c *Control) Problems() (problems, warnings []manifest.Problem) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return append(append([]manifest.Problem{}, c.store.problems...), c.parkedProblems()...), append([]manifest.Problem{}, c.store.warnings...)
}

// parkedProblems returns a problem for each parked object, also for those without a record: the state file was lost, or
// belongs to another store. The mutex is held.
func (c *Control) parkedProblems() []manifest.Problem {
	list := slices.Clone(c.store.parked)
	for _, config := range c.configs {
		for _, p := range config.Parked {
			var r liveconfig.Ref
			if r.UnmarshalText([]byte(p.Object)) != nil {
				continue
			}
			object := id{kindOfRef(r), config.Namespace, r.Name}
			if slices.ContainsFunc(list, func(p manifest.Problem) bool { return p.Object == object.String() }) || c.store.objects[object] != nil {
				continue
			}
			list = append(list, manifest.Problem{
				Object: object.String(), Since: p.Since, Effect: "it is parked: " + manifest.EffectOfParked(object.kind), Parked: true,
				Message: fmt.Sprintf("the store has this object, and no manifest has it, although it was not deleted; restore its manifest, or run posthorn discard %s -n %s to delete the object", object.name, object.namespace),
			})
		}
	}
	return list
}
