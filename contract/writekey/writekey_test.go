package writekey

import (
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const grace = 10 * time.Minute

var (
	start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	web   = Owner{"shop", "web"}
	ios   = Owner{"bank", "ios"}
	keyA  = HashOf("a")
	keyB  = HashOf("b")
)

func allLoaded(Owner) Presence { return Present }

// state names the state of a key at a time.
func state(b Book, h Hash, now time.Time) string {
	if b.entries[h].Known() {
		return "known"
	}
	if _, ok := b.Removed(h, now); ok {
		return "removed"
	}
	return "unknown"
}

// Each case changes the known keys at some minutes and checks the state of key a at others.
func TestStates(t *testing.T) {
	type step struct {
		minute float64
		// known is applied when it is not nil.
		known             map[Hash]Owner
		notLoaded         string
		doubtful, deleted bool
		want              string
	}
	has, hasNot := map[Hash]Owner{keyA: web}, map[Hash]Owner{keyB: web}
	presence := func(s step) func(Owner) Presence {
		return func(o Owner) Presence {
			switch {
			case o.Namespace == s.notLoaded:
				return Parked
			case s.doubtful:
				return Doubtful
			case s.deleted:
				return Deleted
			}
			return Present
		}
	}
	for name, steps := range map[string][]step{
		"never known": {{minute: 0, known: hasNot, want: "unknown"}, {minute: 1, known: hasNot, want: "unknown"}},
		"removed, then unknown": {{minute: 0, known: has, want: "known"}, {minute: 1, known: hasNot, want: "removed"},
			{minute: 10.9, want: "removed"}, {minute: 11, want: "unknown"}},
		"no Source is left": {{minute: 0, known: has, want: "known"}, {minute: 1, known: map[Hash]Owner{}, want: "removed"}},
		"other changes do not prolong": {{minute: 0, known: has, want: "known"}, {minute: 1, known: hasNot, want: "removed"},
			{minute: 5, known: map[Hash]Owner{}, want: "removed"}, {minute: 11, known: hasNot, want: "unknown"}},
		"restored within the grace": {{minute: 0, known: has, want: "known"}, {minute: 1, known: hasNot, want: "removed"},
			{minute: 2, known: has, want: "known"}, {minute: 30, want: "known"}},
		"restored after the grace": {{minute: 0, known: has, want: "known"}, {minute: 1, known: hasNot, want: "removed"},
			{minute: 12, want: "unknown"}, {minute: 13, known: has, want: "known"}},
		"removed twice": {{minute: 0, known: has, want: "known"}, {minute: 1, known: hasNot, want: "removed"},
			{minute: 9, known: has, want: "known"}, {minute: 10, known: hasNot, want: "removed"}, {minute: 19.9, want: "removed"},
			{minute: 20, want: "unknown"}},
		"moved to another namespace": {{minute: 0, known: has, want: "known"}, {minute: 1, known: map[Hash]Owner{keyA: ios}, want: "known"},
			{minute: 2, known: hasNot, want: "removed"}},
		"the namespace is not loaded": {
			{minute: 0, known: has, want: "known"}, {minute: 1, known: hasNot, notLoaded: "shop", want: "known"},
			{minute: 30, known: hasNot, want: "removed"}, {minute: 39, known: hasNot, notLoaded: "shop", want: "removed"},
			{minute: 40, want: "unknown"},
		},
		"a config was lost": {{minute: 0, known: has, want: "known"}, {minute: 1, known: hasNot, doubtful: true, want: "known"},
			{minute: 30, known: hasNot, want: "known"}, {minute: 7*24*60 + 1, known: hasNot, want: "removed"},
			{minute: 7*24*60 + 11, want: "unknown"}},
		"a config was lost, and restored": {{minute: 0, known: has, want: "known"},
			{minute: 1, known: hasNot, doubtful: true, want: "known"}, {minute: 2, known: has, want: "known"},
			{minute: 3, known: hasNot, want: "removed"}},
		"a config was lost, and the Source is deleted": {{minute: 0, known: has, want: "known"},
			{minute: 1, known: hasNot, doubtful: true, want: "known"}, {minute: 2, known: hasNot, deleted: true, want: "removed"}},
		"another namespace is not loaded": {{minute: 0, known: has, want: "known"},
			{minute: 1, known: hasNot, notLoaded: "bank", want: "removed"}},
		"the clock is set back": {{minute: 60, known: has, want: "known"}, {minute: 60, known: hasNot, want: "removed"},
			{minute: 0, known: hasNot, want: "removed"}, {minute: 10, want: "unknown"}},
	} {
		t.Run(name, func(t *testing.T) {
			book := NewBook(grace, nil)
			for _, s := range steps {
				now := start.Add(time.Duration(s.minute * float64(time.Minute)))
				if s.known != nil {
					next, changes := book.Next(now, s.known, presence(s))
					// The stored changes alone restore the same Book after a restart.
					kept := maps.Clone(book.entries)
					if kept == nil {
						kept = map[Hash]Entry{}
					}
					for _, c := range changes {
						if c.Before != book.entries[c.Hash] {
							t.Errorf("minute %v: before the change the entry is %+v, want %+v", s.minute, c.Before, book.entries[c.Hash])
						}
						kept[c.Hash] = c.After
						if (c.After == Entry{}) {
							delete(kept, c.Hash)
						}
					}
					if diff := cmp.Diff(next.entries, kept); diff != "" {
						t.Errorf("minute %v: the changes give other entries (-want +got):\n%s", s.minute, diff)
					}
					book = NewBook(grace, kept)
				}
				if got := state(book, keyA, now); got != s.want {
					t.Fatalf("minute %v: the key is %s, want %s", s.minute, got, s.want)
				}
			}
		})
	}
}

// A removed key names the Source that it belonged to, and when that ends.
func TestRemovedEntry(t *testing.T) {
	book, _ := NewBook(grace, nil).Next(start, map[Hash]Owner{keyA: web}, allLoaded)
	book, changes := book.Next(start.Add(time.Minute), nil, allLoaded)
	want := Entry{Owner: web, RemovedAt: start.Add(time.Minute)}
	if diff := cmp.Diff([]Change{{keyA, Entry{Owner: web}, want}}, changes); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	got, ok := book.Removed(keyA, start.Add(2*time.Minute))
	if !ok || got != want {
		t.Errorf("the entry is %+v %v, want %+v", got, ok, want)
	}
	if until := book.Until(got); !until.Equal(start.Add(11 * time.Minute)) {
		t.Errorf("it is removed until %v", until)
	}
}

// Next changes nothing of the Book that it is called on: requests still read it.
func TestNextLeavesTheBook(t *testing.T) {
	book, _ := NewBook(grace, nil).Next(start, map[Hash]Owner{keyA: web}, allLoaded)
	before := maps.Clone(book.entries)
	book.Next(start.Add(time.Minute), map[Hash]Owner{keyB: ios}, allLoaded)
	if diff := cmp.Diff(before, book.entries); diff != "" {
		t.Error(diff)
	}
}

// Beyond the bounds the keys that were removed first become unknown, and one
// namespace with many removed keys does not displace the keys of another.
func TestBounds(t *testing.T) {
	for name, c := range map[string]struct {
		namespaces, perEach int
		// want is how many of the newest keys of each namespace are kept.
		want int
	}{
		"at the bound of a namespace":   {1, MaxRemovedPerNamespace, MaxRemovedPerNamespace},
		"over the bound of a namespace": {1, MaxRemovedPerNamespace + 5, MaxRemovedPerNamespace},
		"at the bound of all":           {MaxRemoved / 500, 500, 500},
		"over the bound of all":         {MaxRemoved / 500, 501, 500},
		"over both bounds":              {20, 3000, MaxRemoved / 20},
	} {
		t.Run(name, func(t *testing.T) {
			entries := map[Hash]Entry{}
			hash := func(namespace, i int) Hash { return HashOf(fmt.Sprint(namespace, "/", i)) }
			for n := range c.namespaces {
				for i := range c.perEach { // Key 0 is the newest of its namespace.
					entries[hash(n, i)] = Entry{Owner: Owner{fmt.Sprint("n", n), "web"}, RemovedAt: start.Add(-time.Duration(i) * time.Millisecond)}
				}
			}
			book, changes := NewBook(grace, entries).Next(start, nil, allLoaded)
			for n := range c.namespaces {
				for i := range c.perEach {
					want := "removed"
					if i >= c.want {
						want = "unknown"
					}
					if got := state(book, hash(n, i), start); got != want {
						t.Fatalf("namespace %d: the key that was removed %d ms ago is %s, want %s", n, i, got, want)
					}
				}
			}
			if got, want := len(book.entries), c.namespaces*c.want; got != want {
				t.Errorf("%d keys are kept, want %d", got, want)
			}
			if got, want := len(changes), c.namespaces*(c.perEach-c.want); got != want {
				t.Errorf("%d keys changed, want %d", got, want)
			}
		})
	}
	entries := map[Hash]Entry{keyA: {Owner: ios, RemovedAt: start.Add(-5 * time.Minute)}}
	for i := range MaxRemovedPerNamespace + 1 {
		entries[HashOf(fmt.Sprint(i))] = Entry{Owner: web, RemovedAt: start}
	}
	book, _ := NewBook(grace, entries).Next(start, nil, allLoaded)
	if got := state(book, keyA, start); got != "removed" {
		t.Errorf("the key of a namespace beside one with many removed keys is %s, want removed", got)
	}
}

func FuzzNext(f *testing.F) {
	f.Add([]byte{0x11, 0x20, 0x03, 0xff})
	f.Fuzz(func(t *testing.T, steps []byte) {
		book, now := NewBook(grace, nil), start
		wasKnown := map[Hash]time.Time{}
		for _, s := range steps {
			now = now.Add(time.Duration(s>>4) * time.Minute)
			known := map[Hash]Owner{}
			for i := range 4 {
				if h := (Hash{byte(i)}); s&(1<<i) != 0 {
					known[h] = web
				}
			}
			for h := range wasKnown {
				if book.entries[h].Known() {
					wasKnown[h] = now
				}
			}
			book, _ = book.Next(now, known, allLoaded)
			for h := range known {
				wasKnown[h] = now
			}
			for i := range 4 {
				h, want := Hash{byte(i)}, "unknown"
				last, ok := wasKnown[h]
				if _, is := known[h]; is {
					want = "known"
				} else if ok && now.Sub(last) < grace {
					want = "removed"
				}
				if got := state(book, h, now); got != want {
					t.Fatalf("key %d is %s at %v, want %s", i, got, now.Sub(start), want)
				}
			}
		}
	})
}
