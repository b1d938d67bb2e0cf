package logs

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
)

// lockedOutput is written by timers, too.
type lockedOutput struct {
	mu  sync.Mutex
	out bytes.Buffer
}

func (o *lockedOutput) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.out.Write(b)
}

func (o *lockedOutput) take() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.out.String()
}

func (o *lockedOutput) reset() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.out.Reset()
}

// 10,000 failures write 100 lines and one that counts the rest, whatever their
// attributes, and hide no other message; afterwards all is as before.
func TestStormsAreSampled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out lockedOutput
		log, err := (&Flags{level: "info", format: "json"}).Logger(&out)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 10_000 {
			log.With("destination", fmt.Sprint("d", i%7)).Error("a delivery failed", "error", errors.New("refused"))
			log.Debug("below the level")
		}
		log.Info("something else")
		count := func(want map[string]int) {
			t.Helper()
			for text, n := range want {
				if got := strings.Count(out.take(), text); got != n {
					t.Errorf("%d lines have %s, want %d", got, text, n)
				}
			}
		}
		count(map[string]int{"a delivery failed": 100, "something else": 1, "below": 0, "messages suppressed": 0})
		time.Sleep(logPeriod + time.Second)
		synctest.Wait()
		count(map[string]int{`"msg":"log messages suppressed","of":"a delivery failed","suppressed":9900`: 1, "messages suppressed": 1})

		out.reset()
		for range 50 {
			log.Error("a delivery failed")
		}
		time.Sleep(2 * logPeriod)
		synctest.Wait()
		count(map[string]int{"a delivery failed": 50, "messages suppressed": 0})

		// Many different messages are not kept in memory.
		for i := range 5 * maxSampled {
			_ = log.Handler().Handle(t.Context(), slog.NewRecord(time.Now(), slog.LevelInfo, fmt.Sprint("message ", i), 0))
		}
		if n := len(log.Handler().(*sampler).lines); n > maxSampled {
			t.Errorf("%d messages are counted", n)
		}
	})
}

// Log lines of the Kubernetes libraries have the same keys as Posthorn's.
func TestBridgedErrorsHaveOurKey(t *testing.T) {
	var out bytes.Buffer
	log, err := (&Flags{level: "info", format: "json"}).Logger(&out)
	if err != nil {
		t.Fatal(err)
	}
	logr.FromSlogHandler(log.Handler()).Error(errors.New("boom"), "it failed", "namespace", "shop")
	if !strings.Contains(out.String(), `"namespace":"shop","error":"boom"`) &&
		!strings.Contains(out.String(), `"error":"boom","namespace":"shop"`) {
		t.Error(out.String())
	}
}
