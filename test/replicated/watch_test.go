package replicated

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/wait"
)

// kubeconfigThrough writes a kubeconfig whose API server is reached through a proxy.
func (h *blackHole) kubeconfigThrough(t *testing.T, e *env.Env) string {
	t.Helper()
	text, err := os.ReadFile(e.Kubeconfig())
	check.NoError(t, "read the kubeconfig", err)
	server := strings.TrimSuffix(strings.TrimPrefix(e.Config.Host, "https://"), "/")
	proxied := strings.Replace(string(text), server, h.listen(t, server), 1)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	check.NoError(t, "write the kubeconfig", os.WriteFile(path, []byte(proxied), 0o600))
	return path
}

// The connection of one of three processes to the API server hangs, and all live configs change. After 30 s this
// process is not ready, names a changed namespace, and hands over its slots, so that all deliveries follow the new
// configs. No acknowledged call is lost. It gets slots again when its connection continues.
func TestConfigsChangeWhileAWatchHangs(t *testing.T) {
	t.Parallel()
	e, _ := env.For(t)
	s, r := startServers(t), newReceiver(t)
	var toOld atomic.Int64
	old := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		toOld.Add(1)
		r.Config.Handler.ServeHTTP(w, q)
	}))
	defer old.Close()
	change := storeConfigs(t, e, severalConfigs(t, old.URL))
	h := &blackHole{}
	pods := startDispatchers(t, s, h.kubeconfigThrough(t, e), e.Kubeconfig(), e.Kubeconfig())
	ownersOf(t, pods)
	l, stop := startLoad(t, pods[0].calls, pods[1].calls, pods[2].calls)
	l.progress(t)

	h.Lock()
	unlock := sync.OnceFunc(h.Unlock)
	defer unlock()
	begin := time.Now()
	for namespace, stored := range severalConfigs(t, r.URL) {
		change(namespace, stored)
	}
	if err := wait.Until(func() error {
		owned := make([]int, len(pods))
		for i, p := range pods {
			states, err := p.AdminAPI().Slots(t.Context())
			if err != nil {
				return err
			}
			for _, s := range states {
				if s.Owner {
					owned[i]++
				}
			}
		}
		if owned[0] > 0 || owned[1]+owned[2] < severalSlots {
			return fmt.Errorf("the processes own %v slots", owned)
		}
		return nil
	}); err != nil {
		t.Fatalf("the process whose watch hangs keeps slots: %v", err)
	}
	took, gap := time.Since(begin), l.progress(t)
	before := toOld.Load()
	gap = max(gap, l.progress(t))
	check.Equal(t, "deliveries by the old configs after the hand-over", toOld.Load()-before, 0)
	_, bound := fault{claims: 1}.promised()
	check.Equal(t, fmt.Sprintf("calls are accepted again after %v, which is at most %v", gap, bound), gap <= bound, true)
	check.NoError(t, "the process whose watch hangs is not ready",
		pods[0].notReady("the live config of namespace team-", "in another process"))

	unlock()
	ownersOf(t, pods)
	l.progress(t)
	stop()
	repeated := checkDelivered(t, l.acknowledged, r)
	ledger := severalLedger(t, pods)
	check.Equal(t, fmt.Sprintf("%+v has all accepted calls delivered", ledger), ledger.Delivered, ledger.Accepted)
	// The slots of one process are handed over twice at most, and each repeats what is in flight after 2 s.
	check.Equal(t, fmt.Sprintf("%d repeated deliveries are those in flight", repeated), repeated <= 2*severalNamespaces*severalInFlight, true)
	t.Logf("slots were handed over after %v; %d acknowledged calls, %d repeated deliveries; longest time without an acknowledged call %v", took.Round(100*time.Millisecond), len(l.acknowledged), repeated, gap.Round(10*time.Millisecond))
}
