package pebblestore

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
)

// Log makes the batches of a store durable outside of its files, in place of the engine's
// write-ahead log. Package slots implements it.
type Log interface {
	// Session is the only session that appends to the log; every batch stores it.
	Session() Session
	// Append adds a batch to the log. It is called for the numbers in ascending order without
	// gaps, by one goroutine at a time, and must not keep or change the batch. It blocks while
	// too much is waiting for the log. After an error nothing more is appended.
	Append(number uint64, batch []byte) error
	// Wait returns when all batches up to a number are durable. After an error, no further batch
	// becomes durable.
	Wait(number uint64) error
	// Ready returns an error that wraps queue.ErrUnavailable while the log does not acknowledge
	// batches.
	Ready() error
	// Space returns the bytes that the log has for calls, and how many of them are free; 0 if it has no bound.
	Space() (total, free int64)
}

// Session identifies one run of the only writer of a replicated log.
type Session [16]byte

// Position is the end of the part of a replicated log that a store contains.
type Position struct {
	// Batch is the number of the last batch, from 1; 0 for an empty store.
	Batch uint64
	// Session wrote that batch.
	Session Session
}

func (p Position) encode() []byte { return codec.AppendLogPosition(nil, p.Batch, p.Session) }

func decodePosition(v []byte) (p Position, err error) {
	p.Batch, p.Session, err = codec.DecodeLogPosition(v)
	return p, err
}

// readPosition returns the position of a database; zero for one without a replicated log.
func readPosition(db *pebble.DB) (Position, error) {
	v, closer, err := db.Get(codec.KeyLogPosition)
	if errors.Is(err, pebble.ErrNotFound) {
		return Position{}, nil
	}
	if err != nil {
		return Position{}, err
	}
	defer func() { _ = closer.Close() }()
	return decodePosition(v)
}

// ReadPosition returns the position of the closed store, or of the checkpoint, in dir.
func ReadPosition(fs vfs.FS, dir string) (p Position, err error) {
	db, err := pebble.Open(dir, &pebble.Options{FS: fs, ReadOnly: true, Logger: silentLogger{}})
	if errors.Is(err, syscall.EAGAIN) {
		err = inUseError{}
	}
	if err != nil {
		return p, fmt.Errorf("read the position of the store in %s: %w", dir, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	return readPosition(db)
}

type silentLogger struct{}

func (silentLogger) Infof(string, ...any)         {}
func (silentLogger) Errorf(string, ...any)        {}
func (silentLogger) Fatalf(f string, args ...any) { panic(fmt.Sprintf(f, args...)) }

// replicatedLog is the commitLog of a store whose log is outside of its files. Each batch gets
// the next number, and stores its own position: the tables of the store say at any time which
// prefix of the log they contain.
type replicatedLog struct {
	db      *pebble.DB
	log     Log
	flusher *flusher

	// mu keeps the order of the batches the same in the database and in the log.
	mu   sync.Mutex
	last Position
	// failed is the first error. The database may contain a batch that the log does not have,
	// so all later writes fail, too.
	failed error
	// appending is when the present Append began, in nanoseconds; 0 for none.
	appending atomic.Int64
}

// blockedAfter is the time after which an Append waits for the servers of the log.
const blockedAfter = 100 * time.Millisecond

func (l *replicatedLog) newCommit(size int) *pebble.Batch { return l.db.NewBatchWithSize(size) }

func (l *replicatedLog) apply(b *pebble.Batch) error {
	_, err := l.append(b)
	l.flusher.markUnsynced()
	return err
}

func (l *replicatedLog) submit(b *pebble.Batch) (wait func() error, err error) {
	if b.Count() == 0 {
		number := l.position().Batch
		return func() error { return l.log.Wait(number) }, nil
	}
	l.flusher.markSynced()
	number, err := l.append(b)
	return func() error { return l.log.Wait(number) }, err
}

// append applies a batch and appends it to the log as one step.
func (l *replicatedLog) append(b *pebble.Batch) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		return 0, l.failed
	}
	next := Position{l.last.Batch + 1, l.log.Session()}
	if err := b.Set(codec.KeyLogPosition, next.encode(), nil); err != nil {
		return 0, err
	}
	data := b.Repr() // Apply takes the data of a large batch from it, and does not change them.
	if l.failed = l.db.Apply(b, pebble.NoSync); l.failed != nil {
		return 0, l.failed
	}
	l.last = next
	l.appending.Store(time.Now().UnixNano())
	l.failed = l.log.Append(next.Batch, data)
	l.appending.Store(0)
	return next.Batch, l.failed
}

func (l *replicatedLog) sync() error {
	l.flusher.markSynced()
	return l.log.Wait(l.position().Batch)
}

func (l *replicatedLog) ready() error { return l.log.Ready() }

func (l *replicatedLog) space() (total, free int64) { return l.log.Space() }

func (l *replicatedLog) blocked() bool {
	since := l.appending.Load()
	return since != 0 && time.Since(time.Unix(0, since)) >= blockedAfter
}

func (l *replicatedLog) position() Position {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}

// openCommitLog chooses the commitLog. A store keeps the kind of its log: without its log the
// files of a replicated store lack the newest batches, and a log without the first batches of a
// store cannot restore it.
func (s *Store) openCommitLog() error {
	last, err := readPosition(s.db)
	if err != nil {
		return s.corruptf("its position in the replicated log: %w", err)
	}
	_, err = s.get(codec.KeyFormat)
	isNew := errors.Is(err, pebble.ErrNotFound)
	switch {
	case err != nil && !isNew:
		return err
	case s.o.Log == nil && last.Batch > 0:
		return errors.New("the store belongs to a replicated log; open it with that log")
	case s.o.Log != nil && last.Batch == 0 && !isNew:
		return errors.New("the store has no replicated log; use another directory")
	case s.o.Log != nil:
		s.commitLog = &replicatedLog{db: s.db, log: s.o.Log, flusher: &s.flusher, last: last}
	default:
		s.commitLog = &localLog{db: s.db, positions: &s.positions, flusher: &s.flusher, fatal: engineLogger{s}.Fatalf}
	}
	return nil
}

// LogPosition returns the last batch that the store applied; zero without a replicated log.
func (s *Store) LogPosition() Position {
	if l, ok := s.commitLog.(*replicatedLog); ok {
		return l.position()
	}
	return Position{}
}
