package ingest

import (
	"strings"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// origins are the origins that some Source of a view allows.
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
				o.set[strings.ToLower(origin)] = true
			}
		}
	}
	h.origins.Store(o)
	return o
}

func (o *origins) allow(origin string) bool { return o.set["*"] || o.set[strings.ToLower(origin)] }
