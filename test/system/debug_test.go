package system

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/dispatcher/delivery"
)

// What /debug shows helps to find a fault, and holds no secret; without --debug there is nothing.
func TestDebug(t *testing.T) {
	dead, fine := newReceiver(t), newReceiver(t)
	dead.set(func(int) int { return http.StatusInternalServerError })
	manifests := map[string]string{
		"source.yaml": source(),
		"fine.yaml":   destination("fine", fine.URL+"/hush-path?token=hush-token", ""),
		"dead.yaml": strings.Replace(destination("dead", dead.URL, ""), "    url:", `    headers:
    - {name: Authorization, value: hush-header}
    url:`, 1),
		"gone.yaml": `
apiVersion: posthorn.dev/v1alpha1
kind: DeletionRequest
metadata: {name: gone}
spec: {userId: hush-user, suppress: true}
`,
	}
	p := start(t, manifests, "--debug")
	for i := range 20 {
		p.mustPost("/v1/track", fmt.Sprintf(`{"userId":"u","event":"E","messageId":"m%d"}`, i))
	}
	debug := func(what string) string {
		t.Helper()
		out, errs, code := cli(t, "", "debug", what, "--admin", p.Admin)
		if code != 0 {
			t.Fatalf("debug %s: exit %d: %s", what, code, errs)
		}
		return out
	}
	p.eventually("the breaker opens and the other lane is done", func() error {
		lanes := map[string]delivery.LaneState{}
		for line := range strings.Lines(debug("lanes")) {
			var l delivery.LaneState
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Fatal(err)
			}
			if len(l.Breakers) != 1 {
				t.Fatalf("%+v", l)
			}
			lanes[l.Destination] = l
		}
		// 20 calls and the deletion request's message.
		if l := lanes["default/fine"]; l.Position != 21 || l.LogEnd != 21 || l.Pending != 0 || l.Breakers[0].Open || !l.OldestPending.IsZero() {
			return fmt.Errorf("fine: %+v", l)
		}
		l := lanes["default/dead"]
		if b := l.Breakers[0]; l.Pending != 21 || l.Retrying == 0 || !b.Open || b.ConsecutiveFailures == 0 || !b.Probing && time.Until(b.NextAttempt) > 2*time.Minute || l.OldestPending.IsZero() {
			return fmt.Errorf("dead: %+v", l)
		}
		return nil
	})

	config := debug("config")
	for _, word := range []string{`"namespace":"default"`, `"name":"fine"`, `"name":"Authorization","value":"[redacted]"`, `"url":"[redacted]"`, `"writeKeySHA256":"`, `"suppress":true`, `"timeoutMS":5000`} {
		if !strings.Contains(config, word) {
			t.Errorf("the config lacks %s: %s", word, config)
		}
	}
	profiles := ""
	for _, name := range []string{"pprof/", "pprof/goroutine?debug=2", "pprof/heap?debug=1", "pprof/allocs", "pprof/profile?seconds=1", "pprof/trace?seconds=1"} {
		profile := debug(name)
		if len(profile) < 100 {
			t.Errorf("%s is %d bytes", name, len(profile))
		}
		profiles += profile
	}
	for _, word := range []string{"hush", key, secret} {
		if strings.Contains(config+debug("lanes")+profiles, word) {
			t.Errorf("/debug tells %q", word)
		}
	}
}

func TestDebugIsOffByDefault(t *testing.T) {
	p := start(t, map[string]string{"source.yaml": source()})
	for _, what := range []string{"lanes", "config", "pprof/heap"} {
		if out, errs, code := cli(t, "", "debug", what, "--admin", p.Admin); code != 1 || !strings.Contains(errs, "--debug") {
			t.Errorf("debug %s: exit %d: %s%s", what, code, out, errs)
		}
	}
}
