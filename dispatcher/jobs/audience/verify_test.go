package audience

import (
	"errors"
	"os"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/test/check"
)

// Only the files that a state names are read: others may be incomplete.
func TestVerifyFiles(t *testing.T) {
	fs := vfs.NewMem()
	n := name{"shop", "vip"}
	folder := fs.PathJoin("members", n.folder())
	check.NoError(t, "make the folder", fs.MkdirAll(folder, 0o700))
	save := func(file string, finish bool) {
		t.Helper()
		w, err := create(fs, fs.PathJoin(folder, file))
		check.NoError(t, "create", err)
		check.NoError(t, "add", w.add(record{op: opMember, id: []byte("u1")}))
		if finish {
			check.NoError(t, "finish", w.finish(true))
		} else {
			check.NoError(t, "flush", w.buf.Flush())
			w.abandon()
		}
	}
	values := map[string][]byte{"other/key": []byte("not a state")}
	check.NoError(t, "put", put(func(key string, value []byte) error { values[key] = value; return nil }, n,
		stored{Done: &state{Sync: "1"}, Pending: &state{Sync: "2"}}))
	proceed := func() error { return nil }
	save("members-1", true)
	save("members-2", true)
	check.ErrorIs(t, "without changes-2", VerifyFiles(fs, "members", values, proceed), os.ErrNotExist)
	save("changes-2", true)
	save("members-3", false)
	check.NoError(t, "whole files, and another one that is being written", VerifyFiles(fs, "members", values, proceed))
	save("changes-2", false)
	check.ErrorIs(t, "incomplete changes-2", VerifyFiles(fs, "members", values, proceed), errDamaged)
	stopped := errors.New("stopped")
	check.ErrorIs(t, "stopped", VerifyFiles(fs, "members", values, func() error { return stopped }), stopped)
}
