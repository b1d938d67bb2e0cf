package redact

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"hash"
	"strings"
	"sync"

	"github.com/posthorn/posthorn/analytics/event"
)

// scan is one pass over a message.
type scan struct {
	*Redactor
	in, out []byte
	// pos is the next byte to read; in[copied:pos] is to be copied to out.
	pos, copied int
	// active are the nodes of the containers being read, the innermost last.
	active  []int
	matched uint64
	hashes  int
	mac     hash.Hash
	// text and sum are scratch space.
	text, sum []byte
}

// room is for a few hashes.
const room = 256

var scans = sync.Pool{New: func() any { return new(scan) }}

// container scans an object or an array whose nodes are active[from:]. open has the bits of the sets of rules that allow all of
// it. It returns false if the text is not JSON.
func (s *scan) container(from int, open uint8, top bool) bool {
	object := s.in[s.pos] == '{'
	closing := s.in[s.pos] + 2 // '{' and '}', '[' and ']'
	s.pos++
	if s.space(); s.peek() == closing {
		s.pos++
		return true
	}
	to, kept := len(s.active), false
	before := s.pos
	for {
		start, key := s.pos, []byte(nil)
		if object {
			if key = s.key(); key == nil {
				return false
			}
		}
		do := s.enter(key, from, to, open, top)
		if !s.value(do, to) {
			return false
		}
		if do.action == dropped {
			if kept {
				start = before
			}
			s.cut(start, s.pos, "")
		}
		kept = kept || do.action != dropped
		before = s.pos
		s.active = s.active[:to]
		s.space()
		switch s.peek() {
		case closing:
			s.pos++
			return true
		case ',':
			s.pos++
			if s.space(); !kept {
				s.copied = s.pos
			}
		default:
			return false
		}
	}
}

// verdict is what happens to a value.
type verdict struct {
	action
	email bool
	// open has the bits of the sets of rules that allow all of the value.
	open uint8
}

// enter finds the nodes of a member, or of an element (a nil key), appends them to active, and returns what happens to
// the value.
func (s *scan) enter(key []byte, from, to int, open uint8, top bool) (v verdict) {
	if top {
		for _, name := range fixed {
			if string(key) == name {
				return verdict{open: ^uint8(0)}
			}
		}
	}
	var leads uint8
	for _, at := range s.active[from:to] {
		n := &s.nodes[at]
		for _, child := range [...]int{n.find(key), n.any} {
			if child == 0 {
				continue
			}
			c := &s.nodes[child]
			s.active = append(s.active, child)
			v.action, v.email = max(v.action, c.do), v.email || c.email
			open |= c.allows
			leads |= c.leads
			s.matched |= c.paths
		}
	}
	v.open = open
	next := s.peek()
	switch {
	case open == ^uint8(0):
	case open|leads != ^uint8(0) || next != '{' && next != '[':
		v.action = dropped
	case v.action == hashed:
		v.action = masked // A hash would be of values that are not allowed.
	}
	return v
}

// value scans a value, and replaces it if necessary.
func (s *scan) value(v verdict, nodes int) bool {
	start := s.pos
	switch {
	case v.action == keep && (len(s.active) > nodes) && (s.peek() == '{' || s.peek() == '['):
		return s.container(nodes, v.open, false)
	case !s.skip():
		return false
	case v.action == keep, v.action == dropped, s.in[start] == 'n':
		return true
	}
	if v.action == hashed && s.macs != nil && s.hashes < MaxHashes {
		s.hashes++
		s.cut(start, s.pos, "")
		s.out = append(append(append(s.out, '"'), s.hash(s.in[start:s.pos], v.email)...), '"')
		return true
	}
	s.cut(start, s.pos, Mask)
	return true
}

// cut replaces in[from:to], after what is copied.
func (s *scan) cut(from, to int, by string) {
	if s.out == nil {
		s.out = make([]byte, 0, len(s.in)+room)
	}
	s.out = append(append(s.out, s.in[s.copied:from]...), by...)
	s.copied = to
}

// hash returns the HMAC of a value in hex: of the characters of a string, and of the text of other values.
func (s *scan) hash(value []byte, email bool) []byte {
	if s.mac == nil {
		s.mac, _ = s.macs.Get().(hash.Hash)
	}
	if value[0] == '"' {
		value = text(value)
		if email {
			value = []byte(strings.ToLower(strings.TrimSpace(string(value))))
		}
	}
	s.mac.Reset()
	_, _ = s.mac.Write(value)
	s.sum = s.mac.Sum(s.sum[:0])
	s.text = hex.AppendEncode(s.text[:0], s.sum)
	return s.text
}

// text returns the characters of a string, with its quotes, in UTF-8.
func text(quoted []byte) []byte {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return quoted[1 : len(quoted)-1]
	}
	var id event.ID // It distinguishes lone surrogates.
	if json.Unmarshal(quoted, &id) != nil {
		return quoted
	}
	return []byte(id)
}

// key scans a key and the colon behind it; nil if there is none.
func (s *scan) key() []byte {
	start := s.pos
	if s.peek() != '"' || !s.skipString() {
		return nil
	}
	key := text(s.in[start:s.pos])
	if s.space(); s.peek() != ':' {
		return nil
	}
	s.pos++
	s.space()
	return key
}

// peek returns the next byte, 0 at the end.
func (s *scan) peek() byte {
	if s.pos < len(s.in) {
		return s.in[s.pos]
	}
	return 0
}

// space skips white space.
func (s *scan) space() {
	for s.pos < len(s.in) && (s.in[s.pos] == ' ' || s.in[s.pos] == '\n' || s.in[s.pos] == '\t' || s.in[s.pos] == '\r') {
		s.pos++
	}
}

// skip skips a value. Of a container it checks only where it ends.
func (s *scan) skip() bool {
	depth := 0
	for {
		switch c := s.peek(); c {
		case '"':
			if !s.skipString() {
				return false
			}
		case '{', '[':
			depth++
			s.pos++
		case '}', ']', ',', ':', ' ', '\n', '\t', '\r', 0:
			if depth == 0 || c == 0 {
				return false
			}
			if s.pos++; c == '}' || c == ']' {
				depth--
			}
		default:
			for s.pos++; s.pos < len(s.in) && s.in[s.pos] != ',' && s.in[s.pos] != '}' && s.in[s.pos] != ']' && s.in[s.pos] > ' '; {
				s.pos++
			}
		}
		if depth == 0 {
			return true
		}
	}
}

// skipString skips a string.
func (s *scan) skipString() bool {
	i := s.pos + 1
	for {
		end := bytes.IndexByte(s.in[i:], '"')
		if end < 0 {
			return false
		}
		i += end
		n := 0
		for s.in[i-1-n] == '\\' {
			n++
		}
		if i++; n%2 == 0 {
			s.pos = i
			return true
		}
	}
}
