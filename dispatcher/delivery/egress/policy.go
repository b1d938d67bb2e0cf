package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/net/idna"
)

// Policy lists the addresses that may be dialled. The zero Policy allows public addresses only. It
// is immutable.
type Policy struct {
	allowed  []netip.Prefix
	denied   []netip.Prefix
	hosts    map[string]bool // exact names
	suffixes []string        // ".example" for "*.example"
}

// ParsePolicy makes a Policy from the administrator's list. Public addresses are
// always allowed; each entry changes that:
//
//   - a CIDR or an address ("10.8.0.0/16", "fd00::7") allows these addresses;
//   - a host name ("crm.internal", or "*.svc.cluster.local" for all names below
//     it) allows all addresses that the name resolves to, except link-local and
//     metadata addresses;
//   - a CIDR or an address after "!" ("!2001:db8:7::/48") denies these addresses
//     and takes precedence over every other entry. It is for clusters whose pods
//     or services have public addresses.
//
// The metadata addresses of clouds hand out credentials. Only an entry that is
// exactly such an address allows it, not a wider CIDR.
//
// The error names the entry and the valid forms.
func ParsePolicy(allow []string) (Policy, error) {
	p := Policy{hosts: map[string]bool{}}
	for _, entry := range allow {
		text, deny := strings.CutPrefix(strings.TrimSpace(entry), "!")
		if prefix, ok := parsePrefix(text); ok {
			if deny {
				p.denied = append(p.denied, prefix)
			} else {
				p.allowed = append(p.allowed, prefix)
			}
			continue
		}
		name, below := strings.CutPrefix(text, "*.")
		host, addr, err := parseHost(name)
		switch {
		case deny:
			return Policy{}, fmt.Errorf("egress entry %q: only a CIDR or an address can be denied", entry)
		case err != nil || addr.IsValid():
			return Policy{}, fmt.Errorf("egress entry %q is not a CIDR (10.8.0.0/16), an address (10.8.0.7) or a host name (crm.internal, *.svc.cluster.local)", entry)
		case below:
			p.suffixes = append(p.suffixes, "."+host)
		default:
			p.hosts[host] = true
		}
	}
	return p, nil
}

func parsePrefix(s string) (netip.Prefix, bool) {
	prefix, err := netip.ParsePrefix(s)
	if err != nil {
		addr, err := netip.ParseAddr(s)
		if err != nil || addr.Zone() != "" {
			return netip.Prefix{}, false
		}
		prefix = netip.PrefixFrom(addr, addr.BitLen())
	}
	if prefix.Addr().Is4In6() && prefix.Bits() >= 96 {
		prefix = netip.PrefixFrom(prefix.Addr().Unmap(), prefix.Bits()-96)
	}
	return prefix.Masked(), true
}

// CheckHost rejects a host of a URL that can never be dialled: a denied address, an address in a
// form that programs read differently ("0x7f.1", "2130706433"), a name that always means this
// machine or a metadata service, and an invalid host. Every other name passes, because only its
// resolved addresses can be checked, which happens on every connection.
//
// The error has the reason and the fix.
func (p Policy) CheckHost(host string) error {
	name, addr, err := parseHost(host)
	if err != nil {
		return err
	}
	if addr.IsValid() {
		return p.check(name, addr)
	}
	if kind := forbiddenName(name); kind != "" && !p.allowsHost(name) {
		return fmt.Errorf("host %q is a name of %s, which the egress policy denies; use another host, or ask an administrator to add this name to egressAllow (--egress-allow)", name, kind)
	}
	return nil
}

func forbiddenName(name string) string {
	switch name {
	case "localhost", "localhost.localdomain", "localhost6", "localhost6.localdomain6",
		"ip6-localhost", "ip6-loopback", "loopback", "broadcasthost":
		return "the dispatcher's own machine"
	case "metadata", "metadata.google.internal", "metadata.goog", "instance-data", "instance-data.ec2.internal", "metadata.tencentyun.com",
		"metadata.azure.internal":
		return "a metadata service"
	}
	if strings.HasSuffix(name, ".localhost") {
		return "the dispatcher's own machine"
	}
	return ""
}

func (p Policy) allowsHost(name string) bool {
	return p.hosts[name] || slices.ContainsFunc(p.suffixes, func(s string) bool { return strings.HasSuffix(name, s) })
}

// deniedError is a denied address. Its text is for the owner of a destination: it contains the
// address only if the URL does, because an owner could otherwise resolve internal names. The log
// gets the fields.
type deniedError struct {
	host, kind string
	addr       netip.Addr
	metadata   bool
}

// resolved reports whether the address was resolved by DNS and is not part of the URL.
func (e *deniedError) resolved() bool {
	_, err := netip.ParseAddr(e.host)
	return err != nil
}

func (e *deniedError) Error() string {
	switch {
	case e.resolved():
		return fmt.Sprintf("host %q resolves to an address that the egress policy denies; use another host, or ask an administrator to add the host or its address to egressAllow (--egress-allow)", e.host)
	case e.metadata:
		return fmt.Sprintf("address %s is %s, and the egress policy denies it; use another host, or ask an administrator to add exactly this address to egressAllow (--egress-allow)", e.addr, e.kind)
	}
	return fmt.Sprintf("address %s is %s, and the egress policy denies it; use another host, or ask an administrator to add the address to egressAllow (--egress-allow)", e.addr, e.kind)
}

// check checks one address that a host is or resolved to.
func (p Policy) check(host string, addr netip.Addr) error {
	addr = addr.WithZone("").Unmap()
	deny := func(kind string) error { return &deniedError{host: host, addr: addr, kind: kind} }

	// An address that a gateway would extract from this address is checked, too.
	inner := embedded(addr)
	for _, a := range append(inner, addr) {
		if containsAddr(p.denied, a) {
			return deny("on the deny list")
		}
		if slices.Contains(metadata, a) && !p.lists(a) && !p.lists(addr) {
			return &deniedError{host: host, addr: addr, kind: "a cloud's metadata service", metadata: true}
		}
	}
	kind := special(addr)
	if nat64.Contains(addr) || isatap(addr) {
		// Allowed if the embedded IPv4 address is allowed: in an IPv6-only cluster every IPv4 host
		// is dialled through such an address.
		if v4 := inner[0]; !containsAddr(p.allowed, v4) && kind == "" {
			kind = special(v4)
		}
	}
	switch {
	case kind == "", containsAddr(p.allowed, addr):
		return nil
	case kind != linkLocal && p.allowsHost(host):
		return nil
	}
	return deny(kind)
}

// lists reports whether exactly this address is allowed.
func (p Policy) lists(a netip.Addr) bool {
	return slices.Contains(p.allowed, netip.PrefixFrom(a, a.BitLen()))
}

func containsAddr(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// metadata lists the addresses at which clouds serve credentials to their machines.
var metadata = addrs(
	"169.254.169.254", // AWS, Google, Azure, OpenStack, Oracle, DigitalOcean
	"169.254.170.2",   // AWS ECS task credentials
	"169.254.170.23",  // AWS EKS Pod Identity
	"169.254.0.23",    // Tencent
	"100.100.100.200", // Alibaba
	"168.63.129.16",   // Azure's wire server
	"192.0.0.192",     // Oracle classic
	"fd00:ec2::254",   // AWS
	"fd00:ec2::23",    // AWS EKS Pod Identity
	"fd20:ce::254",    // Google
	"fd00:42::42",     // Scaleway
	"fe80::a9fe:a9fe", // OpenStack
)

func addrs(list ...string) (as []netip.Addr) {
	for _, s := range list {
		as = append(as, netip.MustParseAddr(s))
	}
	return as
}

const linkLocal = "link-local"

// specials are the ranges that are not public unicast addresses (IANA's special-purpose
// registries), narrower ranges first.
var specials = []struct {
	prefix netip.Prefix
	kind   string
}{
	{netip.MustParsePrefix("0.0.0.0/32"), "unspecified"},
	{netip.MustParsePrefix("0.0.0.0/8"), "of this network"},
	{netip.MustParsePrefix("10.0.0.0/8"), "private"},
	{netip.MustParsePrefix("100.64.0.0/10"), "of a carrier's shared range"},
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{netip.MustParsePrefix("169.254.0.0/16"), linkLocal},
	{netip.MustParsePrefix("172.16.0.0/12"), "private"},
	{netip.MustParsePrefix("192.0.0.0/24"), "reserved for protocols"},
	{netip.MustParsePrefix("192.0.2.0/24"), "reserved for documentation"},
	{netip.MustParsePrefix("192.31.196.0/24"), "reserved for protocols"},
	{netip.MustParsePrefix("192.52.193.0/24"), "reserved for protocols"},
	{netip.MustParsePrefix("192.88.99.0/24"), "a 6to4 relay"},
	{netip.MustParsePrefix("192.168.0.0/16"), "private"},
	{netip.MustParsePrefix("192.175.48.0/24"), "reserved for protocols"},
	{netip.MustParsePrefix("198.18.0.0/15"), "reserved for benchmarks"},
	{netip.MustParsePrefix("198.51.100.0/24"), "reserved for documentation"},
	{netip.MustParsePrefix("203.0.113.0/24"), "reserved for documentation"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("255.255.255.255/32"), "broadcast"},
	{netip.MustParsePrefix("240.0.0.0/4"), "reserved"},

	{netip.MustParsePrefix("::/128"), "unspecified"},
	{netip.MustParsePrefix("::1/128"), "loopback"},
	{netip.MustParsePrefix("::/96"), "an IPv4-compatible address"},
	{netip.MustParsePrefix("::ffff:0:0:0/96"), "an IPv4-translated address"},
	{netip.MustParsePrefix("64:ff9b:1::/48"), "of a local NAT64 range"},
	{netip.MustParsePrefix("100::/64"), "reserved for discarding"},
	{netip.MustParsePrefix("2001::/32"), "a Teredo address"},
	{netip.MustParsePrefix("2001:2::/48"), "reserved for benchmarks"},
	{netip.MustParsePrefix("2001::/23"), "reserved for protocols"},
	{netip.MustParsePrefix("2001:db8::/32"), "reserved for documentation"},
	{netip.MustParsePrefix("2002::/16"), "a 6to4 address"},
	{netip.MustParsePrefix("2620:4f:8000::/48"), "reserved for protocols"},
	{netip.MustParsePrefix("3ffe::/16"), "reserved"},
	{netip.MustParsePrefix("3fff::/20"), "reserved for documentation"},
	{netip.MustParsePrefix("fc00::/7"), "private"},
	{netip.MustParsePrefix("fe80::/10"), linkLocal},
	{netip.MustParsePrefix("fec0::/10"), "site-local"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
}

var (
	globalV6 = netip.MustParsePrefix("2000::/3")
	nat64    = netip.MustParsePrefix("64:ff9b::/96")
)

// DeniedRanges returns the ranges that the zero Policy denies because they are not public, for
// firewall rules. The zero Policy also denies all IPv6 addresses outside 2000::/3 and 64:ff9b::/96,
// and single addresses of metadata services.
func DeniedRanges() []netip.Prefix {
	ranges := make([]netip.Prefix, len(specials))
	for i, s := range specials {
		ranges[i] = s.prefix
	}
	return ranges
}

// special returns the kind of an address that is not public, or "".
func special(a netip.Addr) string {
	for _, s := range specials {
		if s.prefix.Contains(a) {
			return s.kind
		}
	}
	if a.Is6() && !globalV6.Contains(a) && !nat64.Contains(a) {
		return "reserved"
	}
	return ""
}

func isatap(a netip.Addr) bool {
	b := a.As16()
	return a.Is6() && b[8]&^2 == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe
}

// embedded returns the IPv4 addresses that an IPv6 address may contain, the one in the last four
// bytes first.
func embedded(a netip.Addr) []netip.Addr {
	if !a.Is6() {
		return nil
	}
	b := a.As16()
	v4 := func(b0, b1, b2, b3 byte) netip.Addr { return netip.AddrFrom4([4]byte{b0, b1, b2, b3}) }
	inner := []netip.Addr{v4(b[12], b[13], b[14], b[15])}
	switch {
	case b[0] == 0x20 && b[1] == 0x02: // 6to4
		inner = append(inner, v4(b[2], b[3], b[4], b[5]))
	case b[0] == 0x20 && b[1] == 0x01 && b[2] == 0 && b[3] == 0: // Teredo: the server, and the client inverted
		inner = append(inner, v4(b[4], b[5], b[6], b[7]), v4(^b[12], ^b[13], ^b[14], ^b[15]))
	case strings.HasPrefix(string(b[:]), "\x00\x64\xff\x9b\x00\x01"): // RFC 6052: prefixes of 48, 56, 64 and 96 bits
		inner = append(inner, v4(b[6], b[7], b[9], b[10]), v4(b[7], b[9], b[10], b[11]), v4(b[9], b[10], b[11], b[12]))
	case globalV6.Contains(a) && !isatap(a):
		return nil // a public address may end in any four bytes
	}
	return inner
}

// parseHost returns the form of a URL's host that is resolved and compared: lower-case ASCII
// without a final dot, or the address.
func parseHost(host string) (name string, addr netip.Addr, err error) {
	if inner, ok := strings.CutPrefix(host, "["); ok {
		if host, ok = strings.CutSuffix(inner, "]"); !ok {
			return "", addr, errors.New("host has an unbalanced bracket")
		}
	}
	if strings.ContainsAny(host, ":%") {
		addr, err := netip.ParseAddr(host)
		switch {
		case err != nil || !addr.Is6():
			return "", netip.Addr{}, fmt.Errorf("host %q is not an IPv6 address", host)
		case addr.Zone() != "":
			return "", netip.Addr{}, fmt.Errorf("host %q has a zone, which is valid on one machine only; remove it", host)
		}
		return addr.String(), addr, nil
	}
	invalid := fmt.Errorf("host %q is neither a host name nor an address; correct it", host)
	// Maps the characters that browsers map: full-width digits, ideographic dots, upper case.
	name = strings.ToLower(host)
	if strings.ContainsFunc(name, func(r rune) bool { return r >= 0x80 }) {
		if name, err = idna.Lookup.ToASCII(name); err != nil {
			return "", addr, invalid
		}
	}
	name = strings.TrimSuffix(name, ".")
	if len(name) > 253 {
		return "", addr, invalid
	}
	labels := strings.Split(name, ".")
	for _, label := range labels {
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return "", addr, invalid
		}
	}
	// No top-level domain is a number, but some resolvers read a number as (a part of) an IPv4
	// address: 127.1, 0x7f.0.0.1, 2130706433.
	if last := labels[len(labels)-1]; isNumber(last) {
		if addr, err = netip.ParseAddr(name); err != nil {
			return "", netip.Addr{}, fmt.Errorf("host %q is an address in a form that programs read differently; write an IPv4 address as four decimal numbers", host)
		}
	}
	return name, addr, nil
}

func isNumber(label string) bool {
	if hex, ok := strings.CutPrefix(label, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(label, "0123456789") == ""
}
