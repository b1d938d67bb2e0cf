package dispatcher

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

const (
	manyNamespaces  = 50
	manyPerEach     = 200
	manyConfigStart = 1_000
)

// manyConfig returns the config of a namespace with manyPerEach destinations.
func manyConfig(namespace int) liveconfig.Config {
	c := testConfig("https://hooks.example.com/in")
	c.Namespace = fmt.Sprintf("team-%02d", namespace)
	c.Sources[0].WriteKeySHA256 = liveconfig.KeyHashes{fmt.Sprintf("%064x", namespace+1)}
	d := c.Destinations[0]
	c.Destinations = make([]liveconfig.Destination, manyPerEach)
	for i := range c.Destinations {
		c.Destinations[i] = d
		c.Destinations[i].Name = fmt.Sprintf("destination-%03d", i)
		c.Destinations[i].Endpoints = []liveconfig.Endpoint{{Name: "primary", URL: liveconfig.NewSecret(fmt.Sprintf("https://hooks.example.com/%d/%d", namespace, i))}}
	}
	return c
}

// storedAs returns a config with a head that has the number.
func storedAs(b testing.TB, c liveconfig.Config, number int64) liveconfig.Stored {
	b.Helper()
	stored := encoded(b, c)
	_, revision, err := liveconfig.Encode(c)
	if err != nil {
		b.Fatal(err)
	}
	stored.Head, err = liveconfig.EncodeHead(liveconfig.Head{Number: number, Since: manyConfigStart, Revision: revision})
	if err != nil {
		b.Fatal(err)
	}
	return stored
}

// withManyDestinations makes a dispatcher with 10,000 destinations in 50 namespaces.
func withManyDestinations(b *testing.B) *Dispatcher {
	policy, err := egress.ParsePolicy([]string{"127.0.0.0/8"})
	if err != nil {
		b.Fatal(err)
	}
	d, err := New(Options{DataDir: b.TempDir(), Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0", Egress: policy, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = d.Close() })
	begin := time.Now()
	for namespace := range manyNamespaces {
		c := manyConfig(namespace)
		d.Set(c.Namespace, storedAs(b, c, manyConfigStart))
	}
	d.Synced()
	b.ReportMetric(time.Since(begin).Seconds(), "s/start")
	return d
}

// BenchmarkEdit measures the time until the edit of one of 10,000 destinations is in effect.
func BenchmarkEdit(b *testing.B) {
	d := withManyDestinations(b)
	number := int64(manyConfigStart)
	for b.Loop() {
		b.StopTimer()
		number++
		c := manyConfig(int(number) % manyNamespaces)
		edited := &c.Destinations[int(number)%manyPerEach]
		edited.Generation, edited.Revision = number, fmt.Sprint("d", number)
		edited.Delivery.MaxInFlight = 1 + int(number)%64
		stored := storedAs(b, c, number)
		b.StartTimer()
		d.Set(c.Namespace, stored)
	}
}

// BenchmarkIdleReport measures the answer to the operator's poll when nothing has changed.
func BenchmarkIdleReport(b *testing.B) {
	d := withManyDestinations(b)
	cursor := d.Report().Cursor
	if r := d.Changes(cursor); r != nil {
		cursor = r.Cursor
	}
	b.ReportAllocs()
	for b.Loop() {
		if r := d.Changes(cursor); r != nil {
			cursor = r.Cursor
		}
	}
}
