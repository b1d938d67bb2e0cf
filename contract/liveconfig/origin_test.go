package liveconfig

import (
	"slices"
	"strings"
	"testing"
)

func TestCanonicalOrigin(t *testing.T) {
	for text, want := range map[string]string{
		"*": "*", "null": "null", "file://": "file://", "https://shop.example": "https://shop.example",
		"HTTPS://Shop.Example:443": "https://shop.example", "http://shop.example:80": "http://shop.example",
		"https://shop.example:80": "https://shop.example:80", "http://shop.example:443": "http://shop.example:443",
		"https://*.Shop.example:443": "https://*.shop.example", "capacitor://localhost": "capacitor://localhost",
		"capacitor://localhost:80": "capacitor://localhost:80", "app://-": "app://-", "app://.": "app://.",
		"chrome-extension://abcdefghijklmnopabcdefghijklmnop": "chrome-extension://abcdefghijklmnopabcdefghijklmnop",
		"http://[::1]:3000": "http://[::1]:3000", "http://[0:0:0:0:0:0:0:1]:80": "http://[::1]",
		"https://[2001:DB8::1]:443": "https://[2001:db8::1]",
		"":                          "", "shop.example": "", "https://shop.example/": "", "https://user@shop.example": "",
		"https://shop.example https://b.example": "",
		"https://a.*.example":                    "", "https://*": "", "https://" + strings.Repeat("a", maxOrigin): "",
	} {
		if got := CanonicalOrigin(text); got != want {
			t.Errorf("%.60q: got %q, want %q", text, got, want)
		}
	}
}

func TestEntriesFor(t *testing.T) {
	for origin, want := range map[string][]string{
		"null":              {"*", "null"},
		"https://localhost": {"*", "https://localhost"},
		"https://A.b.shop.example:443": {"*", "https://a.b.shop.example", "https://*.b.shop.example", "https://*.shop.example",
			"https://*.example"},
		"http://a.shop.example:8080":         {"*", "http://a.shop.example:8080", "http://*.shop.example:8080", "http://*.example:8080"},
		"https://.shop.example":              {"*", "https://.shop.example"},
		"https://evil.example/.shop.example": {"*"},
		"https://evil.example?.shop.example": {"*"},
	} {
		if got := slices.Collect(EntriesFor(origin)); !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q", origin, got, want)
		}
	}
	many := "https://" + strings.Repeat("a.", maxOrigin)
	if got := slices.Collect(EntriesFor(many)); !slices.Equal(got, []string{"*"}) {
		t.Errorf("an origin of %d bytes: got %d entries, want * alone", len(many), len(got))
	}
}
