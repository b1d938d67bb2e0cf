package sign

import (
	"crypto/hmac"
	"crypto/sha1" // The specification requires HMAC-SHA1, which is not affected by collisions of SHA-1.
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"strconv"
	"strings"
	"sync"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
)

// scheme is one signing scheme with its keys.
type scheme struct {
	header, previousHeader string
	content                string
	value, previousValue   template
	current                *key
	previous               *key // nil outside a rotation
	// idHeader and timestampHeader are true if receivers need the ID or the timestamp for the signed
	// content, and the value does not have it.
	idHeader, timestampHeader bool
}

func newScheme(s liveconfig.SigningScheme) (scheme, error) {
	var f liveconfig.HMACFormat
	switch {
	case s.Type == liveconfig.HMACSHA1:
		f = specified
	case s.Type == liveconfig.StandardWebhooks:
		f = standard
	case s.Type == liveconfig.HMAC && s.Format != nil:
		f = *s.Format
	default:
		return scheme{}, fmt.Errorf("is unknown or has no format; use %s, %s or %s", liveconfig.HMACSHA1, liveconfig.StandardWebhooks,
			liveconfig.HMAC)
	}
	if err := f.Validate(); err != nil {
		return scheme{}, err
	}
	c := scheme{
		header: f.Header, previousHeader: f.Header + "-Previous", content: f.Content,
		value: newTemplate(f.Value), previousValue: newTemplate(f.PreviousValue),
	}
	c.timestampHeader = f.Content != liveconfig.SignBody && !strings.Contains(f.Value, liveconfig.PlaceholderTimestamp)
	c.idHeader = f.Content == liveconfig.IDTimestampBody && !strings.Contains(f.Value, liveconfig.PlaceholderID)
	keyOf := secretKey
	if s.Type == liveconfig.StandardWebhooks {
		keyOf = standardKey
	}
	var err error
	if c.current, err = newKey(f, keyOf, s.Secret.Reveal()); err != nil {
		return scheme{}, fmt.Errorf("secret: %w", err)
	}
	if !s.Previous.IsZero() {
		if c.previous, err = newKey(f, keyOf, s.Previous.Reveal()); err != nil {
			return scheme{}, fmt.Errorf("previous secret: %w", err)
		}
	}
	return c, nil
}

// headers appends the scheme's headers to dst.
func (c *scheme) headers(dst []egress.Header, r *request) []egress.Header {
	if r.timestamp == "" && (c.content != liveconfig.SignBody || c.value.has(liveconfig.PlaceholderTimestamp)) {
		r.timestamp = strconv.FormatInt(r.now.Unix(), 10)
	}
	if c.idHeader && !r.sentID {
		dst, r.sentID = append(dst, egress.Header{Name: HeaderID, Value: r.id}), true
	}
	if c.timestampHeader && !r.sentTimestamp {
		dst, r.sentTimestamp = append(dst, egress.Header{Name: HeaderTimestamp, Value: r.timestamp}), true
	}
	value := c.current.fill(c.value, "", c.content, r)
	switch {
	case c.previous == nil:
		return append(dst, egress.Header{Name: c.header, Value: value})
	case len(c.previousValue) > 0:
		return append(dst, egress.Header{Name: c.header, Value: c.previous.fill(c.previousValue, value, c.content, r)})
	}
	return append(dst, egress.Header{Name: c.header, Value: value},
		egress.Header{Name: c.previousHeader, Value: c.previous.fill(c.value, "", c.content, r)})
}

// template is a text in parts: placeholders, and the texts between them.
type template []string

func newTemplate(text string) (t template) {
	for text != "" {
		end := strings.IndexByte(text, '{')
		if end == 0 {
			end = strings.IndexByte(text, '}') + 1
		} else if end < 0 {
			end = len(text)
		}
		t = append(t, text[:end])
		text = text[end:]
	}
	return t
}

func (t template) has(placeholder string) bool {
	for _, part := range t {
		if part == placeholder {
			return true
		}
	}
	return false
}

// key holds precomputed HMAC states: the two key blocks are hashed once, not per message.
type key struct {
	states sync.Pool
	base64 bool
}

type state struct {
	mac hash.Hash
	// sum and text are buffers for the digest and the value.
	sum  [sha512.Size]byte
	text []byte
}

// secretKey returns a secret's bytes.
func secretKey(secret string) ([]byte, error) { return []byte(secret), nil }

// standardKey returns the key of a Standard Webhooks secret.
func standardKey(secret string) ([]byte, error) {
	encoded, ok := strings.CutPrefix(secret, secretPrefix)
	if !ok {
		return []byte(secret), nil
	}
	raw, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return nil, errors.New("the part after whsec_ is not base64; copy the whole secret, with its padding")
	}
	return raw, nil
}

var algorithms = map[string]func() hash.Hash{liveconfig.SHA1: sha1.New, liveconfig.SHA256: sha256.New, liveconfig.SHA512: sha512.New}

func newKey(f liveconfig.HMACFormat, keyOf func(string) ([]byte, error), secret string) (*key, error) {
	raw, err := keyOf(secret)
	if err != nil {
		return nil, err
	}
	if len(raw) == 0 {
		return nil, errors.New("the secret is empty; set a secret")
	}
	algorithm := algorithms[f.Algorithm]
	return &key{
		base64: f.Encoding == liveconfig.Base64,
		states: sync.Pool{New: func() any { return &state{mac: hmac.New(algorithm, raw)} }},
	}, nil
}

// fill returns prefix and the template with the request's signature, timestamp and ID.
func (k *key) fill(t template, prefix, content string, r *request) string {
	s := k.states.Get().(*state)
	defer k.states.Put(s)
	s.mac.Reset()
	s.text = s.text[:0]
	switch content {
	case liveconfig.IDTimestampBody:
		s.text = append(append(s.text, r.id...), '.')
		fallthrough
	case liveconfig.TimestampBody:
		s.text = append(append(s.text, r.timestamp...), '.')
		s.mac.Write(s.text)
	}
	s.mac.Write(r.body)
	sum := s.mac.Sum(s.sum[:0])
	s.text = append(s.text[:0], prefix...)
	for _, part := range t {
		switch {
		case part == liveconfig.PlaceholderTimestamp:
			s.text = append(s.text, r.timestamp...)
		case part == liveconfig.PlaceholderID:
			s.text = append(s.text, r.id...)
		case part != liveconfig.PlaceholderSignature:
			s.text = append(s.text, part...)
		case k.base64:
			s.text = base64.StdEncoding.AppendEncode(s.text, sum)
		default:
			s.text = hex.AppendEncode(s.text, sum)
		}
	}
	return string(s.text)
}
