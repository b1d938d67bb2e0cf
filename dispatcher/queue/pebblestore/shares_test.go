package pebblestore

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/posthorn/posthorn/dispatcher/queue"
)

func TestShareOf(t *testing.T) {
	for namespaces, want := range map[int]int64{0: 900, 1: 900, 2: 450, 3: 300, 9: 100, 10: 100, 1000: 100} {
		if got := shareOf(1000, 100, namespaces); got != want {
			t.Errorf("share of one of %d namespaces: got %d of 1000, want %d", namespaces, got, want)
		}
	}
	for _, c := range []struct{ free, want int64 }{{1000, -1}, {101, -1}, {100, 450}, {50, 112}, {10, 4}, {0, 0}, {-5, 0}} {
		got, bounded := mayUse(100, 450, c.free)
		if !bounded {
			got = -1
		}
		if got != c.want {
			t.Errorf("use with %d of 1000 free: got at most %d, want %d (-1: any)", c.free, got, c.want)
		}
	}
}

// sharedDisk is a store whose file system has little space below the mark.
type sharedDisk struct {
	*Store
	fs   *usageFS
	base uint64
	next int
}

// open opens the store with the usage that its messages cause.
func (d *sharedDisk) open(t *testing.T, o Options) {
	o.FS, o.HighWater, o.MinFreeBytes, o.MemTableBytes, o.MaintainInterval = d.fs, 0.85, 1<<20, 256<<10, time.Hour
	d.Store = open(t, "data", o)
	d.read()
}

// read makes the store read its space.
func (d *sharedDisk) read() {
	var own int64
	for _, source := range d.Sources() {
		own += d.SourceStats(source).LogBytes
	}
	d.disk.used.Store(own)
	d.fs.used.Store(d.base + uint64(own))
	d.disk.checkSpace()
	d.disk.shares.count(d.o.Now(), 0)
}

// fill appends messages of 100 KB of Sources in turn until one is refused, at most 1000. It returns the number of
// accepted ones.
func (d *sharedDisk) fill(sources ...string) (int, error) {
	for n := range 1000 {
		d.next++
		m := message(fmt.Sprint("m", d.next))
		m.Source, m.Body = sources[n%len(sources)], make([]byte, 100_000)
		if _, err := d.Append(context.Background(), []queue.Message{m}); err != nil {
			return n, err
		}
		d.read()
	}
	return 1000, nil
}

// A namespace with a suspended destination borrows no space: nothing ends the loan.
func TestNothingIsLentToASuspendedNamespace(t *testing.T) {
	const space = 64 << 20
	d := &sharedDisk{fs: &usageFS{FS: vfs.NewMem()}, base: 1<<30*85/100 - space}
	d.open(t, Options{})
	defer d.Close()
	for _, source := range []string{"shop/web", "bank/app"} {
		if err := d.OpenLane(queue.LaneID{Source: source, Destination: source}); err != nil {
			t.Fatal(err)
		}
	}
	d.SetSuspended(map[string]bool{"shop": true})
	m := queue.Message{Source: "bank/app", ID: "a", AcceptedAt: time.Now(), Body: []byte("{}")}
	if _, err := d.Append(t.Context(), []queue.Message{m}); err != nil {
		t.Fatal(err)
	}
	_, err := d.fill("shop/web")
	if used, share := d.Share("shop/web"); used > share || used < share*8/10 || !errors.Is(err, queue.ErrOverShare) {
		t.Errorf("use of the namespace: got %d and error %v, want nearly its share of %d and %v", used, err, share, queue.ErrOverShare)
	}
	_, err = d.fill("bank/app")
	if used, share := d.Share("bank/app"); used < share*8/10 {
		t.Errorf("use of another namespace: got %d and error %v, want nearly its share of %d", used, err, share)
	}
}

// All Sources of a namespace together leave space to other namespaces. A namespace above its share is refused first.
func TestNamespacesShareTheDisk(t *testing.T) {
	const space = 64 << 20
	d := &sharedDisk{fs: &usageFS{FS: vfs.NewMem()}, base: 1<<30*85/100 - space}
	d.open(t, Options{})
	lanes := map[string]queue.LaneID{}
	for _, source := range []string{"evil/e0", "evil/e1", "shop/web", "bank/app"} {
		lanes[source] = queue.LaneID{Source: source, Destination: source}
		if err := d.OpenLane(lanes[source]); err != nil {
			t.Fatal(err)
		}
	}
	_, err := d.fill("evil/e0", "evil/e1")
	used, share := d.Share("evil/e0")
	if !errors.Is(err, queue.ErrFull) || errors.Is(err, queue.ErrOverShare) {
		t.Errorf("a namespace alone: got error %v, want %v", err, queue.ErrFull)
	}
	if least, most := int64(space*8/10), int64(space*9/10); used < least || used > most {
		t.Errorf("use of a namespace alone: got %d, want %d to %d", used, least, most)
	}
	if want := shareOf(space, reserveOf(space, 0), 1); share < want-1<<10 || share > want {
		t.Errorf("share of a namespace alone: got %d, want %d", share, want)
	}
	if other, _ := d.Share("evil/e1"); other != used {
		t.Errorf("use of the other Source: got %d, want the use of the namespace, %d", other, used)
	}
	n, err := d.fill("shop/web")
	if !errors.Is(err, queue.ErrFull) || errors.Is(err, queue.ErrOverShare) {
		t.Errorf("a second namespace within its share: got error %v, want %v", err, queue.ErrFull)
	}
	if n < 20 {
		t.Errorf("messages of a second namespace: got %d, want at least 20", n)
	}
	if _, share = d.Share("shop/web"); share > shareOf(space, reserveOf(space, 0), 2) {
		t.Errorf("share of two namespaces: got %d, want %d", share, shareOf(space, reserveOf(space, 0), 2))
	}
	if n, err := d.fill("bank/app"); n < 2 {
		t.Errorf("messages of a third namespace: got %d and error %v, want at least 2", n, err)
	}
	if n, err := d.fill("evil/e0"); n != 0 || !errors.Is(err, queue.ErrOverShare) {
		t.Errorf("the namespace above its share: got %d messages and error %v, want none and %v", n, err, queue.ErrOverShare)
	}
	if d.Full() {
		t.Error("the disk is above its high-water mark")
	}
	// The uses are the same at the next start.
	before, _ := d.Share("evil/e1")
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d.open(t, Options{})
	if after, _ := d.Share("evil/e1"); after != before {
		t.Errorf("use after a restart: got %d, want %d", after, before)
	}
	// The write buffers are empty.
	if n, err := d.fill("evil/e1"); n > 5 || !errors.Is(err, queue.ErrOverShare) {
		t.Errorf("the namespace above its share after a restart: got %d messages and error %v, want at most 5 and %v", n, err, queue.ErrOverShare)
	}
	// Deliveries free the share.
	for _, source := range []string{"evil/e0", "evil/e1"} {
		if err := d.OpenLane(lanes[source]); err != nil {
			t.Fatal(err)
		}
		deliver(t, d.Store, lanes[source])
	}
	d.maintain(true)
	d.read()
	if used, _ := d.Share("evil/e0"); used != 0 {
		t.Errorf("use after all deliveries: got %d, want 0", used)
	}
	if n, err := d.fill("evil/e0"); n < 20 {
		t.Errorf("messages after the deliveries: got %d and error %v, want at least 20", n, err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	// A quota replaces the shares.
	d.open(t, Options{MaxBytesPerSource: NoQuota})
	defer d.Close()
	if _, most := d.Share("evil/e0"); most != 0 {
		t.Errorf("bound without a quota: got %d, want none", most)
	}
	if _, err := d.fill("evil/e0"); errors.Is(err, queue.ErrOverShare) || !d.Full() {
		t.Errorf("without a quota: got error %v and full %v, want the high-water mark", err, d.Full())
	}
	d.read()
	lacking := uint64(d.Lacking())
	if d.base -= lacking - 1; lacking == 0 || !d.full() {
		t.Errorf("with one of the %d lacking bytes less: got room, want none", lacking)
	}
	if d.base--; d.full() {
		t.Errorf("after %d lacking bytes became free: got no room", lacking)
	}
}

// full reads the space of the disk again.
func (d *sharedDisk) full() bool {
	d.read()
	return d.Full()
}

// A namespace counts while it has messages, and for some time after its last call.
func TestActiveNamespaces(t *testing.T) {
	var s shares
	s.space.Store(1000)
	now := time.Unix(1000, 0)
	a, b := s.forLog("a/web"), s.forLog("b/web")
	if s.forLog("a/ios") != a {
		t.Error("two Sources of a namespace: got two uses, want one")
	}
	want := func(active int, after string) {
		t.Helper()
		if got := s.size(); got != shareOf(1000, 100, active) {
			t.Errorf("share after %s: got %d, want %d", after, got, shareOf(1000, 100, active))
		}
	}
	s.call(a, now)
	s.call(a, now)
	want(1, "calls of one namespace")
	s.call(b, now)
	want(2, "a call of another one")
	b.used.Add(5)
	s.count(now.Add(calledFor-1), 0)
	want(2, "less than the time of recent calls")
	s.count(now.Add(calledFor), 0)
	want(1, "the time of recent calls: one has messages")
	b.used.Add(-5)
	s.call(a, now.Add(calledFor))
	want(2, "a further call")
	s.count(now.Add(calledFor), 0)
	want(1, "the other's messages are delivered")
}

// The namespaces share the space of a replicated log in the same way. A snapshot makes space for all of them.
func TestNamespacesShareTheLog(t *testing.T) {
	log := &memoryLog{}
	log.total.Store(2 << 20)
	s := open(t, "data", Options{FS: vfs.NewMem(), Log: log, MaintainInterval: time.Hour})
	defer s.Close()
	next := 0
	fill := func(sources ...string) (int, error) {
		for n := range 1000 {
			next++
			m := message(fmt.Sprint("m", next))
			m.Source, m.Body = sources[n%len(sources)], make([]byte, 10_000)
			if _, err := s.Append(t.Context(), []queue.Message{m}); err != nil {
				return n, err
			}
			log.inLog.Add(10_000)
		}
		return 1000, nil
	}
	n, err := fill("evil/e0", "evil/e1")
	if most := (2 << 20) * 9 / 10 / 10_000; !errors.Is(err, queue.ErrFull) || errors.Is(err, queue.ErrOverShare) || n < most-5 || n > most+1 {
		t.Errorf("a namespace alone: got %d messages and error %v, want about %d and %v", n, err, most, queue.ErrFull)
	}
	if n, err := fill("shop/web"); n < 10 || errors.Is(err, queue.ErrOverShare) {
		t.Errorf("a second namespace: got %d messages and error %v, want at least 10 and %v", n, err, queue.ErrFull)
	}
	if n, err := fill("evil/e0"); n != 0 || !errors.Is(err, queue.ErrOverShare) {
		t.Errorf("the namespace above its share of the log: got %d messages and error %v, want none and %v", n, err, queue.ErrOverShare)
	}
	log.inLog.Store(1 << 20) // A snapshot has freed half.
	s.maintain(false)
	if used := s.disk.shares.forLog("evil/e0").logged.Load() + s.disk.shares.forLog("shop/web").logged.Load(); used > 1<<20 {
		t.Errorf("use of the log after a snapshot: got %d, want at most %d", used, 1<<20)
	}
	if n, err := fill("evil/e0"); n < 50 {
		t.Errorf("after a snapshot: got %d messages and error %v, want at least 50", n, err)
	}
}
