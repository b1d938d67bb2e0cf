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
)

// Bounds of one commit. A request is never split, so a group may exceed them by one request.
const (
	maxGroupMessages = 1000
	maxGroupBytes    = 4 << 20
)

// Bounds of one message; ingest's own are narrower.
const (
	maxIDBytes   = 1 << 10
	maxNameBytes = 1 << 10
	maxBodyBytes = 16 << 20
	maxSkips     = 10_000
)

// request is one call of Append. It is reused once its caller has the answer.
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

// hashOf tells messages apart that are of one Source: a collision is out of
// the question even when the ids are made by an adversary.
func hashOf(buf []byte, m *queue.Message) (hash, []byte) {
	buf = appendString(buf[:0], m.Source)
	buf = append(buf, m.ID...)
	sum := sha256.Sum256(buf)
	return hash(sum[:16]), buf
}

// Append implements queue.Store. ctx ends the wait only until the messages are
// taken for a commit: from then on they may become durable.
func (s *Store) Append(ctx context.Context, msgs []queue.Message) ([]bool, error) {
	if len(msgs) == 0 {
		return nil, nil
	}
	r := s.spare.Get().(*request)
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
		r.bytes += recordSize(m)
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
	s.spare.Put(r)
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

// runCommitter is the one writer of the logs: it takes all requests that wait,
// gives their messages positions, and syncs them with one flush of the disk. It
// writes the next group while the one before is being synced.
func (s *Store) runCommitter() {
	c := committer{s: s, written: make(chan *commit, 2), synced: make(chan struct{}, 1)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for g := range c.written {
			c.finish(g)
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
			return // Those that still wait cancel by themselves.
		}
	}
}

type committer struct {
	s      *Store
	group  *commit
	number uint64     // The group's.
	last   *sourceLog // The log of the message before: most often the same.
	key    []byte

	// written are the groups that are being synced, in their order; syncing counts
	// them, and synced tells of one less.
	written chan *commit
	syncing atomic.Int32
	synced  chan struct{}
}

// commit is a group of requests that is made durable at once.
type commit struct {
	started  time.Time
	requests []*request
	touched  []touched
	count    int
	bytes    int
	batch    *pebble.Batch
	applied  bool // The batch is in the log, and may not be synced yet.
}

// touched is what a group does to a log.
type touched struct {
	log           *sourceLog
	before, after position
}

// position is a log's end: its last message, and the bytes up to there.
type position struct{ head, bytes uint64 }

var commits = sync.Pool{New: func() any { return new(commit) }}

// aheadMessages is the number of messages from which a group is written while the previous
// group is being synced; fewer messages wait for the end of the sync, and for further ones.
const aheadMessages = 16

func (c *committer) begin() {
	c.group = commits.Get().(*commit)
	c.group.count, c.group.bytes, c.group.applied = 0, 0, false
	c.number++
}

// gather takes requests until none waits or the group is large.
func (c *committer) gather(r *request) {
	for {
		c.take(r)
		if c.group.count >= maxGroupMessages || c.group.bytes >= maxGroupBytes {
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
		c.group.requests = append(c.group.requests, r)
		c.group.count += len(r.messages)
		c.group.bytes += r.bytes
	}
}

// wait waits for another request while that costs nothing; nil when it would.
func (c *committer) wait() *request {
	for c.group.count < aheadMessages && c.syncing.Load() > 0 {
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

// write writes the group to the log of the disk, and leaves it to be synced.
func (c *committer) write() {
	s, g := c.s, c.group
	g.started = time.Now()
	now := s.o.Now().UnixMilli()
	g.batch = s.db.NewBatchWithSize(g.bytes + 128*g.count + 64)
	_ = g.batch.LogData(s.fs.positions.mark(), nil)
	s.duplicates.begin(g.batch, now)
	for _, r := range g.requests {
		r.err = c.add(g.batch, r)
	}
	c.last = nil
	if g.batch.Count() > 0 {
		for i := range g.touched {
			t := &g.touched[i]
			t.after = position{t.log.head, t.log.bytes}
			c.key = appendKey(c.key[:0], prefixHead, t.log.number)
			op := g.batch.SetDeferred(len(c.key), 16)
			copy(op.Key, c.key)
			binary.BigEndian.PutUint64(op.Value, t.after.head)
			binary.BigEndian.PutUint64(op.Value[8:], t.after.bytes)
			_ = op.Finish()
		}
		s.flusher.syncing()
		err := s.db.ApplyNoSyncWait(g.batch, pebble.Sync)
		g.applied = err == nil
		if err != nil {
			for _, t := range g.touched {
				t.log.head, t.log.bytes = t.before.head, t.before.bytes
			}
			g.touched = g.touched[:0]
			for _, r := range g.requests {
				r.err = fmt.Errorf("append to the queue: %w", err)
			}
		}
		s.disk.wrote(g.bytes)
	}
	c.syncing.Add(1)
	c.written <- g
}

// finish waits until a group is on the disk, shows it to readers and answers.
// A group that only repeats messages of the one before is answered after that.
func (c *committer) finish(g *commit) {
	s := c.s
	if g.applied {
		if err := g.batch.SyncWait(); err != nil {
			engineLogger{s}.Fatalf("sync the log: %w", err)
		}
	}
	_ = g.batch.Close()
	c.syncing.Add(-1)
	select {
	case c.synced <- struct{}{}:
	default:
	}
	for _, t := range g.touched {
		t.log.durableBytes.Store(t.after.bytes)
		t.log.durable.Store(t.after.head)
		s.accepted.put(t.log, t.after)
	}
	s.accepted.write()
	for _, r := range g.requests {
		r.answer <- struct{}{}
	}
	s.metrics.committed(g.count, time.Since(g.started))
	for _, t := range g.touched {
		t.log.eachLane(func(l *lane) {
			if l.hungry.Load() && l.hungry.CompareAndSwap(true, false) {
				s.notify(l.id)
			}
		})
	}
	clear(g.requests)
	clear(g.touched)
	g.requests, g.touched, g.batch = g.requests[:0], g.touched[:0], nil
	commits.Put(g)
}

// add puts a request's messages into the batch, all or none.
func (c *committer) add(b *pebble.Batch, r *request) error {
	s := c.s
	if s.disk.full.Load() {
		return queue.ErrFull
	}
	for i := range r.messages {
		if _, err := c.logFor(r.messages[i].Source); err != nil {
			return err
		}
	}
	if quota := s.disk.quota.Load(); quota > 0 && !c.fits(r, uint64(quota)) && !c.makeRoom(r, uint64(quota)) {
		return queue.ErrOverQuota
	}
	for i := range r.messages {
		m := &r.messages[i]
		l, _ := c.logFor(m.Source)
		// A redelivery repeats its messageId on purpose.
		if s.o.DuplicateWindow > 0 && m.Only == "" {
			dup, err := s.duplicates.seen(&r.hashes[i])
			if err != nil {
				// Better twice than not at all.
				s.log.With(queue.LaneID{Source: m.Source}.LogArgs()...).Error("looking for a duplicate failed; accepting the message", "error", err)
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
			c.group.touched = append(c.group.touched, touched{log: l, before: position{l.head, l.bytes}})
		}
		l.head++
		size := recordSize(m)
		op := b.SetDeferred(messageKeyLen, size)
		appendKey(op.Key[:0], prefixMessage, l.number, l.head)
		appendRecord(op.Value[:0], m, l.bytes)
		if err := op.Finish(); err != nil {
			return err
		}
		l.bytes += uint64(size + messageKeyLen)
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

// makeRoom skips first attempts of messages that another URL took, in the logs
// that have reached their quota. It reports whether the request fits then.
func (c *committer) makeRoom(r *request, quota uint64) bool {
	done := map[*sourceLog]bool{}
	for i := range r.messages {
		l, err := c.logFor(r.messages[i].Source)
		if err != nil || done[l] || len(c.s.grouped(l)) < 2 || l.bytes-l.trimmedBytes.Load()+uint64(r.bytes+len(r.messages)*messageKeyLen) <= quota {
			continue
		}
		done[l] = true
		if err := c.s.skipFor(l, quota/relief+uint64(r.bytes)); err != nil {
			c.s.log.With(queue.LaneID{Source: l.source}.LogArgs()...).Error("freeing space for new messages failed", "error", c.s.explain(err))
		}
	}
	return len(done) > 0 && c.fits(r, quota)
}

// fits tells whether a request is within the quota of all its Sources.
func (c *committer) fits(r *request, quota uint64) bool {
	fits := true
	for i := range r.messages {
		l, _ := c.logFor(r.messages[i].Source)
		l.asked += uint64(recordSize(&r.messages[i]) + messageKeyLen)
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
