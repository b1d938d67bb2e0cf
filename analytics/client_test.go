//go:build go1.25

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
	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/analytics/internal/check"
)

func track(i int) *analytics.Track {
	return &analytics.Track{UserId: "u", Event: fmt.Sprint(i)}
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
			object{"type": "page", "userId": "u", "anonymousId": "a", "category": "c", "name": "n", "properties": m, "context": c,
				"integrations": in}},
		{&analytics.Screen{UserId: "u", AnonymousId: "a", Category: "c", Name: "n", Properties: m, Context: c, Integrations: in, Message: common},
			object{"type": "screen", "userId": "u", "anonymousId": "a", "category": "c", "name": "n", "properties": m, "context": c,
				"integrations": in}},
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
			t.Errorf("call on the wire: got %v, want %v", got, test.want)
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
		t.Errorf("types: got %v, want %v", types, want)
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
		check.Equal(t, "write key", request.WriteKey, "test")
		want := http.Header{"Content-Type": {"application/json"}, "User-Agent": {"posthorn-go/" + analytics.Version},
			"Authorization": {"Basic dGVzdDo="}}
		if !reflect.DeepEqual(request.Header, want) {
			t.Errorf("headers: got %v, want %v", request.Header, want)
		}
		check.Same(t, "context", request.Context, object{"library": object{"name": "posthorn-go", "version": analytics.Version}})
		const layout = "2006-01-02T15:04:05.000Z"
		check.Equal(t, "timestamp, of the call", call.Timestamp, called.UTC().Format(layout))
		check.Equal(t, "sentAt, of the request", request.SentAt, called.Add(1234*time.Millisecond).UTC().Format(layout))
		if len(call.MessageID) != 36 || len(request.MessageID) != 36 || call.MessageID == request.MessageID {
			t.Errorf("message ids: got %q and %q, want two different UUIDs", call.MessageID, request.MessageID)
		}
	})
}

// recordingTransport records its requests and answers with success.
type recordingTransport chan *http.Request

func (a recordingTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	a <- r
	return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: r}, nil
}

func TestDefaultEndpoint(t *testing.T) {
	requests := make(recordingTransport, 1)
	client := analytics.New("key", analytics.WithHTTPClient(&http.Client{Transport: requests}))
	must(t, client.Track(track(1)))
	must(t, client.Close())
	// The Service of a Posthorn with the default names; see config/default.
	r := <-requests
	check.Equal(t, "method", r.Method, http.MethodPost)
	check.Equal(t, "URL", r.URL.String(), "http://posthorn-dispatcher.posthorn-system/v1/batch")
}

func TestEndpoint(t *testing.T) {
	for endpoint, want := range map[string]string{
		"https://a.test":                        "https://a.test/v1/batch",
		"https://a.test/":                       "https://a.test/v1/batch",
		"https://a.test:8443/proxy":             "https://a.test:8443/proxy/v1/batch",
		"https://user:password@a.test":          "https://a.test/v1/batch",
		"https://a.test/v1/batch":               "https://a.test/v1/batch",
		"https://a.test/v1/batch/":              "https://a.test/v1/batch",
		"https://a.test/proxy/v1/batch":         "https://a.test/proxy/v1/batch",
		"http://a.test/v1/batch/of/a/base/path": "http://a.test/v1/batch/of/a/base/path/v1/batch",
	} {
		requests := make(recordingTransport, 1)
		client := analytics.New("key", analytics.WithEndpoint(endpoint), analytics.WithHTTPClient(&http.Client{Transport: requests}))
		must(t, client.Track(track(1)))
		must(t, client.Close())
		check.Equal(t, "URL of "+endpoint, (<-requests).URL.String(), want)
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
		{&analytics.Identify{UserId: "u", Message: long}, analytics.ErrMessageIDTooLong, "messageId",
			"The 'messageId' must not be longer than 100 characters."},
		{&analytics.Identify{UserId: "u\xff"}, analytics.ErrInvalidID, "id", "The ids must be valid UTF-8."},
		{&analytics.Page{AnonymousId: "a\xed\xa0\x80"}, analytics.ErrInvalidID, "id", "The ids must be valid UTF-8."},
		{&analytics.Alias{UserId: "u", PreviousId: "\x80"}, analytics.ErrInvalidID, "id", "The ids must be valid UTF-8."},
		{&analytics.Group{UserId: "u", GroupId: "g\xe8"}, analytics.ErrInvalidID, "id", "The ids must be valid UTF-8."},
		{&analytics.Identify{UserId: "u", Message: analytics.Message{MessageId: "\xe8-1"}}, analytics.ErrInvalidID, "id",
			"The ids must be valid UTF-8."},
		{(*analytics.Identify)(nil), analytics.ErrNilCall, "", ""}, {(*analytics.Track)(nil), analytics.ErrNilCall, "", ""},
		{(*analytics.Page)(nil), analytics.ErrNilCall, "", ""}, {(*analytics.Screen)(nil), analytics.ErrNilCall, "", ""},
		{(*analytics.Group)(nil), analytics.ErrNilCall, "", ""}, {(*analytics.Alias)(nil), analytics.ErrNilCall, "", ""},
		{nil, analytics.ErrNilCall, "", ""},
	} {
		err := client.Enqueue(t.Context(), test.call)
		if !errors.Is(err, test.want) {
			t.Errorf("error of %T %+v: got %v, want %v", test.call, test.call, err, test.want)
			continue
		}
		if e := new(analytics.FieldError); test.field != "" && (!errors.As(err, &e) || e.Field != test.field || e.Error() != test.text) {
			t.Errorf("error of %T: got %q of field %q, want %q of %q", test.call, e.Error(), e.Field, test.text, test.field)
		}
	}
	check.NoError(t, "close", client.Close())
	check.Equal(t, "requests", len(sink.Requests()), 0)
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
				t.Fatalf("error of Track: got %v, want a ConfigError of %s", err, test.field)
			}
			if strings.Contains(err.Error(), "s3cret") {
				t.Errorf("the error contains a secret: %v", err)
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
			t.Fatalf("error of Identify: got %v, want a SizeError", err)
		}
		return e.Size
	}
	over := size(40_000)
	if over <= 40_000 {
		t.Fatalf("size of a call of more than 40000 bytes: got %d, want more than 40000", over)
	}
	fits := 40_000 - (over - 32<<10)
	check.Equal(t, "size of a call with one byte too many", size(fits+1), 32<<10+1)
	check.Equal(t, "size in the error of a call of exactly 32 KB", size(fits), 0)
	// The server computes the same size as the client.
	if err := client.Flush(t.Context()); err != nil {
		t.Error(err)
	}
	body := sink.Requests()[0].Body
	body = bytes.Replace(body, []byte("xx"), []byte("xxx"), 1)
	if b, err := (event.Request{}).Parse(body); err != nil || len(b.Rejected) != 1 || b.Rejected[0].Err.Code != event.CodeCallTooLarge {
		t.Errorf("larger call at the server: got error %v and rejections %v, want one of call_too_large", err, b.Rejected)
	}
}

func TestServerAcceptsTheDeepestCall(t *testing.T) {
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
		t.Error("deeper call: got no EncodeError, want one")
	}
	if err := client.Close(); err != nil {
		t.Error(err)
	}
}

// No request exceeds the server's limit, and only the last one is small.
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
	if err := client.Flush(t.Context()); err != nil { // A busy machine exceeds the time limit of Close.
		t.Fatal(err)
	}
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	check.Equal(t, "calls", len(sink.Calls()), calls)
	requests := sink.Requests()
	for i, r := range requests {
		if len(r.Body) > 500<<10 {
			t.Errorf("size of request %d: got %d bytes, want at most 500 KB", i, len(r.Body))
		}
		if i < len(requests)-1 && len(r.Body) < 400<<10 {
			t.Errorf("size of request %d of %d: got %d bytes, want at least 400 KB", i, len(requests), len(r.Body))
		}
	}
}

// The client closes a batch before its context, merged into each call, exceeds the server's
// limit.
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
				t.Errorf("status of request %d with %d calls: got %d, want 200", i, len(r.Batch), r.Status)
			}
			if most := event.MaxMergedBytes(len(r.Body)) / 15_000; len(r.Batch) > most {
				t.Errorf("calls of request %d with a context of 15 KB: got %d, want at most %d", i, len(r.Batch), most)
			}
		}
		// A batch of 1 MiB has 66 of them.
		if got, requests := len(sink.Calls()), len(sink.Requests()); got != calls || requests > calls/60+1 {
			t.Errorf("delivery: got %d calls in %d requests, want %d in at most %d", got, requests, calls, calls/60+1)
		}
	})
}

// limited answers 413 to requests with more than most calls, as a proxy may do.
type limited struct {
	sink *analyticstest.Sink
	most int
	mu   sync.Mutex
	sent []int // the number of calls of each request
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
	time.Sleep(time.Millisecond) // In virtual time: the test calls Close before the first response.
	if calls > l.most {
		return &http.Response{StatusCode: http.StatusRequestEntityTooLarge, Body: http.NoBody, Request: r}, nil
	}
	return l.sink.RoundTrip(r)
}

// The client halves a batch that is too large for the server, or for a proxy, until it
// fits. A single call that is too large fails.
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
			client := sink.Client(analytics.FlushAt(100), analytics.WithHTTPClient(&http.Client{Transport: proxy}),
				analytics.OnResult(func(r analytics.Result) {
					mu.Lock()
					defer mu.Unlock()
					if _, twice := results[r.MessageID]; twice {
						t.Errorf("most %d: results of a call: got 2, want 1", most)
					}
					results[r.MessageID] = r.Err
				}))
			for i := range 100 {
				must(t, client.Track(track(i)))
			}
			err := client.Close()
			var failed *analytics.DeliveryError
			if got := len(sink.Calls()); got != want.delivered || errors.As(err, &failed) != (got < 100) ||
				failed != nil && len(failed.Failed) != 100-got {
				t.Errorf("most %d: got %d calls and error %v of Close, want %d calls and an error for the others", most, got, err, want.delivered)
			}
			if len(proxy.sent) != want.requests || len(results) != 100 {
				t.Errorf("most %d: got %d requests and %d results, want %d and 100", most, len(proxy.sent), len(results), want.requests)
			}
			var rejection *analytics.ResponseError
			for _, err := range results {
				if most == 0 && (!errors.As(err, &rejection) || rejection.StatusCode != http.StatusRequestEntityTooLarge) || most > 0 && err != nil {
					t.Fatalf("most %d: result of a call: got %v, want an error 413 if and only if most is 0", most, err)
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
			t.Errorf("requests before Close: got %d, want one with 2500 calls", len(r))
		}
		check.NoError(t, "close", client.Close())
		check.Equal(t, "calls", len(sink.Calls()), 2501)
	})
}

func TestFlushTriggers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		client := sink.Client()
		delivered := func(want int, when string) {
			t.Helper()
			synctest.Wait()
			check.Equal(t, "calls "+when, len(sink.Calls()), want)
		}
		for i := range 19 {
			must(t, client.Track(track(i)))
		}
		delivered(0, "after 19 calls")
		must(t, client.Track(track(19)))
		delivered(20, "after 20 calls")
		time.Sleep(3 * time.Second)
		must(t, client.Track(track(20)))
		time.Sleep(2*time.Second - 1)
		delivered(20, "just before 5 s")
		time.Sleep(time.Nanosecond)
		delivered(21, "5 s after the last flush")
		check.Equal(t, "requests", len(sink.Requests()), 2)
		if err := client.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// FlushAfter counts from the last flush, by its time or by the number of calls.
func TestFlushAfterCountsFromTheLastFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		client := sink.Client(analytics.FlushAt(3))
		began, sent := time.Now(), 0
		call := func(at time.Duration, calls int) {
			time.Sleep(time.Until(began.Add(at)))
			for range calls {
				must(t, client.Track(track(sent)))
				sent++
			}
			synctest.Wait()
		}
		delivered := func(at time.Duration, want int) {
			t.Helper()
			time.Sleep(time.Until(began.Add(at)))
			synctest.Wait()
			check.Equal(t, fmt.Sprint("calls after ", at), len(sink.Calls()), want)
		}
		call(0, 1)
		call(4*time.Second, 1) // It waits for 1 s.
		delivered(5*time.Second-1, 0)
		delivered(5*time.Second, 2)
		call(9*time.Second, 1)
		delivered(10*time.Second-1, 2)
		delivered(10*time.Second, 3)
		call(11*time.Second, 3) // A full batch is a flush, too.
		delivered(11*time.Second, 6)
		call(12*time.Second, 1)
		delivered(16*time.Second-1, 6)
		delivered(16*time.Second, 7)
		call(time.Minute, 1) // It does not wait.
		delivered(time.Minute, 8)
		call(time.Minute+1, 1)
		delivered(time.Minute+5*time.Second-1, 8)
		delivered(time.Minute+5*time.Second, 9)
		check.Equal(t, "requests", len(sink.Requests()), 6)
		must(t, client.Close())
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
				check.Equal(t, "calls after 1 s", len(sink.Calls()), 1)
				for i := range 3 {
					must(t, client.Track(track(i)))
				}
				synctest.Wait()
				check.Equal(t, "calls after 3 more", len(sink.Calls()), 4)
				client.Close()
			})
		})
	}
}

// Size 1 disables batching, even if the server is slower than the callers.
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
			check.Equal(t, "calls of a request", len(r.Batch), 1)
		}
		check.Equal(t, "calls", len(sink.Calls()), 7)
	})
}

// While the server is busy, new calls are sent in larger batches.
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
			t.Errorf("calls of the requests: got %v, want %v", sizes, want)
		}
	})
}

func TestRetries(t *testing.T) {
	for name, test := range map[string]struct {
		answer analyticstest.Answer
		after  time.Duration // exact wait; 0: backoff
		final  bool
	}{
		"500":             {answer: analyticstest.Answer{Status: 500}},
		"503 with a time": {answer: analyticstest.Answer{Status: 503, RetryAfter: "17"}, after: 17 * time.Second},
		// The clock of synctest starts at midnight.
		"429 with a date":   {answer: analyticstest.Answer{Status: 429, RetryAfter: "Sat, 01 Jan 2000 00:01:30 GMT"}, after: 90 * time.Second},
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
					t.Fatalf("results: got %d, want 1", len(results))
				}
				if test.final {
					e := new(analytics.ResponseError)
					if len(calls) != 0 || !errors.As(results[0].Err, &e) || e.StatusCode != test.answer.Status || results[0].Attempts != 1 {
						t.Errorf("result after %d requests: got %+v with %d calls, want a ResponseError %d after 1 attempt", len(requests), results[0], len(calls), test.answer.Status)
					}
					if test.answer.Body != "" && e.Message != "<html> too large" {
						t.Errorf("message: got %q, want %q", e.Message, "<html> too large")
					}
					return
				}
				if len(calls) != 1 || results[0].Err != nil || results[0].Attempts != 2 {
					t.Fatalf("result: got %+v with %d calls, want success after 2 attempts", results[0], len(calls))
				}
				last := requests[len(requests)-1]
				wait := last.At.Sub(start)
				if test.answer.Delay > 0 {
					wait -= 10 * time.Second // the request's timeout
				}
				if test.after > 0 && wait != test.after || test.after == 0 && wait > 100*time.Millisecond {
					t.Errorf("wait before the retry: got %v, want %v (0: at most 100ms)", wait, test.after)
				}
				check.Equal(t, "X-Retry-Count", last.Header.Get("X-Retry-Count"), "1")
				if len(requests) == 2 && (string(requests[0].Batch[0]) != string(last.Batch[0]) ||
					wait > time.Millisecond && requests[0].SentAt == last.SentAt) {
					t.Errorf("retried request: got\n%s\nwant the same calls with another sentAt as\n%s", last.Body, requests[0].Body)
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
			t.Errorf("waits of 50 retries: got %d different ones from %v to %v, want at least 45 between 0 and 100ms", len(waits), shortest, longest)
		}
	})
}

func TestEndOfRetries(t *testing.T) {
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
					t.Errorf("result after %d requests: got %+v, want an error after at least %d attempts", len(requests), result, test.attempts)
				}
				if span := requests[len(requests)-1].At.Sub(requests[0].At); span > test.within {
					t.Errorf("time of the retries: got %v, want at most %v", span, test.within)
				}
				client.Close()
			})
		})
	}
}

// A batch that waits for a retry does not block others, even with one request at a time.
func TestRetriedBatchDoesNotBlockOthers(t *testing.T) {
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
			t.Errorf("calls before the retry: got %d after %v, want 9 after 0s", n, time.Since(start))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		check.Equal(t, "calls after the retry", len(sink.Calls()), 10)
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
		check.Equal(t, "duration", time.Since(start), 4*time.Second)
		check.Equal(t, "concurrent requests", most.Load(), 3)
	})
}

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
						t.Fatalf("call %d: got error %v, want none", i, err)
					}
				}
				for range 3 {
					if err := client.Track(big); !errors.Is(err, analytics.ErrQueueFull) {
						t.Fatalf("call with a full queue: got error %v, want ErrQueueFull", err)
					}
				}
				check.Equal(t, "duration of the calls", time.Since(start), 0)
				sink.RespondAlways(analyticstest.Answer{})
				time.Sleep(10 * time.Second)
				synctest.Wait()
				check.NoError(t, "call after the outage", client.Track(big))
				check.NoError(t, "close", client.Close())
				check.Equal(t, "calls", len(sink.Calls()), test.fits+1)
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
		check.Equal(t, "duration of calls with space in the queue", time.Since(start), 0)
		check.NoError(t, "call with a full queue", client.Track(track(2)))
		check.Equal(t, "duration of a call with a full queue", time.Since(start), time.Second)
		must(t, client.Track(track(3)))
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		check.ErrorIs(t, "call whose context ends", client.Enqueue(ctx, track(4)), context.DeadlineExceeded)
		blocked := make(chan error)
		go func() { blocked <- client.Track(track(5)) }()
		synctest.Wait()
		go client.Close()
		check.ErrorIs(t, "call that waits while the client is closed", <-blocked, analytics.ErrClosed)
		client.Close()
		check.Same(t, "events", events(sink.Calls()), []string{"0", "1", "2", "3"})
	})
}

func TestOnResult(t *testing.T) {
	sink := analyticstest.New()
	sink.Respond(analyticstest.Answer{Reject: map[int]string{1: "no_event", 7: "no_call"}}, analyticstest.Answer{Status: 401})
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
		t.Fatalf("error of Flush: got %v, want a DeliveryError with the rejected call", err)
	}
	must(t, client.Identify(&analytics.Identify{UserId: "u", Message: analytics.Message{MessageId: "last"}}))
	err = client.Close()
	if !errors.As(err, &lost) || len(lost.Failed) != 1 || lost.Failed[0].MessageID != "last" {
		t.Fatalf("error of Close: got %v, want a DeliveryError with the last call", err)
	}
	if len(results) != 4 || results[`"0"`].Err != nil || results[`"2"`].Err != nil || results[`"0"`].Type != "track" ||
		results["last"].Type != "identify" {
		t.Errorf("results: got %v, want 4 with their types, and success of the first and third", results)
	}
	if e := new(analytics.RejectedError); !errors.As(results[`"1"`].Err, &e) || e.Code != "no_event" {
		t.Errorf("error of the rejected call: got %v, want a RejectedError of no_event", results[`"1"`].Err)
	}
	if e := new(analytics.ResponseError); !errors.As(results["last"].Err, &e) || e.StatusCode != http.StatusUnauthorized || e.Code != "test" {
		t.Errorf("error of the rejected request: got %v, want a ResponseError 401", results["last"].Err)
	}
	for id, r := range results {
		var m struct{ MessageID string }
		if err := json.Unmarshal(r.Message, &m); err != nil || m.MessageID != id {
			t.Errorf("message of the result %s: got %s and error %v, want its messageId", id, r.Message, err)
		}
	}
}

func TestFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		client := sink.Client()
		if err := client.Flush(t.Context()); err != nil {
			t.Fatalf("Flush of an empty queue: got error %v, want none", err)
		}
		sink.Respond(analyticstest.Answer{Status: 503, RetryAfter: "60"})
		must(t, client.Track(track(0)))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := client.Flush(ctx)
		e := new(analytics.DeliveryError)
		if !errors.As(err, &e) || e.Pending != 1 || len(e.Failed) != 0 || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Flush with a deadline: got error %v, want a DeliveryError with 1 pending call", err)
		}
		must(t, client.Track(track(1)))
		if err := client.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		check.Equal(t, "calls after Flush", len(sink.Calls()), 2)
		client.Close()
	})
}

// Flush does not wait for a backoff that the server did not request.
func TestFlushSkipsTheBackoff(t *testing.T) {
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
		check.NoError(t, "close", client.Close())
		check.Equal(t, "duration of Close", time.Since(start), 0)
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
		check.Equal(t, "calls", len(sink.Calls()), 50)
		check.ErrorIs(t, "call after Close", client.Track(track(50)), analytics.ErrClosed)
		check.NoError(t, "second Close", client.Close())
		check.NoError(t, "Flush after Close", client.Flush(t.Context()))
	})
}

// Close of an unused client succeeds.
func TestCloseUnused(t *testing.T) {
	if err := analytics.New("k").Close(); err != nil {
		t.Error(err)
	}
}

// Close returns each undelivered call once: those in the open batch, those in flight and
// those that wait for a retry.
func TestCloseTimeout(t *testing.T) {
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
		check.Equal(t, "duration of Close", time.Since(start), 10*time.Second)
		e := new(analytics.DeliveryError)
		if !errors.As(err, &e) || !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, analytics.ErrClosed) || e.Pending != 0 {
			t.Fatalf("error of Close: got %v, want a DeliveryError of the deadline without pending calls", err)
		}
		var failed []string
		for _, f := range e.Failed {
			var m struct{ MessageID, Event string }
			if err := json.Unmarshal(f.Message, &m); err != nil || m.MessageID != f.MessageID || f.Type != "track" ||
				!errors.Is(f.Err, analytics.ErrClosed) {
				t.Errorf("failure: got %+v and error %v, want the id, type and message of a call, and ErrClosed", f, err)
			}
			failed = append(failed, m.Event)
		}
		slices.Sort(failed)
		check.Same(t, "delivered events", events(sink.Calls()), []string{"0", "1"})
		check.Same(t, "failed events", failed, []string{"2", "3", "4", "5", "6", "7", "8"})
		check.Equal(t, "results", results.Load(), 9)
	})
}

// A transport that ignores its context delays Close only for a moment, and Close still
// returns its calls.
func TestCloseWithBlockedTransport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		blocked := roundTripper(func(*http.Request) (*http.Response, error) {
			<-release
			return nil, io.ErrUnexpectedEOF
		})
		client := analytics.New("k", analytics.WithEndpoint("http://a.test"), analytics.WithHTTPClient(&http.Client{Transport: blocked}),
			analytics.FlushAt(1))
		must(t, client.Track(track(1)))
		start := time.Now()
		err := client.Close()
		e := new(analytics.DeliveryError)
		if !errors.As(err, &e) || len(e.Failed) != 1 || time.Since(start) > 12*time.Second {
			t.Errorf("Close: got error %v after %v, want a DeliveryError with 1 call within 12s", err, time.Since(start))
		}
		close(release)
	})
}

// Calls that race with Close are either rejected or delivered.
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
			t.Errorf("delivered calls: got %d, want the %d queued ones", got, queued.Load())
		}
	}
}

// Each call is delivered exactly once over a real network with all kinds of faults.
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
				if err := client.Track(&analytics.Track{UserId: fmt.Sprint(caller), Event: fmt.Sprint(caller, i),
					Properties: object{"i": i}}); err != nil {
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
	delivered := map[string]int{}
	for _, c := range server.Calls() {
		delivered[c.Event]++
	}
	if len(delivered) != callers*each || len(server.Calls()) != callers*each {
		t.Errorf("calls: got %d, of which %d are different, want %d", len(server.Calls()), len(delivered), callers*each)
	}
}

// The caller may change its arguments as soon as the call returns.
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
		t.Errorf("the caller's struct: got %+v, want no changes", m.Message)
	}
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	for i, c := range sink.Calls() {
		if got := c.Properties["inner"].(object)["n"]; got != float64(i) {
			t.Errorf("property of call %d: got %v, want %d", i, got, i)
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
			check.Equal(t, "Content-Encoding", sink.Requests()[0].Header.Get("Content-Encoding"), test.want)
			check.Equal(t, "calls", len(sink.Calls()), 3)
		})
	}
}

// The error of Close has the cause for which the call was not delivered before.
func TestCloseNamesTheLastAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := analyticstest.New()
		sink.RespondAlways(analyticstest.Answer{Status: 503, RetryAfter: "60"})
		client := sink.Client(analytics.FlushAt(1))
		must(t, client.Track(track(1)))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := client.CloseContext(ctx)
		var last *analytics.ResponseError
		if !errors.Is(err, analytics.ErrClosed) || !errors.As(err, &last) || last.StatusCode != 503 {
			t.Errorf("Close: got %v, want ErrClosed and the response 503", err)
		}
	})
}

// After Close the client has no worker, no timer and no connection.
func TestCloseEndsAllGoroutines(t *testing.T) {
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
		t.Fatal("Close with a server that does not answer: got no error, want one")
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
			t.Fatalf("goroutines after Close: got\n%s\nwant none of the client", left)
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
			_ = client.Flush(t.Context()) // The calls are two requests.
		}
		_ = client.Close()
		return out.String()
	}
	toLogger := func(c *analytics.Client, out *bytes.Buffer) *analytics.Client {
		c.Logger = log.New(out, "analytics ", 0)
		return c
	}
	const failure, diagnosis = "calls were not delivered", "batch delivered"
	for name, test := range map[string]struct {
		debug string
		setup func(*analytics.Client, *bytes.Buffer) *analytics.Client
		want  []string
		not   []string
	}{
		"logger": {"", toLogger, []string{"analytics level=ERROR", failure, "401"}, []string{diagnosis, "time="}},
		"verbose": {"", func(c *analytics.Client, b *bytes.Buffer) *analytics.Client {
			c.Verbose = true
			return toLogger(c, b)
		}, []string{failure, diagnosis}, nil},
		"debug": {"analytics", toLogger, []string{failure, diagnosis}, nil},
		"none":  {"analytics", func(c *analytics.Client, _ *bytes.Buffer) *analytics.Client { c.Logger = nil; return c }, nil, []string{"a"}},
		"slog": {"", func(c *analytics.Client, b *bytes.Buffer) *analytics.Client {
			analytics.WithLogger(slog.New(slog.NewJSONHandler(b, nil)))(c)
			return c
		}, []string{`"level":"ERROR"`, failure}, []string{diagnosis}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("DEBUG", test.debug)
			got := text(t, test.setup)
			for _, want := range test.want {
				if !strings.Contains(got, want) {
					t.Errorf("log: got\n%s\nwant one with %q", got, want)
				}
			}
			for _, not := range append(test.not, "pr1vate", "dGVzdDo") {
				if strings.Contains(got, not) {
					t.Errorf("log: got\n%s\nwant one without %q", got, not)
				}
			}
		})
	}
}

// An outage results in a few log messages, not in one for each batch.
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
		if n := strings.Count(text, "\n"); n > 12 || strings.Count(text, "does not accept calls") != 1 ||
			strings.Count(text, "accepts calls again") != 1 {
			t.Errorf("log: got %d lines, want at most 12 with one start and one end of the outage:\n%s", n, text)
		}
		lost := 0
		for line := range strings.Lines(text) {
			if _, after, ok := strings.Cut(line, `delivered" calls=`); ok {
				var n int
				fmt.Sscan(after, &n) //nolint:errcheck // After an error n is 0, and the sum is incorrect.
				lost += n
			}
		}
		if lost != 1000 {
			t.Errorf("lost calls in the log: got %d, want 1000:\n%s", lost, text)
		}
	})
}

// Errors and logs contain neither the write key nor the server's password.
func TestErrorsContainNoSecrets(t *testing.T) {
	var out bytes.Buffer
	client := analytics.New("s3cretkey", analytics.WithEndpoint("http://user:s3cretpw@127.0.0.1:1/s3cretpath"), analytics.RetryFor(0),
		analytics.WithLogger(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))))
	must(t, client.Track(track(1)))
	err := client.Close()
	if err == nil {
		t.Fatal("Close without a server: got no error, want one")
	}
	e := new(analytics.DeliveryError)
	if text := fmt.Sprintf("%v %+v %s", err, e, out.String()); strings.Contains(text, "s3cret") {
		t.Errorf("errors and logs contain a secret: %s", text)
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
		t.Errorf("changed context: got error %v and requests %v, want the context app", err, sink.Requests())
	}
	if sink, err := send(nil); err != nil || sink.Requests()[0].Context != nil {
		t.Errorf("empty context: got error %v and requests %v, want no context", err, sink.Requests())
	}
	e := new(analytics.ConfigError)
	if _, err := send(object{"c": make(chan int)}); !errors.As(err, &e) || e.Field != "DefaultContext" {
		t.Errorf("context with a channel: got error %v, want a ConfigError of DefaultContext", err)
	}
	if _, err := send(object{"c": strings.Repeat("x", 17<<10)}); !errors.As(err, &e) || e.Field != "DefaultContext" {
		t.Errorf("context that is too large: got error %v, want a ConfigError of DefaultContext", err)
	}
}
