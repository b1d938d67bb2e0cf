package dispatcher

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/contract/podreport"
	"github.com/posthorn/posthorn/test/wait"
)

// merged is the merge of a dispatcher's reports.
type merged struct{ *podreport.Index }

// poll merges what changed and reports whether anything did.
func (m *merged) poll(d *Dispatcher) bool {
	cursor := ""
	if m.Index != nil {
		cursor = m.Cursor
	}
	report := d.Changes(cursor)
	if report != nil {
		m.Index, _ = m.Merge(*report, nil)
	}
	return report != nil
}

// The merged changes of a dispatcher with traffic equal its full report when the traffic has ended.
func TestMergedChangesEqualTheReport(t *testing.T) {
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/rejects":
			w.WriteHeader(http.StatusBadRequest)
		case "/fails":
			if rand.IntN(2) == 0 {
				w.WriteHeader(http.StatusServiceUnavailable)
			}
		}
	}))
	t.Cleanup(receiver.Close)
	dir := t.TempDir()
	d, stop := started(t, dir)
	config := liveconfigtest.Config(receiver.URL)
	template := config.Destinations[0]
	apply := func(revision int) {
		config.Destinations = nil
		for i, path := range []string{"/accepts", "/fails", "/rejects"} {
			one := template
			one.Name, one.Revision = fmt.Sprint("d", i), fmt.Sprint(revision)
			one.Endpoints = []liveconfig.Endpoint{{Name: "a", URL: liveconfig.NewSecret(receiver.URL + path)},
				{Name: "b", URL: liveconfig.NewSecret(receiver.URL)}}[:1+i%2]
			config.Destinations = append(config.Destinations, one)
		}
		paused := template
		paused.Name, paused.State = "paused", liveconfig.Paused
		config.Destinations = append(config.Destinations, paused)
		if revision%2 == 1 {
			config.Destinations = config.Destinations[1:]
		}
		d.Set("shop", liveconfigtest.Encode(t, config))
	}
	apply(0)
	d.Synced()
	var reader merged
	for i := range 60 {
		send(t, d, fmt.Sprint("m", i))
		if i%10 == 0 {
			apply(i / 10)
		}
		if i%7 == 0 {
			reader.poll(d)
		}
	}
	options := []cmp.Option{cmp.Exporter(func(reflect.Type) bool { return true }), cmpopts.EquateEmpty(),
		cmpopts.IgnoreFields(podreport.Index{}, "Cursor", "Storage")}
	var diff string
	wait.True(t, "the merged changes equal the report: "+diff, func() bool {
		reader.poll(d)
		diff = cmp.Diff(podreport.NewIndex(d.Report()), reader.Index, options...)
		return diff == ""
	})
	var r adminapi.DestinationReport
	if !reader.Namespace("shop").ReadDestination("d1", &r) || r.Accepted == 0 {
		t.Errorf("report of a destination with traffic: got %+v", r)
	}
	wait.True(t, "no changes of an idle dispatcher", func() bool { return !reader.poll(d) })

	stop()
	d, _ = started(t, dir)
	if report := d.Changes(reader.Cursor); report == nil || report.Delta {
		t.Errorf("the report of a restarted dispatcher is not full: %+v", report)
	}
}

// The states of the live configs are in the changes when they change, and only then.
func TestConfigStatesInChanges(t *testing.T) {
	d, stop := started(t, t.TempDir(), func(o *Options) { o.OrphanGrace = time.Hour })
	defer stop()
	config := liveconfigtest.Config("http://127.0.0.1:1/")
	none := config
	none.Destinations = nil
	tombstone := liveconfig.Tombstone{Object: liveconfig.Ref{Section: liveconfig.SectionDestinations, Name: "crm"}, DeletedAt: time.Now(),
		Sources: []string{"web"}}
	d.Set("shop", liveconfigtest.Numbered(t, 7, config))
	d.Synced()
	var reader merged
	settle := func() { wait.True(t, "an idle dispatcher reports no changes", func() bool { return !reader.poll(d) }) }
	for _, step := range []struct {
		name string
		do   func()
		want adminapi.ConfigReport
	}{
		{"the first config", func() {}, adminapi.ConfigReport{Number: 7}},
		{"a higher number of the same config", func() { d.Set("shop", liveconfigtest.Numbered(t, 8, config)) }, adminapi.ConfigReport{Number: 8}},
		{"a destination is lost", func() { d.Set("shop", liveconfigtest.Numbered(t, 9, none)) }, adminapi.ConfigReport{Number: 9, Parked: []adminapi.ParkedObject{{Object: "destinations/crm", Number: 8}}}},
		{"it is deleted", func() { d.Set("shop", liveconfigtest.Numbered(t, 10, none, tombstone)) }, adminapi.ConfigReport{Number: 10, Discards: []adminapi.Discard{{Source: "web", Destination: "crm"}}}},
		{"its lane gets a message", func() { send(t, d, "m1") }, adminapi.ConfigReport{Number: 10, Discards: []adminapi.Discard{{Source: "web", Destination: "crm", Later: 1}}}},
	} {
		step.do()
		settle()
		step.want.Namespace = "shop"
		times := cmp.Options{cmpopts.IgnoreFields(adminapi.ParkedObject{}, "Since"), cmpopts.IgnoreFields(adminapi.Discard{}, "At")}
		if diff := cmp.Diff(step.want, reader.Config("shop"), times); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
	}
}
