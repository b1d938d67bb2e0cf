package liveconfig

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"hash/fnv"
	"math/bits"
)

// Encoder encodes the configs of one namespace. It keeps the texts of the destinations and the
// compressed chunks of its last config, so that a small change costs little. It relies on
// Destination.Revision and Generation, which change with every change of a destination. Its zero
// value is ready for use; it must not be used concurrently.
type Encoder struct {
	texts  map[destinationVersion][]byte
	chunks map[[sha256.Size]byte]Chunk // by the SHA-256 of the text
}

type destinationVersion struct {
	name, revision string
	generation     int64
}

// Chunk is a part of a config's canonical JSON text, compressed as a gzip member.
type Chunk struct {
	Data []byte
	// id is a hash of the name of the object at the chunk's end. A change of another object does not
	// change it.
	id [sha256.Size]byte
	// sum is the SHA-256 of Data, and text the length of its text.
	sum  [sha256.Size]byte
	text int
}

// Chunks are a compressed config. They must not be changed.
type Chunks []Chunk

// Len returns the number of bytes.
func (c Chunks) Len() (n int) {
	for _, chunk := range c {
		n += len(chunk.Data)
	}
	return n
}

// Bytes returns the compressed config.
func (c Chunks) Bytes() []byte {
	all := make([]byte, 0, c.Len())
	for _, chunk := range c {
		all = append(all, chunk.Data...)
	}
	return all
}

// Decodable reports whether the text is not larger than what Decode accepts.
func (c Chunks) Decodable() bool {
	n := 0
	for _, chunk := range c {
		n += chunk.text
	}
	return n <= maxDecodedBytes
}

// chunkText is the average length of a chunk's text.
const chunkText = 64 << 10

// Encode returns what the function Encode returns.
func (e *Encoder) Encode(c Config) (data []byte, revision string, err error) {
	chunks, revision, err := e.EncodeChunks(c)
	if err != nil {
		return nil, "", err
	}
	return chunks.Bytes(), revision, nil
}

// EncodeChunks returns the canonical, compressed form of a config in chunks, and its revision. The
// names of the objects determine the ends of the chunks, so an added or removed object changes only
// its own chunk.
func (e *Encoder) EncodeChunks(c Config) (Chunks, string, error) {
	w := chunkWriter{old: e.chunks, next: make(map[[sha256.Size]byte]Chunk, len(e.chunks)), sum: sha256.New()}
	before, err := json.Marshal(Config{Version: c.Version, Namespace: c.Namespace})
	if err != nil {
		return nil, "", fmt.Errorf("encode live config: %w", err)
	}
	_, _ = w.text.Write(bytes.TrimSuffix(before, []byte("}")))

	texts := make(map[destinationVersion][]byte, len(c.Destinations))
	destination := func(d *Destination) ([]byte, error) {
		version := destinationVersion{d.Name, d.Revision, d.Generation}
		text, ok := e.texts[version]
		if !ok {
			shown := revealed(Config{Destinations: []Destination{*d}}).Destinations[0]
			if text, err = json.Marshal(shown); err != nil {
				return nil, err
			}
		}
		texts[version] = text
		return text, nil
	}
	for _, write := range []func() error{
		func() error {
			return writeSection(&w, SectionSources, c.Sources, func(s *Source) string { return s.Name }, marshal)
		},
		func() error {
			return writeSection(&w, SectionDestinations, c.Destinations, func(d *Destination) string { return d.Name }, destination)
		},
		func() error {
			return writeSection(&w, SectionAudiences, c.Audiences, func(a *Audience) string { return a.Name }, marshal)
		},
		func() error {
			return writeSection(&w, "deletions", c.Deletions, func(d *Deletion) string { return d.Name }, marshal)
		},
		func() error {
			return writeSection(&w, "redeliveries", c.Redeliveries, func(r *Redelivery) string { return r.Name }, marshal)
		},
	} {
		if err := write(); err != nil {
			return nil, "", fmt.Errorf("encode live config: %w", err)
		}
	}
	_ = w.text.WriteByte('}')
	if err := w.end(""); err != nil {
		return nil, "", err
	}
	e.texts, e.chunks = texts, w.next
	return w.chunks, hex.EncodeToString(w.sum.Sum(nil)), nil
}

func marshal[E any](entry *E) ([]byte, error) { return json.Marshal(entry) }

// chunkWriter divides a config's text into chunks.
type chunkWriter struct {
	old, next map[[sha256.Size]byte]Chunk
	sum       hash.Hash
	text      bytes.Buffer // of the current chunk
	chunks    Chunks
}

// writeSection writes a section of a config; without entries it writes nothing.
func writeSection[E any](w *chunkWriter, section string, entries []E, name func(*E) string, text func(*E) ([]byte, error)) error {
	if len(entries) == 0 {
		return nil
	}
	_, _ = w.text.WriteString(`,"` + section + `":[`)
	for i := range entries {
		e := &entries[i]
		entry, err := text(e)
		if err != nil {
			return err
		}
		if i > 0 {
			_ = w.text.WriteByte(',')
		}
		_, _ = w.text.Write(entry)
		if endsChunk(name(e), len(entry)) {
			if err := w.end(section + "/" + name(e)); err != nil {
				return err
			}
		}
	}
	_ = w.text.WriteByte(']')
	return nil
}

// end ends the current chunk at an object; "" is the end of the text.
func (w *chunkWriter) end(object string) error {
	_, _ = w.sum.Write(w.text.Bytes()) // A hash returns no error.
	key := sha256.Sum256(w.text.Bytes())
	chunk, ok := w.old[key]
	if !ok {
		data, err := compress(w.text.Bytes())
		if err != nil {
			return err
		}
		chunk = Chunk{Data: data, id: sha256.Sum256([]byte(object)), sum: sha256.Sum256(data), text: w.text.Len()}
	}
	w.next[key] = chunk
	w.chunks = append(w.chunks, chunk)
	w.text.Reset()
	return nil
}

// endsChunk reports whether an object is the last one of its chunk. The probability is proportional to
// the length of its text, rounded to a power of two, so a small edit rarely changes the result.
func endsChunk(name string, text int) bool {
	objects := uint32(1)                                          // the average number of objects of this length in a chunk
	if n := bits.Len32(uint32(chunkText / max(text, 1))); n > 1 { //nolint:gosec // The quotient is at most chunkText.
		objects = 1 << (n - 1)
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // A hash returns no error.
	return h.Sum32()%objects == 0
}
