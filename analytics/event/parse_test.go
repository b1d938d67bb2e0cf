package event

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/analytics/internal/check"
)

var received = time.Date(2026, 5, 4, 12, 0, 0, 123_999_999, time.UTC)

const receivedText = `"2026-05-04T12:00:00.123Z"`

// request returns a request with fixed metadata.
func request(t Type) Request {
	return Request{Type: t, ReceivedAt: received, NewID: func() string { return "new" }}
}

func members(t *testing.T, body []byte) map[string]json.RawMessage {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal(body, &m); err != nil {
		t.Fatalf("members of %s: got error %v, want none", body, err)
	}
	return m
}

// TestGolden parses a call of each type, and a batch of calls, and compares the messages with
// the golden files. With UPDATE_GOLDEN=1 it writes them.
func TestGolden(t *testing.T) {
	inputs, err := filepath.Glob("testdata/*.in.json")
	if err != nil || len(inputs) < 8 {
		t.Fatalf("inputs: got %d and error %v, want at least 8", len(inputs), err)
	}
	for _, path := range inputs {
		name := strings.TrimSuffix(filepath.Base(path), ".in.json")
		t.Run(name, func(t *testing.T) {
			in, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			r := request(Type(name))
			if strings.HasPrefix(name, "batch") {
				r.Type = ""
			}
			r.ClientIP, r.FromBrowser = netip.MustParseAddr("192.0.2.7"), true
			batch, err := r.Parse(in)
			if err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			for i, c := range batch.Calls {
				fmt.Fprintf(&got, "# call %d: %s messageId=%s event=%q userId=%q anonymousId=%q timestamp=%s\n%s\n", batch.Indexes[i], c.Type,
					c.MessageID, c.Event, c.UserID, c.AnonymousID, c.Timestamp.Format(time.RFC3339Nano), c.Body)
			}
			for _, r := range batch.Rejected {
				fmt.Fprintf(&got, "# call %d rejected: %v\n", r.Index, r.Err)
			}
			golden := strings.TrimSuffix(path, ".in.json") + ".golden"
			if os.Getenv("UPDATE_GOLDEN") != "" {
				if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			check.SameText(t, "messages", got.String(), string(want))
		})
	}
}

// TestMessage parses one call and checks members of its message. The message must not have
// a member with the value "".
func TestMessage(t *testing.T) {
	type want map[string]string
	tests := []struct {
		name string
		r    Request
		in   string
		want want
	}{
		{"missing parts are added", request(Identify), `{"userId":"u"}`,
			want{"type": `"identify"`, "messageId": `"new"`, "version": "1", "receivedAt": receivedText, "timestamp": receivedText,
				"originalTimestamp": "", "sentAt": "", "context": "{}", "integrations": "", "Previous ID": "", "User ID": ""}},
		{"the path's type wins", request(Screen), `{"type":"page","userId":"u"}`, want{"type": `"screen"`}},
		{"any type in the body of a path", request(Page), `{"type":7,"userId":"u"}`, want{"type": `"page"`}},
		{"version is 1", request(Page), `{"version":"2.0","userId":"u"}`, want{"version": "1"}},
		{"writeKey is removed", request(Page), `{"writeKey":"k","userId":"u"}`, want{"writeKey": ""}},
		{"receivedAt is ours", request(Page), `{"receivedAt":"1999-01-01T00:00:00Z","userId":"u"}`, want{"receivedAt": receivedText}},
		{"messageId is kept", request(Page), `{"messageId":"m-1","userId":"u"}`, want{"messageId": `"m-1"`}},
		{"empty messageId", request(Page), `{"messageId":"","userId":"u"}`, want{"messageId": `"new"`}},
		{"null messageId", request(Page), `{"messageId":null,"userId":"u"}`, want{"messageId": `"new"`}},
		{"numbers for strings", request(Track), `{"messageId":1,"userId":42,"anonymousId":1.50,"event":7e1}`,
			want{"messageId": `"1"`, "userId": `"42"`, "anonymousId": `"1.5"`, "event": `"70"`}},
		{"a large number for a string", request(Track), `{"userId":12345678901234567890,"event":"e"}`, want{"userId": `"12345678901234567890"`}},
		{"zero is an id", request(Page), `{"userId":0}`, want{"userId": `"0"`}},
		{"numbers for the ids of group", request(Group), `{"userId":"u","groupId":5}`, want{"groupId": `"5"`}},
		{"null and empty ids are kept", request(Page), `{"userId":null,"anonymousId":"a","groupId":"","previousId":null}`,
			want{"userId": "null", "anonymousId": `"a"`, "groupId": `""`, "previousId": "null"}},
		{"what is not ours is kept", request(Page), `{"userId":"u","x":{"b":1,"a":[2]},"category":null,"":0}`,
			want{"x": `{"b":1,"a":[2]}`, "category": "null", "": "0"}},
		{"duplicates: the last one counts", request(Page), `{"userId":5,"messageId":"a","userId":"u","message\u0049d":"b"}`,
			want{"userId": `"u"`, "messageId": `"b"`}},
		{"alias in both spellings", request(Alias), `{"previousId":7,"userId":"u"}`,
			want{"previousId": `"7"`, "userId": `"u"`, "Previous ID": `"7"`, "User ID": `"u"`}},
		{"alias: ours win", request(Alias), `{"Previous ID":"x","User ID":"y","previousId":"p","userId":"u"}`,
			want{"Previous ID": `"p"`, "User ID": `"u"`}},
		{"spelled ids elsewhere are the sender's", request(Page), `{"Previous ID":"x","userId":"u"}`, want{"Previous ID": `"x"`}},
		{"empty arrays for objects", request(Track), `{"userId":"u","event":"e","context":[],"integrations":[],"traits":[],"properties":[]}`,
			want{"context": "{}", "integrations": "{}", "traits": "{}", "properties": "{}"}},
		{"null for objects", request(Track), `{"userId":"u","event":"e","context":null,"integrations":null,"traits":null,"properties":null}`,
			want{"context": "{}", "integrations": "null", "traits": "null", "properties": "null"}},
		{"escapes in ids", request(Page), `{"userId":"\u003c\u2028\"\ud800"}`, want{"userId": "\"<\u2028\\\"\\ud800\""}},
	}
	ip := request(Page)
	ip.ClientIP, ip.FromBrowser = netip.MustParseAddr("2001:db8::1"), true
	const ipText = `"ip":"2001:db8::1"`
	for name, c := range map[string][2]string{
		"no context":        {`{"userId":"u"}`, `{` + ipText + `}`},
		"null context":      {`{"userId":"u","context":null}`, `{` + ipText + `}`},
		"empty context":     {`{"userId":"u","context":{}}`, `{` + ipText + `}`},
		"array for context": {`{"userId":"u","context":[]}`, `{` + ipText + `}`},
		"context":           {`{"userId":"u","context":{"a":{"ip":1},"b":"\"ip\""}}`, `{"a":{"ip":1},"b":"\"ip\"",` + ipText + `}`},
		"own ip":            {`{"userId":"u","context":{"ip":"0.0.0.0"}}`, `{"ip":"0.0.0.0"}`},
		"null ip":           {`{"userId":"u","context":{"a":1,"ip":null}}`, `{"a":1,"ip":null}`},
	} {
		tests = append(tests, struct {
			name string
			r    Request
			in   string
			want want
		}{"context.ip: " + name, ip, c[0], want{"context": c[1]}})
	}
	app := ip
	app.FromBrowser = false
	appBatch := app
	appBatch.Type = ""
	for name, c := range map[string]struct {
		r        Request
		in, want string
	}{
		"server":                {app, `{"userId":"u","context":{"library":{"name":"x"}}}`, `{"library":{"name":"x"}}`},
		"no context":            {app, `{"userId":"u"}`, `{}`},
		"direct":                {app, `{"userId":"u","context":{"direct":true}}`, `{"direct":true,` + ipText + `}`},
		"direct as a text":      {app, `{"userId":"u","context":{"direct":"true"}}`, `{"direct":"true"}`},
		"device":                {app, `{"userId":"u","context":{"device":{"id":"d"}}}`, `{"device":{"id":"d"},` + ipText + `}`},
		"null device":           {app, `{"userId":"u","context":{"device":null}}`, `{"device":null}`},
		"device, not direct":    {app, `{"userId":"u","context":{"device":{},"direct":false}}`, `{"device":{},"direct":false}`},
		"device with own ip":    {app, `{"userId":"u","context":{"device":{},"ip":"192.0.2.1"}}`, `{"device":{},"ip":"192.0.2.1"}`},
		"nested device":         {app, `{"userId":"u","context":{"a":{"device":{},"direct":true}}}`, `{"a":{"device":{},"direct":true}}`},
		"device of the batch":   {appBatch, `{"batch":[{"type":"page","userId":"u","context":{"a":1}}],"context":{"device":{}}}`, `{"device":{},"a":1,` + ipText + `}`},
		"browser, not direct":   {ip, `{"userId":"u","context":{"direct":false}}`, `{"direct":false,` + ipText + `}`},
		"unknown peer, browser": {Request{Type: Page, ReceivedAt: received, FromBrowser: true}, `{"userId":"u","context":{"device":{}}}`, `{"device":{}}`},
	} {
		tests = append(tests, struct {
			name string
			r    Request
			in   string
			want want
		}{"context.ip of an app: " + name, c.r, c.in, want{"context": c.want}})
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			batch, err := tt.r.Parse([]byte(tt.in))
			if err != nil {
				t.Fatal(err)
			}
			body := batch.Calls[0].Body
			got := members(t, body)
			for key, value := range tt.want {
				if string(got[key]) != value {
					t.Errorf("member %q: got %s, want %s, in %s", key, got[key], value, body)
				}
			}
			if canonical, err := Canonical(body); err != nil || !bytes.Equal(canonical, body) {
				t.Errorf("canonical form of the body %s: got %s and error %v, want the same", body, canonical, err)
			}
		})
	}
}

func TestOrderOfMembers(t *testing.T) {
	got, err := request(Alias).Parse([]byte(`{"z":1,"timestamp":"2026-05-04T12:00:00Z","7":2,"writeKey":"k","userId":"u","1":3,"previousId":"p","version":2,"a":4}`))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"1":3,"7":2,"z":1,"timestamp":"2026-05-04T12:00:00.000Z","userId":"u","previousId":"p","version":1,"a":4,"type":"alias","messageId":"new","context":{},` +
		`"originalTimestamp":"2026-05-04T12:00:00Z","receivedAt":` + receivedText + `,"Previous ID":"p","User ID":"u"}`
	if string(got.Calls[0].Body) != want {
		t.Errorf("message: got\n%s\nwant\n%s", got.Calls[0].Body, want)
	}
}

// TestCall checks the fields of a call other than its body.
func TestCall(t *testing.T) {
	batch, err := request(Track).Parse([]byte(`{"writeKey":"k\u0065y","messageId":"m\n","userId":7,"anonymousId":"a\ud800","event":"O\u0072der \"x\"","timestamp":"2026-05-04T11:00:00Z","integrations":{"All":false}}`))
	if err != nil {
		t.Fatal(err)
	}
	c := batch.Calls[0]
	c.Body, c.Integrations = nil, Integrations{}
	want := Batch{WriteKey: "key", Indexes: []int{0}, Calls: []Call{{Type: Track, MessageID: "m\n", UserID: "7", AnonymousID: "a\xed\xa0\x80",
		Event: `Order "x"`, Timestamp: time.Date(2026, 5, 4, 11, 0, 0, 0, time.UTC)}}}
	if batch.Calls[0].Integrations.Allows("Webhooks") {
		t.Error("Allows(Webhooks): got true, want false as in the call's integrations")
	}
	batch.Calls[0] = c
	check.Same(t, "batch", batch, want)

	batch, err = Request{Type: Page}.Parse([]byte(`{"userId":"u"}`))
	if err != nil {
		t.Fatal(err)
	}
	c = batch.Calls[0]
	if !regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(c.MessageID) {
		t.Errorf("messageId: got %q, want a random UUID", c.MessageID)
	}
	if age := time.Since(c.Timestamp); age < 0 || age > time.Hour {
		t.Errorf("age of a request without a time: got %v, want 0 to 1h", age)
	}
}

// TestRejected parses invalid calls, alone and in a batch between two valid calls, which must
// be accepted.
func TestRejected(t *testing.T) {
	deep := strings.Repeat(`[{"a\"]":`, MaxDepth) + "1" + strings.Repeat("}]", MaxDepth)
	tests := []struct {
		name string
		t    Type
		in   string
		code string
		text string // part of the message
	}{
		{"no ids", Identify, `{}`, CodeNoUserAnonID, `"userId" and "anonymousId" are missing`},
		{"null ids", Page, `{"userId":null,"anonymousId":null}`, CodeNoUserAnonID, "page"},
		{"empty ids", Screen, `{"userId":"","anonymousId":""}`, CodeNoUserAnonID, "screen"},
		{"track without ids", Track, `{"event":"e"}`, CodeNoUserAnonID, "track"},
		{"group without ids", Group, `{"groupId":"e"}`, CodeNoUserAnonID, "group"},
		{"track without event", Track, `{"userId":"u"}`, CodeNoEvent, `"event" is missing`},
		{"track with empty event", Track, `{"userId":"u","event":""}`, CodeNoEvent, `"event"`},
		{"track with null event", Track, `{"userId":"u","event":null}`, CodeNoEvent, `"event"`},
		{"group without groupId", Group, `{"userId":"u"}`, CodeNoGroupID, `"groupId"`},
		{"alias without previousId", Alias, `{"userId":"u"}`, CodeNoPreviousID, `"previousId"`},
		{"alias without userId", Alias, `{"previousId":"p","anonymousId":"a"}`, CodeNoUserID, `"userId"`},
		{"alias with the field names of the message", Alias, `{"Previous ID":"p","User ID":"u"}`, CodeNoPreviousID, `"previousId"`},
		{"userId of a wrong type", Page, `{"userId":{"id":1}}`, CodeInvalidField, `"userId" must be a string`},
		{"anonymousId of a wrong type", Page, `{"userId":"u","anonymousId":true}`, CodeInvalidField, `"anonymousId"`},
		{"event of a wrong type", Track, `{"userId":"u","event":["e"]}`, CodeInvalidField, `"event"`},
		{"groupId of a wrong type", Group, `{"userId":"u","groupId":false}`, CodeInvalidField, `"groupId"`},
		{"previousId of a wrong type", Alias, `{"userId":"u","previousId":[]}`, CodeInvalidField, `"previousId"`},
		{"messageId of a wrong type", Page, `{"userId":"u","messageId":{}}`, CodeInvalidField, `"messageId"`},
		{"context of a wrong type", Page, `{"userId":"u","context":"c"}`, CodeInvalidField, `"context" must be an object`},
		{"integrations of a wrong type", Page, `{"userId":"u","integrations":[1]}`, CodeInvalidField, `"integrations"`},
		{"traits of a wrong type", Identify, `{"userId":"u","traits":5}`, CodeInvalidField, `"traits"`},
		{"properties of a wrong type", Track, `{"userId":"u","event":"e","properties":true}`, CodeInvalidField, `"properties"`},
		{"messageId too long", Page, `{"userId":"u","messageId":"` + strings.Repeat("日", 100) + `x"}`, CodeMessageIDTooLong, "100 characters"},
		{"messageId of lone surrogates too long", Page, `{"userId":"u","messageId":"` + strings.Repeat(`\ud83d`, 101) + `"}`,
			CodeMessageIDTooLong, "100 characters"},
		{"messageId in Latin-1", Page, `{"userId":"u","messageId":"` + "\xe8-1" + `"}`, CodeInvalidField, `"messageId" is not valid UTF-8`},
		{"messageId with a raw surrogate", Page, `{"userId":"u","messageId":"` + "a\xed\xa0\xbd" + `"}`, CodeInvalidField,
			`"messageId" is not valid UTF-8`},
		{"the second messageId of two", Page, `{"userId":"u","messageId":"a","messageId":"` + "\xff" + `"}`, CodeInvalidField, `"messageId"`},
		{"userId with an overlong form", Track, `{"event":"e","userId":"` + "\xc0\xaf" + `"}`, CodeInvalidField, `"userId"`},
		{"anonymousId with half a character", Page, `{"anonymousId":"` + "\xe2\x82" + `"}`, CodeInvalidField, `"anonymousId"`},
		{"groupId with a stray byte", Group, `{"userId":"u","groupId":"` + "\x80" + `"}`, CodeInvalidField, `"groupId"`},
		{"previousId beyond Unicode", Alias, `{"userId":"u","previousId":"` + "\xf4\x90\x80\x80" + `"}`, CodeInvalidField, `"previousId"`},
		{"too large", Page, `{"userId":"` + strings.Repeat("x", MaxCallBytes) + `"}`, CodeCallTooLarge, "32768"},
		{"too deep", Page, `{"userId":"u","x":` + deep + `}`, CodeTooDeep, "256"},
		{"array", Page, `[{"userId":"u"}]`, CodeNotAnObject, "object"},
		{"deep array", Page, `[` + deep + `]`, CodeTooDeep, "256"},
		{"string", Page, `"userId"`, CodeNotAnObject, "object"},
		{"null", Page, `null`, CodeNotAnObject, "object"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			check := func(err error) {
				t.Helper()
				if code(err) != tt.code || !strings.Contains(err.Error(), tt.text) {
					t.Errorf("error: got %v, want code %s and %q", err, tt.code, tt.text)
				}
			}
			batch, err := request(tt.t).Parse([]byte(tt.in))
			check(err)
			if len(batch.Calls) > 0 {
				t.Errorf("calls: got %d, want 0", len(batch.Calls))
			}
			in := tt.in
			if in[0] == '{' {
				in = fmt.Sprintf(`{"type":"%s",%s`, tt.t, in[1:])
				in = strings.Replace(in, ",}", "}", 1)
			}
			valid := `{"type":"page","userId":"valid","x":[{"1":2}]}`
			batch, err = request("").Parse([]byte(`{"batch":[` + valid + `,` + in + `,` + valid + `],"writeKey":"k"}`))
			if err != nil {
				t.Fatal(err)
			}
			if len(batch.Calls) != 2 || !slices.Equal(batch.Indexes, []int{0, 2}) || len(batch.Rejected) != 1 || batch.Rejected[0].Index != 1 ||
				batch.WriteKey != "k" {
				t.Fatalf("batch: got %d calls at %v, rejections %v and write key %q, want calls 0 and 2, rejection 1 and write key k", len(batch.Calls), batch.Indexes, batch.Rejected, batch.WriteKey)
			}
			check(batch.Rejected[0].Err)
			for _, c := range batch.Calls {
				if want := valid[:len(valid)-1] + `,"messageId":"new","context":{},"receivedAt":` + receivedText + `,"timestamp":` + receivedText + `,"version":1}`; string(c.Body) != want || c.UserID != "valid" || c.MessageID != "new" {
					t.Errorf("valid call: got %s with id %s, want %s with id new", c.Body, c.MessageID, want)
				}
			}
		})
	}
}

func TestLimitsAreReached(t *testing.T) {
	page := func(size int) string {
		const frame = `{"type":"page","userId":""}`
		return strings.Replace(frame, `""`, `"`+strings.Repeat("x", size-len(frame))+`"`, 1)
	}
	if _, err := request(Page).Parse([]byte(" " + page(MaxCallBytes) + " ")); err != nil {
		t.Errorf("call of the largest size: got error %v, want none", err)
	}
	if _, err := request(Page).Parse([]byte(page(MaxCallBytes + 1))); code(err) != CodeCallTooLarge {
		t.Errorf("call beyond the largest size: got error %v, want %s", err, CodeCallTooLarge)
	}
	if _, err := request(Page).Parse([]byte(page(MaxBodyBytes + 1))); code(err) != CodeCallTooLarge {
		t.Errorf("call beyond the size of a body: got error %v, want %s", err, CodeCallTooLarge)
	}
	if _,
		err := request(Page).Parse([]byte(`{"userId":"u","messageId":"` + strings.Repeat(`\ud83d`, 50) + strings.Repeat("\U0001f600",
		50) + `"}`)); err != nil {
		t.Errorf("messageId of the largest size: got error %v, want none", err)
	}
	body := func(size int) []byte {
		b := []byte(`{"batch":[{"type":"page","userId":"u"}]}`)
		return append(b, bytes.Repeat([]byte(" "), size-len(b))...)
	}
	if b, err := request("").Parse(body(MaxBodyBytes)); err != nil || len(b.Calls) != 1 {
		t.Errorf("body of the largest size: got error %v, want one call", err)
	}
	if _, err := request("").Parse(body(MaxBodyBytes + 1)); code(err) != CodeBodyTooLarge {
		t.Errorf("body beyond the largest size: got error %v, want %s", err, CodeBodyTooLarge)
	}

	// The size of each call includes the batch's context.
	context := `"context":{"x":"` + strings.Repeat("x", 999-len(`{"x":""}`)) + `"}`
	b, err := request("").Parse([]byte(`{"batch":[` + page(MaxCallBytes-999) + "," + page(MaxCallBytes-998) + `],` + context + `}`))
	if err != nil || len(b.Calls) != 1 || len(b.Rejected) != 1 || b.Rejected[0].Index != 1 || b.Rejected[0].Err.Code != CodeCallTooLarge {
		t.Errorf("batch with a context: got %d calls, rejections %v and error %v, want 1 call and a rejection of the second one", len(b.Calls), b.Rejected, err)
	}
}

func TestTooManyCalls(t *testing.T) {
	calls := strings.Repeat(`{"type":"page","userId":"u"},`, MaxBatchCalls)
	b, err := request("").Parse([]byte(`{"batch":[` + calls + `{},3,{"type":"page","userId":"u"}],"writeKey":"k"}`))
	if err != nil || len(b.Calls) != MaxBatchCalls || len(b.Rejected) != 3 || b.WriteKey != "k" {
		t.Fatalf("batch: got %d calls, %d rejections and error %v, want %d and 3", len(b.Calls), len(b.Rejected), err, MaxBatchCalls)
	}
	for i, r := range b.Rejected {
		if r.Index != MaxBatchCalls+i || r.Err.Code != CodeTooManyCalls {
			t.Errorf("rejection %d: got index %d and error %v, want index %d and %s", i, r.Index, r.Err, MaxBatchCalls+i, CodeTooManyCalls)
		}
	}
	if _, err := request("").Parse([]byte(`{"batch":[` + calls + `{"a":}]}`)); code(err) != CodeInvalidJSON {
		t.Errorf("invalid JSON behind the last call: got error %v, want %s", err, CodeInvalidJSON)
	}
}

// Calls that replace the batch's context, or are rejected, do not count towards the limit.
func TestGrowthCountsMessagesOnly(t *testing.T) {
	for name, call := range map[string]string{
		"the calls replace the context": `{"type":"page","userId":"u","context":{"x":1}}`,
		"the calls are rejected":        `{"type":"page"}`,
	} {
		t.Run(name, func(t *testing.T) {
			body := `{"context":{"x":"` + strings.Repeat("x", 30_000) + `"},"batch":[` + strings.TrimSuffix(strings.Repeat(call+",", 60), ",") + `]}`
			if _, err := request("").Parse([]byte(body)); err != nil {
				t.Errorf("got %v, want no error", err)
			}
		})
	}
}

// The messages of a batch have at most MaxMergedBytes. A batch with larger messages is
// rejected as a whole, before its messages exceed this size.
func TestGrowthIsBounded(t *testing.T) {
	batch := func(context, calls, size int, own string) []byte {
		call := `{"type":"page","userId":"u","p":"` + strings.Repeat("p", size) + `"` + own + `}`
		return []byte(`{"writeKey":"k","context":{"x":"` + strings.Repeat("x", context) + `"},"batch":[` + strings.TrimSuffix(strings.Repeat(call+",", calls), ",") + `]}`)
	}
	for _, tc := range []struct {
		name                 string
		context, calls, size int
		own                  string // further members of each call
		rejectedBy           string // Read, Messages, or empty
	}{
		{"1 MiB is always allowed", 30_000, 34, 0, "", ""},
		{"more than 1 MiB, more than 16 times the body", 30_000, 36, 0, "", "Read"},
		{"16 times a large body", 28_000, 260, 1_750, "", ""},
		{"more than 16 times a large body", 31_000, 272, 1_600, "", "Read"},
		{"as many calls as possible, small context", 200, MaxBatchCalls, 0, "", ""},
		{"as many calls as possible, large context", 3_400, MaxBatchCalls, 0, "", "Read"},
		{"no context", 0, MaxBatchCalls, 100, "", ""},
		{"calls with an empty context of their own", 30_000, 36, 0, `,"context":{}`, "Read"},
		{"calls that add to the context", 30_000, 36, 0, `,"context":{"y":1}`, "Messages"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			body := batch(tc.context, tc.calls, tc.size, tc.own)
			most := MaxMergedBytes(len(body))
			if want := max(1<<20, 16*len(body)); most != want {
				t.Fatalf("MaxMergedBytes: got %d, want %d", most, want)
			}
			reading, err := request("").Read(body)
			if tc.rejectedBy == "Read" {
				if code(err) != CodeBatchTooLarge || !strings.Contains(err.Error(), "context") || reading.WriteKey != "k" {
					t.Errorf("Read: got error %v and write key %q, want %s and k", err, reading.WriteKey, CodeBatchTooLarge)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer reading.Release()
			if reading.WriteKey != "k" || reading.Calls != tc.calls || reading.Bytes > most {
				t.Errorf("reading: got %d calls, %d bytes and write key %q, want %d calls, at most %d bytes and write key k", reading.Calls, reading.Bytes, reading.WriteKey, tc.calls, most)
			}
			b, err := reading.Messages()
			if tc.rejectedBy == "Messages" {
				if code(err) != CodeBatchTooLarge || !strings.Contains(err.Error(), "context") || len(b.Calls) != 0 || b.WriteKey != "k" {
					t.Errorf("messages: got error %v with %d calls, want %s and none", err, len(b.Calls), CodeBatchTooLarge)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			size := 0
			for _, c := range b.Calls {
				size += len(c.Body)
			}
			if size > reading.Bytes || size < reading.Bytes/2 {
				t.Errorf("size of the messages: got %d, want %d to %d", size, reading.Bytes/2, reading.Bytes)
			}
			if len(b.Calls) != tc.calls || len(b.Rejected) != 0 {
				t.Errorf("batch: got %d calls and %d rejections, want %d and none", len(b.Calls), len(b.Rejected), tc.calls)
			}
			for i := range b.Calls { // Large batches are not copied, so a message must not overlap the next one.
				if c := &b.Calls[i]; cap(c.Body) != len(c.Body) || !json.Valid(c.Body) {
					t.Fatalf("message %d: got %d bytes with capacity %d, valid %v, want the same capacity and valid JSON", i, len(c.Body), cap(c.Body), json.Valid(c.Body))
				}
			}
		})
	}
}

// Messages of one batch do not change while the memory of the reading is reused.
func TestLargeBatchesAreNotOverwritten(t *testing.T) {
	body := func(letter string) []byte {
		call := `{"type":"page","userId":"u","p":"` + strings.Repeat(letter, 1_700) + `"}`
		return []byte(`{"context":{"x":"` + strings.Repeat(letter, 28_000) + `"},"batch":[` + strings.TrimSuffix(strings.Repeat(call+",", 200), ",") + `]}`)
	}
	first, err := request("").Parse(body("a"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := request("").Parse(body("b")); err != nil {
		t.Fatal(err)
	}
	for i, c := range first.Calls {
		if bytes.Contains(c.Body, []byte("bbb")) {
			t.Fatalf("message %d: got data of the second batch, want no change", i)
		}
	}
}

func TestBatch(t *testing.T) {
	tests := []struct {
		name, context, integrations, sentAt string // of the batch
		call                                string
		want                                string // context, integrations, sentAt of the message
	}{
		{"nothing", "", "", "", `{}`, "{}//"},
		{"taken over", `{"a":1}`, `{"All":false}`, `"2026-05-04T12:00:00Z"`, `{}`, `{"a":1}/{"All":false}/"2026-05-04T12:00:00Z"`},
		{"null in the call", `{"a":1}`, `{"All":false}`, `"2026-05-04T12:00:00Z"`, `{"context":null,"integrations":null,"sentAt":null}`,
			`{"a":1}/{"All":false}/"2026-05-04T12:00:00Z"`},
		{"the call wins", `{"a":1,"b":2}`, `{"All":false,"x":true}`, `"2026-05-04T12:00:00Z"`, `{"context":{"b":3,"c":4},"integrations":{"All":true},"sentAt":"2026-05-04T12:00:01Z"}`,
			`{"a":1,"b":3,"c":4}/{"All":true,"x":true}/"2026-05-04T12:00:01Z"`},
		{"not deeper", `{"a":{"x":1,"y":2}}`, "", "", `{"context":{"a":{"x":3}}}`, `{"a":{"x":3}}//`},
		{"null wins, too", `{"a":1}`, "", "", `{"context":{"a":null}}`, `{"a":null}//`},
		{"the order of JavaScript", `{"z":1,"10":2}`, "", "", `{"context":{"y":3,"9":4,"10":5}}`, `{"9":4,"10":5,"z":1,"y":3}//`},
		{"escaped keys", `{"\u0061":1}`, "", "", `{"context":{"a":2}}`, `{"a":2}//`},
		{"empty ones", `{}`, `[]`, `""`, `{"context":{},"integrations":[],"sentAt":""}`, `{}/{}/""`},
		{"null in the batch", `null`, `null`, `null`, `{"context":{"a":1}}`, `{"a":1}//`},
		{"unreadable sentAt in the call", "", "", `"2026-05-04T12:00:00Z"`, `{"sentAt":"x"}`, `{}//"2026-05-04T12:00:00Z"`},
		{"unreadable sentAt in the batch", "", "", `"y"`, `{"sentAt":"x"}`, `{}//"x"`},
		{"many members", `{` + numbered("b", 40) + `}`, "", "", `{"context":{` + numbered("c", 40) + `,"b7":"mine"}}`,
			`{` + strings.Replace(numbered("b", 40), `"b7":0`, `"b7":"mine"`, 1) + `,` + numbered("c", 40) + `}//`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var common string
			for _, m := range [][2]string{{"context", tt.context}, {"integrations", tt.integrations}, {"sentAt", tt.sentAt}} {
				if m[1] != "" {
					common += fmt.Sprintf(`,"%s":%s`, m[0], m[1])
				}
			}
			call := strings.Replace(tt.call[:len(tt.call)-1]+`,"type":"page","userId":"u"}`, "{,", "{", 1)
			calls := `"batch":[` + call + `,` + call + `]`
			for _, in := range []string{`{` + calls + common + `}`, `{` + strings.TrimPrefix(common+",", ",") + calls + `}`} {
				batch, err := request("").Parse([]byte(in))
				if err != nil {
					t.Fatal(err)
				}
				for _, c := range batch.Calls {
					m := members(t, c.Body)
					if got := fmt.Sprintf("%s/%s/%s", m["context"], m["integrations"], m["sentAt"]); got != tt.want {
						t.Errorf("context/integrations/sentAt of %s: got\n%s\nwant\n%s", in, got, tt.want)
					}
					if canonical, err := Canonical(c.Body); err != nil || !bytes.Equal(canonical, c.Body) {
						t.Errorf("canonical form of the body %s: got %s and error %v, want the same", c.Body, canonical, err)
					}
				}
				if len(batch.Calls) != 2 {
					t.Errorf("calls: got %d, want 2", len(batch.Calls))
				}
			}
		})
	}
}

func numbered(prefix string, n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `,"%s%d":0`, prefix, i)
	}
	return b.String()[1:]
}

func TestBatchTypes(t *testing.T) {
	good := map[Type]string{Identify: "", Page: "", Screen: "", Track: `,"event":"e"`, Group: `,"groupId":"g"`, Alias: `,"previousId":"p"`}
	for typ, more := range good {
		b, err := request("").Parse(fmt.Appendf(nil, `{"batch":[{"type":"%s","userId":"u"%s}]}`, typ, more))
		if err != nil || len(b.Calls) != 1 || b.Calls[0].Type != typ {
			t.Errorf("Parse of type %s: got %v and error %v, want one call", typ, b, err)
		}
	}
	for in, want := range map[string]string{
		`{"userId":"u"}`:                    CodeNoType,
		`{"userId":"u","type":null}`:        CodeNoType,
		`{"userId":"u","type":""}`:          CodeNoType,
		`{"userId":"u","type":"Page"}`:      CodeUnknownType,
		`{"userId":"u","type":"delete"}`:    CodeUnknownType, // Only a DeletionRequest sends it.
		`{"userId":"u","type":"pa\u0067e"}`: "",
		`{"userId":"u","type":["page"]}`:    CodeUnknownType,
		`{"userId":"u","type":1}`:           CodeUnknownType,
	} {
		b, err := request("").Parse([]byte(`{"batch":[` + in + `]}`))
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if len(b.Rejected) == 1 {
			got = b.Rejected[0].Err.Code
		}
		if got != want {
			t.Errorf("rejection of %s: got %q, want %q", in, got, want)
		}
	}
	for _, typ := range []Type{Delete, "batch", "Track"} {
		if _, err := request(typ).Parse([]byte(`{"userId":"u","event":"e"}`)); code(err) != CodeUnknownType {
			t.Errorf("path %s: got error %v, want %s", typ, err, CodeUnknownType)
		}
	}
}

func TestBadBodies(t *testing.T) {
	tests := []struct{ name, in, code, text string }{
		{"no JSON", "a=1&b=2", CodeInvalidJSON, "at byte 0"},
		{"empty", "", CodeInvalidJSON, "at byte 0"},
		{"cut off", `{"batch":[{"type":"page"`, CodeInvalidJSON, "at byte 24"},
		{"bad call", `{"batch":[{"type":"page","userId":"u"},{"a":01}]}`, CodeInvalidJSON, "at byte 45"},
		{"more than one value", `{"batch":[]}{}`, CodeInvalidJSON, "at byte 12"},
		{"cut off in a deep call", `{"batch":[` + strings.Repeat("[", 300) + `"]`, CodeInvalidJSON, "at byte 312"},
		{"array", `[{"type":"page","userId":"u"}]`, CodeNotAnObject, `"batch"`},
		{"number", `7`, CodeNotAnObject, "object"},
		{"no batch", `{"userId":"u","type":"page"}`, CodeEmptyBatch, `"batch"`},
		{"empty batch", `{"batch":[]}`, CodeEmptyBatch, `"batch"`},
		{"batch is no array", `{"batch":{"0":{"type":"page","userId":"u"}}}`, CodeEmptyBatch, "array"},
		{"the last batch is no array", `{"batch":[{"type":"page","userId":"u"}],"batch":null}`, CodeEmptyBatch, "array"},
		{"context of a wrong type", `{"batch":[{"type":"page","userId":"u"}],"context":"x"}`, CodeInvalidField, `"context"`},
		{"integrations of a wrong type", `{"batch":[{"type":"page","userId":"u"}],"integrations":true}`, CodeInvalidField, `"integrations"`},
		{"deep beside the calls", `{"batch":[],"x":` + strings.Repeat("[", 300) + strings.Repeat("]", 300) + "}", CodeTooDeep, "256"},
	}
	for _, tt := range tests {
		b, err := request("").Parse([]byte(tt.in))
		if code(err) != tt.code || !strings.Contains(err.Error(), tt.text) || len(b.Calls)+len(b.Rejected) > 0 {
			t.Errorf("%s: got error %v with %d calls, want %s and %s", tt.name, err, len(b.Calls), tt.code, tt.text)
		}
	}
	for n, want := range map[int]string{MaxDepth - 1: "", MaxDepth: CodeTooDeep} {
		in := `{"batch":[{"type":"page","userId":"u"}],"x":` + strings.Repeat("[", n) + strings.Repeat("]", n) + "}"
		if _, err := request("").Parse([]byte(in)); code(err) != want {
			t.Errorf("%d levels behind a call: got error %v, want %q", n, err, want)
		}
	}
	// The write key is still known, for the Source's counters.
	for r, in := range map[*Request]string{{Type: Track}: `{"userId":"u","writeKey":"k"}`, {}: `{"batch":[],"writeKey":"k"}`} {
		if b, err := r.Parse([]byte(in)); err == nil || b.WriteKey != "k" {
			t.Errorf("Parse(%s): got write key %q and error %v, want k and an error", in, b.WriteKey, err)
		}
	}
	for _, in := range []string{`{"userId":"u"}`, `{"userId":"u","writeKey":7}`, `{"userId":"u","writeKey":null}`} {
		if b, err := request(Page).Parse([]byte(in)); err != nil || b.WriteKey != "" {
			t.Errorf("Parse(%s): got write key %q and error %v, want none", in, b.WriteKey, err)
		}
	}
}

func TestLastBatchIsUsed(t *testing.T) {
	b, err := request("").Parse([]byte(`{"batch":[{"type":"page","userId":"a"},{}],"\u0062atch":[{"type":"page","userId":"b","batch":[{"x":1}]}]}`))
	if err != nil || len(b.Calls) != 1 || b.Calls[0].UserID != "b" || len(b.Rejected) != 0 || !bytes.Contains(b.Calls[0].Body, []byte(`"batch":[{"x":1}]`)) {
		t.Errorf("batch: got %+v and error %v, want only the call of the last batch", b, err)
	}
}

// TestBodiesAreSeparate checks that neither an append to one body nor a later Parse changes
// another body.
func TestBodiesAreSeparate(t *testing.T) {
	in := []byte(`{"batch":[{"type":"page","userId":"a","integrations":{"x":true}},{"type":"page","userId":"b"}]}`)
	b, err := request("").Parse(in)
	if err != nil {
		t.Fatal(err)
	}
	second := string(b.Calls[1].Body)
	_ = append(b.Calls[0].Body, "overwritten"...)
	_ = append(b.Calls[0].Integrations.object, "overwritten"...)
	if _, err := request("").Parse(bytes.ReplaceAll(in, []byte("a"), []byte("A"))); code(err) != CodeEmptyBatch { // "bAtch"
		t.Fatal(err)
	}
	clear(in)
	if got := string(b.Calls[1].Body); got != second || b.Calls[0].UserID != "a" || b.Calls[1].UserID != "b" {
		t.Errorf("second call: got %s with the users %s and %s, want %s with a and b", got, b.Calls[0].UserID, b.Calls[1].UserID, second)
	}
}

func TestDeleteMessage(t *testing.T) {
	got := string(DeleteMessage("u\"\n<\u2028\xff", time.Date(2026, 5, 4, 14, 0, 0, 5_999_999, time.FixedZone("", 7200))))
	if want := "{\"type\":\"delete\",\"userId\":\"u\\\"\\n<\u2028\ufffd\",\"timestamp\":\"2026-05-04T12:00:00.005Z\"}"; got != want {
		t.Errorf("delete message: got\n%s\nwant\n%s", got, want)
	}
}

// A message is marked if it has a long number, from the call or from its batch.
func TestLongNumbersAreMarked(t *testing.T) {
	const id = "12345678901234567890"
	single := map[string]bool{
		`{"userId":"u","event":"e","properties":{"id":` + id + `}}`:                         true,
		`{"userId":"u","event":"e","properties":{"a":[{"b":-` + id + `}]}}`:                 true,
		`{"userId":"u","event":"e","properties":{"n":1e400}}`:                               true,
		`{"userId":"u","event":"e","timestamp":` + id + `}`:                                 true,
		`{"userId":` + id + `,"event":` + id + `}`:                                          false, // They become strings.
		`{"userId":"u","event":"e","properties":{"id":"` + id + `","` + id + `":1}}`:        false,
		`{"userId":"u","event":"e","properties":{"id":` + id + `.0,"n":1e25,"m":1e-400}}`:   false,
		`{"userId":"u","event":"e","properties":{"id":` + id + `},"properties":{"id":"1"}}`: false, // The last one is used.
	}
	for body, want := range single {
		b, err := Request{Type: Track, ReceivedAt: received}.Parse([]byte(body))
		if err != nil || b.Calls[0].LongNumbers != want {
			t.Errorf("LongNumbers of %s: got %t and error %v, want %t", body, b.Calls[0].LongNumbers, err, want)
		}
	}
	const plain, long, own = `{"type":"track","userId":"u","event":"e"}`, `{"type":"track","userId":"u","event":"e","properties":{"id":` + id + `}}`, `{"type":"track","userId":"u","event":"e","context":{"id":"1"}}`
	batches := map[string][]bool{
		`{"batch":[` + plain + "," + long + "," + plain + `]}`:              {false, true, false},
		`{"batch":[` + plain + "," + own + `],"context":{"id":` + id + `}}`: {true, false},
		`{"context":{"id":` + id + `},"batch":[` + plain + "," + own + `]}`: {true, false},
		`{"batch":[` + plain + "," + long + `],"other":` + id + `}`:         {false, true},
		`{"batch":[` + plain + `],"sentAt":` + id + `}`:                     {false}, // It is unreadable and therefore not merged.
		`{"batch":[[` + id + `],` + plain + `]}`:                            {false},
		`{"batch":[` + long + `],"batch":[` + plain + `]}`:                  {false},
	}
	for body, want := range batches {
		b, err := Request{ReceivedAt: received}.Parse([]byte(body))
		if err != nil {
			t.Errorf("Parse(%s): got error %v, want none", body, err)
		}
		var got []bool
		for _, c := range b.Calls {
			got = append(got, c.LongNumbers)
		}
		check.Same(t, "LongNumbers of the calls of "+body, got, want)
	}
}
