package main

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // the specified algorithm of X-Signature
	"encoding/hex"
	"strings"
	"testing"
)

func signed(secret, body string) string {
	mac := hmac.New(sha1.New, []byte(secret))
	mac.Write([]byte(body))
	return hex.EncodeToString(mac.Sum(nil))
}

// A signature that is not the body's is the usual mistakes' first.
func TestVerifyNamesTheCause(t *testing.T) {
	const body = `{"type":"track","userId":"u1"}`
	for name, c := range map[string]struct {
		secret, body, signature string
		code                    int
		want                    string
	}{
		"authentic":                  {"s", body, signed("s", body), exitOK, "authentic: 30 bytes"},
		"another secret":             {"s", body, signed("x", body), exitFailure, "is not the HMAC-SHA1 of this body"},
		"another body":               {"s", "{}", signed("s", body), exitFailure, "is not the HMAC-SHA1 of this body"},
		"line break in the Secret":   {"s", body, signed("s\n", body), exitFailure, "the secret that signed ends in a line break"},
		"CRLF in the Secret":         {"s", body, signed("s\r\n", body), exitFailure, "the secret that signed ends in a line break"},
		"line break in the file":     {"s\n", body, signed("s", body), exitFailure, "the secret given here ends in a line break"},
		"line break behind the body": {"s", body + "\n", signed("s", body), exitFailure, "the body has a line break"},
		"formatted":                  {"s", "{\n  \"type\": \"track\",\n  \"userId\": \"u1\"\n}\n", signed("s", body), exitFailure, "the body was formatted"},
		"upper case":                 {"s", body, strings.ToUpper(signed("s", body)), exitFailure, "40 lowercase hex digits"},
		"none":                       {"s", body, "", exitUsage, "set --signature"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			code := Main([]string{"verify", "--secret", c.secret, "--signature", c.signature}, strings.NewReader(c.body), &out, &out)
			if code != c.code || !strings.Contains(out.String(), c.want) {
				t.Errorf("exit code %d, want %d and %q:\n%s", code, c.code, c.want, out.String())
			}
		})
	}
}

func TestTooManyArguments(t *testing.T) {
	for _, args := range [][]string{{"verify", "a", "b"}, {"tail", "a", "b"}, {"attempts", "a", "b"}, {"compile", "a"}} {
		var out bytes.Buffer
		if code := Main(args, strings.NewReader(""), &out, &out); code != exitUsage || !strings.Contains(out.String(), "unexpected argument") {
			t.Errorf("%v: exit code %d:\n%s", args, code, out.String())
		}
	}
}
