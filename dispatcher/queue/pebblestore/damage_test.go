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

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

// flushHoldFS holds up the flushes of memtables, so that older logs are still needed.
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

// save writes the files of a file system in memory to the disk.
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
		data, err := readAll(fs, fs.PathJoin(from, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(to, name), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestFlippedBitInNewestLog: one flipped bit in the newest log of a killed store with batches
// of 200 calls is named at the start, and a repair gives the exact count.
func TestFlippedBitInNewestLog(t *testing.T) {
	const batches, calls, trials = 30, 200, 15
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
			t.Errorf("flip at byte %d: the store starts with %d of %d messages, and no word", at, s.SourceStats(web).Accepted, batches*calls)
			silent++
			_ = s.Close()
			continue
		}
		if !strings.Contains(err.Error(), filepath.Base(logs[len(logs)-1])) {
			t.Errorf("flip at byte %d: the error does not name the log: %v", at, err)
		}
		r, err := Repair(dir, true)
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
	t.Logf("%d of %d flips were taken for a torn end", silent, trials)
}

// TestRepairOfFirstMessages: messages in front of the first that can be read, which no
// trim has freed, are dead letters after a repair where the retry index may be incomplete.
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
	if err := s.flushLanes(pebble.Sync); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "queue")
	save(t, mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(1, 1))}), "queue", dir)
	logs := files(t, dir, "*.log")
	edit(t, logs[len(logs)-1], func(b []byte) []byte {
		b[bytes.Index(b, []byte("marker0"))] ^= 1
		return b
	})
	if _, err := Repair(dir, true); err != nil {
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
	comes := 0
	for {
		got, err := s2.Lease(lane1, calls, got[:0])
		if err != nil {
			t.Fatal(err)
		}
		if len(got) == 0 {
			break
		}
		for _, d := range got {
			comes++
			s2.Ack(d)
		}
	}
	if dead := s2.LaneStats(lane1).DeadLettered; comes != calls || dead != calls {
		t.Errorf("%d messages are delivered and %d are dead letters after the repair; want %d and %d", comes, dead, calls, calls)
	}
}

var lostMessages = regexp.MustCompile(`^messages (\d+) to (\d+) of (\S+) \((\d+)\)$`)

// countLost sums up the messages that a repair names as lost, by Source.
func countLost(t *testing.T, r Repaired) map[string]int {
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

// victim is a store in the state that its end left, on the disk.
type victim struct {
	dir   string
	end   string // killed, power or closed
	batch int
	// acked is how many messages of each Source were acknowledged before the end.
	acked map[string]uint64
	// fate is what became of the messages of each lane; those without one wait.
	fate map[queue.LaneID]map[uint64]string
}

// makeVictim fills a store with batches, settles some messages, and ends it.
func makeVictim(t *testing.T, rnd *rand.Rand, batch int, end string) victim {
	t.Helper()
	v := victim{dir: filepath.Join(t.TempDir(), "queue"), end: end, batch: batch, acked: map[string]uint64{}, fate: map[queue.LaneID]map[uint64]string{}}
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
		if i == held { // From here on nothing is flushed, so that older logs are needed at the end.
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
	// More calls are under way while the process or the power ends.
	var stop atomic.Bool
	var senders sync.WaitGroup
	if rnd.IntN(2) == 0 {
		rnd := rand.New(rand.NewPCG(rnd.Uint64(), 1))
		senders.Go(func() {
			under := victim{batch: batch, acked: map[string]uint64{}}
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

// append adds one batch and notes that it was acknowledged.
func (v *victim) append(t *testing.T, s *Store, rnd *rand.Rand, source string, n *int) {
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
func (v *victim) settle(t *testing.T, s *Store, rnd *rand.Rand) {
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
var suiteFiles = []string{"newest log", "newest log", "older log", "table", "MANIFEST-*", "marker.*", "OPTIONS-*", syncedName, acceptedName, cleanName, damagedName}

// hurt damages a file of some kind and says which and how. at is the first damaged byte and to
// the end of the damage in it.
func (v victim) hurt(t *testing.T, rnd *rand.Rand, kind string) (name, how string, at, to int64) {
	t.Helper()
	pattern := kind
	switch kind {
	case "newest log", "older log":
		pattern = "*.log"
	case "table":
		pattern = "*.sst"
	case damagedName:
		if err := os.WriteFile(filepath.Join(v.dir, damagedName), []byte(filepath.Join(v.dir, "000001.sst")), 0o600); err != nil {
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

// provable reports whether something proves that the bytes of a log from at on were synced: the file of
// positions, or a mark in a sound record behind to. Without damage in a log everything is.
func (v victim) provable(t *testing.T, kind, name string, at, to int64) bool {
	t.Helper()
	if kind != "newest log" || v.end != "power" {
		return true
	}
	positions, _, err := readSynced(vfs.Default, v.dir)
	if err != nil {
		t.Fatal(err)
	}
	proved := int64(0)
	number, _ := logNumber(name)
	for _, p := range positions {
		if p.name == name {
			proved = p.offset
		}
	}
	_, err = scanLogFile(vfs.Default, filepath.Join(v.dir, name), number, batchHead, nil, func(r logRecord) error {
		if log, offset, ok := markOf(r.data); ok && log == number && r.at >= to {
			proved = max(proved, offset)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return proved > at
}

// TestDamageSuite damages one file of a store after a kill, a power loss or a clean shutdown:
// a flipped bit, a cut or a zeroed page. Whatever the file and the place: every message
// that was acknowledged is delivered, or is a dead letter, or a repair names it with an exact count; the
// ledger balances and its accepted messages do not get fewer. After a power loss this
// holds for all that something proves to have been synced; the rest is counted apart.
//
// POSTHORN_DAMAGE_TRIALS sets how many trials run, POSTHORN_DAMAGE_TRIAL which is the first.
func TestDamageSuite(t *testing.T) {
	first := env("POSTHORN_DAMAGE_TRIAL", 1)
	var sum struct{ trials, unharmed, refused, repaired, deadLetters, named, torn, tornMessages, acked, silent int }
	byFile := map[string]int{}
	for trial := first; trial < first+env("POSTHORN_DAMAGE_TRIALS", 66); trial++ {
		t.Run(fmt.Sprint("trial ", trial), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(uint64(trial), 7))
			end := []string{"killed", "killed", "power", "power", "closed"}[rnd.IntN(5)]
			kind := suiteFiles[trial%len(suiteFiles)]
			if kind == cleanName {
				end = "closed"
			}
			v := makeVictim(t, rnd, []int{1, 20, 200}[trial%3], end)
			name, how, at, to := v.hurt(t, rnd, kind)
			if name == "" { // The store has no such file.
				kind = "newest log"
				name, how, at, to = v.hurt(t, rnd, kind)
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
			var r Repaired
			if err != nil {
				sum.refused++
				if !strings.Contains(err.Error(), v.dir) || !strings.Contains(err.Error(), "posthorn repair") {
					t.Errorf("%s: the error names no file or no way out: %v", what, err)
				}
				before := fingerprints(t, damaged)
				dry, err := Repair(damaged, false)
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if after := fingerprints(t, damaged); !maps.Equal(before, after) {
					t.Errorf("%s: a dry run changed the store", what)
				}
				if r, err = Repair(damaged, true); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				if !slices.Equal(slices.Sorted(slices.Values(dry.Lost)), slices.Sorted(slices.Values(r.Lost))) || len(r.Damaged)+len(r.Lost) == 0 || r.Aside == "" {
					t.Errorf("%s: the dry run named %q as lost, the repair %q and %q as damaged; aside is %q", what, dry.Lost, r.Lost, r.Damaged, r.Aside)
				}
				if got, err = v.drain(t, damaged, what); err != nil {
					t.Fatalf("%s: after a repair: %v\n%+v", what, err, r)
				}
			}
			lost, gone := v.check(t, what, got, r)
			back := 0
			for source, n := range v.acked {
				back += max(int(n)-int(got.accepted[source]), 0)
			}
			switch {
			case back > 0 && v.end == "power" && len(r.Damaged) > 0 && atLeast(t, v.dir, got.accepted):
				// The file is named. How many messages it held is as old as what the power loss left of the counts.
				sum.named++
			case back > 0 && provable:
				sum.silent++
				t.Errorf("%s: %d acknowledged messages are missing from the ledger's accepted %v of %v; repair: %+v", what, back, got.accepted, v.acked, r)
			case back > 0:
				sum.torn++
				sum.tornMessages += back
			case gone > 0 && len(r.Lost) == 0:
				sum.silent++
				t.Errorf("%s: %d acknowledged messages are gone and nothing names them", what, gone)
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
	t.Logf("%d trials %v: %d lost nothing, %d were refused and repaired, %d messages became dead letters; %d times after a power loss the count for a named file was not exact, %d times a power loss damage could not be told from a torn end (%d messages); of %d acknowledged messages lost in silence: %d trials",
		sum.trials, byFile, sum.unharmed, sum.refused, sum.deadLetters, sum.named, sum.torn, sum.tornMessages, sum.acked, sum.silent)
}

// atLeast reports whether no Source has fewer messages than the file of accepted messages says.
func atLeast(t *testing.T, dir string, accepted map[string]int64) bool {
	t.Helper()
	entries, _, err := readAccepted(vfs.Default, dir)
	if err != nil {
		t.Fatal(err)
	}
	return !slices.ContainsFunc(entries, func(e acceptedEntry) bool { return int64(e.head) > accepted[e.source] })
}

// drained is what a store gave.
type drained struct {
	became   map[queue.LaneID]map[uint64]string // comes, dead or lost
	accepted map[string]int64
	// discarded are the messages that a repair counted so, by lane's Source and destination.
	discarded int64
}

// drain opens a store and takes all messages and dead letters out of it. An error is what the start or a lane says.
func (v victim) drain(t *testing.T, dir, what string) (got drained, err error) {
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
					t.Errorf("%s: message %d of %v comes as %s %.40s, before it was %q", what, d.Seq, id, d.ID, d.Body, became[d.Seq])
				}
				became[d.Seq] = "comes"
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

// check compares what a store gave with what it was given. lost are the acknowledged messages that are
// dead letters for their damage, gone those that are nowhere.
func (v victim) check(t *testing.T, what string, got drained, r Repaired) (lost, gone int) {
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
			case was == "" && is == "comes", was == "delivered" && is == "", was == "dead" && is == "dead":
			case is == "lost":
				lost++
			case is == "comes": // Again: what settled it was not synced, or is damaged.
			case was != "" && v.end == "power": // Its settlement was not synced.
			case was == "dead" && is == "":
				if !named("dead letters of "+id.Destination, "whatever only") {
					t.Errorf("%s: dead letter %d of %v is gone, and nothing names it: %q", what, seq, id, r.Lost)
				}
			default:
				waited++
			}
		}
		if gone += waited; waited > stranded[id.Source] {
			unnamed += waited
		}
	}
	// The names of some lanes, or a whole table, can hold any number of messages: no count of them survives.
	if int64(unnamed) > got.discarded && !named("whatever only", "the name of a lane", "possibly names of lanes") {
		t.Errorf("%s: %d messages are gone, %d were counted as discarded: %q", what, unnamed, got.discarded, r.Lost)
	}
	return lost, gone
}
