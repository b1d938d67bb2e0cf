package pebblestore

import (
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
)

const (
	// maxOpenFiles bounds the open tables, and maxCompactions the compactions at the same time, of a store, or of
	// all stores with a Shared.
	maxOpenFiles   = 1000
	maxCompactions = 2
	// grantInterval is the longest time after which a compaction begins that the engine may begin without a
	// further request, as with the engine's own scheduler.
	grantInterval = 100 * time.Millisecond
)

// Shared bounds what all stores of a process use together: the block cache, the open tables and the
// compactions.
type Shared struct {
	cache       *pebble.Cache
	files       *pebble.FileCache
	compactions compactionBudget
}

// NewShared makes a Shared with a size of the block cache.
func NewShared(cacheBytes int64) *Shared {
	return &Shared{
		cache: pebble.NewCache(cacheBytes),
		files: pebble.NewFileCache(runtime.GOMAXPROCS(0), pebble.FileCacheSize(maxOpenFiles)),
	}
}

// Release empties the block cache. It is called when no store is busy.
func (s *Shared) Release() { s.cache.Reserve(int(s.cache.MaxSize()))() }

// Close releases the resources when the last store is closed.
func (s *Shared) Close() {
	s.files.Unref()
	s.cache.Unref()
}

// use makes an engine use the shared resources.
func (s *Shared) use(o *pebble.Options) {
	o.Cache, o.FileCache = s.cache, s.files
	o.Experimental.CompactionScheduler = &sharedScheduler{budget: &s.compactions}
}

// compactionBudget grants at most maxCompactions at the same time.
type compactionBudget struct {
	mu      sync.Mutex
	running int
	stores  []*sharedScheduler
}

// sharedScheduler is the scheduler of one store. The engine's own one, pebble.ConcurrencyLimitScheduler,
// cannot be shared.
type sharedScheduler struct {
	budget *compactionBudget
	db     pebble.DBForCompaction
	// wake has a value when a compaction may be granted; stop ends the goroutine that grants them, and stopped
	// is closed after that.
	wake          chan struct{}
	stop, stopped chan struct{}
	// running is guarded by the mutex of budget.
	running int
}

var (
	_ pebble.CompactionScheduler   = (*sharedScheduler)(nil)
	_ pebble.CompactionGrantHandle = (*sharedScheduler)(nil)
)

// Register implements pebble.CompactionScheduler.
func (s *sharedScheduler) Register(_ int, db pebble.DBForCompaction) {
	s.db, s.wake, s.stop, s.stopped = db, make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	s.budget.mu.Lock()
	defer s.budget.mu.Unlock()
	s.budget.stores = append(s.budget.stores, s)
	go s.grant()
}

// Unregister implements pebble.CompactionScheduler.
func (s *sharedScheduler) Unregister() {
	s.budget.mu.Lock()
	s.budget.stores = slices.DeleteFunc(s.budget.stores, func(other *sharedScheduler) bool { return other == s })
	s.budget.mu.Unlock()
	close(s.stop)
	<-s.stopped
}

// TrySchedule implements pebble.CompactionScheduler.
func (s *sharedScheduler) TrySchedule() (bool, pebble.CompactionGrantHandle) {
	if !s.acquire() {
		return false, nil
	}
	return true, s
}

// UpdateGetAllowedWithoutPermission implements pebble.CompactionScheduler.
func (s *sharedScheduler) UpdateGetAllowedWithoutPermission() { s.signal() }

// acquire takes a compaction from the budget.
func (s *sharedScheduler) acquire() bool {
	allowed := s.db.GetAllowedWithoutPermission()
	s.budget.mu.Lock()
	defer s.budget.mu.Unlock()
	if s.budget.running >= maxCompactions || s.running >= allowed || !slices.Contains(s.budget.stores, s) {
		return false
	}
	s.budget.running++
	s.running++
	return true
}

func (s *sharedScheduler) release() {
	s.budget.mu.Lock()
	defer s.budget.mu.Unlock()
	s.budget.running--
	s.running--
}

// Done implements pebble.CompactionGrantHandle. The next compaction may belong to another store.
func (s *sharedScheduler) Done() {
	s.release()
	s.budget.mu.Lock()
	defer s.budget.mu.Unlock()
	for _, store := range s.budget.stores {
		store.signal()
	}
}

// Started implements pebble.CompactionGrantHandle.
func (s *sharedScheduler) Started() {}

// MeasureCPU implements pebble.CompactionGrantHandle.
func (s *sharedScheduler) MeasureCPU(pebble.CompactionGoroutineKind) {}

// CumulativeStats implements pebble.CompactionGrantHandle.
func (s *sharedScheduler) CumulativeStats(pebble.CompactionGrantHandleStats) {}

func (s *sharedScheduler) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// grant begins the compactions of the store that wait for the budget. It calls the store without the mutex of
// the budget, because the store holds its own one in TrySchedule.
func (s *sharedScheduler) grant() {
	defer close(s.stopped)
	tick := time.NewTicker(grantInterval)
	defer tick.Stop()
	for {
		select {
		case <-s.wake:
		case <-tick.C:
		case <-s.stop:
			return
		}
		for s.acquire() {
			if waiting, _ := s.db.GetWaitingCompaction(); !waiting || !s.db.Schedule(s) {
				s.release()
				break
			}
		}
	}
}
