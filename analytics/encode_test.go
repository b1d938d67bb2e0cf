package analytics

import (
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/analytics/event"
)

type named map[string]interface{}

type point struct {
	X int `json:"x"`
	Y *int
}

// The sent JSON must be equivalent to the output of encoding/json for the same value.
func TestEncodeIsEquivalentToEncodingJSON(t *testing.T) {
	values := map[string]interface{}{
		"nil": nil, "true": true, "int": -7, "int8": int8(-8), "int32": int32(-1 << 31), "int64": int64(math.MinInt64),
		"uint": uint(7), "uint16": uint16(9), "uint32": uint32(math.MaxUint32), "uint64": uint64(math.MaxUint64),
		"zero": 0.0, "negative zero": math.Copysign(0, -1), "half": 0.5, "tiny": 5e-324, "small": 1e-7, "edge": 1e-6,
		"large": 1e20, "larger": 1e21, "max": math.MaxFloat64, "third": 1.0 / 3, "float32": float32(0.1), "float32 large": float32(3e38),
		"empty": "", "quotes": `"\/`, "controls": "\x00\x01\b\f\n\r\t\x1f\x7f", "html": "<a href='x'>&</a>",
		"unicode": "é😀\u2028\u2029\ufeff", "invalid": "a\xffb\xc3", "surrogate": "\xed\xa0\x80", "nul key\x00\"": 1,
		"map":     map[string]interface{}{"a": map[string]interface{}{"b": []interface{}{1, "2", nil, map[string]interface{}{}}}},
		"nil map": map[string]interface{}(nil), "nil slice": []interface{}(nil), "nil strings": []string(nil), "no strings": []string{},
		"strings": []string{"a", "\""}, "ints": []int{1, 2}, "bytes": []byte("bytes"), "named": named{"k": named{"l": 1}},
		"struct": point{X: 1}, "pointer": &point{X: 2, Y: new(int)}, "raw": json.RawMessage(`{"r": [1]}`), "number": json.Number("12.50"),
		"time": time.Date(2026, 1, 2, 3, 4, 5, 678_000_000, time.FixedZone("", 3600)), "string map": map[string]string{"a": "b"}, "int map": map[int]bool{1: true},
	}
	for name, value := range values {
		t.Run(name, func(t *testing.T) { sameJSON(t, map[string]interface{}{name: value}) })
	}
	sameJSON(t, values)
}

func FuzzEncode(f *testing.F) {
	for _, seed := range []string{`{}`, `{"a":[1,2.5e-9,"x\u0000\ud800",{"b":null}]}`, `[[[]]]`, `"\u2028"`, `1e400`, `-0`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var value interface{}
		if json.Unmarshal(text, &value) == nil {
			sameJSON(t, map[string]interface{}{"value": value, string(text): string(text)})
		}
	})
}

func sameJSON(t *testing.T, m map[string]interface{}) {
	t.Helper()
	ours, err := appendMap(nil, m, 1)
	if errors.Is(err, errTooDeep) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := decode(t, ours), decode(t, theirs); !reflect.DeepEqual(got, want) {
		t.Errorf("encoding: got\n%s\nwant JSON that is equivalent to\n%s", ours, theirs)
	}
}

func decode(t *testing.T, text []byte) (value interface{}) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(string(text)))
	if err := d.Decode(&value); err != nil {
		t.Fatalf("decode %s: got error %v, want none", text, err)
	}
	if d.More() {
		t.Fatalf("JSON values: got more than one, want one: %s", text)
	}
	return value
}

func TestEncodeErrors(t *testing.T) {
	loop := map[string]interface{}{}
	loop["loop"] = []interface{}{loop}
	for name, test := range map[string]struct {
		call  Call
		field string
	}{
		"NaN":       {&Track{UserId: "u", Event: "e", Properties: map[string]interface{}{"a": math.NaN()}}, "properties"},
		"infinity":  {&Identify{UserId: "u", Traits: map[string]interface{}{"a": []interface{}{float32(math.Inf(-1))}}}, "traits"},
		"channel":   {&Page{UserId: "u", Context: map[string]interface{}{"a": make(chan int)}}, "context"},
		"loop":      {&Group{UserId: "u", GroupId: "g", Traits: loop}, "traits"},
		"bad field": {&Alias{UserId: "u", PreviousId: "p", Integrations: map[string]interface{}{"a": func() {}}}, "integrations"},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := test.call.call()
			if err != nil {
				t.Fatal(err)
			}
			_, _, err = c.append(nil, time.Now())
			var e *EncodeError
			if !errors.As(err, &e) || e.Field != test.field || !strings.Contains(e.Error(), test.field) || e.Unwrap() == nil {
				t.Errorf("got %v, want an EncodeError of %s", err, test.field)
			}
		})
	}
}

func TestDeepestCallFits(t *testing.T) {
	for levels, ok := range map[int]bool{event.MaxDepth: true, event.MaxDepth + 1: false} {
		m := map[string]interface{}{"leaf": 1}
		for range levels - 2 { // The call's object and m are two more levels.
			m = map[string]interface{}{"m": m}
		}
		c := call{kind: track, properties: m}
		if _, _, err := c.append(nil, time.Now()); (err == nil) != ok {
			t.Errorf("call with %d levels: got error %v, want success: %v", levels, err, ok)
		}
	}
}

func TestMessageIDIsFound(t *testing.T) {
	for _, id := range []string{"", "id", `needs "escapes"` + "\n", "ünï", strings.Repeat("日", 100), strings.Repeat("\U0001f600", 100),
		strings.Repeat("x", 100), strings.Repeat("\x01", 100)} {
		b := batch{}
		var err error
		b.items = make([]item, 2)
		for i := range b.items {
			c := call{kind: track, message: Message{MessageId: id}, userID: "u", event: "e"}
			from := len(b.body)
			if b.body, b.items[i], err = c.append(b.body, time.Now()); err != nil {
				t.Fatal(err)
			}
			if int(b.items[i].start) != from || int(b.items[i].end) != len(b.body) {
				t.Fatalf("position of item %d: got %+v, want %d to %d", i, b.items[i], from, len(b.body))
			}
			var sent struct{ MessageID string }
			if err := json.Unmarshal(b.message(i), &sent); err != nil {
				t.Fatal(err)
			}
			if got := b.messageID(i); got != sent.MessageID || got == "" || id != "" && got != id {
				t.Errorf("message id %q: got %q, want %q as sent", id, got, sent.MessageID)
			}
		}
	}
}

func TestUUID(t *testing.T) {
	at := time.UnixMilli(0x0123456789ab)
	seen := map[string]bool{}
	for range 10_000 {
		id := string(appendUUID(nil, at))
		if len(id) != uuidLen || !strings.HasPrefix(id, "01234567-89ab-7") || id[18] != '-' || id[23] != '-' ||
			!strings.Contains("89ab", id[19:20]) {
			t.Fatalf("id: got %s, want a UUID of version 7", id)
		}
		if seen[id] {
			t.Fatalf("id: got %s twice, want unique ids", id)
		}
		seen[id] = true
	}
}

func TestDebugEnabled(t *testing.T) {
	for value, want := range map[string]bool{
		"": false, "analytics": true, "other": false, "http,analytics": true, "a analytics b": true, "*": true, "ana*": true, "analytics2": false,
		"[": false,
	} {
		if debugEnabled(value) != want {
			t.Errorf("debugEnabled(%q): got %v, want %v", value, !want, want)
		}
	}
}

func TestRetryable(t *testing.T) {
	for status := 100; status < 700; status++ {
		want := status == 408 || status == 429 || status >= 500
		if retryable(status) != want {
			t.Errorf("retryable(%d): got %v, want %v", status, !want, want)
		}
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for value, want := range map[string]time.Duration{
		"": 0, "0": 0, "7": 7 * time.Second, "-1": 0, "x": 0, "1.5": 0, "99999999999": 0,
		"Fri, 02 Jan 2026 03:05:05 GMT": time.Minute, "Fri, 02 Jan 2026 03:03:05 GMT": 0,
	} {
		if got := retryAfter(value, now); got != want {
			t.Errorf("retryAfter(%q): got %v, want %v", value, got, want)
		}
	}
}

func TestBackoff(t *testing.T) {
	want := []time.Duration{100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000}
	for i, ms := range want {
		if got := (exponential{}).Duration(i); got != ms*time.Millisecond {
			t.Errorf("backoff of attempt %d: got %v, want %v ms", i, got, int64(ms))
		}
	}
	for _, attempt := range []int{-1, 63, 64, 1 << 40} {
		if got := (exponential{}).Duration(attempt); got <= 0 || got > 10*time.Second {
			t.Errorf("backoff of attempt %d: got %v, want more than 0 and at most 10s", attempt, got)
		}
	}
}

// A transport that continues to read after its answer must not see another batch.
func TestRevokedPayload(t *testing.T) {
	p := &payload{data: []byte("abc")}
	r := p.reader()
	one := make([]byte, 1)
	if n, err := r.Read(one); n != 1 || err != nil {
		t.Fatalf("read: got %d bytes and error %v, want 1 byte", n, err)
	}
	p.revoke()
	if n, err := r.Read(one); n != 0 || !errors.Is(err, errRevoked) {
		t.Errorf("read after revoke: got %d bytes and error %v, want %v", n, err, errRevoked)
	}
}
