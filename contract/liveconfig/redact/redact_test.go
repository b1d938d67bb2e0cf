package redact

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/check"
)

const key = "pseudonym-key"

// pseudonym is the hash of a text, as a JSON string.
func pseudonym(text string) string {
	mac := hmac.New(sha256.New, []byte(key))
	mac.Write([]byte(text))
	return `"` + hex.EncodeToString(mac.Sum(nil)) + `"`
}

// rules reads rules such as "drop a.b; hash userId; email traits.email; allow c".
func rules(text string) *liveconfig.Redact {
	r := &liveconfig.Redact{}
	for rule := range strings.SplitSeq(text, ";") {
		list, path, _ := strings.Cut(strings.TrimSpace(rule), " ")
		switch list {
		case "allow":
			r.Allow = append(r.Allow, path)
		case "drop":
			r.Drop = append(r.Drop, path)
		case "mask":
			r.Mask = append(r.Mask, path)
		case "hash", "email":
			if r.Hash == nil {
				r.Hash = &liveconfig.RedactHash{Key: liveconfig.NewSecret(key)}
			}
			r.Hash.Paths = append(r.Hash.Paths, liveconfig.HashedPath{Path: path, Email: list == "email"})
		}
	}
	return r
}

func TestApply(t *testing.T) {
	const message = `{"type":"track","event":"Paid","messageId":"m1","userId":"u1","context":{"ip":"203.0.113.7","app":{"n":1.50}},` +
		`"properties":{"total":12345678901234567890,"e-mail":" Ann@Example.ORG ","ok":true,"none":null,` +
		`"products":[{"sku":"a","price":1},{"price":2,"sku":"b"},"c"]}}`
	for _, c := range []struct{ rules, want string }{
		{"drop context.ip", strings.Replace(message, `"ip":"203.0.113.7",`, "", 1)},
		{"drop context.app", strings.Replace(message, `,"app":{"n":1.50}`, "", 1)},
		{"drop context.ip; drop context.app", strings.Replace(message, `"ip":"203.0.113.7","app":{"n":1.50}`, "", 1)},
		{"drop context.*", strings.Replace(message, `"ip":"203.0.113.7","app":{"n":1.50}`, "", 1)},
		{"mask context", strings.Replace(message, `{"ip":"203.0.113.7","app":{"n":1.50}}`, Mask, 1)},
		{"mask properties.none; hash properties.none", message},
		{"hash userId", strings.Replace(message, `"u1"`, pseudonym("u1"), 1)},
		{"hash properties.total", strings.Replace(message, "12345678901234567890", pseudonym("12345678901234567890"), 1)},
		{"hash context.app", strings.Replace(message, `{"n":1.50}`, pseudonym(`{"n":1.50}`), 1)},
		{`email properties["e-mail"]`, strings.Replace(message, `" Ann@Example.ORG "`, pseudonym("ann@example.org"), 1)},
		{`hash properties["e-mail"]`, strings.Replace(message, `" Ann@Example.ORG "`, pseudonym(" Ann@Example.ORG "), 1)},
		{"drop properties.products[*].sku", strings.NewReplacer(`"sku":"a",`, "", `,"sku":"b"`, "").Replace(message)},
		{"drop properties.products.*.sku", strings.NewReplacer(`"sku":"a",`, "", `,"sku":"b"`, "").Replace(message)},
		{"drop properties.products[*]", strings.Replace(message, `{"sku":"a","price":1},{"price":2,"sku":"b"},"c"`, "", 1)},
		{"drop missing.ip; mask userId.x; hash properties.products.sku", message},
		{"mask *", `{"type":"track","event":"Paid","messageId":"m1","userId":"***","context":"***","properties":"***"}`},
		{"drop userId; mask userId; hash userId", strings.Replace(message, `"userId":"u1",`, "", 1)},
		{"allow userId; allow context.app; allow properties.products[*].price; hash userId",
			`{"type":"track","event":"Paid","messageId":"m1","userId":` + pseudonym("u1") + `,"context":{"app":{"n":1.50}},` +
				`"properties":{"products":[{"price":1},{"price":2}]}}`},
		{"allow context; drop context.ip", `{"type":"track","event":"Paid","messageId":"m1","context":{"app":{"n":1.50}}}`},
		{"allow context.ip; hash context", `{"type":"track","event":"Paid","messageId":"m1","context":"***"}`},
		{"allow userId.x", `{"type":"track","event":"Paid","messageId":"m1"}`},
	} {
		r, err := New(rules(c.rules))
		check.NoError(t, c.rules, err)
		got, _, err := r.Apply([]byte(message))
		check.NoError(t, c.rules, err)
		if diff := cmp.Diff(c.want, string(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.rules, diff)
		}
	}
}

// The stricter of two sets of rules applies to each value, and the key of the last one.
func TestStricterRules(t *testing.T) {
	const message = `{"type":"track","userId":"u1","a":1,"b":{"c":2,"d":3},"e":4}`
	withoutKey := rules("hash userId; hash a")
	withoutKey.Hash.Key = liveconfig.Secret{}
	for _, c := range []struct {
		name        string
		before, now *liveconfig.Redact
		want        string
	}{
		{"one has no rules", rules("drop a"), nil, `{"type":"track","userId":"u1","b":{"c":2,"d":3},"e":4}`},
		{"drop and mask", rules("drop a; mask b.c"), rules("mask a; drop b.c"), `{"type":"track","userId":"u1","b":{"d":3},"e":4}`},
		{"both allow", rules("allow a; allow b"), rules("allow b.c; allow e"), `{"type":"track","b":{"c":2}}`},
		{"one allows", rules("allow a; allow b"), rules("drop b.c"), `{"type":"track","a":1,"b":{"d":3}}`},
		{"the key of now", withoutKey, rules("hash e"), `{"type":"track","userId":` + pseudonym("u1") + `,"a":` + pseudonym("1") +
			`,"b":{"c":2,"d":3},"e":` + pseudonym("4") + `}`},
		{"no key", withoutKey, nil, `{"type":"track","userId":"***","a":"***","b":{"c":2,"d":3},"e":4}`},
	} {
		r, err := New(c.before, c.now)
		check.NoError(t, c.name, err)
		got, _, err := r.Apply([]byte(message))
		check.NoError(t, c.name, err)
		if diff := cmp.Diff(c.want, string(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
	if r, err := New(nil, nil); r != nil || err != nil {
		t.Errorf("no rules: got %v, %v; want nil", r, err)
	}
}

// Texts with escapes have the hash of their characters, and keys with escapes are found.
func TestEscapes(t *testing.T) {
	r, err := New(rules(`hash a; hash ["q\"k\u2028"]`))
	check.NoError(t, "compile", err)
	got, _, err := r.Apply([]byte(`{"a":"x\"\\\u00e9","q\"k\u2028":"y"}`))
	check.NoError(t, "apply", err)
	if want := `{"a":` + pseudonym("x\"\\\u00e9") + `,"q\"k\u2028":` + pseudonym("y") + `}`; string(got) != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestMatchedPaths(t *testing.T) {
	r, err := New(rules("drop a.b"), rules("drop a.b; mask c; hash d; allow a; allow c; allow d"))
	check.NoError(t, "compile", err)
	_, matched, err := r.Apply([]byte(`{"a":{"b":1},"d":null}`))
	check.NoError(t, "apply", err)
	var got []string
	for i, path := range r.Paths() {
		if matched&(1<<i) != 0 {
			got = append(got, path)
		}
	}
	if diff := cmp.Diff([]string{"allow[a]", "allow[d]", "drop[a.b]", "hash.paths[d]"}, got); diff != "" {
		t.Errorf("matched paths (-want +got):\n%s", diff)
	}
}

func TestHashesAreBounded(t *testing.T) {
	r, err := New(rules("hash a[*]"))
	check.NoError(t, "compile", err)
	got, _, err := r.Apply([]byte(`{"a":[` + strings.Repeat("1,", MaxHashes) + `1]}`))
	check.NoError(t, "apply", err)
	if n := bytes.Count(got, []byte(pseudonym("1"))); n != MaxHashes {
		t.Errorf("hashes: got %d, want %d", n, MaxHashes)
	}
	if !bytes.HasSuffix(got, []byte(Mask+"]}")) {
		t.Errorf("the value after the last hash: got %s, want %s", got[len(got)-10:], Mask)
	}
}

func TestNotifiesUser(t *testing.T) {
	for text, want := range map[string]bool{"drop context": true, "hash userId": true, "email userId": true, "allow userId": true,
		"allow *": true, "drop userId": false, "mask userId": false, "mask *": false, "drop *": false, "allow context": false} {
		without := rules(text)
		if without.Hash != nil {
			without.Hash.Key = liveconfig.Secret{} // A missing key is another problem.
		}
		r, err := New(without)
		check.NoError(t, text, err)
		if got := r.NotifiesUser(); got != want {
			t.Errorf("%s: got %v, want %v", text, got, want)
		}
	}
}

func TestErrors(t *testing.T) {
	many := strings.Repeat("; drop x", MaxPaths+1)
	for i := range MaxPaths + 1 {
		many = strings.Replace(many, "x", fmt.Sprint("p", i), 1)
	}
	for text, want := range map[string]string{
		"drop $.a":                          "without $",
		"drop a..b":                         "no empty parts",
		"drop a.":                           "no empty parts",
		"drop .a":                           "no empty parts",
		"drop a[0]":                         "begins with '.' or is [*]",
		"drop a b":                          "is not a key",
		"drop a*":                           "is not a key",
		`drop a["b"`:                        "a key in brackets",
		`drop a["b`:                         "a key in brackets",
		"drop ":                             "0 characters",
		"drop " + strings.Repeat("a", 257):  "257 characters",
		"drop " + strings.Repeat("a.", 16):  "no empty parts",
		"mask a" + strings.Repeat(".a", 16): "17 parts",
		"mask messageId":                    "always passes",
		`hash ["event"].x`:                  "always passes",
		"drop a; drop a":                    "listed twice",
		many:                                "more than 64 paths",
	} {
		if _, err := New(rules(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: got %v, want an error with %q", text, err, want)
		}
	}
	r, err := New(rules("drop a.b"))
	check.NoError(t, "compile", err)
	for _, message := range []string{"", "[]", `"a"`, `{`, `{"a"}`, `{"a":}`, `{"a":1`, `{"a":"b`, `{"a":1}x`, `{"a":{"b":]}`, `{"c":{"b":1}`, `{"a" 1}`} {
		if got, _, err := r.Apply([]byte(message)); err == nil {
			t.Errorf("%s: got %s, want an error", message, got)
		}
	}
}

func TestNoAllocation(t *testing.T) {
	message := []byte(`{"type":"track","context":{"library":{"name":"x"}},"properties":{"total":1}}`)
	r, err := New(rules("drop context.ip; mask traits.email; hash userId"))
	check.NoError(t, "compile", err)
	if n := testing.AllocsPerRun(100, func() {
		if out, _, _ := r.Apply(message); &out[0] != &message[0] {
			t.Error("got a copy; want the message itself")
		}
	}); n != 0 {
		t.Errorf("allocations: got %v, want 0", n)
	}
}

// FuzzApply compares Apply with a slow implementation.
func FuzzApply(f *testing.F) {
	f.Add(`{"a":{"b":[1,{"c":"x"}]},"type":"t"}`, "drop a.b[*].c; mask a.*; hash *", "allow a.b")
	f.Fuzz(func(t *testing.T, message, first, second string) { compare(t, message, first, second) })
}

func TestRandomRules(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	keys := []string{"a", "b", "c", "type"}
	var value func(depth int) string
	value = func(depth int) string {
		n := random.IntN(4)
		switch kind := random.IntN(8); {
		case kind < 4 && depth > 0:
			parts := make([]string, n)
			for i := range parts {
				parts[i] = fmt.Sprintf("%q:%s", keys[random.IntN(4)], value(depth-1))
			}
			return "{" + strings.Join(parts, ",") + "}"
		case kind < 6 && depth > 0:
			parts := make([]string, n)
			for i := range parts {
				parts[i] = value(depth - 1)
			}
			return "[" + strings.Join(parts, ",") + "]"
		}
		return []string{"1.5", `"x"`, "null", `" A@b "`, "true"}[random.IntN(5)]
	}
	rules := func() string {
		var list []string
		for range random.IntN(5) {
			path := []string{"a", "b", "c", "*", "*"}[random.IntN(5)]
			for range random.IntN(3) {
				path += []string{".a", ".b", ".c", ".*", "[*]"}[random.IntN(5)]
			}
			list = append(list, []string{"allow", "drop", "mask", "hash", "email"}[random.IntN(5)]+" "+path)
		}
		return strings.Join(list, "; ")
	}
	for range 20_000 {
		compare(t, fmt.Sprintf(`{"a":%s,"b":%s,"type":%s}`, value(4), value(3), value(1)), rules(), rules())
	}
}

// compare fails the test if Apply differs from the slow implementation.
func compare(t *testing.T, message, first, second string) {
	canonical, err := event.Canonical([]byte(message))
	if err != nil || canonical[0] != '{' {
		return
	}
	sets := []*liveconfig.Redact{rules(first), rules(second)}
	r, err := New(sets...)
	if err != nil {
		return
	}
	before := bytes.Clone(canonical)
	got, _, err := r.Apply(canonical)
	if err != nil {
		t.Fatalf("%s: got error %v, want none", canonical, err)
	}
	want, _ := slow(canonical, nil, sets)
	if string(got) != want {
		t.Fatalf("message %s\nfirst %s\nsecond %s\n got %s\nwant %s", canonical, first, second, got, want)
	}
	if !bytes.Equal(canonical, before) {
		t.Fatalf("the message was changed: got %s, want %s", canonical, before)
	}
}

// slow redacts a value at a place, whose array indexes are "#". kept is false for a dropped value.
func slow(value []byte, place []string, sets []*liveconfig.Redact) (out string, kept bool) {
	if len(place) == 1 && slices.Contains(fixed, place[0]) {
		return string(value), true
	}
	matches := func(path string, exact bool) (matched, longer bool) {
		segments, _ := parse(path)
		for i := range min(len(segments), len(place)) {
			if !segments[i].any && segments[i].key != place[i] {
				return false, false
			}
		}
		return len(segments) == len(place) || !exact && len(segments) < len(place), len(segments) > len(place)
	}
	container := value[0] == '{' || value[0] == '['
	do, email, partly := keep, false, false
	apply := func(path string, a action) {
		if matched, _ := matches(path, true); matched {
			do = max(do, a)
		}
	}
	for _, r := range sets {
		allowed, leads := len(r.Allow) == 0, false
		for _, path := range r.Allow {
			matched, longer := matches(path, false)
			allowed, leads = allowed || matched, leads || longer
		}
		if !allowed && (!leads || !container) {
			return "", false
		}
		partly = partly || !allowed
		for _, path := range r.Drop {
			apply(path, dropped)
		}
		for _, path := range r.Mask {
			apply(path, masked)
		}
		if r.Hash != nil {
			for _, h := range r.Hash.Paths {
				apply(h.Path, hashed)
				matched, _ := matches(h.Path, true)
				email = email || matched && h.Email
			}
		}
	}
	switch text := string(value); {
	case do == dropped:
		return "", false
	case do != keep && text == "null":
		return text, true
	case do == masked, do == hashed && partly:
		return Mask, true
	case do == hashed:
		if value[0] == '"' {
			var id event.ID
			_ = json.Unmarshal(value, &id)
			if text = string(id); email {
				text = strings.ToLower(strings.TrimSpace(text))
			}
		}
		return pseudonym(text), true
	case !container:
		return text, true
	}
	d := json.NewDecoder(bytes.NewReader(value))
	opening, _ := d.Token()
	var parts []string
	for d.More() {
		prefix, name := "", "#"
		if opening == json.Delim('{') {
			start := d.InputOffset()
			_, _ = d.Token()
			raw := bytes.TrimPrefix(value[start:d.InputOffset()], []byte(","))
			var id event.ID // A token has lone surrogates replaced.
			_ = json.Unmarshal(raw, &id)
			prefix, name = string(raw)+":", string(id)
		}
		var raw json.RawMessage
		_ = d.Decode(&raw)
		if part, ok := slow(raw, append(slices.Clone(place), name), sets); ok {
			parts = append(parts, prefix+part)
		}
	}
	return string(value[0]) + strings.Join(parts, ",") + string(value[0]+2), true
}

func BenchmarkApply(b *testing.B) {
	message := []byte(`{"type":"track","event":"Order Completed","messageId":"order-17","userId":"user-12345","anonymousId":"a-1",` +
		`"context":{"ip":"203.0.113.7","library":{"name":"analytics.js","version":"2.11.1"},"page":{"path":"/checkout","url":"https://shop.example/checkout"},` +
		`"userAgent":"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/126.0 Safari/537.36"},` +
		`"properties":{"total":49.9,"currency":"EUR","email":"ann@example.org","products":[{"sku":"a","price":1},{"sku":"b","price":2}]},` +
		`"timestamp":"2026-01-02T15:04:05.000Z","receivedAt":"2026-01-02T15:04:05.000Z","version":1}`)
	r, err := New(rules("drop context.ip; mask properties.email; hash userId"))
	check.NoError(b, "compile", err)
	b.SetBytes(int64(len(message)))
	b.ReportAllocs()
	for b.Loop() {
		_, _, _ = r.Apply(message)
	}
}
