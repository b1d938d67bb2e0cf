package cli

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/check"
)

// The sink prints batches of both formats as arrays, and rejects none of their messages.
func TestSinkOfBatches(t *testing.T) {
	const messages = `[{"messageId":"a"},{"messageId":"b"}]`
	for contentType, body := range map[string]string{
		"application/json":     messages,
		"application/x-ndjson": "{\"messageId\":\"a\"}\n{\"messageId\":\"b\"}\n",
	} {
		for output, want := range map[string]string{"text": "batch of 2 messages", "json": `"messages":2,"signature":"none","status":200,"body":` + messages} {
			var out bytes.Buffer
			s := sink{status: http.StatusOK, output: output, out: &out}
			w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
			r.Header.Set("Content-Type", contentType)
			s.ServeHTTP(w, r)
			check.Equal(t, contentType+": response", w.Body.String(), "{}")
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s, %s: got %s, want it with %s", contentType, output, out.String(), want)
			}
		}
	}
}
