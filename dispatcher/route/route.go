// Package route decides which destinations a call does not go to: by the
// destination's filter and by the call's own integrations. It is pure, and it
// is asked once per call, when the call is accepted.
package route

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/liveconfig/expression"
	"github.com/posthorn/posthorn/event"
)

// IntegrationName is what calls name webhook destinations by in their
// integrations object (the specification's name; case counts). A destination's
// own name is more specific and wins over it.
const IntegrationName = "Webhooks"

// Router holds the destinations of one tenant, by Source. It is never changed
// after New and is safe for concurrent use.
type Router struct{ bySource map[string][]*destination }

type destination struct {
	key, name  string
	types      []string
	events     []string
	expression *expression.Program
	// exact is true when the destination gets long numbers with their digits.
	exact bool
	// until is when one that another Router had is forgotten; zero for the config's own.
	until time.Time
}

// New compiles the filters of a tenant. The error names the first active
// destination whose expression does not compile; the controllers hold such a
// destination, so it means that the config was not made by them. A filter that
// does not compile of a destination that is not active lets everything pass:
// its messages are kept until its owner has mended it.
func New(c liveconfig.Config) (*Router, error) {
	r := &Router{bySource: map[string][]*destination{}}
	for _, d := range c.Destinations {
		to := &destination{key: c.Tenant + "/" + d.Name, name: d.Name, exact: d.ExactNumbers}
		if f := d.Filter; f != nil {
			to.types, to.events = f.Types, f.Events
			if f.Expression != "" {
				program, err := expression.Compile(f.Expression)
				if err != nil && d.State == liveconfig.Active {
					return nil, fmt.Errorf("destination %q: filter.expression: %w", d.Name, err)
				}
				to.expression = program
			}
		}
		for _, s := range d.Sources {
			r.bySource[s] = append(r.bySource[s], to)
		}
	}
	return r, nil
}

// Keep has the Router ask the destinations of the one before as well that are gone
// since, or do not listen to a Source any more, until grace is over: so long their
// lanes are kept, and take what they would have taken. Call it before any Skip.
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

// Skip returns the keys ("namespace/name") of the destinations that listen to
// a Source but do not get this call. It is nil for most calls.
func (r *Router) Skip(source string, call *event.Call) (skip []string) {
	var read reader
	for _, d := range r.bySource[source] {
		if !d.takes(call, &read) {
			skip = append(skip, d.key)
		}
	}
	return skip
}

// reader reads a call for expressions, once for all of them: with the digits of
// its long numbers, and with strings in their place.
type reader struct{ exact, fixed form }

type form struct {
	call expression.Call
	err  error
	done bool
}

func (r *reader) matches(d *destination, call *event.Call) bool {
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
		return false
	}
	// A call for which the expression fails does not match; see the field's documentation.
	matched, err := d.expression.MatchCall(f.call)
	return err == nil && matched
}

// takes asks what is cheap first.
func (d *destination) takes(call *event.Call, read *reader) bool {
	if d.types != nil && !slices.Contains(d.types, string(call.Type)) {
		return false
	}
	if d.events != nil && call.Type == event.Track && !slices.ContainsFunc(d.events, func(p string) bool { return glob(p, call.Event) }) {
		return false
	}
	if !call.Integrations.Allows(IntegrationName, d.name) {
		return false
	}
	return d.expression == nil || read.matches(d, call)
}

// glob matches a name with a pattern in which "*" stands for any characters.
// Taking each part at its first place is enough, so it takes linear time.
func glob(pattern, name string) bool {
	head, rest, star := strings.Cut(pattern, "*")
	if !star {
		return name == pattern
	}
	name, ok := strings.CutPrefix(name, head)
	for ok {
		var part string
		if part, rest, star = strings.Cut(rest, "*"); !star {
			return strings.HasSuffix(name, part)
		}
		_, name, ok = strings.Cut(name, part)
	}
	return false
}
