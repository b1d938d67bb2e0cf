package pebblestore

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// Bounds of one commit. A request is never split, so a commit may exceed them by one request.
const (
	maxCommitMessages = 1000
	maxCommitBytes    = 4 << 20
)

// Bounds of one message; ingest has narrower ones.
const (
	maxIDBytes   = 1 << 10
	maxNameBytes = 1 << 10
	maxBodyBytes = 16 << 20
	maxSkips     = 10_000
)

// request is one call of Append. It is reused after its caller received the answer.
type request struct {
	messages []queue.Message
	hashes   []hash
	bytes    int
	state    atomic.Int32 // waiting, taken or cancelled.
	answer   chan struct{}

	dups []bool
	err  error
}

const (
	waiting = iota
	taken
	cancelled
)

type hash [16]byte

// hashOf identifies a message among all messages of its Source. Collisions are infeasible, also
// for IDs chosen by an adversary.
func hashOf(buf []byte, m *queue.Message) (hash, []byte) {
	buf = codec.AppendString(buf[:0], m.Source)
	buf = append(buf, m.ID...)
	sum := sha256.Sum256(buf)
	return hash(sum[:16]), buf
}

// Append implements queue.Store. ctx ends the wait only until the committer takes the request:
// from then on its messages may become durable.
func (s *Store) Append(ctx context.Context, msgs []queue.Message) ([]bool, error) {
	if len(msgs) == 0 {
		return nil, nil
	}
	r := s.requestPool.Get().(*request)
	r.messages, r.bytes, r.hashes = msgs, 0, r.hashes[:0]
	r.dups, r.err = nil, nil
	r.state.Store(waiting)
	var buf [256]byte
	scratch := buf[:0]
	for i := range msgs {
		m := &msgs[i]
		if err := check(m); err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
		r.bytes += codec.RecordSize(m)
		if s.o.DuplicateWindow > 0 {
			var h hash
			h, scratch = hashOf(scratch, m)
			r.hashes = append(r.hashes, h)
		}
	}
	if s.disk.full.Load() {
		s.release(r)
		return nil, queue.ErrFull
	}
	if err := s.commitLog.ready(); err != nil {
		s.release(r)
		return nil, err
	}
	select {
	case s.requests <- r:
	case <-ctx.Done():
		s.release(r)
		return nil, ctx.Err()
	case <-s.stop:
		s.release(r)
		return nil, queue.ErrClosed
	}
	select {
	case <-r.answer:
	case <-ctx.Done():
		if r.state.CompareAndSwap(waiting, cancelled) {
			return nil, ctx.Err() // The committer drops it.
		}
		<-r.answer
	case <-s.stop:
		if r.state.CompareAndSwap(waiting, cancelled) {
			return nil, queue.ErrClosed
		}
		<-r.answer
	}
	dups, err := r.dups, r.err
	s.release(r)
	return dups, err
}

func (s *Store) release(r *request) {
	r.messages = nil
	s.requestPool.Put(r)
}

func check(m *queue.Message) error {
	switch {
	case m.Source == "" || len(m.Source) > maxNameBytes:
		return fmt.Errorf("field Source has %d bytes; it must have 1 to %d", len(m.Source), maxNameBytes)
	case len(m.ID) > maxIDBytes:
		return fmt.Errorf("field ID has %d bytes; at most %d are allowed", len(m.ID), maxIDBytes)
	case len(m.Body) > maxBodyBytes:
		return fmt.Errorf("field Body has %d bytes; at most %d are allowed", len(m.Body), maxBodyBytes)
	case len(m.Skip) > maxSkips:
		return fmt.Errorf("field Skip has %d names; at most %d are allowed", len(m.Skip), maxSkips)
	}
	return nil
}

// runCommitter is the only writer of the logs. It takes all waiting requests, assigns positions
// to their messages, and makes them durable with one sync. It writes the next commit during the
// sync of the previous one.
func (s *Store) runCommitter() {
	c := committer{s: s, written: make(chan *commit, 2), synced: make(chan struct{}, 1)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for cm := range c.written {
			c.finish(cm)
		}
	}()
	defer func() {
		close(c.written)
		<-ended
	}()
	for {
		select {
		case r := <-s.requests:
			c.begin()
			c.gather(r)
			c.write()
		case <-s.stop:
			return // Waiting callers cancel their requests themselves.
		}
	}
}

type committer struct {
	s       *Store
	current *commit
	number  uint64     // The number of the commit.
	now     time.Time  // The time of the commit.
	last    *sourceLog // The log of the previous message, which is most often the same.
	key     []byte

	// written are the commits being synced, in order; syncing is their number, and synced
	// receives a value after each sync.
	written chan *commit
	syncing atomic.Int32
	synced  chan struct{}
}

// commit is a set of requests that become durable together.
type commit struct {
	started  time.Time
	requests []*request
	touched  []touched
	count    int
	bytes    int
	batch    *pebble.Batch
	// wait returns when the batch is durable; nil when it is not in the commit log.
	wait func() error
}

// touched is the change of a log by a commit.
type touched struct {
	log           *sourceLog
	before, after position
}

// position is the end of a log: its last message, and the number of bytes up to there.
type position struct{ head, bytes uint64 }

var commits = sync.Pool{New: func() any { return new(commit) }}

// aheadMessages is the minimum number of messages of a commit that is written while the
// previous commit is being synced. A smaller one waits for the end of the sync, and takes
// further requests meanwhile.
const aheadMessages = 16

func (c *committer) begin() {
	c.current = commits.Get().(*commit)
	c.current.count, c.current.bytes, c.current.wait = 0, 0, nil
	c.number++
}

// gather takes requests until none waits or the commit is large.
func (c *committer) gather(r *request) {
	for {
		c.take(r)
		if c.current.count >= maxCommitMessages || c.current.bytes >= maxCommitBytes {
			return
		}
		select {
		case r = <-c.s.requests:
			continue
		default:
		}
		if r = c.wait(); r == nil {
			return
		}
	}
}

func (c *committer) take(r *request) {
	if r.state.CompareAndSwap(waiting, taken) {
		c.current.requests = append(c.current.requests, r)
		c.current.count += len(r.messages)
		c.current.bytes += r.bytes
	}
}

// wait returns the next request that arrives while the previous commit is being synced; nil
// when the current commit should be written.
func (c *committer) wait() *request {
	for c.current.count < aheadMessages && c.syncing.Load() > 0 {
		select {
		case r := <-c.s.requests:
			return r
		case <-c.synced:
		case <-c.s.stop:
			return nil
		}
	}
	return nil
}

// write assigns the positions of the commit's messages, submits the commit to the log and queues
// it for finish.
func (c *committer) write() {
	cm := c.current
	cm.started = time.Now()
	c.assign(cm)
	c.submit(cm)
	c.syncing.Add(1)
	c.written <- cm
}

// assign builds the batch of a commit: its messages at the next positions of their logs, and the
// new ends of the logs.
func (c *committer) assign(cm *commit) {
	s := c.s
	cm.batch = s.commitLog.newCommit(cm.bytes + 128*cm.count + 64)
	c.now = s.o.Now()
	s.duplicates.begin(cm.batch, c.now.UnixMilli())
	for _, r := range cm.requests {
		r.err = c.add(cm.batch, r)
	}
	c.last = nil
	for i := range cm.touched {
		t := &cm.touched[i]
		t.after = position{t.log.head, t.log.bytes}
		c.key = codec.AppendKey(c.key[:0], codec.PrefixHead, t.log.number)
		op := cm.batch.SetDeferred(len(c.key), 16)
		copy(op.Key, c.key)
		binary.BigEndian.PutUint64(op.Value, t.after.head)
		binary.BigEndian.PutUint64(op.Value[8:], t.after.bytes)
		_ = op.Finish()
	}
}

// submit submits the batch of a commit. A batch of duplicates has no writes, and is durable with the
// batches before: a batch with the same messageIds may be among them, and may fail. On an error submit
// takes the positions back, so that the next commit assigns them again.
func (c *committer) submit(cm *commit) {
	wait, err := c.s.commitLog.submit(cm.batch)
	c.s.disk.addWritten(cm.bytes)
	if err == nil {
		cm.wait = wait
		return
	}
	for _, t := range cm.touched {
		t.log.share.used.Add(-int64(t.log.bytes - t.before.bytes))
		t.log.head, t.log.bytes = t.before.head, t.before.bytes
	}
	cm.fail(err)
}

// fail answers the requests of a commit with an error.
func (cm *commit) fail(err error) {
	cm.touched = cm.touched[:0]
	for _, r := range cm.requests {
		r.err = fmt.Errorf("append to the queue: %w", err)
	}
}

// finish waits until a commit is durable and publishes it. Commits finish in order, so a request
// whose messages are duplicates of the previous commit is answered after that commit is durable.
func (c *committer) finish(cm *commit) {
	if cm.wait != nil {
		if err := cm.wait(); err != nil {
			cm.fail(err) // The positions remain assigned: no later commit becomes durable.
		}
	}
	_ = cm.batch.Close()
	c.syncing.Add(-1)
	select {
	case c.synced <- struct{}{}:
	default:
	}
	c.s.publish(cm)
	clear(cm.requests)
	clear(cm.touched)
	cm.requests, cm.touched, cm.batch, cm.wait = cm.requests[:0], cm.touched[:0], nil, nil
	commits.Put(cm)
}

// publish makes a durable commit visible to readers, answers its requests and wakes the lanes.
func (s *Store) publish(cm *commit) {
	for _, t := range cm.touched {
		t.log.durableBytes.Store(t.after.bytes)
		t.log.durable.Store(t.after.head)
		if !s.withoutWAL {
			s.putAccepted(t.log, t.after)
		}
	}
	if !s.withoutWAL {
		s.accepted.Write()
	}
	for _, r := range cm.requests {
		r.answer <- struct{}{}
	}
	s.metrics.committed(cm.count, time.Since(cm.started))
	for _, t := range cm.touched {
		t.log.eachLane(func(l *lane) {
			if l.wantsNotify.Load() && l.wantsNotify.CompareAndSwap(true, false) {
				s.notify(l.id)
			}
		})
	}
}

// add adds a request's messages to the batch, all or none.
func (c *committer) add(b *pebble.Batch, r *request) error {
	s := c.s
	if s.disk.full.Load() {
		return queue.ErrFull
	}
	var lead *share // The use of a request counts for the namespace of its first message.
	for i := range r.messages {
		l, err := c.logFor(r.messages[i].Source)
		if err != nil {
			return err
		}
		if lead == nil {
			lead = l.share
			s.disk.shares.call(lead, c.now)
		}
	}
	if quota := uint64(max(s.quota(), 0)); quota > 0 {
		fits := func() bool { return c.fits(r, quota) }
		if !fits() && !c.makeSpace(r, quota, quota/skipDivisor, fits) {
			return queue.ErrOverQuota
		}
	} else {
		bytes, current := int64(r.bytes+len(r.messages)*codec.MessageKeyLen), int64(c.current.bytes)
		total, free := s.commitLog.space()
		if err := s.disk.shares.admitTo(total, reserveOf(total, 0), free-current, lead.logged.Load()+bytes, true); err != nil {
			return err
		}
		admit := func() error {
			return s.disk.shares.admit(lead, bytes, s.disk.unchecked.Load()+current)
		}
		if err := admit(); err != nil && !c.makeSpace(r, 0, uint64(s.disk.shares.size()/skipDivisor), func() bool { return admit() == nil }) {
			return err
		}
	}
	for i := range r.messages {
		m := &r.messages[i]
		l, _ := c.logFor(m.Source)
		// A redelivery repeats its messageId on purpose.
		if s.o.DuplicateWindow > 0 && m.Only == "" {
			dup, err := s.duplicates.contains(&r.hashes[i])
			if err != nil {
				// A duplicate delivery is better than a lost message.
				s.log.With(queue.LaneID{Source: m.Source}.LogArgs()...).Error("duplicate lookup failed; accepting the message", "error", err)
			}
			if dup {
				if r.dups == nil {
					r.dups = make([]bool, len(r.messages))
				}
				r.dups[i] = true
				l.duplicates.Add(1)
				continue
			}
			s.duplicates.add(b, &r.hashes[i])
		}
		if l.touched != c.number {
			l.touched = c.number
			c.current.touched = append(c.current.touched, touched{log: l, before: position{l.head, l.bytes}})
		}
		l.head++
		size := codec.RecordSize(m)
		op := b.SetDeferred(codec.MessageKeyLen, size)
		codec.AppendKey(op.Key[:0], codec.PrefixMessage, l.number, l.head)
		codec.AppendRecord(op.Value[:0], m, l.bytes)
		if err := op.Finish(); err != nil {
			return err
		}
		l.bytes += uint64(size + codec.MessageKeyLen)
		l.share.used.Add(int64(size + codec.MessageKeyLen))
		l.share.logged.Add(int64(size + codec.MessageKeyLen))
	}
	return nil
}

func (c *committer) logFor(source string) (*sourceLog, error) {
	if c.last != nil && c.last.source == source {
		return c.last, nil
	}
	l, err := c.s.logFor(source)
	if err == nil {
		c.last = l
	}
	return l, err
}

// makeSpace skips first attempts of messages that another lane delivered, in the logs of a request that have
// reached a quota, 0 for all, so that more bytes are freed than the request needs. It reports whether the
// request then fits.
func (c *committer) makeSpace(r *request, quota, more uint64, fits func() bool) bool {
	done := map[*sourceLog]bool{}
	for i := range r.messages {
		l, err := c.logFor(r.messages[i].Source)
		if err != nil || done[l] || len(c.s.grouped(l)) < 2 ||
			l.bytes-l.trimmedBytes.Load()+uint64(r.bytes+len(r.messages)*codec.MessageKeyLen) <= quota {
			continue
		}
		done[l] = true
		if err := c.s.skipFor(l, more+uint64(r.bytes)); err != nil {
			c.s.log.With(queue.LaneID{Source: l.source}.LogArgs()...).Error("freeing space for new messages failed", "error", c.s.explain(err))
		}
	}
	return len(done) > 0 && fits()
}

// fits reports whether a request is within the quotas of all its Sources.
func (c *committer) fits(r *request, quota uint64) bool {
	fits := true
	for i := range r.messages {
		l, _ := c.logFor(r.messages[i].Source)
		l.asked += uint64(codec.RecordSize(&r.messages[i]) + codec.MessageKeyLen)
		if l.bytes-l.trimmedBytes.Load()+l.asked > quota {
			fits = false
			break
		}
	}
	for i := range r.messages {
		l, _ := c.logFor(r.messages[i].Source)
		l.asked = 0
	}
	return fits
}
