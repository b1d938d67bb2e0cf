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

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/repair"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// TestDamagedFiles damages one file of a stopped dispatcher's store at a random
// position: it flips some bytes or truncates the file. Either the dispatcher fails to
// start with an error that names the file, and starts after a repair, or it starts. Then every
// message is delivered, or is a dead letter with the reason Damaged, or is in the repair's
// report of losses. No message is lost silently, and none blocks others.
// POSTHORN_DAMAGE_SEEDS sets the number of seeds.
func TestDamagedFiles(t *testing.T) {
	const messages = 1500
	original := t.TempDir()
	suspended := destination("crm", "web", "http://127.0.0.1:1")
	suspended.State = liveconfig.Suspended
	r := start(t, options(t, original, pebblestore.Options{}), config([]liveconfig.Source{source("web")}, suspended))
	c := newClient()
	defer c.close()
	for n := 0; n < messages; n += 100 {
		var calls []string
		for i := range 100 {
			calls = append(calls, call(fmt.Sprint("m", n+i), fmt.Sprintf(`,"properties":{"x":%d}`, rand.Uint64())))
		}
		if a, err := c.batch(t.Context(), r.Addr(), "web", calls...); err != nil || a.status != 200 {
			t.Fatalf("batch: got %+v and error %v, want 200", a, err)
		}
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	var rejected, unharmed, delivered, deadLettered, lost int
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
		var logs process.Log
		var repaired repair.Result
		o := options(t, dir, pebblestore.Options{Fatal: func(error) { select {} }})
		o.Logger = slog.New(slog.NewTextHandler(&logs, nil))
		d, err := dispatcher.New(o)
		if err != nil {
			rejected++
			if !strings.Contains(err.Error(), filepath.Join(dir, "queue")) || !strings.Contains(err.Error(), "posthorn repair") {
				t.Errorf("seed %d, %s: start: got error %v, want one with the file and `posthorn repair`", seed, damaged, err)
			}
			if repaired, err = repair.Run(filepath.Join(dir, "queue"), true, pebblestore.Verify); err != nil || repaired.Aside == "" {
				t.Fatalf("seed %d, %s: repair: got %+v and error %v, want the path of the damaged store", seed, damaged, repaired, err)
			}
			if d, err = dispatcher.New(o); err != nil {
				t.Fatalf("seed %d, %s: start after a repair: got error %v, want none", seed, damaged, err)
			}
		}
		var box inbox
		r := run(d)
		r.set(t, config([]liveconfig.Source{source("web")}, destination("crm", "web", receive(t, box.ServeHTTP).url)))
		dead := 0
		wait.For(t, fmt.Sprintf("seed %d, %s: no pending messages", seed, damaged), func() error {
			report := ledger(t, r, "crm")
			if err := balance(report); err != nil {
				t.Fatal(err)
			}
			if dead = int(report.DeadLettered); report.Pending > 0 {
				return fmt.Errorf("%d pending, %d delivered", report.Pending, box.distinct())
			}
			return nil
		})
		missing := messages - box.distinct() - dead
		switch {
		case missing != 0 && len(repaired.Lost) == 0:
			t.Errorf("seed %d, %s: unreported losses: got %d of %d messages (%d delivered, %d dead letters), want 0; repaired: %v", seed, damaged, missing, messages, box.distinct(), dead, repaired.Damaged)
		case dead > 0 && len(repaired.Lost) == 0 && !strings.Contains(logs.String(), "damaged"):
			t.Errorf("seed %d, %s: the log does not report the %d damaged messages", seed, damaged, dead)
		case box.distinct() == messages:
			unharmed++
		}
		err = r.Store().DeadLetters(t.Context(), namespace+"/crm", "", func(l queue.DeadLetter) bool {
			if l.Failure.Reason != queue.ReasonDamaged || l.Failure.Message == "" {
				t.Errorf("seed %d, %s: failure of a dead letter: got %+v, want the reason Damaged and a message", seed, damaged, l.Failure)
			}
			return true
		})
		if err != nil {
			t.Errorf("seed %d, %s: dead letters: got error %v, want none", seed, damaged, err)
		}
		delivered, deadLettered, lost = delivered+box.distinct(), deadLettered+dead, lost+missing
		balanced(t, r)
		_ = r.stop()
	}
	t.Logf("%d stores were rejected and repaired; %d lost no message; %d messages were delivered, %d became dead letters, a repair reported %d as lost", rejected, unharmed, delivered, deadLettered, lost)
	if rejected == 0 || deadLettered == 0 {
		t.Errorf("detected damage: got %d rejected stores and %d dead letters, want some of each", rejected, deadLettered)
	}
}

// damage changes one file, and returns its name and the change.
func damage(t *testing.T, rnd *rand.Rand, dir string) string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	// TestDamageSuite of pebblestore covers the other files of the store.
	names = slices.DeleteFunc(names, func(name string) bool {
		info, err := os.Stat(name)
		return err != nil || info.Size() < 16 || !strings.HasPrefix(filepath.Base(name), "MANIFEST") && filepath.Ext(name) == ""
	})
	name := names[rnd.IntN(len(names))]
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	at, change := rnd.IntN(len(b)), "flipped"
	if rnd.IntN(2) == 0 {
		b, change = b[:at], "truncated"
	} else {
		for i := at; i < min(at+8, len(b)); i++ {
			b[i] ^= 0x5a
		}
	}
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%s %s at %d", filepath.Base(name), change, at)
}
