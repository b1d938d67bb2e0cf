package liveconfig

import (
	"bytes"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/check"
)

// A destination with a field of a newer release is paused, and the other objects remain in effect.
func TestUnknownFieldOfADestination(t *testing.T) {
	c := full()
	other := c.Destinations[0]
	other.Name = "other"
	c.Destinations = append(c.Destinations, other)
	data, _, err := Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := decompress(data, 0)
	if err != nil {
		t.Fatal(err)
	}
	newer := bytes.Replace(plain, []byte(`"contentType":`), []byte(`"newer":{"a":[1]},"contentType":`), 1)
	if data, err = compress(newer); err != nil {
		t.Fatal(err)
	}
	for _, decode := range []func() (Config, error){
		func() (Config, error) {
			c, _, err := Decode(data)
			return c, err
		},
		func() (Config, error) {
			r, err := new(Decoder).Decode("shop", Stored{Config: data})
			return r.Config, err
		},
	} {
		got, err := decode()
		if err != nil {
			t.Fatal(err)
		}
		check.Equal(t, "state", got.Destinations[0].State, Paused)
		check.Equal(t, "revision", got.Destinations[0].Revision, UnknownField+"r2")
		check.Equal(t, "URL", got.Destinations[0].Endpoints[0].URL.Reveal(), c.Destinations[0].Endpoints[0].URL.Reveal())
		check.Equal(t, "state of the other one", got.Destinations[1].State, Active)
		check.Equal(t, "revision of the other one", got.Destinations[1].Revision, "r2")
	}
	if data, err = compress(bytes.Replace(plain, []byte(`"sources":`), []byte(`"newer":1,"sources":`), 1)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Decode(data); err == nil || !strings.Contains(err.Error(), "unknown field") {
		t.Errorf("unknown field of the config: got error %v", err)
	}
}
