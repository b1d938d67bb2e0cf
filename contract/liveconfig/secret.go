package liveconfig

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"unicode/utf8"
)

const redacted = "[redacted]"

// Secret is a text that does not print itself: every format verb, logger and JSON encoder shows
// "[redacted]". Only Reveal, and Encode for the Secret object of the live config, return the text.
type Secret struct {
	// value is a pointer because fmt, for an unsuitable verb, prints the fields of nested structs
	// without a call of their Format method.
	value *string
	// reveal is set by Encode on its own copy.
	reveal bool
}

// NewSecret wraps a text.
func NewSecret(value string) Secret {
	if value == "" {
		return Secret{}
	}
	return Secret{value: &value}
}

// Reveal returns the text. Call it only where the text is used.
func (s Secret) Reveal() string {
	if s.value == nil {
		return ""
	}
	return *s.value
}

// IsZero reports whether the text is empty.
func (s Secret) IsZero() bool { return s.value == nil }

// Equal compares the texts.
func (s Secret) Equal(t Secret) bool { return s.Reveal() == t.Reveal() }

// Format implements fmt.Formatter for every verb.
func (s Secret) Format(f fmt.State, _ rune) {
	if s.value != nil {
		_, _ = f.Write([]byte(redacted))
	}
}

// LogValue implements slog.LogValuer.
func (s Secret) LogValue() slog.Value {
	if s.value == nil {
		return slog.StringValue("")
	}
	return slog.StringValue(redacted)
}

// MarshalJSON implements json.Marshaler; it redacts.
func (s Secret) MarshalJSON() ([]byte, error) {
	switch {
	case s.reveal && !utf8.ValidString(s.Reveal()):
		// JSON text cannot contain these bytes, and other bytes would change the signature.
		return json.Marshal(binary{Base64: []byte(s.Reveal())})
	case s.reveal:
		return json.Marshal(s.Reveal())
	case s.value == nil:
		return []byte(`""`), nil
	}
	return []byte(`"` + redacted + `"`), nil
}

// binary is the JSON form of a Secret that is not UTF-8.
type binary struct {
	Base64 []byte `json:"base64"`
}

// UnmarshalJSON implements json.Unmarshaler.
func (s *Secret) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '{' {
		var value binary
		if err := json.Unmarshal(b, &value); err != nil {
			return err
		}
		*s = NewSecret(string(value.Base64))
		return nil
	}
	var value string
	if err := json.Unmarshal(b, &value); err != nil {
		return err
	}
	*s = NewSecret(value)
	return nil
}

// revealed returns a copy of c whose secrets marshal unredacted.
func revealed(c Config) Config {
	show := func(s Secret) Secret { s.reveal = true; return s }
	destinations := make([]Destination, len(c.Destinations))
	for i, d := range c.Destinations {
		endpoints := make([]Endpoint, len(d.Endpoints))
		for j, e := range d.Endpoints {
			e.URL = show(e.URL)
			headers := make([]Header, len(e.Headers))
			for k, h := range e.Headers {
				headers[k] = Header{Name: h.Name, Value: show(h.Value)}
			}
			e.Headers = headers
			e.TLS = revealedTLS(e.TLS)
			if e.OAuth2 != nil {
				client := *e.OAuth2
				client.ClientSecret, client.TLS = show(client.ClientSecret), revealedTLS(client.TLS)
				e.OAuth2 = &client
			}
			endpoints[j] = e
		}
		d.Endpoints = endpoints
		d.Signing = slices.Clone(d.Signing)
		for j := range d.Signing {
			s := &d.Signing[j]
			s.Secret, s.Previous = show(s.Secret), show(s.Previous)
		}
		if d.Redact != nil && d.Redact.Hash != nil {
			rules, hash := *d.Redact, *d.Redact.Hash
			hash.Key = show(hash.Key)
			rules.Hash, d.Redact = &hash, &rules
		}
		destinations[i] = d
	}
	c.Destinations = destinations
	return c
}

func revealedTLS(t *TLS) *TLS {
	if t == nil {
		return nil
	}
	shown := *t
	shown.ClientKey.reveal = true
	return &shown
}
