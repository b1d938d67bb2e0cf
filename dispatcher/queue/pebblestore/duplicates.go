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
)

// duplicates remembers the messageIds of the window. They are on disk in
// buckets of time that are dropped whole, written in the same batch as their
// messages. A filter per bucket spares the look at the disk for all but one in a
// hundred messages that are no duplicates; a bucket whose filter did not fit the
// memory, or is not rebuilt yet after a start, is looked up on disk.
//
// The committer owns it; mu is for the rebuilding of filters.
type duplicates struct {
	s     *Store
	width int64 // Milliseconds; a window has at most five buckets.

	mu      sync.Mutex
	buckets []*bucket // By start; the last one takes new ids.
	memory  int64     // Of all filters.

	now   int64
	group map[hash]struct{} // Ids of the batch that is being made.
	key   []byte
}

// bucket holds ids from start to the start of the next one.
type bucket struct {
	start    int64
	filters  []*filter
	complete bool // Every id of the bucket is in its filters.
	lost     bool // Its filters had to go: it never gets new ones.
}

const maxGroupMap = 4096 // A map that grew beyond it is not kept.

func newDuplicates(s *Store) *duplicates {
	return &duplicates{s: s, width: max(s.o.DuplicateWindow.Milliseconds()/4, 1), group: map[hash]struct{}{}}
}

// load finds the buckets on disk.
func (d *duplicates) load() error {
	if d.s.o.DuplicateWindow <= 0 {
		return d.s.db.DeleteRange([]byte{prefixDuplicate}, []byte{prefixDuplicate + 1}, pebble.NoSync)
	}
	it, err := d.s.db.NewIter(&pebble.IterOptions{LowerBound: []byte{prefixDuplicate}, UpperBound: []byte{prefixDuplicate + 1}})
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }()
	for ok := it.First(); ok; {
		if len(it.Key()) != 25 {
			return d.s.corruptf("the key of a messageId is malformed")
		}
		start := number(it.Key(), 0)
		d.buckets = append(d.buckets, &bucket{start: int64(start)})
		ok = it.SeekGE(after(prefixDuplicate, start))
	}
	return it.Error()
}

// begin prepares for a batch that is committed at now.
func (d *duplicates) begin(b *pebble.Batch, now int64) {
	if d.s.o.DuplicateWindow <= 0 {
		return
	}
	if len(d.group) > maxGroupMap {
		d.group = map[hash]struct{}{}
	}
	clear(d.group)
	// A clock that was set back must not make ids live longer than their bucket.
	if n := len(d.buckets); n > 0 {
		now = max(now, d.buckets[n-1].start)
	}
	d.now = now
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.buckets); n == 0 || now >= d.buckets[n-1].start+d.width {
		d.buckets = append(d.buckets, &bucket{start: now, complete: true})
	}
	// A bucket is over when the last moment of it is out of the window.
	window := d.s.o.DuplicateWindow.Milliseconds()
	over := 0
	for over < len(d.buckets)-1 && d.buckets[over+1].start+window <= now {
		over++
	}
	if over > 0 {
		_ = b.DeleteRange([]byte{prefixDuplicate}, key(prefixDuplicate, uint64(d.buckets[over].start)), nil)
		for _, old := range d.buckets[:over] {
			d.memory -= old.size()
		}
		d.buckets = slices.Delete(d.buckets, 0, over)
	}
}

// seen tells whether an id was accepted within the window.
func (d *duplicates) seen(h *hash) (bool, error) {
	if _, ok := d.group[*h]; ok {
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
		d.key = append(appendKey(d.key[:0], prefixDuplicate, uint64(b.start)), h[:]...)
		v, closer, err := d.s.db.Get(d.key)
		if errors.Is(err, pebble.ErrNotFound) {
			continue
		}
		if err != nil {
			return false, err
		}
		if len(v) != 4 {
			_ = closer.Close()
			return false, fmt.Errorf("a messageId: %w", errMalformed)
		}
		at := b.start + int64(binary.BigEndian.Uint32(v))
		_ = closer.Close()
		if at > oldest {
			return true, nil
		}
	}
	return false, nil
}

// add remembers an id with the batch.
func (d *duplicates) add(b *pebble.Batch, h *hash) {
	d.group[*h] = struct{}{}
	d.mu.Lock()
	defer d.mu.Unlock()
	last := d.buckets[len(d.buckets)-1]
	op := b.SetDeferred(25, 4)
	copy(appendKey(op.Key[:0], prefixDuplicate, uint64(last.start))[9:25], h[:])
	binary.BigEndian.PutUint32(op.Value, uint32(d.now-last.start))
	_ = op.Finish()
	d.remember(last, h)
}

// remember puts an id into a bucket's filters. Beyond the bound on memory the
// oldest bucket loses its filters.
func (d *duplicates) remember(b *bucket, h *hash) {
	if b.lost {
		return
	}
	n := len(b.filters)
	if n == 0 || b.filters[n-1].room == 0 {
		size := firstFilter
		if n > 0 {
			size = 2 * len(b.filters[n-1].blocks)
		} else if i := slices.Index(d.buckets, b); i > 0 {
			// As many as the bucket before took.
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

// rebuild makes the filters of the buckets that were on disk at the start, in
// the background. It reads each bucket without holding up the committer.
func (d *duplicates) rebuild() {
	if d.s.o.DuplicateWindow <= 0 {
		return
	}
	d.mu.Lock()
	old := slices.Clone(d.buckets)
	d.mu.Unlock()
	slices.Reverse(old) // The youngest is asked longest, and the oldest loses its filters first.
	for _, b := range old {
		if err := d.rebuildBucket(b); err != nil {
			d.s.log.Error("reading the stored messageIds failed; looking them up on disk", "error", d.s.explain(err))
			return
		}
	}
}

func (d *duplicates) rebuildBucket(b *bucket) error {
	if b.complete {
		return nil
	}
	it, err := d.s.db.NewIter(&pebble.IterOptions{LowerBound: key(prefixDuplicate, uint64(b.start)), UpperBound: after(prefixDuplicate, uint64(b.start))})
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
			return nil // It is over meanwhile.
		}
		for i := 0; i < 256 && ok; i++ {
			if b.lost {
				d.mu.Unlock()
				return nil
			}
			var h hash
			copy(h[:], it.Key()[9:])
			d.remember(b, &h)
			ok = it.Next()
		}
		d.mu.Unlock()
		time.Sleep(50 * time.Microsecond) // The committer goes first.
	}
	if err := it.Error(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// Ids that were accepted meanwhile were put into the filters too.
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

// filter is a Bloom filter of blocks that fit a cache line, 16 bits and 8
// probes per id: about one in five hundred ids that it does not have passes it.
type filter struct {
	blocks []block
	room   int
}

type block [8]uint64

const (
	blockBytes   = 64
	idsPerBlock  = 32
	firstFilter  = 128 // Blocks: 8 KiB for 4096 ids.
	filterProbes = 8
)

func newFilter(blocks int) *filter {
	return &filter{blocks: make([]block, blocks), room: blocks * idsPerBlock}
}

// place gives the block and the bits within it. The hash is uniform, so parts of it are independent.
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
	f.room--
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
