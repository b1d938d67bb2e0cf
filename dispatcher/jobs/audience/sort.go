package audience

import (
	"bytes"
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	// arenaBytes and arenaRecords bound the memory of the sorter.
	arenaBytes   = 8 << 20
	arenaRecords = 256 << 10
	// fanIn is how many runs are merged at once; each needs bufferBytes.
	fanIn = 64
)

// sorter sorts any number of records in constant memory: it sorts records in the arena, writes them
// to files (runs) and merges the runs at the end. Of records with the same id it keeps the last
// one.
type sorter struct {
	fs    vfs.FS
	dir   string
	arena []byte
	spans []span
	// runs are files, oldest first.
	runs  []string
	next  int
	bytes int64
	// maxBytes bounds the bytes written for the input; see errTooMuch. watched may end a stream
	// whose records are written again.
	maxBytes int64
	watched  func(stream) stream
	// limits; they equal arenaBytes, arenaRecords and fanIn except in tests.
	maxArena, maxSpans, maxRuns int
}

// span is a record in the arena.
type span struct {
	from, id, value uint32 // offset, and lengths
	op              op
}

var errTooMuch = errors.New("the members need more disk space than a sync may use")

func newSorter(fs vfs.FS, dir string, maxBytes int64, watched func(stream) stream) *sorter {
	return &sorter{fs: fs, dir: dir, maxBytes: maxBytes, watched: watched, maxArena: arenaBytes, maxSpans: arenaRecords, maxRuns: fanIn}
}

func (s *sorter) add(r record) error {
	if len(s.arena)+len(r.id)+len(r.value) > s.maxArena || len(s.spans) == s.maxSpans {
		if err := s.spill(); err != nil {
			return err
		}
	}
	if s.arena == nil {
		s.arena = make([]byte, 0, s.maxArena)
	}
	s.spans = append(s.spans, span{from: uint32(len(s.arena)), id: uint32(len(r.id)), value: uint32(len(r.value)), op: r.op})
	s.arena = append(append(s.arena, r.id...), r.value...)
	return nil
}

func (s *sorter) record(p span) record {
	id, end := p.from+p.id, p.from+p.id+p.value
	return record{op: p.op, id: s.arena[p.from:id:id], value: s.arena[id:end:end]}
}

// order sorts the arena and keeps the last of equal ids.
func (s *sorter) order() {
	slices.SortFunc(s.spans, func(a, b span) int {
		// Later records sort first, because Compact keeps the first of equal ones.
		return cmp.Or(bytes.Compare(s.arena[a.from:a.from+a.id], s.arena[b.from:b.from+b.id]), cmp.Compare(b.from, a.from))
	})
	s.spans = slices.CompactFunc(s.spans, func(a, b span) bool {
		return bytes.Equal(s.arena[a.from:a.from+a.id], s.arena[b.from:b.from+b.id])
	})
}

func (s *sorter) path() string {
	s.next++
	return s.fs.PathJoin(s.dir, fmt.Sprintf("run-%06d", s.next))
}

// spill writes the arena to a run.
func (s *sorter) spill() error {
	if len(s.spans) == 0 {
		return nil
	}
	s.order()
	at := 0
	path, written, err := s.write(func() (record, error) {
		if at == len(s.spans) {
			return record{}, io.EOF
		}
		at++
		return s.record(s.spans[at-1]), nil
	})
	if err != nil {
		return err
	}
	s.runs, s.bytes = append(s.runs, path), s.bytes+written
	s.arena, s.spans = s.arena[:0], s.spans[:0]
	if s.bytes > s.maxBytes {
		return errTooMuch
	}
	return nil
}

func (s *sorter) write(records stream) (path string, written int64, err error) {
	path = s.path()
	w, err := create(s.fs, path)
	if err != nil {
		return "", 0, err
	}
	for {
		r, err := records()
		if errors.Is(err, io.EOF) {
			return path, w.bytes, w.finish(false)
		}
		if err == nil {
			err = w.add(r)
		}
		if err != nil {
			w.abandon()
			return "", 0, err
		}
	}
}

// sorted ends the input and returns its records in order. done releases the stream's files.
func (s *sorter) sorted() (records stream, done func(), err error) {
	if err := s.spill(); err != nil {
		return nil, nil, err
	}
	s.arena, s.spans = nil, nil
	// Neighbors are merged, so that runs keep their order.
	for len(s.runs) > s.maxRuns {
		var merged []string
		for group := range slices.Chunk(s.runs, s.maxRuns) {
			records, done, err := merge(s.fs, group)
			if err != nil {
				return nil, nil, err
			}
			path, _, err := s.write(s.watched(records))
			done()
			if err != nil {
				return nil, nil, err
			}
			for _, run := range group {
				_ = s.fs.Remove(run)
			}
			merged = append(merged, path)
		}
		s.runs = merged
	}
	return merge(s.fs, s.runs)
}

// merge merges sorted runs; of equal ids it keeps the one in the last run.
func merge(fs vfs.FS, runs []string) (stream, func(), error) {
	m := &merger{}
	done := func() {
		for _, r := range m.open {
			r.close()
		}
	}
	for i, path := range runs {
		r, err := open(fs, path)
		if err != nil {
			done()
			return nil, nil, err
		}
		m.open = append(m.open, r)
		first, err := r.next()
		switch {
		case errors.Is(err, io.EOF):
		case err != nil:
			done()
			return nil, nil, err
		default:
			heap.Push(m, head{record: first, reader: r, run: i})
		}
	}
	return m.next, done, nil
}

// head is a run with its current record.
type head struct {
	record
	reader *reader
	run    int
}

// merger is a heap of runs.
type merger struct {
	open  []*reader
	heads []head
	// taken: the first head's record was returned and may be replaced.
	taken bool
	last  []byte
	some  bool
}

func (m *merger) Len() int { return len(m.heads) }
func (m *merger) Less(i, j int) bool {
	if c := bytes.Compare(m.heads[i].id, m.heads[j].id); c != 0 {
		return c < 0
	}
	return m.heads[i].run > m.heads[j].run
}
func (m *merger) Swap(i, j int) { m.heads[i], m.heads[j] = m.heads[j], m.heads[i] }
func (m *merger) Push(x any)    { m.heads = append(m.heads, x.(head)) }
func (m *merger) Pop() any {
	last := m.heads[len(m.heads)-1]
	m.heads = m.heads[:len(m.heads)-1]
	return last
}

// next implements stream.
func (m *merger) next() (record, error) {
	for {
		if m.taken {
			m.taken = false
			r, err := m.heads[0].reader.next()
			switch {
			case errors.Is(err, io.EOF):
				heap.Pop(m)
			case err != nil:
				return record{}, err
			default:
				m.heads[0].record = r
				heap.Fix(m, 0)
			}
		}
		if len(m.heads) == 0 {
			return record{}, io.EOF
		}
		m.taken = true
		h := &m.heads[0]
		if m.some && bytes.Equal(h.id, m.last) {
			continue
		}
		m.last, m.some = append(m.last[:0], h.id...), true
		return h.record, nil
	}
}
