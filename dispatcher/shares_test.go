package dispatcher

import (
	"testing"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/liveconfigtest"
	"github.com/posthorn/posthorn/test/check"
)

// A new dispatcher is ready when it has a share, and reports the number of the shares in effect. Without an operator it
// takes an equal share.
func TestReadyWithAShare(t *testing.T) {
	d, stop := started(t, t.TempDir())
	defer stop()
	d.Set("shop", liveconfigtest.Encode(t, liveconfigtest.Config("http://crm.test")))
	d.Synced()
	check.Equal(t, "number of the shares before the first", d.Report().Shares, 0)
	pod := d.options.Pod
	others := liveconfig.Shares{Number: 7, Pods: []string{"other-0", "other-1"},
		Default: []liveconfig.Share{liveconfig.Whole / 2, liveconfig.Whole / 2}}
	d.SetShares(others)
	if err := d.Ready(); err == nil {
		t.Error("ready without a share")
	}
	check.Equal(t, "number of the shares that do not list the dispatcher", d.Report().Shares, 7)
	check.Equal(t, "share before", d.shares.own.For("shop", liveconfig.Ref{}), 0)
	d.endShareWait()
	check.NoError(t, "ready after the wait", d.Ready())
	check.Equal(t, "share after the wait, of one more", d.shares.own.For("shop", liveconfig.Ref{}), liveconfig.Whole/3)

	d.SetShares(liveconfig.Shares{Number: 8, Pods: []string{pod, "z"},
		Default: []liveconfig.Share{liveconfig.Whole / 4, liveconfig.Whole / 2}})
	check.NoError(t, "ready with a share", d.Ready())
	check.Equal(t, "share", d.shares.own.For("shop", liveconfig.Ref{}), liveconfig.Whole/4)
	check.Equal(t, "number of the shares", d.Report().Shares, 8)
}
