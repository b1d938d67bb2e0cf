// Package sign makes the headers that prove to a receiver that a request is genuine. It is pure and
// safe for concurrent use. The main type is Signer.
package sign

import (
	"encoding/base64"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
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

// Formats of the schemes that have a fixed one.
var (
	specified = liveconfig.HMACFormat{
		Header: HeaderSignature, Algorithm: liveconfig.SHA1, Encoding: liveconfig.Hex, Content: liveconfig.SignBody,
		Value: liveconfig.PlaceholderSignature,
	}
	standard = liveconfig.HMACFormat{
		Header: HeaderWebhookSignature, Algorithm: liveconfig.SHA256, Encoding: liveconfig.Base64, Content: liveconfig.IDTimestampBody,
		Value: "v1," + liveconfig.PlaceholderSignature, PreviousValue: " v1," + liveconfig.PlaceholderSignature,
	}
)

// Signer signs requests under the secrets of one destination, by each of its
// schemes. The zero Signer signs nothing. A Signer does not print its keys.
type Signer struct{ keys *keys }

type keys struct {
	schemes  []scheme
	redactor *egress.Redactor
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
		c, err := newScheme(s)
		if err != nil {
			return Signer{}, fmt.Errorf("signing scheme %q: %w", s.Name, err)
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

// Redact returns at most the first KiB of a response, without the secrets and without the
// signatures in headers. A signature without a timestamp remains valid and would make a copy of the
// message look genuine.
func (s Signer) Redact(answer []byte, headers []egress.Header) []byte {
	if s.keys == nil || len(answer) == 0 {
		return answer
	}
	var signatures []string
	for _, h := range headers {
		for i := range s.keys.schemes {
			if c := &s.keys.schemes[i]; h.Name == c.header || h.Name == c.previousHeader {
				signatures = appendSignatures(signatures, h.Value)
			}
		}
	}
	return s.keys.redactor.Redact(answer, signatures...)
}

// minSignature is shorter than every digest, and longer than a timestamp.
const minSignature = 20

// appendSignatures appends the parts of a header's value that can be signatures: what spaces, commas
// and semicolons separate, also without a name and "=" in front.
func appendSignatures(dst []string, value string) []string {
	for part := range strings.FieldsFuncSeq(value, func(r rune) bool { return strings.ContainsRune(" ,;", r) }) {
		for _, text := range []string{part, part[strings.IndexByte(part, '=')+1:]} {
			if len(text) >= minSignature {
				dst = append(dst, text)
			}
		}
	}
	return dst
}

// Headers appends the signature headers of a request to dst. id is the webhook-id (event.ID.Key), now the time
// of the attempt, body the exact bytes of the request.
//
// Dots in an id do not make the signed content id.timestamp.body ambiguous: a body is a JSON object, which does not
// begin with a timestamp, and the rest of an object from a dot in a string on is not JSON.
func (s Signer) Headers(dst []egress.Header, id string, now time.Time, body []byte) []egress.Header {
	if s.keys == nil {
		return dst
	}
	r := request{id: id, now: now, body: body}
	for i := range s.keys.schemes {
		dst = s.keys.schemes[i].headers(dst, &r)
	}
	return dst
}

// request is a request to be signed.
type request struct {
	id        string
	now       time.Time
	timestamp string // Unix seconds, after the first scheme that needs it
	body      []byte
	// sentID and sentTimestamp are true after the headers webhook-id and webhook-timestamp.
	sentID, sentTimestamp bool
}

// Format keeps keys out of all output.
func (s Signer) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte("[signer]")) }

// LogValue keeps keys out of logs.
func (s Signer) LogValue() slog.Value { return slog.StringValue("[signer]") }
