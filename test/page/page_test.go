// Package page tests the status page of posthorn run in Chromium: what a person sees in health and
// in trouble. With -update it writes the screenshots of docs/status-page.md.
package page

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/need"
	"github.com/posthorn/posthorn/test/process"
	"github.com/posthorn/posthorn/test/wait"
)

var (
	binary string
	update = flag.Bool("update", false, "write the screenshots in docs/images")
)

func TestMain(m *testing.M) { process.Main(m, &binary) }

// view is a page to open; see node/view.mjs.
type view struct {
	Name     string `json:"name"`
	URL      string `json:"url"`
	Width    int    `json:"width,omitempty"`
	Height   int    `json:"height,omitempty"`
	Dark     bool   `json:"dark,omitempty"`
	Script   *bool  `json:"script,omitempty"`
	Stream   string `json:"stream,omitempty"`
	Until    string `json:"until,omitempty"`
	Keyboard bool   `json:"keyboard,omitempty"`
	Click    string `json:"click,omitempty"`
	Shot     string `json:"shot,omitempty"`
	Full     bool   `json:"full,omitempty"`
}

// seen is what Chromium shows.
type seen struct {
	Status           int
	CSP, Title, Text string
	Background       string
	Wide             string
	Errors, Focus    []string
}

// open opens the views in Chromium.
func open(t *testing.T, views ...view) map[string]seen {
	t.Helper()
	chromium := need.Program(t, "chromium")
	need.Program(t, "node")
	need.Program(t, "npm")
	lock, err := os.ReadFile("node/package-lock.json")
	check.NoError(t, "read the lock file", err)
	const installed = "node/node_modules/.installed"
	if have, err := os.ReadFile(installed); err != nil || !bytes.Equal(have, lock) {
		if out, err := exec.Command("npm", "ci", "--prefix", "node", "--ignore-scripts", "--no-audit", "--no-fund").CombinedOutput(); err != nil {
			need.Skip(t, fmt.Errorf("npm ci: %w: %s", err, out)) // npm needs the network once.
		}
		check.NoError(t, "write the mark", os.WriteFile(installed, lock, 0o600))
	}
	input, err := json.Marshal(views)
	check.NoError(t, "encode the views", err)
	cmd := exec.Command("node", "node/view.mjs", string(input))
	cmd.Env = append(os.Environ(), "CHROMIUM="+chromium)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("Chromium: %v\n%s", err, stderr.String())
	}
	got := map[string]seen{}
	check.NoError(t, "decode what Chromium shows", json.Unmarshal(out, &got))
	for _, v := range views {
		s, ok := got[v.Name]
		check.Equal(t, v.Name+": was opened", ok, true)
		if s.Status == http.StatusOK { // Chromium logs other statuses as errors.
			check.Equal(t, v.Name+": errors in the console", strings.Join(s.Errors, "\n"), "")
		}
		check.Equal(t, v.Name+": element wider than the window", s.Wide, "")
		if strings.Contains(s.CSP, "unsafe") || !strings.Contains(s.CSP, "default-src 'none'") {
			t.Errorf("%s: Content-Security-Policy: got %q, want default-src 'none' and nothing unsafe", v.Name, s.CSP)
		}
	}
	return got
}

// start runs posthorn with a destination for each URL, and returns its page's URL and a function
// that sends n calls, or -n invalid ones.
func start(t *testing.T, destinations map[string]string) (root string, send func(n int) (last string)) {
	t.Helper()
	dir := t.TempDir()
	manifests := filepath.Join(dir, "manifests")
	check.NoError(t, "make the folder", os.Mkdir(manifests, 0o700))
	text := `apiVersion: v1
kind: Secret
metadata: {name: keys, namespace: shop}
stringData: {writeKey: page-write-key, shared: page-shared-secret}
---
apiVersion: posthorn.dev/v1beta1
kind: Source
metadata: {name: web, namespace: shop}
spec: {writeKeys: [{name: main, secretKeyRef: {name: keys, key: writeKey}}]}
`
	for name, url := range destinations {
		text += fmt.Sprintf(`---
apiVersion: posthorn.dev/v1beta1
kind: WebhookDestination
metadata: {name: %s, namespace: shop}
spec:
  sourceRefs: [{name: web}]
  endpoints: [{name: primary, url: "%s?token=query-secret", headers: [{name: X-Token, value: header-secret}]}]
  signing: {schemes: [{name: sha1, type: HMACSHA1, secretKeyRef: {name: keys, key: shared}}]}
`, name, url)
	}
	check.NoError(t, "write the manifests", os.WriteFile(filepath.Join(manifests, "shop.yaml"), []byte(text), 0o600))
	p := process.Run(binary, manifests, filepath.Join(dir, "data"), "--egress-allow", "127.0.0.0/8")
	check.NoError(t, "start posthorn", p.Start())
	t.Cleanup(func() { _ = p.Stop(os.Interrupt) })
	sent := 0
	return "http://" + p.Admin, func(n int) (last string) {
		event, want := "Order Completed", http.StatusOK
		if n < 0 { // invalid calls
			n, event, want = -n, "", http.StatusBadRequest
		}
		for range n {
			sent++
			last = fmt.Sprintf("order-%04d", sent)
			body := fmt.Sprintf(`{"messageId":%q,"userId":"u%d","event":%q,"properties":{"total":%d,"note":"private-body"}}`, last, sent%40, event, sent)
			req, err := http.NewRequest(http.MethodPost, "http://"+p.Addr+"/v1/track", strings.NewReader(body))
			check.NoError(t, "make a request", err)
			req.SetBasicAuth("page-write-key", "")
			resp, err := http.DefaultClient.Do(req)
			check.NoError(t, "send a call", err)
			_ = resp.Body.Close()
			check.Equal(t, "answer to a call", resp.StatusCode, want)
		}
		return last
	}
}

// receiver answers with a status and a text after a while.
func receiver(t *testing.T, status int, text string, delay time.Duration) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		time.Sleep(delay)
		w.WriteHeader(status)
		_, _ = io.WriteString(w, text)
	}))
	t.Cleanup(s.Close)
	return s.URL + "/in"
}

// fetch returns a page as text.
func fetch(t *testing.T, url string, host string) (int, string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	check.NoError(t, "make a request", err)
	req.Host = host
	resp, err := http.DefaultClient.Do(req)
	check.NoError(t, "get "+url, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	check.NoError(t, "read "+url, err)
	return resp.StatusCode, string(text)
}

func await(t *testing.T, url, text string) {
	t.Helper()
	check.NoError(t, "wait for "+text, wait.Until(func() error {
		if _, page := fetch(t, url, ""); !strings.Contains(page, text) {
			return fmt.Errorf("%s does not contain %q", url, text)
		}
		return nil
	}))
}

func contains(t *testing.T, name, got string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(got, w) {
			t.Errorf("%s: text lacks %q:\n%s", name, w, got)
		}
	}
}

// shot returns the path of a picture. An .svg is drawn in both color schemes from the layout in Chromium.
func shot(file string) string {
	if !*update {
		return ""
	}
	return filepath.Join("..", "..", "docs", "images", "status-page-"+file)
}

// past waits until the page has charts, for the screenshots.
func past(t *testing.T, send func(int) string) {
	t.Helper()
	if !*update {
		return
	}
	for i := range 65 {
		_ = send(2 + i*i%23)
		time.Sleep(time.Second)
	}
}

func TestHealth(t *testing.T) {
	need.Program(t, "chromium")
	root, send := start(t, map[string]string{"crm": receiver(t, 200, "", 4*time.Millisecond),
		"warehouse": receiver(t, 204, "", 15*time.Millisecond)})
	send(20)
	past(t, send)
	id := send(1)
	await(t, root+"/", "nothing is pending")
	await(t, root+"/page/search?id="+id, "delivered")
	off := false
	got := open(t,
		view{Name: "overview", URL: root + "/", Shot: shot("health.png"), Keyboard: true},
		view{Name: "dark", URL: root + "/", Dark: true, Shot: shot("health-dark.png")},
		view{Name: "phone", URL: root + "/", Width: 390},
		view{Name: "without a script", URL: root + "/", Script: &off},
		view{Name: "refreshed", URL: root + "/", Until: "updated "},
		view{Name: "search", URL: root + "/page/search?id=" + id},
	)
	contains(t, "overview", got["overview"].Text, "No problem found", "shop/crm", "shop/warehouse", "Accepting calls, 1 dispatcher",
		"shop/web", "accepting calls")
	check.Equal(t, "title", got["overview"].Title, "Posthorn: no problem found")
	check.Equal(t, "focus after Tab and after /", strings.Join(got["overview"].Focus, ", "), "Skip to content, id")
	contains(t, "without a script", got["without a script"].Text, "No problem found", "shop/crm")
	contains(t, "search", got["search"].Text, "shop/crm: delivered", "shop/warehouse: delivered")
	if got["overview"].Background == got["dark"].Background {
		t.Errorf("background in light and dark: got %s in both", got["dark"].Background)
	}
}

func TestTrouble(t *testing.T) {
	need.Program(t, "chromium")
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	root, send := start(t, map[string]string{
		"billing": receiver(t, 422, `{"error":"field email is missing <script>alert(1)</script>"}`, 3*time.Millisecond),
		"crm":     receiver(t, 200, "", 4*time.Millisecond), "mailer": gone.URL + "/in",
	})
	send(30)
	past(t, send)
	send(-1)
	await(t, root+"/page/deadletters", "deadletters redeliver billing -n shop --reason Rejected --status-code 422")
	await(t, root+"/page/destination/shop/mailer", "ConnectionRefused")
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() { // for the live tail
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(200 * time.Millisecond):
				send(1)
			}
		}
	}()
	defer func() { close(stop); <-done }()
	got := open(t,
		// First, because the circuit of billing opens after 100 answers 422; then its rows are rare.
		view{Name: "tail of 422", URL: root + "/page/tail?result=422", Stream: ".tail .row.problem"},
		view{Name: "tail", URL: root + "/page/tail?destination=shop/crm", Stream: ".tail .row.ok"},
		view{Name: "overview", URL: root + "/", Width: 1040, Height: 905, Shot: shot("trouble.svg")},
		view{Name: "phone", URL: root + "/", Width: 390, Dark: true, Shot: shot("phone.png")},
		view{Name: "billing", URL: root + "/page/destination/shop/billing", Shot: shot("destination.png"), Full: true},
		view{Name: "mailer", URL: root + "/page/destination/shop/mailer", Width: 390},
		view{Name: "missing", URL: root + "/page/destination/shop/bilings"},
		view{Name: "dead letters", URL: root + "/page/deadletters", Shot: shot("deadletters.png")},
		view{Name: "dead letters with 422", URL: root + "/page/deadletters", Click: "a.code:has-text('422')"},
		view{Name: "dead letters with 404", URL: root + "/page/deadletters?result=404", Width: 390},
		view{Name: "billing with 422", URL: root + "/page/destination/shop/billing", Click: "a.code:has-text('422')"},
		view{Name: "billing with 500", URL: root + "/page/destination/shop/billing?result=500"},
		view{Name: "search", URL: root + "/page/search?id=order-0001"},
	)
	overview := got["overview"].Text
	contains(t, "overview", overview, "shop/billing", "shop/mailer", "To do:", "shop/web", "event")
	table := overview[strings.LastIndex(overview, "LAST SUCCESS")+1:]
	if crm, billing := strings.LastIndex(table, "shop/crm"), strings.LastIndex(table, "shop/billing"); crm < billing {
		t.Errorf("table of destinations: crm, which works, is above billing, which does not:\n%s", table)
	}
	contains(t, "billing", got["billing"].Text, "422", "Rejected", "field email is missing <script>alert(1)</script>", "PROBLEM", "first byte",
		"HMACSHA1")
	contains(t, "mailer", got["mailer"].Text, "ConnectionRefused")
	check.Equal(t, "status of an unknown destination", got["missing"].Status, http.StatusNotFound)
	contains(t, "missing", got["missing"].Text, "billing")
	contains(t, "dead letters", got["dead letters"].Text, "Rejected", "posthorn deadletters redeliver billing -n shop --reason Rejected --status-code 422 --since ")
	contains(t, "dead letters with 422", got["dead letters with 422"].Text, "422 Rejected", "deadletters redeliver billing ")
	contains(t, "dead letters with 404", got["dead letters with 404"].Text, "No dead letter has this status code or reason.", "422")
	contains(t, "billing with 422", got["billing with 422"].Text, "Last attempts with result 422", "422 Rejected", "first byte")
	contains(t, "billing with 500", got["billing with 500"].Text, "No remembered attempt has this status code or reason.")
	contains(t, "tail of 422", got["tail of 422"].Text, "shop/billing", "422 Rejected")
	for _, other := range []string{"shop/crm", "ConnectionRefused"} {
		if strings.Contains(got["tail of 422"].Text, other) {
			t.Errorf("tail of 422: got %s:\n%s", other, got["tail of 422"].Text)
		}
	}
	contains(t, "search", got["search"].Text, "shop/billing: dead letter", "posthorn deadletters show billing ")
	contains(t, "tail", got["tail"].Text, "shop/crm", "delivered")
	for name, s := range got {
		for _, secret := range []string{"query-secret", "header-secret", "page-shared-secret", "page-write-key", "private-body"} {
			if strings.Contains(s.Text, secret) {
				t.Errorf("%s: the page shows %q", name, secret)
			}
		}
	}
}

// The page needs no token, so only this machine may read it, and only by its own name.
func TestDNSRebinding(t *testing.T) {
	root, _ := start(t, nil)
	for _, path := range []string{"/", "/page/deadletters", "/page/style.css"} {
		status, _ := fetch(t, root+path, "attacker.example")
		check.Equal(t, path+" with another Host", status, http.StatusForbidden)
		status, _ = fetch(t, root+path, "localhost")
		check.Equal(t, path+" with the Host localhost", status, http.StatusOK)
	}
}
