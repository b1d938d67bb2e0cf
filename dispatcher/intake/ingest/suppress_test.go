package ingest

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// suppress makes a view in which the Source "web" refuses a user's calls.
func (f *fixture) suppress(user string) {
	sum := func(key string) string {
		h := sha256.Sum256([]byte(key))
		return hex.EncodeToString(h[:])
	}
	f.set(liveconfig.NewView([]liveconfig.Revisioned{{Config: liveconfig.Config{
		Namespace: "shop",
		Sources: []liveconfig.Source{{Name: "ios", WriteKeySHA256: liveconfig.KeyHashes{sum("ios-key")}},
			{Name: "web", WriteKeySHA256: liveconfig.KeyHashes{sum("web-key")}}},
		Deletions: []liveconfig.Deletion{{Name: "d", ID: "ab", UserID: user, Sources: []string{"web"}, Suppress: true}},
	}}}))
}

func TestSuppressedUser(t *testing.T) {
	f := newFixture(t)
	f.suppress("ü")
	for _, path := range []string{"/v1/identify", "/v1/page"} {
		w := f.do(post(path, "web-key", `{"userId":"\u00fc"}`))
		if w.Code != http.StatusForbidden || !strings.Contains(w.Body.String(), `"user_suppressed"`) || strings.Contains(w.Body.String(), "ü") {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
	if n := f.Gate.Counters("shop/web").Rejected; n != 2 || len(f.stored) != 0 {
		t.Errorf("%d rejected, %d stored", n, len(f.stored))
	}
	// Other users, other Sources and the rest of a batch are accepted.
	if w := f.do(post("/v1/identify", "ios-key", `{"userId":"ü"}`)); w.Code != http.StatusOK {
		t.Errorf("another Source: %d %s", w.Code, w.Body)
	}
	w := f.do(post("/v1/batch", "web-key", `{"batch":[{"type":"page","userId":"ü"},{"type":"page","userId":"a"},{"type":"nonsense"},{"type":"page","userId":"ü"},{"type":"page","anonymousId":"b"}]}`))
	if w.Code != http.StatusOK || strings.Count(w.Body.String(), "user_suppressed") != 2 ||
		!strings.Contains(w.Body.String(), `"rejected":[{"index":0,`) || !strings.Contains(w.Body.String(), `{"index":3,`) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if len(f.stored) != 3 {
		t.Errorf("%d stored", len(f.stored))
	}
	if n := f.Gate.Counters("shop/web").Rejected; n != 5 {
		t.Errorf("%d rejected", n)
	}
}
