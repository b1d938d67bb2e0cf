package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestAudienceOwner(t *testing.T) {
	const hosts = "127.0.0.1 localhost\n10.0.0.7\tposthorn-dispatcher-2.posthorn-dispatcher-pods.webhooks.svc.cluster.local\tposthorn-dispatcher-2\n"
	if got := peerService(hosts, "posthorn-dispatcher-2", "webhooks"); got != "posthorn-dispatcher-pods" {
		t.Errorf("peer service %q", got)
	}
	for _, other := range []struct{ hosts, pod, namespace string }{{"", "a-1", "b"}, {hosts, "posthorn-dispatcher", "webhooks"}, {hosts, "posthorn-dispatcher-2", "web"}} {
		if got := peerService(other.hosts, other.pod, other.namespace); got != "" {
			t.Errorf("%+v: peer service %q", other, got)
		}
	}
	for _, c := range []struct{ pod, service, listen, want string }{
		{"posthorn-dispatcher-0", "pods", ":8080", ""},
		{"standalone", "", ":8080", ""},
		{"posthorn-dispatcher-abc", "", ":8080", ""},
		{"posthorn-dispatcher-2", "pods", ":9090", "http://posthorn-dispatcher-0.pods.webhooks:9090"},
		{"posthorn-dispatcher-12", "", "10.0.0.7:8080", "http://posthorn-dispatcher-0.posthorn-dispatcher.webhooks:8080"},
	} {
		if got := audienceOwner(c.pod, "webhooks", c.service, c.listen); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

func TestProgressLines(t *testing.T) {
	for _, c := range []struct {
		sent, size int64
		end        bool
		want       string
	}{
		{0, 2e6, false, "[..............................]   0 %  0.0 of 2.0 MB"},
		{1e6, 2e6, false, "[###############...............]  50 %  1.0 of 2.0 MB"},
		{2e6, 2e6, true, "[##############################] 100 %  2.0 of 2.0 MB, comparing with the last sync"},
		{1500000, -1, false, "sent 1.5 MB"},
	} {
		if got := sentLine(c.sent, c.size, c.end); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	for want, a := range map[string]syncAnswer{
		"[####..........................]  15 %  150 of 1000 queued":                        {Added: 600, Removed: 400, Unsent: 850},
		"[####..........................]  15 %  150 of 1000 queued; storage is filling up": {Added: 600, Removed: 400, Unsent: 850, Waits: "storage is filling up"},
		"[##############################] 100 %  0 of 0 queued":                             {},
	} {
		if got := queuedLine(&a); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// The bar is drawn on a terminal, taken away at its end, and never written to a file.
func TestProgressOnATerminal(t *testing.T) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	terminal, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var drawn atomic.Int64
	line := func() string { return queuedLine(&syncAnswer{Added: 10, Unsent: 10 - drawn.Add(1)}) }
	stopFile := showProgress(safeOnTerminal(file), func() string { t.Error("it is drawn into a file"); return "" })
	stop := showProgress(safeOnTerminal(terminal), line)
	for drawn.Load() < 3 {
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	stopFile()
	var text string
	const erased = "\r\033[K"
	for chunk := make([]byte, 4096); strings.Count(text, erased) < int(drawn.Load())+1; {
		n, err := master.Read(chunk)
		if err != nil {
			t.Fatal(err)
		}
		text += string(chunk[:n])
	}
	_ = terminal.Close()
	frames := strings.Split(text, erased)
	if frames[0] != "" || frames[1] != "[###...........................]  10 %  1 of 10 queued" || !strings.Contains(frames[2], "20 %") || frames[len(frames)-1] != "" {
		t.Errorf("drawn %q", frames)
	}
	if info, err := file.Stat(); err != nil || info.Size() != 0 {
		t.Errorf("%d bytes in the file (%v)", info.Size(), err)
	}
}
