// Package writekey is the state machine of write keys:
//
//	unknown -> known -> removed -> unknown
//
// A key is known while a Source of the live config has it, removed for a grace
// period after that, and then unknown again. A key that is restored within the
// grace period is known immediately. The package does no I/O and has no clock;
// the dispatcher keeps the entries in its store. The main type is Book.
package writekey

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"slices"
	"time"
)

// Hash is the SHA-256 of a write key. Keys themselves are never kept.
type Hash [sha256.Size]byte

// HashOf returns the hash of a key.
func HashOf(key string) Hash { return sha256.Sum256([]byte(key)) }

// Owner is the Source that a key belongs to, or belonged to.
type Owner struct {
	Namespace string `json:"namespace"`
	Source    string `json:"source"`
}

// Entry is the state of a known or removed key.
type Entry struct {
	Owner
	// RemovedAt is zero while the key is known.
	RemovedAt time.Time `json:"removedAt,omitzero"`
	// LostAt is when a known key was not in the config of its Source, without a proof that its owner removed it.
	LostAt time.Time `json:"lostAt,omitzero"`
}

// Known reports whether the key belongs to a Source.
func (e Entry) Known() bool { return e != Entry{} && e.RemovedAt.IsZero() }

// Removed reports whether the key belonged to a Source.
func (e Entry) Removed() bool { return !e.RemovedAt.IsZero() }

// MaxRemoved bounds the removed keys. MaxRemovedPerNamespace bounds the keys of one namespace, so that
// it cannot displace the keys of another.
const (
	MaxRemoved             = 10_000
	MaxRemovedPerNamespace = 1_000
)

// Book holds the entries of all known and removed keys. It is immutable.
type Book struct {
	grace   time.Duration
	entries map[Hash]Entry
}

// NewBook makes a Book of stored entries. grace is how long a key remains removed.
func NewBook(grace time.Duration, entries map[Hash]Entry) Book { return Book{grace, entries} }

// Presence is the state of the Source of a key that no config has.
type Presence int

// Values of Presence.
const (
	// Deleted: the Source does not exist.
	Deleted Presence = iota
	// Present: the Source exists, and its owner has removed the key.
	Present
	// Doubtful: the Source exists, and a config may have been lost that had the key.
	Doubtful
	// Parked: the Source is missing, and was not deleted.
	Parked
)

// lostTime bounds the time for which a lost key is known: liveconfig.ParkingTime.
const lostTime = 7 * 24 * time.Hour

// Change is a key with a changed entry; a zero Entry is an unknown key.
type Change struct {
	Hash          Hash
	Before, After Entry
}

// Next returns the Book at a time when the keys of known belong to Sources, and the changes. The
// known keys of a Source that is Parked remain known, and of one that is Doubtful for lostTime.
//
// Beyond MaxRemoved and MaxRemovedPerNamespace the oldest removed keys become unknown.
func (b Book) Next(now time.Time, known map[Hash]Owner, presence func(Owner) Presence) (Book, []Change) {
	next := Book{b.grace, make(map[Hash]Entry, len(known))}
	for hash, owner := range known {
		next.entries[hash] = Entry{Owner: owner}
	}
	var removed []Hash
	for hash, entry := range b.entries {
		if _, ok := known[hash]; ok {
			continue
		}
		if entry.Known() {
			at := presence(entry.Owner)
			if at == Doubtful && entry.LostAt.IsZero() {
				entry.LostAt = now
			}
			if at == Parked || at != Deleted && !entry.LostAt.IsZero() && now.Sub(entry.LostAt) < lostTime {
				next.entries[hash] = entry
				continue
			}
			entry.RemovedAt, entry.LostAt = now, time.Time{}
		}
		if entry.RemovedAt.After(now) { // The clock was set back.
			entry.RemovedAt = now
		}
		if now.Sub(entry.RemovedAt) < b.grace {
			next.entries[hash] = entry
			removed = append(removed, hash)
		}
	}
	next.evict(removed)
	return next, b.changes(next)
}

// evict keeps the newest removed keys within the bounds.
func (b Book) evict(removed []Hash) {
	slices.SortFunc(removed, func(x, y Hash) int {
		return cmp.Or(b.entries[y].RemovedAt.Compare(b.entries[x].RemovedAt), bytes.Compare(x[:], y[:]))
	})
	kept, perNamespace := 0, map[string]int{}
	for _, hash := range removed {
		namespace := b.entries[hash].Namespace
		if kept == MaxRemoved || perNamespace[namespace] == MaxRemovedPerNamespace {
			delete(b.entries, hash)
			continue
		}
		kept++
		perNamespace[namespace]++
	}
}

// changes returns the entries that differ in next.
func (b Book) changes(next Book) (changes []Change) {
	for hash, before := range b.entries {
		if after := next.entries[hash]; after != before {
			changes = append(changes, Change{hash, before, after})
		}
	}
	for hash, after := range next.entries {
		if _, ok := b.entries[hash]; !ok {
			changes = append(changes, Change{Hash: hash, After: after})
		}
	}
	return changes
}

// Removed returns the entry of a key that is removed at the given time.
func (b Book) Removed(hash Hash, now time.Time) (Entry, bool) {
	entry := b.entries[hash]
	return entry, entry.Removed() && now.Sub(entry.RemovedAt) < b.grace
}

// Known returns the entry of a key that belongs to a Source.
func (b Book) Known(hash Hash) (Entry, bool) {
	entry := b.entries[hash]
	return entry, entry.Known()
}

// HasLost reports whether keys are lost.
func (b Book) HasLost() bool {
	for _, entry := range b.entries {
		if !entry.LostAt.IsZero() {
			return true
		}
	}
	return false
}

// OwnedBy returns the known keys whose owner is selected.
func (b Book) OwnedBy(selected func(Owner) bool) map[Hash]Owner {
	found := map[Hash]Owner{}
	for hash, entry := range b.entries {
		if entry.Known() && selected(entry.Owner) {
			found[hash] = entry.Owner
		}
	}
	return found
}

// Knows reports whether keys of a namespace's Sources are known.
func (b Book) Knows(namespace string) bool {
	for _, entry := range b.entries {
		if entry.Namespace == namespace && entry.Known() {
			return true
		}
	}
	return false
}

// Until returns when a removed key becomes unknown.
func (b Book) Until(e Entry) time.Time { return e.RemovedAt.Add(b.grace) }
