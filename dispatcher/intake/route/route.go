// Package route decides which destinations do not get a call: by the destination's filter and by
// the call's own integrations. It is pure, and it decides once per call, when the call is accepted.
// The main type is Router.
package route

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/expression"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// IntegrationName is the name of webhook destinations in the integrations object of calls (from the
// specification; case-sensitive). A destination's own name is more specific and takes precedence.
const IntegrationName = "Webhooks"

// Router holds the destinations of one namespace by Source. It is immutable after New and Keep, and
// safe for concurrent use.
type Router struct {
	bySource map[string][]*destination
	// programs are the compiled expressions, and old the expressions of the Router before.
	programs, old programs
}

// programs are compiled expressions by their text.
type programs map[string]*expression.Program

type destination struct {
	key, name  string
	types      []string
	events     []string
	expression *expression.Program
	// invalid is true if the filter has a part that is not valid.
	invalid bool
	// exact is true if the destination gets long numbers with all digits.
	exact bool
	// until is when a destination of an earlier Router is dropped; zero for the destinations of the
	// config.
	until time.Time
}

// New compiles the filters of a namespace. The error names the first active destination whose
// expression does not compile; the controllers reject such a destination, so the config is not
// theirs. With an invalid filter, each call that matches its other parts fails: it must not be delivered when
// the owner has corrected the filter.
func New(c liveconfig.Config) (*Router, error) { return (*Router)(nil).Next(c) }

// Next is New for the next config of the namespace: it compiles only the expressions that r, which may be nil,
// does not have.
func (r *Router) Next(c liveconfig.Config) (*Router, error) {
	next := &Router{bySource: map[string][]*destination{}, programs: programs{}}
	if r != nil {
		next.old = r.programs
	}
	for _, d := range c.Destinations {
		to := &destination{key: c.Namespace + "/" + d.Name, name: d.Name, exact: d.ExactNumbers}
		if err := next.filter(to, d.Filter); err != nil && d.State == liveconfig.Active {
			return nil, fmt.Errorf("destination %q: filter.expression: %w", d.Name, err)
		}
		for _, s := range d.Sources {
			next.bySource[s] = append(next.bySource[s], to)
		}
	}
	return next, nil
}

// Keep adds the destinations of the previous Router that were removed, or disconnected from a
// Source, until the grace period ends: their lanes exist that long and receive the same calls as
// before. It must be called before the first Skip.
func (r *Router) Keep(before *Router, now time.Time, grace time.Duration) {
	for source, destinations := range before.bySource {
		for _, d := range destinations {
			if slices.ContainsFunc(r.bySource[source], func(own *destination) bool { return own.key == d.key }) {
				continue
			}
			kept := *d
			if kept.until.IsZero() {
				kept.until = now.Add(grace)
			}
			if now.Before(kept.until) {
				r.bySource[source] = append(r.bySource[source], &kept)
			}
		}
	}
}

// KeepDeleted adds the deleted destinations of a namespace whose lanes may still exist, for example
// after a restart. It must be called after Keep and before the first Skip.
func (r *Router) KeepDeleted(namespace string, tombstones []liveconfig.Tombstone) {
	routes := map[string]Route{}
	for _, t := range tombstones {
		if t.Object.Section == liveconfig.SectionDestinations {
			routes[t.Object.Name] = Route{Sources: t.Sources, Filter: t.Filter}
		}
	}
	r.KeepRoutes(namespace, routes)
}

// Route is the routing of a destination, for the time when its config is missing.
type Route struct {
	Sources      []string           `json:"sources,omitempty"`
	Filter       *liveconfig.Filter `json:"filter,omitempty"`
	ExactNumbers bool               `json:"exactNumbers,omitempty"`
}

// RouteOf returns the routing of a destination.
func RouteOf(d liveconfig.Destination) Route {
	return Route{Sources: d.Sources, Filter: d.Filter, ExactNumbers: d.ExactNumbers}
}

// KeepRoutes adds destinations of a namespace, by name, without an expiry: their lanes exist and
// receive the same calls as before. Connections that the Router has remain as they are. It must be
// called after Keep and before the first Skip.
func (r *Router) KeepRoutes(namespace string, routes map[string]Route) {
	for name, route := range routes {
		to := &destination{key: namespace + "/" + name, name: name, exact: route.ExactNumbers}
		_ = r.filter(to, route.Filter) // It was valid while the destination was in a config.
		for _, source := range route.Sources {
			if !slices.ContainsFunc(r.bySource[source], func(d *destination) bool { return d.key == to.key }) {
				r.bySource[source] = append(r.bySource[source], to)
			}
		}
	}
}

// filter sets a destination's filter; nil matches everything. With an error it is invalid.
func (r *Router) filter(d *destination, f *liveconfig.Filter) (err error) {
	if f == nil {
		return nil
	}
	d.types, d.events, d.invalid = f.Types, f.Events, f.Invalid
	if f.Expression == "" {
		return nil
	}
	p := cmp.Or(r.programs[f.Expression], r.old[f.Expression])
	if p == nil {
		if p, err = expression.Compile(f.Expression); err != nil {
			d.invalid = true
			return err
		}
	}
	d.expression, r.programs[f.Expression] = p, p
	return nil
}

// patternsPerUnit is the number of names that cost a unit of an expression to compare.
const patternsPerUnit = 4

// unitsToYield is after how many units of expressions, about a millisecond, other goroutines run.
const unitsToYield = 500

// Skip returns the keys ("namespace/name") of the destinations that are connected to a Source but
// must not get this call, and an entry of queue.FilterFailed for each whose filter failed. It is nil for most calls.
// units is the cost, in units of expressions: at least one for each destination.
func (r *Router) Skip(source string, call *event.Call) (skip []string, units int) {
	var read reader
	yielded := 0
	for _, d := range r.bySource[source] {
		units += 1 + len(d.events)/patternsPerUnit
		if r := d.takes(call, &read); r.Failure != "" {
			skip = append(skip, queue.FilterFailed(d.key, r.Failure))
		} else if !r.Matches {
			skip = append(skip, d.key)
		}
		if d.expression == nil {
			continue
		}
		if spent := read.exact.units() + read.fixed.units(); spent-yielded > unitsToYield {
			yielded = spent
			runtime.Gosched()
		}
	}
	return skip, units + read.exact.units() + read.fixed.units()
}

// Destinations returns the keys of all destinations that are connected to a Source.
func (r *Router) Destinations(source string) (keys []string) {
	for _, d := range r.bySource[source] {
		keys = append(keys, d.key)
	}
	return keys
}

// reader parses a call for expressions, once for all of them: with all digits of long numbers, and
// with strings in their place.
type reader struct{ exact, fixed form }

type form struct {
	call *expression.Call
	err  error
	done bool
}

// units is what the expressions have cost.
func (f *form) units() int {
	if f.call == nil {
		return 0
	}
	return int(f.call.Units)
}

func (r *reader) matches(d *destination, call *event.Call) expression.Result {
	f, body := &r.exact, call.Body
	if call.LongNumbers && !d.exact {
		f = &r.fixed
		if !f.done {
			body, f.err = event.FixedPoint(body)
		}
	}
	if !f.done && f.err == nil {
		f.call, f.err = expression.Parse(body)
	}
	f.done = true
	if f.err != nil {
		return expression.Result{Failure: "the call cannot be read as a JSON object"}
	}
	return d.expression.Match(f.call)
}

// takes checks the cheap conditions first.
func (d *destination) takes(call *event.Call, read *reader) expression.Result {
	if d.types != nil && !slices.Contains(d.types, string(call.Type)) {
		return expression.Result{}
	}
	if d.events != nil && (call.Type != event.Track || !liveconfig.MatchEvent(d.events, call.Event)) {
		return expression.Result{}
	}
	if !call.Integrations.Allows(IntegrationName, d.name) {
		return expression.Result{}
	}
	switch {
	case d.invalid:
		return expression.Result{Failure: "the filter was not valid when the call was accepted"}
	case d.expression == nil:
		return expression.Result{Matches: true}
	}
	return read.matches(d, call)
}
