package liveconfig

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
)

// many returns a config with n destinations, and one object of the other kinds.
func many(n int) Config {
	c := full()
	template := c.Destinations[0]
	c.Destinations = nil
	for i := range n {
		d := template
		d.Name, d.Revision, d.Generation = fmt.Sprintf("destination-%05d", i), fmt.Sprintf("%064x", i), 1
		c.Destinations = append(c.Destinations, d)
	}
	return c
}

// expectCanonical checks that an encoded config is the canonical JSON of c.
func expectCanonical(t *testing.T, c Config, data []byte, revision string) {
	t.Helper()
	want, err := json.Marshal(revealed(c))
	if err != nil {
		t.Fatal(err)
	}
	got, err := decompress(data, 0)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("text: got %d bytes, want the %d bytes of json.Marshal", len(got), len(want))
	}
	if sum := sha256.Sum256(want); revision != hex.EncodeToString(sum[:]) {
		t.Errorf("revision: got %s, want the SHA-256 of the text", revision)
	}
}

func TestEncodeIsCanonical(t *testing.T) {
	for name, c := range map[string]Config{
		"nothing": {Version: FormatVersion, Namespace: "shop"}, "everything": full(), "no destination": many(0), "many": many(500),
		"only destinations": {Version: FormatVersion, Namespace: "shop", Destinations: many(2).Destinations},
	} {
		t.Run(name, func(t *testing.T) {
			data, revision, err := Encode(c)
			if err != nil {
				t.Fatal(err)
			}
			expectCanonical(t, c, data, revision)
		})
	}
}

// An Encoder gives the bytes of Encode, and compresses only the chunks that changed.
func TestEncoderReusesChunks(t *testing.T) {
	c := many(2000)
	var e Encoder
	for _, step := range []struct {
		name   string
		change func()
		chunks int // the most new ones
	}{
		{"first", func() {}, 1000},
		{"nothing", func() {}, 0},
		{"edit", func() {
			d := &c.Destinations[1000]
			d.Generation, d.Revision, d.PausedReason = 2, "edited", "Edited"
		}, 1},
		{"addition", func() {
			d := c.Destinations[700]
			d.Name = "destination-00700-a"
			c.Destinations = slices.Insert(c.Destinations, 701, d)
		}, 2},
		{"removal", func() { c.Destinations = slices.Delete(c.Destinations, 300, 301) }, 2},
		{"removal of the first", func() { c.Destinations = c.Destinations[1:] }, 2},
		{"a Source", func() { c.Sources = nil }, 1},
	} {
		step.change()
		before := e.chunks
		data, revision, err := e.Encode(c)
		if err != nil {
			t.Fatal(err)
		}
		expectCanonical(t, c, data, revision)
		if anew, _, _ := Encode(c); !bytes.Equal(data, anew) {
			t.Errorf("%s: the bytes differ from what Encode returns", step.name)
		}
		added := 0
		for key := range e.chunks {
			if _, known := before[key]; !known {
				added++
			}
		}
		if added > step.chunks {
			t.Errorf("%s: new chunks: got %d of %d, want at most %d", step.name, added, len(e.chunks), step.chunks)
		}
		if len(e.chunks) < 10 {
			t.Errorf("%s: chunks: got %d, want at least 10", step.name, len(e.chunks))
		}
		if len(e.texts) != len(c.Destinations) {
			t.Errorf("%s: kept texts: got %d, want %d", step.name, len(e.texts), len(c.Destinations))
		}
	}
}

func TestHeadMaxBytes(t *testing.T) {
	for name, h := range map[string]Head{
		"empty": {}, "a tombstone": {Tombstones: []Tombstone{{Object: Ref{SectionSources, "web"}, UID: "1"}}},
		"an object": {UIDs: map[Ref]string{{SectionSources, "a"}: "b"}},
		"reserved":  {Reserved: []ReservedKey{{SHA256: "x"}}},
	} {
		for i := range 300 {
			if h.UIDs != nil {
				sum := sha256.Sum256(fmt.Append(nil, i))
				h.UIDs[Ref{SectionDestinations, hex.EncodeToString(sum[:])}] = hex.EncodeToString(sum[:16])
			}
		}
		data, err := EncodeHead(h)
		if err != nil {
			t.Fatal(err)
		}
		if most, err := h.MaxBytes(); err != nil || len(data) > most {
			t.Errorf("%s: got %d (%v), want at least the %d of the encoded head", name, most, err, len(data))
		}
	}
}
