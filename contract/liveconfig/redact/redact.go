// Package redact removes or replaces values of a message by the rules of a destination, before the message is sent or
// shown. It is pure: equal rules, keys and messages give equal results.
//
// The message is scanned once. The order of members, and the numbers and texts of other values, remain as they are
// written; a value that no path can reach is skipped. The main type is Redactor.
package redact

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/posthorn/posthorn/contract/liveconfig"
)

// Mask replaces a masked value.
const Mask = `"***"`

// MaxHashes is the number of values of a message that are hashed; further ones are masked. So a result is at most three
// times as long as the message, and 17 KB.
const MaxHashes = 256

// action is what happens to a value; of several, the largest.
type action uint8

const (
	keep action = iota
	hashed
	masked
	dropped
)

// Redactor is a compiled set of rules, safe for concurrent use. A nil Redactor changes nothing.
type Redactor struct {
	// nodes are the prefixes of the paths; the first one is the empty prefix.
	nodes []node
	// strict has a bit for each set of rules with a list of allowed paths.
	strict uint8
	// paths are the paths of the last rules, in the order of the bits of node.paths.
	paths []string
	// macs has values of the type hash.Hash; nil without a key.
	macs *sync.Pool
}

// node is a prefix of paths.
type node struct {
	keys []edge
	// any is the index of the node of any key or element; 0 is none.
	any int
	// do is what happens to a value with this path, email whether it is an address when it is hashed.
	do    action
	email bool
	// allows has the bits of the rules that allow this path, leads the ones that allow a longer one.
	allows, leads uint8
	// paths has the bits of the paths of the last rules that end here.
	paths uint64
}

type edge struct {
	key string
	to  int
}

// New compiles rules. Of several rules, the stricter ones apply to each value, and the last key hashes: without any, the
// values are masked. It returns nil without rules.
func New(rules ...*liveconfig.Redact) (*Redactor, error) {
	r := &Redactor{nodes: make([]node, 1)}
	var key liveconfig.Secret
	some := false
	for i, rule := range rules {
		if rule == nil {
			continue
		}
		some = true
		r.paths = nil
		for j := range r.nodes {
			r.nodes[j].paths = 0
		}
		if err := r.add(rule, uint8(1)<<i); err != nil {
			return nil, err
		}
		if rule.Hash != nil && !rule.Hash.Key.IsZero() {
			key = rule.Hash.Key
		}
	}
	if !some {
		return nil, nil
	}
	if !key.IsZero() {
		r.macs = &sync.Pool{New: func() any { return hmac.New(sha256.New, []byte(key.Reveal())) }}
	}
	return r, nil
}

// add compiles the rules with a bit of the sets.
func (r *Redactor) add(rule *liveconfig.Redact, bit uint8) error {
	var errs []error
	add := func(list, path string, set func(*node)) {
		field := fmt.Sprintf("%s[%s]", list, path)
		segments, err := parse(path)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", list, err))
			return
		case slices.Contains(r.paths, field):
			errs = append(errs, fmt.Errorf("%s: the path is listed twice; remove one", field))
			return
		case len(r.paths) == MaxPaths:
			errs = append(errs, fmt.Errorf("%s: more than %d paths in all; use * for keys that differ", field, MaxPaths))
			return
		}
		at := 0
		for _, s := range segments {
			if list == listAllow {
				r.nodes[at].leads |= bit
			}
			at = r.child(at, s)
		}
		n := &r.nodes[at]
		set(n)
		n.paths |= 1 << len(r.paths)
		r.paths = append(r.paths, field)
	}
	for _, path := range rule.Allow {
		r.strict |= bit
		add(listAllow, path, func(n *node) { n.allows |= bit })
	}
	for _, path := range rule.Drop {
		add("drop", path, func(n *node) { n.do = dropped })
	}
	for _, path := range rule.Mask {
		add("mask", path, func(n *node) { n.do = max(n.do, masked) })
	}
	if rule.Hash != nil {
		for _, h := range rule.Hash.Paths {
			add("hash.paths", h.Path, func(n *node) { n.do, n.email = max(n.do, hashed), n.email || h.Email })
		}
	}
	return errors.Join(errs...)
}

const listAllow = "allow"

// child returns the node of a longer prefix.
func (r *Redactor) child(at int, s segment) int {
	n := &r.nodes[at]
	to := n.any
	if !s.any {
		to = n.find([]byte(s.key))
	}
	if to > 0 {
		return to
	}
	to = len(r.nodes)
	if s.any {
		n.any = to
	} else {
		n.keys = append(n.keys, edge{s.key, to})
	}
	r.nodes = append(r.nodes, node{})
	return to
}

// find returns the node of a key; 0 if there is none.
func (n *node) find(key []byte) int {
	for i := range n.keys {
		if n.keys[i].key == string(key) {
			return n.keys[i].to
		}
	}
	return 0
}

// Paths are the fields of the paths of the last rules, such as drop[context.ip].
func (r *Redactor) Paths() []string {
	if r == nil {
		return nil
	}
	return r.paths
}

// NotifiesUser reports whether a deletion notice has the user's id after the redaction, or its hash if there is a key.
func (r *Redactor) NotifiesUser() bool {
	withKey := *r
	withKey.macs = &sync.Pool{New: func() any { return sha256.New() }}
	out, _, err := withKey.Apply([]byte(`{"userId":"u"}`))
	return err == nil && !bytes.Equal(out, []byte("{}")) && !bytes.Contains(out, []byte(Mask))
}

// Apply redacts a message, a JSON object. The result is a copy, or the message itself if nothing changes. matched has a bit
// for each of Paths that is the path of a value. A message that is no JSON object is an error.
func (r *Redactor) Apply(message []byte) (out []byte, matched uint64, err error) {
	if r == nil {
		return message, 0, nil
	}
	s, _ := scans.Get().(*scan)
	defer func() {
		*s = scan{active: s.active, text: s.text, sum: s.sum} // The pool keeps no message.
		scans.Put(s)
	}()
	*s = scan{Redactor: r, in: message, active: append(s.active[:0], 0), text: s.text[:0], sum: s.sum[:0]}
	s.space()
	ok := s.peek() == '{' && s.container(0, ^r.strict, true)
	if s.space(); !ok || s.pos < len(message) {
		return nil, 0, errors.New("the message is not a JSON object")
	}
	if s.mac != nil {
		r.macs.Put(s.mac)
	}
	if s.copied == 0 {
		return message, s.matched, nil
	}
	return append(s.out, message[s.copied:]...), s.matched, nil
}

// Text returns rules as they are stored with a dead letter: without the key, and nil without rules.
func Text(rules *liveconfig.Redact) []byte {
	if rules == nil {
		return nil
	}
	stored := *rules
	if rules.Hash != nil {
		stored.Hash = &liveconfig.RedactHash{Paths: rules.Hash.Paths}
	}
	text, _ := json.Marshal(stored) // No field can fail to marshal.
	return text
}

// Stored compiles the rules that are stored with a dead letter, as Text, and the present ones, which may be nil.
func Stored(rules []byte, now *liveconfig.Redact) (*Redactor, error) {
	var before *liveconfig.Redact
	if len(rules) > 0 {
		if err := json.Unmarshal(rules, &before); err != nil {
			return nil, fmt.Errorf("the rules of redaction of the dead letter: %w", err)
		}
	}
	return New(before, now)
}
