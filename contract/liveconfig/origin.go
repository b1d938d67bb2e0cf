package liveconfig

import (
	"iter"
	"net/netip"
	"regexp"
	"strings"
)

// maxOrigin bounds the origins that are read: a host has at most 253 bytes, and an entry of a Source 255.
const maxOrigin = 512

// originForm is scheme://host[:port], in lower case. file:// has no host, and an entry may begin with "*.".
var originForm = regexp.MustCompile(`^([a-z][a-z0-9+.-]*)://((?:\*\.)?[a-z0-9._-]+|\[[0-9a-f:.]+\]|)(?::([0-9]+))?$`)

// CanonicalOrigin returns an origin, or an entry of Source.AllowedOrigins, as browsers write origins: in lower case,
// without the default port, and with the short form of an IPv6 address; "" if it is no origin.
func CanonicalOrigin(text string) string {
	if text == "*" || text == "null" {
		return text
	}
	if len(text) > maxOrigin {
		return ""
	}
	part := originForm.FindStringSubmatch(strings.ToLower(text))
	if part == nil {
		return ""
	}
	scheme, host, port := part[1], part[2], part[3]
	if addr, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil && addr.Is6() {
		host = "[" + addr.String() + "]"
	}
	isDefault := scheme == "http" && port == "80" || scheme == "https" && port == "443"
	if port != "" && !isDefault {
		host += ":" + port
	}
	return scheme + "://" + host
}

// EntriesFor yields the entries of Source.AllowedOrigins that allow an origin: "*", the origin itself, and
// scheme://*.domain for each domain above its host.
func EntriesFor(origin string) iter.Seq[string] {
	return func(yield func(string) bool) {
		origin = CanonicalOrigin(origin)
		if !yield("*") || origin == "" || !yield(origin) {
			return
		}
		scheme, host, _ := strings.Cut(origin, "://")
		for label, domain, ok := strings.Cut(host, "."); ok && label != ""; label, domain, ok = strings.Cut(domain, ".") {
			if !yield(scheme + "://*." + domain) {
				return
			}
		}
	}
}
