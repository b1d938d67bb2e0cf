// Package shares divides the limits of objects among the dispatchers. The limits of an object are totals; each dispatcher
// has a share of them, and shares follow the observed traffic. Its main type is Plan.
//
// The package is pure: it has no I/O, and the caller passes the time. It knows the names of objects, not their limits.
package shares

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

const (
	// goneFor is how long a dispatcher does not exist until its share is free. During this time its successor with the
	// same name can start with an older document.
	goneFor = time.Minute
	// newAfter is the time after which a new dispatcher gets the smallest share although others have not confirmed
	// theirs.
	newAfter = 25 * time.Second
	// divideEvery is the time between two divisions of the limits, and stuckAfter the time after which a raise does not
	// wait for dispatchers that do not confirm.
	divideEvery, stuckAfter = 10 * time.Second, 10 * time.Second
	// writeEvery is the shortest time between two documents, in which dispatchers can confirm the first one.
	writeEvery = 3 * time.Second
	// quietFor is the time with little traffic after which an object gets equal shares again.
	quietFor = 5 * time.Minute
	// maxObjects bounds the objects with unequal shares, and so the document.
	maxObjects = 1000
	// headroom is what a dispatcher gets beyond its traffic while another one reaches its share, and hysteresis the
	// gain of a dispatcher that is worth a change.
	headroom, hysteresis = 1.2, 1.03
)

// Pod is a dispatcher that exists or is expected to.
type Pod struct {
	Name string
	// Exists is false for a dispatcher that the StatefulSet will have.
	Exists bool
	// Reports is true if the traffic of the dispatcher is known.
	Reports bool
	// Applied is the number of the document that the dispatcher reports; 0 if that is not known.
	Applied int64
	// Above are the keys of the objects with more requests in flight than their share in that document, sorted.
	Above []string
}

// Use is the traffic of an object in a dispatcher.
type Use struct {
	// Used is the traffic as a part of the object's total.
	Used float64
	// Limited is true if more traffic waits for the dispatcher's share.
	Limited bool
}

// Demand has the traffic by the object's key and the dispatcher's name. Objects with little traffic are missing.
type Demand map[string]map[string]Use

// Add adds the use of an object in a dispatcher.
func (d Demand) Add(object, pod string, use Use) {
	if d[object] == nil {
		d[object] = map[string]Use{}
	}
	d[object][pod] = use
}

// Plan is the state of the division. The zero Plan has no dispatchers.
//
// For each object, the sum of the shares that dispatchers can have in effect is at most liveconfig.Whole: a share is
// raised only by what is free when each dispatcher has the largest share that it did not confirm to have left.
type Plan struct {
	// Shares is the newest document.
	Shares liveconfig.Shares

	objects map[string]*object // "" has the shares of the objects that are not in it.
	// goneSince is when a dispatcher was first missing, and newSince when one without a share first existed.
	goneSince, newSince map[string]time.Time
	// dividedAt and writtenAt are the times of the last division and of the last document.
	dividedAt, writtenAt time.Time
	// loaded is true until the first Next after Load, and unwritten while the dispatchers differ from those of the document.
	loaded, unwritten bool
}

// object has the shares of an object, in the order of the dispatchers.
type object struct {
	// share is in the newest document, bound the largest one that can be in effect, and target the one to reach.
	share, bound, target []liveconfig.Share
	// quietSince is the start of a time with little traffic.
	quietSince time.Time
	// waitsSince is since when a raise waits for dispatchers to confirm.
	waitsSince time.Time
	// leaves is true if the place of the object belongs to other namespaces.
	leaves bool
}

// clone returns an object with the same shares.
func (o *object) clone() *object {
	return &object{share: slices.Clone(o.share), bound: slices.Clone(o.bound), target: slices.Clone(o.target)}
}

// Load returns the Plan after a start of the operator, from the newest document. Which older documents the dispatchers
// apply is not known, so until they confirm the newest one no share is raised.
func Load(s liveconfig.Shares) Plan {
	p := Plan{Shares: s, loaded: true, objects: map[string]*object{}}
	add := func(key string, list []liveconfig.Share) {
		p.objects[key] = &object{share: slices.Clone(list), bound: slices.Repeat([]liveconfig.Share{liveconfig.Whole}, len(list)),
			target: slices.Clone(list)}
	}
	add("", s.Default)
	for key, list := range s.Objects {
		add(key, list)
	}
	return p
}

// Next returns the Plan after an observation, and whether its document is new. It calls demand when it divides the limits.
// The caller must write a new document before it calls Next again; after a write whose result is unknown, it calls Load.
func (p Plan) Next(pods []Pod, demand func() Demand, now time.Time) (next Plan, changed bool) {
	next = p.follow(pods, now)
	next.confirm(pods, now)
	members := !slices.Equal(next.Shares.Pods, p.Shares.Pods)
	next.unwritten = p.unwritten || members
	if all := members || p.loaded; all || now.Sub(next.dividedAt) >= divideEvery {
		next.divide(pods, demand(), now, all)
	}
	if now.Sub(p.writtenAt) < writeEvery || !next.step(now) && !next.unwritten {
		return next, false
	}
	next.write(now)
	return next, true
}

// follow returns the Plan with the present dispatchers: those that exist or are expected, and those that ended less than
// goneFor ago.
func (p Plan) follow(pods []Pod, now time.Time) Plan {
	next := p
	next.loaded, next.objects, next.newSince = false, map[string]*object{}, map[string]time.Time{}
	next.Shares.Pods, next.goneSince = p.members(pods, now)
	from := make([]int, len(next.Shares.Pods))
	for i, name := range next.Shares.Pods {
		from[i] = slices.Index(p.Shares.Pods, name)
	}
	next.objects[""] = &object{share: moved(nil, from), bound: moved(nil, from), target: moved(nil, from)}
	for key, o := range p.objects {
		next.objects[key] = &object{share: moved(o.share, from), bound: moved(o.bound, from), target: moved(o.target, from),
			quietSince: o.quietSince, waitsSince: o.waitsSince, leaves: o.leaves}
	}
	for _, pod := range pods {
		if i := slices.Index(next.Shares.Pods, pod.Name); pod.Exists && next.objects[""].share[i] == 0 {
			next.newSince[pod.Name] = since(p.newSince, pod.Name, now)
		}
	}
	return next
}

// members returns the names of the dispatchers, sorted, and since when those that do not exist were missing.
func (p Plan) members(pods []Pod, now time.Time) (list []string, gone map[string]time.Time) {
	names := map[string]bool{}
	gone = map[string]time.Time{}
	for _, pod := range pods {
		names[pod.Name] = true
		if !pod.Exists {
			gone[pod.Name] = since(p.goneSince, pod.Name, now)
		}
	}
	for _, name := range p.Shares.Pods {
		if at := since(p.goneSince, name, now); !names[name] && now.Sub(at) < goneFor {
			names[name], gone[name] = true, at
		}
	}
	return slices.Sorted(maps.Keys(names)), gone
}

// since returns a time of a map, or now.
func since(times map[string]time.Time, name string, now time.Time) time.Time {
	if at, ok := times[name]; ok {
		return at
	}
	return now
}

// moved returns the shares at the indexes from; 0 for an index below 0.
func moved(list []liveconfig.Share, from []int) []liveconfig.Share {
	next := make([]liveconfig.Share, len(from))
	for i, j := range from {
		if j >= 0 && j < len(list) {
			next[i] = list[j]
		}
	}
	return next
}

// confirm lowers the bounds of the dispatchers that apply the newest document, and of those that do not exist: they
// start with it. The bound of an object that is still above its share remains, and only its own: it delays no other
// object. Without a place for it, its requests in flight can be above its limit until they end.
func (p *Plan) confirm(pods []Pod, now time.Time) {
	for _, pod := range pods {
		i := slices.Index(p.Shares.Pods, pod.Name)
		if !p.gone(pod.Name, now) && (pod.Applied == 0 || pod.Applied != p.Shares.Number) {
			continue
		}
		if len(pod.Above) > 0 {
			p.admit(pod.Above)
		}
		for key, o := range p.objects {
			if _, above := slices.BinarySearch(pod.Above, key); !above {
				o.bound[i] = o.share[i]
			}
		}
	}
}

// gone reports whether a dispatcher has not existed for goneFor.
func (p *Plan) gone(name string, now time.Time) bool {
	at, missing := p.goneSince[name]
	return missing && now.Sub(at) >= goneFor
}

// divide sets the targets. With all, it sets those of all objects, and otherwise those that gain by it.
func (p *Plan) divide(pods []Pod, demand Demand, now time.Time, all bool) {
	standard := p.objects[""]
	for i := range standard.target {
		standard.target[i] = liveconfig.Whole / liveconfig.Share(len(standard.target))
	}
	var gaining []string
	for key, uses := range demand {
		if p.objects[key] == nil && p.gains(standard, p.wanted(standard, pods, uses, now), uses) {
			gaining = append(gaining, key)
		}
	}
	p.admit(gaining)
	for key, o := range p.objects {
		target := p.wanted(o, pods, demand[key], now)
		if quiet := o.quiet(demand[key], now); quiet || key == "" || o.leaves {
			target = slices.Clone(standard.target)
		} else if !all && !p.gains(o, target, demand[key]) {
			continue
		}
		o.target = target
	}
	p.dividedAt = now
}

// admit lets objects have shares of their own, at first the usual ones. If more than maxObjects want it, their namespaces
// have equal numbers of places: the further objects of a namespace leave, and places that others do not need are filled.
func (p *Plan) admit(wanting []string) {
	wanting = slices.DeleteFunc(slices.Clone(wanting), func(key string) bool { return p.objects[key] != nil })
	slices.Sort(wanting)
	present := slices.Sorted(maps.Keys(p.objects))[1:] // The first key is "".
	keys := map[string][]string{}
	for _, key := range append(present, wanting...) {
		namespace, _, _ := strings.Cut(key, "/")
		keys[namespace] = append(keys[namespace], key)
	}
	places := places(slices.Collect(maps.Values(keys)))
	for _, namespace := range slices.Sorted(maps.Keys(keys)) {
		for i, key := range keys[namespace] {
			if o := p.objects[key]; o != nil {
				o.leaves = i >= places
			} else if i < places && len(p.objects) <= maxObjects {
				p.objects[key] = p.objects[""].clone()
			}
		}
	}
}

// places returns how many objects of a namespace can have shares of their own.
func places(keys [][]string) int {
	slices.SortFunc(keys, func(a, b []string) int { return cmp.Compare(len(a), len(b)) })
	rest := maxObjects
	for done, list := range keys {
		if level := rest / (len(keys) - done); len(list) > level {
			return max(1, level)
		}
		rest -= len(list)
	}
	return maxObjects
}

// quiet reports whether equal shares have been enough for quietFor.
func (o *object) quiet(uses map[string]Use, now time.Time) bool {
	for _, use := range uses {
		if use.Limited || headroom*use.Used*float64(len(o.share)) > 1 {
			o.quietSince = time.Time{}
			return false
		}
	}
	if o.quietSince.IsZero() {
		o.quietSince = now
	}
	return now.Sub(o.quietSince) >= quietFor
}

// gains reports whether a dispatcher that reaches its share gets a considerably larger one.
func (p *Plan) gains(o *object, target []liveconfig.Share, uses map[string]Use) bool {
	for i, name := range p.Shares.Pods {
		if uses[name].Limited && float64(target[i]) > hysteresis*float64(o.target[i]) {
			return true
		}
	}
	return false
}

// wanted returns the shares for the traffic of an object: each dispatcher gets what it uses and some more, at least the
// smallest share, and those that reach their share divide the rest equally.
func (p *Plan) wanted(o *object, pods []Pod, uses map[string]Use, now time.Time) []liveconfig.Share {
	reports := map[string]bool{}
	for _, pod := range pods {
		reports[pod.Name] = pod.Reports
	}
	needs := make([]liveconfig.Share, len(o.share))
	for i, name := range p.Shares.Pods {
		switch use := uses[name]; {
		case o.share[i] == 0:
			needs[i] = liveconfig.Whole / liveconfig.Share(len(needs))
		case !reports[name] && !p.gone(name, now):
			needs[i] = max(p.smallest(), o.share[i])
		case use.Limited:
			needs[i] = liveconfig.Whole
		default:
			needs[i] = max(p.smallest(), liveconfig.Share(headroom*use.Used*float64(liveconfig.Whole)))
		}
	}
	return fit(needs)
}

// smallest is the share that a dispatcher without traffic keeps, so that it can begin.
func (p *Plan) smallest() liveconfig.Share {
	return liveconfig.Whole / liveconfig.Share(10*len(p.Shares.Pods))
}

// fit returns the shares that are nearest to the needs and add up to Whole: larger needs are cut to one level, or all
// get an equal part of the rest.
func fit(needs []liveconfig.Share) []liveconfig.Share {
	order, shares := make([]int, len(needs)), make([]liveconfig.Share, len(needs))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Or(cmp.Compare(needs[a], needs[b]), cmp.Compare(a, b)) })
	rest := liveconfig.Whole
	for done, i := range order {
		shares[i] = min(needs[i], rest/liveconfig.Share(len(order)-done))
		rest -= shares[i]
	}
	for i := range shares {
		shares[i] += rest / liveconfig.Share(len(shares))
	}
	return shares
}

// step moves the shares towards the targets as far as that is safe, and reports whether one has changed.
func (p *Plan) step(now time.Time) (changed bool) {
	for _, o := range p.objects {
		before := slices.Clone(o.share)
		o.move(now)
		for i, name := range p.Shares.Pods {
			if at, ok := p.newSince[name]; ok && now.Sub(at) >= newAfter {
				o.share[i] = max(o.share[i], p.smallest())
			}
		}
		changed = changed || !slices.Equal(before, o.share)
	}
	kept := len(p.objects)
	maps.DeleteFunc(p.objects, func(key string, o *object) bool { return key != "" && o.equal(p.objects[""]) })
	return changed || len(p.objects) < kept
}

func (o *object) equal(other *object) bool {
	return slices.Equal(o.share, other.share) && slices.Equal(o.bound, other.bound) && slices.Equal(o.target, other.target)
}

// move lowers the shares above their targets, and raises the others when enough is free for all of them, or, after
// stuckAfter, by what is free.
func (o *object) move(now time.Time) {
	free, missing := liveconfig.Whole, liveconfig.Share(0)
	for i := range o.share {
		o.share[i] = min(o.share[i], o.target[i])
		free -= max(o.share[i], o.bound[i])
		missing += o.target[i] - o.share[i]
	}
	switch {
	case free >= missing:
		o.waitsSince = time.Time{}
	case o.waitsSince.IsZero():
		o.waitsSince = now
		return
	case now.Sub(o.waitsSince) < stuckAfter || free < liveconfig.Whole/1000:
		return
	default:
		o.waitsSince = now
	}
	if missing == 0 {
		return
	}
	part := min(1, float64(free)/float64(missing))
	for i := range o.share {
		o.share[i] += liveconfig.Share(part * float64(o.target[i]-o.share[i]))
	}
}

// write makes the next document. Its number is a time, so that it is new even if the last document was deleted.
func (p *Plan) write(now time.Time) {
	p.Shares.Number, p.Shares.Objects = max(p.Shares.Number+1, now.Unix()), map[string][]liveconfig.Share{}
	p.writtenAt, p.unwritten = now, false
	for key, o := range p.objects {
		for i := range o.bound {
			o.bound[i] = max(o.bound[i], o.share[i])
		}
		if key == "" {
			p.Shares.Default = slices.Clone(o.share)
		} else {
			p.Shares.Objects[key] = slices.Clone(o.share)
		}
	}
}
