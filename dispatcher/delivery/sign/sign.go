// Package sign makes the headers that prove to a receiver that a request is genuine. It is pure and
// safe for concurrent use. The main type is Signer.
package sign

import (
	"crypto/hmac"
	"crypto/sha1" // The specification requires HMAC-SHA1, which is not affected by collisions of SHA-1.
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

// Names of the headers that carry signatures.
const (
	HeaderSignature         = "X-Signature"
	HeaderSignaturePrevious = "X-Signature-Previous"
	HeaderID                = "webhook-id"
	HeaderTimestamp         = "webhook-timestamp"
	HeaderWebhookSignature  = "webhook-signature"
)

// secretPrefix marks a Standard Webhooks secret whose rest is base64.
const secretPrefix = "whsec_"

// Signer signs requests under the secrets of one destination, by each of its
// schemes. The zero Signer signs nothing. A Signer does not print its keys.
type Signer struct{ keys *keys }

type keys struct {
	schemes  []scheme
	redactor *egress.Redactor
}

// scheme is one signing scheme with its keys; previous is nil outside a rotation.
type scheme struct {
	standard          bool
	current, previous *key
}

// New makes a Signer; without schemes it is the zero Signer. New fails when a
// secret is empty or does not decode: a destination with signing must not get
// unsigned requests. The error does not contain the secret.
func New(schemes liveconfig.SigningSchemes) (Signer, error) {
	if len(schemes) == 0 {
		return Signer{}, nil
	}
	k := &keys{}
	var secrets []string
	for _, s := range schemes {
		c := scheme{standard: s.Type == liveconfig.StandardWebhooks}
		if !c.standard && s.Type != liveconfig.HMACSHA1 {
			return Signer{}, fmt.Errorf("signing scheme %q is unknown; use %s or %s", s.Type, liveconfig.HMACSHA1, liveconfig.StandardWebhooks)
		}
		var err error
		if c.current, err = newKey(c.standard, s.Secret.Reveal()); err != nil {
			return Signer{}, fmt.Errorf("signing scheme %s: secret: %w", s.Type, err)
		}
		if !s.Previous.IsZero() {
			if c.previous, err = newKey(c.standard, s.Previous.Reveal()); err != nil {
				return Signer{}, fmt.Errorf("signing scheme %s: previous secret: %w", s.Type, err)
			}
		}
		k.schemes = append(k.schemes, c)
		secrets = append(append(secrets, secretsOf(s.Secret.Reveal())...), secretsOf(s.Previous.Reveal())...)
	}
	k.redactor = egress.NewRedactor(secrets...)
	return Signer{k}, nil
}

// secretsOf lists the forms of a secret: as given, without its prefix, and decoded.
func secretsOf(secret string) []string {
	encoded, ok := strings.CutPrefix(secret, secretPrefix)
	if !ok {
		return []string{secret}
	}
	raw, _ := base64.StdEncoding.DecodeString(encoded)
	return []string{secret, encoded, string(raw)}
}

// ID returns a message's webhook-id: the same in every attempt and every
// redelivery, different for every messageId of every Source, and free of dots,
// which separate the parts of the signed content. It is "" when no scheme needs it.
func (s Signer) ID(source, messageID string) string {
	if s.keys == nil || !slices.ContainsFunc(s.keys.schemes, func(c scheme) bool { return c.standard }) {
		return ""
	}
	// The name of a Source contains no line feed.
	sum := sha256.Sum256([]byte(source + "\n" + messageID))
	return "msg_" + base64.RawURLEncoding.EncodeToString(sum[:18])
}

// Redact returns at most the first KiB of a response, without the secrets and without the
// signatures in headers. A signature of HMACSHA1 remains valid and would make a copy of the message
// look genuine.
func (s Signer) Redact(answer []byte, headers []egress.Header) []byte {
	if s.keys == nil || len(answer) == 0 {
		return answer
	}
	var signatures []string
	for _, h := range headers {
		switch h.Name {
		case HeaderSignature, HeaderSignaturePrevious:
			signatures = append(signatures, h.Value)
		case HeaderWebhookSignature:
			for signature := range strings.FieldsSeq(h.Value) {
				signatures = append(signatures, strings.TrimPrefix(signature, "v1,"))
			}
		}
	}
	return s.keys.redactor.Redact(answer, signatures...)
}

// Headers appends the signature headers of a request to dst. id is the message's ID, now the time
// of the attempt, body the exact bytes of the request.
func (s Signer) Headers(dst []egress.Header, id string, now time.Time, body []byte) []egress.Header {
	if s.keys == nil {
		return dst
	}
	for i := range s.keys.schemes {
		dst = s.keys.schemes[i].headers(dst, id, now, body)
	}
	return dst
}

// headers appends the headers of one scheme to dst.
func (c *scheme) headers(dst []egress.Header, id string, now time.Time, body []byte) []egress.Header {
	if c.standard {
		timestamp := strconv.FormatInt(now.Unix(), 10)
		signature := "v1," + c.current.standard(id, timestamp, body)
		if c.previous != nil {
			signature += " v1," + c.previous.standard(id, timestamp, body)
		}
		return append(dst,
			egress.Header{Name: HeaderID, Value: id},
			egress.Header{Name: HeaderTimestamp, Value: timestamp},
			egress.Header{Name: HeaderWebhookSignature, Value: signature})
	}
	dst = append(dst, egress.Header{Name: HeaderSignature, Value: c.current.hex(body)})
	if c.previous != nil {
		dst = append(dst, egress.Header{Name: HeaderSignaturePrevious, Value: c.previous.hex(body)})
	}
	return dst
}

// Format keeps keys out of all output.
func (s Signer) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte("[signer]")) }

// LogValue keeps keys out of logs.
func (s Signer) LogValue() slog.Value { return slog.StringValue("[signer]") }

// key holds precomputed HMAC states: the two key blocks are hashed once, not per message.
type key struct{ states sync.Pool }

type state struct {
	mac hash.Hash
	// sum and text are buffers for the digest, raw and as text.
	sum  [sha256.Size]byte
	text [2 * sha256.Size]byte
}

func newKey(standard bool, secret string) (*key, error) {
	raw, algorithm := []byte(secret), sha1.New
	if standard {
		algorithm = sha256.New
		if encoded, ok := strings.CutPrefix(secret, secretPrefix); ok {
			var err error
			if raw, err = base64.StdEncoding.DecodeString(encoded); err != nil {
				return nil, errors.New("the part after whsec_ is not base64; copy the whole secret, with its padding")
			}
		}
	}
	if len(raw) == 0 {
		return nil, errors.New("the secret is empty; set a secret")
	}
	return &key{sync.Pool{New: func() any { return &state{mac: hmac.New(algorithm, raw)} }}}, nil
}

// hex returns the lowercase hex digest of the body.
func (k *key) hex(body []byte) string {
	s := k.states.Get().(*state)
	s.mac.Reset()
	s.mac.Write(body)
	sum := s.mac.Sum(s.sum[:0])
	text := string(s.text[:hex.Encode(s.text[:], sum)])
	k.states.Put(s)
	return text
}

// standard returns the base64 digest of "id.timestamp.body".
func (k *key) standard(id, timestamp string, body []byte) string {
	s := k.states.Get().(*state)
	s.mac.Reset()
	head := append(append(append(append(s.text[:0], id...), '.'), timestamp...), '.')
	s.mac.Write(head)
	s.mac.Write(body)
	sum := s.mac.Sum(s.sum[:0])
	base64.StdEncoding.Encode(s.text[:], sum)
	text := string(s.text[:base64.StdEncoding.EncodedLen(len(sum))])
	k.states.Put(s)
	return text
}
