package dispatcher

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
)

const (
	manyNamespaces  = 50
	manyPerEach     = 200
	manyConfigStart = 1_000
)

// manyConfig returns the config of a namespace with manyPerEach destinations.
func manyConfig(namespace int) liveconfig.Config {
	c := liveconfigtest.Config("https://hooks.example.com/in")
	c.Namespace = fmt.Sprintf("team-%02d", namespace)
	c.Sources[0].WriteKeySHA256 = liveconfig.KeyHashes{fmt.Sprintf("%064x", namespace+1)}
	d := c.Destinations[0]
	c.Destinations = make([]liveconfig.Destination, manyPerEach)
	for i := range c.Destinations {
		c.Destinations[i] = d
		c.Destinations[i].Name = fmt.Sprintf("destination-%03d", i)
		c.Destinations[i].Endpoints = []liveconfig.Endpoint{{Name: "primary",
			URL: liveconfig.NewSecret(fmt.Sprintf("https://hooks.example.com/%d/%d", namespace, i))}}
	}
	return c
}

// storedAs returns a config with a head that has the number.
func storedAs(b testing.TB, c liveconfig.Config, number int64) liveconfig.Stored {
	b.Helper()
	stored := liveconfigtest.Encode(b, c)
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
	b.Helper()
	d := startMany(b, b.TempDir(), manyConfigs(b))
	b.Cleanup(func() { _ = d.Close() })
	return d
}

// manyConfigs returns the stored configs of the namespaces.
func manyConfigs(b *testing.B) map[string]liveconfig.Stored {
	b.Helper()
	configs := map[string]liveconfig.Stored{}
	for namespace := range manyNamespaces {
		c := manyConfig(namespace)
		configs[c.Namespace] = storedAs(b, c, manyConfigStart)
	}
	return configs
}

// startMany makes a dispatcher to which configs apply.
func startMany(b *testing.B, dir string, configs map[string]liveconfig.Stored) *Dispatcher {
	b.Helper()
	policy, err := egress.ParsePolicy([]string{"127.0.0.0/8"})
	if err != nil {
		b.Fatal(err)
	}
	d, err := New(Options{DataDir: dir, ServerOptions: ServerOptions{Listen: "127.0.0.1:0", AdminListen: "127.0.0.1:0"}, Egress: policy,
		Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	for namespace, stored := range configs {
		d.Set(namespace, stored)
	}
	d.Synced()
	return d
}

// BenchmarkStart measures the time until a dispatcher without and with earlier data accepts calls.
func BenchmarkStart(b *testing.B) {
	configs := manyConfigs(b)
	earlier := b.TempDir()
	if err := startMany(b, earlier, configs).Close(); err != nil {
		b.Fatal(err)
	}
	for name, dir := range map[string]func() string{"first": b.TempDir, "again": func() string { return earlier }} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				d := startMany(b, dir(), configs)
				b.StopTimer()
				if err := d.Close(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
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
