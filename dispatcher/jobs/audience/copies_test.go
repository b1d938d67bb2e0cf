package audience

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// copies are Copies in memory.
type copies struct {
	mu      sync.Mutex
	files   map[string][]byte
	refuses error
}

func (c *copies) Put(_ context.Context, name string, data io.Reader) error {
	all, err := io.ReadAll(data)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refuses != nil || err != nil {
		return errors.Join(c.refuses, err)
	}
	c.files[name] = all
	return nil
}

func (c *copies) Get(_ context.Context, name string) (io.ReadCloser, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	data, ok := c.files[name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return io.NopCloser(bytes.NewReader(data)), nil
}

func (c *copies) List(context.Context) ([]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.files)), nil
}

func (c *copies) Missing(_ context.Context, names []string) (missing []string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range names {
		if _, ok := c.files[name]; !ok {
			missing = append(missing, name)
		}
	}
	return missing, nil
}

func (c *copies) Delete(_ context.Context, name string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.files, name)
	return nil
}

// Another process, with the store but without the files, continues from the copies.
func TestAnotherProcessHasTheMembers(t *testing.T) {
	d, c := memory(), &copies{files: map[string][]byte{"unknown/members-1": []byte("x")}}
	with := func(o *Options) { o.Copies = c }
	r := newRig(t, d, newLog(), with)
	r.do(http.MethodPut, spent, "web-key", ids("a=1", "b=2")).want(t, "first sync", http.StatusOK, "")
	r.do(http.MethodPut, spent, "web-key", ids("a=1", "c=3")).want(t, "second sync", http.StatusOK, "")
	r.end()
	names, _ := c.List(t.Context())
	if len(names) != 1 || !strings.Contains(names[0], "/"+membersPrefix) {
		t.Errorf("copies: got %v, want the members of the last sync", names)
	}
	d.fs = vfs.NewMem()
	r = newRig(t, d, newLog(), with)
	answer := r.do(http.MethodPut, spent, "web-key", ids("a=1", "d=4"))
	answer.want(t, "sync with another process", http.StatusOK, "")
	check.Equal(t, "members before", answer.Before, 2)
	check.Equal(t, "added", answer.Added, 1)
	check.Equal(t, "removed", answer.Removed, 1)
}

// Files that are damaged on the disk are read from the copies again at the next start.
func TestDamagedMembersAreReadFromTheCopies(t *testing.T) {
	for name, damage := range map[string]func([]byte) []byte{
		"one bit":   func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
		"truncated": func(b []byte) []byte { return b[:len(b)-1] },
		"empty":     func([]byte) []byte { return nil },
	} {
		d, c := memory(), &copies{files: map[string][]byte{}}
		with := func(o *Options) { o.Copies = c }
		r := newRig(t, d, newLog(), with)
		r.do(http.MethodPut, spent, "web-key", ids("a=1", "b=2")).want(t, name+": first sync", http.StatusOK, "")
		r.end()
		damaged := 0
		for file, data := range c.files {
			f, err := d.fs.Create(d.fs.PathJoin(r.Dir, file), vfs.WriteCategoryUnspecified)
			if err == nil {
				_, err = f.Write(damage(bytes.Clone(data)))
				err = errors.Join(err, f.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
			damaged++
		}
		check.Equal(t, name+": damaged files", damaged, 1)
		r = newRig(t, d, newLog(), with)
		answer := r.do(http.MethodPut, spent, "web-key", ids("a=1", "c=3"))
		answer.want(t, name+": sync after the damage", http.StatusOK, "")
		check.Equal(t, name+": members before", answer.Before, 2)
		r.end()
	}
}

// A sync whose members cannot be copied is refused, and changes nothing.
func TestSyncWithoutCopiesIsRefused(t *testing.T) {
	c := &copies{files: map[string][]byte{}, refuses: errors.New("refused")}
	r := newRig(t, memory(), newLog(), func(o *Options) { o.Copies = c })
	r.do(http.MethodPut, spent, "web-key", ids("a=1")).want(t, "sync", http.StatusServiceUnavailable, "storage_failed")
	c.mu.Lock()
	c.refuses = nil
	c.mu.Unlock()
	answer := r.do(http.MethodPut, spent, "web-key", ids("a=1"))
	answer.want(t, "sync after the error", http.StatusOK, "")
	check.Equal(t, "members before", answer.Before, 0)
}

// Copies that are lost break only their audience.
func TestLostCopiesBreakOneAudience(t *testing.T) {
	d, c := memory(), &copies{files: map[string][]byte{}}
	with := func(o *Options) { o.Copies = c }
	r := newRig(t, d, newLog(), with)
	r.do(http.MethodPut, spent, "web-key", ids("a=1")).want(t, "sync", http.StatusOK, "")
	r.end()
	clear(c.files)
	d.fs = vfs.NewMem()
	r = newRig(t, d, newLog(), with)
	r.do(http.MethodPut, spent, "web-key", ids("a=1")).want(t, "sync without the members", http.StatusInternalServerError, "state_damaged")
}

// Copies that another program deletes are stored again while the service runs.
func TestDeletedCopiesAreStoredAgain(t *testing.T) {
	d, c := memory(), &copies{files: map[string][]byte{}}
	r := newRig(t, d, newLog(), func(o *Options) { o.Copies = c })
	r.do(http.MethodPut, spent, "web-key", ids("a=1", "b=2")).want(t, "sync", http.StatusOK, "")
	wait.True(r.t, "the audience is up to date", func() bool { return len(r.Unfinished()) == 0 })
	before, _ := c.List(t.Context())
	check.Equal(t, "copies of the sync", len(before), 1)
	check.NoError(t, "check of whole copies", r.storeMissing(t.Context()))
	check.Equal(t, "gaps of whole copies", len(r.Gaps()), 0)
	for _, name := range before {
		check.NoError(t, "delete "+name, c.Delete(t.Context(), name))
	}
	check.NoError(t, "check of deleted copies", r.storeMissing(t.Context()))
	after, _ := c.List(t.Context())
	check.Same(t, "copies", after, before)
	check.Equal(t, "gaps of deleted copies", len(r.Gaps()), 1)
	check.NoError(t, "second check", r.storeMissing(t.Context()))
	check.Equal(t, "gaps of restored copies", len(r.Gaps()), 0)
}
