package ingest

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/writekey"
)

// remove makes a key one that a Source of namespace shop lost just now.
func (f *fixture) remove(key, source string) {
	f.set(f.Gate.View().WithKeys(writekey.NewBook(10*time.Minute, map[writekey.Hash]writekey.Entry{
		writekey.HashOf(key): {Owner: writekey.Owner{Namespace: "shop", Source: source}, RemovedAt: f.now},
	})))
}

// A removed key is answered 503 with Retry-After, wherever the key is sent, then
// 401. The refusal counts for its Source while there is one.
func TestRemovedWriteKey(t *testing.T) {
	for name, c := range map[string]struct{ source, namespace, label string }{
		"the Source has another key": {"web", "shop", "web"},
		"the Source is deleted":      {"gone", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.remove("old-key", c.source)
			requests := 0
			is := func(status int, code, retryAfter string) {
				t.Helper()
				for path, body := range map[string]string{"/v1/track": track,
					"/v1/batch": `{"batch":[` + strings.Replace(track, "{", `{"type":"track",`, 1) + `]}`} {
					for _, r := range []struct{ key, body string }{{"old-key", body}, {"", strings.Replace(body, "{", `{"writeKey":"old-key",`, 1)}} {
						w := f.do(post(path, r.key, r.body))
						if w.Code != status || !strings.Contains(w.Body.String(), `"`+code+`"`) || w.Header().Get("Retry-After") != retryAfter {
							t.Errorf("%s %s: %d %v %s, want %d %s and Retry-After %q", path, r.body, w.Code, w.Header(), w.Body, status, code, retryAfter)
						}
						requests++
					}
				}
			}
			is(503, "write_key_removed", "10")
			families, err := f.registry.Gather()
			if err != nil {
				t.Fatal(err)
			}
			counted := map[string]float64{}
			for _, family := range families {
				for _, m := range family.GetMetric() {
					if family.GetName() == "posthorn_ingest_rejected_total" {
						var labels []string
						for _, l := range m.GetLabel() {
							labels = append(labels, l.GetValue())
						}
						counted[strings.Join(labels, " ")] += m.GetCounter().GetValue()
					}
				}
			}
			// The labels in the order of their names: code, namespace, source.
			if diff := cmp.Diff(map[string]float64{"write_key_removed " + c.namespace + " " + c.label: float64(requests)}, counted); diff != "" {
				t.Errorf("refusals by code and Source (-want +got):\n%s", diff)
			}
			counters := f.Gate.Counters("shop/web")
			if want := c.label == "web"; (counters.Rejected == int64(requests)) != want || strings.Contains(counters.LastRejection, "use the current write key") != want {
				t.Errorf("the counters of the Source are %+v", counters)
			}
			f.now = f.now.Add(10*time.Minute - 1)
			is(503, "write_key_removed", "10")
			f.now = f.now.Add(1)
			is(401, "unknown_write_key", "")
			if len(f.stored) > 0 {
				t.Errorf("%d calls are stored", len(f.stored))
			}
			if w := f.do(post("/v1/track", "web-key", track)); w.Code != 200 {
				t.Errorf("the current key is answered %d %s", w.Code, w.Body)
			}
		})
	}
}
