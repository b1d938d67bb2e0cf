// Package host runs the Dispatchers of a process whose stores are slots of a replicated log: this process owns some
// slots, and is the standby of others.
//
// RunSlots runs a process of an installation with several slots, and RunSlot one of an installation with one.
package host

import (
	"time"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/replicated/peer"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// Options configure the Dispatchers of a process, and its part in the log.
type Options struct {
	// Options configure each Dispatcher.
	dispatcher.Options
	// Listeners of the process. Required.
	Listeners *Listeners
	// PeerListen, when set, is the address of a listener for the calls that standbys forward to the
	// owner of a slot; host:port, where the host is the one at which the other processes reach this
	// one.
	PeerListen string
	// WallClock is the clock of this process that is compared with the log's servers, replaced by
	// tests. Default time.Now.
	WallClock func() time.Time
	// Bus carries the heartbeats of RunSlot. Without it an owner with a wrong clock keeps its slot.
	Bus slots.Bus
	// Lacks, when set, returns the objects that the log has, by the values of Store.AllMeta, and that this process
	// lacks or has in an older version: as the owner it would park them. Only one goroutine of RunSlot calls it.
	Lacks func(values map[string][]byte) []string

	// clock is set by RunSlot and RunSlots, and lacking by RunSlot.
	clock   *clockCheck
	lacking *lacking
	// identity and forwarder are set if standbys forward calls.
	identity  *peer.Identity
	forwarder *peer.Forwarder
	// replica is set by RunSlots: the slot of the store.
	replica *replica
}
