package replicated

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/posthorn/posthorn/test/wait"
)

// gapLog is the message of an owner that finds a gap in the records or the objects of its slot.
const gapLog = "the slot could not be restored from the log"

// faultsOfRecords are losses of records and objects. The owner repairs the log, so that it can then be lost with all
// other processes and their disks.
var faultsOfRecords = []fault{
	{name: "purge of the stream, and loss of all processes", claims: 1, silent: true, lost: true, gaps: true, begin: repaired("another program purged it", func(c *cluster) {
		c.purge(stream)
	})},
	{name: "purge of the object stores, and loss of all processes", claims: 1, silent: true, lost: true, gaps: true, begin: repaired("the object store of the snapshots lacks", func(c *cluster) {
		c.purge("OBJ_" + stream)
		c.purge("OBJ_" + stream + "_members")
	})},
	{name: "deletion of the object stores, and loss of all processes", claims: 1, silent: true, lost: true, gaps: true, begin: repaired("the object store of the snapshots lacks", func(c *cluster) {
		js := c.administrator()
		for _, name := range []string{"OBJ_" + stream, "OBJ_" + stream + "_members"} {
			if err := js.DeleteStream(c.t.Context(), name); err != nil {
				c.t.Fatal(err)
			}
		}
	})},
	{name: "gap at one server, and loss of all processes", claims: 1, silent: true, lost: true, gaps: true,
		begin: func(c *cluster, owner *pod) func() {
			i := (c.fill() + 1) % replicas
			return repaired(fmt.Sprintf("server n%d lacks ", i), func(c *cluster) { c.damage(i) })(c, owner)
		}},
	{name: "gap at two servers, and loss of all processes", claims: 1, silent: true, lost: true, gaps: true,
		begin: func(c *cluster, owner *pod) func() {
			leader := c.fill()
			return repaired(" lacks ", func(c *cluster) { c.damage(leader, (leader+1)%replicas) })(c, owner)
		}},
}

// repaired loses something that posthorn slots reports with a text, and then all processes with their disks as soon as it
// reports no problem.
func repaired(text string, lose func(*cluster)) func(*cluster, *pod) func() {
	return func(c *cluster, owner *pod) func() {
		lose(c)
		seen := false
		if err := wait.Until(func() error {
			out, err := exec.Command(binary, "slots", "--admin", owner.Admin).CombinedOutput()
			seen = seen || err != nil && strings.Contains(string(out), text)
			if !seen || err != nil {
				return fmt.Errorf("got error %w and\n%s", err, out)
			}
			return nil
		}); err != nil {
			c.t.Fatalf("posthorn slots, want %q and then no problem: %v", text, err)
		}
		for _, p := range c.pods {
			p.lose()
		}
		return func() {
			for _, p := range c.pods {
				p.start()
			}
		}
	}
}

// purge removes all messages of a stream.
func (s *servers) purge(name string) {
	s.t.Helper()
	js := s.administrator()
	if err := wait.Until(func() error {
		found, err := js.Stream(s.t.Context(), name)
		if err == nil {
			err = found.Purge(s.t.Context())
		}
		return err
	}); err != nil {
		s.t.Fatalf("purge %s: %v", name, err)
	}
}

// fill publishes records until each server has several files of the slot's stream, and returns the server that leads it.
func (c *cluster) fill() (leader int) {
	c.t.Helper()
	to := &sender{pods: c.pods}
	to.journals.Store(c.record)
	for n := 0; len(c.blocks(0)) < 4; n++ {
		body, _ := large(fmt.Sprint("fill-", c.leader(), "-", len(to.acknowledged)), n)
		to.mustSend(c.t, body)
		if n > 500 {
			c.t.Fatalf("files of the stream after 100 MB: got %v, want 4", c.blocks(0))
		}
	}
	return c.leader()
}

// waitKeepUp waits until all servers have the records of streams but those in progress: under load, no server has all.
func (s *servers) waitKeepUp(streams ...string) {
	s.t.Helper()
	js := s.administrator()
	for _, stream := range streams {
		if err := wait.Until(func() error {
			info, err := js.Stream(s.t.Context(), stream)
			if err != nil {
				return err
			}
			c := info.CachedInfo().Cluster
			if c == nil || c.Leader == "" || len(c.Replicas) != replicas-1 ||
				slices.ContainsFunc(c.Replicas, func(r *jetstream.PeerInfo) bool { return r.Offline || r.Active == 0 || r.Lag > 1000 }) {
				return fmt.Errorf("stream %s: cluster %+v", stream, c)
			}
			return nil
		}); err != nil {
			s.t.Fatal(err)
		}
	}
}

// blocks are the files of the slot's stream at a server, the oldest one first.
func (s *servers) blocks(i int) []string {
	found, _ := filepath.Glob(filepath.Join(s.files(i), "jetstream", "*", "streams", stream, "msgs", "*.blk"))
	slices.SortFunc(found, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	return found
}

// damage stops servers, damages an older file of the slot's stream at each, and starts them again. A server that starts
// gets all records behind its last Raft snapshot from the leader, so one that is killed can have no gap afterwards. It
// stores a snapshot when it is stopped.
func (s *servers) damage(nodes ...int) {
	s.t.Helper()
	for _, i := range nodes {
		if err := s.nodes[i].Stop(syscall.SIGTERM); err != nil {
			s.t.Error(err)
		}
	}
	for _, i := range nodes {
		blocks := s.blocks(i)
		if len(blocks) < 3 {
			s.t.Fatalf("files of the stream at server %d: got %v, want 3", i, blocks)
		}
		f, err := os.OpenFile(blocks[1], os.O_RDWR, 0) // The first one can begin with trimmed records.
		if err != nil {
			s.t.Fatal(err)
		}
		// A server that starts finds damage in the heads of records alone, and a record has up to 900 KB.
		_, err = f.WriteAt(make([]byte, 1<<20), 3<<20)
		// Without the index, the server reads the heads of all records.
		if err = errors.Join(err, f.Close(), os.RemoveAll(filepath.Join(filepath.Dir(blocks[1]), "index.db"))); err != nil {
			s.t.Fatal(err)
		}
	}
	for _, i := range nodes {
		s.start(i)
	}
	s.waitKeepUp(stream)
}

// All processes and their disks are lost, and so are records behind the newest snapshot. An adoption names the missing
// batches; the calls behind them are delivered.
func TestAdoptPassesAGap(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	pods := startPods(t, 1, manifests(r.URL), "--replication-url", s.url, "--replication-name", "test", "--replication-max-bytes", "1Gi")
	owner(t, pods)
	r.answer.Store(http.StatusServiceUnavailable)
	send := func(prefix string, n int) (ids []string) {
		t.Helper()
		all := &sender{pods: pods}
		stop := all.start(t, prefix)
		acknowledge(t, all, n)
		stop()
		return all.acknowledged
	}
	send("first", 100)
	pods[0].end(syscall.SIGTERM)
	pods[0].start() // The first snapshot of its session has the Source.
	if err := wait.Until(func() error {
		state, err := pods[0].state(t.Context())
		if err == nil && state.Snapshot.IsZero() {
			err = errors.New("no snapshot yet")
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	send("before", 400)
	purged := s.last()
	kept := send("behind", 400)
	adopt := func() string {
		t.Helper()
		out, err := s.adopt()
		if err != nil {
			t.Fatalf("posthorn replication adopt: got error %v and\n%s", err, out)
		}
		return out
	}
	if out := adopt(); !strings.Contains(out, "slot 0 has an owner, which has all messages") {
		t.Errorf("adoption with an owner: got %q, want that nothing was changed", out)
	}
	pods[0].lose()
	found, err := s.administrator().Stream(t.Context(), stream)
	if err == nil {
		err = found.Purge(t.Context(), jetstream.WithPurgeSequence(purged+1))
	}
	if err != nil {
		t.Fatal(err)
	}
	pods[0].start()
	waitNotReady(t, pods, "posthorn replication adopt")
	if out := adopt(); !strings.Contains(out, "slot 0 continues with the newest snapshot and the records of the stream, without the batches ") {
		t.Errorf("adoption of a stream with a gap: got %q, want the missing batches", out)
	}
	r.answer.Store(0)
	owner(t, pods)
	checkDelivered(t, append(kept, send("after", 100)...), r)
	report(t, pods)
}

// last is the sequence of the last record of the slot.
func (s *servers) last() (last uint64) {
	s.t.Helper()
	js := s.administrator()
	if err := wait.Until(func() error {
		found, err := js.Stream(s.t.Context(), stream)
		if err == nil {
			last = found.CachedInfo().State.LastSeq
		}
		return err
	}); err != nil {
		s.t.Fatal(err)
	}
	return last
}
