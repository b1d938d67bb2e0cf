package limits

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestDeadlinesAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Deadlines
		first := p.Context()
		for i := range 50 {
			ctx, begin := p.Context(), time.Now()
			if shared := ctx == first; shared != (i <= 10) {
				t.Errorf("after %d tenths of a second the context is shared: %v", i, shared)
			}
			if until, _ := ctx.Deadline(); until.Sub(begin) < StoreTimeout || until.Sub(begin) > StoreTimeout+time.Second {
				t.Errorf("a request waits for %v", until.Sub(begin))
			}
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(StoreTimeout)
		synctest.Wait()
		if first.Err() == nil {
			t.Error("the first context has not ended")
		}
	})
}
