package system

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// A destination whose manifest is missing, although no process saw its deletion, is parked: problems, status and why
// name it, and its messages wait. posthorn discard deletes it alone, and its messages count as discarded.
func TestDiscard(t *testing.T) {
	const messages = 5
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusServiceUnavailable })
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, ""),
		"mail.yaml": destination("mail", r.URL, "")}, "--orphan-grace", "1s")
	for i := range messages {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	p.End(syscall.SIGTERM)
	p.remove("crm.yaml")
	check.NoError(t, "remove the state of the manifests", os.Remove(filepath.Join(p.Data, "manifests.json")))
	p.Launch()
	ledger := func() (l queue.Ledger) {
		report, err := p.report()
		check.NoError(t, "read the report", err)
		for _, n := range report.Namespaces {
			for _, s := range n.Sources {
				l = l.Plus(queue.Ledger(s.Messages))
			}
		}
		return l
	}
	const object = "WebhookDestination default/crm"
	for command, want := range map[string]string{"problems": object + ": the store has this object", "status": object + ": parked ",
		"why crm": "parked ", "why": object + ": parked "} {
		wait.For(p.T, command+" with the parked destination", func() error {
			out, _, code := cli(t, "", append(strings.Fields(command), "--admin", p.Admin)...)
			if code != 1 || !strings.Contains(out, want) || !strings.Contains(out, "posthorn discard crm -n default") {
				return fmt.Errorf("exit code %d, output:\n%s\nwant exit code 1 and %q with the command that deletes it", code, out, want)
			}
			return nil
		})
	}
	for _, c := range []struct {
		args, want string
		code       int
	}{
		{"nothing -y", "no parked object in namespace default has this name", 1},
		{"mail -n default --yes", "no parked object in namespace default has this name", 1},
		{"crm -n other --yes", "no parked object in namespace other has this name", 1},
		{"crm", "--yes to delete " + object, 2},
	} {
		_, errs, code := cli(t, "", append([]string{"discard", "--admin", p.Admin}, strings.Fields(c.args)...)...)
		if code != c.code || !strings.Contains(errs, c.want) {
			t.Errorf("posthorn discard %s: got exit code %d and %q, want %d and %q", c.args, code, errs, c.code, c.want)
		}
	}
	if l := ledger(); l.Discarded != 0 || l.Pending != 2*messages {
		t.Errorf("ledger of the Source while the destination is parked: got %+v, want %d pending and nothing discarded", l, 2*messages)
	}
	out, errs, code := cli(t, "", "discard", "crm", "--yes", "--admin", p.Admin)
	if code != 0 || !strings.Contains(out, "deleted: "+object+"; ") {
		t.Fatalf("posthorn discard crm --yes: got exit code %d, %q and %q; want 0, deleted", code, out, errs)
	}
	wait.For(p.T, "the messages are discarded", func() error {
		if l := ledger(); l.Discarded != messages || l.Pending != messages {
			return fmt.Errorf("got %+v, want %d discarded, and %d pending of the other destination", l, messages, messages)
		}
		return nil
	})
	wait.For(p.T, "no problem is left", func() error {
		if out, _, code := cli(t, "", "problems", "--admin", p.Admin); code != 0 {
			return fmt.Errorf("posthorn problems: exit code %d, output:\n%s", code, out)
		}
		return nil
	})
	if _, errs, code := cli(t, "", "discard", "crm", "--yes", "--admin", p.Admin); code != 1 ||
		!strings.Contains(errs, "has this name") {
		t.Errorf("posthorn discard of a deleted object: got exit code %d and %q, want 1", code, errs)
	}
	r.set(func(int) int { return http.StatusOK })
	p.arrive(r, messages)
}
