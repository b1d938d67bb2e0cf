package egress

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// encodings are the forms in which a receiver may echo a secret.
var encodings = map[string]func(string) string{
	"as it is":            func(s string) string { return s },
	"upper case":          strings.ToUpper,
	"hex":                 func(s string) string { return hex.EncodeToString([]byte(s)) },
	"upper-case hex":      func(s string) string { return strings.ToUpper(hex.EncodeToString([]byte(s))) },
	"base64":              func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) },
	"base64, no padding":  func(s string) string { return base64.RawStdEncoding.EncodeToString([]byte(s)) },
	"base64url":           func(s string) string { return base64.URLEncoding.EncodeToString([]byte(s)) },
	"base64, 1 byte on":   func(s string) string { return base64.StdEncoding.EncodeToString([]byte("x" + s + "yz")) },
	"base64, 2 bytes on":  func(s string) string { return base64.StdEncoding.EncodeToString([]byte("xy" + s + "z")) },
	"base64, 3 bytes on":  func(s string) string { return base64.RawURLEncoding.EncodeToString([]byte("xyz" + s)) },
	"percent, query":      url.QueryEscape,
	"percent, path":       url.PathEscape,
	"percent, every byte": func(s string) string { return percent(s, "%%%02x") },
	"JSON, every byte":    func(s string) string { return percent(s, `\u%04x`) },
	"JSON, quoted":        func(s string) string { return fmt.Sprintf("%q", s) },
	"JSON, slashes":       func(s string) string { return strings.ReplaceAll(s, "/", `\/`) },
}

func percent(s, format string) (out string) {
	for _, b := range []byte(s) {
		out += fmt.Sprintf(format, b)
	}
	return out
}

// readable lists the pieces of a secret that must not be readable in any encoding.
func readable(t *testing.T, shown, secret string) {
	t.Helper()
	for name, encode := range encodings {
		// The characters at both ends of a base64 text depend on the bytes around the secret.
		form := encode(secret)
		if i := min(4, len(form)/4); strings.Contains(shown, form[i:len(form)-i]) {
			t.Errorf("%q is readable (%s) in %q", secret, name, shown)
		}
	}
}

func TestRedactedForms(t *testing.T) {
	for _, secret := range []string{"s3cr3t-T0ken_9/x+y", `quoted"secret\with/all`, "sixsix", "~>?<~ü secret", strings.Repeat("long", 60)} {
		r := NewRedactor("another secret", secret)
		for name, encode := range encodings {
			switch {
			case strings.Contains(secret, "ü") && (name == "JSON, every byte" || name == "upper case"):
				continue // These encodings are of characters, not of bytes.
			case strings.Contains(secret, `"`) && name == "JSON, slashes":
				continue // JSON does not quote this secret like this.
			}
			t.Run(name, func(t *testing.T) {
				shown := string(r.Redact([]byte("begin " + encode(secret) + " end")))
				readable(t, shown, secret)
				if !strings.HasPrefix(shown, "begin ") || !strings.HasSuffix(shown, " end") || strings.Count(shown, redacted) != 1 {
					t.Errorf("got %q, want the text around one %s", shown, redacted)
				}
			})
		}
	}
}

func TestRedactLeavesTheRest(t *testing.T) {
	r := NewRedactor("s3cr3t", "", "k")
	for text, want := range map[string]string{
		"":                               "",
		"nothing here: 100 %, \\ %zz %4": "nothing here: 100 %, \\ %zz %4",
		"the end is %73%33%63%72%7":      "the end is ",
		`the end is \u0073\u0033\u0063\u0072\u00`: "the end is ",
		"s3cr3ts3cr3t":            redacted,
		"s3cr3t s3cr3t":           redacted + " " + redacted,
		"the end is s3c":          "the end is s3c",
		"the end is s3cr3":        "the end is ",
		"the end is %73%33%63%72": "the end is ",
		strings.Repeat("-", 2000): strings.Repeat("-", 1024),
		strings.Repeat("-", 1020) + "s3cr3t, then more": strings.Repeat("-", 1020) + redacted[:4],
	} {
		if text != "" && strings.Contains(text, "k") {
			t.Fatal("bad case")
		}
		if diff := cmp.Diff(want, string(r.Redact([]byte(text)))); diff != "" {
			t.Errorf("%q: -want +got:\n%s", text, diff)
		}
	}
	// One secret is a part of another one, which is truncated at the end of the text.
	if got := string(NewRedactor("PATH/TOKEN/part", "TOKEN").Redact([]byte("end: PATH/TOKEN/pa"))); got != "end: " {
		t.Errorf("a secret within a cut secret: %q", got)
	}
	if got := string(r.Redact([]byte("a signature: AbCdEf012345"), "abcdef012345")); got != "a signature: "+redacted {
		t.Errorf("a further secret: %q", got)
	}
}

// A part of a secret is removed anywhere if it is long, and its beginning or its end.
func TestRedactParts(t *testing.T) {
	const secret = "s3cr3t-T0ken-4-hooks" // 20 characters
	r := NewRedactor(secret)
	for _, n := range []int{10, 15, 19} {
		for name, part := range map[string]string{"beginning": secret[:n], "end": secret[20-n:],
			"beginning in upper case": strings.ToUpper(secret[:n]), "percent-encoded end": percent(secret[20-n:], "%%%02x")} {
			for _, around := range [][2]string{{"the key ", "… is unknown"}, {"", " at the beginning"}, {`{"key":"`, `"}`}} {
				if got, want := string(r.Redact([]byte(around[0]+part+around[1]))), around[0]+redacted+around[1]; got != want {
					t.Errorf("%s of %d characters: got %q, want %q", name, n, got, want)
				}
			}
		}
	}
	for _, text := range []string{"s3cr3t-T0 is short, ", "4-hooks, too", "-T0ken-4 is the middle"} {
		if got := string(r.Redact([]byte(text))); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
}

// Random texts: no secret is readable, and no text is longer than 1 KiB.
func TestRedactRandom(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	pieces := []string{"s3cr3t-value", "s3cr3t", "%73", `\u0073`, "3cr3t", "%", `\`, "-", "x", "c3Iz", "7333", strings.Repeat(".", 200)}
	r := NewRedactor("s3cr3t-value")
	for range 5000 {
		var text []byte
		for range rng.IntN(20) {
			text = append(text, pieces[rng.IntN(len(pieces))]...)
		}
		shown := r.Redact(text)
		if len(shown) > maxShownBytes || strings.Contains(strings.ToLower(string(shown)), "s3cr3t-value") {
			t.Fatalf("%q became %q", text, shown)
		}
	}
}

// Every secret of an endpoint is removed from an answer, also one inside Basic credentials.
func TestSecretsOfAnEndpoint(t *testing.T) {
	e, err := prepare(liveconfig.Endpoint{
		Name: "primary", URL: liveconfig.NewSecret("https://hooks.example/services/T0PATHSECRET?token=QUERYSECRET"),
		Headers: []liveconfig.Header{
			{Name: "Authorization", Value: liveconfig.NewSecret("Basic " + base64.StdEncoding.EncodeToString([]byte("service:BASICPASSWORD")))},
			{Name: "X-Api-Key", Value: liveconfig.NewSecret("HEADERSECRET")},
		},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"T0PATHSECRET", "QUERYSECRET", "HEADERSECRET", "BASICPASSWORD", "service:BASICPASSWORD",
		base64.StdEncoding.EncodeToString([]byte("service:BASICPASSWORD"))} {
		for name, encode := range encodings {
			shown := string(e.redactor.Redact([]byte("no: " + encode(secret))))
			if strings.Contains(shown, encode(secret)) || !strings.Contains(shown, redacted) {
				t.Errorf("%s (%s): %q", secret, name, shown)
			}
		}
	}
}

func BenchmarkRedact(b *testing.B) {
	var secrets []string
	for i := range 12 {
		secrets = append(secrets, fmt.Sprintf("secret-number-%d-%s", i, strings.Repeat("x", i)))
	}
	r := NewRedactor(secrets...)
	text := []byte(strings.Repeat(`{"error": "not \"found\" at 100 %"}`, 120))[:maxKeptBytes]
	for b.Loop() {
		r.Redact(text)
	}
}
