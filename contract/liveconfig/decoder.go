package liveconfig

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Decoder decodes the live configs of namespaces as Stored.Decode does. It keeps the last valid config of
// each namespace, so that an edit decodes and validates only the destinations whose text has changed. The
// zero value is ready for use. All methods may be called concurrently.
type Decoder struct {
	mu   sync.Mutex
	last map[string]decoded
}

// decoded is a valid config, and what it was decoded from.
type decoded struct {
	Revisioned
	// config and head are the hashes of the stored config, and text is the length of the JSON text.
	config, head hashSum
	text         int
	// destinations has the config's destinations by the hash of their text.
	destinations map[hashSum]*Destination
}

type hashSum [sha256.Size]byte

// Decode decodes the config of a namespace; the config of another one is invalid. The result shares memory
// with the results of other calls, and must not be changed.
func (d *Decoder) Decode(namespace string, s Stored) (Revisioned, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	last := d.last[namespace]
	next := decoded{config: sha256.Sum256(s.Config), head: sha256.Sum256(s.Head)}
	if last.Version != 0 && last.config == next.config && last.head == next.head {
		return last.Revisioned, nil
	}
	r, err := s.decode(func(data []byte) (Config, string, error) { return next.decode(data, last) })
	if err == nil && r.Namespace != namespace {
		err = fmt.Errorf("live config belongs to namespace %q", r.Namespace)
	}
	if err != nil {
		return r, err
	}
	next.Revisioned = r
	if d.last == nil {
		d.last = map[string]decoded{}
	}
	d.last[namespace] = next
	return r, nil
}

// Forget removes what the Decoder keeps of a namespace.
func (d *Decoder) Forget(namespace string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.last, namespace)
}

// decode is the function Decode with the destinations of the last config.
func (n *decoded) decode(data []byte, last decoded) (Config, string, error) {
	plain, err := decompress(data, last.text)
	if err != nil {
		return Config{}, "", err
	}
	n.text = len(plain)
	if c, ok := n.decodeChanged(plain, last.destinations); ok {
		return c, revisionOf(plain), nil
	}
	n.destinations = nil
	return decodeText(plain)
}

// decodeChanged decodes a config, and takes the destinations from known if their text is in it. ok is false
// if the text is not in the form that Encode writes, or not valid.
func (n *decoded) decodeChanged(plain []byte, known map[hashSum]*Destination) (c Config, ok bool) {
	rest, texts := splitDestinations(plain)
	if texts == nil {
		return Config{}, false
	}
	var parsed struct {
		Config
		Destinations emptyLists `json:"destinations"`
	}
	if unmarshal(rest, &parsed) != nil || parsed.Version != FormatVersion || parsed.Destinations != 1 {
		return Config{}, false
	}
	c = parsed.Config
	c.Destinations = make([]Destination, len(texts))
	n.destinations = make(map[hashSum]*Destination, len(texts))
	valid := make([]bool, len(texts))
	for i, text := range texts {
		sum, d := hashSum(sha256.Sum256(text)), &c.Destinations[i]
		if old := known[sum]; old != nil {
			*d, valid[i] = *old, true
		} else if d.UnmarshalJSON(text) != nil {
			return Config{}, false
		}
		n.destinations[sum] = d
	}
	return c, c.validate(valid) == nil
}

// splitDestinations returns the text of a config with an empty list of destinations, and the texts of the
// destinations; none if the text is not in the form that Encode writes. The text is a valid config with these
// destinations if the results are valid, and the empty list is the config's list.
func splitDestinations(plain []byte) (rest []byte, texts [][]byte) {
	// In a JSON text, the quote after the comma begins a name: no string contains it unescaped.
	list := []byte(`,"` + SectionDestinations + `":[`)
	start := bytes.Index(plain, list)
	if start < 0 {
		return nil, nil
	}
	start += len(list)
	for at := start; ; at++ {
		end := at + objectLength(plain[at:])
		if end == at || end == len(plain) {
			return nil, nil
		}
		texts = append(texts, plain[at:end])
		switch at = end; plain[at] {
		case ']':
			return slices.Concat(plain[:start], plain[at:]), texts
		case ',':
		default:
			return nil, nil
		}
	}
}

// objectLength returns the length of the JSON object with which a text begins; 0 if there is none. The
// result is not necessarily valid.
func objectLength(text []byte) int {
	if !bytes.HasPrefix(text, []byte("{")) {
		return 0
	}
	depth := 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"':
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return 0
}

// emptyLists counts the lists of destinations in a text, which must be empty.
type emptyLists int

// UnmarshalJSON implements json.Unmarshaler.
func (n *emptyLists) UnmarshalJSON(text []byte) error {
	if *n++; string(text) != "[]" {
		return errors.New("a list is not empty")
	}
	return nil
}

// revisionOf returns the revision of a config's text.
func revisionOf(plain []byte) string {
	sum := sha256.Sum256(plain)
	return hex.EncodeToString(sum[:])
}
