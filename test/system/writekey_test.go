package system

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/wait"
)

// Each edit removes the write key under load: no call is answered 401, and after the edit
// is undone every call is accepted.
func TestMistakenEditsOfTheWriteKey(t *testing.T) {
	p := start(t, map[string]string{"source.yaml": source(), "keep.yaml": "{apiVersion: v1, kind: List, items: []}\n"})
	var mu sync.Mutex
	answers := map[string]int{}
	// seen returns the answers since its previous call.
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
				case <-time.After(5 * time.Millisecond): // It limits the rate.
				}
				status, body, err := p.Post("/v1/track", key, fmt.Sprintf(`{"userId":"u","event":"E","messageId":"%d-%d"}`, sender, i))
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
	only := func(step string, wanted, allowed string) {
		t.Helper()
		inRow := 0 // wanted answers since the last other one
		wait.For(p.T, step+": calls answered "+wanted, func() error {
			got := seen()
			for answer := range got {
				if answer != wanted && answer != allowed {
					t.Errorf("%s: got %d calls answered %s, want only %s", step, got[answer], answer, wanted)
				}
			}
			if inRow += got[wanted]; len(got) > 1 || len(got) == 1 && got[wanted] == 0 {
				inRow = 0
			}
			if inRow < 20 {
				return fmt.Errorf("%d consecutive answers, want 20; answers %v", inRow, got)
			}
			return nil
		})
	}
	only("at first", "200", "")
	secret, _, _ := strings.Cut(source(), "---")
	p.Write("source.yaml", "")
	wait.For(p.T, "an error about the empty file", func() error {
		if _, stderr, _ := cli(t, "", "get", "sources", "--admin", p.Admin); !strings.Contains(stderr, "source.yaml: the file is empty") {
			return fmt.Errorf("posthorn get prints %q", stderr)
		}
		return nil
	})
	only("0 bytes", "200", "")
	for step, edit := range map[string]func(){
		"second document removed": func() { p.Write("source.yaml", secret) },
		"file removed":            func() { p.remove("source.yaml") },
		"value changed":           func() { p.Write("source.yaml", strings.Replace(source(), key, "another-key", 1)) },
	} {
		edit()
		only(step, "removed", "200")
		p.Write("source.yaml", source())
		only(step+", restored", "200", "removed")
	}

	// The state survives the end of the process.
	p.remove("source.yaml")
	only("file removed", "removed", "200")
	p.End(syscall.SIGKILL)
	p.Launch()
	removed := 0
	wait.For(p.T, "20 answers after a restart", func() error {
		got := seen()
		removed += got["removed"]
		if got["401"] > 0 || got["200"] > 0 {
			t.Errorf("answers after a restart: got %v, want only 503", got)
		}
		if removed < 20 {
			return fmt.Errorf("%d removed, answers %v", removed, got)
		}
		return nil
	})
	p.Write("source.yaml", source())
	only("restored after the restart", "200", "removed")
}
