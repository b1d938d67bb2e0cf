package host

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/admin"
	"github.com/posthorn/posthorn/dispatcher/replicated/peer"
	"github.com/posthorn/posthorn/internal/plural"
	"github.com/posthorn/posthorn/internal/promtext"
)

// serve serves the listeners of the process until ctx is done.
func (h *host) serve(ctx context.Context) error {
	calls := http.NewServeMux()
	admin.MountHealth(calls, h.ready)
	calls.Handle("/", h.calls())
	peers := peer.Handlers{
		Calls:     h.fromPeer(func(a *openGate, w http.ResponseWriter, r *http.Request) { a.calls.ServeHTTP(w, r) }),
		Admin:     h.fromPeer((*openGate).serveAdmin),
		Namespace: h.namespaceOf,
	}
	return h.o.Listeners.serve(ctx, h.o, dispatcher.Handlers{Calls: calls, Admin: h.admin(), Ready: h.ready}, peers)
}

// admin is the handler of the admin listener. The admin API of slot N is below /slots/N/: requests are
// forwarded to the owner of the slot. With one slot, it is also at the root.
func (h *host) admin() http.Handler {
	guarded := http.NewServeMux()
	registry := h.registry()
	guarded.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) { h.metrics(w, r, registry) })
	guarded.HandleFunc("GET /report", h.report)
	guarded.HandleFunc("GET /slots", func(w http.ResponseWriter, r *http.Request) {
		states := h.states()
		if r.URL.Query().Has(adminapi.SlotsOfAll) {
			states = append(states, h.heard()...)
		}
		writeJSON(w, http.StatusOK, states)
	})
	unknown := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, fmt.Sprintf("this log has %s; send the request to /slots/N/", plural.Count(len(h.slots), "slot")), http.StatusNotFound)
	})
	root := http.NewServeMux()
	admin.MountHealth(root, h.ready)
	for _, path := range []string{"/metrics", "/report", "/slots"} {
		root.Handle(path, protect(h.o, guarded))
	}
	root.Handle("/slots/", unknown)
	for _, s := range h.slots {
		path := adminapi.SlotPath(s.slot)
		// The permission to read /report includes the permissions for all slots: both guards get the path without the slot.
		root.Handle(path+"/", http.StripPrefix(path, s.admin(forwardAdmin(s.forwarder))))
	}
	rest := protect(h.o, unknown)
	if len(h.slots) == 1 {
		rest = h.slots[0].admin(forwardAdmin(h.slots[0].forwarder))
		root.Handle("/debug/", h.slots[0].admin(unknown)) // It is about a process.
	}
	root.Handle("/", rest)
	return root
}

// admin is the handler of the slot's admin API in its owner; otherwise serves the authorized requests in others.
func (s *replica) admin(otherwise http.Handler) http.Handler {
	return s.gate.or((*openGate).serveAdmin, protect(s.o, otherwise).ServeHTTP)
}

// registry has the metrics of the process.
func (h *host) registry() *prometheus.Registry {
	registry := dispatcher.NewRegistry()
	registry.MustRegister(h.o.clock.metric())
	if h.lacking != nil {
		registry.MustRegister(h.lacking.metric())
	}
	for _, s := range h.slots {
		prometheus.WrapRegistererWith(s.labels(), registry).MustRegister(replicationMetrics{s})
	}
	return registry
}

// states are the parts of the process in the log.
func (h *host) states() []*adminapi.ReplicationState {
	states := []*adminapi.ReplicationState{}
	for _, s := range h.slots {
		if state := s.state(); state != nil {
			states = append(states, state)
		}
	}
	return states
}

// heard are the parts of the other processes in the log.
func (h *host) heard() (states []*adminapi.ReplicationState) {
	_, placed := h.members.View(len(h.slots))
	for slot, p := range placed {
		if p.Owner != "" && p.Owner != h.name {
			states = append(states, &adminapi.ReplicationState{Pod: p.Owner, Heard: true, Slot: slot, Owner: true, Ready: true, MaySend: !p.Silent})
		}
		for _, f := range p.Followers {
			if f.Name == h.name {
				continue
			}
			s := &adminapi.ReplicationState{Pod: f.Name, Heard: true, Slot: slot, Ready: f.Ready}
			if !f.Ready {
				s.Reason = "it restores its copy, or cannot use it: its /readyz has the reason"
			}
			states = append(states, s)
		}
	}
	return states
}

// protect returns a handler of admin requests for authorized callers.
func protect(o Options, h http.Handler) http.Handler {
	if o.AdminGuard != nil {
		h = o.AdminGuard(h)
	}
	return admin.NotFromPages(h, o.AdminGuard != nil)
}

// report is the report of the process. The namespaces are in the reports of the slots.
func (h *host) report(w http.ResponseWriter, r *http.Request) {
	report := adminapi.Report{Pod: h.o.Pod, Ready: h.ready() == nil,
		Replication: &adminapi.ReplicationReport{Number: h.s.Number, Standbys: h.wantedStandbys()}}
	var cursor strings.Builder
	fmt.Fprintf(&cursor, "%s.%t", h.o.identity.ID(), report.Ready)
	for _, owned := range h.owned() {
		report.Replication.Slots = append(report.Replication.Slots, owned.Slot)
		fmt.Fprintf(&cursor, ".%d", owned.Slot)
	}
	if report.Cursor = cursor.String(); r.URL.Query().Get(adminapi.ReportCursor) == report.Cursor {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	writeJSON(w, http.StatusOK, report)
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(value) // The client has closed the connection.
}

// state returns the part of the process in the log of the slot; nil for none.
func (s *replica) state() *adminapi.ReplicationState {
	if inside := s.enter(); inside != nil {
		defer inside.requests.Done()
		return inside.dispatcher.ReplicationState()
	}
	if b := s.standby.Load(); b != nil {
		return b.state()
	}
	return nil
}

// sequence returns the sequence of the last record that the process has; ok is false if it has none of the
// slot.
func (s *replica) sequence() (n uint64, ok bool) {
	if t := s.ownership.Load(); t != nil {
		return t.writer.Status().Sequence, true
	}
	if b := s.standby.Load(); b != nil {
		return b.applied.Load(), true
	}
	return 0, false
}

// metrics serves the metrics of the process and of all its slots. The stores remain open meanwhile.
func (h *host) metrics(w http.ResponseWriter, r *http.Request, registry prometheus.Gatherer) {
	gatherers := prometheus.Gatherers{registry}
	streams := []promtext.Part{{Write: func(w *promtext.Writer) {
		w.Family("posthorn_ready", promtext.Gauge, "1 while calls are accepted.")
		w.Sample(promtext.Bool(h.ready() == nil), "")
	}}}
	for _, s := range h.slots {
		inside := s.enter()
		if inside == nil {
			continue
		}
		defer inside.requests.Done()
		gathered, written := inside.dispatcher.Metrics()
		gatherers = append(gatherers, gathered)
		for _, write := range written {
			streams = append(streams, promtext.Part{Labels: promtext.NewLabels("slot", strconv.Itoa(s.slot)), Write: write})
		}
	}
	promtext.Handler(gatherers, promtext.Merged(streams...)).ServeHTTP(w, r)
}
