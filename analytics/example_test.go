package analytics_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"time"

	"github.com/posthorn/posthorn/analytics"
	"github.com/posthorn/posthorn/analytics/analyticstest"
)

// The examples send to a sink instead of a server.
var server = analyticstest.NewServer()

func Example() {
	client := analytics.New("write key", analytics.WithEndpoint(server.URL))

	err := client.Track(&analytics.Track{
		UserId:     "u1",
		Event:      "Order Completed",
		Properties: map[string]interface{}{"total": 99.5, "currency": "EUR"},
	})
	if err != nil {
		log.Print(err) // the call is invalid, or the queue is full
	}

	// Deliver the queued calls before the program ends.
	if err := client.Close(); err != nil {
		log.Print(err) // lists the undelivered calls
	}
	calls := server.Calls()
	last := calls[len(calls)-1]
	fmt.Println(last.UserID, last.Event, last.Properties["total"])
	// Output: u1 Order Completed 99.5
}

func ExampleNew() {
	client := analytics.New("write key",
		analytics.WithEndpoint("https://track.example"),
		analytics.FlushAt(100),
		analytics.FlushAfter(time.Second),
		analytics.WithLogger(slog.New(slog.NewJSONHandler(os.Stderr, nil))),
	)
	defer client.Close()
	fmt.Println(client.Size, client.Interval)
	// Output: 100 1s
}

// An anonymous visitor signs up: the calls before and after it belong to one
// user.
func ExampleClient_Alias() {
	sink := analyticstest.New()
	client := sink.Client()
	err := errors.Join(
		client.Track(&analytics.Track{AnonymousId: "visitor-7", Event: "Article Read"}),
		client.Alias(&analytics.Alias{PreviousId: "visitor-7", UserId: "u1"}),
		client.Identify(&analytics.Identify{UserId: "u1", Traits: map[string]interface{}{"plan": "free"}}),
		client.Track(&analytics.Track{UserId: "u1", Event: "Article Shared"}),
		client.Close(),
	)
	if err != nil {
		log.Print(err)
	}
	for _, call := range sink.Calls() {
		fmt.Printf("%s of %s\n", call.Type, cmp.Or(call.UserID, call.AnonymousID))
	}
	// Output:
	// track of visitor-7
	// alias of u1
	// identify of u1
	// track of u1
}

// Every call can have Integrations and a Timestamp: this imports an old order, and sends
// it to only one destination.
func ExampleClient_Track() {
	sink := analyticstest.New()
	client := sink.Client()
	err := client.Track(&analytics.Track{
		UserId:       "u1",
		Event:        "Order Completed",
		Integrations: map[string]interface{}{"All": false, "crm": true},
		Message:      analytics.Message{Timestamp: "2020-02-29T12:00:00Z"},
	})
	if err := errors.Join(err, client.Close()); err != nil {
		log.Print(err)
	}
	call := sink.Calls()[0]
	fmt.Println(call.Timestamp, call.Integrations)
	// Output: 2020-02-29T12:00:00Z map[All:false crm:true]
}

func ExampleClient_Track_errors() {
	client := analytics.New("write key", analytics.WithEndpoint(server.URL))
	defer client.Close()

	err := client.Track(&analytics.Track{UserId: "u1"})
	var field *analytics.FieldError
	switch {
	case errors.Is(err, analytics.ErrQueueFull): // the server is down or slow: count it
	case errors.Is(err, analytics.ErrTooLarge): // more than 32 KB
	case errors.As(err, &field):
		fmt.Println(field.Field, "-", err)
	}
	// Output: event - You must pass 'event'.
}

func ExampleOnResult() {
	sink := analyticstest.New()
	sink.Respond(analyticstest.Answer{Reject: map[int]string{1: "call_too_large"}})
	client := sink.Client(analytics.OnResult(func(r analytics.Result) {
		fmt.Println(r.MessageID, r.Err)
	}))
	for _, id := range []string{"m0", "m1"} {
		if err := client.Track(&analytics.Track{UserId: "u1", Event: "e", Message: analytics.Message{MessageId: id}}); err != nil {
			log.Print(err)
		}
	}
	client.Close()
	// Output:
	// m0 <nil>
	// m1 analytics: the server rejected the call: call_too_large: rejected by the test
}

func ExampleClient_CloseContext() {
	sink := analyticstest.New()
	sink.RespondAlways(analyticstest.Answer{Status: 503, RetryAfter: "60"})
	client := sink.Client()
	client.Logger = nil
	err := client.Track(&analytics.Track{UserId: "u1", Event: "Order Completed", Message: analytics.Message{MessageId: "m1"}})
	if err != nil {
		log.Print(err)
	}

	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	err = client.CloseContext(ctx)
	var lost *analytics.DeliveryError
	if errors.As(err, &lost) {
		for _, f := range lost.Failed {
			fmt.Println(f.Type, f.MessageID, "was not delivered") // f.Message is the call: keep it
		}
	}
	// Output: track m1 was not delivered
}
