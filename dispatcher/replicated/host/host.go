package host

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/intake/limits"
	"github.com/posthorn/posthorn/dispatcher/memory"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/peer"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// Slots describe the slots of an installation.
type Slots struct {
	// Number is the number of slots. It can be raised later.
	Number int
	// Standbys is the number of processes that keep a copy of each slot in addition to its owner.
	Standbys int
	// Pins are the slots of namespaces that have none yet.
	Pins map[string]int
	// Open opens a slot, and OpenDirectory the directory of an installation with a number of slots: both create what
	// is missing.
	Open          func(ctx context.Context, slot int) (slots.Remote, error)
	OpenDirectory func(ctx context.Context, slots int) (slots.Assignments, error)
	// Bus carries the heartbeats of the processes.
	Bus slots.Bus
	// ConfigDelay is how long this process may lack a live config that another one has, before it hands over
	// its slots; 30 s if it is zero.
	ConfigDelay time.Duration
	// Watch sends the live configs of all namespaces to a sink until ctx is done; nil with Control.
	Watch func(ctx context.Context, to liveconfig.Sink) error
	// Control, in a log with one slot, gives the Dispatcher of the owner its live configs until ctx is done; nil with
	// Watch.
	Control func(ctx context.Context, d *dispatcher.Dispatcher) error
}

// QueueFolder returns the folder of a slot's files in the data directory of a process.
func QueueFolder(dataDir string, slot int) string {
	return filepath.Join(slotFolder(dataDir, slot), backup.QueueFolder)
}

// slotFolder is the data directory of a slot.
func slotFolder(dataDir string, slot int) string {
	return filepath.Join(dataDir, "slots", strconv.Itoa(slot))
}

const (
	// handOverTimeout bounds the wait for calls and deliveries in flight at the end of an ownership, which ends both at
	// the same time. Receivers that answer later may get a message twice.
	handOverTimeout = 2 * time.Second
	// settleTime is the age of a process at which it knows the other processes.
	settleTime = 2 * slots.HeartbeatInterval
	// leaveTimeout is the shortest bound of the hand-over of all slots at the end of the process; see leaveLimit.
	leaveTimeout = 10 * time.Second
	// copyLimit is the time without another complete copy after which a process that starts is ready without the
	// rest. A slot of 4 GiB, the default, restores in it with 15 MB/s, a quarter of what was measured.
	copyLimit = 5 * time.Minute
	// unwantedTime is the time after which a copy that is not wanted is removed: by then all processes know the same
	// slots and copies, so that two of them do not remove their copies for each other's.
	unwantedTime = 5 * time.Second
	// directoryRetry is the wait after the directory could not be opened.
	directoryRetry = 2 * time.Second
	// deafAfter is the time without a heartbeat of its own after which a process does not know the others.
	deafAfter = 3 * slots.HeartbeatInterval
	// cutOffAfter is the time without a heartbeat of its own after which a process is not ready. To connect to another
	// server takes about 3 s, and an election of a leader a few.
	cutOffAfter = 10 * slots.HeartbeatInterval
)

// Run runs one Dispatcher for each slot of a replicated log that this process owns, and keeps copies of slots of other
// processes, until ctx is done. slots.Place selects the slots. Requests for the namespaces of other slots are forwarded
// to the owners.
//
// Run requires o.Listeners, and closes them at its end. An error of the log does not end Run: it is logged, is the
// reason of /readyz, and the attempt is repeated. An error is returned when a listener fails, when the directory of the
// namespaces was replaced, or when the data directory has a store of its own.
func Run(ctx context.Context, o Options, s Slots) error {
	defer o.Listeners.Close()
	if err := checkNoStore(o.DataDir); err != nil {
		return err
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	address := o.Listeners.peers.Addr().String()
	o.Pod = cmp.Or(o.Pod, address)
	var err error
	if o.identity, err = peer.NewIdentity(o.Pod, address); err != nil {
		return err
	}
	return newHost(o, s).run(ctx)
}

// checkNoStore returns an error if a data directory has a store outside of the folders of slots, whose messages would
// not be delivered.
func checkNoStore(dataDir string) error {
	store := filepath.Join(dataDir, backup.QueueFolder)
	if _, err := os.Stat(store); err == nil {
		return fmt.Errorf("%s is the store of a process without a replicated log, or of an earlier release with one slot: move it with posthorn replication adopt --data %s, and use an empty --data; remove it if that was done, or if the slot has another owner", store, dataDir)
	}
	return nil
}

// host is a process with its slots.
type host struct {
	o          Options
	s          Slots
	log        *slog.Logger
	name       string
	started    time.Time
	namespaces *namespaces
	members    *slots.Members
	slots      []*replica
	lacking    *lacking
	// connections are those to the other processes.
	connections peer.Connections
	// wake has a value when a heartbeat is due before its time.
	wake chan struct{}
	// fault is why the directory is not read.
	fault atomic.Pointer[string]
	// oldConfig is a problem of compareConfigs; empty for none.
	oldConfig atomic.Pointer[string]
	// heardAt is when the process received a heartbeat of its own, and namesakeAt when it received one of
	// the first process with its name, in nanoseconds since started; 0 before.
	heardAt, namesakeAt atomic.Int64
	// steadyAt is when the process last received no heartbeat of its own, in nanoseconds since started.
	steadyAt atomic.Int64
	stopping atomic.Bool
	start    startGate
	running  sync.WaitGroup
	// memory is the plan of the process; shared and uploads bound what all slots use together.
	memory  memory.Plan
	shared  *pebblestore.Shared
	uploads *rate.Limiter
	quiet   idleTracker
}

func newHost(o Options, s Slots) *host {
	members := slots.NewMembers(o.LeaseClock)
	o.clock = newClockCheck(o.WallClock, o.LeaseClock, members)
	h := &host{
		o: o, s: s, log: o.Logger, name: o.Pod, started: time.Now(),
		namespaces: newNamespaces(o.Logger), members: members, lacking: newLacking(o, members), wake: make(chan struct{}, 1),
	}
	if s.Watch == nil {
		h.namespaces.Synced() // Control has the live configs.
	}
	var err error
	if h.memory, err = memory.PlanFor(o.Memory).FitFiles(memory.OpenFiles()); err != nil {
		h.log.Warn("too few open files", "error", err)
	}
	h.connections.Memory, h.connections.Dial = &limits.Pool{Max: h.memory.Requests}, o.Dial
	h.shared, h.uploads = pebblestore.NewShared(cmp.Or(o.Queue.CacheBytes, h.memory.Cache)), slots.NewUploadLimiter()
	returnMemory := func(bool) {}
	if o.Memory != 0 {
		h.memory.Bound()
		returnMemory = memory.OnQuiet()
	}
	h.quiet.report = func(quiet bool) {
		if quiet {
			h.shared.Release()
		}
		returnMemory(quiet)
	}
	connecting := connecting
	h.fault.Store(&connecting)
	h.oldConfig.Store(new(string))
	h.start.open.Store(s.Control != nil) // The copy of its slot decides.
	for slot := range s.Number {
		h.slots = append(h.slots, newReplica(h, slot))
	}
	return h
}

func (h *host) run(ctx context.Context) error {
	h.log.Info("listening", "listen", h.o.Listeners.Addr().String(), "admin", h.o.Listeners.AdminAddr().String(), "slots", h.s.Number)
	// The process serves, and reports itself as leaving, while it hands over its slots.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group, serving := errgroup.WithContext(serving)
	group.Go(func() error { return h.serve(serving) })
	if h.s.Watch != nil {
		group.Go(func() error { return h.s.Watch(serving, h.namespaces) })
	}
	if h.lacking != nil {
		group.Go(func() error {
			h.lacking.run(serving)
			return nil
		})
	}
	group.Go(func() error { return h.followDirectory(serving) })
	group.Go(func() error { return h.place(serving) })
	group.Go(func() error {
		select {
		case <-ctx.Done():
			h.leave(serving)
		case <-serving.Done():
		}
		stop()
		return nil
	})
	err := group.Wait()
	h.running.Wait()
	h.shared.Close()
	if err == nil || errors.Is(err, context.Canceled) {
		h.log.Info("stopped; pending messages are stored in the log")
		return nil
	}
	return err
}

// leave hands over the slots until there are none, or no other process takes them.
func (h *host) leave(ctx context.Context) {
	begin := time.Now()
	h.stopping.Store(true)
	h.signal()
	h.log.Info("stopping: handing over the slots")
	pause := func(d time.Duration) bool {
		select {
		case <-time.After(d):
			return true
		case <-ctx.Done():
			return false
		}
	}
	// New calls are forwarded until the Service has removed the process.
	for time.Since(begin) < h.leaveLimit() && len(h.owned()) > 0 && h.hasSuccessor() {
		if !pause(50 * time.Millisecond) {
			return
		}
	}
	pause(h.o.ShutdownDelay - time.Since(begin))
	for _, s := range h.slots {
		s.stop()
	}
	h.running.Wait()
}

// leaveLimit bounds the hand-over of all slots at the end of the process, because a successor may have to restore
// them first. The rest is released. The chart gives the pod 10 s more than this time, for their release.
func (h *host) leaveLimit() time.Duration {
	return max(leaveTimeout, h.o.ShutdownDelay+2*cmp.Or(h.o.DrainTimeout, dispatcher.DefaultDrain))
}

// hasSuccessor reports whether another process can take slots.
func (h *host) hasSuccessor() bool {
	members := h.members.List()
	return slices.ContainsFunc(members, func(m slots.Member) bool {
		return m.Name != h.name && !m.Leaving && m.HasRightClock(members)
	})
}

// followDirectory reads the slots of the namespaces.
func (h *host) followDirectory(ctx context.Context) error {
	for ctx.Err() == nil {
		directory, err := h.openDirectory(ctx)
		if err != nil {
			text := err.Error()
			h.fault.Store(&text)
			h.log.Warn("the directory of the slots cannot be read; trying again", "error", err, "after", directoryRetry.String())
			select {
			case <-time.After(directoryRetry):
			case <-ctx.Done():
			}
			continue
		}
		if n := directory.Slots(); n > len(h.slots) {
			return fmt.Errorf("dispatcher: namespaces have slots up to %d, and --replication-slots is %d: set it to %d or more", n-1, len(h.slots), n)
		}
		h.fault.Store(nil)
		h.signal()
		group, following := errgroup.WithContext(ctx)
		connected := time.Now()
		isAssigner := func() bool { return time.Since(connected) >= settleTime && h.isFirst() }
		group.Go(func() error {
			h.namespaces.assign(following, directory, h.s.Pins, isAssigner, h.uncompared)
			return nil
		})
		group.Go(func() error { return directory.Run(following) })
		return group.Wait()
	}
	return nil
}

func (h *host) openDirectory(ctx context.Context) (*slots.Directory, error) {
	stream, err := h.s.OpenDirectory(ctx, h.s.Number)
	if err != nil {
		return nil, err
	}
	return slots.OpenDirectory(ctx, stream, h.s.Number, h.log)
}

// isFirst reports whether this process is the first one by name. It gives slots to new namespaces.
func (h *host) isFirst() bool {
	if !h.isRecent(&h.heardAt) {
		return false
	}
	members := h.members.List()
	i := slices.IndexFunc(members, func(m slots.Member) bool { return !m.Leaving && !m.OldConfig })
	return i >= 0 && members[i].Name == h.name
}

// signal makes the next heartbeat due.
func (h *host) signal() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// place exchanges heartbeats, and makes the moves of this process, until ctx is done.
func (h *host) place(ctx context.Context) error {
	stop, err := h.s.Bus.Subscribe(h.hear)
	if err != nil {
		return err
	}
	defer stop()
	h.followLocalCopies(ctx)
	tick := time.NewTicker(slots.HeartbeatInterval)
	defer tick.Stop()
	for {
		h.o.clock.log(h.log)
		h.compareConfigs()
		h.beat()
		h.announceOwners()
		switch {
		case h.isRecent(&h.namesakeAt):
			h.park()
		// The directory exists before the first slot, so that a log of one slot is recognized.
		case h.age() >= settleTime && h.fault.Load() == nil && h.isRecent(&h.heardAt):
			h.move(ctx)
		}
		h.checkStart()
		select {
		case <-tick.C:
		case <-h.wake:
		case <-ctx.Done():
			return nil
		}
	}
}

// compareConfigs compares the live configs with the other processes' ones.
func (h *host) compareConfigs() {
	problem := h.namespaces.compareConfigs(h.members.Configs(h.name), cmp.Or(h.s.ConfigDelay, configDelay))
	switch before := *h.oldConfig.Swap(&problem); {
	case before == "" && problem != "":
		h.log.Error("the live configs are old", "problem", problem)
	case before != "" && problem == "":
		h.log.Info("the live configs are up to date again")
	}
}

// beat sends a heartbeat, unless the process with the name of this one sends them. Before the directory was
// opened, the log may belong to another installation, whose processes must not count this one.
func (h *host) beat() {
	if h.fault.Load() != nil || h.isRecent(&h.namesakeAt) {
		return
	}
	if !h.isRecent(&h.heardAt) {
		h.steadyAt.Store(int64(time.Since(h.started)))
	}
	own := h.heartbeat()
	h.members.Hear(own)
	text, _ := json.Marshal(own) // Its fields always marshal.
	if err := h.s.Bus.Publish(text); err != nil {
		h.log.Debug("sending a heartbeat failed", "error", err)
	}
}

// park releases the slots of a process with the name of another one, and takes none.
func (h *host) park() {
	for _, s := range h.slots {
		s.takes.Store(false)
		s.handOver()
	}
}

// namesake is why a process with the name of another one is not ready.
func (h *host) namesake() string {
	return fmt.Sprintf("another process that uses this log has the name %s, and started before this one, which takes no slots: if both belong to one installation, set another --pod-name in one of them; if they belong to two, set another --replication-name (replication.jetStream.name in the chart) in one of them", h.name)
}

// hear takes a heartbeat from the bus.
func (h *host) hear(text []byte) {
	var heartbeat slots.Heartbeat
	if err := json.Unmarshal(text, &heartbeat); err != nil {
		h.log.Warn("the heartbeat of a process cannot be read", "error", err)
		return
	}
	now := max(int64(time.Since(h.started)), 1)
	switch {
	case heartbeat.Member != h.name:
		if h.members.Hear(heartbeat) {
			h.signal()
		}
	case bytes.Equal(heartbeat.Announcement, h.o.identity.Announce()):
		if h.heardAt.Swap(now) == 0 {
			h.signal()
		}
	case !heartbeat.Precedes(slots.Heartbeat{Milliseconds: h.age().Milliseconds(), Announcement: h.o.identity.Announce()}):
		// It is the second, and takes no slots.
	default:
		if !h.isRecent(&h.namesakeAt) {
			h.log.Error("another process has the name of this one", "problem", h.namesake())
		}
		h.namesakeAt.Store(now)
		h.members.Hear(heartbeat)
	}
}

// age is the time since the process began to receive its heartbeats without a gap. Like a new process, one that was
// stopped, or lost its connection, gets no slots at first.
func (h *host) age() time.Duration { return time.Since(h.started) - time.Duration(h.steadyAt.Load()) }

// isRecent reports whether a time since the start of the process is at most deafAfter ago; 0 is none.
func (h *host) isRecent(at *atomic.Int64) bool {
	n := at.Load()
	return n != 0 && time.Since(h.started)-time.Duration(n) <= deafAfter
}

// heartbeat describes this process. Without usable live configs it would accept no calls of its slots, so
// it takes none.
func (h *host) heartbeat() slots.Heartbeat {
	skew, clock := h.o.clock.milliseconds()
	owned, silent := h.claimed()
	own := slots.Heartbeat{
		Member: h.name, Milliseconds: h.age().Milliseconds(), Leaving: h.stopping.Load() || !h.namespaces.isSynced() || !h.namespaces.isUsable(),
		Announcement: h.o.identity.Announce(),
		Starting:     !h.start.open.Load(), ClockSkew: skew, Clock: clock, Owned: owned, Silent: silent,
		OldConfig: *h.oldConfig.Load() != "", Configs: h.namespaces.newestConfigs(),
	}
	for _, s := range h.slots {
		if b := s.standby.Load(); b != nil && s.ownership.Load() == nil && !s.isRemoving() {
			own.Copies = append(own.Copies, b.copied())
			own.OldConfig = own.OldConfig || b.following.Load() && !h.lacking.isComplete()
		}
	}
	return own
}

// owned returns the slots that this process owns.
func (h *host) owned() []slots.OwnedSlot {
	owned, _ := h.claimed()
	return owned
}

// claimed returns the slots that this process owns, and those whose log is silent.
func (h *host) claimed() (owned, silent []slots.OwnedSlot) {
	for _, s := range h.slots {
		t := s.ownership.Load()
		switch {
		case t == nil, t.Ended():
		case !t.writer.MaySend():
			silent = append(silent, slots.OwnedSlot{Slot: s.slot, Epoch: t.writer.Epoch()})
		default:
			o := slots.OwnedSlot{Slot: s.slot, Epoch: t.writer.Epoch(), Unlisted: s.hasUnlistedKeys()}
			if c := s.compared.Load(); c != nil {
				o.Directory, o.Assignments = c.directory, c.assignments
			}
			owned = append(owned, o)
		}
	}
	return owned, silent
}

// announceOwners makes the forwarders and the front use the present owners.
func (h *host) announceOwners() {
	for _, s := range h.slots {
		owner, owned, ok := h.members.Owner(s.slot)
		s.listed.Store(ok && !owned.Unlisted)
		if !ok || owner.Member == h.name {
			s.forwarder.SetOwner(nil)
		} else {
			s.forwarder.SetOwner(owner.Announcement)
		}
	}
}

// followLocalCopies starts to follow the slots with a copy in the data directory.
func (h *host) followLocalCopies(ctx context.Context) {
	for _, s := range h.slots {
		if _, err := s.o.fs().Stat(s.o.DataDir); err == nil {
			s.start(ctx)
		}
	}
}

// move makes the moves of this process.
func (h *host) move(ctx context.Context) {
	members, placed := h.members.View(len(h.slots))
	take, unwanted := map[int]bool{}, map[int]bool{}
	for _, m := range slots.Place(members, placed, h.s.Standbys) {
		if m.Member != h.name {
			continue
		}
		s := h.slots[m.Slot]
		switch m.Action {
		case slots.Take:
			take[m.Slot] = true
			s.start(ctx)
		case slots.StartFollowing:
			s.start(ctx)
		case slots.StopFollowing:
			unwanted[m.Slot] = true
		case slots.HandOver:
			s.handOver()
		}
	}
	for _, s := range h.slots {
		s.takes.Store(take[s.slot])
		if s.unwanted.lasts(unwanted[s.slot], time.Now(), unwantedTime) {
			s.remove()
		}
	}
}

// wantedStandbys is the least number of copies that each slot should have beside its owner's store.
func (h *host) wantedStandbys() int {
	if h.s.Control != nil { // Each process keeps one.
		return min(h.s.Standbys, 1)
	}
	return h.s.Standbys
}
