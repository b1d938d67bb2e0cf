package slots

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/time/rate"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// Times and bounds of snapshots.
const (
	// snapshotBytes and snapshotInterval are the changes after which a snapshot is taken.
	snapshotBytes    = 1 << 30
	snapshotInterval = 15 * time.Minute
	// snapshotCheck is the time between two checks, and the wait after an error.
	snapshotCheck = 10 * time.Second
	// uploadRate bounds the bytes uploaded in a second. uploadBurst is the size of one read.
	uploadRate  = 20 << 20
	uploadBurst = 1 << 20
)

// Checkpointer is a store whose snapshots are taken; pebblestore.Store.
type Checkpointer interface {
	// Checkpoint writes a copy of the store to dir, and returns the last batch of the copy.
	Checkpoint(dir string) (pebblestore.Position, error)
	// PutMeta stores a value, which is a batch.
	PutMeta(name string, value []byte) error
	// Formats returns the formats of the store, which are never lowered.
	Formats() (pebblestore.Formats, error)
}

// Snapshotter takes the snapshots of a slot for its session, and trims the stream behind them. Run
// takes them when they are due.
//
// Invariants:
//
//   - A snapshot record is published after all objects that it needs. The files are a prefix of the
//     log, because their last batch is read from them, and is acknowledged before the record is published.
//   - The stream has all records behind the last batch of the last two snapshots, and the objects of
//     both exist. So a copy that is one snapshot behind follows the stream without a restore, and
//     the loss of an object costs a longer restore only.
//   - Both are checked every snapshotCheck. If another program, or the disk of a server, has lost a part of
//     them, a snapshot replaces the last two, and the stream is trimmed behind it.
//   - A session deletes no objects of a later one, whose first snapshot has objects of its own. Until
//     then a later session needs the last two snapshots that this session knows. The rests of uploads
//     do not name their session, so they are deleted only if they were listed under the lease.
type Snapshotter struct {
	// Log, Objects, Writer and Store belong to the session.
	Log     Log
	Objects Objects
	Writer  *Writer
	Store   Checkpointer
	// FS has the folder Dir, which is used for the files of one snapshot.
	FS  vfs.FS
	Dir string
	// Logger is the destination of log messages.
	Logger *slog.Logger
	// Limiter bounds the uploads of all slots of a process; NewUploadLimiter when nil.
	Limiter *rate.Limiter

	// kept are the last two snapshots, the older one first.
	kept []manifest
	// uploaded are the tables that this session has uploaded, by object.
	uploaded map[string]file
	// untrimmed is true until the stream is trimmed behind the last snapshot.
	untrimmed bool
	// needed is the first record that the last two snapshots need; 0 before the first one of this session.
	needed uint64
	// isBroken is true while the slot cannot be restored from kept, and isRepaired after the snapshot that
	// replaces them, until the next one.
	isBroken, isRepaired bool
	// hasRest is true after a snapshot that failed: some of its objects may be needed no more.
	hasRest bool

	// gaps are those that the last check found, repairs counts the checks that found one. asked is true after
	// Repair.
	gaps    atomic.Pointer[[]string]
	repairs atomic.Int64
	asked   atomic.Bool

	// taken is the time of the last snapshot of this session in Unix milliseconds; 0 for none.
	taken atomic.Int64
	// bytes is the size of the files that this session has uploaded.
	bytes atomic.Int64
	// at and published are the time and the progress of the last snapshot.
	at        time.Time
	published int64
}

// Run takes snapshots until ctx or the session ends: one immediately, then after 15 minutes or 1 GB of
// changes, or as soon as the stream is more than half full.
func (s *Snapshotter) Run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-s.Writer.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	for ctx.Err() == nil {
		if err := s.check(ctx); err != nil && ctx.Err() == nil {
			s.Logger.Warn("checking the snapshots of a slot failed; retrying", "error", err)
		}
		if s.isDue() {
			if err := s.Take(ctx); err != nil && ctx.Err() == nil {
				s.Logger.Warn("snapshot of a slot failed; retrying", "error", err)
			}
		}
		_ = pause(ctx, snapshotCheck)
	}
}

// check finds out whether the slot can be restored from the last snapshots and the records behind them.
func (s *Snapshotter) check(ctx context.Context) error {
	if s.asked.Swap(false) {
		s.isBroken = true
	}
	if s.at.IsZero() {
		return nil
	}
	state, err := s.Log.State(ctx)
	if err != nil {
		return fmt.Errorf("read the state of the log: %w", err)
	}
	objects := map[string]bool{}
	for _, m := range s.kept {
		objects[m.object] = true
		for _, f := range m.Files {
			objects[f.Object] = true
		}
	}
	delete(objects, "") // Files without bytes have none.
	missing, err := s.Objects.Missing(ctx, slices.Collect(maps.Keys(objects)))
	if err != nil {
		return fmt.Errorf("read the objects: %w", err)
	}
	if !s.Writer.MaySend() {
		return nil // A later session may have trimmed the stream.
	}
	var gaps []string
	if state.First > s.needed {
		gaps = append(gaps, fmt.Sprintf("the stream lacks %d records: another program purged it, or its limits were edited", state.First-s.needed))
	}
	if state.Missing > 0 {
		gaps = append(gaps, fmt.Sprintf("the stream lacks %d records at the server that leads it, so check the disk of that server", state.Missing))
	}
	if len(missing) > 0 {
		gaps = append(gaps, fmt.Sprintf("the object store of the snapshots lacks %d of %d objects: another program deleted them, or a server lost them", len(missing), len(objects)))
	}
	s.gaps.Store(&gaps)
	if len(gaps) > 0 {
		s.isBroken = true
		s.repairs.Add(1)
		s.Logger.Error("the slot could not be restored from the log; storing a snapshot", "problem", strings.Join(gaps, "; "))
	}
	return nil
}

// Repair makes Run replace the last snapshots within snapshotCheck, and trim the stream behind the new one: a
// server lacks records.
func (s *Snapshotter) Repair() { s.asked.Store(true) }

// Gaps returns what the last check found missing. The owner has all of it, and stores it as a snapshot.
func (s *Snapshotter) Gaps() []string {
	if gaps := s.gaps.Load(); gaps != nil {
		return *gaps
	}
	return nil
}

// Repairs returns the number of checks that found something missing.
func (s *Snapshotter) Repairs() int64 { return s.repairs.Load() }

// Taken returns the time of the last snapshot of this session; zero before the first one.
func (s *Snapshotter) Taken() time.Time {
	if ms := s.taken.Load(); ms > 0 {
		return time.UnixMilli(ms)
	}
	return time.Time{}
}

// Uploaded returns the number of bytes that this session has uploaded.
func (s *Snapshotter) Uploaded() int64 { return s.bytes.Load() }

// isDue reports whether a snapshot is due. Without changes the last one is sufficient, unless the stream
// is half full and has the records behind the one before it: calls may be refused, so that no changes
// follow.
func (s *Snapshotter) isDue() bool {
	p := s.Writer.progress()
	if s.untrimmed || s.isBroken {
		return true
	}
	if s.at.IsZero() {
		return p.acknowledged > 0
	}
	last := s.kept[len(s.kept)-1].Batch
	if p.isHalfFull {
		return p.acknowledged > last || len(s.kept) < 2 || s.kept[0].Batch < last
	}
	return p.acknowledged > last && (p.published-s.published >= snapshotBytes || time.Since(s.at) >= snapshotInterval)
}

// repairedKey is the name of a value of the store that nothing reads.
const repairedKey = "repaired"

// Take takes a snapshot, trims the stream, and deletes the objects that are no longer needed.
func (s *Snapshotter) Take(ctx context.Context) error {
	if s.uploaded == nil {
		if err := s.begin(ctx); err != nil {
			return fmt.Errorf("take a snapshot: %w", err)
		}
	}
	if s.untrimmed && !s.isBroken {
		if err := s.clean(ctx); err != nil {
			return err
		}
		if !s.isDue() {
			return nil
		}
	}
	if s.isBroken {
		// The record with the last batch of the snapshot must be behind those that the stream lacks.
		if err := s.Store.PutMeta(repairedKey, nil); err != nil {
			return fmt.Errorf("take a snapshot: %w", err)
		}
	}
	p, at := s.Writer.progress(), time.Now()
	m, err := s.upload(ctx, p.isHalfFull)
	if err = errors.Join(err, s.FS.RemoveAll(s.Dir)); err != nil {
		s.hasRest = true
		return fmt.Errorf("take a snapshot: %w", err)
	}
	s.hasRest = false
	if s.isBroken {
		s.kept = nil
	}
	s.isBroken, s.isRepaired = false, s.isBroken
	s.kept = append(s.kept, m)
	s.kept = s.kept[max(0, len(s.kept)-2):]
	s.at, s.published = at, p.published
	s.taken.Store(at.UnixMilli())
	return s.clean(ctx)
}

// clean removes what the last snapshot replaces. After an error it is repeated before the next snapshot, whose
// batches may use the reserve of the stream only once it was trimmed.
func (s *Snapshotter) clean(ctx context.Context) error {
	s.untrimmed = true
	if err := errors.Join(s.trim(ctx), s.collect(ctx, nil)); err != nil {
		return fmt.Errorf("remove what a snapshot replaces: %w", err)
	}
	s.untrimmed = false
	return nil
}

// NewUploadLimiter returns the bound of the bytes that a process uploads in a second.
func NewUploadLimiter() *rate.Limiter { return rate.NewLimiter(uploadRate, uploadBurst) }

// begin reads the last two snapshots of the slot, and deletes the objects that they do not need: the
// rests of uploads that were cut off.
func (s *Snapshotter) begin(ctx context.Context) error {
	if s.Limiter == nil {
		s.Limiter = NewUploadLimiter()
	}
	s.kept = nil
	isComplete := true
	for sequence := s.Writer.progress().snapshot; sequence > 0 && len(s.kept) < 2; {
		m, before, err := readManifest(ctx, s.Log, s.Objects, sequence)
		if err != nil && !errors.Is(err, errNoSnapshot) {
			return err
		}
		if err == nil {
			s.kept = slices.Insert(s.kept, 0, m)
		}
		isComplete = isComplete && err == nil
		sequence = before
	}
	// If a manifest was not found, its snapshot may be complete nevertheless.
	if isComplete {
		if err := s.collect(ctx, nil); err != nil {
			return err
		}
	}
	s.uploaded = map[string]file{}
	return nil
}

// upload uploads a checkpoint of the store and publishes its record.
func (s *Snapshotter) upload(ctx context.Context, unlimited bool) (m manifest, err error) {
	if err := s.FS.RemoveAll(s.Dir); err != nil {
		return m, err
	}
	position, err := s.Store.Checkpoint(s.Dir)
	if err != nil {
		return m, err
	}
	if m.Formats, err = s.Store.Formats(); err != nil {
		return m, err
	}
	name := fmt.Sprintf("%d-%s", position.Batch, rand.Text())
	if m.Files, err = s.putFiles(ctx, name, unlimited); err != nil {
		return m, err
	}
	m.Batch = position.Batch
	encoded, err := json.Marshal(m)
	if err != nil {
		return m, err
	}
	m.object = objectName(s.Writer, name, manifestName, false)
	if err := s.Objects.Put(ctx, m.object, bytes.NewReader(encoded)); err != nil {
		return m, fmt.Errorf("store object %s: %w", m.object, err)
	}
	if err := s.Writer.publishSnapshot(m.Batch, reference(encoded, m.object)); err != nil {
		return m, err
	}
	m.sequence = s.Writer.progress().snapshot
	return m, nil
}

// putFiles stores the files of the checkpoint that are no object yet. An object that was deleted by
// another program is stored again.
func (s *Snapshotter) putFiles(ctx context.Context, snapshot string, unlimited bool) (files []file, err error) {
	names, err := s.FS.List(s.Dir)
	if err != nil {
		return nil, err
	}
	if s.hasRest {
		var tables []string
		for _, name := range names {
			tables = append(tables, objectName(s.Writer, snapshot, name, true))
		}
		if err := s.collect(ctx, tables); err != nil {
			return nil, err
		}
	}
	missing, err := s.Objects.Missing(ctx, slices.Collect(maps.Keys(s.uploaded)))
	if err != nil {
		return nil, fmt.Errorf("read the objects: %w", err)
	}
	for _, name := range missing {
		delete(s.uploaded, name)
	}
	slices.Sort(names)
	used := make(map[string]file, len(names))
	for _, name := range names {
		isTable := strings.HasSuffix(name, ".sst") || strings.HasSuffix(name, ".blob")
		object := objectName(s.Writer, snapshot, name, isTable)
		f, ok := s.uploaded[object]
		if !ok {
			if f, err = s.putFile(ctx, name, object, unlimited); err != nil {
				return nil, fmt.Errorf("store object %s: %w", object, err)
			}
		}
		if isTable {
			s.uploaded[object], used[object] = f, f
		}
		files = append(files, f)
	}
	s.uploaded = used
	return files, nil
}

// putFile stores a file as an object.
func (s *Snapshotter) putFile(ctx context.Context, name, object string, unlimited bool) (f file, err error) {
	opened, err := s.FS.Open(s.FS.PathJoin(s.Dir, name))
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, opened.Close()) }()
	r := &limitedReader{ctx: ctx, from: opened}
	if !unlimited {
		r.limiter = s.Limiter
	}
	info, err := opened.Stat()
	if err != nil || info.Size() == 0 {
		return file{Name: name}, err
	}
	err = s.Objects.Put(ctx, object, r)
	s.bytes.Add(r.size)
	if err != nil {
		return f, err
	}
	return file{name, object, r.size, r.checksum}, nil
}

// trim removes the records that neither of the last two snapshots needs. The record with the last
// batch remains: it proves that a copy is a part of the log.
func (s *Snapshotter) trim(ctx context.Context) error {
	state, err := s.Log.State(ctx)
	if err != nil {
		return fmt.Errorf("read the state of the log: %w", err)
	}
	e, h, err := findBatch(ctx, s.Log, state, s.kept[0].Batch)
	if err != nil {
		return err
	}
	if h.first > s.kept[0].Batch {
		s.needed = e.Sequence - 1 // Another program, or a later session, has trimmed the stream.
		return nil
	}
	s.needed = min(e.Sequence, s.kept[0].sequence)
	if len(s.kept) < 2 && !s.isRepaired {
		return nil
	}
	if err := s.Log.Trim(ctx, s.needed); err != nil {
		return fmt.Errorf("trim the log: %w", err)
	}
	s.Writer.readUsage()
	return nil
}

// collect deletes the objects that neither of the last two snapshots needs, except for others. It runs while
// nothing is uploaded.
func (s *Snapshotter) collect(ctx context.Context, others []string) error {
	needed := map[string]bool{}
	for _, name := range others {
		needed[name] = true
	}
	for _, m := range s.kept {
		needed[m.object] = true
		for _, f := range m.Files {
			needed[f.Object] = true
		}
	}
	listed, err := s.Objects.List(ctx)
	if err != nil {
		return fmt.Errorf("list the objects: %w", err)
	}
	// The record of a snapshot may have landed when the session ended.
	if err := s.Writer.Err(); err != nil {
		return err
	}
	hadLease := s.Writer.MaySend()
	for _, name := range listed {
		epoch, ok := epochOf(name)
		if needed[name] || ok && epoch > s.Writer.Epoch() || !ok && !hadLease {
			continue
		}
		if err := s.Objects.Delete(ctx, name); err != nil {
			return fmt.Errorf("delete object %s: %w", name, err)
		}
	}
	return nil
}

// limitedReader reads at a bounded rate, and counts and sums what it reads.
type limitedReader struct {
	ctx      context.Context
	from     io.Reader
	limiter  *rate.Limiter // nil for none.
	size     int64
	checksum uint32
}

func (r *limitedReader) Read(p []byte) (int, error) {
	n, err := r.from.Read(p[:min(len(p), uploadBurst)])
	r.size += int64(n)
	r.checksum = crc32.Update(r.checksum, castagnoli, p[:n])
	if err == nil && r.limiter != nil {
		err = r.limiter.WaitN(r.ctx, n)
	}
	return n, err
}
