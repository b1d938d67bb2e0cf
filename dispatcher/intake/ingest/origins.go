package ingest

import (
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// origins are the entries of spec.allowedOrigins of all Sources of a view.
type origins struct {
	view *liveconfig.View
	set  map[string]bool
}

// originsOf returns the origins of a view.
func (h *Handler) originsOf(view *liveconfig.View) *origins {
	if o := h.origins.Load(); o != nil && o.view == view {
		return o
	}
	o := &origins{view: view, set: map[string]bool{}}
	for _, namespace := range view.Namespaces() {
		c, _ := view.Namespace(namespace)
		for _, s := range c.Sources {
			for _, origin := range s.AllowedOrigins {
				o.set[origin] = true
			}
		}
	}
	h.origins.Store(o)
	return o
}

func (o *origins) allow(origin string) bool {
	for entry := range liveconfig.EntriesFor(origin) {
		if o.set[entry] {
			return true
		}
	}
	return false
}
