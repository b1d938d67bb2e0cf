// Package host runs the Dispatchers of a process whose stores are slots of a replicated log: this process owns some
// slots, and is the standby of others. Run is the entry.
package host

import (
	"cmp"
	"context"
	"net"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/replicated/peer"
)

// Options configure the Dispatchers of a process, and its part in the log.
type Options struct {
	// Options configure each Dispatcher. Pod is another one for each process; without it, the address of PeerListen
	// is the name of the process.
	dispatcher.Options
	// Listeners of the process. Required.
	Listeners *Listeners
	// PeerListen is the address of a listener for the requests that other processes forward to the owner of a slot;
	// host:port, where the host is the one at which the other processes reach this one. Required.
	PeerListen string
	// WallClock is the clock of this process that is compared with the log's servers, replaced by
	// tests. Default time.Now.
	WallClock func() time.Time
	// LeaseClock is the clock of leases, replaced by tests. Default: the clock since the start of the machine.
	LeaseClock func() time.Time
	// Dial opens connections to other processes, replaced by tests. Default: TCP.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Lacks, when set, returns the objects that the log has, by the values of Store.AllMeta, and that this process
	// lacks or has in an older version: as the owner it would park them. Only one goroutine calls it. It is for a log
	// with one slot.
	Lacks func(values map[string][]byte) []string

	// clock and identity are set by Run.
	clock    *clockCheck
	identity *peer.Identity
}

// fs is the file system of the data directory.
func (o Options) fs() vfs.FS { return cmp.Or(o.Queue.FS, vfs.Default) }
