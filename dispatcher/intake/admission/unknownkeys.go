package admission

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// Bounds of the table of unknown write keys.
const (
	maxUnknownKeys = 64
	// maxKeysPerAddress is the number of entries of one address; its requests with further keys
	// share one more entry without a prefix. Without this bound one sender of invented keys
	// would displace all others.
	maxKeysPerAddress = 8
	// unknownKeyMemory is how long an entry is kept after its last request.
	unknownKeyMemory = time.Hour
)

// UnknownKeys counts the requests that were refused because of an unknown write key, by the prefix
// of the key and the sender's address, in bounded memory. The zero value is ready to use. It is safe
// for concurrent use.
type UnknownKeys struct {
	mu      sync.Mutex
	entries []adminapi.UnknownKey
}

// Add counts a request. A full table drops the entry with the fewest requests, so a sender that
// repeats its requests remains in it beside any number of invented keys and addresses.
func (u *UnknownKeys) Add(key, address string, now time.Time) {
	prefix := shownPrefix(key)
	u.mu.Lock()
	defer u.mu.Unlock()
	i := u.find(prefix, address)
	if i < 0 && u.keysOf(address) >= maxKeysPerAddress {
		prefix = ""
		i = u.find(prefix, address)
	}
	if i < 0 {
		u.forget(now)
		if len(u.entries) == maxUnknownKeys {
			least := u.least()
			u.entries = slices.DeleteFunc(u.entries, func(e adminapi.UnknownKey) bool { return e == least })
		}
		i = len(u.entries)
		u.entries = append(u.entries, adminapi.UnknownKey{Prefix: prefix, Address: address, First: now})
	}
	u.entries[i].Requests++
	u.entries[i].Last = now
}

// List returns the entries with a request within the last hour, those with the most requests first.
func (u *UnknownKeys) List(now time.Time) []adminapi.UnknownKey {
	u.mu.Lock()
	u.forget(now)
	list := slices.Clone(u.entries)
	u.mu.Unlock()
	slices.SortFunc(list, func(a, b adminapi.UnknownKey) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), b.Last.Compare(a.Last), cmp.Compare(a.Address, b.Address),
			cmp.Compare(a.Prefix, b.Prefix))
	})
	return list
}

func (u *UnknownKeys) find(prefix, address string) int {
	return slices.IndexFunc(u.entries, func(e adminapi.UnknownKey) bool { return e.Prefix == prefix && e.Address == address })
}

func (u *UnknownKeys) keysOf(address string) (n int) {
	for i := range u.entries {
		if u.entries[i].Address == address {
			n++
		}
	}
	return n
}

// least returns the entry with the fewest requests, of several the one that was used least recently.
func (u *UnknownKeys) least() adminapi.UnknownKey {
	return slices.MinFunc(u.entries, func(a, b adminapi.UnknownKey) int {
		return cmp.Or(cmp.Compare(a.Requests, b.Requests), a.Last.Compare(b.Last))
	})
}

func (u *UnknownKeys) forget(now time.Time) {
	u.entries = slices.DeleteFunc(u.entries, func(e adminapi.UnknownKey) bool { return now.Sub(e.Last) > unknownKeyMemory })
}

// shownPrefix returns the part of an unknown write key that people may see: at most four letters
// and at most a quarter of the key, because the key may be a credential of another system, or a
// valid key with one wrong letter. It ends before the first byte that no usual key has.
func shownPrefix(key string) string {
	prefix := key[:min(4, len(key)/4)]
	usual := func(c rune) bool {
		return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_'
	}
	if i := strings.IndexFunc(prefix, func(c rune) bool { return !usual(c) }); i >= 0 {
		return prefix[:i]
	}
	return prefix
}
