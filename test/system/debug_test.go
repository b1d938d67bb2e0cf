package system

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/test/wait"
)

// /debug shows lanes, the config and profiles, without secrets.
func TestDebug(t *testing.T) {
	dead, fine := newReceiver(t), newReceiver(t)
	dead.set(func(int) int { return http.StatusInternalServerError })
	manifests := map[string]string{
		"source.yaml": source(),
		"fine.yaml":   destination("fine", fine.URL+"/hush-path?token=hush-token", ""),
		"dead.yaml": strings.Replace(destination("dead", dead.URL, ""), "    url:", `    headers:
    - {name: Authorization, value: hush-header}
    url:`, 1),
		"deletion.yaml": `
apiVersion: posthorn.dev/v1beta1
kind: DeletionRequest
metadata: {name: forgotten}
spec: {userID: hush-user, suppress: true}
`,
	}
	p := start(t, manifests, "--debug")
	for i := range 20 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	debug := func(path string) string {
		t.Helper()
		out, errs, code := cli(t, "", "debug", path, "--admin", p.Admin)
		if code != 0 {
			t.Fatalf("debug %s: got exit code %d, want 0: %s", path, code, errs)
		}
		return out
	}
	wait.For(p.T, "an open circuit, and no pending messages in the other lane", func() error {
		lanes := map[string]adminapi.LaneState{}
		for line := range strings.Lines(debug("lanes")) {
			var l adminapi.LaneState
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Fatal(err)
			}
			if len(l.Breakers) != 1 {
				t.Fatalf("circuits of a lane: got %+v, want one", l)
			}
			lanes[l.Destination] = l
		}
		// 20 calls and the deletion request's message.
		if l := lanes["default/fine"]; l.Position != 21 || l.LogEnd != 21 || l.Pending != 0 || l.Breakers[0].Open || !l.OldestPending.IsZero() {
			return fmt.Errorf("fine: %+v", l)
		}
		l := lanes["default/dead"]
		if b := l.Breakers[0]; l.Pending != 21 || l.Retrying == 0 || !b.Open || b.ConsecutiveFailures == 0 ||
			!b.Probing && time.Until(b.NextAttempt) > 2*time.Minute || l.OldestPending.IsZero() {
			return fmt.Errorf("dead: %+v", l)
		}
		return nil
	})

	config := debug("config")
	for _, word := range []string{`"namespace":"default"`, `"name":"fine"`, `"name":"Authorization","value":"[redacted]"`,
		`"url":"[redacted]"`, `"writeKeySHA256":["`, `"suppress":true`, `"timeoutMS":5000`} {
		if !strings.Contains(config, word) {
			t.Errorf("config: got %s, want one with %s", config, word)
		}
	}
	profiles := ""
	for _, name := range []string{"pprof/", "pprof/goroutine?debug=2", "pprof/heap?debug=1", "pprof/allocs", "pprof/profile?seconds=1",
		"pprof/trace?seconds=1"} {
		profile := debug(name)
		if len(profile) < 100 {
			t.Errorf("size of %s: got %d bytes, want at least 100", name, len(profile))
		}
		profiles += profile
	}
	for _, word := range []string{"hush", key, secret} {
		if strings.Contains(config+debug("lanes")+profiles, word) {
			t.Errorf("/debug contains %q", word)
		}
	}
}

func TestDebugIsOffByDefault(t *testing.T) {
	p := start(t, map[string]string{"source.yaml": source()})
	for _, path := range []string{"lanes", "config", "pprof/heap"} {
		if out, errs, code := cli(t, "", "debug", path, "--admin", p.Admin); code != 1 || !strings.Contains(errs, "--debug") {
			t.Errorf("debug %s: got exit code %d: %s%s, want 1 and the flag --debug", path, code, out, errs)
		}
	}
}
