package ingest

import (
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/analytics/event"
)

// FuzzRequest sends arbitrary bodies and headers: each response is a documented one, refused calls
// are not stored, and all memory is released.
func FuzzRequest(f *testing.F) {
	f.Add("/v1/track", "Basic d2ViLWtleTo=", "", "application/json", "", track, int64(len(track)))
	f.Add("/v1/batch", "", "gzip", "text/plain", "https://shop.example", zip(`{"writeKey":"web-key","batch":[`+track+`,{}]}`), int64(-1))
	f.Add("/v1/b/", "basic d2ViLWtleQ", "gzip", "", "null", "\x1f\x8b\x08\x08", int64(-1))
	f.Fuzz(func(t *testing.T, path, authorization, encoding, media, origin, body string, length int64) {
		typ, known := paths[strings.TrimSuffix(path, "/")]
		if short, ok := short[strings.TrimSuffix(path, "/")]; ok {
			typ, known = short, true
		}
		if !known {
			path, typ = "/v1/track", event.Track
		}
		fixture := newFixture(t)
		r := httptest.NewRequest("POST", path, strings.NewReader(body))
		r.ContentLength = length
		for name, value := range map[string]string{
			"Authorization": authorization, "Content-Encoding": encoding, "Content-Type": media, "Origin": origin,
		} {
			if value != "" {
				r.Header.Set(name, value)
			}
		}
		w := fixture.do(r)
		var answer struct {
			Success  *bool
			Rejected []struct{ Index int }
			Error    struct{ Code, Message string }
		}
		if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil || answer.Success == nil {
			t.Fatalf("%d %s: %v", w.Code, w.Body, err)
		}
		taken := *answer.Success
		if taken != (w.Code == 200) || !taken && (answer.Error.Code == "" || answer.Error.Message == "") {
			t.Errorf("%d %s", w.Code, w.Body)
		}
		if stored := len(fixture.stored); !taken && stored > 0 || taken && typ != "" && stored != 1 {
			t.Errorf("%d stored after %d %s", stored, w.Code, w.Body)
		}
		if held := fixture.memory.Used(); held != 0 {
			t.Errorf("%d bytes are still held", held)
		}
	})
}
