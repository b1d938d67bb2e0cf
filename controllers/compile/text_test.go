package compile

import (
	"encoding/base64"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/test/check"
)

// A line break at the end of a Secret's value has the same effect wherever a destination or a Source refers to one.
func TestLineBreakAtTheEndOfASecret(t *testing.T) {
	ref := v1beta1.SecretKeyReference{Name: "s", Key: "k"}
	uses := map[string]func(b *builder) string{
		"url": func(b *builder) string {
			u, _ := b.url("spec", &v1beta1.Endpoint{URLFrom: &v1beta1.ValueFromSecret{SecretKeyRef: ref}})
			return strings.TrimPrefix(u.Reveal(), "https://h.example/")
		},
		"header": func(b *builder) string {
			for _, h := range b.headers("spec", []v1beta1.Header{{Name: "X-Token", ValueFrom: &v1beta1.ValueFromSecret{SecretKeyRef: ref}}}) {
				return h.Value.Reveal()
			}
			return ""
		},
		"bearer": func(b *builder) string {
			value, _ := b.bearer("spec", ref)
			return strings.TrimPrefix(value, "Bearer ")
		},
		"basic": func(b *builder) string {
			value, _ := b.basic("spec", "s")
			plain, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(value, "Basic "))
			user, password, _ := strings.Cut(string(plain), ":")
			if user != password {
				t.Errorf("basic: user %q, password %q", user, password)
			}
			return password
		},
		"oauth2": func(b *builder) string {
			if c := b.oauth2("spec", &v1beta1.OAuth2Authentication{TokenURL: "https://t.example", ClientID: "c",
				ClientSecretKeyRef: ref}); c != nil {
				return c.ClientSecret.Reveal()
			}
			return ""
		},
		"signing":          func(b *builder) string { return b.sharedSecret("spec", "HMACSHA1", ref).Reveal() },
		"StandardWebhooks": func(b *builder) string { return b.sharedSecret("spec", "StandardWebhooks", ref).Reveal() },
		"write key":        func(b *builder) string { return writeKey(b.resolver, v1beta1.WriteKey{SecretKeyRef: ref}) },
	}
	for name, use := range uses {
		plain := "canary"
		switch name {
		case "url":
			plain = "https://h.example/canary"
		case "StandardWebhooks":
			plain = "whsec_Y2FuYXJ5"
		}
		run := func(value string) (string, *builder) {
			data := map[string][]byte{"k": []byte(value), corev1.BasicAuthUsernameKey: []byte(value), corev1.BasicAuthPasswordKey: []byte(value)}
			if name == "basic" {
				delete(data, "k")
			}
			b := &builder{resolver: newResolver(map[string]Secret{"s": {Data: data}})}
			return use(b), b
		}
		want, b := run(plain)
		if want == "" || len(b.problems) > 0 || len(b.notes) > 0 {
			t.Errorf("%s without a line break: got %q, %v, %v", name, want, b.problems, b.notes)
		}
		for _, end := range []string{"\n", "\r\n", "\n\n", "\r\n\r\n", "\r"} {
			got, b := run(plain + end)
			check.Equal(t, name+" with a line break at its end", got, want)
			if len(b.problems) > 0 || len(b.notes) == 0 || !strings.Contains(b.notes[0], "ends with a line break, which is not used") ||
				strings.Contains(strings.Join(b.notes, ""), "canary") {
				t.Errorf("%s with %q: problems %v, notes %v", name, end, b.problems, b.notes)
			}
		}
		for _, broken := range []string{plain + "\nx", "x\r\n" + plain, plain + "\rx\n"} {
			got, b := run(broken)
			if got != "" || len(b.problems) == 0 || b.problems[0].reason != v1beta1.ReasonInvalidSecret || !strings.Contains(b.problems[0].text, "has a line break before its end; store the value in one line") {
				t.Errorf("%s as %q: got %q, problems %v", name, broken, got, b.problems)
			}
		}
	}
}
