package analyticstest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/analytics"
	"github.com/posthorn/posthorn/analytics/analyticstest"
	"github.com/posthorn/posthorn/analytics/internal/check"
)

func post(t *testing.T, url, key, body string) (int, map[string]any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		req.SetBasicAuth(key, "")
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var answer map[string]any
	if err := json.NewDecoder(res.Body).Decode(&answer); err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, answer
}

// The sink rejects invalid requests with the same codes as Posthorn.
func TestServerAnswers(t *testing.T) {
	s := analyticstest.NewServer()
	defer s.Close()
	for name, test := range map[string]struct {
		path, key, body string
		status          int
		code            string
	}{
		"accepted":    {"/v1/batch", "k", `{"batch":[{"type":"track","event":"e","userId":"u","messageId":"a"}]}`, 200, ""},
		"no key":      {"/v1/batch", "", `{"batch":[{}]}`, 401, "no_write_key"},
		"no calls":    {"/v1/batch", "k", `{"batch":[]}`, 400, "empty_batch"},
		"no event":    {"/v1/batch", "k", `{"batch":[{"type":"track","userId":"u"}]}`, 200, "no_event"},
		"no JSON":     {"/v1/batch", "k", `{`, 400, "invalid_json"},
		"unknown":     {"/v2/batch", "k", `{}`, 404, "not_found"},
		"wrong field": {"/v1/batch", "k", `{"batch":[{"type":"page","userId":"u","messageId":7}]}`, 200, "invalid_field"},
	} {
		t.Run(name, func(t *testing.T) {
			status, answer := post(t, s.URL+test.path, test.key, test.body)
			text := fmt.Sprint(answer)
			if status != test.status || !strings.Contains(text, test.code) {
				t.Errorf("answer: got status %d and %s, want status %d and code %q", status, text, test.status, test.code)
			}
		})
	}
	if calls := s.Calls(); len(calls) != 1 || calls[0].WriteKey != "k" || calls[0].MessageID != "a" {
		t.Errorf("calls: got %+v, want one with write key k and messageId a", calls)
	}
}

func TestDuplicatesAreAcceptedOnce(t *testing.T) {
	s := analyticstest.New()
	s.Respond(analyticstest.Answer{Drop: true})
	c := s.Client()
	if err := c.Track(&analytics.Track{UserId: "u", Event: "e"}); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	check.Equal(t, "requests", len(s.Requests()), 2)
	check.Equal(t, "calls", len(s.Calls()), 1)
	check.Equal(t, "duplicates", s.Duplicates(), 1)
}

func TestWait(t *testing.T) {
	s := analyticstest.New()
	c := s.Client(analytics.FlushAt(1))
	defer c.Close()
	go func() {
		if err := c.Track(&analytics.Track{UserId: "u", Event: "e"}); err != nil {
			t.Error(err)
		}
	}()
	calls, err := s.Wait(t.Context(), 1)
	check.NoError(t, "wait for 1 call", err)
	check.Equal(t, "calls", len(calls), 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	calls, err = s.Wait(ctx, 2)
	check.ErrorIs(t, "wait for 2 calls", err, context.DeadlineExceeded)
	check.Equal(t, "calls at the end of the context", len(calls), 1)
}

// signUp is an example of code under test.
func signUp(client *analytics.Client, user string) error {
	return client.Track(&analytics.Track{UserId: user, Event: "Signed Up"})
}

func Example() {
	sink := analyticstest.New()
	client := sink.Client()
	if err := signUp(client, "u1"); err != nil {
		fmt.Println(err)
	}
	client.Close()
	for _, call := range sink.Calls() {
		fmt.Println(call.Type, call.UserID, call.Event)
	}
	// Output: track u1 Signed Up
}

// Tests how the code behaves while the server fails.
func ExampleSink_Respond() {
	sink := analyticstest.New()
	sink.Respond(analyticstest.Answer{Status: 503}, analyticstest.Answer{Drop: true})
	client := sink.Client()
	fmt.Println(signUp(client, "u1"))
	fmt.Println(client.Close(), len(sink.Calls()), "call,", len(sink.Requests()), "requests")
	// Output:
	// <nil>
	// <nil> 1 call, 3 requests
}
