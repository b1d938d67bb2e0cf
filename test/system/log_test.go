package system

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// A destination that refuses 10,000 messages, and a client that sends bad calls
// all the time, are told of in few lines.
func TestLogOfAStorm(t *testing.T) {
	refusing := newReceiver(t)
	refusing.set(func(int) int { return http.StatusBadRequest })
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", refusing.URL+"/hush-path", "")})
	const messages = 10_000
	var batch strings.Builder
	for i := range messages {
		if batch.Len() > 0 {
			batch.WriteByte(',')
		}
		fmt.Fprintf(&batch, `{"type":"track","userId":"u","event":"E","messageId":"m%d"}`, i)
		if i%1000 == 999 {
			p.mustPost("/v1/batch", `{"batch":[`+batch.String()+`]}`)
			batch.Reset()
			if status, _, err := p.post("/v1/track", key, `{}`); err != nil || status != http.StatusBadRequest {
				t.Fatal(status, err)
			}
		}
	}
	if _, _, dead, _ := p.ledger("crm"); dead != messages {
		t.Errorf("%d dead letters", dead)
	}
	// Of each message a hundred lines in ten seconds, however long this machine takes.
	if lines := strings.Count(p.log.String(), "\n"); lines > messages/10 || lines < 3 {
		t.Errorf("%d lines", lines)
	}
	for _, text := range []string{"endpoint state changed", "delivery attempt failed", "namespace=default destination=crm", "reason=Rejected", "calls refused", "namespace=default source=web"} {
		if !strings.Contains(p.log.String(), text) {
			t.Errorf("no line has %q", text)
		}
	}
	if strings.Contains(p.log.String(), "hush") {
		t.Error("the log tells a URL")
	}
}
