package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/posthorn/posthorn/test/process"
)

// lockUse is the use of the locks of a kind: those that were first unlocked in the same function.
type lockUse struct {
	Unlocked string // the function
	Held     float64
	Times    int64
}

// lockReport returns the use of all locks, in seconds; nil in a program without locks.go.txt.
var lockReport func() []lockUse

// lockFile is the environment variable with the file to which a dispatcher writes the use of its locks at its end.
const lockFile = "POSTHORN_BENCH_LOCKS"

// writeLocks writes the use of the locks if the environment demands it.
func writeLocks() {
	if file := os.Getenv(lockFile); file != "" && lockReport != nil {
		text, _ := json.Marshal(lockReport())
		_ = os.WriteFile(file, text, 0o600)
	}
}

// busiestLocks is the number of locks in the row.
const busiestLocks = 5

// measureLocks measures for how long the busiest locks of a dispatcher are held for a message: with a program whose
// sync.Mutex counts it. The figures contain about 50 ns for two readings of the clock each time. Readers of a sync.RWMutex
// do not count.
func measureLocks(ctx context.Context, b *bench) ([]row, error) {
	wrapped, err := buildWithLocks(b.root)
	if err != nil {
		return nil, err
	}
	file := b.dir("locks.json")
	if err := os.Setenv(lockFile, file); err != nil {
		return nil, err
	}
	original := program
	program = func() (string, error) { return wrapped, nil }
	defer func() { program = original; _ = os.Unsetenv(lockFile) }()
	got, err := b.throughput(ctx, load{batch: 20, clients: 8}, destinations(1, b.sink.Addr))
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var uses []lockUse
	if err := json.Unmarshal(text, &uses); err != nil {
		return nil, err
	}
	slices.SortFunc(uses, func(a, b lockUse) int { return int(1e9 * (b.Held - a.Held)) })
	var rows []row
	for _, use := range uses[:min(busiestLocks, len(uses))] {
		each := 1e6 * use.Held / float64(got.delivered)
		rows = append(rows, atMost("lock held for a message: "+use.Unlocked, each, 1,
			fmt.Sprintf("%.2f us, %.1f times", each, float64(use.Times)/float64(got.delivered)), "<= 1 us"))
	}
	return rows, nil
}

var (
	mutexFields = regexp.MustCompile(`(?m)^type Mutex struct \{\n\t_ noCopy\n\n\tmu isync\.Mutex\n\}$`)
	mutexLock   = regexp.MustCompile(`(?m)^func \(m \*Mutex\) Lock\(\) \{\n\tm\.mu\.Lock\(\)\n\}$`)
	mutexTry    = regexp.MustCompile(`(?m)^func \(m \*Mutex\) TryLock\(\) bool \{\n\treturn m\.mu\.TryLock\(\)\n\}$`)
	mutexUnlock = regexp.MustCompile(`(?m)^func \(m \*Mutex\) Unlock\(\) \{\n\tm\.mu\.Unlock\(\)\n\}$`)
)

// buildWithLocks builds this program with another sync.Mutex into a directory, and returns its path.
func buildWithLocks(dir string) (string, error) {
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "", err
	}
	original := filepath.Join(strings.TrimSpace(string(out)), "src", "sync", "mutex.go")
	text, err := os.ReadFile(original)
	if err != nil {
		return "", err
	}
	for _, change := range []struct {
		of *regexp.Regexp
		to string
	}{
		{mutexFields, "type Mutex struct {\n\t_ noCopy\n\n\tmu isync.Mutex\n\tuse mutexUse\n}"},
		{mutexLock, "func (m *Mutex) Lock() {\n\tm.mu.Lock()\n\tm.use.begin()\n}"},
		{mutexTry, "func (m *Mutex) TryLock() bool {\n\tlocked := m.mu.TryLock()\n\tif locked {\n\t\tm.use.begin()\n\t}\n\treturn locked\n}"},
		{mutexUnlock, "func (m *Mutex) Unlock() {\n\tm.use.end()\n\tm.mu.Unlock()\n}"},
	} {
		if !change.of.Match(text) {
			return "", errors.New("unknown sync.Mutex in this version of Go; adapt buildWithLocks")
		}
		text = change.of.ReplaceAllLiteral(text, []byte(change.to))
	}
	root, err := filepath.Abs(".")
	if err != nil {
		return "", err
	}
	here := filepath.Join(root, "hack", "bench")
	changed, overlay, binary := filepath.Join(dir, "mutex.go"), filepath.Join(dir, "locks-overlay.json"), filepath.Join(dir, "bench-locks")
	list, _ := json.Marshal(map[string]any{"Replace": map[string]string{
		original: changed,
		filepath.Join(filepath.Dir(original), "mutexuse.go"): filepath.Join(here, "locks", "mutexuse.go.txt"),
		filepath.Join(here, "locks_report.go"):               filepath.Join(here, "locks", "report.go.txt"),
	}})
	if err := errors.Join(os.WriteFile(changed, text, 0o600), os.WriteFile(overlay, list, 0o600)); err != nil {
		return "", err
	}
	return binary, process.Compile(root, "./hack/bench", binary, "-overlay", overlay)
}
