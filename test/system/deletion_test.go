package system

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// A deletion request sends one delete message for each Source, with exactly the specified
// fields, reports each outcome, and suppresses the user.
func TestDeletionRequest(t *testing.T) {
	crm, failing := newReceiver(t), newReceiver(t)
	failing.set(func(int) int { return http.StatusBadRequest })
	p := start(t, map[string]string{
		"source.yaml": source() + `---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: tv}
spec:
  writeKeys: [{name: main, secretKeyRef: {name: keys, key: sharedSecret}}]
`, "crm.yaml": destination("crm", crm.URL, ""), "failing.yaml": destination("failing", failing.URL, ""),
		"picky.yaml": destination("picky", crm.URL, "\n  filter: {types: [track]}\n"),
	})
	for _, name := range []string{"crm", "failing"} {
		p.condition(name, "Ready", "True", "")
	}
	out, errs, code := cli(t, "", "delete-user", "ü1", "-f", p.Manifests, "--admin", p.Admin, "--suppress", "--wait")
	if code != 1 { // One notification was not delivered.
		t.Errorf("delete-user: got exit code %d, want 1: %s %s", code, out, errs)
	}
	for _, want := range []string{"web to crm: Delivered", "web to failing: DeadLettered Rejected", "web to picky: Delivered",
		"1 of 3 notifications not delivered"} {
		if !strings.Contains(out, want) {
			t.Errorf("output: got\n%s\nwant one with %q", out, want)
		}
	}
	// No filter excludes a delete message: the destinations crm and picky have this URL.
	got := p.arrive(crm, 2)
	if len(got) != 2 || !regexp.MustCompile(`^\{"type":"delete","userId":"ü1","timestamp":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"\}$`).MatchString(got[0].body) {
		t.Errorf("delete messages: got %+v, want two with type, userId and timestamp", got)
	}
	verifyInNode(t, got)

	// The user is suppressed at each Source, others are not. A crash changes neither this, nor
	// does it repeat notifications.
	p.End(syscall.SIGKILL)
	p.Launch()
	for _, writeKey := range []string{key, secret} {
		if status, answer, err := p.Post("/v1/page", writeKey, `{"userId":"ü1"}`); err != nil || status != http.StatusForbidden || !strings.Contains(answer, "user_suppressed") {
			t.Errorf("call of a suppressed user: got status %d, body %s and error %v, want 403 user_suppressed", status, answer, err)
		}
	}
	p.mustPost("/v1/track", `{"userId":"u2","event":"E"}`)
	p.arrive(crm, 4)
	if out, errs, code := cli(t, "", "delete-user", "ü1", "-f", p.Manifests); code != 1 ||
		!strings.Contains(errs, "is already requested") {
		t.Errorf("repeated request: got exit code %d: %s %s, want 1 and \"is already requested\"", code, out, errs)
	}
	out, errs, code = cli(t, "", "get", "deletions", "-o", "wide", "--admin", p.Admin)
	if code != 0 || !strings.Contains(out, "NotDelivered") {
		t.Errorf("get deletions: got exit code %d: %s %s, want 0 and NotDelivered", code, out, errs)
	}
	_, _, dead, _ := p.ledger("failing")
	check.Equal(t, "dead letters, of the delete message and the track call", dead, 2)
	for _, q := range crm.got()[2:] {
		if strings.Contains(q.body, "delete") {
			t.Errorf("repeated notification: %s", q.body)
		}
	}

	// A request for one Source without destinations sends no notifications.
	out, errs, code = cli(t, "", "delete-user", "u3", "-f", p.Manifests, "--admin", p.Admin, "--source", "tv", "--wait")
	if code != 0 || !strings.Contains(out, "has an affected Source") {
		t.Errorf("request without destinations: got exit code %d: %s %s, want 0 and that no destination has the Source", code, out, errs)
	}
	for _, line := range strings.Split(out, "\n") {
		if path, ok := strings.CutPrefix(line, "requested: "); ok && !strings.HasPrefix(path, p.Manifests) {
			t.Errorf("path of the request: got %s, want one in %s", path, p.Manifests)
		}
	}

	// With a TTL the request is removed after its end; a file with several objects is kept.
	out, errs, code = cli(t, "", "delete-user", "u4", "-f", p.Manifests, "--admin", p.Admin, "--ttl", "10s")
	if code != 0 {
		t.Errorf("request with a TTL: got exit code %d, want 0: %s %s", code, out, errs)
	}
	p.Write("two.yaml", deletionRequest("one", "u5")+"---"+deletionRequest("other", "u6"))
	expired := filepath.Join(p.Manifests, "deletionrequest-default-delete-"+hash12("u4")+".yaml")
	wait.For(p.T, "the removal of the expired request", func() error {
		if _, err := os.Stat(expired); err == nil {
			return errors.New("the file exists")
		}
		if _, _, code := cli(t, "", "get", "deletions", "delete-"+hash12("u4"), "--admin", p.Admin); code == 0 {
			return errors.New("the object exists")
		}
		return nil
	})
	wait.For(p.T, "a log message about the other file", func() error {
		if !strings.Contains(p.Output.String(), "two.yaml contains other objects") {
			return errors.New("the log has no such message")
		}
		return nil
	})
	if _, err := os.Stat(filepath.Join(p.Manifests, "two.yaml")); err != nil {
		t.Error(err)
	}
	for _, bad := range [][]string{{"--ttl", "1s", "--wait"}, {"--ttl", "1500ms"}, {"--ttl", "0", "--suppress"}} {
		if _, errs, code := cli(t, "", append([]string{"delete-user", "u9", "-f", p.Manifests}, bad...)...); code != 2 {
			t.Errorf("delete-user with %v: got exit code %d, want 2: %s", bad, code, errs)
		}
	}
	p.remove("deletionrequest-default-delete-" + hash12("ü1") + ".yaml")
	wait.For(p.T, "an accepted call of the user", func() error {
		status, answer, err := p.Post("/v1/page", key, `{"userId":"ü1"}`)
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%d %s", status, answer)
		}
		return err
	})
}

func deletionRequest(name, user string) string {
	return `
apiVersion: posthorn.dev/v1beta1
kind: DeletionRequest
metadata: {name: ` + name + `}
spec: {userID: ` + user + `, ttlSecondsAfterFinished: 1}
`
}

func hash12(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:6])
}
