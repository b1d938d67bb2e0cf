package pebblestore

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/repair"
)

// flushHoldFS blocks the flushes of memtables, so that older logs are still needed.
type flushHoldFS struct {
	vfs.FS
	flushes sync.Mutex
}

func (f *flushHoldFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if c == "pebble-memtable-flush" {
		f.flushes.Lock()
		defer f.flushes.Unlock()
	}
	return f.FS.Create(name, c)
}

// save writes the files of an in-memory file system to the disk.
func save(t *testing.T, fs vfs.FS, from, to string) {
	t.Helper()
	if err := os.MkdirAll(to, 0o700); err != nil {
		t.Fatal(err)
	}
	names, err := fs.List(from)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		data, err := integrity.ReadFile(fs, fs.PathJoin(from, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(to, name), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestFlippedBitInNewestLog: a flipped bit in the newest log of a killed store with batches of
// 200 calls is detected at the start, and a repair reports the exact count.
func TestFlippedBitInNewestLog(t *testing.T) {
	const batches, calls = 30, 200
	trials := 15
	if testing.Short() {
		trials = 3
	}
	mem := vfs.NewCrashableMem()
	s := open(t, "queue", Options{FS: mem})
	defer func() { _ = s.Close() }()
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	for i := range batches {
		appendAll(t, s, calls, func(m *queue.Message) {
			m.ID, m.Body = fmt.Sprint(i, m.ID), fmt.Appendf(nil, `{"x":"%01500d"}`, i)
		})
	}
	killed := filepath.Join(t.TempDir(), "queue")
	save(t, mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(1, 1))}), "queue", killed)
	silent := 0
	for trial := range trials {
		dir := filepath.Join(t.TempDir(), "queue")
		if err := os.CopyFS(dir, os.DirFS(killed)); err != nil {
			t.Fatal(err)
		}
		logs := files(t, dir, "*.log")
		at := 0
		edit(t, logs[len(logs)-1], func(b []byte) []byte {
			at = (trial + 1) * len(b) / (trials + 1)
			b[at] ^= 0x10
			return b
		})
		s, err := Open(dir, Options{Logger: discard})
		if err == nil {
			t.Errorf("flip at byte %d: the store starts with %d of %d messages and reports no damage", at, s.SourceStats(web).Accepted, batches*calls)
			silent++
			_ = s.Close()
			continue
		}
		if !strings.Contains(err.Error(), filepath.Base(logs[len(logs)-1])) {
			t.Errorf("flip at byte %d: the error does not name the log: %v", at, err)
		}
		r, err := repair.Run(dir, true, Verify)
		if err != nil {
			t.Fatal(err)
		}
		s = open(t, dir, Options{})
		lost := countLost(t, r)[web]
		if accepted := s.SourceStats(web).Accepted; accepted != batches*calls || r.Messages+lost != batches*calls {
			t.Errorf("flip at byte %d: after the repair %d accepted, %d found, %d named as lost; want %d in all", at, accepted, r.Messages, lost, batches*calls)
		}
		if lost > calls {
			t.Errorf("flip at byte %d: %d messages are lost; it hit one batch of %d", at, lost, calls)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d of %d flips were treated as a torn end", silent, trials)
}

// TestRepairOfFirstMessages: damaged messages before the first readable one, which no trim
// deleted, become dead letters in a repair if the retry index may be incomplete.
func TestRepairOfFirstMessages(t *testing.T) {
	const calls, retried = 20, 9
	mem := vfs.NewCrashableMem()
	s := open(t, "queue", Options{FS: mem, FlushInterval: time.Hour})
	defer func() { _ = s.Close() }()
	if err := s.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		appendAll(t, s, calls, func(m *queue.Message) { m.ID, m.Body = fmt.Sprint(i, m.ID), fmt.Appendf(nil, `{"marker%d":1}`, i) })
	}
	got, err := s.Lease(lane1, calls, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, d := range got {
		if i < retried {
			s.Retry(d, time.Now().Add(time.Hour), queue.Failure{Time: time.Now(), Reason: "TimedOut"})
		} else {
			s.Ack(d)
		}
	}
	if err := s.flushLanes(true); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "queue")
	save(t, mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(1, 1))}), "queue", dir)
	logs := files(t, dir, "*.log")
	edit(t, logs[len(logs)-1], func(b []byte) []byte {
		b[bytes.Index(b, []byte("marker0"))] ^= 1
		return b
	})
	if _, err := repair.Run(dir, true, Verify); err != nil {
		t.Fatal(err)
	}
	s2 := open(t, dir, Options{})
	defer func() { _ = s2.Close() }()
	if err := s2.OpenLane(lane1); err != nil {
		t.Fatal(err)
	}
	ledger := s2.LaneStats(lane1).Ledger
	if ledger.Accepted != 2*calls || ledger.Discarded != 0 {
		t.Errorf("the ledger after the repair is %+v; want %d accepted and 0 discarded", ledger, 2*calls)
	}
	pending := 0
	for {
		got, err := s2.Lease(lane1, calls, got[:0])
		if err != nil {
			t.Fatal(err)
		}
		if len(got) == 0 {
			break
		}
		for _, d := range got {
			pending++
			s2.Ack(d)
		}
	}
	if dead := s2.LaneStats(lane1).DeadLettered; pending != calls || dead != calls {
		t.Errorf("%d messages are delivered and %d are dead letters after the repair; want %d and %d", pending, dead, calls, calls)
	}
}

var lostMessages = regexp.MustCompile(`^messages (\d+) to (\d+) of (\S+) \((\d+)\)$`)

// countLost sums up the messages that a repair names as lost, by Source.
func countLost(t *testing.T, r repair.Result) map[string]int {
	t.Helper()
	all := map[string]int{}
	for _, line := range r.Lost {
		if m := lostMessages.FindStringSubmatch(line); m != nil {
			n, err := strconv.Atoi(m[4])
			if err != nil {
				t.Fatal(err)
			}
			all[m[3]] += n
		}
	}
	return all
}

const app = "shop/app"

var suiteLanes = []queue.LaneID{lane1, lane2, {Source: app, Destination: "shop/crm"}}

// endedStore is a store on disk in the state after a kill, a power loss or a close.
type endedStore struct {
	dir   string
	end   string // killed, power or closed
	batch int
	// acked is the number of acknowledged messages of each Source.
	acked map[string]uint64
	// fate is the outcome of the messages of each lane; a message without an entry is pending.
	fate map[queue.LaneID]map[uint64]string
}

// makeEndedStore fills a store with batches, settles some messages, and ends the store.
func makeEndedStore(t *testing.T, rnd *rand.Rand, batch int, end string) endedStore {
	t.Helper()
	v := endedStore{dir: filepath.Join(t.TempDir(), "queue"), end: end, batch: batch, acked: map[string]uint64{},
		fate: map[queue.LaneID]map[uint64]string{}}
	mem := vfs.NewCrashableMem()
	disk := &flushHoldFS{FS: mem}
	s := open(t, "queue", Options{
		FS: disk, DuplicateWindow: time.Hour, MemTableBytes: map[int]int64{1: 1 << 20, 20: 2 << 20, 200: 8 << 20}[batch],
		FlushInterval: 5 * time.Millisecond, SyncInterval: 20 * time.Millisecond,
	})
	for _, id := range suiteLanes {
		v.fate[id] = map[uint64]string{}
		if err := s.OpenLane(id); err != nil {
			t.Fatal(err)
		}
	}
	groups := map[int]int{1: 250, 20: 60, 200: 14}[batch]
	held, rotations := groups*2/3, 0
	n := 0
	for i := range groups {
		if i == held { // From here on nothing is flushed, so that older logs are still needed at the end.
			disk.flushes.Lock()
		}
		if i > held && rotations < 2 && rnd.IntN(groups/8) == 0 {
			rotations++
			if _, err := s.db.AsyncFlush(); err != nil {
				t.Fatal(err)
			}
		}
		source := web
		if rnd.IntN(4) == 0 {
			source = app
		}
		v.append(t, s, rnd, source, &n)
		if i < held && rnd.IntN(groups/6) == 0 {
			if err := s.db.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		if rnd.IntN(groups/6) == 0 {
			v.settle(t, s, rnd)
		}
	}
	if end == "closed" {
		disk.flushes.Unlock()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		save(t, mem, "queue", v.dir)
		return v
	}
	// More calls are in progress while the process or the power ends.
	var stop atomic.Bool
	var senders sync.WaitGroup
	if rnd.IntN(2) == 0 {
		rnd := rand.New(rand.NewPCG(rnd.Uint64(), 1))
		senders.Go(func() {
			under := endedStore{batch: batch, acked: map[string]uint64{}}
			for i := 0; i < 8 && !stop.Load(); i++ {
				under.append(t, s, rnd, web, &n)
			}
		})
	}
	percent := 100
	if end == "power" {
		percent = []int{0, 0, 30, 60, 100}[rnd.IntN(5)]
	}
	after := mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(rnd.Uint64(), 2))})
	stop.Store(true)
	disk.flushes.Unlock()
	senders.Wait()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	save(t, after, "queue", v.dir)
	return v
}

// append adds one batch and counts its acknowledged messages.
func (v *endedStore) append(t *testing.T, s *Store, rnd *rand.Rand, source string, n *int) {
	var msgs []queue.Message
	for range v.batch {
		*n++
		size := 200 + rnd.IntN(200)
		if v.batch == 200 {
			size = 1500
		}
		m := message(fmt.Sprint("m", *n))
		m.Source, m.Body = source, fmt.Appendf(nil, `{"n":"%s","x":"%0*x"}`, m.ID, size, rnd.Uint64())
		msgs = append(msgs, m)
	}
	if _, err := s.Append(context.Background(), msgs); err != nil {
		t.Error(err)
		return
	}
	v.acked[source] += uint64(v.batch)
}

// settle delivers, buries, retries or releases some messages of each lane.
func (v *endedStore) settle(t *testing.T, s *Store, rnd *rand.Rand) {
	t.Helper()
	for id, fate := range v.fate {
		got, err := s.Lease(id, rnd.IntN(300), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range got {
			f := queue.Failure{Time: time.Now(), Reason: "TimedOut", Message: "late"}
			switch rnd.IntN(8) {
			case 0:
				s.Retry(d, time.Now().Add(time.Hour), f)
			case 1:
				if _, err := s.Bury(d, f); err != nil {
					t.Fatal(err)
				}
				fate[d.Seq] = "dead"
			case 2:
				s.Release(d)
			default:
				s.Ack(d)
				fate[d.Seq] = "delivered"
			}
		}
	}
}

// suiteFiles are the kinds of files that the suite damages.
var suiteFiles = []string{"newest log", "newest log", "older log", "table", "MANIFEST-*", "marker.*", "OPTIONS-*", integrity.SyncedName,
	integrity.AcceptedName, integrity.CleanName, integrity.DamagedName}

// damageFile damages a file of some kind and describes the damage. at is the first damaged byte, to
// the end of the damage.
func (v endedStore) damageFile(t *testing.T, rnd *rand.Rand, kind string) (name, how string, at, to int64) {
	t.Helper()
	pattern := kind
	switch kind {
	case "newest log", "older log":
		pattern = "*.log"
	case "table":
		pattern = "*.sst"
	case integrity.DamagedName:
		if err := os.WriteFile(filepath.Join(v.dir, integrity.DamagedName), []byte(filepath.Join(v.dir, "000001.sst")), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	names, err := filepath.Glob(filepath.Join(v.dir, pattern))
	if err != nil {
		t.Fatal(err)
	}
	switch {
	case len(names) == 0:
		return "", "", 0, 0
	case kind == "newest log":
		name = names[len(names)-1]
	case kind == "older log":
		if names = names[:len(names)-1]; len(names) == 0 {
			return "", "", 0, 0
		}
		fallthrough
	default:
		name = names[rnd.IntN(len(names))]
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if len(b) == 0 {
		if kind != "marker.*" {
			return "", "", 0, 0
		}
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
		return filepath.Base(name), "removed", 0, 0
	}
	at = int64(rnd.IntN(len(b)))
	switch rnd.IntN(3) {
	case 0:
		how, to = "flipped", at+1
		b[at] ^= 1 << rnd.IntN(8)
	case 1:
		how, to = "cut off", int64(len(b))
		b = b[:at]
	default:
		how, at = "zeroed", at&^4095
		to = min(at+4096, int64(len(b)))
		clear(b[at:to])
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return filepath.Base(name), how, at, to
}

// provable reports whether the file of positions, or a mark in a sound record after to, proves
// that the bytes of a log from at on were synced. Damage of other files is always provable.
func (v endedStore) provable(t *testing.T, kind, name string, at, to int64) bool {
	t.Helper()
	if kind != "newest log" || v.end != "power" {
		return true
	}
	positions, _, err := integrity.ReadPositions(vfs.Default, v.dir)
	if err != nil {
		t.Fatal(err)
	}
	proved := int64(0)
	number, _ := integrity.LogNumber(name)
	for _, p := range positions {
		if p.Name == name {
			proved = p.Offset
		}
	}
	_, err = integrity.ScanLogFile(vfs.Default, filepath.Join(v.dir, name), number, integrity.BatchHead, nil,
		func(r integrity.LogRecord) error {
			if log, offset, ok := integrity.MarkOf(r.Data); ok && log == number && r.At >= to {
				proved = max(proved, offset)
			}
			return nil
		})
	if err != nil {
		t.Fatal(err)
	}
	return proved > at
}

// TestDamageSuite damages one file of a store after a kill, a power loss or a clean shutdown: a
// flipped bit, a truncation or a zeroed page. For every file and place, each acknowledged
// message must be delivered or be a dead letter, or a repair must name it with an exact count;
// the ledger must balance, and its accepted messages must not decrease. After a power loss this
// applies to the bytes that were provably synced; other messages are counted separately.
//
// POSTHORN_DAMAGE_TRIALS sets the number of trials, POSTHORN_DAMAGE_TRIAL the first one.
func TestDamageSuite(t *testing.T) {
	first := env("POSTHORN_DAMAGE_TRIAL", 1)
	var sum struct{ trials, unharmed, refused, repaired, deadLetters, named, torn, tornMessages, acked, silent int }
	byFile := map[string]int{}
	for trial := first; trial < first+trials("POSTHORN_DAMAGE_TRIALS", 66); trial++ {
		t.Run(fmt.Sprint("trial ", trial), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(uint64(trial), 7))
			end := []string{"killed", "killed", "power", "power", "closed"}[rnd.IntN(5)]
			kind := suiteFiles[trial%len(suiteFiles)]
			if kind == integrity.CleanName {
				end = "closed"
			}
			v := makeEndedStore(t, rnd, []int{1, 20, 200}[trial%3], end)
			name, how, at, to := v.damageFile(t, rnd, kind)
			if name == "" { // The store has no such file.
				kind = "newest log"
				name, how, at, to = v.damageFile(t, rnd, kind)
			}
			what := fmt.Sprintf("batches of %d, %s, %s %s, bytes %d to %d", v.batch, v.end, name, how, at, to)
			provable := v.provable(t, kind, name, at, to)
			for _, n := range v.acked {
				sum.acked += int(n)
			}
			damaged := filepath.Join(t.TempDir(), "queue")
			if err := os.CopyFS(damaged, os.DirFS(v.dir)); err != nil {
				t.Fatal(err)
			}
			got, err := v.drain(t, v.dir, what)
			var r repair.Result
			if err != nil {
				sum.refused++
				if !strings.Contains(err.Error(), v.dir) || !strings.Contains(err.Error(), "posthorn repair") {
					t.Errorf("%s: the error does not name the file or the repair: %v", what, err)
				}
				before := fingerprints(t, damaged)
				dry, err := repair.Run(damaged, false, Verify)
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if after := fingerprints(t, damaged); !maps.Equal(before, after) {
					t.Errorf("%s: a dry run changed the store", what)
				}
				if r, err = repair.Run(damaged, true, Verify); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if !slices.Equal(slices.Sorted(slices.Values(dry.Lost)), slices.Sorted(slices.Values(r.Lost))) || len(r.Damaged)+len(r.Lost) == 0 ||
					r.Aside == "" {
					t.Errorf("%s: the dry run named %q as lost, the repair %q and %q as damaged; aside is %q", what, dry.Lost, r.Lost, r.Damaged, r.Aside)
				}
				if got, err = v.drain(t, damaged, what); err != nil {
					t.Fatalf("%s: after a repair: %v\n%+v", what, err, r)
				}
			}
			lost, missing := v.check(t, what, got, r)
			back := 0
			for source, n := range v.acked {
				back += max(int(n)-int(got.accepted[source]), 0)
			}
			switch {
			case back > 0 && v.end == "power" && len(r.Damaged) > 0 && atLeast(t, v.dir, got.accepted):
				// The file is named. After a power loss the counts of its messages may be
				// older.
				sum.named++
			case back > 0 && provable:
				sum.silent++
				t.Errorf("%s: %d acknowledged messages are missing from the ledger's accepted %v of %v; repair: %+v", what, back, got.accepted, v.acked, r)
			case back > 0:
				sum.torn++
				sum.tornMessages += back
			case missing > 0 && len(r.Lost) == 0:
				sum.silent++
				t.Errorf("%s: %d acknowledged messages are lost, and the repair does not name them", what, missing)
			case r.Aside != "":
				sum.repaired++
			case lost == 0:
				sum.unharmed++
			}
			sum.trials++
			sum.deadLetters += lost
			byFile[kind]++
			t.Logf("%s: refused %t, %d dead letters, %d of the ledger back; %q %q", what, r.Aside != "", lost, back, r.Damaged, r.Lost)
		})
	}
	t.Logf("%d trials %v: %d lost nothing, %d were refused and repaired, %d messages became dead letters; %d times after a power loss the count for a named file was not exact, %d times a power loss damage could not be distinguished from a torn end (%d messages); of %d acknowledged messages lost in silence: %d trials",
		sum.trials, byFile, sum.unharmed, sum.refused, sum.deadLetters, sum.named, sum.torn, sum.tornMessages, sum.acked, sum.silent)
}

// atLeast reports whether each Source has at least the messages of the file of accepted
// messages.
func atLeast(t *testing.T, dir string, accepted map[string]int64) bool {
	t.Helper()
	entries, _, err := integrity.ReadAccepted(vfs.Default, dir)
	if err != nil {
		t.Fatal(err)
	}
	return !slices.ContainsFunc(entries, func(e integrity.AcceptedEntry) bool { return int64(e.Head) > accepted[e.Source] })
}

// drained are the contents of a store.
type drained struct {
	became   map[queue.LaneID]map[uint64]string // pending, dead or lost
	accepted map[string]int64
	// discarded is the number of messages that a repair discarded, by the lane's Source and
	// destination.
	discarded int64
}

// drain opens a store and removes all messages and dead letters. It returns errors of the start
// and of lanes.
func (v endedStore) drain(t *testing.T, dir, what string) (got drained, err error) {
	t.Helper()
	got = drained{became: map[queue.LaneID]map[uint64]string{}, accepted: map[string]int64{}}
	s, err := Open(dir, Options{
		Logger: slog.New(slog.DiscardHandler), DuplicateWindow: time.Hour, Fatal: func(err error) { panic(err) },
		Now: func() time.Time { return time.Now().Add(2 * time.Hour) },
	})
	if err != nil {
		return got, err
	}
	defer func() { _ = s.Close() }()
	for _, id := range suiteLanes {
		became := map[uint64]string{}
		got.became[id] = became
		if err := s.OpenLane(id); err != nil {
			return got, err
		}
		for {
			ds, err := s.Lease(id, 64, nil)
			if err != nil {
				return got, err
			}
			for _, d := range ds {
				if became[d.Seq] != "" || !strings.HasPrefix(string(d.Body), fmt.Sprintf(`{"n":"%s",`, d.ID)) {
					t.Errorf("%s: message %d of %v is delivered as %s %.40s, before it was %q", what, d.Seq, id, d.ID, d.Body, became[d.Seq])
				}
				became[d.Seq] = "pending"
				s.Ack(d)
			}
			if len(ds) == 0 {
				break
			}
		}
		err = s.DeadLetters(t.Context(), id.Destination, "", func(d queue.DeadLetter) bool {
			if d.Lane == id {
				became[d.Seq] = "dead"
				if d.Failure.Reason == queue.ReasonDamaged {
					became[d.Seq] = "lost"
				}
			}
			return true
		})
		if err != nil {
			return got, err
		}
		if st := s.LaneStats(id); st.Balance() != nil || st.Pending != 0 {
			t.Errorf("%s: the ledger of %v is %+v", what, id, st)
		}
	}
	for _, source := range []string{web, app} {
		st := s.SourceStats(source)
		if err := st.Ledger.Balance(); err != nil {
			t.Errorf("%s: %s: %v", what, source, err)
		}
		got.accepted[source] = st.Accepted
		got.discarded += st.Ledger.Discarded
	}
	return got, nil
}

var lostDestinations = regexp.MustCompile(`^the destinations of (\S+): its (\d+) messages`)

// check compares the drained contents with the appended messages. lost are the acknowledged
// messages that are dead letters because of damage; missing are those that are not found.
func (v endedStore) check(t *testing.T, what string, got drained, r repair.Result) (lost, missing int) {
	t.Helper()
	named := func(parts ...string) bool {
		return slices.ContainsFunc(r.Lost, func(line string) bool {
			return slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(line, part) })
		})
	}
	stranded := map[string]int{} // By Source without a destination.
	for _, line := range r.Lost {
		if m := lostDestinations.FindStringSubmatch(line); m != nil {
			stranded[m[1]], _ = strconv.Atoi(m[2])
		}
	}
	unnamed := 0
	for id, fate := range v.fate {
		end := min(v.acked[id.Source], uint64(got.accepted[id.Source]))
		waited := 0
		for seq := uint64(1); seq <= end; seq++ {
			switch was, is := fate[seq], got.became[id][seq]; {
			case was == "" && is == "pending", was == "delivered" && is == "", was == "dead" && is == "dead":
			case is == "lost":
				lost++
			case is == "pending": // Delivered again: the outcome was not synced, or is damaged.
			case was != "" && v.end == "power": // Its outcome was not synced.
			case was == "dead" && is == "":
				if !named("dead letters of "+id.Destination, "data that only") {
					t.Errorf("%s: dead letter %d of %v is missing, and the repair does not name it: %q", what, seq, id, r.Lost)
				}
			default:
				waited++
			}
		}
		if missing += waited; waited > stranded[id.Source] {
			unnamed += waited
		}
	}
	// The names of some lanes, or a whole table, can concern any number of messages; their
	// count is unknown.
	if int64(unnamed) > got.discarded && !named("data that only", "the name of a lane", "possibly names of lanes") {
		t.Errorf("%s: %d messages are missing, %d were counted as discarded: %q", what, unnamed, got.discarded, r.Lost)
	}
	return lost, missing
}
