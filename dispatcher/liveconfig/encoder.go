package liveconfig

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash/fnv"
)

// Encoder encodes the configs of one namespace. It keeps the texts of the destinations and the
// compressed chunks of its last config, so that a small change costs little. It relies on
// Destination.Revision and Generation, which change with every change of a destination. Its zero
// value is ready for use; it must not be used concurrently.
type Encoder struct {
	texts  map[destinationVersion][]byte
	chunks map[[sha256.Size]byte][]byte
}

type destinationVersion struct {
	name, revision string
	generation     int64
}

// chunkLength is the average number of destinations in a chunk.
const chunkLength = 64

// Encode returns what the function Encode returns. The compressed form has a gzip member for each
// chunk of the JSON text. The names of the destinations determine the ends of the chunks, so an added
// or removed destination changes only its own chunk.
func (e *Encoder) Encode(c Config) (data []byte, revision string, err error) {
	before, after, err := encodeAround(c)
	if err != nil {
		return nil, "", err
	}
	next := Encoder{texts: make(map[destinationVersion][]byte, len(c.Destinations)), chunks: make(map[[sha256.Size]byte][]byte, len(e.chunks))}
	sum := sha256.New()
	chunk := bytes.NewBuffer(before)
	var compressed bytes.Buffer
	flush := func() error {
		_, _ = sum.Write(chunk.Bytes()) // A hash returns no error.
		key := sha256.Sum256(chunk.Bytes())
		member, ok := e.chunks[key]
		if !ok {
			if member, err = compress(chunk.Bytes()); err != nil {
				return err
			}
		}
		next.chunks[key] = member
		_, _ = compressed.Write(member)
		chunk.Reset()
		return nil
	}
	for i, d := range c.Destinations {
		version := destinationVersion{d.Name, d.Revision, d.Generation}
		text, ok := e.texts[version]
		if !ok {
			if text, err = json.Marshal(revealed(Config{Destinations: []Destination{d}}).Destinations[0]); err != nil {
				return nil, "", fmt.Errorf("encode live config: %w", err)
			}
		}
		next.texts[version] = text
		if i > 0 {
			_ = chunk.WriteByte(',')
		}
		_, _ = chunk.Write(text)
		if endsChunk(d.Name) {
			if err := flush(); err != nil {
				return nil, "", err
			}
		}
	}
	_, _ = chunk.Write(after)
	if err := flush(); err != nil {
		return nil, "", err
	}
	*e = next
	return compressed.Bytes(), hex.EncodeToString(sum.Sum(nil)), nil
}

// endsChunk reports whether a destination is the last one of its chunk.
func endsChunk(name string) bool {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // A hash returns no error.
	return h.Sum32()%chunkLength == 0
}

// encodeAround returns the parts of a config's canonical JSON before and after its destinations.
func encodeAround(c Config) (before, after []byte, err error) {
	destinations := len(c.Destinations) > 0
	c.Destinations = nil
	tail := Config{Audiences: c.Audiences, Deletions: c.Deletions, Redeliveries: c.Redeliveries}
	c.Audiences, c.Deletions, c.Redeliveries = nil, nil, nil
	if before, err = json.Marshal(c); err != nil {
		return nil, nil, fmt.Errorf("encode live config: %w", err)
	}
	if after, err = json.Marshal(tail); err != nil {
		return nil, nil, fmt.Errorf("encode live config: %w", err)
	}
	before = bytes.TrimSuffix(before, []byte("}"))
	after = bytes.TrimPrefix(after, []byte(`{"version":0,"namespace":""`))
	if destinations {
		before = append(before, `,"destinations":[`...)
		after = append([]byte("]"), after...)
	}
	return before, after, nil
}
