package simulation

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// replicatedLog is what the servers of a replicated log have.
type replicatedLog struct {
	bus
	stream             *slotstest.Stream
	snapshots, members *slotstest.ObjectStore
	directory          *slotstest.Assignments
	// flaky is true while requests are lost. The world's mu guards it.
	flaky bool
}

func newReplicatedLog() *replicatedLog {
	return &replicatedLog{stream: slotstest.NewStream(64 << 20), snapshots: slotstest.NewObjectStore(0), members: slotstest.NewObjectStore(0),
		directory: slotstest.NewAssignments(slotstest.Faults{}, nil)}
}

// bus carries heartbeats.
type bus struct {
	mu  sync.Mutex
	fns []func([]byte)
}

// access is the access of a process to the servers. Nothing passes after its loss.
type access struct {
	*life
	to           *replicatedLog
	sound, flaky slots.Log
}

// lossy are the faults of the log while requests are lost.
var lossy = slotstest.Faults{LostRequest: 0.2, LostAnswer: 0.2, LateRequest: 0.1, StaleRead: 0.2}

func newAccess(l *life, to *replicatedLog) *access {
	l.pod.w.mu.Lock()
	defer l.pod.w.mu.Unlock()
	random := rand.New(rand.NewPCG(l.pod.w.dice.Uint64(), 0))
	return &access{life: l, to: to, sound: slotstest.NewLog(to.stream), flaky: slotstest.NewFaultyLog(to.stream, lossy, random)}
}

// log is the stream with its present faults.
func (a *access) log() slots.Log {
	a.pod.w.mu.Lock()
	defer a.pod.w.mu.Unlock()
	if a.to.flaky {
		return a.flaky
	}
	return a.sound
}

var (
	errLost = errors.New("the process is lost")
	errCut  = errors.New("no server answers")
)

// requestTimeout is the time after which a request without another limit has no response.
const requestTimeout = 5 * time.Second

// pass returns an error if a request does not pass: after its timeout if no server is reached.
func (a *access) pass(ctx context.Context) error {
	err := a.reach()
	if errors.Is(err, errCut) {
		select {
		case <-ctx.Done():
		case <-a.lost:
		case <-time.After(requestTimeout):
		}
	}
	return cmp.Or(err, ctx.Err())
}

// open checks the identity of the installation, as the client of the log does.
func (a *access) open(ctx context.Context) error {
	return cmp.Or(a.pass(ctx), slots.ValidateInstallation(a.pod.installation), slots.CheckInstallation(own, a.pod.installation))
}

// reach returns an error if the process is lost, or reaches no server.
func (a *access) reach() error {
	a.pod.w.mu.Lock()
	defer a.pod.w.mu.Unlock()
	switch {
	case a.dead:
		return errLost
	case a.pod.cut:
		return errCut
	}
	return nil
}

// remote is the slot, as the process reaches it.
func (a *access) remote() slots.Remote {
	return slots.Remote{Log: a, Snapshots: &objects{a.to.snapshots, a}, Members: &objects{a.to.members, a}, Clocks: []slots.ServerTime{
		func(ctx context.Context) (time.Time, error) { return time.Now(), a.pass(ctx) },
	}}
}

// Publish implements slots.Log. A lost process does not publish again: it finds that its session has ended.
func (a *access) Publish(ctx context.Context, expected uint64, id string, record []byte) (uint64, error) {
	if err := a.pass(ctx); errors.Is(err, errLost) {
		return 0, slots.ErrWrongSequence
	} else if err != nil {
		return 0, err
	}
	return a.log().Publish(ctx, expected, id, record)
}

// Get implements slots.Log.
func (a *access) Get(ctx context.Context, from uint64) (slots.Entry, error) {
	if err := a.pass(ctx); errors.Is(err, errLost) {
		return slots.Entry{Sequence: from}, nil
	} else if err != nil {
		return slots.Entry{}, err
	}
	return a.log().Get(ctx, from)
}

// Tail implements slots.Log.
func (a *access) Tail(ctx context.Context, from uint64, fn func(slots.Entry) error) error {
	return a.sound.Tail(ctx, from, func(e slots.Entry) error {
		if err := a.pass(ctx); err != nil {
			return err
		}
		return fn(e)
	})
}

// State implements slots.Log.
func (a *access) State(ctx context.Context) (slots.State, error) {
	if err := a.pass(ctx); err != nil {
		return slots.State{}, err
	}
	return a.log().State(ctx)
}

// Trim implements slots.Log.
func (a *access) Trim(ctx context.Context, before uint64) error {
	if err := a.pass(ctx); err != nil {
		return err
	}
	return a.log().Trim(ctx, before)
}

// heartbeats are the Bus of a process.
type heartbeats struct{ *access }

// Publish implements slots.Bus.
func (h heartbeats) Publish(text []byte) error {
	if err := h.reach(); err != nil {
		return err
	}
	h.to.mu.Lock()
	fns := h.to.fns
	h.to.mu.Unlock()
	for _, fn := range fns {
		fn(text)
	}
	return nil
}

// Subscribe implements slots.Bus.
func (h heartbeats) Subscribe(fn func([]byte)) (func(), error) {
	h.to.mu.Lock()
	defer h.to.mu.Unlock()
	h.to.fns = append(h.to.fns, func(text []byte) {
		if h.reach() == nil {
			fn(text)
		}
	})
	return func() {}, nil
}

// objects are an object store, as a process reaches it.
type objects struct {
	*slotstest.ObjectStore
	access *access
}

// Put implements slots.Objects.
func (o *objects) Put(ctx context.Context, name string, data io.Reader) error {
	if err := o.access.pass(ctx); err != nil {
		return err
	}
	return o.ObjectStore.Put(ctx, name, data)
}

// Get implements slots.Objects.
func (o *objects) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	if err := o.access.pass(ctx); err != nil {
		return nil, err
	}
	return o.ObjectStore.Get(ctx, name)
}

// List implements slots.Objects.
func (o *objects) List(ctx context.Context) ([]string, error) {
	if err := o.access.pass(ctx); err != nil {
		return nil, err
	}
	return o.ObjectStore.List(ctx)
}

// Missing implements slots.Objects.
func (o *objects) Missing(ctx context.Context, names []string) ([]string, error) {
	if err := o.access.pass(ctx); err != nil {
		return nil, err
	}
	return o.ObjectStore.Missing(ctx, names)
}

// Delete implements slots.Objects.
func (o *objects) Delete(ctx context.Context, name string) error {
	if err := o.access.pass(ctx); err != nil {
		return err
	}
	return o.ObjectStore.Delete(ctx, name)
}
