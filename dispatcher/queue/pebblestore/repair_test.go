package pebblestore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/internal/integrity"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/repair"
)

var lane2 = queue.LaneID{Source: web, Destination: "shop/mail", Endpoint: "primary"}

// filledStore is a closed or killed store with messages in all states.
type filledStore struct {
	dir string
	// fate is the state of each message of a lane; a message without an entry is pending.
	fate map[queue.LaneID]map[uint64]string
	head uint64
}

func makeFilledStore(t *testing.T, rnd *rand.Rand) filledStore {
	t.Helper()
	x := filledStore{dir: filepath.Join(t.TempDir(), "queue"), fate: map[queue.LaneID]map[uint64]string{lane1: {}, lane2: {}}}
	s := open(t, x.dir, Options{DuplicateWindow: time.Hour, MemTableBytes: 256 << 10})
	for id := range x.fate {
		if err := s.OpenLane(id); err != nil {
			t.Fatal(err)
		}
	}
	for range 4 + rnd.IntN(8) {
		appendAll(t, s, 200, func(m *queue.Message) {
			x.head++
			m.ID, m.Body = fmt.Sprint("m", x.head), fmt.Appendf(nil, `{"n":%d,"x":"%0*x"}`, x.head, rnd.IntN(400), rnd.Uint64())
		})
		for id, fate := range x.fate {
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
		if rnd.IntN(3) == 0 {
			s.maintain(true)
		}
		if rnd.IntN(3) == 0 {
			if err := s.db.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		if rnd.IntN(6) == 0 {
			if err := s.db.Compact(context.Background(), []byte{0}, []byte{255}, false); err != nil {
				t.Fatal(err)
			}
		}
	}
	if rnd.IntN(2) == 0 {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		return x
	}
	// A killed process leaves these files. The store may be changing them.
	if err := s.flushLanes(true); err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(t.TempDir(), "queue")
	for copyKilled(x.dir, copied) != nil {
		_ = os.RemoveAll(copied)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	x.dir = copied
	return x
}

// copyKilled copies the files of an open store as the end of its process would leave them. The
// files of positions are copied first, because they must not be ahead of the others.
func copyKilled(from, to string) error {
	if err := os.MkdirAll(to, 0o700); err != nil {
		return err
	}
	names := []string{integrity.SyncedName, integrity.AcceptedName}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !slices.Contains(names, e.Name()) {
			names = append(names, e.Name())
		}
	}
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join(from, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(to, name), b, 0o600)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// damageRandomFile flips bytes of a random file, truncates it or removes it, and describes the damage.
func damageRandomFile(t *testing.T, rnd *rand.Rand, dir string) string {
	t.Helper()
	names := slices.DeleteFunc(files(t, dir, "*"), func(name string) bool {
		info, err := os.Stat(name)
		base := filepath.Base(name)
		return err != nil || info.Size() == 0 || strings.HasPrefix(base, "OPTIONS") || base == "LOCK" ||
			base == integrity.SyncedName || base == integrity.AcceptedName // Without them, damage at the end of a log may be a torn end.
	})
	name := names[rnd.IntN(len(names))]
	how := "removed"
	switch n := rnd.IntN(10); {
	case n == 0:
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	case n < 4:
		how = "cut off"
		edit(t, name, func(b []byte) []byte { return b[:rnd.IntN(len(b))] })
	default:
		how = "flipped"
		edit(t, name, func(b []byte) []byte {
			at := rnd.IntN(len(b))
			for i := at; i < min(at+1+rnd.IntN(64), len(b)); i++ {
				b[i] ^= 0x5a
			}
			return b
		})
	}
	return filepath.Base(name) + " " + how
}

// TestRepair damages stores at random places. The repaired store must open, its ledgers must
// balance, and every pending message must be delivered or be a dead letter, unless the repair
// reports lost data. POSTHORN_DAMAGE_SEEDS sets the number of seeds, POSTHORN_DAMAGE_SEED the
// first one.
func TestRepair(t *testing.T) {
	first := env("POSTHORN_DAMAGE_SEED", 1)
	all := struct{ found, lossless, messages, lost, again int }{}
	for seed := first; seed < first+trials("POSTHORN_DAMAGE_SEEDS", 20); seed++ {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(uint64(seed), 0))
			x := makeFilledStore(t, rnd)
			what := damageRandomFile(t, rnd, x.dir)
			for range rnd.IntN(3) - 1 {
				what += ", " + damageRandomFile(t, rnd, x.dir)
			}
			before := fingerprints(t, x.dir)
			dry, err := repair.Run(x.dir, false, Verify)
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if after := fingerprints(t, x.dir); !maps.Equal(before, after) {
				t.Errorf("%s: a dry run changed the store", what)
			}
			r, err := repair.Run(x.dir, true, Verify)
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if len(r.Lost) != len(dry.Lost) || len(r.Damaged) != len(dry.Damaged) || dry.Aside != "" ||
				(r.Aside == "") != (len(r.Damaged)+len(r.Lost) == 0) {
				t.Errorf("%s: the dry run found %v %v, the repair %v %v, aside %q", what, dry.Damaged, dry.Lost, r.Damaged, r.Lost, r.Aside)
			}
			if r.Aside != "" {
				if aside := fingerprints(t, r.Aside); !maps.Equal(before, aside) {
					t.Errorf("%s: the files of the damaged store changed", what)
				}
				if info, err := os.Stat(x.dir); err != nil || info.Mode().Perm() != 0o700 {
					t.Errorf("%s: other users may read the repaired store: %v, %v", what, info.Mode(), err)
				}
			}
			lost, again := x.compare(t, what, r)
			t.Logf("%s: %v\nlost: %s\n%d of %d lost, %d delivered again", what, r.Damaged, strings.Join(r.Lost, "; "), lost, x.head, again)
			if len(r.Damaged) > 0 {
				all.found++
			}
			if lost == 0 {
				all.lossless++
			}
			all.messages += int(x.head)
			all.lost += lost
			all.again += again
			if again, err := repair.Run(x.dir, true, Verify); err != nil || len(again.Damaged)+len(again.Lost) > 0 || again.Aside != "" {
				t.Errorf("%s: a repaired store is not sound: %+v %v", what, again, err)
			}
		})
	}
	t.Logf("damage found in %d stores; %d lost no message; of %d messages for two lanes %d were lost and %d delivered again", all.found, all.lossless, all.messages, all.lost, all.again)
}

// fingerprints returns the sizes and modification times of the files.
func fingerprints(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, name := range files(t, dir, "*") {
		if b, err := os.ReadFile(name); err == nil {
			all[filepath.Base(name)] = integrity.Fingerprint("", b)
		}
	}
	return all
}

// compare reads all messages of the repaired store. It counts the pending messages that are
// lost, and the settled ones that are delivered again.
func (x filledStore) compare(t *testing.T, what string, r repair.Result) (lost, again int) {
	t.Helper()
	s, err := Open(x.dir, Options{Logger: discard, DuplicateWindow: time.Hour, Now: func() time.Time { return time.Now().Add(2 * time.Hour) }})
	if err != nil {
		t.Fatalf("%s: the repaired store does not open: %v", what, err)
	}
	defer func() { _ = s.Close() }()
	for id, fate := range x.fate {
		missing := 0
		if err := s.OpenLane(id); err != nil {
			t.Fatal(err)
		}
		became := map[uint64]string{}
		for {
			got, err := s.Lease(id, 64, nil)
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			for _, d := range got {
				if became[d.Seq] != "" || !strings.HasPrefix(string(d.Body), fmt.Sprintf(`{"n":%d,`, d.Seq)) || d.ID != fmt.Sprint("m", d.Seq) {
					t.Errorf("%s: message %d is %s %s", what, d.Seq, d.ID, d.Body)
				}
				became[d.Seq] = "pending"
				s.Ack(d)
			}
			if len(got) == 0 {
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
			t.Fatalf("%s: %v", what, err)
		}
		st := s.LaneStats(id)
		if err := st.Balance(); err != nil || st.Pending != 0 {
			t.Errorf("%s: ledger %+v: %v", what, st, err)
		}
		for seq := uint64(1); seq <= x.head; seq++ {
			switch was, is := fate[seq], became[seq]; {
			case was == "" && is == "pending", was == "delivered" && is == "", was == "dead" && is == "dead":
			case was == "" && is == "lost":
				lost++
			case was == "", was == "dead" && is == "":
				missing++ // The repair must report it.
				if was == "" {
					lost++
				}
			case is == "pending", is == "lost":
				again++
			default:
				t.Errorf("%s: message %d was %s and is %s", what, seq, was, is)
			}
		}
		if missing > 0 && len(r.Damaged)+len(r.Lost) == 0 {
			t.Errorf("%s: %d messages for %v are lost, and the repair does not report it: %+v", what, missing, id, r)
		}
		if again > 0 && len(r.Damaged)+len(r.Lost) == 0 {
			t.Errorf("%s: %d messages are delivered again, and the repair does not report it", what, again)
		}
	}
	for _, name := range []string{lane1.Destination, lane2.Destination} {
		if err := s.DestinationStats(name).Ledger.Balance(); err != nil {
			t.Errorf("%s: %s: %v", what, name, err)
		}
	}
	if st := s.SourceStats(web); st.Ledger.Balance() != nil || uint64(st.Accepted) != x.head {
		t.Errorf("%s: the ledger of %s is %+v; %d messages were acknowledged", what, web, st, x.head)
	}
	return lost, again
}

func TestRepairRefuses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "queue")
	if _, err := repair.Run(dir, false, Verify); err == nil {
		t.Error("a missing store was repaired")
	}
	s := open(t, dir, Options{})
	if _, err := repair.Run(dir, true, Verify); err == nil || !strings.Contains(err.Error(), "stop it first") {
		t.Errorf("a store in use: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := repair.Run(dir, true, Verify)
	if err != nil || len(r.Damaged)+len(r.Lost) > 0 || r.Aside != "" {
		t.Errorf("a sound store: %+v %v", r, err)
	}
}

// A store of a newer release is refused, also if it is damaged, and nothing is changed.
func TestRepairRefusesNewerFormats(t *testing.T) {
	for kind, newer := range raiseFormats {
		for _, damaged := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s format, damaged %v", kind, damaged), func(t *testing.T) {
				folder := t.TempDir()
				dir := filepath.Join(folder, "queue")
				if err := errors.Join(open(t, dir, Options{}).Close(), newer.raise(vfs.Default, dir)); err != nil {
					t.Fatal(err)
				}
				if damaged {
					if err := os.Remove(files(t, dir, "MANIFEST-*")[0]); err != nil {
						t.Fatal(err)
					}
				}
				before := fingerprints(t, dir)
				for _, apply := range []bool{false, true} {
					_, err := repair.Run(dir, apply, Verify)
					want := "repair the queue in " + dir + ": a newer release wrote the store " + newer.error +
						": use that release or a newer one"
					if !errors.Is(err, ErrNewerFormat) || err.Error() != want {
						t.Errorf("repair with apply %v: got error %v, want %s", apply, err, want)
					}
				}
				if after := fingerprints(t, dir); !maps.Equal(before, after) {
					t.Errorf("files: got %v, want %v", after, before)
				}
				if found := files(t, folder, "*"); len(found) != 1 {
					t.Errorf("files beside the store: got %v, want none", found)
				}
			})
		}
	}
}
