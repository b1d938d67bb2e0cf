// Package admissiontest makes admission.Gates for tests of the packages that append to the queue.
package admissiontest

import (
	"context"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

// Store is an admission.Store of functions. Without them it has space, and Append does nothing.
type Store struct {
	OnAppend func(context.Context, []queue.Message) ([]bool, error)
	OnFull   func() bool
	// OnRoom reports whether the log of a Source ("namespace/name") has space for a sync.
	OnRoom func(source string) bool
}

// Append implements admission.Store.
func (s *Store) Append(ctx context.Context, msgs []queue.Message) ([]bool, error) {
	if s.OnAppend == nil {
		return nil, nil
	}
	return s.OnAppend(ctx, msgs)
}

// Share implements admission.Store.
func (s *Store) Share(source string) (used, most int64) {
	if s.OnRoom == nil || s.OnRoom(source) {
		return 0, 1 << 20
	}
	return 1 << 20, 1 << 20
}

// Full implements admission.Store.
func (s *Store) Full() bool { return s.OnFull != nil && s.OnFull() }

// DiskBytes implements admission.Store.
func (s *Store) DiskBytes() int64 { return 0 }

// Router is an admission.Router of a function.
type Router struct {
	// OnSkip returns the keys of the destinations that do not get a call; nil for none.
	OnSkip func(source string, call *event.Call) []string
	// All has the keys of the destinations of each Source.
	All map[string][]string
	// Units is the cost of a call.
	Units int
}

// Skip implements admission.Router.
func (r Router) Skip(source string, call *event.Call) ([]string, int) {
	if r.OnSkip == nil {
		return nil, r.Units
	}
	return r.OnSkip(source, call), r.Units
}

// Destinations implements admission.Router.
func (r Router) Destinations(source string) []string { return r.All[source] }

// Set puts a view into effect, with one router for all of its namespaces.
func Set(g *admission.Gate, view *liveconfig.View, router admission.Router) {
	routers := map[string]admission.Router{}
	if view != nil {
		for _, namespace := range view.Namespaces() {
			routers[namespace] = router
		}
	}
	_ = g.Replace(view, routers, func(*liveconfig.View) error { return nil })
}
