// This is a program for version 2 of the vendor's library. A test replaces only the import
// path by this package's path, runs the program and checks its calls.
package main

import (
	"io"
	"log"
	"net/http"
	"os"
	"time"

	"github.com/segmentio/analytics-go"
)

// tracker is an interface with which programs replace the client in their tests.
type tracker interface {
	Identify(*analytics.Identify) error
	Track(*analytics.Track) error
	Page(*analytics.Page) error
	Group(*analytics.Group) error
	Alias(*analytics.Alias) error
	io.Closer
}

type properties map[string]interface{}

var _ tracker = (*analytics.Client)(nil)

func main() {
	var endpoint string = analytics.Endpoint
	if e := os.Getenv("ENDPOINT"); e != "" {
		endpoint = e
	}
	analytics.DefaultContext["app"] = map[string]interface{}{"name": "shop", "client": analytics.Version}
	if wait := analytics.Backo.Duration(0); wait <= 0 {
		log.Fatal("no backoff")
	}

	client := analytics.New("h97jamjwbh")
	client.Endpoint = endpoint
	client.Interval = 30 * time.Second
	client.Size = 100
	client.Logger = log.New(os.Stderr, "segment ", log.LstdFlags)
	client.Verbose = true
	client.Client = http.Client{Timeout: 10 * time.Second}
	defer client.Close()

	check(client.Identify(&analytics.Identify{
		UserId: "019mr8mf4r",
		Traits: map[string]interface{}{"name": "Michael Bolton", "email": "mbolton@example.com", "plan": "Enterprise", "friends": 42},
	}))
	check(client.Track(&analytics.Track{
		Event:  "Signed Up",
		UserId: "f4ca124298",
		Properties: properties{
			"plan": "Enterprise",
		},
		Integrations: map[string]interface{}{"All": false, "Mixpanel": true, "Amplitude": map[string]interface{}{"session_id": 1}},
		Message:      analytics.Message{Timestamp: time.Date(2009, 11, 10, 23, 0, 0, 0, time.UTC).Format(time.RFC3339)},
	}))
	page := &analytics.Page{
		AnonymousId: "anonymous",
		Category:    "Docs",
		Name:        "Go library",
		Traits: map[string]interface{}{"url": "https://example.com", "title": "Go library", "referrer": "https://example.com/docs",
			"path": "/go"},
		Context: map[string]interface{}{"ip": "192.0.2.1"},
	}
	page.MessageId = "page-1"
	check(client.Page(page))
	check(client.Group(&analytics.Group{UserId: "019mr8mf4r", GroupId: "56", Traits: map[string]interface{}{"name": "Initech"}}))
	check(client.Alias(&analytics.Alias{PreviousId: "anonymousUser", UserId: "019mr8mf4r"}))

	if err := client.Track(&analytics.Track{UserId: "u"}); err == nil || err.Error() != "You must pass 'event'." {
		log.Fatal("validation: ", err)
	}
	_ = analytics.Batch{Messages: []interface{}{page}, Context: analytics.DefaultContext, Message: analytics.Message{SentAt: ""}}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
