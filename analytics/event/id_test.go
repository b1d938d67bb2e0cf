package event

import (
	"encoding/json"
	"net/url"
	"testing"
	"unicode/utf8"
)

// Different messageIds remain different from the request to the receiver's header, and in the JSON of the admin API.
func TestIDsAreInjective(t *testing.T) {
	texts := []string{`order 17`, `order+17`, `order%2B17`, `order%2017`, `a\ud83d`, `a\ude00`, `a\ud83d\ude00`, `a\ude00\ud83d`, `a�`,
		`a\ufffd1`, `日本`, `%E6%97%A5%E6%9C%AC`,
		`a.b`, `a~b_-`, `a\u0000`, `a\r\nX: 1`, `a\u007f`, `\"q\"`, `<&>`, `a/b`, `022bb90c-bbac-11e4-8dfc-aa07a5b093db`}
	keys, bodies := map[string]string{}, map[string]string{}
	for _, text := range texts {
		batch, err := request(Page).Parse([]byte(`{"userId":"u","messageId":"` + text + `"}`))
		if err != nil {
			t.Fatal(err)
		}
		id := ID(batch.Calls[0].MessageID)
		key := id.Key()
		if decoded, err := url.PathUnescape(key); err != nil || decoded != string(id) {
			t.Errorf("key %s of %s: decoded to %q with error %v, want %q", key, text, decoded, err, id)
		}
		if other, ok := keys[key]; ok {
			t.Errorf("key %s: got it for %s and for %s", key, text, other)
		}
		keys[key] = text
		out, err := json.Marshal(id)
		if err != nil || !utf8.Valid(out) || bodies[string(out)] != "" {
			t.Errorf("JSON of %s: got %s with error %v, like %s, want one of its own", text, out, err, bodies[string(out)])
		}
		bodies[string(out)] = text
		var back ID
		if err := json.Unmarshal(out, &back); err != nil || back != id {
			t.Errorf("read %s: got %q with error %v, want %q", out, back, err, id)
		}
	}
	for id, want := range map[ID]string{"": "", "order 17": "order%2017", "order+17": "order%2B17", "50%": "50%25", "日": "%E6%97%A5",
		"a\xed\xa0\xbd": "a%ED%A0%BD", "AZaz09-._~": "AZaz09-._~", "!*'()": "%21%2A%27%28%29"} {
		if got := id.Key(); got != want {
			t.Errorf("key of %q: got %s, want %s", id, got, want)
		}
	}
	var id ID
	for _, bad := range []string{`7`, `null`, `{}`} {
		if err := id.UnmarshalJSON([]byte(bad)); err == nil {
			t.Errorf("read %s: got no error, want one", bad)
		}
	}
	if got, err := ID("a\xff\xed\xa0").MarshalJSON(); err != nil || string(got) != `"a���"` {
		t.Errorf("JSON of bytes that are no id: got %s with error %v", got, err)
	}
}
