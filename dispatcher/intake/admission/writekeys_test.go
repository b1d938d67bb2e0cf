package admission

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/writekey"
)

// mapMeta is a metadata store in memory that counts its writes.
type mapMeta struct {
	values map[string][]byte
	writes int
	err    error
}

func (m *mapMeta) PutMeta(name string, value []byte) error {
	if m.err != nil {
		return m.err
	}
	m.writes++
	if value == nil {
		delete(m.values, name)
	} else {
		m.values[name] = bytes.Clone(value)
	}
	return nil
}

func (m *mapMeta) AllMeta() (map[string][]byte, error) { return maps.Clone(m.values), m.err }

// keysConfig is the config of a namespace with the Source web and its write keys.
func keysConfig(namespace string, keys ...string) liveconfig.Config {
	web := liveconfig.Source{Name: "web"}
	for _, key := range keys {
		sum := sha256.Sum256([]byte(key))
		web.WriteKeySHA256 = append(web.WriteKeySHA256, hex.EncodeToString(sum[:]))
	}
	return liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: namespace, Sources: []liveconfig.Source{web}}
}

// control applies the configs of one run of a dispatcher.
type control struct {
	*Configs
	t   *testing.T
	log bytes.Buffer
}

func newControl(t *testing.T, m MetaStore) *control {
	c := &control{t: t}
	gate := New(Options{Logger: slog.New(slog.NewTextHandler(&c.log, nil))})
	var err error
	if c.Configs, err = NewConfigs(gate, 10*time.Minute, m, func(*liveconfig.View) error { return nil }); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *control) set(config liveconfig.Config) {
	c.t.Helper()
	data, _, err := liveconfig.Encode(config)
	if err != nil {
		c.t.Fatal(err)
	}
	c.Set(config.Namespace, liveconfig.Stored{Config: data})
}

// is compares the state of a key with "known", "parked", "removed" or "unknown".
func (c *control) is(key, want string) {
	c.t.Helper()
	got := "unknown"
	if _, ok := c.gate.View().SourceByWriteKey(key); ok {
		got = "known"
	} else if _, ok := c.gate.View().RemovedWriteKey(key, time.Now()); ok {
		got = "removed"
	} else if c.gate.View().ParkedKey(key) {
		got = "parked"
	}
	if got != want {
		c.t.Errorf("key %q is %s, want %s", key, got, want)
	}
}

// Each change is made after an hour; key "old" was the key of shop/web before.
func TestRemovedWriteKeys(t *testing.T) {
	none := liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: "shop"}
	suspended := keysConfig("shop", "old")
	suspended.Sources[0].Suspended = true
	for name, c := range map[string]struct {
		change func(c *control)
		reason string // The reason of the rejection; empty while the key is known.
	}{
		"rotated":                    {func(c *control) { c.set(keysConfig("shop", "new")) }, "this write key was removed from its Source at 2000-01-01T01:00:00Z; use the current write key of the Source"},
		"no usable key":              {func(c *control) { c.set(keysConfig("shop")) }, "the Source of this write key has had no usable write key since 2000-01-01T01:00:00Z; the condition Ready of the Source gives the reason"},
		"Source deleted":             {func(c *control) { c.set(none) }, "the Source of this write key was removed at 2000-01-01T01:00:00Z; add it again, or stop the sender"},
		"namespace without objects":  {func(c *control) { c.Delete("shop") }, "the Source of this write key was removed at 2000-01-01T01:00:00Z; add it again, or stop the sender"},
		"a second key":               {func(c *control) { c.set(keysConfig("shop", "new", "old")) }, ""},
		"Source suspended":           {func(c *control) { c.set(suspended) }, ""},
		"config refused":             {func(c *control) { c.Set("shop", liveconfig.Stored{Config: []byte("damaged")}) }, ""},
		"moved to another namespace": {func(c *control) { c.set(none); c.set(keysConfig("bank", "old")) }, ""},
		"removed and restored":       {func(c *control) { c.set(none); time.Sleep(9 * time.Minute); c.set(keysConfig("shop", "old")) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &mapMeta{values: map[string][]byte{"circuit/shop/crm": []byte("of another part")}}
				control := newControl(t, m)
				control.set(keysConfig("shop", "old"))
				control.Synced()
				control.is("old", "known")
				time.Sleep(time.Hour)
				c.change(control)
				if c.reason == "" {
					control.is("old", "known")
					time.Sleep(time.Hour)
					control.is("old", "known")
					return
				}
				control.is("old", "removed")
				removed, _ := control.gate.View().RemovedWriteKey("old", time.Now())
				if want := c.reason + ". Calls with it are answered 503 until 2000-01-01T01:10:00Z, so that clients send them again, and 401 after that"; removed.Reason != want {
					t.Errorf("the reason is %q, want %q", removed.Reason, want)
				}
				hash := writekey.HashOf("old")
				line := "msg=\"write key removed; calls with it are answered 503, then 401\" namespace=shop source=web sha256=" + hex.EncodeToString(hash[:4]) + " until=2000-01-01T01:10:00Z"
				if got := strings.Count(control.log.String(), line); got != 1 {
					t.Errorf("the log has the line %q %d times, want once:\n%s", line, got, &control.log)
				}
				// A further change of the config and a restart do not extend the grace period.
				time.Sleep(9 * time.Minute)
				control.set(keysConfig("bank", "other"))
				restarted := newControl(t, m)
				restarted.good, restarted.routers = control.good, control.routers
				restarted.Synced()
				restarted.is("old", "removed")
				time.Sleep(time.Minute - time.Nanosecond)
				restarted.is("old", "removed")
				time.Sleep(time.Nanosecond)
				restarted.is("old", "unknown")
				if strings.Contains(restarted.log.String(), "write key removed") {
					t.Errorf("the removal is logged again after a restart:\n%s", &restarted.log)
				}
				// Unknown keys are deleted.
				restarted.set(keysConfig("bank", "another"))
				if _, kept := m.values[keyPrefix+hex.EncodeToString(hash[:])]; kept || len(m.values["circuit/shop/crm"]) == 0 {
					t.Errorf("the store keeps %v", m.values)
				}
			})
		})
	}
}

// A key that is removed while the dispatcher is stopped counts as removed from the next start
// on; a namespace whose config cannot be loaded removes no key, and its callers are answered 503.
func TestWriteKeysRemovedWhileDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &mapMeta{values: map[string][]byte{}}
		c := newControl(t, m)
		c.set(keysConfig("shop", "old", "stays"))
		c.set(keysConfig("bank", "broken"))
		c.Synced()
		time.Sleep(24 * time.Hour)

		c = newControl(t, m)
		c.set(keysConfig("shop", "stays"))
		c.Set("bank", liveconfig.Stored{Config: []byte("damaged")})
		c.Synced()
		c.is("old", "removed")
		c.is("stays", "known")
		c.is("broken", "parked")
		if _, _, bad := c.gate.Authenticate(c.gate.View(), "broken"); bad == nil || bad.Code != CodeNotReady {
			t.Errorf("refusal: got %+v, want the code %s", bad, CodeNotReady)
		}
		time.Sleep(9 * time.Minute)
		c.Delete("bank")
		c.is("broken", "removed")
		time.Sleep(time.Minute)
		c.is("old", "unknown")
		c.is("broken", "removed")
	})
}

// A config that cannot be applied changes no key.
func TestWriteKeysFollowWhatIsInEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &mapMeta{values: map[string][]byte{}}
		c := newControl(t, m)
		c.set(keysConfig("shop", "old"))
		c.Synced()
		c.apply = func(*liveconfig.View) error { return errors.New("disk on fire") }
		c.set(keysConfig("shop", "new"))
		time.Sleep(time.Hour)
		c.is("old", "known")
		c.apply = func(*liveconfig.View) error { return nil }
		c.set(keysConfig("bank", "other"))
		c.is("old", "removed")
		c.is("new", "known")
	})
}

// Only changed keys are written to the store, the log is bounded, and a failing store loses
// only the state across a restart.
func TestWriteKeysAreKeptSparingly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &mapMeta{values: map[string][]byte{}}
		c := newControl(t, m)
		var many liveconfig.Config
		for i := range 100 {
			config := keysConfig("shop", fmt.Sprint("key-", i))
			config.Sources[0].Name = fmt.Sprintf("s%03d", i)
			config.Sources = append(many.Sources, config.Sources...)
			many = config
		}
		c.set(many)
		c.set(keysConfig("bank", "old"))
		c.Synced()
		if m.writes != 101 {
			t.Errorf("%d writes for 101 new keys", m.writes)
		}
		c.set(keysConfig("bank", "new"))
		if m.writes != 103 {
			t.Errorf("%d writes, want 2 more than 101 after one key was replaced", m.writes)
		}
		c.Delete("shop")
		if m.writes != 203 {
			t.Errorf("%d writes, want 100 more than 103 after 100 keys were removed", m.writes)
		}
		text := c.log.String()
		if n := strings.Count(text, "write key removed"); n != 1+maxLoggedKeys || !strings.Contains(text, fmt.Sprintf("suppressed=%d", 100-maxLoggedKeys)) {
			t.Errorf("%d removals are logged one by one, want %d and a summary:\n%s", n, 1+maxLoggedKeys, text)
		}
		m.err = errors.New("disk on fire")
		c.Delete("bank")
		c.is("new", "removed")
		if !strings.Contains(c.log.String(), "disk on fire") {
			t.Error("the failure of the store is not logged")
		}
	})
}
