package cli

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/sign"
	"github.com/posthorn/posthorn/test/signature"
)

// verify names the cause of the usual mistakes.
func TestVerifyNamesTheCause(t *testing.T) {
	const body = `{"type":"track","userId":"u1"}`
	for name, c := range map[string]struct {
		secret, body, signature string
		code                    int
		want                    string
	}{
		"authentic":                  {"s", body, signature.SHA1("s", body), command.ExitOK, "authentic: 30 bytes"},
		"another secret":             {"s", body, signature.SHA1("x", body), command.ExitFailure, "does not match this body"},
		"another body":               {"s", "{}", signature.SHA1("s", body), command.ExitFailure, "does not match this body"},
		"line break in the Secret":   {"s", body, signature.SHA1("s\n", body), command.ExitFailure, "the signing secret ends in a line break"},
		"CRLF in the Secret":         {"s", body, signature.SHA1("s\r\n", body), command.ExitFailure, "the signing secret ends in a line break"},
		"line break in the file":     {"s\n", body, signature.SHA1("s", body), command.ExitFailure, "the secret given here ends in a line break"},
		"line break behind the body": {"s", body + "\n", signature.SHA1("s", body), command.ExitFailure, "the body has one line break"},
		"formatted": {"s", "{\n  \"type\": \"track\",\n  \"userId\": \"u1\"\n}\n", signature.SHA1("s", body),
			command.ExitFailure, "the body was reformatted"},
		"upper case": {"s", body, strings.ToUpper(signature.SHA1("s", body)), command.ExitFailure, "40 lowercase hex digits"},
		"none":       {"s", body, "", command.ExitUsage, "set --signature"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			code := execute([]string{"verify", "--secret-value", c.secret, "--signature", c.signature}, strings.NewReader(c.body), &out, &out)
			if code != c.code || !strings.Contains(out.String(), c.want) {
				t.Errorf("exit code %d, want %d and %q:\n%s", code, c.code, c.want, out.String())
			}
		})
	}
}

// The sink takes what Posthorn signs under each scheme, between two secrets under
// either, and nothing that another signed.
func TestSinkVerifies(t *testing.T) {
	const body = `{"type":"track","userId":"u1"}`
	secret := liveconfig.NewSecret
	both := liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("sha1")},
		{Type: liveconfig.StandardWebhooks, Secret: secret("standard")}}
	for name, c := range map[string]struct {
		signing liveconfig.SigningSchemes
		secret  string
		status  int
	}{
		"X-Signature":                 {liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("s")}}, "s", http.StatusOK},
		"another secret":              {liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("x")}}, "s", http.StatusUnauthorized},
		"new secret":                  {liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("s"), Previous: secret("x")}}, "s", http.StatusOK},
		"old secret":                  {liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("x"), Previous: secret("s")}}, "s", http.StatusOK},
		"neither":                     {liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("x"), Previous: secret("y")}}, "s", http.StatusUnauthorized},
		"Standard Webhooks":           {liveconfig.SigningSchemes{{Type: liveconfig.StandardWebhooks, Secret: secret("whsec_c2VjcmV0")}}, "whsec_c2VjcmV0", http.StatusOK},
		"Standard Webhooks, plain":    {liveconfig.SigningSchemes{{Type: liveconfig.StandardWebhooks, Secret: secret("secret")}}, "whsec_c2VjcmV0", http.StatusOK},
		"Standard Webhooks, rotating": {liveconfig.SigningSchemes{{Type: liveconfig.StandardWebhooks, Secret: secret("new"), Previous: secret("s")}}, "s", http.StatusOK},
		"Standard Webhooks, another":  {liveconfig.SigningSchemes{{Type: liveconfig.StandardWebhooks, Secret: secret("x")}}, "s", http.StatusUnauthorized},
		"Standard Webhooks, broken":   {liveconfig.SigningSchemes{{Type: liveconfig.StandardWebhooks, Secret: secret("x")}}, "whsec_!", http.StatusUnauthorized},
		"both, of HMACSHA1":           {both, "sha1", http.StatusOK},
		"both, of StandardWebhooks":   {both, "standard", http.StatusOK},
		"both, another":               {both, "x", http.StatusUnauthorized},
	} {
		t.Run(name, func(t *testing.T) {
			signer, err := sign.New(c.signing)
			if err != nil {
				t.Fatal(err)
			}
			r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
			for _, h := range signer.Headers(nil, "id-1", time.Now(), []byte(body)) {
				r.Header.Set(h.Name, h.Value)
			}
			w := httptest.NewRecorder()
			(&sink{secret: c.secret, status: http.StatusOK, output: "none"}).ServeHTTP(w, r)
			if w.Code != c.status {
				t.Errorf("answered %d, want %d", w.Code, c.status)
			}
			if standard := r.Header.Get("webhook-signature"); standard != "" {
				var out bytes.Buffer
				args := []string{"verify", "--secret-value", c.secret, "--signature", standard}
				if code := execute(args, strings.NewReader(body), &out, &out); code != command.ExitUsage ||
					!strings.Contains(out.String(), "set --webhook-id") {
					t.Errorf("verify without the id: exit code %d:\n%s", code, out.String())
				}
				args = append(args, "--webhook-id", "id-1", "--webhook-timestamp", r.Header.Get("webhook-timestamp"))
				want := c.status == http.StatusOK && c.secret != "sha1"
				if code := execute(args, strings.NewReader(body), &out, &out); (code == command.ExitOK) != want {
					t.Errorf("verify: exit code %d:\n%s", code, out.String())
				}
			}
		})
	}
}

// The sink and verify check every format of the scheme HMAC that Posthorn signs, under either
// secret of a rotation.
func TestHMACFormats(t *testing.T) {
	const body = `{"type":"track","userId":"u1"}`
	for _, format := range []liveconfig.HMACFormat{
		{Header: "X-Hub-Signature-256", Algorithm: "SHA256", Encoding: "Hex", Content: "Body", Value: "sha256={signature}"},
		{Header: "Stripe-Signature", Algorithm: "SHA256", Encoding: "Hex", Content: "TimestampBody", Value: "t={timestamp},v1={signature}",
			PreviousValue: ",v1={signature}"},
		{Header: "X-A", Algorithm: "SHA512", Encoding: "Base64", Content: "IDTimestampBody", Value: "{signature}"},
		{Header: "X-A", Algorithm: "SHA1", Encoding: "Base64", Content: "IDTimestampBody", Value: "id={id};t={timestamp};s={signature}",
			PreviousValue: ";s={signature}"},
	} {
		signer,
			err := sign.New(liveconfig.SigningSchemes{{Type: liveconfig.HMAC, Secret: liveconfig.NewSecret("new"),
			Previous: liveconfig.NewSecret("old"), Format: &format}})
		if err != nil {
			t.Fatal(err)
		}
		header := http.Header{}
		for _, h := range signer.Headers(nil, "id-1", time.Now(), []byte(body)) {
			header.Set(h.Name, h.Value)
		}
		for secret, want := range map[string]int{"new": http.StatusOK, "old": http.StatusOK, "other": http.StatusUnauthorized} {
			t.Run(format.Value+" "+secret, func(t *testing.T) {
				r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
				r.Header = header
				w := httptest.NewRecorder()
				(&sink{secret: secret, format: hmacFormat{format.Header, format.Algorithm, format.Encoding, format.Content, format.Value},
					status: http.StatusOK, output: "none"}).ServeHTTP(w, r)
				if w.Code != want {
					t.Errorf("status of the sink: got %d, want %d", w.Code, want)
				}
				if secret == "old" && format.PreviousValue == "" {
					return // The signature is in a header of its own.
				}
				args := []string{
					"verify", "--secret-value", secret, "--signature", header.Get(format.Header), "--webhook-id", "id-1", "--webhook-timestamp",
					header.Get("webhook-timestamp"),
					"--header", format.Header, "--algorithm", format.Algorithm, "--encoding", format.Encoding, "--content", format.Content, "--value",
					format.Value,
				}
				var out bytes.Buffer
				if code := execute(args, strings.NewReader(body), &out, &out); (code == command.ExitOK) != (want == http.StatusOK) {
					t.Errorf("verify: exit code %d:\n%s", code, out.String())
				}
			})
		}
	}
}

func TestVerifyRejectsAnInvalidFormat(t *testing.T) {
	for want, flags := range map[string][]string{
		"--value: must contain {signature} once": {"--value", "v1=x"},
		"SHA1":                                   {"--algorithm", "MD5"},
	} {
		var out bytes.Buffer
		args := append([]string{"verify", "--secret-value", "s", "--signature", "x", "--header", "X-A"}, flags...)
		code := execute(args, strings.NewReader("{}"), &out, &out)
		if code != command.ExitUsage || !strings.Contains(out.String(), want) {
			t.Errorf("%v: got exit code %d and %q, want %d and %q", flags, code, out.String(), command.ExitUsage, want)
		}
	}
}

// A sink keeps and sends on authentic requests only, and answers with the other receiver's status.
func TestSinkSendsOn(t *testing.T) {
	var got []*http.Request
	var bodies []string
	status := http.StatusTeapot
	next := httptest.NewServer(oneStore(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got, bodies = append(got, r), append(bodies, string(body))
		w.WriteHeader(status)
	}))
	dir := t.TempDir()
	var out bytes.Buffer
	s := &sink{secret: "s3cret", status: http.StatusOK, output: "text", out: &out, save: dir, forwardTo: next.URL + "/hook"}
	const body = `{"type":"track","event":"E","userId":"u"}`
	post := func(signature string) int {
		r := httptest.NewRequest(http.MethodPost, "/in", strings.NewReader(body))
		r.Header.Set("X-Signature", signature)
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		return w.Code
	}
	right := signature.SHA1("s3cret", body)
	if code := post("00"); code != http.StatusUnauthorized || len(got) > 0 {
		t.Errorf("a wrong signature: got %d and %d requests, want 401 and none", code, len(got))
	}
	if code := post(right); code != status {
		t.Errorf("an authentic request: got %d, want %d", code, status)
	}
	if len(got) != 1 || got[0].URL.Path != "/hook" || got[0].Header.Get("X-Signature") != right || bodies[0] != body {
		t.Fatalf("sent on: got %v with %q, want the request", got, bodies)
	}
	files, _ := os.ReadDir(dir)
	if len(files) != 1 || files[0].Name() != "000002.http" {
		t.Fatalf("saved: got %v, want 000002.http", files)
	}
	if text, _ := os.ReadFile(filepath.Join(dir, "000002.http")); !strings.HasSuffix(string(text), "\r\n\r\n"+body) ||
		!strings.Contains(string(text), "X-Signature: "+right) {
		t.Errorf("saved: got %q", text)
	}
	next.Close()
	if code := post(right); code != http.StatusBadGateway || !strings.Contains(out.String(), "not sent on: ") {
		t.Errorf("a receiver that is down: got %d, want 502, and\n%s", code, out.String())
	}
}
