package slotstest

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// Assignments is the stream of a directory in memory, with the faults LostRequest, LostAnswer and
// StaleRead. The methods may be called concurrently.
type Assignments struct {
	mu       sync.Mutex
	records  []slots.Assignment // Of the sequences from 1 on.
	number   int                // Of the stream, which changes when it is created again.
	noLeader bool
	deleted  bool
	faults   Faults
	rng      *rand.Rand
	appended chan struct{} // Closed at the next record.
}

var _ slots.Assignments = (*Assignments)(nil)

// NewAssignments returns an empty stream; rng may be nil without faults.
func NewAssignments(f Faults, rng *rand.Rand) *Assignments {
	return &Assignments{faults: f, rng: rng, appended: make(chan struct{})}
}

// SetLeader simulates an election: without a leader the stream accepts and returns no records.
func (s *Assignments) SetLeader(exists bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.noLeader = !exists
}

// Replace simulates that the stream was deleted and created again. Tails continue with the new one.
func (s *Assignments) Replace() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records = nil
	s.number++
}

// Restore simulates that the stream was deleted and restored from a backup with n records.
func (s *Assignments) Restore(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records = s.records[:n]
}

// SetDeleted simulates that the stream was deleted.
func (s *Assignments) SetDeleted(isDeleted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deleted = isDeleted
}

// Records returns the number of records.
func (s *Assignments) Records() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.records)
}

// happens reports whether a fault occurs. The caller holds mu.
func (s *Assignments) happens(probability float64) bool {
	return probability > 0 && s.rng.Float64() < probability
}

// err is the error of each request. The caller holds mu.
func (s *Assignments) err(ctx context.Context) error {
	switch {
	case s.noLeader:
		return ErrNoLeader
	case s.deleted:
		return slots.ErrNoStream
	}
	return ctx.Err()
}

// find returns the sequence of a namespace's record; 0 for none. The caller holds mu.
func (s *Assignments) find(namespace string, records []slots.Assignment) uint64 {
	for i, a := range records {
		if a.Namespace == namespace {
			return uint64(i) + 1
		}
	}
	return 0
}

// Create implements slots.Assignments.
func (s *Assignments) Create(ctx context.Context, a slots.Assignment) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.err(ctx); err != nil {
		return 0, err
	}
	if s.happens(s.faults.LostRequest) {
		return 0, ErrLost
	}
	if s.find(a.Namespace, s.records) > 0 {
		return 0, slots.ErrWrongSequence
	}
	s.records = append(s.records, a)
	close(s.appended)
	s.appended = make(chan struct{})
	if s.happens(s.faults.LostAnswer) {
		return 0, ErrLost
	}
	return uint64(len(s.records)), nil
}

// seen returns the records that a read sees. The caller holds mu.
func (s *Assignments) seen() []slots.Assignment {
	if n := len(s.records); n > 0 && s.happens(s.faults.StaleRead) {
		return s.records[:n-1]
	}
	return s.records
}

// Get implements slots.Assignments.
func (s *Assignments) Get(ctx context.Context, namespace string) (slots.Assignment, uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sequence := s.find(namespace, s.seen())
	if sequence == 0 {
		return slots.Assignment{}, 0, cmp.Or(s.err(ctx), slots.ErrNoRecord)
	}
	return s.records[sequence-1], sequence, s.err(ctx)
}

// State implements slots.Assignments.
func (s *Assignments) State(ctx context.Context) (slots.State, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slots.State{Last: uint64(len(s.seen())), ID: fmt.Sprint("directory ", s.number)}, s.err(ctx)
}

// Tail implements slots.Assignments.
func (s *Assignments) Tail(ctx context.Context, from uint64, fn func(uint64, slots.Assignment) error) error {
	for {
		s.mu.Lock()
		records, appended, err := s.records, s.appended, s.err(ctx)
		s.mu.Unlock()
		if err != nil {
			return err
		}
		for ; from <= uint64(len(records)); from++ {
			if err := fn(from, records[from-1]); err != nil {
				return err
			}
		}
		select {
		case <-appended:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
