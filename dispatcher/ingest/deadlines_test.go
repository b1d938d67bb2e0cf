package ingest

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestDeadlinesAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p deadlineCache
		first := p.context()
		for i := range 50 {
			ctx, begin := p.context(), time.Now()
			if shared := ctx == first; shared != (i <= 10) {
				t.Errorf("after %d tenths of a second the context is shared: %v", i, shared)
			}
			if until, _ := ctx.Deadline(); until.Sub(begin) < storeTimeout || until.Sub(begin) > storeTimeout+time.Second {
				t.Errorf("a request waits for %v", until.Sub(begin))
			}
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(storeTimeout)
		synctest.Wait()
		if first.Err() == nil {
			t.Error("the first context has not ended")
		}
	})
}
