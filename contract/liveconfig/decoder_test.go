package liveconfig

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// storedText is a live config with any text.
func storedText(t testing.TB, text string) Stored {
	t.Helper()
	data, err := compress([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return Stored{Config: data}
}

// textOf returns the text of a config.
func textOf(t testing.TB, c Config) string {
	t.Helper()
	data, _, err := Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := decompress(data, 0)
	if err != nil {
		t.Fatal(err)
	}
	return string(plain)
}

// expectDecoded checks that a Decoder returns what Stored.Decode returns.
func expectDecoded(t testing.TB, d *Decoder, s Stored) Revisioned {
	t.Helper()
	want, wantErr := s.Decode()
	got, err := d.Decode("shop", s)
	if fmt.Sprint(err) != fmt.Sprint(wantErr) {
		t.Errorf("error: got %v, want %v", err, wantErr)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("decoded config (-want +got):\n%s", diff)
	}
	return got
}

// A Decoder decodes only the destinations that changed.
func TestDecoderReusesDestinations(t *testing.T) {
	c := many(50)
	var d Decoder
	var before Revisioned
	for _, step := range []struct {
		name    string
		change  func()
		decoded int // the destinations that are decoded
	}{
		{"first", func() {}, 50},
		{"nothing", func() {}, 0},
		{"edit", func() { c.Destinations[20].Delivery.MaxInFlight++ }, 1},
		{"edit without a new revision", func() {
			c.Destinations[20].Endpoints = slices.Clone(c.Destinations[20].Endpoints)
			c.Destinations[20].Endpoints[0].URL = NewSecret(`https://hooks.example/"}],{[\` + canary)
		}, 1},
		{"addition", func() {
			added := c.Destinations[10]
			added.Name += "-a"
			c.Destinations = slices.Insert(c.Destinations, 11, added)
		}, 1},
		{"removal", func() { c.Destinations = c.Destinations[5:] }, 0},
		{"a Source", func() { c.Sources = slices.Clone(c.Sources); c.Sources[0].Burst++ }, 0},
		{"no destination", func() { c.Destinations = nil }, 0},
		{"again", func() { c.Destinations = many(3).Destinations }, 3},
	} {
		step.change()
		data, _, err := Encode(c)
		if err != nil {
			t.Fatal(err)
		}
		after := expectDecoded(t, &d, Stored{Config: data})
		shared := map[*Endpoint]bool{}
		for _, old := range before.Destinations {
			shared[&old.Endpoints[0]] = true
		}
		decoded := 0
		for _, n := range after.Destinations {
			if !shared[&n.Endpoints[0]] {
				decoded++
			}
		}
		if decoded != step.decoded {
			t.Errorf("%s: decoded destinations: got %d, want %d", step.name, decoded, step.decoded)
		}
		before = after
	}
}

// oddTexts are texts that Encode does not write. The first is valid.
func oddTexts(t testing.TB) []string {
	text := textOf(t, full())
	replace := func(old, with string) string {
		if !strings.Contains(text, old) {
			t.Fatalf("the text of the config has no %s", old)
		}
		return strings.Replace(text, old, with, 1)
	}
	list := `,"destinations":[`
	return []string{
		text,
		replace(`"destinations":`, `"Destinations":`),
		replace(list, `,"destinations": [`),
		replace(list, list+" "),
		replace(list, list+`null,`),
		replace(list, list+`{},`),
		replace(list, list+`],"destinations":[`),
		replace(list, `,"destinations":null`+list),
		replace(list, `,"Destinations":[]`+list),
		replace(`}],"audiences"`, `},],"audiences"`),
		replace(`}],"audiences"`, `}}],"audiences"`),
		replace(`}],"audiences"`, `}],"destinations":null,"audiences"`),
		replace(`}],"audiences"`, `}],"x":1,"audiences"`),
		replace(`"state":"Active"`, `"state":"Active","x":1`),
		replace(`"state":"Active"`, `"state":"Held"`),
		replace(`"state":"Active"`, `"state":1`),
		replace(`"sources":[{`, `"sources":[{"name":"ios","destinations":[{}]},{`),
		replace(`"namespace":"shop"`, `"name":"shop"`),
		replace(`"version":1`, `"version":2`),
		replace(`"name":"crm"`, `"name":""`),
		replace(`"sources":["web"]`, `"sources":["ios"]`),
		text + "{}", text + " ", text[:len(text)-1], text[:len(text)/2], "", "null", list, list + `"`, list + `{"`, list + `{"\`, list + `{}`,
		list + `{}]`,
	}
}

// A Decoder accepts and rejects what Stored.Decode does, with the same errors, and keeps the last valid
// config.
func TestDecoderIsStrict(t *testing.T) {
	texts := oddTexts(t)
	var d Decoder
	for _, text := range texts[1:] {
		valid, odd := storedText(t, texts[0]), storedText(t, text)
		before := expectDecoded(t, &d, valid)
		expectDecoded(t, &d, odd)
		after := expectDecoded(t, &d, valid)
		if _, err := odd.Decode(); err != nil && &after.Destinations[0] != &before.Destinations[0] {
			t.Errorf("the valid config after %s: got other destinations, want the same", text)
		}
	}
	for _, bad := range []Stored{{}, {Config: []byte("x")}, {missing: "part"}} {
		expectDecoded(t, &d, bad)
	}
}

// A destination that has not changed is not valid without its Source, or under the name of another one.
func TestDecoderValidatesTheWhole(t *testing.T) {
	c := full()
	var d Decoder
	expectDecoded(t, &d, storedText(t, textOf(t, c)))
	c.Destinations = append(c.Destinations, c.Destinations[0])
	if _, err := d.Decode("shop", storedText(t, textOf(t, c))); err == nil || !strings.Contains(err.Error(), `destination "crm": name is empty or not unique`) {
		t.Errorf("a destination twice: got error %v, want one with the name", err)
	}
	c = full()
	c.Sources, c.Audiences = nil, nil
	if _, err := d.Decode("shop", storedText(t, textOf(t, c))); err == nil || !strings.Contains(err.Error(), `source "web" does not exist`) {
		t.Errorf("without the Source: got error %v, want one with its name", err)
	}
}

func TestDecoderKeepsNamespacesApart(t *testing.T) {
	var d Decoder
	s := storedText(t, textOf(t, full()))
	if _, err := d.Decode("other", s); err == nil || !strings.Contains(err.Error(), `belongs to namespace "shop"`) {
		t.Errorf("the config of another namespace: got error %v, want one with its name", err)
	}
	before := expectDecoded(t, &d, s)
	d.Forget("shop")
	if after := expectDecoded(t, &d, s); &after.Destinations[0] == &before.Destinations[0] {
		t.Error("a forgotten config: got its destinations, want new ones")
	}
	data, _, err := Encode(full())
	if err != nil {
		t.Fatal(err)
	}
	for _, number := range []int64{1, 2} { // The head alone changes.
		head, err := EncodeHead(Head{Number: number, Revision: before.Revision})
		if err != nil {
			t.Fatal(err)
		}
		if got := expectDecoded(t, &d, Stored{Config: data, Head: head}); got.Head.Number != number {
			t.Errorf("number: got %d, want %d", got.Head.Number, number)
		}
	}
}

func FuzzDecoder(f *testing.F) {
	for _, text := range oddTexts(f) {
		f.Add([]byte(text))
	}
	valid := storedText(f, textOf(f, full()))
	f.Fuzz(func(t *testing.T, text []byte) {
		var d Decoder
		if _, err := d.Decode("shop", valid); err != nil {
			t.Fatal(err)
		}
		s := storedText(t, string(text))
		if r, err := s.Decode(); err == nil && r.Namespace != "shop" {
			return
		}
		expectDecoded(t, &d, s)
	})
}
