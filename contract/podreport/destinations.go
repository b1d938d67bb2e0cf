package podreport

import (
	"cmp"
	"iter"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// destinations are the reports about the destinations of a namespace, sorted by name. The operator has
// one about each destination from each dispatcher, so a report is stored without the parts that are
// equal in all dispatchers, and without those that are usually zero. Both slices are immutable.
type destinations struct {
	all []compactDestination
	// endpoints has the endpoints of all destinations, in their order.
	endpoints []compactEndpoint
}

// compactDestination is a DestinationReport.
type compactDestination struct {
	*destinationConfig
	adminapi.Ledger
	rare *rareDestination // Nil if it is zero.
	// first is the index of the first endpoint.
	first uint32
}

// destinationConfig is the part of a DestinationReport that is equal in all dispatchers.
type destinationConfig struct {
	name       string
	generation int64
	revision   string
	endpoints  []string
}

// rareDestination is the part of a DestinationReport that is usually zero. Its times are in
// nanoseconds; 0 is no time.
type rareDestination struct {
	deadLettersStored, deadLettersForwarded, retrying, oldestPending, oldestExpires, nextAttempt int64

	filterFailure *adminapi.Failure
	limit         adminapi.LimitUse
	unmatched     *adminapi.UnmatchedPaths
}

// compactEndpoint is an EndpointReport without its name.
type compactEndpoint struct {
	since, lastSuccess int64
	rare               *rareEndpoint // Nil if it is zero.
	state              uint8         // The index in endpointStates, or otherState.
}

// rareEndpoint is the part of an EndpointReport that is usually zero. State is set for an unknown one.
type rareEndpoint struct {
	state                                      adminapi.EndpointState
	consecutiveFailures                        int
	lastFailure                                *adminapi.Failure
	firstAttemptsPending, firstAttemptsSkipped int64
	compressionRefused                         bool
}

var endpointStates = []adminapi.EndpointState{adminapi.EndpointIdle, adminapi.EndpointHealthy, adminapi.EndpointDegraded,
	adminapi.EndpointCircuitOpen, adminapi.EndpointGone}

// otherState is a state that this release does not know.
const otherState = 255

// find returns the destination with a name, or nil.
func (d *destinations) find(name string) *compactDestination {
	i, ok := slices.BinarySearchFunc(d.all, name, func(c compactDestination, name string) int { return strings.Compare(c.name, name) })
	if !ok {
		return nil
	}
	return &d.all[i]
}

// of returns the endpoints of a destination.
func (d *destinations) of(c *compactDestination) []compactEndpoint {
	return d.endpoints[c.first:][:len(c.destinationConfig.endpoints)]
}

// merge returns the reports after a change. A report shares its config with an equal one of likes.
func (d *destinations) merge(changed []adminapi.DestinationReport, removed []string, likes ...*destinations) destinations {
	if len(changed) == 0 && len(removed) == 0 {
		return *d
	}
	if next, ok := d.replace(changed, removed, likes); ok {
		return next
	}
	type one struct {
		compactDestination
		endpoints []compactEndpoint
	}
	all, ended, endpoints := make([]one, 0, len(d.all)+len(changed)), make(map[string]bool, len(changed)+len(removed)), 0
	for _, name := range removed {
		ended[name] = true
	}
	for i := range changed {
		ended[changed[i].Name] = true
		c, list := compact(&changed[i], likes)
		all = append(all, one{c, list})
	}
	for i := range d.all {
		if c := &d.all[i]; !ended[c.name] {
			all = append(all, one{*c, d.of(c)})
		}
	}
	slices.SortFunc(all, func(a, b one) int { return strings.Compare(a.name, b.name) })
	for i := range all {
		endpoints += len(all[i].endpoints)
	}
	next := destinations{make([]compactDestination, 0, len(all)), make([]compactEndpoint, 0, endpoints)}
	for _, o := range all {
		o.first = uint32(len(next.endpoints))
		next.all, next.endpoints = append(next.all, o.compactDestination), append(next.endpoints, o.endpoints...)
	}
	return next
}

// replace is merge for changes that neither add nor remove a destination or an endpoint; ok is false for
// others. Nearly all changes are of numbers, so it only copies.
func (d *destinations) replace(changed []adminapi.DestinationReport, removed []string, likes []*destinations) (next destinations, ok bool) {
	for i := range changed {
		c := d.find(changed[i].Name)
		if c == nil || len(c.destinationConfig.endpoints) != len(changed[i].Endpoints) {
			return next, false
		}
	}
	if len(removed) > 0 {
		return next, false
	}
	next = destinations{slices.Clone(d.all), slices.Clone(d.endpoints)}
	for i := range changed {
		old := next.find(changed[i].Name)
		c, endpoints := compact(&changed[i], likes)
		c.first = old.first
		*old = c
		copy(next.of(old), endpoints)
	}
	return next, true
}

// compact returns a report and its endpoints.
func compact(r *adminapi.DestinationReport, likes []*destinations) (c compactDestination, endpoints []compactEndpoint) {
	c = compactDestination{destinationConfig: configOf(r, likes), Ledger: r.Ledger}
	if rare := (rareDestination{r.DeadLettersStored, r.DeadLettersForwarded, r.Retrying, nanoseconds(r.OldestPending),
		nanoseconds(r.OldestExpires), nanoseconds(r.NextAttempt), r.FilterFailure, r.Limit, r.Unmatched}); rare != (rareDestination{}) {
		c.rare = new(rareDestination)
		*c.rare = rare
	}
	endpoints = make([]compactEndpoint, len(r.Endpoints))
	for i := range r.Endpoints {
		e := &r.Endpoints[i]
		endpoints[i] = compactEndpoint{since: nanoseconds(e.Since), lastSuccess: nanoseconds(e.LastSuccess)}
		rare := rareEndpoint{consecutiveFailures: e.ConsecutiveFailures, lastFailure: e.LastFailure, firstAttemptsPending: e.FirstAttemptsPending,
			firstAttemptsSkipped: e.FirstAttemptsSkipped, compressionRefused: e.CompressionRefused}
		if known := slices.Index(endpointStates, e.State); known >= 0 {
			endpoints[i].state = uint8(known)
		} else {
			endpoints[i].state, rare.state = otherState, e.State
		}
		if rare != (rareEndpoint{}) || endpoints[i].state == otherState {
			endpoints[i].rare = new(rareEndpoint)
			*endpoints[i].rare = rare
		}
	}
	return c, endpoints
}

func (d *destinations) equalExceptNumbers(o *destinations) bool {
	return slices.EqualFunc(d.all, o.all, func(a, b compactDestination) bool {
		return a.filterError() == b.filterError() && (a.destinationConfig == b.destinationConfig ||
			reflect.DeepEqual(a.destinationConfig, b.destinationConfig))
	}) && slices.EqualFunc(d.endpoints, o.endpoints, func(a, b compactEndpoint) bool {
		return a.state == b.state && a.since == b.since && a.failure() == b.failure()
	})
}

func (c *compactDestination) filterError() string {
	if c.rare == nil || c.rare.filterFailure == nil {
		return ""
	}
	return c.rare.filterFailure.Message
}

// failure is the part of a rareEndpoint that is not a number.
type failure struct {
	state        adminapi.EndpointState
	failing, any bool
}

func (e compactEndpoint) failure() failure {
	if e.rare == nil {
		return failure{}
	}
	return failure{e.rare.state, e.rare.consecutiveFailures > 0, e.rare.lastFailure != nil}
}

// configOf returns the config of a report, or an equal config of one of likes.
func configOf(r *adminapi.DestinationReport, likes []*destinations) *destinationConfig {
	for _, like := range likes {
		c := like.find(r.Name)
		if c != nil && c.generation == r.Generation && c.revision == r.Revision &&
			slices.EqualFunc(c.endpoints, r.Endpoints, func(name string, e adminapi.EndpointReport) bool { return name == e.Name }) {
			return c.destinationConfig
		}
	}
	// Copies, so that no object keeps the memory of a whole report.
	config := &destinationConfig{name: strings.Clone(r.Name), generation: r.Generation, revision: strings.Clone(r.Revision)}
	for i := range r.Endpoints {
		config.endpoints = append(config.endpoints, strings.Clone(r.Endpoints[i].Name))
	}
	return config
}

// read writes a report. It reuses the endpoints of into.
func (d *destinations) read(c *compactDestination, into *adminapi.DestinationReport) {
	endpoints := into.Endpoints[:0]
	rare := c.rare
	if rare == nil {
		rare = &rareDestination{}
	}
	for i, e := range d.of(c) {
		rare := e.rare
		if rare == nil {
			rare = &rareEndpoint{}
		}
		state := rare.state
		if e.state != otherState {
			state = endpointStates[e.state]
		}
		endpoints = append(endpoints, adminapi.EndpointReport{
			Name: c.endpoints[i], State: state, Since: timeOf(e.since), LastSuccess: timeOf(e.lastSuccess),
			ConsecutiveFailures: rare.consecutiveFailures, LastFailure: rare.lastFailure,
			FirstAttemptsPending: rare.firstAttemptsPending, FirstAttemptsSkipped: rare.firstAttemptsSkipped,
			CompressionRefused: rare.compressionRefused,
		})
	}
	*into = adminapi.DestinationReport{
		Name: c.name, Generation: c.generation, Revision: c.revision, Ledger: c.Ledger,
		DeadLettersStored: rare.deadLettersStored, DeadLettersForwarded: rare.deadLettersForwarded, Retrying: rare.retrying,
		OldestPending: timeOf(rare.oldestPending), OldestExpires: timeOf(rare.oldestExpires), NextAttempt: timeOf(rare.nextAttempt),
		Endpoints: endpoints, FilterFailure: rare.filterFailure, Limit: rare.limit, Unmatched: rare.unmatched,
	}
}

// nanoseconds returns a time since 1970; 0 for the zero time.
func nanoseconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return cmp.Or(t.UnixNano(), 1)
}

func timeOf(nanoseconds int64) time.Time {
	if nanoseconds == 0 {
		return time.Time{}
	}
	return time.Unix(0, nanoseconds).UTC()
}

// LimitUses returns the uses of limits, by the object: "sources/NAME" or "destinations/NAME", as in the live config.
func (n *NamespaceIndex) LimitUses() iter.Seq2[string, adminapi.LimitUse] {
	return func(yield func(string, adminapi.LimitUse) bool) {
		for name, s := range n.Sources {
			if s.Limit != (adminapi.LimitUse{}) && !yield("sources/"+name, s.Limit) {
				return
			}
		}
		for i := range n.destinations.all {
			d := &n.destinations.all[i]
			if d.rare != nil && d.rare.limit != (adminapi.LimitUse{}) && !yield("destinations/"+d.name, d.rare.limit) {
				return
			}
		}
	}
}

// ReadDestination reads the report about a destination; n may be nil. Without a report it returns false
// and does not change into. It reuses the slice of endpoints in into. A caller must not change a
// LastFailure.
func (n *NamespaceIndex) ReadDestination(name string, into *adminapi.DestinationReport) bool {
	if n == nil {
		return false
	}
	c := n.destinations.find(name)
	if c == nil {
		return false
	}
	n.destinations.read(c, into)
	return true
}

// Destinations returns the reports about the destinations, sorted by name. A report is valid until the
// next one. A caller must not change a LastFailure.
func (n *NamespaceIndex) Destinations() iter.Seq[*adminapi.DestinationReport] {
	return func(yield func(*adminapi.DestinationReport) bool) {
		var d adminapi.DestinationReport
		for i := range n.destinations.all {
			n.destinations.read(&n.destinations.all[i], &d)
			if !yield(&d) {
				return
			}
		}
	}
}
