package egress

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// tricks are hosts of URLs that the zero Policy must reject before any DNS lookup.
var tricks = []string{
	// The machine itself, in all notations that some program accepts.
	"127.0.0.1", "127.0.0.2", "127.255.255.255", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.1", "0x7F.0.0.1",
	"0177.0.0.1", "0177.1", "017700000001", "127.0.0.01", "0127.0.0.1", "00000127.0.0.1", "127.0.0.1.", "0x", "0x7f.0x0.0x0.0x1",
	"0", "0.0.0.0", "0.1.2.3", "00", "0x0", "4294967295", "4294967296", "256.256.256.256", "1.2.3.4.5", "08.8.8.8",
	"localhost", "LOCALHOST", "localhost.", "a.localhost", "localhost.localdomain", "ip6-localhost",
	"１２７.０.０.１", "127。0。0。1", "127．0．0．1", "127｡0｡0｡1", "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ", "①②⑦.⓪.⓪.①", "ｌｏｃａｌｈｏｓｔ", "0ⅹ7f.1",
	"::1", "[::1]", "0:0:0:0:0:0:0:1", "::", "::ffff:127.0.0.1", "::ffff:7f00:1", "::127.0.0.1", "::ffff:0:127.0.0.1",
	"::1%lo", "fe80::1%eth0", "fe80::1", "fe80::1%25eth0", "[::1", "::ffff:0.0.0.0", "0:0:0:0:0:ffff:0:0",
	// Metadata services.
	"169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254",
	"::ffff:169.254.169.254", "::169.254.169.254", "64:ff9b::169.254.169.254", "64:ff9b::a9fe:a9fe", "64:ff9b::168.63.129.16",
	"2002:a9fe:a9fe::1",
	"64:ff9b:1::169.254.169.254", "64:ff9b:1:a9fe:a9:fe00::", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518",
	"metadata.google.internal", "metadata.google.internal.", "Metadata",
	"fe80::a9fe:a9fe",
	// Private and special ranges.
	"10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "100.127.255.255", "169.254.1.1",
	"192.0.0.1", "192.0.2.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "192.88.99.1", "224.0.0.1", "239.255.255.255",
	"240.0.0.1", "255.255.255.255", "::ffff:10.0.0.1", "::ffff:a00:1", "64:ff9b::10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::255.255.255.255",
	"64:ff9b:1::8.8.8.8", "64:ff9b:1::",
	"2002:7f00:1::", "2002:a00:1::1", "2002:808:808::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:db8::1", "2001:2::1", "2001:10::1",
	"3fff::1", "3ffe::1",
	"fc00::1", "fd12:3456::1", "fec0::1", "ff02::1", "ff0e::1", "100::1", "5f00::1", "4000::1", "1::1", "8000::1",
	"2600:1f14::5efe:10.0.0.1", "2600:1f14::200:5efe:a00:1",
	// Not valid as hosts.
	"", ".", "..", "a..b", "exa mple", "a/b", "a@b", "a\r\nb", "a%2e", "127.0.0.1%2f", "[127.0.0.1]:", "ex\x00ample", "*.example",
	strings.Repeat("a", 64), strings.Repeat("a.", 130),
}

func TestZeroPolicyDeniesTricks(t *testing.T) {
	for _, host := range tricks {
		if err := (Policy{}).CheckHost(host); err == nil {
			t.Errorf("host %q passed", host)
		}
	}
}

func TestZeroPolicyAllowsPublic(t *testing.T) {
	for _, host := range []string{
		"hooks.example.com", "Hooks.Example.COM.", "bücher.example", "xn--bcher-kva.example", "a_b.example", "web", "crm.shop.svc.cluster.local",
		"10.example", "0x7f.example", "localhost.example.com",
		"1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.1", "172.15.0.1", "172.32.0.1", "169.253.1.1", "223.255.255.255", "192.167.1.1",
		"11.0.0.1", "168.63.129.17",
		"2606:4700::1111", "[2606:4700::1111]", "2a00:1450:4001::a9fe:a9fe", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8",
	} {
		if err := (Policy{}).CheckHost(host); err != nil {
			t.Errorf("host %q: %v", host, err)
		}
	}
}

func TestPolicy(t *testing.T) {
	tests := []struct {
		name    string
		allow   []string
		host    string // The host of the URL.
		addr    string // The resolved address.
		allowed bool
	}{
		{"CIDR", []string{"10.8.0.0/16"}, "crm.example", "10.8.3.4", true},
		{"next to the CIDR", []string{"10.8.0.0/16"}, "crm.example", "10.9.3.4", false},
		{"CIDR with host bits", []string{"10.8.1.1/16"}, "crm.example", "10.8.3.4", true},
		{"address", []string{"10.8.0.1"}, "crm.example", "10.8.0.1", true},
		{"mapped answer", []string{"10.8.0.0/16"}, "crm.example", "::ffff:10.8.0.1", true},
		{"mapped entry", []string{"::ffff:10.8.0.0/112"}, "crm.example", "10.8.0.1", true},
		{"NAT64 of an allowed address", []string{"10.8.0.0/16"}, "crm.example", "64:ff9b::10.8.0.1", true},
		{"NAT64 of another address", []string{"10.8.0.0/16"}, "crm.example", "64:ff9b::10.9.0.1", false},
		{"local NAT64 range", []string{"64:ff9b:1::/48"}, "crm.example", "64:ff9b:1::10.9.0.1", true},
		{"local NAT64 range, metadata inside", []string{"64:ff9b:1::/48"}, "crm.example", "64:ff9b:1::169.254.169.254", false},
		{"ULA", []string{"fd00::/8"}, "crm.example", "fd00:1::1", true},
		{"ULA entry does not open metadata", []string{"fd00::/8"}, "crm.example", "fd00:ec2::254", false},
		{"ULA with metadata inside", []string{"fd00::/8"}, "crm.example", "fd00:64::a9fe:a9fe", false},
		{"host", []string{"crm.internal"}, "crm.internal", "10.1.2.3", true},
		{"host in other case with a dot", []string{"CRM.Internal."}, "crm.internal", "10.1.2.3", true},
		{"host, loopback", []string{"localhost"}, "localhost", "127.0.0.1", true},
		{"another host", []string{"crm.internal"}, "evil.internal", "10.1.2.3", false},
		{"host below an exact one", []string{"crm.internal"}, "a.crm.internal", "10.1.2.3", false},
		{"host that only ends alike", []string{"*.internal"}, "evilinternal", "10.1.2.3", false},
		{"suffix", []string{"*.svc.cluster.local"}, "crm.shop.svc.cluster.local", "10.1.2.3", true},
		{"suffix itself", []string{"*.svc.cluster.local"}, "svc.cluster.local", "10.1.2.3", false},
		{"suffix in the middle", []string{"*.internal"}, "crm.internal.evil.example", "10.1.2.3", false},
		{"host never opens metadata", []string{"crm.internal"}, "crm.internal", "169.254.169.254", false},
		{"host never opens IPv6 metadata", []string{"crm.internal"}, "crm.internal", "fd00:ec2::254", false},
		{"host never opens Alibaba's metadata", []string{"crm.internal"}, "crm.internal", "100.100.100.200", false},
		{"host never opens link-local", []string{"crm.internal"}, "crm.internal", "169.254.1.1", false},
		{"host never opens metadata behind NAT64", []string{"crm.internal"}, "crm.internal", "64:ff9b::a9fe:a9fe", false},
		{"wide CIDR does not open metadata", []string{"0.0.0.0/0", "::/0"}, "crm.internal", "169.254.169.254", false},
		{"wide CIDR opens the rest", []string{"0.0.0.0/0", "::/0"}, "crm.internal", "127.0.0.1", true},
		{"metadata by its address", []string{"169.254.169.254"}, "meta.internal", "169.254.169.254", true},
		{"metadata by its /32", []string{"169.254.169.254/32"}, "meta.internal", "::ffff:169.254.169.254", true},
		{"link-local CIDR", []string{"169.254.20.0/24"}, "dns.internal", "169.254.20.10", true},
		{"public address that is denied", []string{"!2600:1f14::/40"}, "pod.example", "2600:1f14:7::1", false},
		{"next to a denied range", []string{"!2600:1f14::/40"}, "pod.example", "2600:1f15::1", true},
		{"denied wins over the host", []string{"crm.internal", "!10.0.0.0/8"}, "crm.internal", "10.1.2.3", false},
		{"denied wins over the CIDR", []string{"10.0.0.0/8", "!10.1.0.0/16"}, "crm.internal", "10.1.2.3", false},
		{"denied behind NAT64", []string{"!8.8.8.0/24"}, "dns.example", "64:ff9b::8.8.8.8", false},
		{"zone", []string{"fe80::/10"}, "crm.internal", "fe80::1%eth0", true},
		{"nothing listed", nil, "crm.internal", "10.1.2.3", false},
		{"public", nil, "crm.example", "8.8.8.8", true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			p, err := ParsePolicy(test.allow)
			if err != nil {
				t.Fatal(err)
			}
			err = p.check(test.host, netip.MustParseAddr(test.addr))
			if (err == nil) != test.allowed {
				t.Errorf("check: %v, want allowed = %v", err, test.allowed)
			}
			if denied := new(deniedError); err != nil && !errors.As(err, &denied) {
				t.Errorf("error is a %T", err)
			}
		})
	}
}

func TestCheckHostKnowsThePolicy(t *testing.T) {
	p, err := ParsePolicy([]string{"127.0.0.0/8", "localhost", "*.localhost", "::1"})
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"127.0.0.1", "localhost", "a.localhost", "[::1]", "::ffff:127.0.0.1"} {
		if err := p.CheckHost(host); err != nil {
			t.Errorf("host %q: %v", host, err)
		}
	}
	for _, host := range []string{"127.1", "10.0.0.1", "0", "ip6-localhost"} {
		if err := p.CheckHost(host); err == nil {
			t.Errorf("host %q passed", host)
		}
	}
}

func TestParsePolicyRefuses(t *testing.T) {
	for _, entry := range []string{"", "!", "10.0.0.0/33", "10.0.0", "10.0.0.0/8/8", "http://crm.internal", "crm.internal:80", "*", "*.",
		"*.*.internal", "a.*.internal", "!crm.internal", "!*.internal", "fe80::1%eth0", "*.10.0.0.1", "127.1"} {
		if _, err := ParsePolicy([]string{entry}); err == nil {
			t.Errorf("entry %q passed", entry)
		} else if !strings.Contains(err.Error(), `"`+entry+`"`) {
			t.Errorf("entry %q: the error does not name it: %v", entry, err)
		}
	}
}

// FuzzParseHost: the results of parseHost are fixed points, and contain no character that ends
// a host.
func FuzzParseHost(f *testing.F) {
	for _, host := range tricks {
		f.Add(host)
	}
	f.Fuzz(func(t *testing.T, host string) {
		name, addr, err := parseHost(host)
		if err != nil {
			return
		}
		again, addr2, err := parseHost(name)
		if err != nil || again != name || addr2 != addr {
			t.Errorf("parseHost(%q) = %q, and that gives %q, %v", host, name, again, err)
		}
		if strings.ContainsAny(name, " \r\n/@?#\\") {
			t.Errorf("parseHost(%q) = %q", host, name)
		}
	})
}

func TestPrepareRefuses(t *testing.T) {
	h := func(name, value string) []liveconfig.Header {
		return []liveconfig.Header{{Name: name, Value: liveconfig.NewSecret(value)}}
	}
	tests := []struct {
		url     string
		headers []liveconfig.Header
		tls     *liveconfig.TLS
		field   string
	}{
		{url: "", field: "url"},
		{url: "/" + canary, field: "url"},
		{url: "ftp://crm.example/" + canary, field: "url"},
		{url: "http:crm.example/" + canary, field: "url"},
		{url: "http:///" + canary, field: "url"},
		{url: "http://crm.example:" + canary + "/", field: "url"},
		{url: "http://crm.example:0/" + canary, field: "url"},
		{url: "http://crm.example:65536/" + canary, field: "url"},
		{url: "http://crm.example/%zz" + canary, field: "url"},
		{url: "http://crm.example/" + canary + "\n", field: "url"},
		{url: "http://user:" + canary + "@crm.example/", field: "url"},
		{url: "http://crm.example@127.0.0.1/" + canary, field: "url"},
		{url: "http://127.1/" + canary, field: "url"},
		{url: "http://[fe80::1%25eth0]/" + canary, field: "url"},
		{url: "http://crm..example/" + canary, field: "url"},
		{url: "http://crm.example/", headers: h("X Env", canary), field: "headers"},
		{url: "http://crm.example/", headers: h("X-Env", canary+"\r\nX-Evil: 1"), field: "headers"},
		{url: "http://crm.example/", headers: h("Host", canary), field: "headers"},
		{url: "http://crm.example/", headers: h("content-length", canary), field: "headers"},
		{url: "http://crm.example/", headers: h("Transfer-Encoding", canary), field: "headers"},
		{url: "http://crm.example/", tls: &liveconfig.TLS{}, field: "tls"},
		{url: "https://crm.example/", tls: &liveconfig.TLS{CA: canary}, field: "tls"},
		{url: "https://crm.example/", tls: &liveconfig.TLS{ClientCert: "x"}, field: "tls"},
		{url: "https://crm.example/", tls: &liveconfig.TLS{ClientKey: liveconfig.NewSecret(canary)}, field: "tls"},
	}
	c := newClient(t)
	for _, test := range tests {
		_, err := c.Prepare(liveconfig.Endpoint{Name: "primary", URL: liveconfig.NewSecret(test.url), Headers: test.headers, TLS: test.tls})
		if err == nil {
			t.Errorf("%q passed", test.url)
			continue
		}
		if !strings.HasPrefix(err.Error(), `endpoint "primary": `+test.field+": ") || strings.Contains(err.Error(), canary) {
			t.Errorf("%q: %v", test.url, err)
		}
	}
}
