package pebblestore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// duplicates stores the messageIds of the duplicate window. They are written in the same batch
// as their messages, in buckets of time that are deleted as a whole. A filter per bucket avoids
// the disk read for most messages that are no duplicates. A bucket without a complete filter,
// because of DuplicateMemory or before it is rebuilt after a start, is looked up on disk.
//
// The committer owns it; mu is for the goroutine that rebuilds filters.
type duplicates struct {
	s     *Store
	width int64 // Milliseconds; a window has at most five buckets.

	mu      sync.Mutex
	buckets []*bucket // By start; new IDs are added to the last one.
	memory  int64     // Bytes of all filters.

	now   int64
	batch map[hash]struct{} // IDs of the current batch.
	key   []byte
}

// bucket holds the IDs from start to the start of the next bucket.
type bucket struct {
	start    int64
	filters  []*filter
	complete bool // Every ID of the bucket is in its filters.
	lost     bool // Its filters were removed to save memory; it gets no new ones.
}

const maxBatchMap = 4096 // A larger map is not reused.

func newDuplicates(s *Store) *duplicates {
	return &duplicates{s: s, width: max(s.o.DuplicateWindow.Milliseconds()/4, 1), batch: map[hash]struct{}{}}
}

// load finds the buckets on disk.
func (d *duplicates) load() error {
	if d.s.o.DuplicateWindow <= 0 {
		b := d.s.db.NewBatch()
		_ = b.DeleteRange([]byte{codec.PrefixDuplicate}, []byte{codec.PrefixDuplicate + 1}, nil)
		return d.s.apply(b)
	}
	it, err := d.s.db.NewIter(&pebble.IterOptions{LowerBound: []byte{codec.PrefixDuplicate}, UpperBound: []byte{codec.PrefixDuplicate + 1}})
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }()
	for ok := it.First(); ok; {
		if len(it.Key()) != 25 {
			return d.s.corruptf("the key of a messageId is malformed")
		}
		start := codec.Number(it.Key(), 0)
		d.buckets = append(d.buckets, &bucket{start: int64(start)})
		ok = it.SeekGE(codec.After(codec.PrefixDuplicate, start))
	}
	return it.Error()
}

// begin prepares for a batch that is committed at now.
func (d *duplicates) begin(b *pebble.Batch, now int64) {
	if d.s.o.DuplicateWindow <= 0 {
		return
	}
	if len(d.batch) > maxBatchMap {
		d.batch = map[hash]struct{}{}
	}
	clear(d.batch)
	// A clock that was set back must not keep IDs longer than their bucket.
	if n := len(d.buckets); n > 0 {
		now = max(now, d.buckets[n-1].start)
	}
	d.now = now
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.buckets); n == 0 || now >= d.buckets[n-1].start+d.width {
		d.buckets = append(d.buckets, &bucket{start: now, complete: true})
	}
	// A bucket has expired when all its IDs are older than the window.
	window := d.s.o.DuplicateWindow.Milliseconds()
	over := 0
	for over < len(d.buckets)-1 && d.buckets[over+1].start+window <= now {
		over++
	}
	if over > 0 {
		_ = b.DeleteRange([]byte{codec.PrefixDuplicate}, codec.Key(codec.PrefixDuplicate, uint64(d.buckets[over].start)), nil)
		for _, old := range d.buckets[:over] {
			d.memory -= old.size()
		}
		d.buckets = slices.Delete(d.buckets, 0, over)
	}
}

// contains reports whether an ID was accepted within the window.
func (d *duplicates) contains(h *hash) (bool, error) {
	if _, ok := d.batch[*h]; ok {
		return true, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	oldest := d.now - d.s.o.DuplicateWindow.Milliseconds()
	for i := len(d.buckets) - 1; i >= 0; i-- {
		b := d.buckets[i]
		if !b.mayHave(h) {
			continue
		}
		d.key = append(codec.AppendKey(d.key[:0], codec.PrefixDuplicate, uint64(b.start)), h[:]...)
		v, closer, err := d.s.db.Get(d.key)
		if errors.Is(err, pebble.ErrNotFound) {
			continue
		}
		if err != nil {
			return false, err
		}
		if len(v) != 4 {
			_ = closer.Close()
			return false, fmt.Errorf("a messageId: %w", codec.ErrMalformed)
		}
		at := b.start + int64(binary.BigEndian.Uint32(v))
		_ = closer.Close()
		if at > oldest {
			return true, nil
		}
	}
	return false, nil
}

// add adds an ID with the batch.
func (d *duplicates) add(b *pebble.Batch, h *hash) {
	d.batch[*h] = struct{}{}
	d.mu.Lock()
	defer d.mu.Unlock()
	last := d.buckets[len(d.buckets)-1]
	op := b.SetDeferred(25, 4)
	copy(codec.AppendKey(op.Key[:0], codec.PrefixDuplicate, uint64(last.start))[9:25], h[:])
	binary.BigEndian.PutUint32(op.Value, uint32(d.now-last.start))
	_ = op.Finish()
	d.addToFilters(last, h)
}

// addToFilters adds an ID to a bucket's filters. Beyond DuplicateMemory the oldest bucket loses
// its filters.
func (d *duplicates) addToFilters(b *bucket, h *hash) {
	if b.lost {
		return
	}
	n := len(b.filters)
	if n == 0 || b.filters[n-1].free == 0 {
		size := firstFilter
		if n > 0 {
			size = 2 * len(b.filters[n-1].blocks)
		} else if i := slices.Index(d.buckets, b); i > 0 {
			// The bucket gets as many blocks as the previous one.
			for _, f := range d.buckets[i-1].filters {
				size = max(size, len(f.blocks))
			}
		}
		for _, old := range d.buckets {
			if d.memory+int64(size)*blockBytes <= d.s.o.DuplicateMemory {
				break
			}
			d.memory -= old.size()
			old.filters, old.complete, old.lost = nil, false, true
			if old == b {
				return
			}
		}
		f := newFilter(size)
		d.memory += int64(len(f.blocks)) * blockBytes
		b.filters = append(b.filters, f)
		n = len(b.filters)
	}
	b.filters[n-1].add(h)
}

// rebuild builds the filters of the buckets on disk after a start, in the background and
// without blocking the committer for long.
func (d *duplicates) rebuild() {
	if d.s.o.DuplicateWindow <= 0 {
		return
	}
	d.mu.Lock()
	old := slices.Clone(d.buckets)
	d.mu.Unlock()
	slices.Reverse(old) // The youngest bucket is used longest, and the oldest loses its filters first.
	for _, b := range old {
		if err := d.rebuildBucket(b); err != nil {
			d.s.log.Error("rebuild of duplicate filters failed; looking up messageIds on disk", "error", d.s.explain(err))
			return
		}
	}
}

func (d *duplicates) rebuildBucket(b *bucket) error {
	if b.complete {
		return nil
	}
	it, err := d.s.db.NewIter(&pebble.IterOptions{LowerBound: codec.Key(codec.PrefixDuplicate, uint64(b.start)),
		UpperBound: codec.After(codec.PrefixDuplicate, uint64(b.start))})
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }()
	ok := it.First()
	for ok {
		select {
		case <-d.s.stop:
			return nil
		default:
		}
		d.mu.Lock()
		if !slices.Contains(d.buckets, b) {
			d.mu.Unlock()
			return nil // The bucket has expired.
		}
		for i := 0; i < 256 && ok; i++ {
			if b.lost {
				d.mu.Unlock()
				return nil
			}
			var h hash
			copy(h[:], it.Key()[9:])
			d.addToFilters(b, &h)
			ok = it.Next()
		}
		d.mu.Unlock()
		time.Sleep(50 * time.Microsecond) // The committer has priority.
	}
	if err := it.Error(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// The committer added the IDs that were accepted meanwhile.
	b.complete = !b.lost
	return nil
}

func (b *bucket) mayHave(h *hash) bool {
	if !b.complete {
		return true
	}
	for _, f := range b.filters {
		if f.mayHave(h) {
			return true
		}
	}
	return false
}

func (b *bucket) size() int64 {
	var n int64
	for _, f := range b.filters {
		n += int64(len(f.blocks)) * blockBytes
	}
	return n
}

// filter is a Bloom filter of blocks that fit a cache line, with 16 bits and 8 probes per ID:
// about one in 500 absent IDs is reported as present.
type filter struct {
	blocks []block
	free   int
}

type block [8]uint64

const (
	blockBytes   = 64
	idsPerBlock  = 32
	firstFilter  = 128 // Blocks: 8 KiB for 4096 IDs.
	filterProbes = 8
)

func newFilter(blocks int) *filter {
	return &filter{blocks: make([]block, blocks), free: blocks * idsPerBlock}
}

// place returns the block, and the bits within it. The hash is uniform, so its parts are
// independent.
func (f *filter) place(h *hash) (*block, uint64) {
	hi, _ := bits.Mul64(binary.LittleEndian.Uint64(h[:8]), uint64(len(f.blocks)))
	return &f.blocks[hi], binary.LittleEndian.Uint64(h[8:])
}

func (f *filter) add(h *hash) {
	b, x := f.place(h)
	for range filterProbes {
		b[x&7] |= 1 << (x >> 3 & 63)
		x = bits.RotateLeft64(x, -9)*0x9E3779B97F4A7C15 + 1
	}
	f.free--
}

func (f *filter) mayHave(h *hash) bool {
	b, x := f.place(h)
	for range filterProbes {
		if b[x&7]&(1<<(x>>3&63)) == 0 {
			return false
		}
		x = bits.RotateLeft64(x, -9)*0x9E3779B97F4A7C15 + 1
	}
	return true
}
