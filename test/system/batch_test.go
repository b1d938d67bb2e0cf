package system

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/signature"
	"github.com/posthorn/posthorn/test/wait"
)

// lineReceiver gets batches as compressed lines of JSON. It checks the signature of each, and answers with a status for each message.
type lineReceiver struct {
	t      *testing.T
	mu     sync.Mutex
	secret string
	// accepted counts the messages by messageId, first has those that were rejected once, and most is the largest batch.
	accepted, first map[string]int
	most            int
}

func (r *lineReceiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if req.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(req.Body)
		if err != nil {
			r.t.Errorf("read a compressed body: %v", err)
			return
		}
		req.Body = io.NopCloser(z)
	}
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return // The process was killed.
	}
	if req.Header.Get("X-Signature") != signature.SHA1(r.secret, body) {
		r.t.Error("a batch without a valid signature")
	}
	if got := req.Header.Get("Content-Type"); got != "application/x-ndjson" {
		r.t.Errorf("Content-Type: got %q", got)
	}
	type item struct {
		Index  int `json:"index"`
		Status int `json:"status"`
	}
	var failed []item
	lines := strings.Split(strings.TrimSuffix(string(body), "\n"), "\n")
	r.most = max(r.most, len(lines))
	for i, line := range lines {
		var call struct{ MessageID string }
		if err := json.Unmarshal([]byte(line), &call); err != nil {
			r.t.Errorf("line %q: %v", line, err)
		}
		switch {
		case strings.HasSuffix(call.MessageID, "0"):
			failed = append(failed, item{i, 422})
		case strings.HasSuffix(call.MessageID, "7") && r.first[call.MessageID] == 0:
			r.first[call.MessageID]++
			failed = append(failed, item{i, 503})
		default:
			r.accepted[call.MessageID]++
		}
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"failed": failed})
}

// A receiver accepts and rejects single messages of batches; after kill -9 no message is missing, and the ledger is exact.
func TestBatches(t *testing.T) {
	r := &lineReceiver{t: t, secret: newReceiver(t).secret, accepted: map[string]int{}, first: map[string]int{}}
	server := httptest.NewServer(r)
	t.Cleanup(server.Close)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", server.URL,
		"  delivery: {retry: {initialBackoff: 100ms}, compression: GZip, batch: {maxMessages: 40, maxDelay: 200ms, format: NDJSON, response: PerItem}}\n")})
	const n = 200
	p.sendCalls("a", n)
	if delivered, _, dead, _ := p.ledger("crm"); delivered != n*9/10 || dead != n/10 {
		t.Errorf("got %d delivered and %d dead letters, want %d and %d", delivered, dead, n*9/10, n/10)
	}
	r.mu.Lock()
	for id, times := range r.accepted {
		if times != 1 {
			t.Errorf("%s: accepted %d times, want once", id, times)
		}
	}
	if r.most != 40 {
		t.Errorf("messages of the largest batch: got %d, want 40", r.most)
	}
	r.mu.Unlock()
	if out, _, _ := cli(t, "", "trace", "a-11", "--admin", p.Admin); !strings.Contains(out, "answered 200") {
		t.Errorf("trace of a message: got\n%s\nwant the answer of its batch", out)
	}
	if out, _, _ := cli(t, "", "attempts", "crm", "--admin", p.Admin); !strings.Contains(out, "(batch of 40)") {
		t.Errorf("attempts: got\n%s\nwant a batch of 40", out)
	}

	for kill := range 4 {
		p.sendCalls(fmt.Sprint("k", kill), n)
		time.Sleep(time.Duration(20+60*kill) * time.Millisecond) // Any point during the deliveries is valid.
		p.End(syscall.SIGKILL)
		p.Launch()
	}
	wait.For(t, "every message", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		for kill := range 4 {
			for i := range n {
				if id := fmt.Sprintf("k%d-%d", kill, i); i%10 != 0 && r.accepted[id] == 0 {
					return fmt.Errorf("%s was not delivered", id)
				}
			}
		}
		return nil
	})
	if delivered, _, dead, _ := p.ledger("crm"); delivered != 5*n*9/10 || dead != 5*n/10 {
		t.Errorf("after kills: got %d delivered and %d dead letters, want %d and %d", delivered, dead, 5*n*9/10, 5*n/10)
	}
}
