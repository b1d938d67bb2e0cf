// Package sign makes the headers by which a receiver knows that a request is
// genuine. It is pure and safe for concurrent use.
package sign

import (
	"crypto/hmac"
	"crypto/sha1" // The specified signature is HMAC-SHA1, which SHA-1's collisions do not break.
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"log/slog"
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

// Signer signs requests under one destination's secrets. The zero Signer signs
// nothing. It does not print its keys.
type Signer struct{ keys *keys }

type keys struct {
	standard          bool
	current, previous *key
	redactor          *egress.Redactor
}

// New makes a Signer. It fails when a secret is empty or does not decode: a
// destination that asks for signatures must never be sent to without.
// The error does not hold the secret.
func New(s liveconfig.Signing) (Signer, error) {
	k := &keys{standard: s.Scheme == liveconfig.StandardWebhooks}
	if !k.standard && s.Scheme != liveconfig.HMACSHA1 {
		return Signer{}, fmt.Errorf("signing.scheme %q is unknown; use %s or %s", s.Scheme, liveconfig.HMACSHA1, liveconfig.StandardWebhooks)
	}
	var err error
	if k.current, err = newKey(k.standard, s.Secret.Reveal()); err != nil {
		return Signer{}, fmt.Errorf("signing.secret: %w", err)
	}
	if !s.Previous.IsZero() {
		if k.previous, err = newKey(k.standard, s.Previous.Reveal()); err != nil {
			return Signer{}, fmt.Errorf("signing.previous: %w", err)
		}
	}
	k.redactor = egress.NewRedactor(append(secretsOf(s.Secret.Reveal()), secretsOf(s.Previous.Reveal())...)...)
	return Signer{k}, nil
}

// secretsOf lists a secret as it was given, without its prefix, and decoded.
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
// which separate the parts of the signed content. It is "" when the scheme has none.
func (s Signer) ID(source, messageID string) string {
	if s.keys == nil || !s.keys.standard {
		return ""
	}
	// The name of a Source holds no line feed.
	sum := sha256.Sum256([]byte(source + "\n" + messageID))
	return "msg_" + base64.RawURLEncoding.EncodeToString(sum[:18])
}

// Redact returns an answer, at most its first KiB, without the secrets and
// without the signatures in headers, which are those of the answered request: a
// signature of HMACSHA1 stays valid, and makes a copy of the message look genuine.
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

// Headers appends the signature headers of a request to dst. id is the
// message's ID, now the time of the attempt, body the exact bytes that are sent.
func (s Signer) Headers(dst []egress.Header, id string, now time.Time, body []byte) []egress.Header {
	k := s.keys
	if k == nil {
		return dst
	}
	if k.standard {
		timestamp := strconv.FormatInt(now.Unix(), 10)
		signature := "v1," + k.current.standard(id, timestamp, body)
		if k.previous != nil {
			signature += " v1," + k.previous.standard(id, timestamp, body)
		}
		return append(dst,
			egress.Header{Name: HeaderID, Value: id},
			egress.Header{Name: HeaderTimestamp, Value: timestamp},
			egress.Header{Name: HeaderWebhookSignature, Value: signature})
	}
	dst = append(dst, egress.Header{Name: HeaderSignature, Value: k.current.hex(body)})
	if k.previous != nil {
		dst = append(dst, egress.Header{Name: HeaderSignaturePrevious, Value: k.previous.hex(body)})
	}
	return dst
}

// Format keeps keys out of every print.
func (s Signer) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte("[signer]")) }

// LogValue keeps keys out of logs.
func (s Signer) LogValue() slog.Value { return slog.StringValue("[signer]") }

// key holds ready-made HMAC states: the two key blocks are hashed once, not per message.
type key struct{ states sync.Pool }

type state struct {
	mac hash.Hash
	// sum and text are room for the digest, raw and as text.
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
				return nil, errors.New("what follows whsec_ is not base64; copy the whole secret, padding included")
			}
		}
	}
	if len(raw) == 0 {
		return nil, errors.New("the secret is empty; a signature under it would prove nothing")
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
