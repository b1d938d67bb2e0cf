package admission_test

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/writekey"
	"github.com/posthorn/posthorn/dispatcher/changes"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
	"github.com/posthorn/posthorn/dispatcher/intake/admission/admissiontest"
	"github.com/posthorn/posthorn/dispatcher/queue"
)

func source(name string, suspended bool) liveconfig.Source {
	hash := writekey.HashOf(name + "-key")
	return liveconfig.Source{Name: name, Suspended: suspended, WriteKeySHA256: liveconfig.KeyHashes{hex.EncodeToString(hash[:])}}
}

func view(unusable ...string) *liveconfig.View {
	return liveconfig.NewView([]liveconfig.Revisioned{{Config: liveconfig.Config{
		Namespace: "shop", Sources: []liveconfig.Source{source("web", false), source("off", true)},
	}}}, unusable...)
}

// Each period of storage pressure is reported at once, also if no call was stored in between.
func TestStoragePressureIsATransition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := changes.New(func() changes.Lanes { return nil })
		log.Update(liveconfig.NewView([]liveconfig.Revisioned{{
			Config: liveconfig.Config{Namespace: "shop", Sources: []liveconfig.Source{source("web", false)}}, Revision: "1",
		}}), nil)
		gate := admission.New(admission.Options{Store: &admissiontest.Store{}, Changes: log, Logger: slog.New(slog.DiscardHandler)})
		_, web, _ := gate.Authenticate(view(), "web-key")
		for _, c := range []struct {
			fact string
			full bool
			want bool
		}{
			{"a call is refused", true, true},
			{"another call is refused", true, false},
			{"the pressure has ended", false, false},
			{"a call is refused again", true, true},
		} {
			if !c.full {
				time.Sleep(5 * time.Minute)
				continue
			}
			cursor := log.Cursor()
			web.StorageFull(time.Now())
			if _, changed := log.Since(cursor, changes.Pod{}); changed != c.want {
				t.Errorf("change when %s: got %t, want %t", c.fact, changed, c.want)
			}
		}
	})
}

func newGate(store *admissiontest.Store) *admission.Gate {
	return admission.New(admission.Options{Store: store, Logger: slog.New(slog.DiscardHandler)})
}

func TestAuthenticate(t *testing.T) {
	now := time.Now()
	removed := func(source string) *liveconfig.View {
		return view().WithKeys(writekey.NewBook(time.Minute, map[writekey.Hash]writekey.Entry{
			writekey.HashOf("old-key"): {Owner: writekey.Owner{Namespace: "shop", Source: source}, RemovedAt: now},
		}))
	}
	type result struct {
		Source     string // whom the request counts for; empty for an unidentified one
		Status     int
		Code       string
		RetryAfter int
	}
	for name, c := range map[string]struct {
		view *liveconfig.View
		key  string
		want result
	}{
		"known":                          {view(), "web-key", result{Source: "shop/web"}},
		"suspended":                      {view(), "off-key", result{"shop/off", 503, "source_suspended", 60}},
		"unknown":                        {view(), "x", result{"", 401, "unknown_write_key", 0}},
		"a namespace is not loaded":      {view("bank"), "x", result{"", 503, "not_ready", 1}},
		"removed":                        {removed("web"), "old-key", result{"shop/web", 503, "write_key_removed", 10}},
		"removed with its former Source": {removed("app"), "old-key", result{"", 503, "write_key_removed", 10}},
	} {
		t.Run(name, func(t *testing.T) {
			ref, source, bad := newGate(&admissiontest.Store{}).Authenticate(c.view, c.key)
			if bad == nil {
				bad = admission.CheckSuspended(ref.Source)
			}
			got := result{Source: source.Key()}
			if bad != nil {
				got.Status, got.Code, got.RetryAfter = bad.Status, bad.Code, bad.RetryAfter
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWriteKey(t *testing.T) {
	for header, want := range map[string]string{
		"Basic a2V5Og==": "key", "basic a2V5Og": "key", "Basic a2V5": "key", "Basic IGtleSA6cA==": "key",
		"": "", "Bearer a2V5Og==": "", "Basic %": "",
	} {
		if got := admission.WriteKey(http.Header{"Authorization": {header}}); got != want {
			t.Errorf("key of %q: got %q, want %q", header, got, want)
		}
	}
}

func TestRefusal(t *testing.T) {
	type answer struct {
		Status int
		Header map[string]string
		Body   string
	}
	header := func(more ...string) map[string]string {
		h := map[string]string{"Content-Type": "application/json"}
		for i := 0; i < len(more); i += 2 {
			h[more[i]] = more[i+1]
		}
		return h
	}
	stored := func(err error) *admission.Refusal { r, _, _ := admission.NotStored(err); return r }
	for name, c := range map[string]struct {
		refusal *admission.Refusal
		want    answer
	}{
		"permanent": {admission.Refuse(400, "bad", "a < b"), answer{400, header(), `{"success":false,"error":{"code":"bad","message":"a \u003c b"}}`}},
		"of a line": {&admission.Refusal{Status: 400, Code: "bad", Message: "m", Line: 3}, answer{400, header(), `{"success":false,"error":{"code":"bad","message":"m","line":3}}`}},
		"temporary": {admission.Retry(5, "busy", "m"),
			answer{503, header("Retry-After", "5"), `{"success":false,"error":{"code":"busy","message":"m"}}`}},
		"rate":          {&admission.Refusal{Status: 429, Code: "rate_limited", RetryAfter: 7}, answer{429, header("Retry-After", "7", "X-Ratelimit-Reset", "7"), `{"success":false,"error":{"code":"rate_limited","message":""}}`}},
		"not ready":     {admission.NotReady(), answer{503, header("Retry-After", "1"), `{"success":false,"error":{"code":"not_ready","message":"Posthorn waits for its first config; send the request again"}}`}},
		"disk full":     {stored(fmt.Errorf("append: %w", queue.ErrFull)), answer{503, header("Retry-After", "10"), `{"success":false,"error":{"code":"storage_full","message":"storage is full; nothing of this request was stored, send it again later"}}`}},
		"over share":    {stored(queue.ErrOverShare), answer{503, header("Retry-After", "10"), `{"success":false,"error":{"code":"storage_full","message":"the stored calls of this namespace fill its share of the storage; nothing of this request was stored, send it again later"}}`}},
		"over quota":    {stored(queue.ErrOverQuota), answer{503, header("Retry-After", "10"), `{"success":false,"error":{"code":"storage_full","message":"this Source's undelivered calls fill its part of the storage (--source-quota); nothing of this request was stored, send it again later"}}`}},
		"shutting down": {stored(queue.ErrClosed), answer{503, header("Retry-After", "1"), `{"success":false,"error":{"code":"not_ready","message":"Posthorn is shutting down; send the request again"}}`}},
		"disk error":    {stored(errors.New("/secret/path")), answer{503, header("Retry-After", "10"), `{"success":false,"error":{"code":"storage_failed","message":"the calls could not be stored; send the request again"}}`}},
	} {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			c.refusal.Write(w)
			got := answer{w.Code, map[string]string{}, w.Body.String()}
			for name := range w.Header() {
				got.Header[name] = w.Header().Get(name)
			}
			c.want.Body += "\n"
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}
		})
	}
}

// skipping returns a Router that excludes one destination.
func skipping(key string) admissiontest.Router {
	return admissiontest.Router{OnSkip: func(string, *event.Call) []string { return []string{key} }}
}

// A config takes effect after the calls that were routed by the previous one are stored, but waits
// for at most 2 s. Meanwhile calls are routed by the new one, so that a new lane gets only calls that
// its filter includes.
func TestConfigWaitsForRoutedCalls(t *testing.T) {
	for name, c := range map[string]struct{ stored, applied time.Duration }{
		"calls that are stored soon": {300 * time.Millisecond, 300 * time.Millisecond},
		"a full disk":                {time.Hour, 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGate(&admissiontest.Store{})
				before, after := view(), view()
				admissiontest.Set(g, before, skipping("before"))
				begin, applied := time.Now(), time.Duration(0)
				routed := g.Begin()
				time.AfterFunc(c.stored, routed.End)
				done := make(chan struct{})
				go func() {
					defer close(done)
					_ = g.Replace(after, map[string]admission.Router{"shop": skipping("after")}, func(*liveconfig.View) error {
						applied = time.Since(begin)
						return nil
					})
				}()
				synctest.Wait()
				during := g.Begin()
				defer during.End()
				ref := liveconfig.SourceRef{Namespace: "shop"}
				skip, _ := during.Skip(ref, nil)
				if diff := cmp.Diff([]string{"after"}, skip); diff != "" {
					t.Errorf("destinations that a call skips while the config takes effect (-want +got):\n%s", diff)
				}
				if during.View() != before {
					t.Error("view while the config takes effect: got the new one, want the previous one")
				}
				skip, _ = routed.Skip(ref, nil)
				if diff := cmp.Diff([]string{"before"}, skip); diff != "" {
					t.Errorf("destinations that a call routed before skips (-want +got):\n%s", diff)
				}
				<-done
				if applied < c.applied || applied > c.applied+2*time.Millisecond {
					t.Errorf("time until the config was applied: got %v, want %v", applied, c.applied)
				}
				if g.View() != after {
					t.Error("view after the config took effect: got the previous one, want the new one")
				}
				time.Sleep(c.stored)
			})
		})
	}
}

// A config that cannot be applied leaves the previous view in effect.
func TestConfigThatCannotBeApplied(t *testing.T) {
	g := newGate(&admissiontest.Store{})
	before, failed := view(), errors.New("disk on fire")
	admissiontest.Set(g, before, admissiontest.Router{})
	if err := g.Replace(view(), nil, func(*liveconfig.View) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("error: got %v, want %v", err, failed)
	}
	if g.View() != before {
		t.Error("view: got the new one, want the previous one")
	}
}

func TestSkipAllBut(t *testing.T) {
	g := newGate(&admissiontest.Store{})
	admissiontest.Set(g, view(), admissiontest.Router{All: map[string][]string{"web": {"shop/a", "shop/b", "shop/c"}, "off": {"shop/d"}}})
	routing := g.Begin()
	defer routing.End()
	for source, want := range map[string][]string{"web": {"shop/a", "shop/c"}, "off": {"shop/d"}, "none": nil} {
		got := routing.SkipAllBut("shop", source, func(key string) bool { return key == "shop/b" })
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("destinations of Source %s (-want +got):\n%s", source, diff)
		}
	}
}

// Blocks that the file system reserves are neither used nor free, as for the high-water mark of the
// store.
func TestDiskLeft(t *testing.T) {
	g := newGate(&admissiontest.Store{})
	g.DataDir, g.HighWater = t.TempDir(), 0.8
	disk, err := vfs.Default.GetDiskUsage(g.DataDir)
	if err != nil {
		t.Fatal(err)
	}
	left, total, ok := g.DiskLeft()
	usable := float64(disk.UsedBytes + disk.AvailBytes)
	if want := 0.8*usable - float64(disk.UsedBytes); !ok || math.Abs(left-want) > 0.01*usable {
		t.Errorf("left: got %.0f and %v, want about %.0f", left, ok, want)
	}
	if math.Abs(total-usable) > 0.01*usable {
		t.Errorf("total: got %.0f, want about %.0f", total, usable)
	}
	g.DataDir += "/missing"
	if _, _, ok := g.DiskLeft(); ok {
		t.Error("usage of a missing directory: got known, want unknown")
	}
}

// An audience sync leaves the last part of the disk and half of the Source's quota to live calls.
func TestRoomForSync(t *testing.T) {
	full, room := false, true
	g := newGate(&admissiontest.Store{OnFull: func() bool { return full }, OnRoom: func(source string) bool {
		return source == "shop/web" && room
	}})
	for _, c := range []struct{ full, room, disk, want bool }{{false, true, true, true}, {true, true, false, false},
		{false, false, true, false}} {
		if full, room = c.full, c.room; g.DiskForSync() != c.disk {
			t.Errorf("disk for a sync with %+v: got %v, want %v", c, !c.disk, c.disk)
		}
		if g.RoomForSync("shop/web") != c.want {
			t.Errorf("room for a sync with %+v: got %v, want %v", c, !c.want, c.want)
		}
	}
}

// Append passes messages and errors through.
func TestAppend(t *testing.T) {
	var got []queue.Message
	g := newGate(&admissiontest.Store{OnAppend: func(_ context.Context, msgs []queue.Message) ([]bool, error) {
		got = msgs
		return []bool{true}, queue.ErrFull
	}})
	admissiontest.Set(g, view(), skipping("shop/crm"))
	routing := g.Begin()
	defer routing.End()
	at := time.Unix(1, 0)
	ref := liveconfig.SourceRef{Namespace: "shop", Source: source("web", false)}
	call := &event.Call{Type: event.Track, Event: "E", MessageID: "m", Body: []byte("{}"), LongNumbers: true}
	message, _ := routing.Message(ref, ref.Key(), call, at)
	duplicates, err := routing.Append(t.Context(), []queue.Message{message})
	want := []queue.Message{{Source: "shop/web", ID: "m", Type: "track", Event: "E", AcceptedAt: at, Skip: []string{"shop/crm"},
		LongNumbers: true, Body: []byte("{}")}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("messages (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]bool{true}, duplicates); diff != "" {
		t.Errorf("duplicates (-want +got):\n%s", diff)
	}
	if !errors.Is(err, queue.ErrFull) {
		t.Errorf("error: got %v, want %v", err, queue.ErrFull)
	}
}
