// Package pebblestore is the embedded engine of queue.Store: a log per Source, a cursor per
// lane and a retry index in one Pebble database. It does not know retry policies, circuits or
// HTTP.
//
// One committer writes all waiting messages into one batch and syncs it once; readers see a
// message only after that sync. A lane's changes are written without a sync of their own, each
// time together with the whole state of the lane. So a crash can lose the last changes of a
// lane, but its position and its ledger always agree.
//
// The main types are Store, sourceLog (the messages of one Source), lane (a cursor in a log
// with its retries), group (the shared state of the lanes of one destination) and destination
// (the dead letters).
//
// Locks, each acquired before those below it:
//
//   - Store.gate: the database is closed
//   - disk.maintaining: one pass frees space at a time
//   - Store.registry: lanes are opened and dropped, and numbers assigned
//   - flusher.writing: the states of changed lanes are written
//   - lane.leasing: one lease of a lane at a time
//   - lane.mu, which is group.mu for the lanes of a group: the lane's state, also while it is written. Only flushSome
//     has more than one
//   - destination.mu: the dead letters
//   - Store.mu: the maps, the holders of ledgers and the ledgers of dropped lanes
//   - replicatedLog.mu: the order of batches
//
// The other mutexes are acquired last. The store calls notify without a lock, and its caller holds none.
package pebblestore

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/codec"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/fulldisk"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
	"github.com/posthorn/posthorn/internal/durable"
)

var _ queue.Store = (*Store)(nil)

// Store is a queue.Store on the local disk. One process at a time can open it.
type Store struct {
	o   Options
	log *slog.Logger
	dir string
	fs  *fulldisk.FS
	db  *pebble.DB
	// commitLog applies all writes to db. withoutWAL: the engine writes no log of its own.
	commitLog  commitLog
	withoutWAL bool
	// cache is the block cache of db and has the same lifetime; nil with Options.Shared.
	cache *pebble.Cache
	// lock excludes other processes from before the files are checked until after they are
	// closed.
	lock     *pebble.Lock
	accepted integrity.AcceptedFile
	// positions are the synced lengths of the engine's logs and manifests.
	positions integrity.Positions
	// positionsSynced is the time of the last sync of the position files; only maintenance uses
	// it.
	positionsSynced time.Time
	flushed         atomic.Bool // The engine flushed a log into tables since then.

	// users are the calls that use the database, which Close waits for. gate guards closed, after which none is added.
	users  sync.WaitGroup
	gate   sync.RWMutex
	closed bool

	// mu guards the maps. registry serializes opening and dropping of lanes, and lastNumber.
	mu           sync.RWMutex
	logs         map[string]*sourceLog
	lanes        map[queue.LaneID]*lane
	groups       map[queue.LaneID]*group
	destinations map[string]*destination
	registry     sync.Mutex
	lastNumber   uint64

	notify      func(queue.LaneID)
	requests    chan *request
	requestPool sync.Pool // Unused requests.
	duplicates  *duplicates
	disk        disk
	reclaimer   reclaimer
	flusher     flusher
	retryTimer  retryTimer
	metrics     *metrics
	corrupt     atomic.Pointer[string] // The path of the last file found corrupt.

	stop chan struct{}
	done sync.WaitGroup
	// stalled: writes wait in the engine for a flush or a compaction.
	stalled atomic.Bool
	// noFlush receives a value when a flush fails for lack of space while the store is closed.
	noFlush chan struct{}
}

// sourceLog is the log of one Source: the messages at positions trimmed+1 to head.
type sourceLog struct {
	number uint64
	source string
	// head is the last assigned position, bytes the number of bytes ever appended. The
	// committer owns both.
	head, bytes uint64
	// asked and touched are scratch space of the committer: the bytes of the current request,
	// and the number of the last commit with messages for this log.
	asked   uint64
	touched uint64
	// entry is the log's index in the file of accepted messages, from 1; 0 before it has one.
	entry int
	// durable is the last durable position; readers never read beyond it.
	durable, durableBytes atomic.Uint64
	trimmed, trimmedBytes atomic.Uint64
	// share is the use of the disk by the namespace.
	share      *share
	duplicates atomic.Int64
	// lanes is replaced, never changed in place.
	lanes    atomic.Pointer[[]*lane]
	trimTime time.Time
	// holders are the lanes and groups whose ledgers are summed. A lane that is not durable yet counts no message: all
	// messages behind its start become durable after it. dropped is the ledger of dropped lanes. The store's mu
	// guards both.
	holders []ledgerHolder
	dropped queue.Ledger
}

func (l *sourceLog) eachLane(fn func(*lane)) {
	if lanes := l.lanes.Load(); lanes != nil {
		for _, lane := range *lanes {
			fn(lane)
		}
	}
}

func (l *sourceLog) addLane(n *lane) {
	var lanes []*lane
	l.eachLane(func(o *lane) { lanes = append(lanes, o) })
	lanes = append(lanes, n)
	l.lanes.Store(&lanes)
}

func (l *sourceLog) removeLane(n *lane) {
	var lanes []*lane
	l.eachLane(func(o *lane) {
		if o != n {
			lanes = append(lanes, o)
		}
	})
	l.lanes.Store(&lanes)
}

// Open opens the store in dir, and creates dir when it is missing. It fails when another
// process has the store open, when a newer release wrote it, and when a file is missing or
// corrupt; the error then names the file, and Open changes nothing.
func Open(dir string, o Options) (*Store, error) {
	s, err := newStore(dir, o)
	if err != nil {
		return nil, fmt.Errorf("open the queue: %w", err)
	}
	if err := s.runSteps(s.lockDir, s.inspect, s.openPositions, s.openDB, s.openCommitLog, s.load, s.openAccepted); err != nil {
		return nil, fmt.Errorf("open the queue in %s: %w", dir, err)
	}
	s.disk.used.Store(s.DiskBytes())
	s.disk.checkSpace()
	s.loadDamageMark()
	if err := s.metrics.register(o.Registerer); err != nil {
		s.closeFailedOpen()
		return nil, fmt.Errorf("open the queue in %s: %w", dir, err)
	}
	for _, run := range []func(){s.runCommitter, s.runFlusher, s.runRetryTimer, s.runMaintenance, s.duplicates.rebuild} {
		s.done.Add(1)
		go func() {
			defer s.done.Done()
			run()
		}()
	}
	return s, nil
}

// newStore returns a store without open files.
func newStore(dir string, o Options) (*Store, error) {
	if err := o.setDefaults(); err != nil {
		return nil, err
	}
	s := &Store{
		o: o, log: o.Logger, dir: dir, withoutWAL: o.Log != nil,
		logs: map[string]*sourceLog{}, lanes: map[queue.LaneID]*lane{}, groups: map[queue.LaneID]*group{},
		destinations: map[string]*destination{},
		requests:     make(chan *request, 1024), stop: make(chan struct{}), noFlush: make(chan struct{}, 1),
		requestPool: sync.Pool{New: func() any { return &request{answer: make(chan struct{}, 1)} }},
		notify:      func(queue.LaneID) {},
	}
	set(&s.o.DataDir, dir)
	s.metrics = newMetrics(s)
	s.fs = fulldisk.New(o.FS, fulldisk.Options{Full: s.diskFull, HasSpace: s.disk.spaceToCompact, LogSynced: s.metrics.synced,
		Journal: &s.positions})
	s.disk.init(s)
	s.flusher.init()
	s.retryTimer.init()
	return s, nil
}

// runSteps opens the files step by step. After an error all files are closed.
func (s *Store) runSteps(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			err = s.explain(err)
			s.closeFailedOpen()
			return err
		}
	}
	return nil
}

// lockDir creates the directory durably and locks it.
func (s *Store) lockDir() error {
	present := existing(s.fs, s.dir)
	if err := s.fs.MkdirAll(s.dir, 0o700); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			// Only the text: explain would report a wrapped error as a missing file of the store.
			return errors.New("the directory cannot be created; use one on a writable file system: " + err.Error())
		}
		return err
	}
	for dir := s.dir; dir != present; dir = s.fs.PathDir(dir) {
		if err := durable.Sync(s.fs.OpenDir(s.fs.PathDir(dir))); err != nil {
			return err
		}
	}
	var err error
	s.lock, err = pebble.LockDirectory(s.dir, s.fs)
	return err
}

// openPositions continues the file of synced positions of the last run.
func (s *Store) openPositions() error {
	positions, damaged, err := integrity.ReadPositions(s.o.FS, s.dir)
	if err != nil {
		return err
	}
	if damaged {
		s.log.Warn("file of synced positions damaged; rewriting it", "path", s.path(integrity.SyncedName))
	}
	names, err := s.fs.List(s.dir)
	if err != nil {
		return err
	}
	positions = slices.DeleteFunc(positions, func(p integrity.FilePosition) bool { return !slices.Contains(names, p.Name) })
	return s.positions.Open(s.o.FS, s.dir, positions, s.logPositionError(integrity.SyncedName))
}

// openAccepted continues the file of accepted messages. A store with a replicated log has none:
// after a crash its files lack acknowledged messages, which the log restores.
func (s *Store) openAccepted() error {
	if s.withoutWAL {
		return nil
	}
	if err := s.checkAccepted(); err != nil {
		return err
	}
	for _, l := range s.logs {
		s.putAccepted(l, position{l.head, l.bytes})
	}
	return s.accepted.Open(s.o.FS, s.dir, s.logPositionError(integrity.AcceptedName))
}

// putAccepted sets the entry of a log for the next write of the file of accepted messages.
func (s *Store) putAccepted(l *sourceLog, end position) {
	l.entry = s.accepted.Put(l.entry, integrity.AcceptedEntry{Source: l.source, Number: l.number, Head: end.head, Bytes: end.bytes})
}

// logPositionError returns a function that logs the first failed write of a file of positions.
func (s *Store) logPositionError(name string) func(error) {
	var once sync.Once
	return func(err error) {
		once.Do(func() {
			s.log.Error("write of a position failed; damage at the end of a log may not be detected before a restart", "path", s.path(name), "error", err)
		})
	}
}

// closeFailedOpen closes all files that a failed Open opened.
func (s *Store) closeFailedOpen() {
	if s.db != nil {
		_ = s.db.Close()
	}
	_ = s.closeFiles()
}

// closeFiles closes the files that the engine does not own.
func (s *Store) closeFiles() error {
	err := errors.Join(s.positions.Close(), s.accepted.Close())
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
	}
	return err
}

func (s *Store) openDB() error {
	memTable := s.disk.memTableBytes()
	s.disk.trimBytes = memTable / 8
	set(&s.o.MinFreeBytes, 4*memTable)
	opts := &pebble.Options{
		FS:                          s.fs,
		Lock:                        s.lock,
		Logger:                      engineLogger{s},
		EventListener:               s.events(),
		FormatMajorVersion:          codec.PebbleFormat,
		DisableWAL:                  s.withoutWAL,
		MemTableSize:                uint64(memTable),
		MemTableStopWritesThreshold: stopWrites,
		L0CompactionThreshold:       8,
		L0StopWritesThreshold:       100,
		MaxOpenFiles:                maxOpenFiles,
		CompactionConcurrencyRange:  func() (int, int) { return 1, maxCompactions },
	}
	if s.o.Shared != nil {
		s.o.Shared.use(opts)
	} else {
		s.cache = pebble.NewCache(s.o.CacheBytes)
		defer s.cache.Unref()
		opts.Cache = s.cache
	}
	var err error
	s.db, err = pebble.Open(s.dir, opts)
	return err
}

// explain converts an error of the engine into one that names the cause.
func (s *Store) explain(err error) error {
	var corrupt *CorruptError
	switch {
	case err == nil || errors.As(err, &corrupt):
		return err
	case errors.Is(err, syscall.EAGAIN) || strings.Contains(err.Error(), "lock held by current process"):
		return inUseError{}
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("its files must belong to the user who runs Posthorn; run it as their owner, or change that with chown --recursive: %w", err)
	case strings.Contains(err.Error(), "key=value syntax") || strings.Contains(err.Error(), "name from file"):
		return &CorruptError{Path: s.path("OPTIONS-*"), Err: err}
	case pebble.IsCorruptionError(err) || errors.Is(err, fs.ErrNotExist) || strings.Contains(err.Error(), "object size mismatch"):
		if path := s.corrupt.Load(); path != nil {
			return &CorruptError{Path: *path, Err: err}
		}
		return &CorruptError{Path: s.dir, Err: err}
	}
	return err
}

// inUseError reports that another process has the lock of the store. It is syscall.EAGAIN, so that a caller
// can try again.
type inUseError struct{}

func (inUseError) Error() string {
	return "another process has it open; stop that process, or use another directory"
}

func (inUseError) Is(target error) bool { return target == syscall.EAGAIN }

// CorruptError reports that a file of the store is missing, damaged or shorter than it was. The
// store is not changed. Repair makes a sound store from the readable rest.
type CorruptError struct {
	// Path is the corrupt file, or the store's directory when the file is unknown.
	Path string
	Err  error
}

func (e *CorruptError) Error() string {
	what, _, _ := strings.Cut(e.Err.Error(), "\n") // The engine adds stacks.
	return fmt.Sprintf("corrupt: %s: %s; restore it from a backup, or run posthorn repair to keep the readable data", e.Path, what)
}

func (e *CorruptError) Unwrap() error { return e.Err }

func (s *Store) corruptf(text string, args ...any) error {
	return &CorruptError{Path: s.dir, Err: fmt.Errorf(text, args...)}
}

// load reads the state that is kept in memory: the ends of the logs, the states of the lanes
// and the counts of the destinations. Its cost does not depend on the number of pending
// messages.
func (s *Store) load() error {
	if err := s.loadFormat(); err != nil {
		return err
	}
	byNumber := map[uint64]*sourceLog{}
	err := s.scan(codec.KeySources, func(k, v []byte) error {
		if len(v) != 8 {
			return s.corruptf("the number of log %q is malformed", k[2:])
		}
		l := &sourceLog{number: binary.BigEndian.Uint64(v), source: string(k[2:]), share: s.disk.shares.forLog(string(k[2:])),
			trimTime: s.o.Now()}
		s.logs[l.source] = l
		byNumber[l.number] = l
		return nil
	})
	if err != nil {
		return err
	}
	for _, l := range s.logs {
		if err := s.loadLog(l); err != nil {
			return err
		}
	}
	err = s.scan(codec.KeyGroups, func(k, v []byte) error {
		d := codec.Decoder{Rest: v}
		id := d.LaneName()
		if d.Bad || len(k) != 10 {
			return s.corruptf("the name of a group is malformed")
		}
		log := s.logs[id.Source]
		if log == nil {
			return s.corruptf("group %v has no log", id)
		}
		g := newGroup(id, binary.BigEndian.Uint64(k[2:]), log, s.destination(id.Destination))
		s.addGroup(g)
		return s.loadGroup(g)
	})
	if err != nil {
		return err
	}
	err = s.scan(codec.KeyLanes, func(k, v []byte) error {
		d := codec.Decoder{Rest: v}
		id := d.LaneName()
		if d.Bad || len(k) != 10 {
			return s.corruptf("the name of a lane is malformed")
		}
		log := s.logs[id.Source]
		if log == nil {
			return s.corruptf("lane %v has no log", id)
		}
		g := s.groups[id.Group()]
		if id.Any && g == nil {
			return s.corruptf("lane %v has no group", id)
		}
		l := newLane(id, binary.BigEndian.Uint64(k[2:]), log, s.destination(id.Destination), g)
		if err := s.loadLane(l); err != nil {
			return err
		}
		if g != nil {
			g.lanes = append(g.lanes, l)
		}
		s.addLane(l)
		log.addLane(l)
		return nil
	})
	if err != nil {
		return err
	}
	if err := s.alignGroups(); err != nil {
		return err
	}
	err = s.scan([]byte{codec.PrefixDest}, func(k, v []byte) error {
		d, x := codec.Decoder{Rest: v}, s.destination(string(k[1:]))
		letters, bytes, dropped := d.Destination()
		x.count.Store(letters)
		x.bytes.Store(bytes)
		x.dropped = dropped
		return d.Err()
	})
	if err != nil {
		return err
	}
	s.duplicates = newDuplicates(s)
	return s.duplicates.load()
}

func (s *Store) loadFormat() error {
	format, err := s.storedFormat()
	if err != nil {
		return err
	}
	if format == 0 {
		b := s.db.NewBatch()
		_ = b.Set(codec.KeyFormat, binary.AppendUvarint(nil, codec.Format), nil)
		return s.applySync(b)
	}
	v, err := s.get(codec.KeyLastNumber)
	if err == nil {
		d := codec.Decoder{Rest: v}
		s.lastNumber = d.Uvarint()
		return d.Err()
	}
	if errors.Is(err, pebble.ErrNotFound) {
		return nil
	}
	return err
}

func (s *Store) loadLog(l *sourceLog) error {
	v, err := s.get(codec.Key(codec.PrefixHead, l.number))
	if err != nil && !errors.Is(err, pebble.ErrNotFound) {
		return err
	}
	if err == nil {
		d := codec.Decoder{Rest: v}
		l.head, l.bytes = d.Fixed64(), d.Fixed64()
		if d.Bad {
			return s.corruptf("the head of the log of %s is malformed", l.source)
		}
	}
	v, err = s.get(codec.Key(codec.PrefixDropped, l.number))
	if err != nil && !errors.Is(err, pebble.ErrNotFound) {
		return err
	}
	if err == nil {
		d := codec.Decoder{Rest: v}
		if l.dropped = d.Dropped(); d.Bad {
			return s.corruptf("the ledger of the log of %s is malformed", l.source)
		}
	}
	it, err := s.db.NewIter(&pebble.IterOptions{LowerBound: codec.Key(codec.PrefixMessage, l.number),
		UpperBound: codec.After(codec.PrefixMessage, l.number)})
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }()
	trimmed, trimmedBytes := l.head, l.bytes
	if it.Last() {
		if last := codec.Number(it.Key(), 1); last != l.head {
			return s.corruptf("the log of %s ends at message %d, but %d were appended", l.source, last, l.head)
		}
		it.First()
		var r codec.Record
		if v, err := it.ValueAndErr(); err != nil {
			return err
		} else if err := r.Decode(v); err != nil {
			return s.corruptf("message %d of %s: %w", codec.Number(it.Key(), 1), l.source, err)
		}
		trimmed, trimmedBytes = codec.Number(it.Key(), 1)-1, r.BytesBefore
	}
	l.durable.Store(l.head)
	l.durableBytes.Store(l.bytes)
	l.trimmed.Store(trimmed)
	l.trimmedBytes.Store(trimmedBytes)
	l.share.used.Add(int64(l.bytes - trimmedBytes))
	return it.Error()
}

// get returns a copy of a value.
func (s *Store) get(k []byte) ([]byte, error) {
	v, closer, err := s.db.Get(k)
	if err != nil {
		return nil, err
	}
	v = append([]byte(nil), v...)
	return v, closer.Close()
}

// scan calls fn for every key that begins with prefix.
func (s *Store) scan(prefix []byte, fn func(k, v []byte) error) error {
	return codec.Scan(s.db, prefix, fn)
}

// enter keeps the database open until leave is called.
func (s *Store) enter() error {
	s.gate.RLock()
	defer s.gate.RUnlock()
	if s.closed {
		return queue.ErrClosed
	}
	s.users.Add(1)
	return nil
}

func (s *Store) leave() { s.users.Done() }

func (s *Store) lane(id queue.LaneID) *lane {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.lanes[id]
}

// addLane registers a lane. The caller holds mu, or no other goroutine uses the store.
func (s *Store) addLane(l *lane) {
	s.lanes[l.id] = l
	if l.group == nil {
		s.addHolder(l, l.log, l.dest)
	}
}

// addGroup registers a group. The caller holds mu, or no other goroutine uses the store.
func (s *Store) addGroup(g *group) {
	s.groups[g.id] = g
	s.addHolder(g, g.log, g.dest)
}

func (s *Store) addHolder(c ledgerHolder, log *sourceLog, dest *destination) {
	log.holders = append(log.holders, c)
	dest.holders = append(dest.holders, c)
}

func (s *Store) allLogs() []*sourceLog {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Collect(maps.Values(s.logs))
}

func (s *Store) sourceLog(source string) *sourceLog {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.logs[source]
}

// logFor returns a Source's log, and creates it when it is missing. The name is written before
// anything that depends on it, so a crash cannot lose the name alone.
func (s *Store) logFor(source string) (*sourceLog, error) {
	if l := s.sourceLog(source); l != nil {
		return l, nil
	}
	s.registry.Lock()
	defer s.registry.Unlock()
	if l := s.sourceLog(source); l != nil {
		return l, nil
	}
	l := &sourceLog{source: source, share: s.disk.shares.forLog(source), trimTime: s.o.Now()}
	b := s.db.NewBatch()
	l.number = s.nextNumber(b)
	_ = b.Set(append(append([]byte(nil), codec.KeySources...), source...), binary.BigEndian.AppendUint64(nil, l.number), nil)
	_ = b.Set(codec.Key(codec.PrefixFreed, l.number), binary.BigEndian.AppendUint64(nil, 0), nil)
	if err := s.apply(b); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.logs[source] = l
	return l, nil
}

// nextNumber returns a number that was never used. The caller holds registry.
func (s *Store) nextNumber(b *pebble.Batch) uint64 {
	s.lastNumber++
	_ = b.Set(codec.KeyLastNumber, binary.AppendUvarint(nil, s.lastNumber), nil)
	return s.lastNumber
}

// PutMeta implements queue.Store.
func (s *Store) PutMeta(name string, value []byte) error {
	return s.putMeta(name, value, s.apply)
}

// PutMetaDurable implements queue.Store.
func (s *Store) PutMetaDurable(name string, value []byte) error {
	return s.putMeta(name, value, s.applySync)
}

func (s *Store) putMeta(name string, value []byte, apply func(*pebble.Batch) error) error {
	if name == "" || len(name) > 3*maxNameBytes {
		return fmt.Errorf("put meta: the name has %d bytes; it must have 1 to %d", len(name), 3*maxNameBytes)
	}
	if err := s.enter(); err != nil {
		return err
	}
	defer s.leave()
	b := s.db.NewBatch()
	if k := append([]byte{codec.PrefixCallerMeta}, name...); value == nil {
		_ = b.Delete(k, nil)
	} else {
		_ = b.Set(k, value, nil)
	}
	return apply(b)
}

// AllMeta implements queue.Store.
func (s *Store) AllMeta() (map[string][]byte, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.leave()
	all := map[string][]byte{}
	err := s.scan([]byte{codec.PrefixCallerMeta}, func(k, v []byte) error {
		all[string(k[1:])] = append([]byte{}, v...)
		return nil
	})
	return all, s.explain(err)
}

// SetNotify implements queue.Store.
func (s *Store) SetNotify(fn func(queue.LaneID)) { s.notify = fn }

// Lanes implements queue.Store.
func (s *Store) Lanes() []queue.LaneID {
	s.mu.RLock()
	defer s.mu.RUnlock()
	ids := make([]queue.LaneID, 0, len(s.lanes))
	for id := range s.lanes {
		ids = append(ids, id)
	}
	return ids
}

// Sources implements queue.Store.
func (s *Store) Sources() []string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Collect(maps.Keys(s.logs))
}

// Namespaces lists the namespaces of the Sources and destinations, sorted.
func (s *Store) Namespaces() []string {
	found := map[string]bool{}
	for _, name := range slices.Concat(s.Sources(), s.Destinations()) {
		namespace, _, _ := strings.Cut(name, "/")
		found[namespace] = true
	}
	return slices.Sorted(maps.Keys(found))
}

// SourceStats implements queue.Store.
func (s *Store) SourceStats(source string) queue.SourceStats {
	s.mu.RLock()
	l := s.logs[source]
	if l == nil {
		s.mu.RUnlock()
		return queue.SourceStats{}
	}
	ledger, all := l.dropped, l.holders
	s.mu.RUnlock()
	ledger = s.sum(ledger, all)
	// Read first: it is never ahead of the durable bytes that are read later.
	trimmed := l.trimmedBytes.Load()
	return queue.SourceStats{
		Accepted:   int64(l.durable.Load()),
		Duplicates: l.duplicates.Load(),
		LogBytes:   int64(l.durableBytes.Load() - trimmed),
		Ledger:     ledger,
	}
}

// sum adds ledgers. A lane that is being dropped is included until its ledger is part of the
// dropped lanes' ledger.
func (s *Store) sum(ledger queue.Ledger, all []ledgerHolder) queue.Ledger {
	for _, c := range all {
		mu := c.locked()
		if !s.lockUnlessFull(mu) {
			ledger = ledger.Plus(c.cached().load().Ledger)
			continue
		}
		ledger = ledger.Plus(c.ledger())
		mu.Unlock()
	}
	return ledger
}

// Close implements queue.Store. It flushes the whole log, so that the next start has nothing to
// replay. It waits for a replicated log to acknowledge the last positions; the end of the log's
// session ends the wait.
func (s *Store) Close() error {
	// Calls can wait for space on a full disk; from now on their wait is bounded.
	s.fs.StopWaiting()
	s.gate.Lock()
	if s.closed {
		s.gate.Unlock()
		return nil
	}
	s.closed = true
	s.gate.Unlock()
	s.users.Wait()
	close(s.stop)
	s.done.Wait()
	s.metrics.unregister()
	err := s.flushLanes(true)
	if s.disk.spaceToFlush() {
		err = errors.Join(err, s.flushAll())
	}
	return errors.Join(err, s.closeDB())
}

// flushAll flushes the log, unless the disk gets full meanwhile.
func (s *Store) flushAll() error {
	flushed, err := s.db.AsyncFlush()
	if err != nil {
		return err
	}
	select {
	case <-flushed:
	case <-s.noFlush:
	}
	return nil
}

// closeDB closes the engine and all files, and marks the shutdown as clean.
func (s *Store) closeDB() error {
	err := s.db.Close()
	if err == nil {
		err = s.writeCleanMark()
	}
	return errors.Join(err, s.closeFiles())
}

func (s *Store) events() *pebble.EventListener {
	return &pebble.EventListener{
		BackgroundError: s.backgroundError,
		DataCorruption: func(info pebble.DataCorruptionInfo) {
			s.log.Error("queue file corrupt", "path", info.Path, "error", info.Details)
			s.recordDamage(info.Path)
		},
		FlushEnd:   func(pebble.FlushInfo) { s.flushed.Store(true) },
		WALCreated: func(info pebble.WALCreateInfo) { s.reclaimer.newestLog.Store(uint64(info.FileNum)) },
		WriteStallBegin: func(info pebble.WriteStallBeginInfo) {
			s.stalled.Store(true)
			s.log.Warn("disk too slow; writes wait", "reason", info.Reason)
		},
		WriteStallEnd: func() { s.stalled.Store(false) },
	}
}

// backgroundError is called when a flush or a compaction failed. The engine retries it. While
// the store is closed on a full disk, that has no end: Close cancels its flush, and writes that
// the engine stalls until a flush succeeds end the process like a failed write of the log.
func (s *Store) backgroundError(err error) {
	if !fulldisk.IsFull(err) || !s.fs.WaitedEnough() {
		s.log.Error("storage engine background task failed; retrying", "error", err)
		return
	}
	if s.stalled.Load() {
		engineLogger{s}.Fatalf("writes wait for a flush or a compaction, and the disk is full: %w", err)
	}
	select {
	case s.noFlush <- struct{}{}:
	default:
	}
}

// engineLogger writes the engine's messages to the store's logger.
type engineLogger struct{ s *Store }

func (l engineLogger) Infof(string, ...any) {}

func (l engineLogger) Errorf(format string, args ...any) {
	l.s.log.Error("storage engine error", "error", fmt.Sprintf(format, args...))
}

// Fatalf is called by the engine when it cannot write its log: later messages would not be
// durable.
func (l engineLogger) Fatalf(format string, args ...any) {
	err := fmt.Errorf(format, args...)
	l.s.log.Error("write of the queue's log failed; stopping the process, acknowledged messages are safe", "error", err)
	l.s.o.Fatal(err)
	select {} // The engine expects Fatalf not to return.
}

// positionSyncInterval bounds the age of the positions after a power loss.
const positionSyncInterval = 10 * time.Second

// syncPositions makes changed positions durable: after a flush, which makes logs obsolete, and
// otherwise once per interval. The files of a store with a replicated log need no positions: the
// log replaces them when they are damaged.
func (s *Store) syncPositions() {
	if s.withoutWAL {
		return
	}
	if now := s.o.Now(); s.flushed.Swap(false) || now.Sub(s.positionsSynced) >= positionSyncInterval {
		s.positionsSynced = now
		s.positions.Sync(&s.accepted)
	}
}
