package main

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // the specified algorithm of X-Signature
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

func newVerify() *cobra.Command {
	var secret, secretFile, signature string
	cmd := &cobra.Command{
		Use:   "verify [BODY-FILE|-]",
		Short: "Check the X-Signature of a received body",
		Long: `Checks that X-Signature is the HMAC-SHA1 of a body under the shared secret.
The body is read byte for byte from a file or from standard input: save it as it
arrived. Exits 0 when the signature is authentic, 1 when it is not; then it says
why, where a line break or formatted JSON is the cause.`,
		Example: `  posthorn verify --secret "$SECRET" --signature 9c1f… body.json
  curl -s … | posthorn verify --secret-file secret.txt --signature 9c1f…`,
		Args: atMostArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := secretFrom(secret, secretFile)
			if err != nil {
				return err
			}
			if key == "" {
				return usagef("the shared secret is missing; set --secret or --secret-file")
			}
			if signature == "" {
				return usagef("the signature is missing; set --signature to the value of X-Signature")
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
			if problem := checkSignature(key, strings.TrimSpace(signature), body); problem != "" {
				fmt.Fprintf(cmd.OutOrStdout(), "NOT AUTHENTIC: %s\n", problem)
				return errSilent
			}
			fmt.Fprintf(cmd.OutOrStdout(), "authentic: %d bytes signed with this secret\n", len(body))
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&secret, "secret", "", "the shared secret")
	f.StringVar(&secretFile, "secret-file", "", "a file that holds the shared secret, byte for byte")
	f.StringVar(&signature, "signature", "", "the value of the X-Signature header")
	return cmd
}

func secretFrom(secret, file string) (string, error) {
	if secret != "" && file != "" {
		return "", usagef("set --secret or --secret-file, not both")
	}
	if file == "" {
		return secret, nil
	}
	b, err := os.ReadFile(file)
	return string(b), err
}

// checkSignature says in words why a signature is not the body's, or "". It is
// written against the specification and on purpose apart from the code that signs.
func checkSignature(secret, signature string, body []byte) string {
	if signature == "" {
		return "no X-Signature header"
	}
	got, err := hex.DecodeString(signature)
	if err != nil || len(got) != sha1.Size || strings.ToLower(signature) != signature {
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
	_ = json.Compact(&compact, body) // Of no JSON nothing is left, which nobody signs.
	bare, content := strings.TrimRight(secret, "\r\n"), bytes.TrimRight(body, "\r\n")
	switch {
	case signs(bare, body):
		return "the secret given here ends in a line break, the one that signed does not; remove it"
	case signs(secret+"\n", body), signs(secret+"\r\n", body):
		return "the secret that signed ends in a line break; store it without one (kubectl create secret --from-literal)"
	case signs(secret, content), signs(secret, append(slices.Clip(content), '\n')):
		return "the body has a line break at its end too many or too few; check the bytes as they arrived"
	case signs(secret, compact.Bytes()):
		return "the body was formatted after it arrived; check the bytes as they arrived"
	}
	return "X-Signature is not the HMAC-SHA1 of this body under this secret"
}
