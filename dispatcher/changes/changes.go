// Package changes tracks which parts of the dispatcher's report have changed, so that a reader gets
// the changes since its last report and an unchanged dispatcher builds nothing.
//
// A [Log] gives every change a sequence number; a cursor is the last number that a reader has. The
// code that changes the state of an object marks the [Object], which is a test of one atomic flag
// while the mark is set. [Log.Since] gives the marked objects their numbers. There are two marks: a
// transition is in the next report; numbers wait until the numbers of the object are
// NumbersInterval old, and for their share of NumbersPerSecond. [Log.Update] compares a new live
// config with the previous one.
//
// The package knows the names of objects and not their state: the caller builds the reports of the
// objects in [Changes]. A reader can see an object earlier than its change; it never misses one.
package changes

import (
	"container/list"
	"crypto/rand"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

const (
	// NumbersInterval is the shortest time between two reports of an object's numbers.
	NumbersInterval = 2 * time.Second
	// NumbersPerSecond bounds the objects whose numbers are reported, over all objects. The operator
	// writes the numbers of at most 20 objects a second.
	NumbersPerSecond = 200

	// minRemoved is the number of removed objects, and of removed namespaces, that are always kept.
	minRemoved = 64
)

// Kind is a kind of objects.
type Kind int

// The kinds.
const (
	Sources Kind = iota
	Destinations
	Audiences
	Deletions
	Redeliveries
	kinds
)

// Lanes lists the connected objects: the reports of a Source and of its destinations count the
// same messages. Keys are "namespace/name".
type Lanes interface {
	DestinationsOf(source string) []string
	SourcesOf(destination string) []string
}

// Pod is the part of a report that belongs to no namespace.
type Pod struct {
	Ready   bool
	Storage adminapi.StorageReport
	// Configs is another number after each change of the states of the live configs.
	Configs uint64
	// Shares is the number of the shares of limits in effect, and AboveShares names the objects above their shares.
	Shares      int64
	AboveShares string
}

// Log has the sequence numbers of all changes of one process. Make it with New. Its methods may be
// called concurrently; on a nil Log they do nothing.
type Log struct {
	// epoch identifies the process: sequence numbers of different processes cannot be compared.
	epoch string
	// lanes returns the Lanes; nil before they exist.
	lanes func() Lanes

	// marks guards the marked objects. It is acquired last, and held briefly.
	marks  sync.Mutex
	marked []*Object
	// later has the objects that change by time alone, and laterAt the earliest of these times.
	later   map[*Object]time.Time
	laterAt time.Time

	// mu guards the following fields, and the fields of namespaces and objects. It is acquired before
	// the locks of Lanes.
	mu         sync.Mutex
	seq        uint64
	namespaces map[string]*namespace
	// removed counts the removed namespaces in the order. Cursors below oldest are too old.
	removed int
	oldest  uint64
	// order has the *namespace and *Object values with a sequence number, ascending.
	order *list.List
	pod   Pod
	// waiting are the marked objects whose numbers are not due, the first marked first.
	waiting []*Object
	numbers *rate.Limiter
	// update counts the calls of Update that changed objects.
	update uint64
}

// entry is the place of a namespace or an object in the order.
type entry struct {
	// listed is true while it exists. A removed one keeps its place in the order, so that readers learn of it.
	listed  bool
	seq     uint64
	element *list.Element
}

type namespace struct {
	entry
	name     string
	revision string
	refused  adminapi.RefusedConfig
	objects  [kinds]map[string]*Object
	// since is the sequence number from which on the removed objects are known. It dates from the
	// namespace's creation or the last call of forgetRemoved.
	since uint64
	// live and removed count the objects.
	live, removed int
}

// Object is an object whose report can change. The methods of a nil Object do nothing.
type Object struct {
	log             *Log
	kind            Kind
	namespace, name string
	flags           atomic.Uint32

	// The Log's mutex guards the following fields.
	entry
	version version
	// numbersAt is when the numbers were last due.
	numbersAt time.Time
	// update is the last call of Log.Update that had the object.
	update uint64
}

// version is the part of an object's config on which its report depends.
type version struct {
	revision   string
	generation int64
	id, uid    string
	ended      bool
}

// The flags of an object that is marked.
const (
	flagNumbers uint32 = 1 << iota
	flagTransition
	// flagAppended marks the numbers of a Source and of its destinations.
	flagAppended
)

// New makes a Log. lanes is called by Since and may return nil.
func New(lanes func() Lanes) *Log {
	return &Log{
		epoch: rand.Text(), lanes: lanes, namespaces: map[string]*namespace{}, order: list.New(), later: map[*Object]time.Time{},
		numbers: rate.NewLimiter(NumbersPerSecond, NumbersPerSecond*int(NumbersInterval/time.Second)),
	}
}

// Object returns an object, which need not be in the live config.
func (l *Log) Object(kind Kind, namespace, name string) *Object {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.namespace(namespace).object(l, kind, name)
}

// Numbers marks an object whose numbers changed.
func (o *Object) Numbers() { o.mark(flagNumbers) }

// Transition marks an object with a change that a reader waits for.
func (o *Object) Transition() { o.mark(flagTransition) }

// Appended marks a Source with new messages, and its destinations.
func (o *Object) Appended() { o.mark(flagAppended) }

func (o *Object) mark(flags uint32) {
	if o == nil || o.flags.Load()&flags == flags || o.flags.Or(flags) != 0 {
		return
	}
	o.log.marks.Lock()
	defer o.log.marks.Unlock()
	o.log.marked = append(o.log.marked, o)
}

// TransitionAt marks an object at a time at which its report changes without an event.
func (o *Object) TransitionAt(at time.Time) {
	if o == nil {
		return
	}
	l := o.log
	l.marks.Lock()
	defer l.marks.Unlock()
	if before, ok := l.later[o]; ok && !at.Before(before) {
		return
	}
	l.later[o] = at
	if l.laterAt.IsZero() || at.Before(l.laterAt) {
		l.laterAt = at
	}
}

// takeMarked returns the objects that were marked since the last call.
func (l *Log) takeMarked(now time.Time) []*Object {
	l.marks.Lock()
	defer l.marks.Unlock()
	if !l.laterAt.IsZero() && !now.Before(l.laterAt) {
		l.laterAt = time.Time{}
		for o, at := range l.later {
			switch {
			case !now.Before(at):
				delete(l.later, o)
				if o.flags.Or(flagTransition) == 0 {
					l.marked = append(l.marked, o)
				}
			case l.laterAt.IsZero() || at.Before(l.laterAt):
				l.laterAt = at
			}
		}
	}
	marked := l.marked
	l.marked = nil
	return marked
}

// namespace returns a namespace, which need not exist. The mutex is held.
func (l *Log) namespace(name string) *namespace {
	n := l.namespaces[name]
	if n == nil {
		n = &namespace{name: name}
		l.namespaces[name] = n
	}
	return n
}

func (n *namespace) object(l *Log, kind Kind, name string) *Object {
	o := n.objects[kind][name]
	if o == nil {
		o = &Object{log: l, kind: kind, namespace: n.name, name: name}
		if n.objects[kind] == nil {
			n.objects[kind] = map[string]*Object{}
		}
		n.objects[kind][name] = o
	}
	return o
}

// publish gives an entry the next sequence number. value is the *namespace or *Object that has it.
func (l *Log) publish(e *entry, value any) {
	l.seq++
	e.seq = l.seq
	if e.element == nil {
		e.element = l.order.PushBack(value)
	} else {
		l.order.MoveToBack(e.element)
	}
}

// unlink removes an entry from the order.
func (l *Log) unlink(e *entry) {
	e.listed, e.seq = false, 0
	if e.element != nil {
		l.order.Remove(e.element)
		e.element = nil
	}
}

// Update publishes the differences between a view and the previous one. refused has the rejected
// configs by namespace. It does nothing before the first view.
func (l *Log) Update(view *liveconfig.View, refused map[string]adminapi.RefusedConfig) {
	if l == nil || view == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	exists := map[string]bool{}
	for _, name := range view.Namespaces() {
		exists[name] = true
		config, _ := view.Namespace(name)
		l.updateNamespace(name, config, refused[name])
	}
	for name, refusal := range refused {
		if !exists[name] {
			exists[name] = true
			l.updateNamespace(name, liveconfig.Revisioned{}, refusal)
		}
	}
	for name, n := range l.namespaces {
		if n.listed && !exists[name] {
			l.removeNamespace(n)
		}
	}
	if l.removed > max(minRemoved, len(exists)) {
		l.forgetNamespaces()
	}
}

func (l *Log) updateNamespace(name string, config liveconfig.Revisioned, refused adminapi.RefusedConfig) {
	n := l.namespace(name)
	if n.listed && n.revision == config.Revision && n.refused == refused {
		return
	}
	if !n.listed && n.element != nil {
		l.removed--
	}
	created := !n.listed
	l.publish(&n.entry, n)
	if n.listed = true; created {
		n.since = n.seq
	}
	n.refused = refused
	if n.revision == config.Revision {
		return
	}
	n.revision = config.Revision
	l.update++
	eachObject(&config.Config, func(kind Kind, name string, v version) { l.updateObject(n, kind, name, v) })
	for _, objects := range n.objects {
		for _, o := range objects {
			if o.listed && o.update != l.update {
				l.removeObject(n, o)
			}
		}
	}
	if n.removed > max(minRemoved, n.live) {
		l.forgetRemoved(n)
	}
}

// eachObject calls do for every object of a config.
func eachObject(c *liveconfig.Config, do func(kind Kind, name string, v version)) {
	for i := range c.Sources {
		o := &c.Sources[i]
		do(Sources, o.Name, version{revision: o.Revision, generation: o.Generation})
	}
	for i := range c.Destinations {
		o := &c.Destinations[i]
		do(Destinations, o.Name, version{revision: o.Revision, generation: o.Generation})
	}
	for i := range c.Audiences {
		o := &c.Audiences[i]
		do(Audiences, o.Name, version{revision: o.Revision, generation: o.Generation, id: o.Key})
	}
	for i := range c.Deletions {
		o := &c.Deletions[i]
		do(Deletions, o.Name, version{revision: o.Revision, generation: o.Generation, id: o.ID, uid: o.UID, ended: o.Ended})
	}
	for i := range c.Redeliveries {
		o := &c.Redeliveries[i]
		do(Redeliveries, o.Name, version{revision: o.Revision, generation: o.Generation, id: o.ID, uid: o.UID})
	}
}

func (l *Log) updateObject(n *namespace, kind Kind, name string, v version) {
	o := n.object(l, kind, name)
	o.update = l.update
	if o.listed && o.version == v {
		return
	}
	if !o.listed {
		if o.element != nil {
			n.removed--
		}
		n.live++
	}
	o.listed, o.version = true, v
	l.publish(&o.entry, o)
}

func (l *Log) removeObject(n *namespace, o *Object) {
	o.listed = false
	n.live--
	n.removed++
	l.publish(&o.entry, o)
}

// forgetRemoved forgets the removed objects of a namespace; older cursors get the whole namespace.
func (l *Log) forgetRemoved(n *namespace) {
	for kind := range n.objects {
		for name, o := range n.objects[kind] {
			if !o.listed {
				l.unlink(&o.entry)
				delete(n.objects[kind], name)
			}
		}
	}
	l.publish(&n.entry, n)
	n.removed, n.since = 0, n.seq
}

// removeNamespace removes a namespace with its objects.
func (l *Log) removeNamespace(n *namespace) {
	for kind := range n.objects {
		for _, o := range n.objects[kind] {
			l.unlink(&o.entry)
		}
	}
	*n = namespace{name: n.name, entry: n.entry}
	n.listed = false
	l.publish(&n.entry, n)
	l.removed++
}

// forgetNamespaces forgets the removed namespaces; older cursors get a full report.
func (l *Log) forgetNamespaces() {
	for name, n := range l.namespaces {
		if !n.listed {
			l.unlink(&n.entry)
			delete(l.namespaces, name)
		}
	}
	l.removed, l.oldest = 0, l.seq
}

// publishMarked gives the marked objects that are due their sequence numbers, and marks the objects
// that their lanes connect. It reports whether it marked any.
func (l *Log) publishMarked(now time.Time) (more bool) {
	l.waiting = append(l.waiting, l.takeMarked(now)...)
	if len(l.waiting) == 0 {
		return false
	}
	waiting := l.waiting[:0]
	for _, o := range l.waiting {
		if !o.listed {
			// A removed object, or a new one of the same name.
			flags := o.flags.Swap(0)
			more = l.markConnected(o, flags) || more // Its last lanes may just have been dropped.
			if n := l.namespaces[o.namespace]; n != nil {
				if again := n.objects[o.kind][o.name]; again != o && again != nil {
					again.mark(flags)
				}
			}
			continue
		}
		transition := o.flags.Load()&flagTransition != 0
		if !transition && (now.Sub(o.numbersAt) < NumbersInterval || !l.numbers.AllowN(now, 1)) {
			waiting = append(waiting, o)
			continue
		}
		flags := o.flags.Swap(0) // Before its report is built, so that a later change marks it again.
		o.numbersAt = now
		l.publish(&o.entry, o)
		more = l.markConnected(o, flags) || more
	}
	clear(l.waiting[len(waiting):])
	l.waiting = waiting
	return more
}

// markConnected marks the objects whose numbers change with the numbers of a published object.
func (l *Log) markConnected(o *Object, flags uint32) (marked bool) {
	lanes := l.lanes()
	if lanes == nil {
		return false
	}
	var keys []string
	kind, key := Sources, o.namespace+"/"+o.name
	switch {
	case o.kind == Sources && flags&flagAppended != 0:
		kind, keys = Destinations, lanes.DestinationsOf(key)
	case o.kind == Destinations:
		keys = lanes.SourcesOf(key)
	}
	for _, key := range keys {
		namespace, name, _ := strings.Cut(key, "/")
		if n := l.namespaces[namespace]; n != nil {
			n.objects[kind][name].Numbers()
			marked = true
		}
	}
	return marked
}

// Changes are the parts of a report that changed since a cursor.
type Changes struct {
	// Cursor is the report's cursor.
	Cursor string
	// Full is true if the cursor is unknown or too old, so that the report must be full.
	Full bool
	// Namespaces are the changed ones, and Removed the removed ones, in any order.
	Namespaces map[string]*Namespace
	Removed    []string
}

// Namespace is the changes of a namespace.
type Namespace struct {
	// Complete is true if the report must have all objects of the namespace.
	Complete bool
	// Removed names the removed objects, in any order.
	Removed adminapi.RemovedObjects
	changed [kinds]map[string]bool
}

// Cursor returns the cursor of a full report that is built afterwards.
func (l *Log) Cursor() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cursor()
}

func (l *Log) cursor() string { return fmt.Sprintf("%s.%d", l.epoch, l.seq) }

// parse returns the sequence number of a cursor; ok is false if it is not known.
func (l *Log) parse(cursor string) (seq uint64, ok bool) {
	epoch, number, _ := strings.Cut(cursor, ".")
	seq, err := strconv.ParseUint(number, 10, 64)
	return seq, err == nil && epoch == l.epoch && seq >= l.oldest && seq <= l.seq
}

// Since returns the changes since a cursor; ok is false if there are none. Without marks and
// changes it neither allocates nor looks at objects.
func (l *Log) Since(cursor string, pod Pod) (c Changes, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if l.publishMarked(now) {
		l.publishMarked(now)
	}
	if pod != l.pod {
		l.pod = pod
		l.seq++
	}
	since, known := l.parse(cursor)
	switch {
	case !known:
		return Changes{Cursor: l.cursor(), Full: true}, true
	case since == l.seq:
		return Changes{}, false
	}
	c = Changes{Cursor: l.cursor(), Namespaces: map[string]*Namespace{}}
	for e := l.order.Back(); e != nil; e = e.Prev() {
		switch value := e.Value.(type) {
		case *namespace:
			if value.seq <= since {
				return c, true
			}
			c.addNamespace(value, since)
		case *Object:
			if value.seq <= since {
				return c, true
			}
			c.namespace(l.namespaces[value.namespace], since).add(value)
		}
	}
	return c, true
}

func (c *Changes) addNamespace(n *namespace, since uint64) {
	if n.listed {
		c.namespace(n, since)
	} else {
		c.Removed = append(c.Removed, n.name)
	}
}

func (c *Changes) namespace(n *namespace, since uint64) *Namespace {
	changed := c.Namespaces[n.name]
	if changed == nil {
		changed = &Namespace{Complete: n.since > since}
		c.Namespaces[n.name] = changed
	}
	return changed
}

func (n *Namespace) add(o *Object) {
	if o.listed {
		if n.changed[o.kind] == nil {
			n.changed[o.kind] = map[string]bool{}
		}
		n.changed[o.kind][o.name] = true
		return
	}
	r := &n.Removed
	names := [kinds]*[]string{&r.Sources, &r.Destinations, &r.Audiences, &r.Deletions, &r.Redeliveries}[o.kind]
	*names = append(*names, o.name)
}

// Select returns a config with the changed objects only.
func (n *Namespace) Select(c liveconfig.Config) liveconfig.Config {
	if n.Complete {
		return c
	}
	c.Sources = selected(c.Sources, n.changed[Sources], func(o *liveconfig.Source) string { return o.Name })
	c.Destinations = selected(c.Destinations, n.changed[Destinations], func(o *liveconfig.Destination) string { return o.Name })
	c.Audiences = selected(c.Audiences, n.changed[Audiences], func(o *liveconfig.Audience) string { return o.Name })
	c.Deletions = selected(c.Deletions, n.changed[Deletions], func(o *liveconfig.Deletion) string { return o.Name })
	c.Redeliveries = selected(c.Redeliveries, n.changed[Redeliveries], func(o *liveconfig.Redelivery) string { return o.Name })
	return c
}

func selected[O any](all []O, names map[string]bool, name func(*O) string) (some []O) {
	if len(names) == 0 {
		return nil
	}
	some = make([]O, 0, len(names))
	for i := range all {
		if names[name(&all[i])] {
			some = append(some, all[i])
		}
	}
	return some
}
