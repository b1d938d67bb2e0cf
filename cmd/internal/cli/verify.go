package cli

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // the specified algorithm of X-Signature
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

func newVerify() *cobra.Command {
	var secret, secretFile, signature, id, timestamp string
	var format hmacFormat
	cmd := &cobra.Command{
		Use:   "verify [BODY-FILE|-]",
		Short: "Check the signature of a received body",
		Long: `Checks that X-Signature is the HMAC-SHA1 of a body under the shared secret.
The body is read byte for byte from a file or from standard input: save it as it
arrived. Exits 0 if the signature is authentic, 1 if it is not; it then names the
cause if that is a line break or formatted JSON.

A signature of the scheme StandardWebhooks ("v1,…") is checked with the values of
the headers webhook-id and webhook-timestamp. With --header, the signature is one of
the scheme HMAC: set the other flags as in the destination's spec.`,
		Example: `  posthorn verify --secret-value "$SECRET" --signature 9c1f… body.json
  curl -s … | posthorn verify --secret-file secret.txt --signature 9c1f…
  posthorn verify --secret-value "$SECRET" --signature v1,… --webhook-id 0193e1c6-… --webhook-timestamp 1766000000 body.json
  posthorn verify --secret-value "$SECRET" --header X-Hub-Signature-256 --value 'sha256={signature}' --signature sha256=9c1f… body.json`,
		Args: command.AtMostArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := secretFrom(secret, secretFile)
			if err != nil {
				return err
			}
			if key == "" {
				return command.Usagef("the shared secret is missing; set --secret-value or --secret-file")
			}
			if signature == "" {
				return command.Usagef("the signature is missing; set --signature to the value of X-Signature")
			}
			if err := format.validate(); err != nil {
				return err
			}
			standard := format.header == "" && strings.Contains(signature, "v1,")
			if standard && (id == "" || timestamp == "") {
				return command.Usagef("the signature has the scheme StandardWebhooks; set --webhook-id and --webhook-timestamp to the values of these headers")
			}
			in := cmd.InOrStdin()
			if len(args) == 1 && args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return err
				}
				defer f.Close()
				in = f
			}
			body, err := io.ReadAll(in)
			if err != nil {
				return fmt.Errorf("read the body: %w", err)
			}
			problem := ""
			switch {
			case format.header != "":
				problem = format.check(key, signature, id, timestamp, body)
			case standard:
				problem = checkStandard(key, id, timestamp, signature, body)
			default:
				problem = checkSignature(key, strings.TrimSpace(signature), body)
			}
			if problem != "" {
				fmt.Fprintf(cmd.OutOrStdout(), "NOT AUTHENTIC: %s\n", problem)
				return command.ErrFailed
			}
			fmt.Fprintf(cmd.OutOrStdout(), "authentic: %d bytes signed with this secret\n", len(body))
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&secret, "secret-value", "", "the shared secret")
	f.StringVar(&secretFile, "secret-file", "", "a file that holds the shared secret, byte for byte")
	f.StringVar(&signature, "signature", "", "the value of the header X-Signature, webhook-signature or --header")
	f.StringVar(&id, "webhook-id", "", "the value of the header webhook-id")
	f.StringVar(&timestamp, "webhook-timestamp", "", "the value of the header webhook-timestamp")
	format.addFlags(cmd)
	return cmd
}

func secretFrom(secret, file string) (string, error) {
	if secret != "" && file != "" {
		return "", command.Usagef("set exactly one of --secret-value and --secret-file")
	}
	if file == "" {
		return secret, nil
	}
	b, err := os.ReadFile(file)
	return string(b), err
}

// checkRequest returns the reason why a request is not authentic, or "". One
// signature under the secret is enough: a request can carry two schemes, and the
// signatures of two secrets during a rotation.
func checkRequest(secret string, h http.Header, body []byte) string {
	var problem string
	if signatures := h.Get("webhook-signature"); signatures != "" {
		problem = checkStandard(secret, h.Get("webhook-id"), h.Get("webhook-timestamp"), signatures, body)
		if problem == "" || h.Get("X-Signature") == "" {
			return problem
		}
		problem += "; "
	}
	if previous := h.Get("X-Signature-Previous"); previous != "" && checkSignature(secret, previous, body) == "" {
		return ""
	}
	other := checkSignature(secret, h.Get("X-Signature"), body)
	if other == "" {
		return ""
	}
	return problem + other
}

// checkStandard is checkSignature for Standard Webhooks: one of the signatures must match the body,
// its id and its time. It does not check the age of the timestamp.
func checkStandard(secret, id, timestamp, signatures string, body []byte) string {
	key := []byte(secret)
	if encoded, ok := strings.CutPrefix(secret, "whsec_"); ok {
		var err error
		if key, err = base64.StdEncoding.DecodeString(encoded); err != nil {
			return "the part of the secret after whsec_ is not base64"
		}
	}
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "%s.%s.%s", id, timestamp, body)
	want := []byte("v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil)))
	for s := range strings.FieldsSeq(signatures) {
		if hmac.Equal([]byte(s), want) {
			return ""
		}
	}
	return "webhook-signature does not match this id, time, body and secret"
}

// checkSignature returns the reason why a signature does not match the body, or "". It implements
// the specification independently of the signing code.
func checkSignature(secret, signature string, body []byte) string {
	if signature == "" {
		return "no X-Signature header"
	}
	got, err := hex.DecodeString(signature)
	switch {
	case strings.HasPrefix(signature, "sha1="):
		return `X-Signature has no prefix; remove "sha1="`
	case err == nil && strings.ToLower(signature) != signature:
		return fmt.Sprintf("X-Signature must be %d lowercase hex digits; some are in upper case", 2*sha1.Size)
	case err != nil || len(got) != sha1.Size:
		return fmt.Sprintf("X-Signature must be %d lowercase hex digits", 2*sha1.Size)
	}
	signs := func(secret string, body []byte) bool {
		mac := hmac.New(sha1.New, []byte(secret))
		mac.Write(body)
		return hmac.Equal(mac.Sum(nil), got)
	}
	if signs(secret, body) {
		return ""
	}
	var compact bytes.Buffer
	_ = json.Compact(&compact, body) // Empty unless the body is JSON.
	bare, content := strings.TrimRight(secret, "\r\n"), bytes.TrimRight(body, "\r\n")
	switch {
	case signs(bare, body):
		return "the secret given here ends in a line break, the signing secret does not; remove the line break"
	case signs(secret+"\n", body), signs(secret+"\r\n", body):
		return "the signing secret ends in a line break; store it without one (kubectl create secret --from-literal)"
	case signs(secret, content), signs(secret, append(slices.Clip(content), '\n')):
		return "the body has one line break too many or too few at its end; check the bytes as they arrived"
	case signs(secret, compact.Bytes()):
		return "the body was reformatted after it arrived; check the bytes as they arrived"
	}
	return "X-Signature does not match this body and secret"
}
