package slots

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// TestAllSmallScopes explores all orders of the steps of three processes of one slot, from the claim of the first one on: a
// second claim, a batch that waits, a snapshot, and the loss of a request, of an answer or of a process. In each state at most one session
// may send while another one has a lease, and the stream has each acknowledged batch at its place. A process that takes no step
// is one that is stopped. The moments are seconds apart, so TestModel has the margins of the clocks.
func TestAllSmallScopes(t *testing.T) {
	t.Parallel()
	e := &explorer{t: t, seen: map[uint64]bool{}, seed: maphash.MakeSeed()}
	first := &scope{now: start, claims: 2, batches: 1, snapshots: 1, losses: 1}
	if testing.Short() {
		first.losses = 0
	}
	for range 3 {
		first.processes = append(first.processes, newScopeProcess(first))
	}
	for range 2 { // The first process claims the slot, and owns it.
		first.step(0, answered)
	}
	first.append(0)
	e.explore(first)
	t.Logf("%d states, %d of them with a second claim", len(e.seen), e.takenOver)
	if e.takenOver == 0 {
		t.Error("states with a second claim: got none, want some")
	}
}

// explorer visits each state once.
type explorer struct {
	t         *testing.T
	seed      maphash.Seed
	seen      map[uint64]bool
	takenOver int
}

// explore visits a state and all that follow it.
func (e *explorer) explore(s *scope) {
	todo := []*scope{s}
	for len(todo) > 0 && !e.t.Failed() {
		s, todo = todo[len(todo)-1], todo[:len(todo)-1]
		if key := maphash.Bytes(e.seed, s.key()); !e.seen[key] {
			e.seen[key] = true
			if s.claims == 0 {
				e.takenOver++
			}
			s.check(e.t)
			todo = append(todo, s.following()...)
		}
	}
}

// tick is the time between two moments of a scope, and horizon the last one: a suspect at the first moment, and a claim at the
// third.
const (
	tick    = 4 * time.Second
	horizon = 3 * tick
)

// The fates of a request.
const (
	answered    = "step of"
	lostRequest = "lost request of"
	lostAnswer  = "lost answer of"
)

// scope is a state of the stream and the processes, with what may still happen.
type scope struct {
	now                                time.Time
	records                            []scopeRecord
	processes                          []scopeProcess
	claims, batches, snapshots, losses int
	// acknowledged are the batches by their numbers.
	acknowledged map[uint64]string
	path         []string
}

type scopeRecord struct {
	id   string
	data []byte
}

// scopeProcess follows the slot, or owns it.
type scopeProcess struct {
	candidate *candidate
	publisher *publisher
	copied    *scopeCopy
}

// scopeCopy is a copy that has the content of each batch.
type scopeCopy struct {
	batches []string
	session pebblestore.Session
}

func (c *scopeCopy) Position() pebblestore.Position {
	return pebblestore.Position{Batch: uint64(len(c.batches)), Session: c.session}
}

func (c *scopeCopy) Apply(at pebblestore.Position, batch []byte) error {
	c.batches, c.session = append(slices.Clone(c.batches), string(batch)), at.Session
	return nil
}

func (*scopeCopy) AllMeta() (map[string][]byte, error) { return nil, nil }

// newScopeProcess starts a process without a copy.
func newScopeProcess(s *scope) scopeProcess {
	copied := &scopeCopy{}
	return scopeProcess{copied: copied, candidate: newCandidate(&follower{copy: copied, next: 1}, s.state(), s.now)}
}

func (s *scope) state() State { return State{First: 1, Last: uint64(len(s.records))} }

// clone returns an independent state, one event later.
func (s *scope) clone(event string) *scope {
	next := *s
	next.path = append(slices.Clone(s.path), event)
	next.records, next.acknowledged = slices.Clone(s.records), map[uint64]string{}
	for n, batch := range s.acknowledged {
		next.acknowledged[n] = batch
	}
	next.processes = slices.Clone(s.processes)
	for i := range next.processes {
		next.processes[i].clone()
	}
	return &next
}

func (p *scopeProcess) clone() {
	copied := *p.copied
	p.copied = &copied
	if p.candidate != nil {
		c, f := *p.candidate, *p.candidate.follower
		f.copy, c.follower, p.candidate = p.copied, &f, &c
	}
	if p.publisher != nil {
		own := *p.publisher
		own.waiting = slices.Clone(own.waiting)
		for i, r := range own.waiting {
			record := *r
			record.data = slices.Clone(r.data)
			own.waiting[i] = &record
		}
		p.publisher = &own
	}
}

// following returns the states after each event that is possible.
func (s *scope) following() (all []*scope) {
	add := func(event string, change func(*scope)) {
		next := s.clone(event)
		change(next)
		all = append(all, next)
	}
	if s.now.Sub(start) < horizon {
		add("tick", func(n *scope) { n.now = n.now.Add(tick) })
	}
	for i, p := range s.processes {
		event := func(name string) string { return fmt.Sprint(name, " ", i) }
		for _, fate := range s.fates(p) {
			add(event(fate), func(n *scope) { n.step(i, fate) })
		}
		if p.publisher != nil && p.publisher.ended == nil && s.snapshots > 0 {
			add(event("snapshot"), func(n *scope) {
				n.snapshots--
				n.processes[i].publisher.reference = []byte("manifest")
			})
		}
		if s.losses > 0 {
			add(event("loss of"), func(n *scope) {
				n.losses--
				n.processes[i] = newScopeProcess(n)
			})
		}
	}
	return all
}

// fates are those of the next step of a process.
func (s *scope) fates(p scopeProcess) []string {
	p.clone()
	var action action
	if c := p.candidate; c == nil {
		action = p.publisher.next(s.now).action
	} else if c.follower.next <= uint64(len(s.records)) {
		return []string{answered} // It reads.
	} else if action = c.next(s.now).action; action == actPublish && c.proposal.kind == kindClaim && s.claims == 0 {
		return nil
	}
	switch {
	case action == actWait, action == actEnd:
		return nil
	case action == actPublish && s.losses > 0:
		return []string{answered, lostRequest, lostAnswer}
	}
	return []string{answered}
}

// fail notes an error, which no process may have.
func (s *scope) fail(err error) {
	if err != nil {
		s.path = append(s.path, "ERROR "+err.Error())
	}
}

// append gives an owner a batch for which a caller waits.
func (s *scope) append(i int) {
	p := s.processes[i]
	s.batches--
	p.publisher.append(s.now, fmt.Appendf(nil, "batch %d of epoch %d", s.batches, p.publisher.epoch))
	p.publisher.want(p.publisher.appended)
}

// step takes the next step of a process: one that follows first reads all records.
func (s *scope) step(i int, fate string) {
	p := &s.processes[i]
	if own := p.publisher; own != nil {
		s.stepOf(p, own.next(s.now), fate, own.refused, own.answered)
		s.note(own)
		return
	}
	c := p.candidate
	if c.follower.next <= uint64(len(s.records)) {
		for at := c.follower.next; at <= uint64(len(s.records)); at++ {
			s.fail(c.apply(s.now, Entry{at, s.records[at-1].data}))
		}
		return
	}
	s.stepOf(p, c.next(s.now), fate, c.refused, func(sequence uint64) { s.fail(c.answered(s.now, sequence)) })
}

func (s *scope) stepOf(p *scopeProcess, next step, fate string, refused func(time.Time, error), acknowledged func(uint64)) {
	switch next.action {
	case actOwn:
		won := p.candidate.won
		p.publisher, p.candidate = newPublisher(won.header, p.candidate.follower.next-1, won.firstSent, s.state()), nil
	case actRead:
		for at := next.expected; at < uint64(len(s.records)); at++ {
			p.publisher.read(Entry{at + 1, s.records[at].data})
			s.note(p.publisher)
		}
		p.publisher.readEnd(s.now, next.expected < uint64(len(s.records)))
	case actReadState:
		p.publisher.stateRead(s.now, s.state())
	case actPublish:
		if fate != answered {
			s.losses--
		}
		if fate == lostRequest {
			refused(s.now, errors.New("no answer"))
			return
		}
		sequence, err := s.publish(next)
		switch {
		case fate == lostAnswer:
			refused(s.now, errors.New("no answer"))
		case err != nil:
			refused(s.now, err)
		default:
			acknowledged(sequence)
		}
	}
}

// publish is that of a stream: it knows the ids of its records, and then compares the sequence.
func (s *scope) publish(next step) (uint64, error) {
	if i := slices.IndexFunc(s.records, func(r scopeRecord) bool { return r.id == next.id }); i >= 0 {
		return uint64(i) + 1, nil
	}
	if next.expected != uint64(len(s.records)) {
		return 0, ErrWrongSequence
	}
	if h, _, err := decodeRecord(next.data); err == nil && h.kind == kindClaim {
		s.claims--
	}
	s.records = append(s.records, scopeRecord{next.id, next.data})
	return uint64(len(s.records)), nil
}

// note takes the batches that a session knows to be durable: the stream has them at this moment.
func (s *scope) note(own *publisher) {
	if own.acknowledged == own.claimed {
		return
	}
	copied := s.restore()
	for n := own.claimed + 1; n <= own.acknowledged; n++ {
		if _, known := s.acknowledged[n]; !known && n <= uint64(len(copied)) {
			s.acknowledged[n] = copied[n-1]
		} else if n > uint64(len(copied)) {
			s.fail(fmt.Errorf("batch %d is acknowledged, and the stream has %d", n, len(copied)))
		}
	}
}

// restore returns the batches of the stream.
func (s *scope) restore() []string {
	f := &follower{copy: &scopeCopy{}, next: 1}
	for i, r := range s.records {
		s.fail(f.apply(Entry{uint64(i) + 1, r.data}))
	}
	return f.copy.(*scopeCopy).batches
}

// check compares a state with what must hold in each.
func (s *scope) check(t *testing.T) {
	var copied []string
	if len(s.acknowledged) > 0 {
		copied = s.restore()
	}
	for n, batch := range s.acknowledged {
		if n > uint64(len(copied)) || copied[n-1] != batch {
			t.Errorf("acknowledged batch %d: got another one in the stream than %q; events: %q", n, batch, s.path)
		}
	}
	for i, p := range s.processes {
		for j, q := range s.processes {
			if i != j && p.publisher != nil && q.publisher != nil && p.publisher.maySend(s.now) && q.publisher.hasLease(s.now) {
				t.Errorf("process %d may send while process %d has a lease, want one of them; events: %q", i, j, s.path)
			}
		}
	}
	if i := slices.IndexFunc(s.path, func(e string) bool { return strings.HasPrefix(e, "ERROR") }); i >= 0 {
		t.Errorf("got %s; events: %q", s.path[i], s.path)
	}
}

// key describes the state without the names of sessions, the order of the processes and the events before it.
func (s *scope) key() []byte {
	names := map[pebblestore.Session]int64{{}: 0}
	name := func(session pebblestore.Session) int64 {
		if _, known := names[session]; !known {
			names[session] = int64(len(names))
		}
		return names[session]
	}
	k := keyOf(nil, int64(s.now.Sub(start)), int64(s.claims), int64(s.batches), int64(s.snapshots), int64(s.losses))
	for _, r := range s.records {
		h, _, _ := decodeRecord(r.data) // They were sealed here.
		k = keyOf(k, int64(h.kind), name(h.session), int64(h.number), int64(h.last))
	}
	var processes [][]byte
	for _, p := range s.processes {
		processes = append(processes, s.describe(p, name))
	}
	slices.SortFunc(processes, bytes.Compare)
	return append(k, bytes.Join(processes, []byte("|"))...)
}

func keyOf(k []byte, numbers ...int64) []byte {
	for _, n := range numbers {
		k = binary.AppendVarint(k, n)
	}
	return k
}

func (s *scope) describe(p scopeProcess, name func(pebblestore.Session) int64) []byte {
	age := func(t time.Time) int64 { return int64(min(s.now.Sub(t), horizon)) }
	is := func(b bool) int64 {
		if b {
			return 1
		}
		return 0
	}
	record := func(r *outgoing) (k []byte) {
		if r == nil {
			return []byte{'-'}
		}
		return keyOf(nil, int64(r.kind), name(r.session), int64(r.number), int64(r.last), age(r.firstSent), age(r.since))
	}
	if c := p.candidate; c != nil {
		k := keyOf(nil, 1, int64(c.follower.next), int64(c.end), age(c.readAt), is(s.now.Before(c.pauseUntil)))
		return append(append(k, record(c.proposal)...), record(c.won)...)
	}
	own := p.publisher
	k := keyOf(nil, 2, name(own.session), int64(own.number), int64(own.expected), int64(own.appended), int64(own.acknowledged),
		int64(own.wanted),
		int64(len(own.reference)), int64(own.snapshot), is(s.now.Before(own.pauseUntil)), is(own.mustRead), is(own.mustCheck), age(own.lastSent),
		age(own.leaseStart), age(own.usage.readAt), is(own.ended != nil))
	k = append(k, record(own.inFlight)...)
	for _, r := range own.waiting {
		k = append(k, record(r)...)
	}
	return k
}
