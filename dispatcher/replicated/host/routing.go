package host

import (
	"net/http"
	"strconv"

	"github.com/posthorn/posthorn/contract/writekey"
	"github.com/posthorn/posthorn/dispatcher/replicated/front"
	"github.com/posthorn/posthorn/dispatcher/replicated/peer"
)

// any returns the handler of a slot that this process owns; otherwise of one that has an owner.
func (h *host) any() http.Handler {
	for _, s := range h.slots {
		if s.ownership.Load() != nil {
			return s
		}
	}
	for _, s := range h.slots {
		if s.forwarder.Owner() != "" {
			return s
		}
	}
	return h.slots[0]
}

// calls routes the calls of clients.
func (h *host) calls() http.Handler {
	several := &front.Front{
		Ready: h.canRoute, Index: &h.namespaces.index, SlotOf: h.namespaces.SlotOf, Doubtful: h.listDoubtful,
		Slot: h.handlerOf, Any: h.any,
		Memory: h.connections.Memory, Unreadable: func(w http.ResponseWriter, err error) {
			refuseForwarded(w, &peer.BodyError{Err: err})
		},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h.isOnly() {
			h.slots[0].ServeHTTP(w, r)
			return
		}
		several.ServeHTTP(w, r)
	})
}

// isOnly reports whether the log has one slot: nothing needs to be looked up to route a call. A process that has added
// slots can have assigned namespaces to them.
func (h *host) isOnly() bool {
	directory := h.namespaces.directory.Load()
	return directory != nil && len(h.slots) == 1 && directory.Slots() == 1
}

// namespaceOf returns the namespace of a write key, by which forwarded requests are bounded.
func (h *host) namespaceOf(key writekey.Hash) (namespace string, ok bool) {
	if h.s.Control == nil {
		return h.namespaces.index.OfHash(key)
	}
	inside := h.slots[0].enter()
	if inside == nil {
		return "", false
	}
	defer inside.requests.Done()
	return inside.dispatcher.NamespaceOf(key)
}

// listDoubtful returns the slots of which an unknown write key can be, sorted.
func (h *host) listDoubtful() (list []int) {
	directory := h.namespaces.directory.Load()
	if directory == nil {
		return nil
	}
	lacksConfigs := h.namespaces.lacksConfigs()
	for slot := range directory.Slots() {
		if directory.HasNamespaces(slot) && (lacksConfigs || slot >= len(h.slots) || !h.slots[slot].listed.Load() ||
			h.namespaces.changedLately(slot)) {
			list = append(list, slot)
		}
	}
	return list
}

// handlerOf returns the handler of a slot. One that this process does not know was added meanwhile.
func (h *host) handlerOf(slot int) http.Handler {
	if slot < len(h.slots) {
		return h.slots[slot]
	}
	return http.HandlerFunc(refuseCall)
}

// slotNamed returns the slot with a number in decimal; nil if there is none.
func (h *host) slotNamed(number string) *replica {
	if slot, err := strconv.Atoi(number); err == nil && slot >= 0 && slot < len(h.slots) {
		return h.slots[slot]
	}
	return nil
}

// fromPeer returns the handler of the requests that other processes have forwarded; serve handles those for a slot.
func (h *host) fromPeer(serve func(*openGate, http.ResponseWriter, *http.Request)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		inside := h.slotNamed(peer.TakeSlot(r)).enter()
		if inside == nil {
			peer.Misdirected(w, r)
			return
		}
		defer inside.requests.Done()
		serve(inside, w, r)
	})
}
