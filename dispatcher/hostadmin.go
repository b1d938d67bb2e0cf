package dispatcher

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/posthorn/posthorn/dispatcher/admin"
	"github.com/posthorn/posthorn/dispatcher/adminapi"
	"github.com/posthorn/posthorn/dispatcher/promtext"
)

// serve serves the listeners of the process until ctx is done.
func (h *host) serve(ctx context.Context) error {
	calls := http.NewServeMux()
	admin.MountHealth(calls, h.ready)
	calls.Handle("/", h.front())
	return serveProcess(ctx, h.o.Listeners, h.o, handlers{calls, h.admin(), http.HandlerFunc(h.fromPeer), h.ready}, func() time.Duration { return handOverTimeout })
}

// admin is the handler of the admin listener. The admin API of a slot that the process owns is below
// /slots/N/.
func (h *host) admin() http.Handler {
	registry := newRegistry()
	registry.MustRegister(h.o.clock.metric())
	for _, s := range h.slots {
		prometheus.WrapRegistererWith(s.labels(), registry).MustRegister(logMetrics{s.term.Load, s.forwarder, s.sequence})
	}
	guarded := http.NewServeMux()
	guarded.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) { h.metrics(w, r, registry) })
	guarded.HandleFunc("GET /report", h.report)
	guarded.HandleFunc("GET /slots", func(w http.ResponseWriter, _ *http.Request) {
		states := []*adminapi.LogState{}
		for _, s := range h.slots {
			if state := s.state(); state != nil {
				states = append(states, state)
			}
		}
		writeJSON(w, http.StatusOK, states)
	})
	guarded.HandleFunc("GET /namespaces/{namespace}/slot", func(w http.ResponseWriter, r *http.Request) {
		writeJSON(w, http.StatusOK, h.slotOf(r.PathValue("namespace")))
	})
	guarded.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "this process has several slots; send the request to /slots/N/ for a slot of GET /slots", http.StatusNotFound)
	})
	others, refused := http.Handler(guarded), http.Handler(http.HandlerFunc(h.refuseSlot))
	if h.o.AdminGuard != nil {
		others, refused = h.o.AdminGuard(others), h.o.AdminGuard(refused)
	}
	others, refused = admin.NotFromPages(others, h.o.AdminGuard != nil), admin.NotFromPages(refused, h.o.AdminGuard != nil)
	root := http.NewServeMux()
	admin.MountHealth(root, h.ready)
	root.Handle("/", others)
	root.HandleFunc("/slots/{slot}/", func(w http.ResponseWriter, r *http.Request) {
		number := r.PathValue("slot")
		// The permission to read /report includes those of all slots: both guards get the path without the slot.
		handler := refused
		if inside := h.slotNamed(number).enter(); inside != nil {
			defer inside.requests.Done()
			handler = http.HandlerFunc(inside.serveAdmin)
		}
		http.StripPrefix("/slots/"+number, handler).ServeHTTP(w, r)
	})
	return root
}

// slotOf returns the slot of a namespace; nil if it has none.
func (h *host) slotOf(namespace string) *adminapi.NamespaceSlot {
	slot, ok := h.namespaces.SlotOf(namespace)
	if !ok {
		return nil
	}
	at := &adminapi.NamespaceSlot{Slot: slot}
	if s := h.slotNamed(strconv.Itoa(slot)); s != nil {
		if at.Owned = s.term.Load() != nil; !at.Owned {
			at.Owner = s.forwarder.Owner()
		}
	}
	return at
}

// refuseSlot answers a request for a slot that this process does not own.
func (h *host) refuseSlot(w http.ResponseWriter, r *http.Request) {
	message := "this process does not own slot " + r.PathValue("slot")
	if s := h.slotNamed(r.PathValue("slot")); s != nil && s.forwarder.Owner() != "" {
		message += "; send the request to the owner, " + s.forwarder.Owner()
	}
	http.Error(w, message, http.StatusNotFound)
}

// report is the report of the process. The namespaces are in the reports of the slots.
func (h *host) report(w http.ResponseWriter, r *http.Request) {
	report := adminapi.Report{Pod: h.o.Pod, ConfigFormat: adminapi.ConfigFormat, Ready: h.ready() == nil, Log: &adminapi.LogReport{Number: h.s.Number}}
	var cursor strings.Builder
	fmt.Fprintf(&cursor, "%s.%t", h.o.identity.ID(), report.Ready)
	for _, owned := range h.owned() {
		report.Log.Slots = append(report.Log.Slots, owned.Slot)
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
func (s *hosted) state() *adminapi.LogState {
	if inside := s.enter(); inside != nil {
		defer inside.requests.Done()
		return inside.dispatcher.logState()
	}
	if b := s.standby.Load(); b != nil {
		return b.state(s.o)
	}
	return nil
}

// sequence returns the sequence of the last record that the process has; ok is false if it has none of the
// slot.
func (s *hosted) sequence() (n uint64, ok bool) {
	if t := s.term.Load(); t != nil {
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
		w.Sample(number(h.ready() == nil), "")
	}}}
	for _, s := range h.slots {
		inside := s.enter()
		if inside == nil {
			continue
		}
		defer inside.requests.Done()
		d := inside.dispatcher
		gatherers = append(gatherers, d.metrics)
		labels := promtext.NewLabels("slot", strconv.Itoa(s.slot))
		streams = append(streams, promtext.Part{Labels: labels, Write: d.writeMetrics}, promtext.Part{Labels: labels, Write: d.engine.WriteMetrics})
	}
	promtext.Handler(gatherers, promtext.Merged(streams...)).ServeHTTP(w, r)
}
