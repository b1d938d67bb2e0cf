package slotstest

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"maps"
	"slices"
	"sync"

	"github.com/posthorn/posthorn/dispatcher/replicated/slots"
)

// ObjectStore is an object store in memory. The methods may be called concurrently.
type ObjectStore struct {
	mu       sync.Mutex
	objects  map[string][]byte
	bytes    int64
	maxBytes int64
	puts     int
}

// NewObjectStore returns an empty object store that accepts maxBytes; 0 for no bound.
func NewObjectStore(maxBytes int64) *ObjectStore {
	return &ObjectStore{objects: map[string][]byte{}, maxBytes: maxBytes}
}

// Clone returns an independent object store with the same objects.
func (s *ObjectStore) Clone() *ObjectStore {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &ObjectStore{objects: maps.Clone(s.objects), bytes: s.bytes, maxBytes: s.maxBytes, puts: s.puts}
}

var _ slots.Objects = (*ObjectStore)(nil)

// Put implements slots.Objects.
func (s *ObjectStore) Put(ctx context.Context, name string, data io.Reader) error {
	all, err := io.ReadAll(data)
	if err := cmp.Or(err, ctx.Err()); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.puts++
	size := s.bytes + int64(len(all)-len(s.objects[name]))
	if s.maxBytes > 0 && size > s.maxBytes {
		return slots.ErrNoSpace
	}
	s.bytes, s.objects[name] = size, all
	return nil
}

// Get implements slots.Objects.
func (s *ObjectStore) Get(ctx context.Context, name string) (io.ReadCloser, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	data, ok := s.objects[name]
	if !ok {
		return nil, cmp.Or(ctx.Err(), slots.ErrNoObject)
	}
	return io.NopCloser(bytes.NewReader(data)), ctx.Err()
}

// List implements slots.Objects.
func (s *ObjectStore) List(ctx context.Context) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.objects)), ctx.Err()
}

// Missing implements slots.Objects.
func (s *ObjectStore) Missing(ctx context.Context, names []string) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { _, ok := s.objects[name]; return ok }), ctx.Err()
}

// Delete implements slots.Objects.
func (s *ObjectStore) Delete(ctx context.Context, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytes -= int64(len(s.objects[name]))
	delete(s.objects, name)
	return nil
}

// SetMaxBytes changes the size at which the store accepts no more objects; 0 for no bound.
func (s *ObjectStore) SetMaxBytes(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.maxBytes = n
}

// Puts returns the number of stored objects, also of those that were deleted or replaced.
func (s *ObjectStore) Puts() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.puts
}
