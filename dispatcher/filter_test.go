package dispatcher

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/test/wait"
)

// A destination gets no call that its filter excludes or that opts out, even while it is added,
// removed or restored.
func TestFilterHoldsFromTheFirstMessageOn(t *testing.T) {
	var mu sync.Mutex
	arrived, wrong := 0, map[string]int{}
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var m struct{ Event string }
		_ = json.NewDecoder(r.Body).Decode(&m)
		mu.Lock()
		defer mu.Unlock()
		if arrived++; m.Event != "Wanted" {
			wrong[m.Event]++
		}
	}))
	t.Cleanup(receiver.Close)
	d, _ := started(t, t.TempDir())
	c := liveconfigtest.Config(receiver.URL)
	proto := c.Destinations[0]
	proto.Filter = &liveconfig.Filter{Events: []string{"Wanted", "Opted Out"}}
	c.Destinations = nil
	d.Set("shop", liveconfigtest.Encode(t, c))
	d.Synced()

	// A fixed number of batches is in flight during each change of the config: without a bound,
	// senders would make more work for a slow machine.
	batches := make(chan struct{})
	var senders sync.WaitGroup
	for range 4 {
		senders.Go(func() {
			for range batches {
				body := `{"batch":[` + strings.Repeat(`{"type":"track","userId":"u","event":"Unwanted"},{"type":"track","userId":"u","event":"Opted Out","integrations":{"All":false}},`, 10) + `{"type":"track","userId":"u","event":"Wanted"}]}`
				req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+d.Addr().String()+"/v1/batch", strings.NewReader(body))
				req.SetBasicAuth(liveconfigtest.Key, "")
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Error(err)
					continue
				}
				_ = resp.Body.Close()
			}
		})
	}
	set := func() {
		for range 8 {
			batches <- struct{}{}
		}
		d.Set("shop", liveconfigtest.Encode(t, c))
	}
	for round := range 8 {
		for i := range 10 {
			n := proto
			n.Name = fmt.Sprintf("d%d-%d", round, i)
			c.Destinations = append(c.Destinations, n)
		}
		set()
		all := c.Destinations
		c.Destinations = all[:len(all)-5]
		set() // Five destinations are removed, and
		time.Sleep(5 * time.Millisecond)
		c.Destinations = all
		set() // restored.
	}
	close(batches)
	senders.Wait()
	wait.True(t, "all is delivered", func() bool {
		for _, tr := range d.Report().Namespaces {
			for _, r := range tr.Destinations {
				if r.Pending > 0 {
					return false
				}
			}
		}
		return true
	})
	mu.Lock()
	defer mu.Unlock()
	if arrived == 0 || len(wrong) > 0 {
		t.Errorf("of %d messages that arrived these were to be kept out: %v", arrived, wrong)
	}
}
