package admission

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/adminapi"
)

func TestUnknownKeys(t *testing.T) {
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	at := func(seconds int) time.Time { return begin.Add(time.Duration(seconds) * time.Second) }
	var u UnknownKeys
	u.Add("demo-write-key-1", "10.1.2.3", at(0))
	u.Add("demo-write-key-2", "10.1.2.3", at(1)) // the same prefix
	u.Add("demo-write-key-1", "10.1.2.4", at(2))
	u.Add("short", "10.1.2.4", at(3))
	want := []adminapi.UnknownKey{
		{Prefix: "demo", Address: "10.1.2.3", Requests: 2, First: at(0), Last: at(1)},
		{Prefix: "s", Address: "10.1.2.4", Requests: 1, First: at(3), Last: at(3)},
		{Prefix: "demo", Address: "10.1.2.4", Requests: 1, First: at(2), Last: at(2)},
	}
	if diff := cmp.Diff(want, u.List(at(4))); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want[1:2], u.List(at(3).Add(unknownKeyMemory))); diff != "" {
		t.Errorf("entries after an hour (-want +got):\n%s", diff)
	}
}

// Invented keys and addresses neither grow the table nor displace a sender that repeats its requests.
func TestUnknownKeysAreBounded(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, c := range []struct {
		name string
		// key and address of the nth invented request.
		key, address func(n int) string
		entries      int
	}{
		{"keys of one address", func(n int) string { return fmt.Sprintf("%04d-invented-key", n) }, func(int) string {
			return "10.9.9.9"
		}, 1 + maxKeysPerAddress + 1},
		{"keys and addresses", func(n int) string { return fmt.Sprintf("%04d-invented-key", n) }, func(n int) string {
			return fmt.Sprintf("fd00::%x", n)
		}, maxUnknownKeys},
	} {
		t.Run(c.name, func(t *testing.T) {
			var u UnknownKeys
			u.Add("demo-write-key-1", "10.1.2.3", now)
			u.Add("demo-write-key-1", "10.1.2.3", now)
			for n := range 1000 {
				u.Add(c.key(n), c.address(n), now.Add(time.Duration(n)*time.Millisecond))
			}
			list := u.List(now.Add(time.Second))
			if len(list) != c.entries {
				t.Errorf("entries: got %d, want %d", len(list), c.entries)
			}
			kept := false
			for _, e := range list {
				kept = kept || e.Address == "10.1.2.3" && e.Requests == 2
			}
			if !kept {
				t.Errorf("the sender that repeats its requests is missing in %+v", list)
			}
		})
	}
}

// No more than a quarter of a key is shown, and only characters that are safe everywhere.
func TestShownPrefix(t *testing.T) {
	for key, want := range map[string]string{
		"": "", "abc": "", "abcd": "a", "abcdefgh": "ab", "abcdefghijklmnop": "abcd", "abcdefghijklmnopqrstuvwxyz0123456789": "abcd",
		"ab\x1b[31mcdefghijklmnop": "ab", "ünicode-write-key": "", "a b c d e f g h i j": "a",
	} {
		if got := shownPrefix(key); got != want {
			t.Errorf("shown prefix of %q: got %q, want %q", key, got, want)
		}
	}
}
