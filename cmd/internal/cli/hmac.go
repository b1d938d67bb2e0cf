package cli

import (
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // receivers of other vendors' webhooks choose the algorithm
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"hash"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

// hmacFormat is the format of a signing scheme of the type HMAC, as in the spec of a destination.
// Without a header, the other schemes are checked.
type hmacFormat struct{ header, algorithm, encoding, content, value string }

const (
	placeholderSignature = "{signature}"
	placeholderTimestamp = "{timestamp}"
	placeholderID        = "{id}"
	base64Encoding       = "Base64"
	timestampBody        = "TimestampBody"
	idTimestampBody      = "IDTimestampBody"
)

// addFlags adds the flags of the format to a command.
func (f *hmacFormat) addFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.header, "header", "", "signing scheme HMAC: the name of the signature's header, such as X-Hub-Signature-256")
	command.ChoiceFlag(cmd, &f.algorithm, "algorithm", "SHA256", "signing scheme HMAC: the algorithm", "SHA1", "SHA256", "SHA512")
	command.ChoiceFlag(cmd, &f.encoding, "encoding", "Hex", "signing scheme HMAC: the encoding", "Hex", base64Encoding)
	command.ChoiceFlag(cmd, &f.content, "content", "Body", "signing scheme HMAC: the signed content", "Body", timestampBody, idTimestampBody)
	flags.StringVar(&f.value, "value", placeholderSignature, "signing scheme HMAC: the template of the header's value")
}

// validate reports a template that cannot be checked. Flags allow only known values of the others.
func (f *hmacFormat) validate() error {
	if f.header != "" && strings.Count(f.value, placeholderSignature) != 1 {
		return command.Usagef("--value: must contain %s once", placeholderSignature)
	}
	return nil
}

var hashes = map[string]func() hash.Hash{"SHA1": sha1.New, "SHA256": sha256.New, "SHA512": sha512.New}

// check returns the reason why a header's value does not match the body, or "". It implements
// the format independently of the signing code. A signature of the value is enough: during a
// rotation it has two. It does not check the age of the timestamp.
func (f *hmacFormat) check(secret, value, id, timestamp string, body []byte) string {
	if value == "" {
		return "no " + f.header + " header"
	}
	pattern := strings.NewReplacer(
		regexp.QuoteMeta(placeholderSignature), `[0-9A-Za-z+/=]+`,
		regexp.QuoteMeta(placeholderTimestamp), `(?P<timestamp>[0-9]+)`,
		regexp.QuoteMeta(placeholderID), `(?P<id>[0-9A-Za-z_-]+)`,
	).Replace(regexp.QuoteMeta(f.value))
	template := regexp.MustCompile("^" + pattern)
	match := template.FindStringSubmatch(value)
	if match == nil {
		return f.header + " does not have the form " + f.value
	}
	for i, name := range template.SubexpNames() {
		switch name {
		case "timestamp":
			timestamp = match[i]
		case "id":
			id = match[i]
		}
	}
	mac := hmac.New(hashes[f.algorithm], []byte(secret))
	switch f.content {
	case timestampBody:
		mac.Write([]byte(timestamp + "."))
	case idTimestampBody:
		mac.Write([]byte(id + "." + timestamp + "."))
	}
	mac.Write(body)
	want := hex.EncodeToString(mac.Sum(nil))
	if f.encoding == base64Encoding {
		want = base64.StdEncoding.EncodeToString(mac.Sum(nil))
	}
	// An "=" before a signature is part of the template, one behind it is padding.
	for _, got := range regexp.MustCompile(`[0-9A-Za-z+/]+={0,2}`).FindAllString(value, -1) {
		if hmac.Equal([]byte(got), []byte(want)) {
			return ""
		}
	}
	return f.header + " does not match this body and secret"
}
