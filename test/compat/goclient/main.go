// Command goclient sends calls with the vendor's Go client, version 3, and
// prints their results: one line of JSON {"id", "error"} per call.
//
//	goclient -endpoint http://127.0.0.1:8080 -write-key key showcase
//	goclient -endpoint … -write-key key -calls 60 -batch 20 many
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"reflect"
	"time"

	"gopkg.in/segmentio/analytics-go.v3"
)

var (
	endpoint = flag.String("endpoint", "", "the server")
	writeKey = flag.String("write-key", "", "the write key")
	calls    = flag.Int("calls", 60, "number of calls of many, a multiple of -batch")
	batch    = flag.Int("batch", 20, "calls per request of many")
)

// result is the client's result of a call.
type result struct {
	ID    string `json:"id"`
	Error string `json:"error,omitempty"`
}

// report gets the client's callbacks.
type report chan result

func (r report) Success(m analytics.Message) { r <- result{ID: id(m)} }
func (r report) Failure(m analytics.Message, err error) {
	r <- result{ID: id(m), Error: err.Error()}
}

func id(m analytics.Message) string { return reflect.ValueOf(m).FieldByName("MessageId").String() }

func main() {
	flag.Parse()
	var messages []analytics.Message
	switch flag.Arg(0) {
	case "showcase":
		messages = showcase()
	case "many":
		messages = many()
	default:
		fatal(fmt.Errorf("unknown argument %q; use showcase or many", flag.Arg(0)))
	}
	size := *batch
	if flag.Arg(0) == "showcase" {
		size = len(messages)
	}
	results := make(report, len(messages))
	// Retries, backoff and timeouts are the client's defaults.
	client, err := analytics.NewWithConfig(*writeKey, analytics.Config{Endpoint: *endpoint, BatchSize: size, Callback: results})
	if err != nil {
		fatal(err)
	}
	for _, m := range messages {
		if err := client.Enqueue(m); err != nil {
			fatal(err)
		}
	}
	// Close would drop calls that wait for a retry, so wait for all results first.
	for range messages {
		line, err := json.Marshal(<-results)
		if err != nil {
			fatal(err)
		}
		fmt.Println(string(line))
	}
	if err := client.Close(); err != nil {
		fatal(err)
	}
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, "goclient:", err)
	os.Exit(1)
}

// showcase returns a call of every type, with each field of the client's structs.
func showcase() []analytics.Message {
	past := time.Date(2020, 2, 29, 12, 30, 15, 0, time.FixedZone("", -5*60*60))
	context := &analytics.Context{
		App:       analytics.AppInfo{Name: "Shop", Version: "1.2", Build: "7", Namespace: "com.example.shop"},
		Campaign:  analytics.CampaignInfo{Name: "spring", Source: "mail", Medium: "link", Term: "a+b", Content: "top"},
		Device:    analytics.DeviceInfo{Id: "d1", Manufacturer: "Acme", Model: "X", Type: "phone"},
		IP:        net.ParseIP("203.0.113.7"),
		Locale:    "de-AT",
		Location:  analytics.LocationInfo{City: "Wien", Country: "AT", Latitude: 48.2082, Longitude: 16.3738, Speed: 1.5},
		Network:   analytics.NetworkInfo{Carrier: "A1", WIFI: true},
		OS:        analytics.OSInfo{Name: "Linux", Version: "6.1"},
		Page:      analytics.PageInfo{URL: "https://shop.example/?a=1&b=<2>", Path: "/", Title: "Home"},
		Referrer:  analytics.ReferrerInfo{Type: "search", Name: "engine", URL: "https://search.example/", Link: "l"},
		Screen:    analytics.ScreenInfo{Density: 2, Width: 1080, Height: 1920},
		Timezone:  "Europe/Vienna",
		UserAgent: "Mozilla/5.0 (X11; Linux x86_64)",
		Traits:    analytics.NewTraits().SetEmail("a@example.com"),
		Extra:     map[string]interface{}{"beta": true, "groupId": "g0"},
	}
	return []analytics.Message{
		analytics.Identify{
			MessageId: "go-identify", UserId: "u1", Timestamp: past, Context: context,
			Traits: analytics.NewTraits().SetName("Ünal <b> & \u2028 \"q\" 😀").SetEmail("a@example.com").SetAge(41).
				SetCreatedAt(past).Set("plan", "pro").Set("10", "ten").Set("2", "two").Set("tags", []string{"a", "b"}),
			Integrations: analytics.NewIntegrations().EnableAll().Disable("Other").Set("Webhooks", map[string]interface{}{"mode": "x"}),
		},
		analytics.Track{
			MessageId: "go-track", UserId: "u1", AnonymousId: "a1", Event: "Order Completed",
			Properties: analytics.NewProperties().SetRevenue(99.5).SetCurrency("EUR").SetOrderId("o-1").SetTotal(1e21).
				SetProducts(analytics.Product{ID: "p1", SKU: "s1", Name: "Pen", Price: 1.10}, analytics.Product{ID: "p2", Price: 3e-7}).
				Set("none", nil).Set("nested", map[string]interface{}{"b": 1, "a": []interface{}{1.0, -0.5, "x", nil, true}}),
		},
		analytics.Page{MessageId: "go-page", AnonymousId: "a1", Name: "Home",
			Properties: analytics.NewProperties().SetURL("https://shop.example/").SetPath("/").SetReferrer("").SetTitle("Home")},
		analytics.Screen{MessageId: "go-screen", UserId: "u1", Name: "Cart", Properties: analytics.NewProperties().SetValue(3)},
		analytics.Group{MessageId: "go-group", UserId: "u1", GroupId: "acme",
			Traits: analytics.NewTraits().SetName("Acme").Set("employees", 420)},
		analytics.Alias{MessageId: "go-alias", UserId: "u1", PreviousId: "a1"},
		// It excludes the destination. The client writes "all" for All.
		analytics.Track{MessageId: "go-elsewhere", UserId: "u1", Event: "E", Integrations: analytics.NewIntegrations().DisableAll().Enable("Other")},
		// The client adds the missing fields.
		&analytics.Track{UserId: "u1", Event: "Minimal"},
	}
}

// many returns calls of all types in turn, with messageIds go-0, go-1, ….
func many() (messages []analytics.Message) {
	for i := range *calls {
		id := fmt.Sprintf("go-%d", i)
		messages = append(messages, []analytics.Message{
			analytics.Identify{MessageId: id, UserId: "u1", Traits: analytics.NewTraits().Set("n", i)},
			analytics.Track{MessageId: id, UserId: "u1", Event: "E", Properties: analytics.NewProperties().Set("n", i)},
			analytics.Page{MessageId: id, UserId: "u1", Name: "Home"},
			analytics.Screen{MessageId: id, UserId: "u1", Name: "Cart"},
			analytics.Group{MessageId: id, UserId: "u1", GroupId: "acme"},
			analytics.Alias{MessageId: id, UserId: "u1", PreviousId: "a1"},
		}[i%6])
	}
	return messages
}
