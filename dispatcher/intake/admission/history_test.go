package admission

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// numbered applies a config with a head.
func (c *control) numbered(number int64, config liveconfig.Config, deleted ...liveconfig.Ref) {
	c.t.Helper()
	head := liveconfig.Head{Number: number}
	for _, r := range deleted {
		head.Tombstones = append(head.Tombstones, liveconfig.Tombstone{Object: r, DeletedAt: time.Now()})
	}
	c.head(head, config)
}

// head applies a config with a head, which gets the revision of the config.
func (c *control) head(head liveconfig.Head, config liveconfig.Config) {
	c.t.Helper()
	data, revision, err := liveconfig.Encode(config)
	if err != nil {
		c.t.Fatal(err)
	}
	head.Revision = revision
	text, err := liveconfig.EncodeHead(head)
	if err != nil {
		c.t.Fatal(err)
	}
	c.Set(config.Namespace, liveconfig.Stored{Config: data, Head: text})
}

var (
	web  = liveconfig.Ref{Section: liveconfig.SectionSources, Name: "web"}
	none = liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: "shop"}
)

// Each change is made to the config number 5, which has the Source web.
func TestMissingObjects(t *testing.T) {
	since := time.Date(2000, 1, 1, 0, 1, 0, 0, time.UTC)
	parked := []adminapi.ParkedObject{{Object: "sources/web", Number: 5, Since: since}}
	for name, c := range map[string]struct {
		change func(c *control)
		key    string // The state of the Source's key.
		want   ConfigState
	}{
		"tombstone":                      {func(c *control) { c.numbered(6, none, web) }, "removed", ConfigState{Number: 6}},
		"no tombstone":                   {func(c *control) { c.numbered(6, none) }, "parked", ConfigState{Number: 6, Parked: parked}},
		"no tombstone, then a tombstone": {func(c *control) { c.numbered(6, none); c.numbered(7, none, web) }, "removed", ConfigState{Number: 7}},
		"no tombstone, then restored":    {func(c *control) { c.numbered(6, none); c.numbered(7, keysConfig("shop", "old")) }, "known", ConfigState{Number: 7}},
		"parked twice":                   {func(c *control) { c.numbered(6, none); time.Sleep(time.Hour); c.numbered(7, none) }, "parked", ConfigState{Number: 7, Parked: parked}},
		"no Secret": {func(c *control) {
			c.Delete("shop")
		}, "parked", ConfigState{Number: 5, Missing: since, Parked: parked}},
		"no Secret after the deletion": {func(c *control) {
			c.numbered(6, none, web)
			c.Delete("shop")
		}, "removed", ConfigState{Number: 6, Removed: true}},
		"no Secret while parked": {func(c *control) {
			c.numbered(6, none)
			c.Delete("shop")
		}, "parked", ConfigState{Number: 6, Parked: parked}},
		"older number":     {func(c *control) { c.numbered(4, none, web) }, "known", ConfigState{Number: 5}},
		"without a number": {func(c *control) { c.set(none) }, "parked", ConfigState{Number: 5, Parked: parked}},
		"without a number, then no Secret": {func(c *control) { c.set(keysConfig("shop", "old")); c.Delete("shop") }, "parked",
			ConfigState{Number: 5, Missing: since, Parked: parked}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &mapMeta{values: map[string][]byte{}}
				control := newControl(t, m)
				control.numbered(5, keysConfig("shop", "old"))
				control.Synced()
				time.Sleep(time.Minute)
				c.change(control)
				if diff := cmp.Diff(withParkedKey(c.want, c.key), statesOf(control)["shop"]); diff != "" {
					t.Errorf("state (-want +got):\n%s", diff)
				}
				control.is("old", c.key)
			})
		})
	}
}

// withParkedKey adds the key of the parked Source to an expected state.
func withParkedKey(want ConfigState, key string) ConfigState {
	if key == "parked" {
		want.Reserved = []adminapi.ReservedKey{{SHA256: hashOfOld, RemovedAt: want.Parked[0].Since}}
	}
	return want
}

// hashOfOld is the SHA-256 of the write key "old".
const hashOfOld = "cba06b5736faf67e54b07b561eae94395e774c517a7d910a54369e1263ccfbd4"

// The keys that a config reserves are known after a restart, also without a live config.
func TestReservedKeysSurviveRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &mapMeta{values: map[string][]byte{}}
		reserved := []liveconfig.ReservedKey{{SHA256: hashOfOld, RemovedAt: time.Now().UTC()}}
		first := newControl(t, m)
		first.head(liveconfig.Head{Number: 6, Reserved: reserved}, none)
		first.Synced()
		second := newControl(t, m)
		second.Synced()
		want := ConfigState{Number: 6, Removed: true, Reserved: []adminapi.ReservedKey{{SHA256: hashOfOld, RemovedAt: reserved[0].RemovedAt}}}
		if diff := cmp.Diff(want, statesOf(second)["shop"]); diff != "" {
			t.Errorf("state after a restart (-want +got):\n%s", diff)
		}
		second.head(liveconfig.Head{Number: 7}, none)
		if got := statesOf(second)["shop"].Reserved; got != nil {
			t.Errorf("reserved keys after a config without any: got %v, want none", got)
		}
	})
}

// A dispatcher that restarts without an operator knows the applied configs.
func TestHistorySurvivesRestarts(t *testing.T) {
	since := time.Date(2000, 1, 1, 0, 1, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		before, after func(c *control)
		key           string
		want          ConfigState
		refused       string
	}{
		"Secret lost": {
			after: func(*control) {}, key: "parked",
			want: ConfigState{Number: 5, Missing: since.Add(time.Hour),
				Parked: []adminapi.ParkedObject{{Object: "sources/web", Number: 5, Since: since.Add(time.Hour)}}},
		},
		"Secret lost before the restart": {
			before: func(c *control) { c.Delete("shop") }, after: func(*control) {}, key: "parked",
			want: ConfigState{Number: 5, Missing: since, Parked: []adminapi.ParkedObject{{Object: "sources/web", Number: 5, Since: since}}},
		},
		"older Secret": {
			after: func(c *control) { c.numbered(4, keysConfig("shop", "stale")) }, key: "parked",
			want: ConfigState{Number: 5, Missing: since.Add(time.Hour),
				Parked: []adminapi.ParkedObject{{Object: "sources/web", Number: 5, Since: since.Add(time.Hour)}}},
			refused: "live config has number 4, and number 5 was in effect before",
		},
		"same Secret": {after: func(c *control) { c.numbered(5, keysConfig("shop", "old")) }, key: "known", want: ConfigState{Number: 5}},
		"parked object": {
			before: func(c *control) { c.numbered(6, none) }, after: func(c *control) { c.numbered(6, none) }, key: "parked",
			want: ConfigState{Number: 6, Parked: []adminapi.ParkedObject{{Object: "sources/web", Number: 5, Since: since}}},
		},
		"deleted namespace": {before: func(c *control) { c.numbered(6, none, web); c.Delete("shop") }, after: func(*control) {}, key: "unknown", want: ConfigState{Number: 6, Removed: true}},
		"older Secret of a deleted namespace": {
			before: func(c *control) { c.numbered(6, none, web); c.Delete("shop") }, after: func(c *control) {
				c.numbered(5, keysConfig("shop", "old"))
			}, key: "unknown",
			want: ConfigState{Number: 6, Missing: since.Add(time.Hour)}, refused: "live config has number 5, and number 6 was in effect before",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &mapMeta{values: map[string][]byte{}}
				first := newControl(t, m)
				first.numbered(5, keysConfig("shop", "old"))
				first.Synced()
				time.Sleep(time.Minute)
				if c.before != nil {
					c.before(first)
				}
				time.Sleep(time.Hour)
				second := newControl(t, m)
				c.after(second)
				second.Synced()
				if diff := cmp.Diff(withParkedKey(c.want, c.key), statesOf(second)["shop"]); diff != "" {
					t.Errorf("state (-want +got):\n%s", diff)
				}
				if got := second.Rejected()["shop"].Error; !strings.HasPrefix(got, c.refused) {
					t.Errorf("refusal: got %q, want %q", got, c.refused)
				}
				second.is("old", c.key)
			})
		})
	}
}

// A failed write of a history is repeated with the next config.
func TestHistoryIsStoredAgain(t *testing.T) {
	m := &mapMeta{values: map[string][]byte{}}
	first := newControl(t, m)
	first.Synced()
	m.err = errors.New("no space")
	first.numbered(5, keysConfig("shop", "old"))
	m.err = nil
	first.numbered(6, keysConfig("bank", "vault"))
	second := newControl(t, m)
	second.Synced()
	if got := statesOf(second)["shop"].Number; got != 5 {
		t.Errorf("number after a restart: got %d, want 5", got)
	}
}

// A dispatcher without the numbers of its configs does not start.
func TestInvalidHistory(t *testing.T) {
	for name, m := range map[string]*mapMeta{
		"invalid value": {values: map[string][]byte{historyPrefix + "shop": []byte("{")}},
		"read error":    {err: errors.New("input/output error")},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := NewConfigs(New(Options{}), time.Minute, m, nil); err == nil {
				t.Error("NewConfigs: got no error")
			}
		})
	}
}

// The history of a removed namespace is kept for a limited time.
func TestHistoryIsPruned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &mapMeta{values: map[string][]byte{}}
		control := newControl(t, m)
		control.numbered(5, keysConfig("shop", "old"))
		control.Synced()
		control.numbered(6, none, web)
		control.Delete("shop")
		for _, c := range []struct {
			after time.Duration
			want  bool
		}{{historyRetention - time.Hour, true}, {2 * time.Hour, false}} {
			time.Sleep(c.after)
			control.numbered(time.Now().UnixMilli(), keysConfig("bank", "vault"))
			_, stored := m.values[historyPrefix+"shop"]
			_, reported := statesOf(control)["shop"]
			if stored != c.want || reported != c.want {
				t.Errorf("at %v: got stored %t, known %t; want %t", time.Now(), stored, reported, c.want)
			}
		}
	})
}

// The namespaces that the marker names are not ready; others are. An unknown key may belong to them.
func TestFailedNamespaces(t *testing.T) {
	control := newControl(t, &mapMeta{values: map[string][]byte{}})
	control.numbered(5, keysConfig("shop", "old"))
	control.Synced("bank")
	control.is("old", "known")
	if view := control.gate.View(); view.Complete() || !view.Unusable("bank") {
		t.Errorf("with a failed namespace: got complete %t, unusable %t", view.Complete(), view.Unusable("bank"))
	}
	control.numbered(1, keysConfig("bank", "vault"))
	control.Synced()
	control.is("vault", "known")
	if view := control.gate.View(); !view.Complete() {
		t.Error("after its config: got an incomplete view")
	}
}

func statesOf(c *control) map[string]ConfigState {
	states, _ := c.States()
	return states
}

// A write key of a live config that is not in effect yet is not refused as unknown.
func TestListedKeys(t *testing.T) {
	gate := New(Options{Listed: func(key string) bool { return key == "listed" }})
	for key, want := range map[string]string{"listed": CodeNotReady, "unknown": CodeUnknownKey} {
		if _, _, bad := gate.Authenticate(liveconfig.NewView(nil), key); bad == nil || bad.Code != want {
			t.Errorf("refusal of the %s key: got %+v, want the code %s", key, bad, want)
		}
	}
}

// A write key that a Source lacks after a gap in the history is lost, not removed: calls with it are refused for a
// while, for 7 days.
func TestLostWriteKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		control := newControl(t, &mapMeta{values: map[string][]byte{}})
		control.numbered(5, keysConfig("shop", "old"))
		control.Synced()
		control.head(liveconfig.Head{Number: 6, Since: 6}, keysConfig("shop", "new"))
		for _, after := range []time.Duration{0, liveconfig.ParkingTime - time.Second} {
			time.Sleep(after)
			control.head(liveconfig.Head{Number: 7 + int64(after), Since: 6}, keysConfig("shop", "new"))
			control.is("old", "parked")
			control.is("new", "known")
			if !control.HasUnlistedKeys() {
				t.Errorf("unlisted keys after %v: got none, want the lost one", after)
			}
		}
		time.Sleep(time.Second)
		control.head(liveconfig.Head{Number: 8 + int64(liveconfig.ParkingTime), Since: 6}, keysConfig("shop", "new"))
		control.is("old", "removed")
	})
}
