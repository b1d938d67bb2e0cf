package reliability

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/process"
)

// TestDamagedFiles damages one file of a stopped dispatcher's store at a random
// place: some bytes flipped, or the end cut off. Either the dispatcher refuses to
// start and names the file, and starts after a repair; or it starts. Then every
// message arrives, or is a dead letter that says that it was damaged, or the
// repair said what is lost; none is passed over in silence, and none holds up the
// others. POSTHORN_DAMAGE_SEEDS sets how many seeds run.
func TestDamagedFiles(t *testing.T) {
	const messages = 1500
	original := t.TempDir()
	paused := destination("crm", "web", "http://127.0.0.1:1")
	paused.State = liveconfig.Disabled
	r := start(t, options(t, original, pebblestore.Options{}), config([]liveconfig.Source{source("web")}, paused))
	c := newClient()
	defer c.close()
	for n := 0; n < messages; n += 100 {
		var calls []string
		for i := range 100 {
			calls = append(calls, call(fmt.Sprint("m", n+i), fmt.Sprintf(`,"properties":{"x":%d}`, rand.Uint64())))
		}
		if a, err := c.batch(t.Context(), r.Addr(), "web", calls...); err != nil || a.status != 200 {
			t.Fatal(a, err)
		}
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	var refused, unharmed, arrived, setAside, lost int
	for seed := range number("POSTHORN_DAMAGE_SEEDS", 25) {
		rnd := rand.New(rand.NewPCG(uint64(seed), 0))
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS(original)); err != nil {
			t.Fatal(err)
		}
		damaged := damage(t, rnd, filepath.Join(dir, "queue"))
		if damaged == "" {
			continue
		}
		var said process.Log
		var repaired pebblestore.Repaired
		o := options(t, dir, pebblestore.Options{Fatal: func(error) { select {} }})
		o.Logger = slog.New(slog.NewTextHandler(&said, nil))
		d, err := dispatcher.New(o)
		if err != nil {
			refused++
			if !strings.Contains(err.Error(), filepath.Join(dir, "queue")) || !strings.Contains(err.Error(), "posthorn repair") {
				t.Errorf("seed %d, %s: the error names no file, or no way out: %v", seed, damaged, err)
			}
			if repaired, err = pebblestore.Repair(filepath.Join(dir, "queue"), true); err != nil || repaired.Aside == "" {
				t.Fatalf("seed %d, %s: %+v %v", seed, damaged, repaired, err)
			}
			if d, err = dispatcher.New(o); err != nil {
				t.Fatalf("seed %d, %s: after a repair: %v", seed, damaged, err)
			}
		}
		var box inbox
		r := run(d)
		r.set(t, config([]liveconfig.Source{source("web")}, destination("crm", "web", receive(t, box.ServeHTTP).url)))
		dead := 0
		eventually(t, fmt.Sprintf("seed %d, %s: all is settled", seed, damaged), func() error {
			report := ledger(t, r, "crm")
			if err := balance(report); err != nil {
				t.Fatal(err)
			}
			if dead = int(report.DeadLettered); report.Pending > 0 {
				return fmt.Errorf("%d pending, %d arrived", report.Pending, box.distinct())
			}
			return nil
		})
		gone := messages - box.distinct() - dead
		switch {
		case gone != 0 && len(repaired.Lost) == 0:
			t.Errorf("seed %d, %s: of %d messages %d arrived and %d are dead letters, and nothing was said of the others: %v", seed, damaged, messages, box.distinct(), dead, repaired.Damaged)
		case dead > 0 && len(repaired.Lost) == 0 && !strings.Contains(said.String(), "damaged"):
			t.Errorf("seed %d, %s: no word of %d damaged messages in the log", seed, damaged, dead)
		case box.distinct() == messages:
			unharmed++
		}
		err = r.Store().DeadLetters(t.Context(), namespace+"/crm", "", func(l queue.DeadLetter) bool {
			if l.Failure.Reason != queue.ReasonDamaged || l.Failure.Message == "" {
				t.Errorf("seed %d, %s: a dead letter because of %+v", seed, damaged, l.Failure)
			}
			return true
		})
		if err != nil {
			t.Errorf("seed %d, %s: %v", seed, damaged, err)
		}
		arrived, setAside, lost = arrived+box.distinct(), setAside+dead, lost+gone
		balanced(t, r)
		_ = r.stop()
	}
	t.Logf("%d stores were refused and repaired; %d lost nothing at all; %d messages arrived, %d became dead letters, %d were reported as lost by a repair", refused, unharmed, arrived, setAside, lost)
	if refused == 0 || setAside == 0 {
		t.Error("no damage was found at all")
	}
}

// damage changes one file that holds something, and says which and how.
func damage(t *testing.T, rnd *rand.Rand, dir string) string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	// The other files of the store are those of pebblestore's TestDamageSuite.
	names = slices.DeleteFunc(names, func(name string) bool {
		info, err := os.Stat(name)
		return err != nil || info.Size() < 16 || !strings.HasPrefix(filepath.Base(name), "MANIFEST") && filepath.Ext(name) == ""
	})
	name := names[rnd.IntN(len(names))]
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	at, how := rnd.IntN(len(b)), "flipped"
	if rnd.IntN(2) == 0 {
		b, how = b[:at], "cut off"
	} else {
		for i := at; i < min(at+8, len(b)); i++ {
			b[i] ^= 0x5a
		}
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%s %s at %d", filepath.Base(name), how, at)
}
