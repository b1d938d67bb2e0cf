package system

import (
	"net/http"
	"strings"
	"testing"
)

// posthorn test sends a signed event to a destination whose receiver fails or accepts, and the ledger does not count it.
func TestTestEvent(t *testing.T) {
	r := newReceiver(t)
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	test := func(code int, args string, words ...string) string {
		t.Helper()
		out, errs, got := cli(t, "", append([]string{"test", "--admin", p.Admin}, strings.Fields(args)...)...)
		for _, want := range words {
			if got != code || !strings.Contains(out+errs, want) {
				t.Errorf("test %s: got exit code %d and\n%s%swant %d and %q", args, got, out, errs, code, want)
			}
		}
		return out
	}
	test(0, "crm", "default/crm primary: accepted: 200 after ", "messageId posthorn-test-")
	r.set(func(int) int { return http.StatusNotFound })
	test(1, "crm -o yaml", "statusCode: 404", "reason: Rejected", "test: true")
	test(1, "crm --endpoint primary", "failed: Rejected 404 after ", "To do: check the path of the URL.")
	test(2, "crm -A", "unknown shorthand flag")
	test(1, "cmr", "did you mean crm?")
	test(1, "crm --endpoint eu", `no endpoint "eu" of default/crm; use one of primary`)
	if r.unsigned != 0 {
		t.Errorf("test events without a valid signature: got %d, want 0", r.unsigned)
	}
	if delivered, pending, dead, discarded := p.ledger("crm"); delivered+pending+dead+discarded != 0 {
		t.Errorf("ledger: got %d delivered, %d pending, %d dead letters, %d discarded; want none", delivered, pending, dead, discarded)
	}
	out, _, _ := cli(t, "", "attempts", "crm", "--admin", p.Admin)
	if strings.Count(out, "(test)") != 3 || !strings.Contains(out, "200 (test)") {
		t.Errorf("attempts: got\n%s\nwant three tests, the first with 200", out)
	}
}

// A dead letter is shown by its key, its messageId, or the begin of either.
func TestShowADeadLetterByItsMessageID(t *testing.T) {
	r := newReceiver(t)
	r.set(func(int) int { return http.StatusUnprocessableEntity })
	p := start(t, map[string]string{"source.yaml": source(), "crm.yaml": destination("crm", r.URL, "")})
	for _, id := range []string{"order-1701", "order-1702", "other"} {
		p.mustPost("/v1/track", `{"userId":"u","event":"E","messageId":"`+id+`"}`)
	}
	p.ledger("crm")
	for key, want := range map[string]struct {
		code int
		text string
	}{
		"order-1702": {0, `"messageId": "order-1702"`}, "order-1701": {0, `"messageId": "order-1701"`}, "other": {0, `"messageId": "other"`},
		"order-": {1, "several dead letters of default/crm begin with order-"}, "oth": {1, "has no dead letter oth"},
	} {
		if out, errs, code := cli(t, "", "deadletters", "show", "crm", key, "--admin", p.Admin); code != want.code ||
			!strings.Contains(out+errs, want.text) {
			t.Errorf("show %s: got exit code %d and %s%s, want %d and %s", key, code, out, errs, want.code, want.text)
		}
	}
	if out, _, code := cli(t, "", "slots", "--admin", p.Admin); code != 0 || out != "" {
		t.Errorf("slots without a replicated log: got exit code %d and %q, want 0 and nothing", code, out)
	}
}
