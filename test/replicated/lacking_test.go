package replicated

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

// A standby whose folder lacks a namespace is not ready after a minute, and names the objects. Of two standbys, the one
// with all objects takes over. The other one takes over when it is the last, parks the namespace, and delivers all
// messages when its folder is complete.
func TestStandbyThatLacksObjects(t *testing.T) {
	t.Parallel()
	s, r, other := startServers(t), newReceiver(t), newReceiver(t)
	news := strings.NewReplacer(key, "key-of-news", "metadata: {name: ", "metadata: {namespace: news, name: ")
	part := map[string]string{"news.yaml": news.Replace(manifests(other.URL)["all.yaml"])}
	all := map[string]string{"news.yaml": part["news.yaml"], "all.yaml": manifests(r.URL)["all.yaml"]}
	flags := []string{"--replication-url", s.url, "--replication-name", "lacking", "--replication-max-bytes", "256Mi", "--orphan-grace",
		folderGrace.String()}
	first := startPods(t, 1, all, flags...)[0]
	owner(t, []*pod{first})
	lacking := startPods(t, 1, part, flags...)[0]
	whole := startPods(t, 1, all, flags...)[0]
	waitReady(t, whole)

	const named = "Audience default/buyers, Secret default/keys, Source default/web, WebhookDestination default/crm"
	started := time.Now()
	waitNotReady(t, []*pod{lacking}, "lack what the log has", named)
	check.Equal(t, "the standby is ready at first", time.Since(started) > 10*time.Second, true)
	for _, command := range []string{"slots", "status"} {
		out, err := exec.Command(binary, command, "--admin", lacking.Admin).Output()
		exit, ok := errors.AsType[*exec.ExitError](err)
		if !ok || exit.ExitCode() != 1 || !strings.Contains(string(out), named) {
			t.Errorf("posthorn %s: got %v and\n%s\nwant exit code 1 and the objects %s", command, err, out, named)
		}
	}
	const logged = "lacks objects of the log"
	wantLogged(t, lacking, logged) // By the next comparison.
	check.Equal(t, "log messages about the objects", strings.Count(lacking.log.Tail(), logged), 1)
	file := filepath.Join(lacking.manifests, "all.yaml")
	check.NoError(t, "complete the folder", process.Replace(file, all["all.yaml"]))
	waitReady(t, lacking)
	check.NoError(t, "remove a file from the folder", os.Remove(file))
	waitMetric := func(n int) {
		t.Helper()
		if err := wait.Until(func() error {
			return hasMetric(t, lacking, fmt.Sprintf("posthorn_replication_lacking_objects %d\n", n))
		}); err != nil {
			t.Fatal(err)
		}
	}
	waitMetric(4)

	r.answer.Store(http.StatusServiceUnavailable)
	sent := &sender{pods: []*pod{first}}
	stop := sent.start(t, "pending")
	acknowledge(t, sent, 200)
	stop()
	waitCopied(t, first, []*pod{lacking, whole})
	first.lose()
	if got := owner(t, []*pod{lacking, whole}); got != whole {
		t.Fatalf("owner after the first loss: got %s, which lacks objects; want %s", got.name, whole.name)
	}
	waitCopied(t, whole, []*pod{lacking})
	waitMetric(4)
	whole.lose()
	owner(t, []*pod{lacking})
	sent.setPods([]*pod{lacking})
	time.Sleep(5 * folderGrace)
	if status, text := sent.post(0, batchOf([]string{"parked"})); status != http.StatusServiceUnavailable {
		t.Errorf("call of the parked namespace: got status %d: %s; want 503", status, text)
	}
	if out := problems(lacking); !strings.Contains(out, "Source default/web") || !strings.Contains(out, "parked") {
		t.Errorf("posthorn problems: got\n%s\nwant Source default/web, parked", out)
	}
	check.Equal(t, "discarded messages", report(t, []*pod{lacking}).Discarded, 0)
	r.answer.Store(0)
	check.NoError(t, "complete the folder", process.Replace(file, all["all.yaml"]))
	stop = sent.start(t, "after")
	acknowledge(t, sent, 40)
	stop()
	checkLedger(t, []*pod{lacking}, sent, r)
	if out := problems(lacking); out != "" {
		t.Errorf("posthorn problems with a complete folder: got\n%s\nwant none", out)
	}
}
