package analytics_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"maps"
	"net/http"
	"reflect"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/posthorn/posthorn/analytics"
	"github.com/posthorn/posthorn/analytics/analyticstest"
	"github.com/posthorn/posthorn/event"
)

type object = map[string]interface{}

func track(i int) *analytics.Track {
	return &analytics.Track{UserId: "u", Event: fmt.Sprint(i)}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

func events(calls []analyticstest.Call) []string {
	var names []string
	for _, c := range calls {
		names = append(names, c.Event)
	}
	slices.Sort(names)
	return names
}

func TestCallsOnTheWire(t *testing.T) {
	id, at := "m1", "2026-01-02T03:04:05Z"
	common := analytics.Message{MessageId: id, Timestamp: at}
	c, in, m := object{"ip": "192.0.2.1"}, object{"All": false, "crm": true}, object{"k": "v"}
	for _, test := range []struct {
		call analytics.Call
		want object
	}{
		{&analytics.Identify{UserId: "u", AnonymousId: "a", Traits: m, Context: c, Integrations: in, Message: common},
			object{"type": "identify", "userId": "u", "anonymousId": "a", "traits": m, "context": c, "integrations": in}},
		{&analytics.Track{UserId: "u", AnonymousId: "a", Event: "e", Properties: m, Context: c, Integrations: in, Message: common},
			object{"type": "track", "userId": "u", "anonymousId": "a", "event": "e", "properties": m, "context": c, "integrations": in}},
		{&analytics.Page{UserId: "u", AnonymousId: "a", Category: "c", Name: "n", Traits: m, Context: c, Integrations: in, Message: common},
			object{"type": "page", "userId": "u", "anonymousId": "a", "category": "c", "name": "n", "properties": m, "context": c, "integrations": in}},
		{&analytics.Screen{UserId: "u", AnonymousId: "a", Category: "c", Name: "n", Properties: m, Context: c, Integrations: in, Message: common},
			object{"type": "screen", "userId": "u", "anonymousId": "a", "category": "c", "name": "n", "properties": m, "context": c, "integrations": in}},
		{&analytics.Group{UserId: "u", AnonymousId: "a", GroupId: "g", Traits: m, Context: c, Integrations: in, Message: common},
			object{"type": "group", "userId": "u", "anonymousId": "a", "groupId": "g", "traits": m, "context": c, "integrations": in}},
		{&analytics.Alias{UserId: "u", PreviousId: "p", Context: c, Integrations: in, Message: common},
			object{"type": "alias", "userId": "u", "previousId": "p", "context": c, "integrations": in}},
		{&analytics.Identify{AnonymousId: "a", Message: analytics.Message{Type: "spoofed", MessageId: id, Timestamp: at, SentAt: at}},
			object{"type": "identify", "anonymousId": "a", "sentAt": at}},
	} {
		test.want["messageId"], test.want["timestamp"] = id, at
		sink := analyticstest.New()
		client := sink.Client()
		if err := client.Enqueue(t.Context(), test.call); err != nil {
			t.Fatal(err)
		}
		if err := client.Close(); err != nil {
			t.Fatal(err)
		}
		var got object
		if err := json.Unmarshal(sink.Calls()[0].JSON, &got); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, test.want) {
			t.Errorf("sent %v, want %v", got, test.want)
		}
	}
}

// Each method sends its own type.
func TestMethods(t *testing.T) {
	sink := analyticstest.New()
	client := sink.Client()
	for _, err := range []error{
		client.Identify(&analytics.Identify{UserId: "u"}), client.Track(&analytics.Track{UserId: "u", Event: "e"}),
		client.Page(&analytics.Page{UserId: "u"}), client.Screen(&analytics.Screen{UserId: "u"}),
		client.Group(&analytics.Group{UserId: "u", GroupId: "g"}), client.Alias(&analytics.Alias{UserId: "u", PreviousId: "p"}),
		client.Close(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var types []string
	for _, c := range sink.Calls() {
		types = append(types, c.Type)
	}
	if want := []string{"identify", "track", "page", "screen", "group", "alias"}; !slices.Equal(types, want) {
		t.Errorf("sent %v, want %v", types, want)
	}
}

func TestRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		client := sink.Client(analytics.WithEndpoint("https://user:password@sink.test/"))
		called := time.Now()
		if err := client.Track(track(1)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(1234 * time.Millisecond)
		if err := client.Close(); err != nil {
			t.Fatal(err)
		}
		request, call := sink.Requests()[0], sink.Calls()[0]
		if request.WriteKey != "test" {
			t.Errorf("write key %q", request.WriteKey)
		}
		want := http.Header{"Content-Type": {"application/json"}, "User-Agent": {"posthorn-go/" + analytics.Version}, "Authorization": {"Basic dGVzdDo="}}
		if !reflect.DeepEqual(request.Header, want) {
			t.Errorf("headers %v, want %v", request.Header, want)
		}
		if got := request.Context; !reflect.DeepEqual(got, object{"library": object{"name": "posthorn-go", "version": analytics.Version}}) {
			t.Errorf("context %v", got)
		}
		const layout = "2006-01-02T15:04:05.000Z"
		if want := called.UTC().Format(layout); call.Timestamp != want {
			t.Errorf("timestamp %s, want that of the call, %s", call.Timestamp, want)
		}
		if want := called.Add(1234 * time.Millisecond).UTC().Format(layout); request.SentAt != want {
			t.Errorf("sentAt %s, want that of the request, %s", request.SentAt, want)
		}
		if len(call.MessageID) != 36 || len(request.MessageID) != 36 || call.MessageID == request.MessageID {
			t.Errorf("message ids %q and %q", call.MessageID, request.MessageID)
		}
	})
}

// asked is a transport that records its requests and answers with success.
type asked chan *http.Request

func (a asked) RoundTrip(r *http.Request) (*http.Response, error) {
	a <- r
	return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: r}, nil
}

func TestDefaultEndpoint(t *testing.T) {
	requests := make(asked, 1)
	client := analytics.New("key", analytics.WithHTTPClient(&http.Client{Transport: requests}))
	must(t, client.Track(track(1)))
	must(t, client.Close())
	// The Service of a Posthorn with the default names; see config/default.
	if r := <-requests; r.Method != http.MethodPost || r.URL.String() != "http://posthorn-dispatcher.posthorn-system/v1/batch" {
		t.Errorf("%s %s", r.Method, r.URL)
	}
}

func TestInvalidCalls(t *testing.T) {
	sink := analyticstest.New()
	client := sink.Client()
	long := analytics.Message{MessageId: strings.Repeat("x", 101)}
	for _, test := range []struct {
		call  analytics.Call
		want  error
		field string
		text  string
	}{
		{&analytics.Track{UserId: "u"}, analytics.ErrNoEvent, "event", "You must pass 'event'."},
		{&analytics.Track{Event: "e"}, analytics.ErrNoUserOrAnonymousID, "userId", "You must pass either an 'anonymousId' or 'userId'."},
		{&analytics.Identify{}, analytics.ErrNoUserOrAnonymousID, "userId", "You must pass either an 'anonymousId' or 'userId'."},
		{&analytics.Page{}, analytics.ErrNoUserOrAnonymousID, "userId", "You must pass either an 'anonymousId' or 'userId'."},
		{&analytics.Screen{}, analytics.ErrNoUserOrAnonymousID, "userId", "You must pass either an 'anonymousId' or 'userId'."},
		{&analytics.Group{UserId: "u"}, analytics.ErrNoGroupID, "groupId", "You must pass a 'groupId'."},
		{&analytics.Group{GroupId: "g"}, analytics.ErrNoUserOrAnonymousID, "userId", "You must pass either an 'anonymousId' or 'userId'."},
		{&analytics.Alias{PreviousId: "p"}, analytics.ErrNoUserID, "userId", "You must pass a 'userId'."},
		{&analytics.Alias{UserId: "u"}, analytics.ErrNoPreviousID, "previousId", "You must pass a 'previousId'."},
		{&analytics.Identify{UserId: "u", Message: long}, analytics.ErrMessageIDTooLong, "messageId", "The 'messageId' must not be longer than 100 bytes."},
		{(*analytics.Identify)(nil), analytics.ErrNilCall, "", ""}, {(*analytics.Track)(nil), analytics.ErrNilCall, "", ""},
		{(*analytics.Page)(nil), analytics.ErrNilCall, "", ""}, {(*analytics.Screen)(nil), analytics.ErrNilCall, "", ""},
		{(*analytics.Group)(nil), analytics.ErrNilCall, "", ""}, {(*analytics.Alias)(nil), analytics.ErrNilCall, "", ""},
		{nil, analytics.ErrNilCall, "", ""},
	} {
		err := client.Enqueue(t.Context(), test.call)
		if !errors.Is(err, test.want) {
			t.Errorf("%T %+v: %v, want %v", test.call, test.call, err, test.want)
			continue
		}
		if e := new(analytics.FieldError); test.field != "" && (!errors.As(err, &e) || e.Field != test.field || e.Error() != test.text) {
			t.Errorf("%T: %q of field %q, want %q of %q", test.call, e.Error(), e.Field, test.text, test.field)
		}
	}
	if err := client.Close(); err != nil || len(sink.Requests()) != 0 {
		t.Errorf("something was sent: %v, %v", err, sink.Requests())
	}
}

func TestMisconfiguredClient(t *testing.T) {
	for name, test := range map[string]struct {
		client *analytics.Client
		field  string
	}{
		"no key":      {analytics.New("", analytics.WithEndpoint("http://a.test")), "writeKey"},
		"no endpoint": {analytics.New("k", analytics.WithEndpoint("")), "Endpoint"},
		"no scheme":   {analytics.New("k", analytics.WithEndpoint("a.test:80")), "Endpoint"},
		"bad scheme":  {analytics.New("k", analytics.WithEndpoint("ftp://a.test")), "Endpoint"},
		"no host":     {analytics.New("k", analytics.WithEndpoint("http:///x")), "Endpoint"},
		"query":       {analytics.New("k", analytics.WithEndpoint("http://a.test/?secret=s3cret")), "Endpoint"},
		"unparsable":  {analytics.New("k", analytics.WithEndpoint("http://a.test/%zz?s3cret")), "Endpoint"},
		"zero value":  {&analytics.Client{}, "writeKey"},
	} {
		t.Run(name, func(t *testing.T) {
			err := test.client.Track(track(1))
			if e := new(analytics.ConfigError); !errors.As(err, &e) || e.Field != test.field {
				t.Fatalf("got %v, want a ConfigError of %s", err, test.field)
			}
			if strings.Contains(err.Error(), "s3cret") {
				t.Errorf("%v contains a secret", err)
			}
			if err := test.client.Flush(t.Context()); err != nil {
				t.Error(err)
			}
			if err := test.client.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestCallSizeLimit(t *testing.T) {
	sink := analyticstest.New()
	client := sink.Client(analytics.FlushAt(1))
	defer client.Close()
	size := func(padding int) int {
		err := client.Identify(&analytics.Identify{UserId: "u", Traits: object{"p": strings.Repeat("x", padding)}})
		if err == nil {
			return 0
		}
		e := new(analytics.SizeError)
		if !errors.As(err, &e) || !errors.Is(err, analytics.ErrTooLarge) || e.Type != "identify" || e.Limit != 32<<10 {
			t.Fatalf("got %v, want a SizeError", err)
		}
		return e.Size
	}
	over := size(40_000)
	if over <= 40_000 {
		t.Fatalf("a call of more than 40000 bytes has size %d", over)
	}
	fits := 40_000 - (over - 32<<10)
	if s := size(fits + 1); s != 32<<10+1 {
		t.Errorf("one byte too many has size %d", s)
	}
	if s := size(fits); s != 0 {
		t.Errorf("a call of exactly 32 KB was refused with size %d", s)
	}
	// The server counts as the client does.
	if err := client.Flush(t.Context()); err != nil {
		t.Error(err)
	}
	body := sink.Requests()[0].Body
	body = bytes.Replace(body, []byte("xx"), []byte("xxx"), 1)
	if b, err := (event.Request{}).Parse(body); err != nil || len(b.Rejected) != 1 || b.Rejected[0].Err.Code != event.CodeCallTooLarge {
		t.Errorf("the server takes a larger call: %v, %v", err, b.Rejected)
	}
}

func TestServerTakesTheDeepestCall(t *testing.T) {
	sink := analyticstest.New()
	client := sink.Client()
	m := object{}
	for range event.MaxDepth - 2 {
		m = object{"m": m}
	}
	if err := client.Identify(&analytics.Identify{UserId: "u", Traits: m}); err != nil {
		t.Fatal(err)
	}
	if e := new(analytics.EncodeError); !errors.As(client.Identify(&analytics.Identify{UserId: "u", Traits: object{"m": m}}), &e) {
		t.Error("a deeper call was queued")
	}
	if err := client.Close(); err != nil {
		t.Error(err)
	}
}

// No request is larger than the server takes, and none is cut short.
func TestBatchSizeLimit(t *testing.T) {
	sink := analyticstest.New()
	client := sink.Client(analytics.FlushAt(2500), analytics.MaxInFlight(1))
	const calls = 200
	for i := range calls {
		m := track(i)
		m.Properties = object{"p": strings.Repeat("x", 100+i*150)}
		if err := client.Track(m); err != nil {
			t.Fatal(err)
		}
	}
	if err := client.Flush(t.Context()); err != nil { // Close has a time limit, which a busy machine exceeds.
		t.Fatal(err)
	}
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	if got := len(sink.Calls()); got != calls {
		t.Errorf("%d calls arrived, want %d", got, calls)
	}
	requests := sink.Requests()
	for i, r := range requests {
		if len(r.Body) > 500<<10 {
			t.Errorf("a request of %d bytes", len(r.Body))
		}
		if i < len(requests)-1 && len(r.Body) < 400<<10 {
			t.Errorf("request %d of %d has only %d bytes", i, len(requests), len(r.Body))
		}
	}
}

// A batch is closed before the server would refuse it because its context, merged
// into each call, makes too much of it.
func TestMergedSizeLimit(t *testing.T) {
	usual := analytics.DefaultContext
	defer func() { analytics.DefaultContext = usual }()
	analytics.DefaultContext = object{"x": strings.Repeat("x", 15_000)}
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		sink.RespondAlways(analyticstest.Answer{Delay: time.Second})
		client := sink.Client(analytics.FlushAt(250), analytics.MaxInFlight(1))
		const calls = 1000
		for i := range calls {
			must(t, client.Track(track(i)))
		}
		if err := client.CloseContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, r := range sink.Requests() {
			if r.Status != http.StatusOK {
				t.Errorf("request %d with %d calls was answered %d", i, len(r.Batch), r.Status)
			}
			if most := event.MaxMergedBytes(len(r.Body)) / 15_000; len(r.Batch) > most {
				t.Errorf("request %d has %d calls with a context of 15 KB, want at most %d", i, len(r.Batch), most)
			}
		}
		// 1 MiB holds 66 of them.
		if got, requests := len(sink.Calls()), len(sink.Requests()); got != calls || requests > calls/60+1 {
			t.Errorf("%d calls arrived in %d requests, want %d in at most %d", got, requests, calls, calls/60+1)
		}
	})
}

// limited answers 413 to requests with more calls than most, as a proxy may.
type limited struct {
	sink *analyticstest.Sink
	most int
	mu   sync.Mutex
	sent []int // calls of each request
}

func (l *limited) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	calls := bytes.Count(body, []byte(`"type":"track"`))
	l.mu.Lock()
	l.sent = append(l.sent, calls)
	l.mu.Unlock()
	if calls > l.most {
		return &http.Response{StatusCode: http.StatusRequestEntityTooLarge, Body: http.NoBody, Request: r}, nil
	}
	return l.sink.RoundTrip(r)
}

// A batch that is too large for the server, or for a proxy, is halved until it
// fits; a single call that does not fit fails.
func TestTooLargeBatchesAreHalved(t *testing.T) {
	for most, want := range map[int]struct{ delivered, requests int }{
		7: {100, 31}, // 100, 2 of 50, 4 of 25, 8 of 12 or 13, 16 of 6 or 7
		0: {0, 199},
	} {
		synctest.Test(t, func(t *testing.T) {
			sink := analyticstest.New()
			proxy := &limited{sink: sink, most: most}
			var mu sync.Mutex
			results := map[string]error{}
			client := sink.Client(analytics.FlushAt(100), analytics.WithHTTPClient(&http.Client{Transport: proxy}), analytics.OnResult(func(r analytics.Result) {
				mu.Lock()
				defer mu.Unlock()
				if _, twice := results[r.MessageID]; twice {
					t.Errorf("most %d: two results for one call", most)
				}
				results[r.MessageID] = r.Err
			}))
			for i := range 100 {
				must(t, client.Track(track(i)))
			}
			err := client.Close()
			var failed *analytics.DeliveryError
			if got := len(sink.Calls()); got != want.delivered || errors.As(err, &failed) != (got < 100) || failed != nil && len(failed.Failed) != 100-got {
				t.Errorf("most %d: %d calls arrived, want %d; Close says %v", most, got, want.delivered, err)
			}
			if len(proxy.sent) != want.requests || len(results) != 100 {
				t.Errorf("most %d: %d requests and %d results, want %d and 100", most, len(proxy.sent), len(results), want.requests)
			}
			var refusal *analytics.ResponseError
			for _, err := range results {
				if most == 0 && (!errors.As(err, &refusal) || refusal.StatusCode != http.StatusRequestEntityTooLarge) || most > 0 && err != nil {
					t.Fatalf("most %d: a call ended with %v", most, err)
				}
			}
		})
	}
}

func TestBatchCallsLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		client := sink.Client(analytics.FlushAt(1_000_000))
		for i := range 2501 {
			if err := client.Track(track(i)); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if r := sink.Requests(); len(r) != 1 || len(r[0].Batch) != 2500 {
			t.Errorf("%d requests", len(r))
		}
		if err := client.Close(); err != nil || len(sink.Calls()) != 2501 {
			t.Errorf("%v, %d calls", err, len(sink.Calls()))
		}
	})
}

func TestFlushTriggers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		client := sink.Client()
		arrived := func(want int, when string) {
			t.Helper()
			synctest.Wait()
			if got := len(sink.Calls()); got != want {
				t.Fatalf("%s: %d calls, want %d", when, got, want)
			}
		}
		for i := range 19 {
			must(t, client.Track(track(i)))
		}
		arrived(0, "19 calls")
		must(t, client.Track(track(19)))
		arrived(20, "20 calls")
		time.Sleep(3 * time.Second)
		must(t, client.Track(track(20)))
		time.Sleep(5*time.Second - 1)
		arrived(20, "just before 5 s")
		time.Sleep(time.Nanosecond)
		arrived(21, "after 5 s")
		if n := len(sink.Requests()); n != 2 {
			t.Errorf("%d requests", n)
		}
		if err := client.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestSettings(t *testing.T) {
	for name, set := range map[string]func(*analytics.Client) *analytics.Client{
		"fields":  func(c *analytics.Client) *analytics.Client { c.Size, c.Interval = 3, time.Second; return c },
		"options": nil,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sink := analyticstest.New()
				var client *analytics.Client
				if set != nil {
					client = set(sink.Client())
				} else {
					client = sink.Client(analytics.FlushAt(3), analytics.FlushAfter(time.Second))
				}
				must(t, client.Track(track(0)))
				time.Sleep(time.Second)
				synctest.Wait()
				if n := len(sink.Calls()); n != 1 {
					t.Errorf("%d calls after 1 s", n)
				}
				for i := range 3 {
					must(t, client.Track(track(i)))
				}
				synctest.Wait()
				if n := len(sink.Calls()); n != 4 {
					t.Errorf("%d calls after 3 more", n)
				}
				client.Close()
			})
		})
	}
}

// Size 1 turns batching off, also when the server is slower than the calls come.
func TestSizeOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		sink.RespondAlways(analyticstest.Answer{Delay: time.Second})
		client := sink.Client(analytics.FlushAt(1), analytics.MaxInFlight(2))
		for i := range 7 {
			must(t, client.Track(track(i)))
		}
		if err := client.Close(); err != nil {
			t.Fatal(err)
		}
		for _, r := range sink.Requests() {
			if len(r.Batch) != 1 {
				t.Errorf("a request of %d calls", len(r.Batch))
			}
		}
		if n := len(sink.Calls()); n != 7 {
			t.Errorf("%d calls", n)
		}
	})
}

// While the server is busy, new calls are sent together.
func TestBusyServerGetsLargerBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		sink.RespondAlways(analyticstest.Answer{Delay: time.Second})
		client := sink.Client(analytics.FlushAt(10), analytics.MaxInFlight(1))
		for i := range 1000 {
			must(t, client.Track(track(i)))
		}
		if err := client.CloseContext(t.Context()); err != nil {
			t.Fatal(err)
		}
		var sizes []int
		for _, r := range sink.Requests() {
			sizes = append(sizes, len(r.Batch))
		}
		if want := []int{10, 100, 100, 100, 100, 100, 100, 100, 100, 100, 90}; !slices.Equal(sizes, want) {
			t.Errorf("requests of %v calls, want %v", sizes, want)
		}
	})
}

func TestRetries(t *testing.T) {
	for name, test := range map[string]struct {
		answer analyticstest.Answer
		after  time.Duration // exact wait; 0: backoff
		final  bool
	}{
		"500":               {answer: analyticstest.Answer{Status: 500}},
		"503 with a time":   {answer: analyticstest.Answer{Status: 503, RetryAfter: "17"}, after: 17 * time.Second},
		"429 with a date":   {answer: analyticstest.Answer{Status: 429, RetryAfter: "Sat, 01 Jan 2000 00:01:30 GMT"}, after: 90 * time.Second}, // synctest begins at midnight
		"429":               {answer: analyticstest.Answer{Status: 429}},
		"408":               {answer: analyticstest.Answer{Status: 408}},
		"connection broken": {answer: analyticstest.Answer{Status: 500, Drop: true}},
		"answer lost":       {answer: analyticstest.Answer{Drop: true}},
		"no answer in time": {answer: analyticstest.Answer{Delay: time.Hour}},
		"400":               {answer: analyticstest.Answer{Status: 400}, final: true},
		"401":               {answer: analyticstest.Answer{Status: 401}, final: true},
		"403":               {answer: analyticstest.Answer{Status: 403}, final: true},
		"404":               {answer: analyticstest.Answer{Status: 404, RetryAfter: "1"}, final: true},
		"413":               {answer: analyticstest.Answer{Status: 413, Body: "<html>\n too  large"}, final: true},
		"301":               {answer: analyticstest.Answer{Status: 301}, final: true},
		"307":               {answer: analyticstest.Answer{Status: 307}, final: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sink := analyticstest.New()
				sink.Respond(test.answer)
				var results []analytics.Result
				client := sink.Client(analytics.FlushAt(1), analytics.OnResult(func(r analytics.Result) { results = append(results, r) }))
				start := time.Now()
				if err := client.Track(track(1)); err != nil {
					t.Fatal(err)
				}
				time.Sleep(5 * time.Minute)
				synctest.Wait()
				requests, calls := sink.Requests(), sink.Calls()
				if len(results) != 1 {
					t.Fatalf("%d results", len(results))
				}
				if test.final {
					e := new(analytics.ResponseError)
					if len(calls) != 0 || !errors.As(results[0].Err, &e) || e.StatusCode != test.answer.Status || results[0].Attempts != 1 {
						t.Errorf("%d requests, result %+v", len(requests), results[0])
					}
					if test.answer.Body != "" && e.Message != "<html> too large" {
						t.Errorf("message %q", e.Message)
					}
					return
				}
				if len(calls) != 1 || results[0].Err != nil || results[0].Attempts != 2 {
					t.Fatalf("%d calls arrived, result %+v", len(calls), results[0])
				}
				last := requests[len(requests)-1]
				wait := last.At.Sub(start)
				if test.answer.Delay > 0 {
					wait -= 10 * time.Second // the request's timeout
				}
				if test.after > 0 && wait != test.after || test.after == 0 && wait > 100*time.Millisecond {
					t.Errorf("sent again after %v, want %v", wait, test.after)
				}
				if got := last.Header.Get("X-Retry-Count"); got != "1" {
					t.Errorf("X-Retry-Count %q", got)
				}
				if len(requests) == 2 && (string(requests[0].Batch[0]) != string(last.Batch[0]) || wait > time.Millisecond && requests[0].SentAt == last.SentAt) {
					t.Errorf("sent again as\n%s\nfirst\n%s", last.Body, requests[0].Body)
				}
				if err := client.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestJitterIsFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		waits := map[time.Duration]bool{}
		for range 50 {
			sink := analyticstest.New()
			sink.Respond(analyticstest.Answer{Status: 500})
			client := sink.Client(analytics.FlushAt(1))
			must(t, client.Track(track(1)))
			time.Sleep(time.Second)
			synctest.Wait()
			r := sink.Requests()
			waits[r[1].At.Sub(r[0].At)] = true
			client.Close()
		}
		shortest, longest := time.Hour, time.Duration(0)
		for w := range waits {
			shortest, longest = min(shortest, w), max(longest, w)
		}
		if len(waits) < 45 || shortest > 20*time.Millisecond || longest < 80*time.Millisecond || longest > 100*time.Millisecond {
			t.Errorf("%d different waits from %v to %v", len(waits), shortest, longest)
		}
	})
}

func TestGivingUp(t *testing.T) {
	for name, test := range map[string]struct {
		option   analytics.Option
		attempts int // at least
		within   time.Duration
	}{
		"default": {analytics.FlushAt(1), 40, 10*time.Minute + 1},
		"1 min":   {analytics.RetryFor(time.Minute), 5, time.Minute},
		"never":   {analytics.RetryFor(0), 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sink := analyticstest.New()
				sink.RespondAlways(analyticstest.Answer{Status: 503})
				var result analytics.Result
				client := sink.Client(analytics.FlushAt(1), test.option, analytics.OnResult(func(r analytics.Result) { result = r }))
				must(t, client.Track(track(1)))
				time.Sleep(time.Hour)
				synctest.Wait()
				requests := sink.Requests()
				if result.Err == nil || result.Attempts != len(requests) || len(requests) < test.attempts {
					t.Errorf("%d requests, %+v", len(requests), result)
				}
				if span := requests[len(requests)-1].At.Sub(requests[0].At); span > test.within {
					t.Errorf("tried for %v", span)
				}
				client.Close()
			})
		})
	}
}

// One batch that has to wait blocks no other, even with one request at a time.
func TestRetriedBatchBlocksNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		sink.Respond(analyticstest.Answer{Status: 503, RetryAfter: "60"})
		client := sink.Client(analytics.FlushAt(1), analytics.MaxInFlight(1))
		start := time.Now()
		for i := range 10 {
			must(t, client.Track(track(i)))
		}
		synctest.Wait()
		if n := len(sink.Calls()); n != 9 || time.Since(start) != 0 {
			t.Errorf("%d calls arrived after %v", n, time.Since(start))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := len(sink.Calls()); n != 10 {
			t.Errorf("%d calls arrived after the wait", n)
		}
		client.Close()
	})
}

func TestRequestsInFlightAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most atomic.Int64
		sink := analyticstest.New()
		sink.RespondAlways(analyticstest.Answer{Delay: time.Second})
		counting := roundTripper(func(r *http.Request) (*http.Response, error) {
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			return sink.RoundTrip(r)
		})
		client := sink.Client(analytics.FlushAt(1), analytics.MaxInFlight(3), analytics.WithHTTPClient(&http.Client{Transport: counting}))
		for i := range 12 {
			must(t, client.Track(track(i)))
		}
		start := time.Now()
		if err := client.Close(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); most.Load() != 3 || took != 4*time.Second {
			t.Errorf("%d at a time, in %v", most.Load(), took)
		}
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestQueueFull(t *testing.T) {
	big := &analytics.Track{UserId: "u", Event: "e", Properties: object{"p": strings.Repeat("x", 20<<10)}}
	for name, test := range map[string]struct {
		option analytics.Option
		fits   int
	}{
		"calls": {analytics.QueueLimit(5), 5},
		"bytes": {analytics.QueueBytes(100 << 10), 4},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sink := analyticstest.New()
				sink.RespondAlways(analyticstest.Answer{Status: 503, RetryAfter: "5"})
				client := sink.Client(test.option)
				start := time.Now()
				for i := range test.fits {
					if err := client.Track(big); err != nil {
						t.Fatalf("call %d: %v", i, err)
					}
				}
				for range 3 {
					if err := client.Track(big); !errors.Is(err, analytics.ErrQueueFull) {
						t.Fatalf("got %v, want ErrQueueFull", err)
					}
				}
				if time.Since(start) != 0 {
					t.Errorf("calls took %v", time.Since(start))
				}
				sink.RespondAlways(analyticstest.Answer{})
				time.Sleep(10 * time.Second)
				synctest.Wait()
				if err := client.Track(big); err != nil {
					t.Errorf("a call after the outage: %v", err)
				}
				if err := client.Close(); err != nil || len(sink.Calls()) != test.fits+1 {
					t.Errorf("%v, %d calls arrived", err, len(sink.Calls()))
				}
			})
		})
	}
}

func TestBlocking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		sink.RespondAlways(analyticstest.Answer{Delay: time.Second})
		client := sink.Client(analytics.QueueLimit(2), analytics.Blocking(), analytics.MaxInFlight(1))
		start := time.Now()
		for i := range 2 {
			must(t, client.Track(track(i)))
		}
		if time.Since(start) != 0 {
			t.Errorf("calls with room took %v", time.Since(start))
		}
		if err := client.Track(track(2)); err != nil || time.Since(start) != time.Second {
			t.Errorf("the call without room: %v after %v", err, time.Since(start))
		}
		must(t, client.Track(track(3)))
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if err := client.Enqueue(ctx, track(4)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a call whose context ended: %v", err)
		}
		blocked := make(chan error)
		go func() { blocked <- client.Track(track(5)) }()
		synctest.Wait()
		go client.Close()
		if err := <-blocked; !errors.Is(err, analytics.ErrClosed) {
			t.Errorf("a call that waited when the client was closed: %v", err)
		}
		client.Close()
		if got := events(sink.Calls()); !slices.Equal(got, []string{"0", "1", "2", "3"}) {
			t.Errorf("arrived: %v", got)
		}
	})
}

func TestOnResult(t *testing.T) {
	sink := analyticstest.New()
	sink.Respond(analyticstest.Answer{Reject: map[int]string{1: "no_event", 7: "nobody"}}, analyticstest.Answer{Status: 401})
	var mu sync.Mutex
	results := map[string]analytics.Result{}
	client := sink.Client(analytics.OnResult(func(r analytics.Result) {
		mu.Lock()
		defer mu.Unlock()
		r.Message = bytes.Clone(r.Message)
		results[r.MessageID] = r
	}))
	for i := range 3 {
		must(t, client.Track(&analytics.Track{UserId: "u", Event: "e", Message: analytics.Message{MessageId: fmt.Sprintf("\"%d\"", i)}}))
	}
	err := client.Flush(t.Context())
	lost := new(analytics.DeliveryError)
	if !errors.As(err, &lost) || len(lost.Failed) != 1 || lost.Failed[0].MessageID != `"1"` || lost.Pending != 0 || lost.Err != nil {
		t.Fatalf("Flush: %v", err)
	}
	must(t, client.Identify(&analytics.Identify{UserId: "u", Message: analytics.Message{MessageId: "last"}}))
	err = client.Close()
	if !errors.As(err, &lost) || len(lost.Failed) != 1 || lost.Failed[0].MessageID != "last" {
		t.Fatalf("Close: %v", err)
	}
	if len(results) != 4 || results[`"0"`].Err != nil || results[`"2"`].Err != nil || results[`"0"`].Type != "track" || results["last"].Type != "identify" {
		t.Errorf("results %v", results)
	}
	if e := new(analytics.RejectedError); !errors.As(results[`"1"`].Err, &e) || e.Code != "no_event" {
		t.Errorf("the rejected call: %v", results[`"1"`].Err)
	}
	if e := new(analytics.ResponseError); !errors.As(results["last"].Err, &e) || e.StatusCode != http.StatusUnauthorized || e.Code != "test" {
		t.Errorf("the refused request: %v", results["last"].Err)
	}
	for id, r := range results {
		var m struct{ MessageID string }
		if err := json.Unmarshal(r.Message, &m); err != nil || m.MessageID != id {
			t.Errorf("%s: message %s (%v)", id, r.Message, err)
		}
	}
}

func TestFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		client := sink.Client()
		if err := client.Flush(t.Context()); err != nil {
			t.Fatalf("of nothing: %v", err)
		}
		sink.Respond(analyticstest.Answer{Status: 503, RetryAfter: "60"})
		must(t, client.Track(track(0)))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := client.Flush(ctx)
		e := new(analytics.DeliveryError)
		if !errors.As(err, &e) || e.Pending != 1 || len(e.Failed) != 0 || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("out of time: %v", err)
		}
		must(t, client.Track(track(1)))
		if err := client.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := len(sink.Calls()); n != 2 {
			t.Errorf("%d calls after Flush", n)
		}
		client.Close()
	})
}

// Flush does not wait for a backoff that the server did not request.
func TestFlushHurries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old := analytics.Backo
		defer func() { analytics.Backo = old }()
		analytics.Backo = constant(5 * time.Minute)
		sink := analyticstest.New()
		sink.Respond(analyticstest.Answer{Status: 500})
		client := sink.Client(analytics.FlushAt(1))
		must(t, client.Track(track(0)))
		synctest.Wait()
		start := time.Now()
		if err := client.Close(); err != nil || time.Since(start) != 0 {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}

type constant time.Duration

func (c constant) Duration(int) time.Duration { return time.Duration(c) }

func TestCloseDelivers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		sink.Respond(analyticstest.Answer{Status: 500}, analyticstest.Answer{Drop: true}, analyticstest.Answer{Status: 429, RetryAfter: "3"})
		client := sink.Client()
		for i := range 50 {
			must(t, client.Track(track(i)))
		}
		if err := client.Close(); err != nil {
			t.Fatal(err)
		}
		if n := len(sink.Calls()); n != 50 {
			t.Errorf("%d calls arrived", n)
		}
		if err := client.Track(track(50)); !errors.Is(err, analytics.ErrClosed) {
			t.Errorf("a call after Close: %v", err)
		}
		if err := client.Close(); err != nil {
			t.Errorf("Close again: %v", err)
		}
		if err := client.Flush(t.Context()); err != nil {
			t.Errorf("Flush after Close: %v", err)
		}
	})
}

// Close of a client that was never used.
func TestCloseUnused(t *testing.T) {
	if err := analytics.New("k").Close(); err != nil {
		t.Error(err)
	}
}

// Close returns each undelivered call once: those in the open
// batch, those under way and those that wait to be tried again.
func TestCloseOutOfTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		sink.Respond(analyticstest.Answer{}, analyticstest.Answer{Status: 503, RetryAfter: "60"})
		sink.RespondAlways(analyticstest.Answer{Delay: time.Hour})
		var results atomic.Int64
		client := sink.Client(analytics.FlushAt(2), analytics.MaxInFlight(1), analytics.RequestTimeout(time.Minute),
			analytics.OnResult(func(analytics.Result) { results.Add(1) }))
		for i := range 9 {
			must(t, client.Track(track(i)))
			synctest.Wait()
		}
		start := time.Now()
		err := client.Close()
		if took := time.Since(start); took != 10*time.Second {
			t.Errorf("took %v", took)
		}
		e := new(analytics.DeliveryError)
		if !errors.As(err, &e) || !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, analytics.ErrClosed) || e.Pending != 0 {
			t.Fatalf("got %v", err)
		}
		var failed []string
		for _, f := range e.Failed {
			var m struct{ MessageID, Event string }
			if err := json.Unmarshal(f.Message, &m); err != nil || m.MessageID != f.MessageID || f.Type != "track" || !errors.Is(f.Err, analytics.ErrClosed) {
				t.Errorf("%+v: %v", f, err)
			}
			failed = append(failed, m.Event)
		}
		slices.Sort(failed)
		if got := events(sink.Calls()); !slices.Equal(got, []string{"0", "1"}) || !slices.Equal(failed, []string{"2", "3", "4", "5", "6", "7", "8"}) {
			t.Errorf("delivered %v, failed %v", got, failed)
		}
		if results.Load() != 9 {
			t.Errorf("%d results", results.Load())
		}
	})
}

// A transport that ignores its context keeps Close only for a moment, and its
// calls are handed back all the same.
func TestCloseWithDeafTransport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		deaf := roundTripper(func(*http.Request) (*http.Response, error) {
			<-release
			return nil, io.ErrUnexpectedEOF
		})
		client := analytics.New("k", analytics.WithEndpoint("http://a.test"), analytics.WithHTTPClient(&http.Client{Transport: deaf}), analytics.FlushAt(1))
		must(t, client.Track(track(1)))
		start := time.Now()
		err := client.Close()
		e := new(analytics.DeliveryError)
		if !errors.As(err, &e) || len(e.Failed) != 1 || time.Since(start) > 12*time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		close(release)
	})
}

// Calls that race with Close are either refused, or delivered.
func TestCallsRacingWithClose(t *testing.T) {
	for range 20 {
		sink := analyticstest.New()
		client := sink.Client(analytics.FlushAt(3))
		var queued atomic.Int64
		var group sync.WaitGroup
		begun := make(chan struct{}, 4)
		for range 4 {
			group.Go(func() {
				for i := range 1000 {
					if i == 10 {
						begun <- struct{}{}
					}
					switch err := client.Track(track(i)); {
					case err == nil:
						queued.Add(1)
					case !errors.Is(err, analytics.ErrClosed):
						t.Error(err)
					}
				}
			})
		}
		<-begun
		if err := client.Close(); err != nil {
			t.Error(err)
		}
		group.Wait()
		if got := int64(len(sink.Calls())); got != queued.Load() {
			t.Errorf("%d calls arrived, %d were queued", got, queued.Load())
		}
	}
}

// Each call arrives exactly once over a real network that fails in all ways.
func TestFaultyServer(t *testing.T) {
	server := analyticstest.NewServer()
	defer server.Close()
	for i := range 40 {
		server.Respond([]analyticstest.Answer{
			{Status: 500}, {}, {Drop: true}, {Status: 429, RetryAfter: "0"}, {Status: 503, Drop: true}, {Delay: time.Millisecond},
		}[i%6])
	}
	client := server.Client(analytics.Gzip())
	const callers, each = 8, 250
	var group sync.WaitGroup
	for caller := range callers {
		group.Go(func() {
			for i := range each {
				if err := client.Track(&analytics.Track{UserId: fmt.Sprint(caller), Event: fmt.Sprint(caller, i), Properties: object{"i": i}}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if err := client.CloseContext(ctx); err != nil {
		t.Fatal(err)
	}
	arrived := map[string]int{}
	for _, c := range server.Calls() {
		arrived[c.Event]++
	}
	if len(arrived) != callers*each || len(server.Calls()) != callers*each {
		t.Errorf("%d different calls of %d arrived, want %d", len(arrived), len(server.Calls()), callers*each)
	}
}

// The caller may change what it passed as soon as the call returns.
func TestCallsCopy(t *testing.T) {
	sink := analyticstest.New()
	client := sink.Client()
	inner := object{"n": 0}
	m := &analytics.Track{UserId: "u", Event: "e", Properties: object{"inner": inner}}
	for i := range 10 {
		inner["n"] = i
		if err := client.Track(m); err != nil {
			t.Fatal(err)
		}
	}
	clear(inner)
	if m.MessageId != "" || m.Timestamp != "" || m.Type != "" {
		t.Errorf("the caller's struct was written to: %+v", m.Message)
	}
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	for i, c := range sink.Calls() {
		if got := c.Properties["inner"].(object)["n"]; got != float64(i) {
			t.Errorf("call %d was sent with %v", i, got)
		}
	}
}

func TestGzip(t *testing.T) {
	for name, test := range map[string]struct {
		padding int
		want    string
	}{"small": {0, ""}, "large": {3000, "gzip"}} {
		t.Run(name, func(t *testing.T) {
			sink := analyticstest.New()
			client := sink.Client(analytics.Gzip())
			for i := range 3 {
				m := track(i)
				m.Properties = object{"p": strings.Repeat("x", test.padding)}
				must(t, client.Track(m))
			}
			if err := client.Close(); err != nil {
				t.Fatal(err)
			}
			if got := sink.Requests()[0].Header.Get("Content-Encoding"); got != test.want || len(sink.Calls()) != 3 {
				t.Errorf("encoding %q, %d calls", got, len(sink.Calls()))
			}
		})
	}
}

// After Close nothing of the client runs: no worker, no timer, no connection.
func TestNoGoroutineIsLeft(t *testing.T) {
	server := analyticstest.NewServer()
	server.Respond(analyticstest.Answer{}, analyticstest.Answer{Status: 500}, analyticstest.Answer{Status: 503, RetryAfter: "60"})
	server.RespondAlways(analyticstest.Answer{Delay: time.Hour})
	client := server.Client(analytics.FlushAt(1))
	for i := range 20 {
		must(t, client.Track(track(i)))
	}
	if _, err := server.Wait(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := client.CloseContext(ctx); err == nil {
		t.Fatal("all was delivered by a server that does not answer")
	}
	server.Close()
	// The runtime ends cancelled goroutines later.
	deadline := time.Now().Add(5 * time.Minute)
	for {
		var profile bytes.Buffer
		if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
			t.Fatal(err)
		}
		left := profile.String()
		if !strings.Contains(left, "posthorn/analytics.") && !strings.Contains(left, "net/http.(*persistConn)") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("goroutines are left:\n%s", left)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestLogs(t *testing.T) {
	text := func(t *testing.T, setup func(*analytics.Client, *bytes.Buffer) *analytics.Client) string {
		var out bytes.Buffer
		sink := analyticstest.New()
		sink.Respond(analyticstest.Answer{}, analyticstest.Answer{Status: 401})
		client := setup(sink.Client(analytics.FlushAt(1), analytics.MaxInFlight(1)), &out)
		for range 2 {
			must(t, client.Track(&analytics.Track{UserId: "u", Event: "e", Properties: object{"private": "pr1vate"}}))
		}
		if err := client.Close(); err == nil {
			t.Fatal("401 was no failure")
		}
		return out.String()
	}
	toLogger := func(c *analytics.Client, out *bytes.Buffer) *analytics.Client {
		c.Logger = log.New(out, "analytics ", 0)
		return c
	}
	const failure, chatter = "calls were not delivered", "batch delivered"
	for name, test := range map[string]struct {
		debug string
		setup func(*analytics.Client, *bytes.Buffer) *analytics.Client
		want  []string
		not   []string
	}{
		"logger":  {"", toLogger, []string{"analytics level=ERROR", failure, "401"}, []string{chatter, "time="}},
		"verbose": {"", func(c *analytics.Client, b *bytes.Buffer) *analytics.Client { c.Verbose = true; return toLogger(c, b) }, []string{failure, chatter}, nil},
		"debug":   {"analytics", toLogger, []string{failure, chatter}, nil},
		"none":    {"analytics", func(c *analytics.Client, _ *bytes.Buffer) *analytics.Client { c.Logger = nil; return c }, nil, []string{"a"}},
		"slog": {"", func(c *analytics.Client, b *bytes.Buffer) *analytics.Client {
			analytics.WithLogger(slog.New(slog.NewJSONHandler(b, nil)))(c)
			return c
		}, []string{`"level":"ERROR"`, failure}, []string{chatter}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("DEBUG", test.debug)
			got := text(t, test.setup)
			for _, want := range test.want {
				if !strings.Contains(got, want) {
					t.Errorf("no %q in\n%s", want, got)
				}
			}
			for _, not := range append(test.not, "pr1vate", "dGVzdDo") {
				if strings.Contains(got, not) {
					t.Errorf("%q in\n%s", not, got)
				}
			}
		})
	}
}

// An outage makes a few lines, not one for each batch.
func TestOutageLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		sink := analyticstest.New()
		sink.RespondAlways(analyticstest.Answer{Status: 503})
		client := sink.Client(analytics.FlushAt(1), analytics.MaxInFlight(1), analytics.RetryFor(time.Minute),
			analytics.WithLogger(slog.New(slog.NewTextHandler(&out, nil))))
		for i := range 1000 {
			must(t, client.Track(track(i)))
		}
		time.Sleep(2 * time.Minute)
		sink.RespondAlways(analyticstest.Answer{})
		must(t, client.Track(track(1000)))
		client.Close()
		text := out.String()
		if n := strings.Count(text, "\n"); n > 12 || strings.Count(text, "does not accept calls") != 1 || strings.Count(text, "accepts calls again") != 1 {
			t.Errorf("%d lines:\n%s", n, text)
		}
		lost := 0
		for line := range strings.Lines(text) {
			if _, after, ok := strings.Cut(line, `delivered" calls=`); ok {
				var n int
				fmt.Sscan(after, &n) //nolint:errcheck // n is 0 then, and the sum is wrong
				lost += n
			}
		}
		if lost != 1000 {
			t.Errorf("the log counts %d lost calls:\n%s", lost, text)
		}
	})
}

// Nothing that the client says holds the write key or the server's password.
func TestErrorsTellNoSecret(t *testing.T) {
	var out bytes.Buffer
	client := analytics.New("s3cretkey", analytics.WithEndpoint("http://user:s3cretpw@127.0.0.1:1/s3cretpath"), analytics.RetryFor(0),
		analytics.WithLogger(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))))
	must(t, client.Track(track(1)))
	err := client.Close()
	if err == nil {
		t.Fatal("something listens on port 1")
	}
	e := new(analytics.DeliveryError)
	if text := fmt.Sprintf("%v %+v %s", err, e, out.String()); strings.Contains(text, "s3cret") {
		t.Errorf("a secret in %s", text)
	}
}

func TestDefaultContext(t *testing.T) {
	old := analytics.DefaultContext
	defer func() { analytics.DefaultContext = old }()
	send := func(c object) (*analyticstest.Sink, error) {
		analytics.DefaultContext = c
		sink := analyticstest.New()
		client := sink.Client()
		err := client.Track(track(1))
		client.Close()
		return sink, err
	}
	own := maps.Clone(old)
	own["app"] = object{"name": "shop"}
	if sink, err := send(own); err != nil || !reflect.DeepEqual(sink.Requests()[0].Context["app"], object{"name": "shop"}) {
		t.Errorf("%v, %v", err, sink.Requests())
	}
	if sink, err := send(nil); err != nil || sink.Requests()[0].Context != nil {
		t.Errorf("%v, %v", err, sink.Requests())
	}
	e := new(analytics.ConfigError)
	if _, err := send(object{"c": make(chan int)}); !errors.As(err, &e) || e.Field != "DefaultContext" {
		t.Errorf("a channel: %v", err)
	}
	if _, err := send(object{"c": strings.Repeat("x", 17<<10)}); !errors.As(err, &e) || e.Field != "DefaultContext" {
		t.Errorf("too large: %v", err)
	}
}
