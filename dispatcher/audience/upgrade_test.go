package audience

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/test/check"
)

// release020 returns a disk with the files that release 0.2.0 wrote: the members of spent, and those
// of shoppers with a sync that removes all 300, of which 256 are in the queue.
func release020(t *testing.T) *disk {
	t.Helper()
	d := memory()
	copyRelease020(t, d)
	return d
}

// copyRelease020 writes these files to a disk.
func copyRelease020(t *testing.T, d *disk) {
	t.Helper()
	recorded := os.DirFS("testdata/release-0.2.0")
	check.NoError(t, "copy the recorded files", fs.WalkDir(recorded, ".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		content, err := fs.ReadFile(recorded, path)
		d.write(t, d.path("audiences", path), content)
		return err
	}))
}

// removedByUpgrade are the calls of the pending sync that are not in the queue yet.
func removedByUpgrade() (calls []string) {
	for _, u := range many("u", 300)[256:] {
		calls = append(calls, u+" shoppers=false")
	}
	return calls
}

// wantUpgraded checks the result of an upgrade.
func (r *rig) wantUpgraded(d *disk, fact string) {
	r.t.Helper()
	r.eventually(func() bool { return r.Progress("shop", config().Audiences[0]).Sent })
	r.wantCalls(removedByUpgrade()...)
	a := r.do(http.MethodPut, shoppers, "web-key", ids("x"))
	a.want(r.t, "sync after "+fact, http.StatusOK, "")
	check.Equal(r.t, "Before after "+fact, a.Before, 0)
	r.sync(spent, "a=1", "b=3")
	r.wantCalls("x shoppers=true", "b spent=3")
	r.eventually(func() bool { return r.busy() == "" })
	check.Equal(r.t, "files after "+fact, len(d.files()), 2)
	_, err := d.fs.Stat(d.path("audiences"))
	check.ErrorIs(r.t, "stat of the old folder after "+fact, err, os.ErrNotExist)
}

func TestUpgrade(t *testing.T) {
	d := release020(t)
	r := newRig(t, d, newLog(), nil)
	r.wantUpgraded(d, "the upgrade")
	r.end()
	r = newRig(t, d, newLog(), nil)
	r.sync(shoppers, "x")
	r.sync(spent, "a=1", "b=3")
	r.wantCalls()
}

// A kill or a power loss at any step of the upgrade changes nothing in its result.
func TestCrashDuringTheUpgrade(t *testing.T) {
	type crash struct {
		disk *disk
		log  *log
	}
	d, l := release020(t), newLog()
	var crashes []crash
	step := func() {
		for _, power := range []bool{false, true} {
			crashes = append(crashes, crash{d.crash(power), l.clone()})
		}
	}
	d.step.Store(&step)
	r := newRig(t, d, l, nil)
	r.eventually(func() bool { return r.Progress("shop", config().Audiences[0]).Sent })
	r.end()
	if len(crashes) < 30 {
		t.Errorf("crashes: got %d, want at least 30", len(crashes))
	}
	for i, c := range crashes {
		r := newRig(t, c.disk, c.log, nil)
		r.wantUpgraded(c.disk, fmt.Sprint("crash ", i))
		r.end()
	}
}

// Every state of the files that release 0.2.0 can leave at the end of a sync is upgraded.
func TestUpgradeOfAnEndingSync(t *testing.T) {
	const (
		done    = "c64abdbc-df54-4068-a3d8-ff8dbe3a4b6b"
		pending = "26a308b9-f216-4538-b45f-9c44e2da98ee"
	)
	for _, c := range []struct {
		name string
		// change changes the folder of the audience.
		change  func(move func(from, to string))
		members int64
	}{
		{"the members are in place", func(move func(from, to string)) {
			move("sync-"+pending+"/members", "members-"+pending)
		}, 0},
		{"the state is written, too", func(move func(from, to string)) {
			move("sync-"+pending+"/members", "members-"+pending)
			move("pending.json", "state.json")
		}, 0},
		{"the sync was cancelled", func(move func(from, to string)) {
			move("sync-"+pending, "sync-cancelled")
		}, 300},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := release020(t)
			folder := d.path("audiences", name{"shop", "shoppers"}.folder())
			c.change(func(from, to string) {
				check.NoError(t, "move "+from, d.fs.Rename(d.fs.PathJoin(folder, from), d.fs.PathJoin(folder, to)))
			})
			r := newRig(t, d, newLog(), nil)
			check.Equal(t, "Members", r.Report(config())[0].Members, c.members)
			check.Equal(t, "Unsent", r.Report(config())[0].Unsent, 0)
			r.wantCalls()
			a := r.do(http.MethodPost, shoppers, "web-key", ids("x"))
			a.want(t, "increment", http.StatusOK, "")
			check.Equal(t, "Before", a.Before, c.members)
		})
	}
}

// A folder of release 0.2.0 replaces an older state in the store, for example after a rollback. It
// does not replace a newer one.
func TestUpgradeWithAStateInTheStore(t *testing.T) {
	recorded := time.Date(2026, time.November, 22, 21, 34, 25, 0, time.UTC)
	for _, c := range []struct {
		name    string
		time    time.Time
		members []string
	}{
		{"an older state", recorded.Add(-time.Hour), []string{"a=1", "b=2"}},
		{"a newer state", recorded.Add(time.Hour), []string{"c=1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, begin := memory(), time.Now()
			r := newRig(t, d, newLog(), func(o *Options) {
				o.Now = func() time.Time { return c.time.Add(time.Since(begin)) }
			})
			r.sync(spent, "c=1")
			r.end()
			copyRelease020(t, d)
			r = newRig(t, d, newLog(), nil)
			r.eventually(func() bool { return r.Progress("shop", config().Audiences[0]).Sent })
			r.wantCalls(removedByUpgrade()...)
			r.sync(spent, c.members...)
			r.wantCalls()
		})
	}
}

// unlistedFS cannot list a folder.
type unlistedFS struct {
	vfs.FS
	path string
}

func (f unlistedFS) List(path string) ([]string, error) {
	if path == f.path {
		return nil, os.ErrPermission
	}
	return f.FS.List(path)
}

// A service does not start without the states of release 0.2.0.
func TestUpgradeThatCannotListItsFolders(t *testing.T) {
	d := release020(t)
	store := d.open(t)
	defer func() { _ = store.Close() }()
	_, err := New(Options{
		FS: unlistedFS{d.fs, d.path("audiences")}, Dir: d.path("members"), OldDir: d.path("audiences"),
		Store: store, Logger: slog.New(slog.DiscardHandler),
	})
	check.ErrorIs(t, "start", err, os.ErrPermission)
}

// An upgrade that failed after it moved files is repeated by the next start.
func TestUpgradeAfterAFailedOne(t *testing.T) {
	d := release020(t)
	refused := errors.New("refused")
	d.refuse.Store(&refused)
	r := newRig(t, d, newLog(), nil)
	r.do(http.MethodPut, spent, "web-key", ids("a=1")).want(t, "sync after the failure", http.StatusInternalServerError, "state_damaged")
	r.end()
	d.refuse.Store(nil)
	newRig(t, d, newLog(), nil).wantUpgraded(d, "a failed upgrade")
}

// A state whose members are missing is not stored.
func TestUpgradeWithoutMembers(t *testing.T) {
	d := release020(t)
	folder := name{"shop", "spent"}.folder()
	file := d.path("audiences", folder, "members-a71c3ae2-65b4-40b9-aa68-49f94c24dd51")
	check.NoError(t, "remove the members", d.fs.Remove(file))
	r := newRig(t, d, newLog(), nil)
	check.ErrorIs(t, "upgrade", r.failedUpgrades[folder], errDamaged)
	_, err := d.fs.Stat(d.path("audiences", folder, oldStateFile))
	check.NoError(t, "stat of the old state", err)
}
