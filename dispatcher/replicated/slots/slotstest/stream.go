// Package slotstest simulates the stream of a slot in memory, with the faults of a replicated log:
// lost requests and answers, late requests, stale reads, pauses, elections, a forgotten duplicate
// window and a full stream. It is used by tests only.
package slotstest

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// Stream is a stream in memory. The methods may be called concurrently.
type Stream struct {
	mu       sync.Mutex
	id       string
	replaced []string
	records  [][]byte // Of the sequences from first on; nil for a lost one.
	first    uint64
	ids      map[string]uint64
	bytes    int64
	maxBytes int64
	noLeader bool
	appended chan struct{} // Closed at the next record.
	// unread are the records that only Get returns.
	unread map[uint64]bool
}

// NewStream returns an empty stream that accepts maxBytes; 0 for no bound.
func NewStream(maxBytes int64) *Stream {
	return &Stream{id: crand.Text(), first: 1, ids: map[string]uint64{}, maxBytes: maxBytes, appended: make(chan struct{})}
}

// Clone returns an independent stream with the same records.
func (s *Stream) Clone() *Stream {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &Stream{id: s.id, replaced: slices.Clone(s.replaced), records: slices.Clone(s.records), first: s.first, ids: maps.Clone(s.ids),
		bytes: s.bytes, maxBytes: s.maxBytes, appended: make(chan struct{})}
}

// SetMaxBytes changes the size at which the stream accepts no more records; 0 for no bound.
func (s *Stream) SetMaxBytes(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.maxBytes = n
}

// Lose removes records, as a server does whose disk has damaged them. The last record must remain.
func (s *Stream) Lose(from, to uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ; from <= to; from++ {
		s.bytes -= int64(len(s.records[from-s.first]))
		s.records[from-s.first] = nil
	}
	s.trimTo(s.first)
}

// LoseAtReaders hides records from Tail, as a server with a consumer does whose disk has damaged them. Get asks
// another server.
func (s *Stream) LoseAtReaders(from, to uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unread = map[uint64]bool{}
	for ; from <= to; from++ {
		s.unread[from] = true
	}
}

// Rename gives the stream a new ID, as slots.Remote.Rename does.
func (s *Stream) Rename(_ context.Context, replaced ...string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replaced = append(append(s.replaced, replaced...), s.id)
	s.id = crand.Text()
	return nil
}

// Replace simulates that the stream was deleted and created again.
func (s *Stream) Replace() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.id, s.replaced = crand.Text(), nil
	s.records, s.first, s.bytes = nil, 1, 0
	clear(s.ids)
}

// SetLeader simulates an election: without a leader the stream accepts and returns no records.
func (s *Stream) SetLeader(exists bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noLeader = !exists
}

// errNoLeader returns ErrNoLeader during an election.
func (s *Stream) errNoLeader() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.noLeader {
		return ErrNoLeader
	}
	return nil
}

// last is the sequence of the last record. The caller holds mu.
func (s *Stream) last() uint64 { return s.first + uint64(len(s.records)) - 1 }

func (s *Stream) publish(expected uint64, id string, record []byte) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// NATS compares the id first: a repeated record is a duplicate, whatever follows the first one.
	if sequence, ok := s.ids[id]; ok {
		return sequence, nil
	}
	if expected != s.last() {
		return 0, slots.ErrWrongSequence
	}
	if s.maxBytes > 0 && s.bytes+int64(len(record)) > s.maxBytes {
		return 0, slots.ErrNoSpace
	}
	s.records = append(s.records, slices.Clone(record))
	s.bytes += int64(len(record))
	s.ids[id] = s.last()
	close(s.appended)
	s.appended = make(chan struct{})
	return s.last(), nil
}

// get returns the first record from a sequence on, as a reader sees it that does not know the
// newest records. appended is closed at the next record.
func (s *Stream) get(from, unseen uint64) (e slots.Entry, appended <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	from = max(from, s.first)
	for from <= s.last() && s.records[from-s.first] == nil {
		from++
	}
	if from+unseen > s.last() {
		return e, s.appended, slots.ErrNoRecord
	}
	return slots.Entry{Sequence: from, Record: slices.Clone(s.records[from-s.first])}, nil, nil
}

// read is get for Tail.
func (s *Stream) read(from uint64) (e slots.Entry, appended <-chan struct{}, err error) {
	for {
		e, appended, err = s.get(from, 0)
		s.mu.Lock()
		isUnread := s.unread[e.Sequence]
		s.mu.Unlock()
		if err != nil || !isUnread {
			return e, appended, err
		}
		from = e.Sequence + 1
	}
}

func (s *Stream) state(unseen uint64) slots.State {
	s.mu.Lock()
	defer s.mu.Unlock()
	missing := uint64(0)
	for _, r := range s.records {
		if r == nil {
			missing++
		}
	}
	return slots.State{First: s.first, Last: max(s.last()-min(unseen, s.last()), s.first-1), Missing: missing, Bytes: s.bytes,
		MaxBytes: s.maxBytes, ID: s.id, Replaced: slices.Clone(s.replaced)}
}

func (s *Stream) trim(before uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trimTo(before)
}

// trimTo removes the records before a sequence, and lost ones at the start. The caller holds mu.
func (s *Stream) trimTo(before uint64) {
	for len(s.records) > 0 && (s.first < before || s.records[0] == nil) {
		s.bytes -= int64(len(s.records[0]))
		s.records = s.records[1:]
		s.first++
	}
}

// forgetIDs simulates the end of the duplicate window.
func (s *Stream) forgetIDs() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.ids)
}

// Faults of a Log, as the probability of each at each call. The zero value has none.
type Faults struct {
	// LostRequest: a request has no effect, and no answer.
	LostRequest float64
	// LostAnswer: a request has its effect, and no answer.
	LostAnswer float64
	// LateRequest: a request has no answer, and has its effect up to ten seconds later.
	LateRequest float64
	// StaleRead: a read does not see up to three of the newest records.
	StaleRead float64
	// Pause: the caller is stopped for up to ten seconds before or after the effect.
	Pause float64
	// ForgottenIDs: the stream forgets the ids of its records.
	ForgottenIDs float64
}

// ErrLost reports a request without an answer; ErrNoLeader an election.
var (
	ErrLost     = errors.New("no answer")
	ErrNoLeader = errors.New("no responders")
)

// Log is the access of one client to a Stream.
type Log struct {
	stream *Stream
	faults Faults
	// OnPublish, when not nil, is called before each request to publish.
	OnPublish func()

	mu  sync.Mutex
	rng *rand.Rand
}

var _ slots.Log = (*Log)(nil)

// NewLog returns a Log without faults.
func NewLog(s *Stream) *Log { return &Log{stream: s} }

// NewFaultyLog returns a Log with faults at random.
func NewFaultyLog(s *Stream, f Faults, rng *rand.Rand) *Log {
	return &Log{stream: s, faults: f, rng: rng}
}

// happens reports whether a fault occurs.
func (l *Log) happens(probability float64) bool {
	if probability == 0 {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rng.Float64() < probability
}

// upTo returns a random number from 1 to n.
func (l *Log) upTo(n int64) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return 1 + l.rng.Int64N(n)
}

func (l *Log) pause() {
	if l.happens(l.faults.Pause) {
		time.Sleep(time.Duration(l.upTo(int64(10 * time.Second))))
	}
}

// unseen is the number of the newest records that a read does not see.
func (l *Log) unseen() uint64 {
	if l.happens(l.faults.StaleRead) {
		return uint64(l.upTo(3))
	}
	return 0
}

// Publish implements slots.Log.
func (l *Log) Publish(ctx context.Context, expected uint64, id string, record []byte) (uint64, error) {
	if l.OnPublish != nil {
		l.OnPublish()
	}
	l.pause()
	if l.happens(l.faults.ForgottenIDs) {
		l.stream.forgetIDs()
	}
	if err := cmp.Or(ctx.Err(), l.stream.errNoLeader()); err != nil {
		return 0, err
	}
	switch {
	case l.happens(l.faults.LostRequest):
		return 0, ErrLost
	case l.happens(l.faults.LateRequest):
		late, record := time.Duration(l.upTo(int64(10*time.Second))), slices.Clone(record)
		time.AfterFunc(late, func() { _, _ = l.stream.publish(expected, id, record) })
		return 0, ErrLost
	}
	sequence, err := l.stream.publish(expected, id, record)
	l.pause()
	if l.happens(l.faults.LostAnswer) {
		return 0, fmt.Errorf("%w to record %s", ErrLost, id)
	}
	return sequence, err
}

// Get implements slots.Log.
func (l *Log) Get(ctx context.Context, from uint64) (slots.Entry, error) {
	l.pause()
	if l.happens(l.faults.LostAnswer) {
		return slots.Entry{}, ErrLost
	}
	if err := cmp.Or(ctx.Err(), l.stream.errNoLeader()); err != nil {
		return slots.Entry{}, err
	}
	e, _, err := l.stream.get(from, l.unseen())
	return e, err
}

// Tail implements slots.Log.
func (l *Log) Tail(ctx context.Context, from uint64, fn func(slots.Entry) error) error {
	for {
		l.pause()
		e, appended, err := l.stream.read(from)
		if err != nil {
			select {
			case <-appended:
			case <-ctx.Done():
				return ctx.Err()
			}
			continue
		}
		if err := fn(e); err != nil {
			return err
		}
		from = e.Sequence + 1
	}
}

// State implements slots.Log.
func (l *Log) State(ctx context.Context) (slots.State, error) {
	l.pause()
	return l.stream.state(l.unseen()), cmp.Or(ctx.Err(), l.stream.errNoLeader())
}

// Trim implements slots.Log.
func (l *Log) Trim(ctx context.Context, before uint64) error {
	if err := cmp.Or(ctx.Err(), l.stream.errNoLeader()); err != nil {
		return err
	}
	l.stream.trim(before)
	return nil
}
