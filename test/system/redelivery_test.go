package system

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/ptr"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// redelivery reads a Redelivery with `posthorn get`.
func (p *posthorn) redelivery(name string) (o v1beta1.Redelivery, err error) {
	p.T.Helper()
	out, errs, code := cli(p.T, "", "get", "redeliveries", name, "-o", "json", "--admin", p.Admin)
	if code != 0 {
		return o, fmt.Errorf("get redeliveries: exit %d: %s", code, errs)
	}
	return o, json.Unmarshal([]byte(out), &o)
}

// A Redelivery runs without a cluster. After a kill -9 it continues where it was, and after
// its end another process does not run it again.
func TestRedeliveryWithoutACluster(t *testing.T) {
	const letters = 16 // At one a second, a delay of 10 s before the kill changes nothing.
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusUnprocessableEntity })
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	for i := range letters {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	if _, _, dead, _ := p.ledger("crm"); dead != letters {
		t.Fatalf("dead letters: got %d, want %d", dead, letters)
	}
	r.set(nil)
	object := func(name, spec string) string {
		return "apiVersion: posthorn.dev/v1beta1\nkind: Redelivery\nmetadata: {name: " + name + "}\nspec: {destinationRef: {name: crm}, " + spec + "}\n"
	}
	p.Write("again.yaml", object("again", "deadLettersPerSecond: 1, match: {reasons: [Rejected]}"))
	p.arrive(r, 3)
	p.End(syscall.SIGKILL)
	before := len(r.got())
	p.Launch()
	ends := func(name, reason string) (o v1beta1.Redelivery) {
		t.Helper()
		wait.For(p.T, name+" "+reason, func() (err error) {
			if o, err = p.redelivery(name); err != nil {
				return err
			}
			c := meta.FindStatusCondition(o.Status.Conditions, v1beta1.ConditionReady)
			if c == nil || string(c.Status)+" "+c.Reason != "True "+reason {
				return fmt.Errorf("Ready: %+v", c)
			}
			return nil
		})
		return o
	}
	o := ends("again", v1beta1.ReasonRedelivered)
	check.Equal(t, "the kill interrupted the run", before < letters, true)
	wait.For(p.T, "all messages", func() error {
		if n := len(r.count()); n != letters {
			return fmt.Errorf("%d of %d", n, letters)
		}
		return nil
	})
	check.Equal(t, "matched", ptr.Deref(o.Status.Matched, -1), letters)
	check.Equal(t, "redelivered", ptr.Deref(o.Status.Redelivered, -1), letters)
	report, err := p.report()
	check.NoError(t, "report", err)
	// The kill may have interrupted a page, which is one message at this rate.
	if accepted := report.Namespaces[0].Sources[0].Accepted; accepted < 2*letters || accepted > 2*letters+1 {
		t.Errorf("messages in the queue, with the redelivered ones: got %d, want %d, or one more", accepted, 2*letters)
	}
	out, errs, code := cli(t, "", "get", "rdl", "--admin", p.Admin)
	if code != 0 || !strings.Contains(out, "Redelivered") {
		t.Errorf("get rdl: got exit code %d: %s%s, want 0 and Redelivered", code, out, errs)
	}

	// An object that is deleted and created again redelivers nothing; one that has expired is removed.
	p.Write("count.yaml", object("count", "dryRun: true, ttlSecondsAfterFinished: 0"))
	wait.For(p.T, "the expired object is removed", func() error {
		if o, err := p.redelivery("count"); err == nil {
			return fmt.Errorf("it exists: %+v", o.Status)
		}
		if !strings.Contains(p.Output.Tail(), "object removed; its TTL has ended") {
			return fmt.Errorf("the log does not mention it")
		}
		return nil
	})
	p.remove("again.yaml")
	wait.For(p.T, "the object is deleted", func() error {
		if _, err := p.redelivery("again"); err == nil {
			return fmt.Errorf("it exists")
		}
		return nil
	})
	p.Write("again.yaml", object("again", "deadLettersPerSecond: 1, match: {reasons: [Rejected]}"))
	ends("again", v1beta1.ReasonAlreadyDone)
}
