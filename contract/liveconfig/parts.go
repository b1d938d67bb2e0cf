package liveconfig

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// A live config that does not fit into one Secret is in several: the root, which has the name of
// SecretName and contains the head and an index, and the parts, immutable Secrets whose names contain
// a hash of their content. The operator writes the root last. A part contains chunks of the config;
// the index lists the parts and the order of the chunks.

const (
	// IndexKey is the key of the root Secret that holds the index of the parts. A root has it
	// instead of DataKey.
	IndexKey = "parts.json.gz"
	// PartKey is the key of a part's Secret that holds its chunks.
	PartKey = "chunks.gz"
	// LabelPart is on a part's Secret and contains the namespace of its config, for selectors. The
	// Secret's name is decisive: see PartNamespaceOf.
	LabelPart = "posthorn.dev/live-config-part"
	// MaxParts is the largest number of parts of a live config.
	MaxParts = 64

	partPrefix   = "posthorn-part-"
	indexVersion = 1
)

// index lists the parts of a live config.
type index struct {
	Version int `json:"version"`
	// Parts are the names of the Secrets without their common beginning.
	Parts []string `json:"parts"`
	// Chunks are the chunks in the order of the config: the position of the part in Parts, and the
	// number of bytes. A part has its chunks in this order.
	Chunks [][2]int `json:"chunks"`
}

// Part is a Secret with a part of a live config.
type Part struct {
	Name   string
	chunks Chunks
}

// Data returns the data of the Secret.
func (p Part) Data() map[string][]byte { return map[string][]byte{PartKey: p.chunks.Bytes()} }

// Parts are the parts of a live config, with its index.
type Parts struct {
	List  []Part
	Index []byte
}

// Split divides a config into at most most parts. A part has at most partBytes, or one chunk of at most
// chunkBytes. ok is false if this is not possible.
//
// The parts are the leaves of a binary tree: a group of chunks that is too large is divided by the
// next bit of their ids. So the result depends on the chunks only, an edit of an object changes one
// part, and a group that grows too large changes no other group.
func (c Chunks) Split(namespace string, partBytes, chunkBytes, most int) (parts Parts, ok bool, err error) {
	all := make([]int, len(c))
	for i := range c {
		all[i] = i
	}
	x := index{Version: indexVersion, Chunks: make([][2]int, len(c))}
	var divide func(group []int, bit int) bool
	divide = func(group []int, bit int) bool {
		size := 0
		for _, i := range group {
			size += len(c[i].Data)
		}
		switch {
		case len(group) == 0:
			return true
		case size <= partBytes, len(group) == 1 && size <= chunkBytes:
			if len(x.Parts) == most {
				return false
			}
			sum := sha256.New()
			part := Part{chunks: make(Chunks, len(group))}
			for n, i := range group {
				part.chunks[n] = c[i]
				_, _ = sum.Write(c[i].sum[:]) // A hash returns no error.
				x.Chunks[i] = [2]int{len(x.Parts), len(c[i].Data)}
			}
			hash := hex.EncodeToString(sum.Sum(nil))
			part.Name = partName(namespace, hash)
			x.Parts, parts.List = append(x.Parts, hash), append(parts.List, part)
			return true
		case len(group) == 1 || bit == 8*sha256.Size:
			return false
		}
		var groups [2][]int
		for _, i := range group {
			side := c[i].id[bit/8] >> (7 - bit%8) & 1
			groups[side] = append(groups[side], i)
		}
		return divide(groups[0], bit+1) && divide(groups[1], bit+1)
	}
	if !divide(all, 0) {
		return Parts{}, false, nil
	}
	text, err := json.Marshal(x)
	if err != nil {
		return Parts{}, false, fmt.Errorf("encode the index of a live config: %w", err)
	}
	parts.Index, err = compress(text)
	return parts, err == nil, err
}

// partName returns the name of a part's Secret.
func partName(namespace, hash string) string { return partPrefix + namespace + "-" + hash }

// PartNamespaceOf returns the namespace of a part's name; ok is false for any other name.
func PartNamespaceOf(name string) (namespace string, ok bool) {
	rest, ok := strings.CutPrefix(name, partPrefix)
	i := len(rest) - 2*sha256.Size - 1
	if !ok || i < 1 || rest[i] != '-' {
		return "", false
	}
	if _, err := hex.DecodeString(rest[i+1:]); err != nil {
		return "", false
	}
	return rest[:i], true
}

// PartNames returns the names of the parts that a root's data lists; none if it contains the config
// itself, or is invalid.
func PartNames(namespace string, root map[string][]byte) []string {
	x, err := decodeIndex(root[IndexKey])
	if err != nil {
		return nil
	}
	names := make([]string, len(x.Parts))
	for i, hash := range x.Parts {
		names[i] = partName(namespace, hash)
	}
	return names
}

// Assemble returns the live config of a root's data. part returns the data of a part; nil if the Secret
// does not exist.
func Assemble(namespace string, root map[string][]byte, part func(name string) map[string][]byte) Stored {
	if len(root[IndexKey]) == 0 {
		return StoredIn(root)
	}
	stored := Stored{Head: root[HeadKey]}
	x, err := decodeIndex(root[IndexKey])
	if err != nil {
		stored.invalid = err
		return stored
	}
	names := PartNames(namespace, root)
	rest := make([][]byte, len(names))
	size := 0
	for i, name := range names {
		data := part(name)
		if data == nil {
			stored.missing = name
			return stored
		}
		rest[i] = data[PartKey]
		size += len(rest[i])
	}
	stored.Config = make([]byte, 0, size)
	for _, chunk := range x.Chunks {
		i, n := chunk[0], chunk[1]
		if n > len(rest[i]) {
			stored.Config, stored.invalid = nil, fmt.Errorf("live config: Secret %s has other content than the index lists; delete this Secret, and the operator writes it again", names[i])
			return stored
		}
		stored.Config, rest[i] = append(stored.Config, rest[i][:n]...), rest[i][n:]
	}
	return stored
}

// decodeIndex reads an index.
func decodeIndex(data []byte) (x index, err error) {
	if len(data) == 0 {
		return index{}, errors.New("the live config has no index")
	}
	plain, err := decompress(data, 0)
	if err != nil {
		return index{}, fmt.Errorf("the index of the live config: %w", err)
	}
	if err := json.Unmarshal(plain, &x); err != nil {
		return index{}, fmt.Errorf("the index of the live config is invalid: %w", err)
	}
	if x.Version != indexVersion {
		return index{}, fmt.Errorf("the index of the live config has version %d; this dispatcher knows version %d: update the dispatcher", x.Version, indexVersion)
	}
	for _, chunk := range x.Chunks {
		if i, n := chunk[0], chunk[1]; i < 0 || i >= len(x.Parts) || n < 0 {
			return index{}, fmt.Errorf("the index of the live config has chunk %v and %d parts", chunk, len(x.Parts))
		}
	}
	return x, nil
}
