package replicated

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// folderGrace is the grace period of the processes with different folders.
const folderGrace = time.Second

// A process whose folder lacks what the log has, or has an older version of it, takes over: nothing is discarded and
// nothing is sent with the old version, calls are answered 503 and not 401, also after the grace period, and the
// process names the object. When the former owner is back, all messages are delivered.
func TestOldFolder(t *testing.T) {
	t.Parallel()
	s := startServers(t)
	news := strings.NewReplacer(key, "key-of-news", "metadata: {name: ", "metadata: {namespace: news, name: ")
	for name, c := range map[string]struct {
		// old returns the folder of the standby, beside that of the owner, whose receiver has a URL.
		old func(all map[string]string, url string)
		// parked is the object in the problems of the standby, and status that of a call.
		parked string
		status int
	}{
		"namespace": {func(all map[string]string, _ string) { delete(all, "all.yaml") }, "Source default/web", http.StatusServiceUnavailable},
		"destination": {func(all map[string]string, url string) { all["all.yaml"] = cut(all["all.yaml"], "WebhookDestination") },
			"WebhookDestination default/crm", http.StatusOK},
		"version": {func(all map[string]string, url string) {
			all["all.yaml"] = strings.Replace(all["all.yaml"], url, "http://127.0.0.1:1/", 1)
		}, "WebhookDestination default/crm", http.StatusOK},
		"write key": {func(all map[string]string, _ string) {
			all["all.yaml"] = strings.ReplaceAll(all["all.yaml"], key, "an-older-key")
		}, "", http.StatusServiceUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			r, other := newReceiver(t), newReceiver(t)
			folder := manifests(r.URL)
			for file, text := range manifests(other.URL) {
				folder["news-"+file] = news.Replace(text)
			}
			flags := []string{"--replication-url", s.url, "--replication-name", strings.ReplaceAll(name, " ", "-"), "--replication-max-bytes",
				"256Mi", "--orphan-grace", folderGrace.String()}
			former := map[string]string{}
			for file, text := range folder {
				former[file] = text
			}
			if name == "version" { // The owner has it first.
				c.old(former, r.URL)
			}
			first := startPods(t, 1, former, flags...)[0]
			owner(t, []*pod{first})
			if name == "version" {
				if err := process.Replace(first.manifests+"/all.yaml", folder["all.yaml"]); err != nil {
					t.Fatal(err)
				}
			}
			old := map[string]string{}
			for file, text := range folder {
				old[file] = text
			}
			c.old(old, r.URL)
			second := startPods(t, 1, old, flags...)[0]
			pods := []*pod{first, second}
			ownerOfCopied(t, pods)
			r.answer.Store(http.StatusServiceUnavailable)
			all := &sender{pods: pods[:1]}
			stop := all.start(t, "pending")
			acknowledge(t, all, 200)
			stop()
			waitCopied(t, first, pods[1:])
			first.lose()
			owner(t, pods[1:])
			if c.parked != "" {
				r.answer.Store(0)
			}
			time.Sleep(5 * folderGrace)
			all.setPods(pods[1:])
			if err := wait.Until(func() error {
				if status, text := all.post(0, batchOf([]string{"parked"})); status != c.status {
					return fmt.Errorf("status %d: %s", status, text)
				}
				return nil
			}); err != nil {
				t.Errorf("call to the new owner, want status %d: %v", c.status, err)
			}
			if status, text := all.post(0, batchOf([]string{"parked"})); status != c.status || strings.Contains(text, "unknown_write_key") {
				t.Errorf("call to the new owner: got status %d: %s; want %d", status, text, c.status)
			}
			if c.status == http.StatusOK {
				all.acknowledged = append(all.acknowledged, "parked")
			}
			if n := len(r.got); n != 0 {
				t.Errorf("deliveries while the object is parked: got %d, want none", n)
			}
			if l := report(t, pods[1:]); l.Discarded != 0 {
				t.Errorf("ledger: got %+v, want nothing discarded", l)
			}
			if out := problems(second); !strings.Contains(out, c.parked) || c.parked != "" && !strings.Contains(out, "parked") {
				t.Errorf("posthorn problems: got\n%s\nwant %s, parked", out, c.parked)
			}
			r.answer.Store(0)
			first.start()
			waitReady(t, first)
			second.end(syscall.SIGTERM)
			owner(t, pods[:1])
			all.setPods(pods[:1])
			stop = all.start(t, "after")
			acknowledge(t, all, 40)
			stop()
			checkLedger(t, pods[:1], all, r)
			if out := problems(first); out != "" {
				t.Errorf("posthorn problems of the former owner: got\n%s\nwant none", out)
			}
		})
	}
}

// problems returns the output of posthorn problems.
func problems(p *pod) string {
	out, err := exec.Command(binary, "problems", "--admin", p.Admin).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || exit.ExitCode() != 1) {
		return err.Error()
	}
	return string(out)
}

// cut returns manifests without the documents of a kind.
func cut(text, kind string) string {
	var kept []string
	for _, document := range strings.Split(text, "---\n") {
		if !strings.Contains(document, "kind: "+kind+"\n") {
			kept = append(kept, document)
		}
	}
	return strings.Join(kept, "---\n")
}

// The folder of the owner vanishes, as that of a volume that is unmounted, and then that of the standby is empty at its
// takeover: nothing is deleted, no call gets 401, and all messages are delivered when the files are back.
func TestFolderThatVanishes(t *testing.T) {
	t.Parallel()
	s, r := startServers(t), newReceiver(t)
	r.answer.Store(http.StatusServiceUnavailable)
	flags := []string{"--replication-url", s.url, "--replication-name", "vanishing", "--replication-max-bytes", "256Mi", "--orphan-grace",
		folderGrace.String()}
	pods := startPods(t, 2, manifests(r.URL), flags...)
	first := ownerOfCopied(t, pods)
	second := pods[0]
	if second == first {
		second = pods[1]
	}
	all := &sender{pods: []*pod{first}}
	stop := all.start(t, "pending")
	acknowledge(t, all, 100)
	check.NoError(t, "move the folder of the owner away", os.Rename(first.manifests, first.manifests+".away"))
	time.Sleep(5 * folderGrace)
	acknowledge(t, all, 100)
	stop()
	check.Equal(t, "discarded messages without the folder", report(t, []*pod{first}).Discarded, 0)

	check.NoError(t, "empty the folder of the standby", os.Remove(filepath.Join(second.manifests, "all.yaml")))
	waitCopied(t, first, []*pod{second})
	first.lose()
	owner(t, []*pod{second})
	time.Sleep(5 * folderGrace)
	all.setPods([]*pod{second})
	if status, text := all.post(0, batchOf([]string{"parked"})); status != http.StatusServiceUnavailable {
		t.Errorf("call to an owner with an empty folder: got status %d: %s; want 503", status, text)
	}
	check.Equal(t, "discarded messages with an empty folder", report(t, []*pod{second}).Discarded, 0)
	if out := problems(second); !strings.Contains(out, "Source default/web") || !strings.Contains(out, "parked") {
		t.Errorf("posthorn problems: got\n%s\nwant Source default/web, parked", out)
	}
	r.answer.Store(0)
	check.NoError(t, "write the file again", process.Replace(filepath.Join(second.manifests, "all.yaml"), manifests(r.URL)["all.yaml"]))
	stop = all.start(t, "after")
	acknowledge(t, all, 40)
	stop()
	checkLedger(t, []*pod{second}, all, r)
}
