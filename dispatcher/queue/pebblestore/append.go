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

var requests = sync.Pool{New: func() any { return &request{answer: make(chan struct{}, 1)} }}

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
	r := requests.Get().(*request)
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
	requests.Put(r)
}

func check(m *queue.Message) error {
	switch {
	case m.Source == "" || len(m.Source) > maxNameBytes:
		return fmt.Errorf("field Source has %d bytes; it must have 1 to %d", len(m.Source), maxNameBytes)
	case len(m.ID) > maxIDBytes:
		return fmt.Errorf("field ID has %d bytes; it may have %d", len(m.ID), maxIDBytes)
	case len(m.Body) > maxBodyBytes:
		return fmt.Errorf("field Body has %d bytes; it may have %d", len(m.Body), maxBodyBytes)
	case len(m.Skip) > maxSkips:
		return fmt.Errorf("field Skip has %d names; it may have %d", len(m.Skip), maxSkips)
	}
	return nil
}

// runCommitter is the one writer of the logs: it takes all requests that wait,
// gives their messages positions, and syncs them with one flush of the disk.
func (s *Store) runCommitter() {
	c := committer{s: s}
	for {
		select {
		case r := <-s.requests:
			c.gather(r)
			c.commit()
		case <-s.stop:
			return // Those that still wait cancel by themselves.
		}
	}
}

type committer struct {
	s       *Store
	group   []*request
	touched []*sourceLog
	last    *sourceLog // The log of the message before: most often the same.
	count   int
	bytes   int
	key     []byte
}

// gather takes requests until none waits or the group is large.
func (c *committer) gather(r *request) {
	c.group, c.count, c.bytes = c.group[:0], 0, 0
	for {
		if r.state.CompareAndSwap(waiting, taken) {
			c.group = append(c.group, r)
			c.count += len(r.messages)
			c.bytes += r.bytes
		}
		if c.count >= maxGroupMessages || c.bytes >= maxGroupBytes {
			return
		}
		select {
		case r = <-c.s.requests:
		default:
			return
		}
	}
}

// commit writes the group, syncs it, shows it to readers and answers.
func (c *committer) commit() {
	s := c.s
	started := time.Now()
	now := s.o.Now().UnixMilli()
	b := s.db.NewBatchWithSize(c.bytes + 128*c.count + 64)
	s.duplicates.begin(b, now)
	for _, r := range c.group {
		r.err = c.add(b, r)
	}
	var err error
	if b.Count() > 0 {
		for _, l := range c.touched {
			c.key = appendKey(c.key[:0], prefixHead, l.number)
			op := b.SetDeferred(len(c.key), 16)
			copy(op.Key, c.key)
			binary.BigEndian.PutUint64(op.Value, l.head)
			binary.BigEndian.PutUint64(op.Value[8:], l.bytes)
			_ = op.Finish()
		}
		s.flusher.syncing()
		err = s.db.Apply(b, pebble.Sync)
		s.disk.wrote(c.bytes)
	}
	_ = b.Close()
	for _, l := range c.touched {
		if err != nil {
			l.head, l.bytes = l.durable.Load(), l.durableBytes.Load()
			continue
		}
		l.durableBytes.Store(l.bytes)
		l.durable.Store(l.head)
	}
	for i, r := range c.group {
		if err != nil && r.err == nil {
			r.err = fmt.Errorf("append to the queue: %w", err)
		}
		r.answer <- struct{}{}
		c.group[i] = nil
	}
	s.metrics.committed(c.count, time.Since(started))
	for _, l := range c.touched {
		l.eachLane(func(l *lane) {
			if l.hungry.Load() && l.hungry.CompareAndSwap(true, false) {
				s.notify(l.id)
			}
		})
	}
	c.touched, c.last = c.touched[:0], nil
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
	if quota := s.o.MaxBytesPerSource; quota > 0 {
		if !c.fits(r, uint64(quota)) {
			return queue.ErrFull
		}
	}
	for i := range r.messages {
		m := &r.messages[i]
		l, _ := c.logFor(m.Source)
		// A redelivery repeats its messageId on purpose.
		if s.o.DuplicateWindow > 0 && m.Only == "" {
			dup, err := s.duplicates.seen(&r.hashes[i])
			if err != nil {
				// Better twice than not at all.
				s.log.Error("looking for a duplicate failed; the message is taken", "source", m.Source, "error", err)
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
		if l.head == l.durable.Load() {
			c.touched = append(c.touched, l)
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
