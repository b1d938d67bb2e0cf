package reliability

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/dispatcher"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

// TestDamagedFiles damages one file of a stopped dispatcher's store at a random
// place: some bytes flipped, or the end cut off. Either the dispatcher refuses to
// start and names the file, or it delivers every message all the same; it never
// passes over one in silence. POSTHORN_DAMAGE_SEEDS sets how many seeds run.
func TestDamagedFiles(t *testing.T) {
	const messages = 1500
	original := t.TempDir()
	held := destination("crm", "web", "http://127.0.0.1:1")
	held.State = liveconfig.Disabled
	r := start(t, options(t, original, pebblestore.Options{}), config([]liveconfig.Source{source("web")}, held))
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
	refused, unharmed, stopped := 0, 0, 0
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
		var box inbox
		o := options(t, dir, pebblestore.Options{Fatal: func(error) { select {} }})
		var said logs
		o.Logger = said.logger()
		d, err := dispatcher.New(o)
		if err != nil {
			refused++
			if !strings.Contains(err.Error(), filepath.Join(dir, "queue")) {
				t.Errorf("seed %d, %s: the error names no file: %v", seed, damaged, err)
			}
			if seed < 5 {
				t.Logf("%s: %v", damaged, err)
			}
			continue
		}
		r := run(d)
		r.set(t, config([]liveconfig.Source{source("web")}, destination("crm", "web", receive(t, box.ServeHTTP).url)))
		eventually(t, fmt.Sprintf("seed %d, %s: all is delivered, or the log names the damage", seed, damaged), func() error {
			report := ledger(t, r, "crm")
			if err := balance(report); err != nil {
				t.Fatal(err)
			}
			switch text := said.String(); {
			case report.Accepted != messages:
				t.Fatalf("seed %d, %s: started with %d of %d messages", seed, damaged, report.Accepted, messages)
			case box.distinct() == messages && report.Pending == 0:
				unharmed++
			case strings.Contains(text, "corrupt"):
				stopped++
				if report.Pending == 0 {
					t.Errorf("seed %d, %s: passed over messages: %+v", seed, damaged, report)
				}
			default:
				return fmt.Errorf("%d of %d arrived", box.distinct(), messages)
			}
			return nil
		})
		_ = r.stop()
	}
	t.Logf("refused to start: %d; met the damage when it was read, and stayed there: %d; harmed nothing: %d", refused, stopped, unharmed)
	if refused+stopped == 0 {
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
	names = slices.DeleteFunc(names, func(name string) bool {
		info, err := os.Stat(name)
		return err != nil || info.Size() < 16 || strings.HasPrefix(filepath.Base(name), "OPTIONS")
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
