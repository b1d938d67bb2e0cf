package backup

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func unlimited(string) (int64, error) { return math.MaxInt64, nil }

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// contents returns the files below a folder, without index and checksums.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	names, _, err := list(dir)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, name := range names {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if name != IndexName && name != SumsName {
			all[name] = string(text)
		}
	}
	return all
}

// newData makes a data directory and the options that back it up.
func newData(t *testing.T) Options {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, QueueFolder, "000001.log"), "live")
	write(t, filepath.Join(dir, "manifests.json"), "{}")
	write(t, filepath.Join(dir, TokenName), "not part of a backup")
	write(t, filepath.Join(dir, "dump.sql"), "not part of a backup")
	write(t, filepath.Join(dir, MembersFolder, "a", "members-1"), "ann")
	write(t, filepath.Join(dir, MembersFolder, "a", "sync-2", "run"), "in progress")
	return Options{
		DataDir: dir, Version: "v1", Now: func() time.Time { return time.Unix(1, 0) },
		HoldRemovals: func() func() { return func() {} }, Check: func() error { return nil },
		Verify: func(string) error { return nil },
		Checkpoint: func(to string) error {
			write(t, filepath.Join(to, "000001.log"), strings.Repeat("checkpoint", 200_000))
			return nil
		},
	}
}

var wholeBackup = map[string]string{
	"queue/000001.log": strings.Repeat("checkpoint", 200_000), "manifests.json": "{}", "audience-members/a/members-1": "ann",
}

func take(t *testing.T, o Options) []byte {
	t.Helper()
	var archive bytes.Buffer
	if _, err := Take(o, &archive); err != nil {
		t.Fatal(err)
	}
	return archive.Bytes()
}

func TestRoundTrip(t *testing.T) {
	o := newData(t)
	archive := take(t, o)
	if _, err := os.Stat(filepath.Join(o.DataDir, workFolder)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the work folder after the backup: got %v, want %v", err, os.ErrNotExist)
	}
	for _, target := range []string{"b.tar", "folder"} {
		path := filepath.Join(t.TempDir(), target)
		index, err := Save(bytes.NewReader(archive), path, unlimited)
		if err != nil {
			t.Fatalf("%s: %v", target, err)
		}
		if want := (Index{Format: 1, Version: "v1", Time: time.Unix(1, 0).UTC(), Bytes: 2_000_005}); index != want {
			t.Errorf("%s: index: got %+v, want %+v", target, index, want)
		}
		r, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		restored := t.TempDir()
		if _, err := Extract(r, restored, unlimited); err != nil {
			t.Errorf("%s: extract: %v", target, err)
		}
		_ = r.Close()
		if diff := cmp.Diff(wholeBackup, contents(t, restored)); diff != "" {
			t.Errorf("%s: restored files (-want +got):\n%s", target, diff)
		}
		if _, err := Save(bytes.NewReader(archive), path, unlimited); err == nil {
			t.Errorf("%s: save over an existing target: got no error, want one", target)
		}
		if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); len(left) > 0 {
			t.Errorf("%s: rest: got %v, want none", target, left)
		}
	}
}

// Every prefix of an archive that lacks its checksums is incomplete, and a changed byte is found.
func TestDamagedArchives(t *testing.T) {
	archive := take(t, newData(t))
	sums := bytes.LastIndex(archive, []byte(SumsName))
	for _, size := range []int{0, 1, 511, 512, 1024, 4000, 1 << 20, sums, sums + 512, sums + 600} {
		target := filepath.Join(t.TempDir(), "b.tar")
		if _, err := Save(bytes.NewReader(archive[:size]), target, unlimited); !errors.Is(err, ErrIncomplete) {
			t.Errorf("first %d bytes: got %v, want %v", size, err, ErrIncomplete)
		}
		if _, err := os.Stat(target); err == nil {
			t.Errorf("first %d bytes: the target exists", size)
		}
	}
	for _, text := range []string{"checkpointcheckpoint", "ann"} {
		changed := bytes.Clone(archive)
		changed[bytes.LastIndex(changed, []byte(text))] ^= 1
		_, err := Save(bytes.NewReader(changed), filepath.Join(t.TempDir(), "folder"), unlimited)
		if err == nil || !strings.Contains(err.Error(), "differs from its checksum") {
			t.Errorf("a changed byte in %q: got %v, want an error about its checksum", text, err)
		}
	}
	escaping := bytes.Replace(archive, []byte("manifests.json\x00"), []byte("../manifests.j\x00"), 1)
	foreign := bytes.Replace(archive, []byte("manifests.json\x00"), []byte("manifests.yaml\x00"), 1)
	for name, archive := range map[string][]byte{"a file outside of the folder": escaping, "another file": foreign} {
		if _, err := Save(bytes.NewReader(archive), filepath.Join(t.TempDir(), "folder"), unlimited); err == nil {
			t.Errorf("%s: got no error, want one", name)
		}
	}
	for _, text := range []string{"root:x:0:0:root:/root:/bin/bash\n", "\x1f\x8b\b", strings.Repeat("x", 2000)} {
		_, err := Read(strings.NewReader(text), spaceCheck{t.TempDir(), unlimited})
		if err == nil || !strings.Contains(err.Error(), "not a backup of Posthorn") {
			t.Errorf("%.10q: got %v, want an error that it is not a backup", text, err)
		}
	}
}

// An archive that declares fewer bytes than it has is rejected before the file that exceeds them is
// created, because only the declared bytes were compared with the free space.
func TestDeclaresTooFewBytes(t *testing.T) {
	archive := take(t, newData(t))
	const size = 10*200_000 + len("{}") + len("ann")
	for _, declared := range []int{size - 1, 0} {
		sink := &createdFiles{}
		text := fmt.Sprintf(`"bytes":%*d`, len(strconv.Itoa(size)), declared)
		_, err := Read(bytes.NewReader(bytes.Replace(archive, fmt.Appendf(nil, `"bytes":%d`, size), []byte(text), 1)), sink)
		if err == nil || !strings.Contains(err.Error(), "bytes that backup.json declares") {
			t.Errorf("%d bytes declared: got %v, want an error about the declared bytes", declared, err)
		}
		if sink.bytes > declared {
			t.Errorf("%d bytes declared: got %d bytes in files", declared, sink.bytes)
		}
	}
}

// createdFiles counts the bytes of the files of a data directory that Read writes.
type createdFiles struct{ bytes int }

func (*createdFiles) Start(Index) error { return nil }

func (c *createdFiles) Create(name string) (io.WriteCloser, error) {
	if name == IndexName || name == SumsName {
		c = &createdFiles{}
	}
	return c, nil
}

func (c *createdFiles) Write(p []byte) (int, error) {
	c.bytes += len(p)
	return len(p), nil
}

func (*createdFiles) Close() error { return nil }

func TestTooLittleSpace(t *testing.T) {
	archive := take(t, newData(t))
	for _, target := range []string{"b.tar", "folder"} {
		path := filepath.Join(t.TempDir(), target)
		read := &countingReader{Reader: bytes.NewReader(archive)}
		_, err := Save(read, path, func(string) (int64, error) { return 17 << 20, nil })
		if err == nil || !strings.Contains(err.Error(), "free space") {
			t.Errorf("%s: got %v, want an error about the free space", target, err)
		}
		if read.n > 64<<10 {
			t.Errorf("%s: %d bytes were read before the check", target, read.n)
		}
	}
}

type countingReader struct {
	io.Reader
	n int
}

func (r *countingReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.n += n
	return n, err
}

// A full disk ends a backup within a MiB, and removes its work folder.
func TestEndsEarly(t *testing.T) {
	o := newData(t)
	full := errors.New("full")
	calls := 0
	o.Check = func() error {
		if calls++; calls > 1 {
			return full
		}
		return nil
	}
	var archive bytes.Buffer
	if _, err := Take(o, &archive); !errors.Is(err, full) {
		t.Errorf("got %v, want %v", err, full)
	}
	if archive.Len() > 2*chunkBytes {
		t.Errorf("archive: got %d bytes, want at most %d", archive.Len(), 2*chunkBytes)
	}
	if _, err := os.Stat(filepath.Join(o.DataDir, workFolder)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the work folder: got %v, want %v", err, os.ErrNotExist)
	}
}

// The state of the manifests is as old as the checkpoint.
func TestStateChangesMeanwhile(t *testing.T) {
	o := newData(t)
	checkpoint, tries := o.Checkpoint, 0
	state := filepath.Join(o.DataDir, "manifests.json")
	o.Checkpoint = func(to string) error {
		if tries++; tries == 1 {
			write(t, state, `{"changed":1}`)
		}
		return checkpoint(to)
	}
	dir := t.TempDir()
	if _, err := Extract(bytes.NewReader(take(t, o)), dir, unlimited); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, dir)["manifests.json"]; got != `{"changed":1}` || tries != 2 {
		t.Errorf("state: got %s after %d checkpoints, want the changed one after 2", got, tries)
	}
	o.Checkpoint = func(to string) error {
		tries++
		write(t, state, strings.Repeat("x", tries))
		return checkpoint(to)
	}
	if _, err := Take(o, io.Discard); err == nil {
		t.Error("a state that changes with every checkpoint: got no error, want one")
	}
}

// A state of the manifests of any size is not read into memory, and one that is too large to be
// Posthorn's is refused.
func TestLargeState(t *testing.T) {
	o := newData(t)
	state := filepath.Join(o.DataDir, StateName)
	for _, c := range []struct {
		size   int64
		accept bool
	}{{maxStateBytes, true}, {maxStateBytes + 1, false}} {
		if err := os.Truncate(state, c.size); err != nil { // The file is sparse.
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := Take(o, io.Discard)
		runtime.ReadMemStats(&after)
		if accepted := err == nil; accepted != c.accept {
			t.Errorf("%d bytes: got %v, want accepted: %v", c.size, err, c.accept)
		}
		if allocated := after.TotalAlloc - before.TotalAlloc; allocated > 64<<20 {
			t.Errorf("%d bytes: got %d bytes of allocations, want at most 64 MiB", c.size, allocated)
		}
	}
}

// The time of a backup is before the checkpoint: a call that is answered between both is part of it.
func TestTimeIsBeforeTheCheckpoint(t *testing.T) {
	o := newData(t)
	now := time.Unix(1, 0)
	o.Now = func() time.Time { return now }
	checkpoint := o.Checkpoint
	o.Checkpoint = func(to string) error {
		now = now.Add(time.Second)
		return checkpoint(to)
	}
	index, err := Take(o, io.Discard)
	if want := time.Unix(1, 0).UTC(); err != nil || !index.Time.Equal(want) {
		t.Errorf("time: got %v, %v, want %v", index.Time, err, want)
	}
}

// A damaged copy is reported before the first byte of the archive.
func TestDamagedCopy(t *testing.T) {
	o := newData(t)
	damaged := errors.New("damaged")
	o.Verify = func(dir string) error {
		if len(contents(t, dir)) != len(wholeBackup) {
			t.Errorf("files to verify: got %d, want %d", len(contents(t, dir)), len(wholeBackup))
		}
		return damaged
	}
	var archive bytes.Buffer
	if _, err := Take(o, &archive); !errors.Is(err, damaged) || archive.Len() > 0 {
		t.Errorf("got %v and %d bytes, want %v and none", err, archive.Len(), damaged)
	}
}

// A file that was added to the folder of a backup is not ignored.
func TestUnlistedFile(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "folder")
	if _, err := Save(bytes.NewReader(take(t, newData(t))), folder, unlimited); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(folder, QueueFolder, "000002.log"), "added")
	if err := Pack(folder, io.Discard); err == nil || !strings.Contains(err.Error(), "000002.log") {
		t.Errorf("got %v, want an error that names 000002.log", err)
	}
}

// Without hard links, a file gets its name, and never the name of another file.
func TestPublishWithoutLinks(t *testing.T) {
	for _, unsupported := range []error{syscall.EPERM, syscall.ENOTSUP, syscall.EOPNOTSUPP, syscall.ENOSYS} {
		dir := t.TempDir()
		partial, target := filepath.Join(dir, "partial"), filepath.Join(dir, "target")
		link := func(from, to string) error { return &os.LinkError{Op: "link", Old: from, New: to, Err: unsupported} }
		write(t, partial, "new")
		if err := publish(partial, target, link); err != nil {
			t.Errorf("%v: got %v, want no error", unsupported, err)
		}
		write(t, partial, "newer")
		if err := publish(partial, target, link); !errors.Is(err, os.ErrExist) {
			t.Errorf("%v, existing target: got %v, want %v", unsupported, err, os.ErrExist)
		}
		if text, err := os.ReadFile(target); string(text) != "new" {
			t.Errorf("%v: target: got %q, %v, want the first file", unsupported, text, err)
		}
	}
	failed := errors.New("failed")
	if err := publish("a", "b", func(string, string) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("another error: got %v, want %v", err, failed)
	}
}

func TestIsInside(t *testing.T) {
	dir := t.TempDir()
	data := filepath.Join(dir, "data")
	write(t, filepath.Join(data, "sub", "f"), "")
	link := filepath.Join(dir, "link")
	if err := os.Symlink(filepath.Join(data, "sub"), link); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]bool{
		filepath.Join(data, "b.tar"): true, filepath.Join(data, "sub", "b.tar"): true, filepath.Join(link, "b.tar"): true,
		filepath.Join(dir, "b.tar"): false, filepath.Join(dir, "data2"): false,
	} {
		if got, err := IsInside(file, data); got != want || err != nil {
			t.Errorf("%s: got %v, %v, want %v", file, got, err, want)
		}
	}
}

func TestToken(t *testing.T) {
	dir := t.TempDir()
	first, err := NewToken(dir)
	if err != nil {
		t.Fatal(err)
	}
	second, err := NewToken(dir)
	if err != nil || first == second || len(second) < 20 {
		t.Errorf("second token: got %q, %v after %q, want another one of 20 characters or more", second, err, first)
	}
	file := filepath.Join(dir, TokenName)
	if got, err := ReadToken(file); got != second || err != nil {
		t.Errorf("token: got %q, %v, want %q", got, err, second)
	}
	for _, text := range []string{"", "two words", "two\nlines", strings.Repeat("x", 2000)} {
		write(t, file, text)
		if _, err := ReadToken(file); err == nil {
			t.Errorf("a file with %.20q: got no error, want one", text)
		}
	}
}

// The partial copy of a killed process is removed; the copy of a running backup, or a folder with another
// name, is kept.
func TestPartialCopies(t *testing.T) {
	dir := t.TempDir()
	target := filepath.Join(dir, "b.tar")
	running, err := newPartial(target)
	if err != nil {
		t.Fatal(err)
	}
	killed, err := newPartial(filepath.Join(dir, "older"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(killed.path, "tar"), "half")
	_ = killed.dir.Close() // As the end of its process does.
	write(t, filepath.Join(dir, "mine.partial-1", "a"), "kept")
	write(t, filepath.Join(dir, ".x"+partialMark+"file"), "kept")
	for _, want := range [][]string{{killed.path}, nil} {
		removed, err := RemovePartial(target)
		if err != nil || !slices.Equal(removed, want) {
			t.Errorf("got %v, %v, want %v", removed, err, want)
		}
	}
	running.remove()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 2 {
		t.Errorf("left: got %v, %v, want the folder mine.partial-1 and the file", left, err)
	}
	if removed, err := RemovePartial(filepath.Join(dir, "missing", "b")); err != nil || removed != nil {
		t.Errorf("a missing folder: got %v, %v, want nothing, because Save reports it", removed, err)
	}
}
