package liveconfig

import (
	"fmt"
	"strings"
)

// HMACFormat is how a signature is computed, and how a header carries it; see the API's HMACFormat.
type HMACFormat struct {
	// Header is the name of the header, as in the spec.
	Header string `json:"header"`
	// Algorithm is SHA1, SHA256 or SHA512.
	Algorithm string `json:"algorithm"`
	// Encoding is Hex or Base64.
	Encoding string `json:"encoding"`
	// Content is Body, TimestampBody or IDTimestampBody.
	Content string `json:"content"`
	// Value is the template of the header's value.
	Value string `json:"value"`
	// PreviousValue is the template of what is appended to the value during a rotation. If it is
	// empty, a header of its own carries the previous signature.
	PreviousValue string `json:"previousValue,omitempty"`
}

// Algorithms, encodings and signed contents, as in the API.
const (
	SHA1            = "SHA1"
	SHA256          = "SHA256"
	SHA512          = "SHA512"
	Hex             = "Hex"
	Base64          = "Base64"
	SignBody        = "Body"
	TimestampBody   = "TimestampBody"
	IDTimestampBody = "IDTimestampBody"
)

// Placeholders of the templates of an HMACFormat.
const (
	PlaceholderSignature = "{signature}"
	PlaceholderTimestamp = "{timestamp}"
	PlaceholderID        = "{id}"
)

var withoutPlaceholders = strings.NewReplacer(PlaceholderSignature, "", PlaceholderTimestamp, "", PlaceholderID, "")

// Validate reports the first field that is not valid, with the field's name as the first word.
func (f *HMACFormat) Validate() error {
	oneOf := func(field, value string, values ...string) error {
		for _, v := range values {
			if v == value {
				return nil
			}
		}
		return fmt.Errorf("%s: %q is unknown; use %s or %s", field, value, strings.Join(values[:len(values)-1], ", "), values[len(values)-1])
	}
	template := func(field, text string) error {
		switch {
		case strings.Count(text, PlaceholderSignature) != 1:
			return fmt.Errorf("%s: must contain %s once", field, PlaceholderSignature)
		case strings.ContainsAny(withoutPlaceholders.Replace(text), "{}"):
			return fmt.Errorf("%s: has a brace outside of %s, %s and %s", field, PlaceholderSignature, PlaceholderTimestamp, PlaceholderID)
		case strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }):
			return fmt.Errorf("%s: must be printable ASCII", field)
		}
		return nil
	}
	checks := []error{
		oneOf("algorithm", f.Algorithm, SHA1, SHA256, SHA512),
		oneOf("encoding", f.Encoding, Hex, Base64),
		oneOf("content", f.Content, SignBody, TimestampBody, IDTimestampBody),
		template("value", f.Value),
	}
	if f.PreviousValue != "" {
		checks = append(checks, template("previousValue", f.PreviousValue))
	}
	if f.Header == "" {
		checks = append(checks, fmt.Errorf("header: is missing"))
	}
	for _, err := range checks {
		if err != nil {
			return err
		}
	}
	return nil
}
