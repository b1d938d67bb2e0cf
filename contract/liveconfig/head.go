package liveconfig

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	// HeadKey is the key of the live-config Secret that holds the encoded Head.
	HeadKey = "head.json.gz"
	// HeadVersion is the version of the format of a Head. Decode ignores unknown fields, so an
	// addition does not need another version.
	HeadVersion = 1
)

// Sections of a Config whose objects have data in the dispatchers' stores, for Ref.
const (
	SectionSources      = "sources"
	SectionDestinations = "destinations"
	SectionAudiences    = "audiences"
)

// Ref names an object of a namespace by its section of the Config and its name. Its text is
// "section/name".
type Ref struct{ Section, Name string }

func (r Ref) String() string { return r.Section + "/" + r.Name }

// MarshalText implements encoding.TextMarshaler.
func (r Ref) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Ref) UnmarshalText(text []byte) error {
	var ok bool
	if r.Section, r.Name, ok = strings.Cut(string(text), "/"); !ok {
		return errors.New("a reference must be section/name")
	}
	return nil
}

// Compare orders references by their texts' parts.
func (r Ref) Compare(other Ref) int {
	if n := strings.Compare(r.Section, other.Section); n != 0 {
		return n
	}
	return strings.Compare(r.Name, other.Name)
}

// Head is the version of a namespace's live config, and its deleted objects.
//
// A dispatcher applies a config only if its number is not smaller than the highest number that it
// has applied. An object that is missing in a config with a number is deleted only if it has a
// tombstone; otherwise its data is parked: kept, and neither sent nor discarded.
//
// The zero Head belongs to a config without a history. There a missing object is a deleted one, unless
// the dispatcher has applied a config with a number.
type Head struct {
	// Version is HeadVersion.
	Version int `json:"version"`
	// Number grows with every change of the config or of the head. It is at least the number of
	// milliseconds since 1970 at the time of the change.
	Number int64 `json:"number"`
	// Since is the number of the first config after which no config was lost. An object that was in
	// a config of this or a later number, and is missing now, was deleted by its owner.
	Since int64 `json:"since,omitempty"`
	// Revision is the revision of the Config to which the head belongs.
	Revision string `json:"revision"`
	// UIDs has the UID of each object of the Config that has data in the dispatchers' stores.
	UIDs map[Ref]string `json:"uids,omitempty"`
	// Kinds are the UIDs of the CustomResourceDefinitions of these objects, by section.
	Kinds map[string]string `json:"kinds,omitempty"`
	// Tombstones of the deleted objects, sorted by Object.
	Tombstones []Tombstone `json:"tombstones,omitempty"`
	// Reserved are the write keys that no Source of the namespace has any more, sorted by SHA256.
	Reserved []ReservedKey `json:"reserved,omitempty"`
}

// ReservedKey is a removed write key that no other namespace gets for ReservationTime.
type ReservedKey struct {
	// SHA256 is the key's lowercase hex SHA-256. The key itself is not kept.
	SHA256    string    `json:"sha256"`
	RemovedAt time.Time `json:"removedAt"`
}

const (
	// ReservationTime is how long a removed write key is reserved for its namespace.
	ReservationTime = 7 * 24 * time.Hour
	// MaxReservedKeys bounds the reserved write keys of a namespace, and thus its head.
	MaxReservedKeys = 1000
)

// Tombstone states that the owner of an object has deleted it.
type Tombstone struct {
	Object Ref `json:"object"`
	// UID of the deleted object; empty if it is unknown.
	UID       string    `json:"uid,omitempty"`
	DeletedAt time.Time `json:"deletedAt"`
	// Sources and Filter are set for a destination. Until its lanes are dropped, they receive the
	// same calls as before, in case it is restored.
	Sources []string `json:"sources,omitempty"`
	Filter  *Filter  `json:"filter,omitempty"`
}

// Buried reports whether an object has a tombstone.
func (h Head) Buried(r Ref) bool {
	_, found := slices.BinarySearchFunc(h.Tombstones, r, func(t Tombstone, r Ref) int { return t.Object.Compare(r) })
	return found
}

// ParkingTime bounds how long data is parked whose deletion cannot be proved.
const ParkingTime = 7 * 24 * time.Hour

// Lost are the connections of a destination that an earlier config had, and that the present one lacks
// although the owner may not have removed them: a config before it was lost, for example because the
// cluster was restored from a backup. Their lanes are parked for at most ParkingTime.
type Lost struct {
	Sources   []string  `json:"sources,omitempty"`
	Endpoints []string  `json:"endpoints,omitempty"`
	Since     time.Time `json:"since"`
}

// Stored is the encoded live config of a namespace, as a Secret contains it.
type Stored struct {
	// Config is the output of Encode.
	Config []byte
	// Head is an encoded Head; empty in a config without a history.
	Head []byte

	// missing is the name of a part's Secret that does not exist, and invalid the error of an index.
	missing string
	invalid error
}

// Sink receives the encoded live configs of namespaces.
type Sink interface {
	// Set provides the newest config of a namespace.
	Set(namespace string, stored Stored)
	// Delete reports that a namespace has no config.
	Delete(namespace string)
	// Synced reports that Set was called at least once for every namespace, except for the failed
	// ones. A later call replaces the failed namespaces.
	Synced(failed ...string)
}

// Incomplete reports whether a Secret of the live config does not exist. The operator writes it again.
func (s Stored) Incomplete() bool { return s.missing != "" }

// StoredIn returns the live config in the data of a Secret that has no parts; see Assemble.
func StoredIn(data map[string][]byte) Stored {
	return Stored{Config: data[DataKey], Head: data[HeadKey]}
}

// RootData returns the data of the live config's Secret, or of the root if it has parts.
func RootData(config Chunks, parts Parts, head []byte) map[string][]byte {
	if len(parts.List) > 0 {
		return map[string][]byte{IndexKey: parts.Index, HeadKey: head}
	}
	return Stored{Config: config.Bytes(), Head: head}.data()
}

func (s Stored) data() map[string][]byte {
	data := map[string][]byte{DataKey: s.Config}
	if len(s.Head) > 0 {
		data[HeadKey] = s.Head
	}
	return data
}

// Decode reads the config, which must be valid, and its head, which must belong to the config. With
// an error it returns what it could read.
func (s Stored) Decode() (r Revisioned, err error) { return s.decode(Decode) }

// decode is Decode, where config decodes the config.
func (s Stored) decode(config func([]byte) (Config, string, error)) (r Revisioned, err error) {
	switch {
	case s.missing != "":
		err = fmt.Errorf("live config: its part, Secret %s, does not exist; a running operator writes it again", s.missing)
	case s.invalid != nil:
		err = s.invalid
	default:
		r.Config, r.Revision, err = config(s.Config)
	}
	head, headErr := DecodeHead(s.Head)
	switch {
	case headErr != nil:
		return r, errors.Join(err, headErr)
	case len(s.Head) > 0 && err == nil && head.Revision != r.Revision:
		err = errors.New("live config: the head belongs to another revision of the config")
	}
	r.Head = head
	return r, err
}

// EncodeHead returns the encoded, compressed form of a head. Equal heads give equal bytes.
func EncodeHead(h Head) ([]byte, error) {
	h.Version = HeadVersion
	text, err := json.Marshal(h)
	if err != nil {
		return nil, fmt.Errorf("encode the head of a live config: %w", err)
	}
	return compress(text)
}

// MaxBytes returns an upper bound of the encoded size. It costs less than EncodeHead.
func (h Head) MaxBytes() (int, error) {
	const perUID, overhead = 16, 1 << 10 // Quotes and separators; the rest of the format and of gzip.
	n := overhead
	for r, uid := range h.UIDs {
		n += len(r.Section) + len(r.Name) + len(uid) + perUID
	}
	h.UIDs = nil
	text, err := json.Marshal(h)
	return n + len(text), err
}

// SameAs reports whether the encoded forms are equal.
func (h Head) SameAs(other Head) bool {
	if !maps.Equal(h.UIDs, other.UIDs) {
		return false
	}
	h.Version, other.Version, h.UIDs, other.UIDs = HeadVersion, HeadVersion, nil, nil
	a, errA := json.Marshal(h)
	b, errB := json.Marshal(other)
	return errA == nil && errB == nil && bytes.Equal(a, b)
}

// DecodeHead reads the output of EncodeHead. It returns the zero Head for no data.
func DecodeHead(data []byte) (h Head, err error) {
	if len(data) == 0 {
		return Head{}, nil
	}
	plain, err := decompress(data, 0)
	if err != nil {
		return Head{}, fmt.Errorf("the head of the live config: %w", err)
	}
	if err := json.Unmarshal(plain, &h); err != nil {
		return Head{}, fmt.Errorf("the head of the live config is invalid: %w", redactJSONError(err))
	}
	switch {
	case h.Version != HeadVersion:
		return Head{}, fmt.Errorf("the head of the live config has version %d; this dispatcher knows version %d: update the dispatcher", h.Version, HeadVersion)
	case h.Number <= 0:
		return Head{}, errors.New("the head of the live config has no number")
	}
	slices.SortFunc(h.Tombstones, func(a, b Tombstone) int { return a.Object.Compare(b.Object) })
	return h, nil
}

// MarkerData returns the data of the marker Secret. failed are the namespaces that could not be
// compiled, sorted.
func MarkerData(failed []string) map[string][]byte {
	if len(failed) == 0 {
		return nil
	}
	return map[string][]byte{failedKey: []byte(strings.Join(failed, "\n"))}
}

// FailedNamespaces reads the output of MarkerData.
func FailedNamespaces(marker map[string][]byte) []string {
	return strings.Fields(string(marker[failedKey]))
}

// failedKey is the key of the marker Secret that lists the failed namespaces, one in each line.
const failedKey = "failed"

// WriteKeys returns the hashes of the write keys in effect.
func (c Config) WriteKeys() map[string]bool {
	keys := map[string]bool{}
	for _, s := range c.Sources {
		for _, hash := range s.WriteKeySHA256 {
			keys[hash] = true
		}
	}
	return keys
}

// Objects returns the objects of a config that have data in the dispatchers' stores, sorted.
func (c Config) Objects() (refs []Ref) {
	for _, s := range c.Sources {
		refs = append(refs, Ref{SectionSources, s.Name})
	}
	for _, d := range c.Destinations {
		refs = append(refs, Ref{SectionDestinations, d.Name})
	}
	for _, a := range c.Audiences {
		refs = append(refs, Ref{SectionAudiences, a.Name})
	}
	slices.SortFunc(refs, Ref.Compare)
	return refs
}
