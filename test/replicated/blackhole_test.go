package replicated

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/wait"
)

// blackHole forwards connections of one process to the servers. While it is locked, nothing passes and
// nothing is closed, as with a firewall that drops packets.
type blackHole struct{ sync.RWMutex }

// startBlackHole starts a proxy for each server, and returns the URL for the process.
func startBlackHole(t *testing.T, url string) (h *blackHole, proxied string) {
	t.Helper()
	h = &blackHole{}
	var urls []string
	for server := range strings.SplitSeq(url, ",") {
		urls = append(urls, "nats://"+h.listen(t, strings.TrimPrefix(server, "nats://")))
	}
	return h, strings.Join(urls, ",")
}

// listen starts a proxy for a server, and returns the proxy's address.
func (h *blackHole) listen(t *testing.T, server string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go h.serve(l, server)
	return l.Addr().String()
}

func (h *blackHole) serve(l net.Listener, server string) {
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer client.Close()
			to, err := h.dial(server)
			if err != nil {
				return
			}
			defer to.Close()
			ended := make(chan struct{}, 2)
			for _, direction := range [][2]net.Conn{{client, to}, {to, client}} {
				go func() {
					defer func() { ended <- struct{}{} }()
					h.pass(direction[0], direction[1])
				}()
			}
			<-ended
		}()
	}
}

// dial connects to a server. A connection that begins while h is locked hangs, too.
func (h *blackHole) dial(server string) (net.Conn, error) {
	h.RLock()
	defer h.RUnlock()
	return net.Dial("tcp", server)
}

// pass copies data until an error.
func (h *blackHole) pass(from io.Reader, to io.Writer) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		h.RLock()
		if n > 0 && err == nil {
			_, err = to.Write(buffer[:n])
		}
		h.RUnlock()
		if err != nil {
			return
		}
	}
}

// An owner that no longer reaches the log, without a closed connection, accepts and sends nothing; the
// standby takes over; and no acknowledged call is lost. When it reaches the log again, it is a standby.
func TestBlackHoleBetweenOwnerAndLog(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	var pods []*pod
	holes := map[*pod]*blackHole{}
	for i := range 2 {
		h, url := startBlackHole(t, s.url)
		p := startPods(t, 1, manifests(r.URL), "--replication-url", url, "--replication-name", "test", "--replication-max-bytes", "1Gi")[0]
		p.name, holes[p] = fmt.Sprint("pod ", i), h
		pods = append(pods, p)
	}
	before := owner(t, pods)
	next := pods[0]
	if next == before {
		next = pods[1]
	}
	waitReady(t, next)
	all := &sender{pods: pods}
	stop := all.start(t, "hole")
	defer stop()
	acknowledge(t, all, 200)

	holes[before].Lock()
	locked := true
	defer func() {
		if locked {
			holes[before].Unlock()
		}
	}()
	if err := wait.Until(func() error { return hasMetric(t, before, maySendNot) }); err != nil {
		t.Errorf("lease of the owner: %v", err)
	}
	if err := next.isOwner(); err == nil {
		t.Error("the standby owned the slot before the lease of the owner ended")
	}
	if err := wait.Until(next.isOwner); err != nil {
		t.Fatalf("takeover: %v", err)
	}
	for range 20 { // A call to the former owner, which does not know about the other one.
		if (&sender{pods: []*pod{before}}).send(0, `{"batch":[{"type":"track","event":"E","userId":"u"}]}`) {
			t.Fatal("the former owner acknowledged a call")
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err := hasMetric(t, before, maySendNot); err != nil {
		t.Errorf("former owner after the takeover: %v", err)
	}
	acknowledge(t, all, 200)

	holes[before].Unlock()
	locked = false
	waitReady(t, before) // It follows the other one.
	if err := before.isOwner(); err == nil {
		t.Error("the former owner owns the slot again, want a standby")
	}
	acknowledge(t, all, 200)
	stop()
	checkLedger(t, pods, all, r)
	t.Logf("longest time without an acknowledged call: %v", all.gap.Round(10*time.Millisecond))
}

// waitReady waits until a process is a standby that can take over.
func waitReady(t *testing.T, p *pod) {
	t.Helper()
	if err := wait.Until(func() error {
		r, err := p.AdminAPI().Report(t.Context(), "")
		if err == nil && (!r.Ready || r.Replication == nil || len(r.Replication.Slots) > 0) {
			err = fmt.Errorf("report: ready %v, log %+v", r.Ready, r.Replication)
		}
		return err
	}); err != nil {
		t.Fatalf("standby %s: %v", p.name, err)
	}
}

// maySendNot is the metric of an owner that does not send.
const maySendNot = `posthorn_replication_may_send{slot="0"} 0` + "\n"

// hasMetric returns an error if the metrics of a process do not have a line.
func hasMetric(t *testing.T, p *pod, line string) error {
	t.Helper()
	text, err := (&adminapi.Client{URL: "http://" + p.Admin}).Metrics(t.Context())
	if err == nil && !strings.Contains(text, line) {
		err = fmt.Errorf("the metrics do not have %q", line)
	}
	return err
}
