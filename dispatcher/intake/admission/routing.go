package admission

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Router decides which destinations of one namespace do not get a call. route.Router implements it.
type Router interface {
	// Skip returns the keys ("namespace/name") of the destinations that are connected to a Source
	// but must not get this call, and entries of queue.FilterFailed. units is what that has cost.
	Skip(source string, call *event.Call) (skip []string, units int)
	// Destinations returns the keys of all destinations that are connected to a Source.
	Destinations(source string) []string
}

// running is the config in effect; it is replaced as a whole.
type running struct {
	view    *liveconfig.View // nil before the first full config
	routers map[string]Router
	// routing counts the requests whose calls are routed by this config and are not stored yet.
	routing *atomic.Int64
}

// maxRouting bounds how long a config waits for calls that were routed by the previous config.
const maxRouting = 2 * time.Second

// Replace puts a view and the routers of its namespaces into effect. apply updates the lanes to the
// view; with its error the previous view remains in effect. A nil view refuses all requests.
//
// The new routers are used before apply makes lanes: otherwise a new lane would get calls that its
// destination's filter excludes. Replace waits for the requests that were routed before, but not on
// a full disk.
func (g *Gate) Replace(view *liveconfig.View, routers map[string]Router, apply func(*liveconfig.View) error) error {
	next := &running{view, routers, new(atomic.Int64)}
	if before := g.current.Load(); before.view != nil {
		g.current.Store(&running{before.view, withMissing(routers, before.routers), next.routing})
		for deadline := time.Now().Add(maxRouting); before.routing.Load() > 0 && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
	}
	if err := apply(view); err != nil {
		return err
	}
	g.current.Store(next)
	if view != nil {
		g.forgetSources(view)
	}
	return nil
}

// withMissing adds the routers of removed namespaces: a namespace keeps its router until its Sources
// are removed.
func withMissing(routers, before map[string]Router) map[string]Router {
	all := make(map[string]Router, len(routers))
	for namespace, r := range before {
		all[namespace] = r
	}
	for namespace, r := range routers {
		all[namespace] = r
	}
	return all
}

// Routing routes the calls of one request by one config and appends them. The caller must call End
// when they are stored or have failed, and should not wait for anything else in between: the next
// config waits for it.
type Routing struct {
	gate *Gate
	by   *running
}

// Begin starts the routing of a request by the config in effect.
func (g *Gate) Begin() Routing {
	for {
		r := g.current.Load()
		r.routing.Add(1)
		if g.current.Load() == r {
			return Routing{g, r}
		}
		r.routing.Add(-1)
	}
}

// End ends the routing.
func (r Routing) End() { r.by.routing.Add(-1) }

// View returns the view of the routing; nil before the first full config. While a config takes
// effect it is the previous one, but the destinations are already the ones of both.
func (r Routing) View() *liveconfig.View { return r.by.view }

// Suppressed reports whether a deletion request suppresses the call's user.
func (r Routing) Suppressed(ref liveconfig.SourceRef, call *event.Call) bool {
	return r.by.view.Suppressed(ref, call.UserID)
}

// Message makes the message of a call of a Source, for the destinations that get it. key is
// ref.Key(). units is what its filters have cost.
func (r Routing) Message(ref liveconfig.SourceRef, key string, call *event.Call, acceptedAt time.Time) (m queue.Message, units int) {
	m = queue.Message{
		Source: key, ID: call.MessageID, Type: string(call.Type), AcceptedAt: acceptedAt,
		LongNumbers: call.LongNumbers, Body: call.Body,
	}
	if m.Skip, units = r.Skip(ref, call); call.Type == event.Track {
		m.Event = call.Event
	}
	return m, units
}

// Skip returns the keys ("namespace/name") of the destinations that must not get a call, and what their filters have
// cost.
func (r Routing) Skip(ref liveconfig.SourceRef, call *event.Call) (skip []string, units int) {
	if router := r.by.routers[ref.Namespace]; router != nil {
		return router.Skip(ref.Source.Name, call)
	}
	return nil, 0
}

// Refilter returns the entries of Skip for one destination ("namespace/name").
func (r Routing) Refilter(source, destination string, call *event.Call) []string {
	namespace, name, _ := strings.Cut(source, "/")
	ref := liveconfig.SourceRef{Namespace: namespace}
	ref.Source.Name = name
	skip, _ := r.Skip(ref, call)
	return slices.DeleteFunc(skip, func(entry string) bool {
		return entry != destination && !strings.HasPrefix(entry, queue.FilterFailed(destination, ""))
	})
}

// SkipAllBut returns the keys of the destinations that are connected to a Source and that only does
// not name.
func (r Routing) SkipAllBut(namespace, source string, only func(key string) bool) (skip []string) {
	if router := r.by.routers[namespace]; router != nil {
		for _, key := range router.Destinations(source) {
			if !only(key) {
				skip = append(skip, key)
			}
		}
	}
	return skip
}

// Append makes messages durable and reports which are duplicates. Its errors are the
// queue's: queue.ErrFull, queue.ErrOverShare, queue.ErrOverQuota, queue.ErrClosed, or an error of the disk.
func (r Routing) Append(ctx context.Context, msgs []queue.Message) (duplicates []bool, err error) {
	duplicates, err = r.gate.Store.Append(ctx, msgs)
	for i := range msgs {
		if i == 0 || msgs[i].Source != msgs[i-1].Source {
			r.gate.appended(msgs[i].Source)
		}
	}
	return duplicates, err
}

// appended marks the report of a Source ("namespace/name"), also after an error: the store may have
// skipped messages to make space.
func (g *Gate) appended(source string) {
	if s, ok := g.sources.Load(source); ok {
		s.(*Source).changed.Appended()
		return
	}
	namespace, name, _ := strings.Cut(source, "/")
	g.Changes.Object(changes.Sources, namespace, name).Appended()
}
