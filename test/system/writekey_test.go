package system

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Each edit takes the write key away under a load of calls, by mistake: no call is
// answered 401, and when the edit is undone every call is accepted.
func TestEditsRefuseNoCallForGood(t *testing.T) {
	p := start(t, map[string]string{"source.yaml": source(), "keep.yaml": "{apiVersion: v1, kind: List, items: []}\n"})
	var mu sync.Mutex
	answers := map[string]int{}
	// seen returns the answers since it was called before.
	seen := func() map[string]int {
		mu.Lock()
		defer mu.Unlock()
		before := answers
		answers = map[string]int{}
		return before
	}
	stop := make(chan struct{})
	var senders sync.WaitGroup
	defer senders.Wait()
	defer close(stop)
	for sender := range 4 {
		senders.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-time.After(5 * time.Millisecond): // only paces the calls
				}
				status, body, err := p.post("/v1/track", key, fmt.Sprintf(`{"userId":"u","event":"E","messageId":"%d-%d"}`, sender, i))
				answer := fmt.Sprint(status)
				if err != nil {
					answer = "none"
				} else if status == http.StatusServiceUnavailable && strings.Contains(body, `"write_key_removed"`) {
					answer = "removed"
				}
				mu.Lock()
				answers[answer]++
				mu.Unlock()
			}
		})
	}
	only := func(what string, wanted, allowed string) {
		t.Helper()
		inRow := 0 // answers as wanted since the latest other one
		p.eventually(what+": calls answered "+wanted, func() error {
			got := seen()
			for answer := range got {
				if answer != wanted && answer != allowed {
					t.Errorf("%s: %d calls are answered %s", what, got[answer], answer)
				}
			}
			if inRow += got[wanted]; len(got) > 1 || len(got) == 1 && got[wanted] == 0 {
				inRow = 0
			}
			if inRow < 20 {
				return fmt.Errorf("%d in a row, answers %v", inRow, got)
			}
			return nil
		})
	}
	only("at first", "200", "")
	secret, _, _ := strings.Cut(source(), "---")
	p.write("source.yaml", "")
	p.eventually("the empty file is reported", func() error {
		if _, stderr, _ := cli(t, "", "get", "sources", "--admin", p.Admin); !strings.Contains(stderr, "source.yaml: the file is empty") {
			return fmt.Errorf("posthorn get prints %q", stderr)
		}
		return nil
	})
	only("0 bytes", "200", "")
	for what, edit := range map[string]func(){
		"cut behind a document": func() { p.write("source.yaml", secret) },
		"file removed":          func() { p.remove("source.yaml") },
		"value changed":         func() { p.write("source.yaml", strings.Replace(source(), key, "another-key", 1)) },
	} {
		edit()
		only(what, "removed", "200")
		p.write("source.yaml", source())
		only(what+", restored", "200", "removed")
	}

	// The state survives the end of the process.
	p.remove("source.yaml")
	only("file removed", "removed", "200")
	p.kill(syscall.SIGKILL)
	p.run()
	removed := 0
	p.eventually("the answer after a restart", func() error {
		got := seen()
		removed += got["removed"]
		if got["401"] > 0 || got["200"] > 0 {
			t.Errorf("after a restart, answers %v", got)
		}
		if removed < 20 {
			return fmt.Errorf("%d removed, answers %v", removed, got)
		}
		return nil
	})
	p.write("source.yaml", source())
	only("restored after the restart", "200", "removed")
}
