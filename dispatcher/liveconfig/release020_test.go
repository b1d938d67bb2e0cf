package liveconfig

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A config of release 0.2.0 is decoded as its equivalent with the present names.
func TestConfigOfRelease020(t *testing.T) {
	const rest = `"success":"AnyEndpoint","delivery":{"retryWindowMS":1}}]}`
	old := `{"version":1,"tenant":"a","destinations":[{"name":"d","state":"Held","heldReason":"NoSource",` + rest
	got, _, err := Decode(compressed(t, old))
	if err != nil {
		t.Fatal(err)
	}
	want, _, err := Decode(compressed(t, `{"version":1,"namespace":"a","destinations":[{"name":"d","state":"Paused","pausedReason":"NoSource",`+rest))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the config of release 0.2.0 is read as (-want +got):\n%s", diff)
	}

	for name, c := range map[string]struct{ old, want string }{
		"both names of the namespace": {strings.Replace(old, `"tenant"`, `"namespace":"b","tenant"`, 1), `unknown field ` + `"tenant"`},
		"an unknown field":            {strings.Replace(old, `"tenant"`, `"extra":1,"tenant"`, 1), `unknown field "extra"`},
		"an unknown state":            {strings.Replace(old, `"Held"`, `"Off"`, 1), `state "Off" is unknown`},
		"destinations of no list":     {`{"version":1,"tenant":"a","destinations":1}`, "does not match the format"},
	} {
		if _, _, err := Decode(compressed(t, c.old)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, c.want)
		}
	}
}

// types020 are the types of release 0.2.0, as far as its decoder checks the names.
type types020 struct {
	Version int    `json:"version"`
	Tenant  string `json:"tenant"`
	Sources []struct {
		Name           string   `json:"name"`
		Generation     int64    `json:"generation"`
		Revision       string   `json:"revision"`
		Enabled        bool     `json:"enabled"`
		WriteKeySHA256 string   `json:"writeKeySHA256,omitempty"`
		AllowedOrigins []string `json:"allowedOrigins,omitempty"`
		CallsPerSecond int      `json:"callsPerSecond,omitempty"`
		Burst          int      `json:"burst,omitempty"`
	} `json:"sources,omitempty"`
	Destinations []struct {
		Name       string   `json:"name"`
		Generation int64    `json:"generation"`
		Revision   string   `json:"revision"`
		State      string   `json:"state"`
		HeldReason string   `json:"heldReason,omitempty"`
		Sources    []string `json:"sources,omitempty"`
		Endpoints  []struct {
			Name    string   `json:"name"`
			URL     Secret   `json:"url,omitzero"`
			Headers []Header `json:"headers,omitempty"`
			TLS     *TLS     `json:"tls,omitempty"`
		} `json:"endpoints,omitempty"`
		Signing *struct {
			Scheme   string `json:"scheme"`
			Secret   Secret `json:"secret"`
			Previous Secret `json:"previous,omitzero"`
		} `json:"signing,omitempty"`
		Success  string `json:"success"`
		Delivery struct {
			TimeoutMS         int64 `json:"timeoutMS"`
			RetryWindowMS     int64 `json:"retryWindowMS"`
			MinBackoffMS      int64 `json:"minBackoffMS"`
			MaxBackoffMS      int64 `json:"maxBackoffMS"`
			MaxInFlight       int   `json:"maxInFlight"`
			RequestsPerSecond int   `json:"requestsPerSecond,omitempty"`
		} `json:"delivery"`
		Filter      *Filter `json:"filter,omitempty"`
		DeadLetters struct {
			RetentionMS int64 `json:"retentionMS"`
			MaxBytes    int64 `json:"maxBytes"`
		} `json:"deadLetters"`
	} `json:"destinations,omitempty"`
	Audiences []Audience `json:"audiences,omitempty"`
	Deletions []struct {
		Name       string   `json:"name"`
		Generation int64    `json:"generation"`
		Revision   string   `json:"revision"`
		ID         string   `json:"id,omitempty"`
		UserID     string   `json:"userId"`
		Sources    []string `json:"sources,omitempty"`
		Suppress   bool     `json:"suppress,omitempty"`
	} `json:"deletions,omitempty"`
}

// expressible returns a config with a paused destination and no field that release 0.2.0 lacks.
func expressible() Config {
	c := full()
	c.Redeliveries = nil
	for i := range c.Sources {
		c.Sources[i].WriteKeySHA256 = c.Sources[i].WriteKeySHA256[:1]
	}
	for i := range c.Deletions {
		d := &c.Deletions[i]
		d.UID, d.Ended, d.DeadlineSeconds = "", false, 0
	}
	d := c.Destinations[0]
	d.SourcesUnknown, d.ExactNumbers, d.Delivery.RetryStatusCodes, d.DeadLetters.ForwardTo = false, false, nil, ""
	d.Signing = SigningSchemes{{Type: HMACSHA1, Secret: NewSecret("secret"), Previous: NewSecret("previous")}}
	d.Endpoints = slices.Clone(d.Endpoints)
	for i := range d.Endpoints {
		d.Endpoints[i].OAuth2 = nil
	}
	active, paused := d, d
	active.Name, active.State, active.PausedReason = "active", Active, ""
	paused.Name, paused.State, paused.PausedReason = "paused", Paused, "NoSource"
	c.Destinations = []Destination{active, paused}
	return c
}

// A config for release 0.2.0 has only its names, unless an object uses a newer field, and is read by
// this release as the same config.
func TestConfigForRelease020(t *testing.T) {
	strict := func(data []byte) (c types020, err error) {
		plain, err := decompress(data, 0)
		if err != nil {
			t.Fatal(err)
		}
		d := json.NewDecoder(bytes.NewReader(plain))
		d.DisallowUnknownFields()
		return c, d.Decode(&c)
	}
	c := expressible()
	var e Encoder
	for _, names020 := range []bool{false, true, false, true} { // The kept texts are not used for the other format.
		e.Names020 = names020
		data, _, err := e.Encode(c)
		if err != nil {
			t.Fatal(err)
		}
		old, err := strict(data)
		if (err == nil) != names020 {
			t.Errorf("names of 0.2.0: %v; release 0.2.0 reads the config with error %v", names020, err)
		}
		if names020 && (old.Tenant != c.Namespace || len(old.Destinations) != 2 || old.Destinations[0].State != "Active" || old.Destinations[1].State != "Held" || old.Destinations[1].HeldReason != "NoSource") {
			t.Errorf("release 0.2.0 reads %+v", old)
		}
		got, _, err := Decode(data)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c, got); diff != "" {
			t.Errorf("names of 0.2.0: %v; the config is read as (-want +got):\n%s", names020, diff)
		}
	}

	// Release 0.2.0 rejects what it cannot express; this release loses nothing.
	for name, change := range map[string]func(*Config){
		"two write keys": func(c *Config) {
			c.Sources[0].WriteKeySHA256 = append(c.Sources[0].WriteKeySHA256[:1:1], strings.Repeat("cd", 32))
		},
		"retry status codes": func(c *Config) { c.Destinations[0].Delivery.RetryStatusCodes = []int{404} },
		"two signing schemes": func(c *Config) {
			c.Destinations[0].Signing = append(c.Destinations[0].Signing, SigningScheme{Type: StandardWebhooks, Secret: NewSecret("s")})
		},
		"a redelivery": func(c *Config) { c.Redeliveries = full().Redeliveries },
	} {
		c := expressible()
		change(&c)
		data, _, err := (&Encoder{Names020: true}).Encode(c)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := strict(data); err == nil {
			t.Errorf("%s: release 0.2.0 accepts the config, want an error", name)
		}
		got, _, err := Decode(data)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c, got); diff != "" {
			t.Errorf("%s: the config is read as (-want +got):\n%s", name, diff)
		}
	}
}
