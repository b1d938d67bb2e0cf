package egress

import (
	"bytes"
	"log/slog"
	"net"
	"strings"
	"testing"
)

// Messages of attempts must not reveal the addresses of internal names to the owner of a
// destination. The log has the address for administrators.
func TestDeniedNameDoesNotShowItsAddress(t *testing.T) {
	const address = "10.11.12.13"
	var log bytes.Buffer
	c := New(Options{Logger: slog.New(slog.NewTextHandler(&log, nil)), Resolver: resolver(func(string) []string { return []string{address} })})
	t.Cleanup(c.Close)
	r := post(t, withTimeout(t, generousTimeout), c, secretEndpoint(t, c, "http://db.internal.example", nil))
	if r.Reason != AddressDenied || r.RemoteAddr != "" {
		t.Errorf("unexpected result %+v", r)
	}
	if strings.Contains(r.Message, "10.11") || strings.Contains(r.Message, "private") {
		t.Errorf("the message shows what the name resolves to: %s", r.Message)
	}
	for _, want := range []string{"db.internal.example", "ask an administrator", "egressAllow"} {
		if !strings.Contains(r.Message, want) {
			t.Errorf("the message lacks %q: %s", want, r.Message)
		}
	}
	if n := strings.Count(log.String(), "address="+address); n != 1 {
		t.Errorf("the log names the address %d times, want once:\n%s", n, &log)
	}

	// An address in the URL itself may be shown to the owner.
	r = post(t, withTimeout(t, generousTimeout), c, secretEndpoint(t, c, "http://"+net.JoinHostPort(address, "80"), nil))
	if r.Reason != AddressDenied || !strings.Contains(r.Message, "address "+address+" is private") {
		t.Errorf("an address in the URL: %+v", r)
	}
}
