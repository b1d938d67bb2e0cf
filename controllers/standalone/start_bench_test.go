package standalone

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// discard is a sink without a dispatcher.
type discard struct{}

func (discard) Set(string, liveconfig.Stored) {}
func (discard) Delete(string)                 {}
func (discard) Synced(...string)              {}

// manyDestinations writes a file for each namespace, with a Source, and with destinations that have a
// Secret each.
func manyDestinations(tb testing.TB, dir string, namespaces, perNamespace int) {
	tb.Helper()
	for n := range namespaces {
		var text strings.Builder
		fmt.Fprintf(&text, `apiVersion: v1
kind: Secret
metadata: {name: web-key, namespace: n%[1]d}
stringData: {writeKey: key-of-n%[1]d}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: web, namespace: n%[1]d}
spec:
  writeKeys: [{name: main, secretKeyRef: {name: web-key, key: writeKey}}]
`, n)
		for i := range perNamespace {
			fmt.Fprintf(&text, `---
apiVersion: v1
kind: Secret
metadata: {name: hook-%[2]d, namespace: n%[1]d}
stringData: {sharedSecret: the-secret-of-n%[1]d-%[2]d}
---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: hook-%[2]d, namespace: n%[1]d}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: primary, url: "https://hooks.example/n%[1]d/%[2]d"}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: hook-%[2]d, key: sharedSecret}}]}
  filter: {events: [hook-%[2]d]}
`, n, i)
		}
		put(tb, dir, fmt.Sprintf("n%03d.yaml", n), text.String())
	}
}

// BenchmarkStart measures the first start with 10,000 destinations, and one with the state of an earlier
// process, without a dispatcher. live-MB is the memory that remains in use after it.
func BenchmarkStart(b *testing.B) {
	dir, stored := b.TempDir(), filepath.Join(b.TempDir(), "manifests.json")
	manyDestinations(b, dir, 50, 200)
	start := func(b *testing.B, state string) {
		b.Helper()
		c := New(Options{Dir: dir, StateFile: state, Sink: discard{}, Changes: func(string) *adminapi.Report {
			return nil
		}, Logger: slog.New(slog.DiscardHandler)})
		if _, err := c.start(); err != nil {
			b.Fatal(err)
		}
		if got := len(c.store.objects); got != 50*(2+2*200) {
			b.Fatalf("%d objects, want %d", got, 50*(2+2*200))
		}
		b.StopTimer()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		b.ReportMetric(float64(m.HeapAlloc)/1e6, "live-MB")
		runtime.KeepAlive(c)
		b.StartTimer()
	}
	b.Run("first", func(b *testing.B) {
		for i := range b.N {
			start(b, filepath.Join(b.TempDir(), fmt.Sprint(i)))
		}
	})
	b.Run("second", func(b *testing.B) {
		start(b, stored)
		b.ResetTimer()
		for range b.N {
			start(b, stored)
		}
	})
}

// BenchmarkEdit measures the edit of one of 10,000 destinations, without a dispatcher and a state file.
func BenchmarkEdit(b *testing.B) {
	dir := b.TempDir()
	manyDestinations(b, dir, 50, 200)
	c := New(Options{Dir: dir, Sink: discard{}, Changes: func(string) *adminapi.Report { return nil }, Logger: slog.New(slog.DiscardHandler)})
	if _, err := c.start(); err != nil {
		b.Fatal(err)
	}
	file := filepath.Join(dir, "n007.yaml")
	text, err := readFile(file)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for edits := 0; b.Loop(); edits++ {
		put(b, dir, "n007.yaml", strings.Replace(string(text), "/n7/0\"", fmt.Sprintf("/n7/edited-%d\"", edits), 1))
		marks, err := c.marks()
		if err != nil {
			b.Fatal(err)
		}
		c.load(marks)
	}
}
