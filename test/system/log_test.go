package system

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/check"
)

// The number of log messages is bounded for a destination that rejects 10,000 messages and
// a client that keeps sending invalid calls.
func TestLogOfAStorm(t *testing.T) {
	rejecting := newReceiver(t)
	rejecting.set(func(int) int { return http.StatusConflict }) // It never opens the circuit.
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", rejecting.URL+"/hush-path", "")})
	const messages = 10_000
	begin := time.Now()
	var batch strings.Builder
	for i := range messages {
		if batch.Len() > 0 {
			batch.WriteByte(',')
		}
		fmt.Fprintf(&batch, `{"type":"track","userId":"u","event":"E","messageId":"m%d"}`, i)
		if i%1000 == 999 {
			p.mustPost("/v1/batch", `{"batch":[`+batch.String()+`]}`)
			batch.Reset()
			if status, _, err := p.Post("/v1/track", key, `{}`); err != nil || status != http.StatusBadRequest {
				t.Fatalf("invalid call: got status %d and error %v, want 400", status, err)
			}
		}
	}
	_, _, dead, _ := p.ledger("crm")
	check.Equal(t, "dead letters", dead, messages)
	// Each of the three frequent log messages has at most a hundred lines in ten seconds.
	most := 400 + 300*int(time.Since(begin)/(10*time.Second))
	if lines := strings.Count(p.Output.String(), "\n"); lines > most || lines < 3 {
		t.Errorf("lines of the log: got %d, want 3 to %d", lines, most)
	}
	for _, text := range []string{"endpoint state changed", "delivery attempt failed", "namespace=default destination=crm", "reason=Rejected",
		"calls refused", "namespace=default source=web"} {
		if !strings.Contains(p.Output.String(), text) {
			t.Errorf("the log does not contain %q", text)
		}
	}
	if strings.Contains(p.Output.String(), "hush") {
		t.Error("the log contains a URL")
	}
}
