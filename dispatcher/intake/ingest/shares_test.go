package ingest

import (
	"net/http"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/check"
)

// A dispatcher accepts its share of a Source's rate and burst, and reports how much it uses.
func TestShareOfARate(t *testing.T) {
	f := newFixture(t)
	share := func(percent liveconfig.Share) {
		all := liveconfig.Shares{Pods: []string{"d-0", "d-1"}, Default: []liveconfig.Share{percent * liveconfig.Whole / 100, 0}}
		f.Gate.SetShares(all.Of("d-0"))
	}
	// accepted counts the calls that are accepted for some seconds, of 20 a second.
	accepted := func(seconds int) (n int) {
		for range seconds * 20 {
			f.now = f.now.Add(50 * time.Millisecond)
			if w := f.do(post("/v1/track", "slow-key", track)); w.Code == http.StatusOK {
				n++
			}
		}
		return n
	}
	use := func() adminapi.LimitUse {
		return f.Gate.LimitUse("shop", &liveconfig.Source{Name: "slow", CallsPerSecond: 10, Burst: 20})
	}
	share(0)
	check.Equal(t, "calls in 5 s without a share", accepted(5), 0)
	share(50)
	if n := accepted(10); n < 50+9 || n > 50+10 {
		t.Errorf("calls in 10 s with half of 10 a second and of a burst of 20: got %d, want 60", n)
	}
	check.Equal(t, "calls in 10 s with half of 10 a second", accepted(10), 50)
	if u := use(); !u.Limited || u.Used < 490_000 || u.Used > 510_000 {
		t.Errorf("use at the share: got %+v, want 500000 and limited", u)
	}
	share(20)
	check.Equal(t, "calls in 10 s with a fifth; a smaller share adds no burst", accepted(10), 20)
	share(100)
	check.Equal(t, "calls in 10 s with all; a larger share adds no burst", accepted(10), 100)
	f.now = f.now.Add(time.Minute)
	check.Equal(t, "use without traffic", use(), adminapi.LimitUse{})
	f.Gate.SetShares(nil)
	accepted(10)
	check.Equal(t, "use without shares", use(), adminapi.LimitUse{})
}
