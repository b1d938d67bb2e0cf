package slots_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
	"github.com/posthorn/posthorn/dispatcher/replicated/slots/slotstest"
)

// TestModel runs pods that own a slot in turn, on a stream with all faults of slotstest, in virtual
// time. In place of a store they have a list of batches. Pods are paused, release the slot, and are
// killed between the apply and the publishing of a batch, with a random part of their files. Owners
// lose their connection to the stream for up to 20 s. The rates of the clocks differ by up to 10 %. In the seeds
// without leases, pods claim the slot from each other at random times, so that only the stream is the fence. Afterwards:
//
//   - every acknowledged batch is in the log, at its number, and no batch is in it twice,
//   - the log has no gap, and after a claim no record of an older session,
//   - the log can be restored from each of the last two snapshots and the records behind it,
//   - every surviving copy is a prefix of the log, or is recognized as a foreign one,
//   - with leases, no session had a lease that had not ended while another one was allowed to send,
//     and after a claim an older session sent at most the requests that were in flight.
//
// POSTHORN_MODEL_SEEDS sets the number of seeds, POSTHORN_MODEL_SEED the first one.
func TestModel(t *testing.T) {
	first, seeds := env("POSTHORN_MODEL_SEED", 1), env("POSTHORN_MODEL_SEEDS", trials(100))
	var all modelTally
	for seed := first; seed < first+seeds; seed++ {
		t.Run(strconv.Itoa(seed), func(t *testing.T) {
			for _, failure := range runModel(t, seed, modelVariant{leases: seed%2 == 0}, &all) {
				t.Error(failure)
			}
		})
	}
	t.Logf("%d claims, %d sessions ended by another claim, %d released, %d kills, %d foreign copies, %d batches acknowledged, %d not, %d requests, %d of them after a claim, %d snapshots", all.claims, all.fenced, all.released, all.kills, all.foreign, all.acknowledged, all.unacknowledged, all.sent, all.late, all.snapshots)
	for name, n := range map[string]int{
		"sessions ended by another claim": all.fenced, "released sessions": all.released, "kills": all.kills, "foreign copies": all.foreign,
		"batches not acknowledged": all.unacknowledged, "requests": all.sent, "requests after a claim": all.late, "snapshots": all.snapshots,
	} {
		if n == 0 && seeds >= 100 {
			t.Errorf("%s: got none, want some: the model does not reach this case", name)
		}
	}
}

// TestModelFindsFaults runs the model with known faults. Each fault must break the promises in a quarter
// of the seeds or more; otherwise the model proves nothing about them.
func TestModelFindsFaults(t *testing.T) {
	if testing.Short() {
		t.Skip("the race detector finds nothing more here than in TestModel")
	}
	const seeds = 30
	for name, v := range map[string]modelVariant{
		"claim 4 s after the suspect": {leases: true, claimAfter: 4 * time.Second},
		"a clock at 40 % of its rate": {leases: true, clockError: 0.6},
		"records without the fence":   {unfenced: true},
		"manifest before its files":   {leases: true, snapshotFault: manifestFirst},
		"trim before the manifest":    {leases: true, snapshotFault: trimFirst},
		"position read too late":      {leases: true, snapshotFault: positionLater},
	} {
		t.Run(name, func(t *testing.T) {
			found := 0
			v.lasts = 3 * modelFor
			for seed := 1; seed <= seeds; seed++ {
				if len(runModel(t, seed, v, &modelTally{})) > 0 {
					found++
				}
			}
			t.Logf("the model fails in %d of %d seeds", found, seeds)
			if found < seeds/4 {
				t.Errorf("failing seeds: got %d of %d, want a quarter or more", found, seeds)
			}
		})
	}
}

// trials is a number of random trials, of which -short runs a quarter.
func trials(n int) int {
	if testing.Short() {
		return n / 4
	}
	return n
}

func env(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}

// modelTally has the sums of all seeds.
type modelTally struct {
	claims, fenced, released, kills, foreign, acknowledged, unacknowledged, sent, late, snapshots int
}

// modelVariant chooses the rules that the pods keep.
type modelVariant struct {
	// leases: a pod claims the slot when it has no owner, and not at any time.
	leases bool
	// claimAfter replaces the time between suspect and claim.
	claimAfter time.Duration
	// clockError replaces the largest difference between the rates of two clocks, 0.1.
	clockError float64
	// unfenced: a record that does not follow the expected one is appended nevertheless.
	unfenced bool
	// snapshotFault is the fault of the snapshots; 0 for none.
	snapshotFault snapshotFault
	// lasts replaces modelFor.
	lasts time.Duration
}

type model struct {
	modelVariant
	stream  *slotstest.Stream
	objects *slotstest.ObjectStore
	faults  slotstest.Faults
	tally   *modelTally

	mu  sync.Mutex
	rng *rand.Rand
	// failures are the broken promises.
	failures []string
	// acknowledged are the numbers of acknowledged batches by their content.
	acknowledged map[string]uint64
	batches      int
	// sessions are all writers. owner is the writer of the last claim.
	sessions []*slots.Writer
	owner    *slots.Writer
	// survivors are the files that the pods have at the end.
	survivors []*copied
}

// modelFor is the time for which pods come and go.
const modelFor = 5 * time.Minute

// runModel runs one seed in virtual time, and returns the broken promises.
func runModel(t *testing.T, seed int, v modelVariant, tally *modelTally) (failures []string) {
	synctest.Test(t, func(t *testing.T) {
		m := newModel(rand.New(rand.NewPCG(uint64(seed), 0)), v, tally)
		m.run(t.Context())
		m.check(t.Context())
		failures = m.failures
	})
	return failures
}

func newModel(rng *rand.Rand, v modelVariant, tally *modelTally) *model {
	m := &model{modelVariant: v, stream: slotstest.NewStream(0), objects: slotstest.NewObjectStore(0), rng: rng, tally: tally,
		acknowledged: map[string]uint64{}}
	if m.oneOf(3) {
		m.stream = slotstest.NewStream(int64(20_000 + rng.IntN(100_000)))
	}
	m.faults = slotstest.Faults{
		LostRequest: rng.Float64() / 5, LostAnswer: rng.Float64() / 5, LateRequest: rng.Float64() / 10,
		StaleRead: rng.Float64() / 3, Pause: rng.Float64() / 20, ForgottenIDs: rng.Float64() / 20,
	}
	return m
}

// run lets pods own the slot in turn.
func (m *model) run(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(m.lasts, modelFor))
	defer cancel()
	var pods sync.WaitGroup
	for pod := range 1 + m.upTo(2) {
		pods.Go(func() { m.runPod(ctx, pod) })
	}
	if m.leases {
		pods.Go(func() { m.elect(ctx) })
	}
	pods.Wait()
	m.stream.SetLeader(true)
}

// fail takes note of a broken promise. The caller does not hold mu.
func (m *model) fail(format string, args ...any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failures = append(m.failures, fmt.Sprintf(format, args...))
}

// elect lets the stream have no leader for up to nine seconds, again and again.
func (m *model) elect(ctx context.Context) {
	for ctx.Err() == nil {
		sleep(ctx, m.upTo(90_000))
		m.stream.SetLeader(false)
		sleep(ctx, m.upTo(9_000))
		m.stream.SetLeader(true)
	}
}

// sleep waits for a number of milliseconds, or until ctx ends.
func sleep(ctx context.Context, milliseconds int) {
	select {
	case <-time.After(time.Duration(milliseconds) * time.Millisecond):
	case <-ctx.Done():
	}
}

func (m *model) oneOf(n int) bool { return m.upTo(n) == 1 }

// upTo returns a random number from 1 to n.
func (m *model) upTo(n int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return 1 + m.rng.IntN(n)
}

// modelLog is the connection of a pod to the stream. While it is cut, no request has an effect or an
// answer.
type modelLog struct {
	*slotstest.Log
	unfenced bool
	cut      atomic.Bool
}

func (m *model) newLog() *modelLog {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &modelLog{Log: slotstest.NewFaultyLog(m.stream, m.faults, rand.New(rand.NewPCG(m.rng.Uint64(), 0))), unfenced: m.unfenced}
}

func (l *modelLog) Publish(ctx context.Context, expected uint64, id string, record []byte) (uint64, error) {
	if l.cut.Load() {
		sleep(ctx, 1000)
		return 0, slotstest.ErrLost
	}
	sequence, err := l.Log.Publish(ctx, expected, id, record)
	if l.unfenced && errors.Is(err, slots.ErrWrongSequence) {
		if s, stateErr := l.State(ctx); stateErr == nil {
			if _, err := l.Log.Publish(ctx, s.Last, id, record); err == nil {
				return expected + 1, nil
			}
		}
	}
	return sequence, err
}

func (l *modelLog) Trim(ctx context.Context, before uint64) error {
	if l.cut.Load() {
		return slotstest.ErrLost
	}
	return l.Log.Trim(ctx, before)
}

func (l *modelLog) Get(ctx context.Context, from uint64) (slots.Entry, error) {
	if l.cut.Load() {
		sleep(ctx, 1000)
		return slots.Entry{}, slotstest.ErrLost
	}
	return l.Log.Get(ctx, from)
}

// cutSometimes cuts the connection of an owner for 10 to 20 s, again and again.
func (m *model) cutSometimes(ctx context.Context, log *modelLog) {
	for ctx.Err() == nil {
		sleep(ctx, m.upTo(10_000))
		log.cut.Store(true)
		sleep(ctx, 10_000+m.upTo(10_000))
		log.cut.Store(false)
	}
}

// runPod lets a pod claim the slot and lose it, until ctx ends. Its files survive, or a part of them.
func (m *model) runPod(ctx context.Context, pod int) {
	files := &copied{}
	o := slots.Options{Logger: slog.New(slog.DiscardHandler), Now: m.newClock(pod)}
	o.SetClaimAfter(m.claimAfter)
	newSession, absence := slots.Claim, 20_000
	if m.leases { // Soon again, because a claim needs a pod that follows.
		newSession, absence = slots.Follow, 5_000
	}
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.survivors = append(m.survivors, files)
	}()
	for ctx.Err() == nil {
		sleep(ctx, m.upTo(absence))
		log := m.newLog()
		w, err := newSession(ctx, log, files, o)
		switch {
		case errors.Is(err, slots.ErrForeignCopy):
			m.count(&m.tally.foreign)
			restored, err := m.recover(ctx, log, &modelObjects{m, ctx, log}, map[uint64]bool{})
			if restored != nil {
				files = restored
			} else if ctx.Err() == nil && !isTransient(err) {
				m.fail("pod %d: restore a snapshot: got error %v, want none", pod, err)
			}
			continue
		case err != nil && ctx.Err() == nil && !isTransient(err):
			m.fail("pod %d: claim: got error %v, want none", pod, err)
			return
		case err != nil:
			continue
		}
		m.count(&m.tally.claims)
		o.Exited = pebblestore.Session{}
		m.own(ctx, log, w, files)
		files.crash(m.upTo(len(files.batches)+1) - 1)
		if m.oneOf(3) {
			o.Exited = w.Session() // The pod knows its former session by its files.
		}
	}
}

// newClock returns the clock of a pod, which is up to 10 % slow: the first pod's is the slowest
// one, and the second pod's is exact. No clock is fast, because timers run at the rate of the
// virtual time: a timer that fires early for a slow clock is set again.
func (m *model) newClock(pod int) func() time.Time {
	delay := [...]float64{1, 0, float64(m.upTo(1000)) / 1000}[pod]
	began, rate := time.Now(), 1-delay*cmp.Or(m.clockError, 0.1)
	return func() time.Time { return began.Add(time.Duration(float64(time.Since(began)) * rate)) }
}

// isTransient reports whether an error ends with the faults of the stream. Stale reads may not see
// the first records, or the newest ones for several seconds.
func isTransient(err error) bool {
	return errors.Is(err, slotstest.ErrLost) || errors.Is(err, slots.ErrRecordsLost) || errors.Is(err, slotstest.ErrNoLeader) ||
		errors.Is(err, slots.ErrEmptied) || errors.Is(err, slots.ErrStaleRead)
}

func (m *model) count(n *int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	*n++
}

// senders is the number of requests that a session has in flight.
const senders = 3

// own appends batches and sends requests until the session ends, the pod is killed, or ctx ends.
func (m *model) own(ctx context.Context, log *modelLog, w *slots.Writer, files *copied) {
	m.mu.Lock()
	m.sessions = append(m.sessions, w)
	if m.owner == nil || w.Epoch() > m.owner.Epoch() { // The pod of an older claim can be slower.
		m.owner = w
	}
	m.mu.Unlock()
	var workers sync.WaitGroup
	var order sync.Mutex // Of the files and the log; a store's commitLog.
	life := time.After(time.Duration(m.upTo(40)) * time.Second)
	living, cancel := context.WithCancel(ctx)
	for range m.upTo(4) {
		workers.Go(func() {
			for living.Err() == nil && w.Err() == nil {
				m.appendBatch(w, files, &order)
				sleep(living, m.upTo(2000))
			}
		})
	}
	if m.oneOf(2) {
		workers.Go(func() { m.takeSnapshots(living, log, w, files) })
	}
	late := 0
	if m.leases {
		m.checkLease(w)
		for range senders {
			workers.Go(func() { m.send(living, w, &late) })
		}
		if m.oneOf(2) {
			workers.Go(func() { m.cutSometimes(living, log) })
		}
	}
	release := false
	select {
	case <-w.Done():
		m.count(&m.tally.fenced)
	case <-life:
		if release = m.leases && m.oneOf(3); !release {
			m.count(&m.tally.kills)
		}
	case <-ctx.Done():
	}
	cancel()
	if release { // Batches of a full stream do not become durable, so the release has a bound.
		releasing, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if w.Release(releasing) == nil {
			m.count(&m.tally.released)
		}
	}
	w.Close() // The process ends: nothing is published any more.
	workers.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tally.late += late
	if late > senders {
		m.failures = append(m.failures, fmt.Sprintf("requests of a session after the claim of another one: got %d, want at most the %d in flight", late, senders))
	}
}

// send sends requests. The process may be stopped between the check of the lease and a request.
func (m *model) send(ctx context.Context, w *slots.Writer, late *int) {
	for ctx.Err() == nil && w.Err() == nil {
		if m.checkLease(w) {
			if m.oneOf(50) {
				sleep(ctx, m.upTo(30_000))
			}
			m.mu.Lock()
			m.tally.sent++
			if m.owner != w {
				*late++
			}
			m.mu.Unlock()
		}
		sleep(ctx, m.upTo(500))
	}
}

// checkLease reports whether a session may send. No other session may have a lease at the same time,
// also not one that may not send because a record waits: a process that is stopped has none.
func (m *model) checkLease(w *slots.Writer) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !w.MaySend() {
		return false
	}
	for _, other := range m.sessions {
		if other != w && other.HasLease() {
			m.failures = append(m.failures, fmt.Sprintf("session %x may send while session %x has a lease, want one of them", w.Session(), other.Session()))
		}
	}
	return true
}

// appendBatch applies a batch to the files, appends it to the log, and waits for it.
func (m *model) appendBatch(w *slots.Writer, files *copied, order *sync.Mutex) {
	if w.Ready() != nil {
		return
	}
	m.mu.Lock()
	m.batches++
	batch := fmt.Appendf(nil, "%d", m.batches)
	m.mu.Unlock()
	if m.oneOf(100) {
		batch = append(append(batch, ' '), make([]byte, 1<<20)...) // It goes in parts.
	}
	order.Lock()
	number := files.append(w.Session(), batch)
	err := w.Append(number, batch)
	order.Unlock()
	if err == nil && m.oneOf(2) {
		err = w.Wait(number)
	} else if err == nil {
		return // A batch without a waiting caller.
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		m.tally.unacknowledged++
		return
	}
	m.tally.acknowledged++
	m.acknowledged[string(batch)] = number
}

// check restores the log into an empty copy, and compares it with the acknowledged batches and with
// the surviving copies.
func (m *model) check(ctx context.Context) {
	time.Sleep(time.Minute) // Late requests arrive.
	m.stream.SetMaxBytes(0)
	restored := &copied{}
	err := m.restore(ctx, restored)
	if errors.Is(err, slots.ErrForeignCopy) { // The stream was trimmed.
		if restored, err = m.recover(ctx, slotstest.NewLog(m.stream), m.objects, map[uint64]bool{}); err == nil {
			err = m.restore(ctx, restored)
		}
	}
	if err != nil {
		m.fail("restore: got error %v, want none", err)
		return
	}
	seen := map[string]uint64{}
	for i, b := range restored.batches {
		number := uint64(i + 1)
		if first := seen[string(b.data)]; first != 0 {
			m.fail("batch %.20q: got it at %d and %d, want it once", b.data, first, number)
		}
		seen[string(b.data)] = number
	}
	for batch, number := range m.acknowledged {
		if seen[batch] != number {
			m.fail("acknowledged batch %.20q: got it at %d (0: missing), want %d", batch, seen[batch], number)
		}
	}
	m.checkSnapshots(ctx, restored)
	for i, files := range m.survivors {
		if err := m.restore(ctx, files); errors.Is(err, slots.ErrForeignCopy) {
			m.tally.foreign++
		} else if err != nil {
			m.fail("restore of pod %d: got error %v, want none", i, err)
		} else if !files.equal(restored) {
			m.fail("restore of pod %d: got another copy than that of the whole log", i)
		}
	}
}

// restore brings a copy to the end of the log.
func (m *model) restore(ctx context.Context, files *copied) error {
	w, err := slots.Claim(ctx, slotstest.NewLog(m.stream), files, slots.Options{Logger: slog.New(slog.DiscardHandler), Now: time.Now})
	if err == nil {
		w.Close()
	}
	return err
}

// copied is a copy of a store: a list of batches with their sessions.
type copied struct {
	mu      sync.Mutex
	batches []copiedBatch
}

type copiedBatch struct {
	session pebblestore.Session
	data    []byte
}

// append applies a batch of the owner, and returns its number.
func (c *copied) append(session pebblestore.Session, data []byte) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.batches = append(c.batches, copiedBatch{session, data})
	return uint64(len(c.batches))
}

func (c *copied) equal(other *copied) bool {
	return slices.EqualFunc(c.batches, other.batches, func(a, b copiedBatch) bool {
		return a.session == b.session && bytes.Equal(a.data, b.data)
	})
}

// all returns the batches.
func (c *copied) all() []copiedBatch {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.batches)
}

// crash leaves the first n batches.
func (c *copied) crash(n int) { c.batches = c.batches[:n] }

func (*copied) AllMeta() (map[string][]byte, error) { return nil, nil }

func (c *copied) Position() (p pebblestore.Position) {
	if n := len(c.batches); n > 0 {
		p = pebblestore.Position{Batch: uint64(n), Session: c.batches[n-1].session}
	}
	return p
}

func (c *copied) Apply(at pebblestore.Position, batch []byte) error {
	if at.Batch != uint64(len(c.batches))+1 {
		return fmt.Errorf("batch %d follows batch %d", at.Batch, len(c.batches))
	}
	c.append(at.Session, bytes.Clone(batch))
	return nil
}
