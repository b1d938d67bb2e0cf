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
)

// A deletion request as its owner sees it: one delete message for each Source,
// with exactly the specified fields, followed to its end; and the user suppressed.
func TestDeletionRequest(t *testing.T) {
	crm, failing := newReceiver(t), newReceiver(t)
	failing.set(func(int) int { return http.StatusBadRequest })
	p := start(t, map[string]string{
		"source.yaml": source() + `---
apiVersion: posthorn.dev/v1alpha1
kind: Source
metadata: {name: tv}
spec:
  writeKeys: [{secretKeyRef: {name: keys, key: sharedSecret}}]
`, "crm.yaml": destination("crm", crm.URL, ""), "failing.yaml": destination("failing", failing.URL, ""),
		"off.yaml": destination("off", crm.URL, "\n  enabled: false\n"), "picky.yaml": destination("picky", crm.URL, "\n  filter: {types: [track]}\n"),
	})
	for _, name := range []string{"crm", "failing"} {
		p.condition(name, "Ready", "True", "")
	}
	out, errs, code := cli(t, "", "delete-user", "ü1", "--manifests", p.manifests, "--admin", p.Admin, "--suppress", "--wait")
	if code != 1 { // one of them was not delivered
		t.Errorf("exit %d: %s %s", code, out, errs)
	}
	for _, want := range []string{"web to crm: Delivered", "web to failing: DeadLettered Rejected", "web to picky: Filtered", "1 of 3 notifications could not be delivered"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in\n%s", want, out)
		}
	}
	got := p.arrive(crm, 1)
	if len(got) != 1 || !regexp.MustCompile(`^\{"type":"delete","userId":"ü1","timestamp":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"\}$`).MatchString(got[0].body) {
		t.Errorf("messages %+v", got)
	}
	verifyInNode(t, got)

	// The user is suppressed at each Source, others are not; also after a crash, which tells nobody again.
	p.kill(syscall.SIGKILL)
	p.run()
	for _, writeKey := range []string{key, secret} {
		if status, answer, err := p.post("/v1/page", writeKey, `{"userId":"ü1"}`); err != nil || status != http.StatusForbidden || !strings.Contains(answer, "user_suppressed") {
			t.Errorf("a suppressed call: %d %s %v", status, answer, err)
		}
	}
	p.mustPost("/v1/track", `{"userId":"u2","event":"E"}`)
	p.arrive(crm, 3) // crm and picky
	if out, errs, code := cli(t, "", "delete-user", "ü1", "--manifests", p.manifests); code != 1 || !strings.Contains(errs, "is already requested") {
		t.Errorf("twice: exit %d: %s %s", code, out, errs)
	}
	out, errs, code = cli(t, "", "get", "deletions", "-o", "wide", "--admin", p.Admin)
	if code != 0 || !strings.Contains(out, "NotDelivered") {
		t.Errorf("get deletions: exit %d: %s %s", code, out, errs)
	}
	if _, _, dead, _ := p.ledger("failing"); dead != 2 {
		t.Errorf("%d dead letters, want the delete message and the track call", dead)
	}
	for _, q := range crm.got()[1:] {
		if strings.Contains(q.body, "delete") {
			t.Errorf("told again: %s", q.body)
		}
	}

	// Asked for one Source without destinations, nobody is told; without the request calls are taken again.
	out, errs, code = cli(t, "", "delete-user", "u3", "--manifests", p.manifests, "--admin", p.Admin, "--source", "tv", "--wait")
	if code != 0 || !strings.Contains(out, "no affected Source") {
		t.Errorf("exit %d: %s %s", code, out, errs)
	}
	for _, line := range strings.Split(out, "\n") {
		if path, ok := strings.CutPrefix(line, "requested: "); ok && !strings.HasPrefix(path, p.manifests) {
			t.Errorf("written to %s", path)
		}
	}

	// With a time to live the request goes by itself; a file that holds more stays.
	out, errs, code = cli(t, "", "delete-user", "u4", "--manifests", p.manifests, "--admin", p.Admin, "--ttl", "10s")
	if code != 0 {
		t.Errorf("exit %d: %s %s", code, out, errs)
	}
	p.write("two.yaml", deletionRequest("one", "u5")+"---"+deletionRequest("other", "u6"))
	expired := filepath.Join(p.manifests, "deletionrequest-default-delete-"+hash12("u4")+".yaml")
	p.eventually("the expired request is removed", func() error {
		if _, err := os.Stat(expired); err == nil {
			return errors.New("it is there")
		}
		if _, _, code := cli(t, "", "get", "deletions", "delete-"+hash12("u4"), "--admin", p.Admin); code == 0 {
			return errors.New("it is known")
		}
		return nil
	})
	p.eventually("it is said that the other file stays", func() error {
		if !strings.Contains(p.log.String(), "two.yaml holds other objects as well") {
			return errors.New("not yet")
		}
		return nil
	})
	if _, err := os.Stat(filepath.Join(p.manifests, "two.yaml")); err != nil {
		t.Error(err)
	}
	for _, bad := range [][]string{{"--ttl", "1s"}, {"--ttl", "1h", "--suppress"}} {
		if _, errs, code := cli(t, "", append([]string{"delete-user", "u9", "--manifests", p.manifests}, bad...)...); code != 2 {
			t.Errorf("%v: exit %d: %s", bad, code, errs)
		}
	}
	p.remove("deletionrequest-default-delete-" + hash12("ü1") + ".yaml")
	p.eventually("the user is no longer suppressed", func() error {
		status, answer, err := p.post("/v1/page", key, `{"userId":"ü1"}`)
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%d %s", status, answer)
		}
		return err
	})
}

func deletionRequest(name, user string) string {
	return `
apiVersion: posthorn.dev/v1alpha1
kind: DeletionRequest
metadata: {name: ` + name + `}
spec: {userId: ` + user + `, ttlSecondsAfterFinished: 1}
`
}

func hash12(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:6])
}
