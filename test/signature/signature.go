// Package signature computes signatures as receivers do, from the specifications alone: tests check
// package sign with it, so it must not use that package.
package signature

import (
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // the specified algorithm of X-Signature
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
)

// SHA1 returns X-Signature: the lowercase hex HMAC-SHA1 of the body.
func SHA1[Body string | []byte](secret string, body Body) string {
	mac := hmac.New(sha1.New, []byte(secret))
	mac.Write([]byte(body))
	return hex.EncodeToString(mac.Sum(nil))
}

// Standard returns webhook-signature for a secret that is not base64: version 1 of Standard Webhooks.
func Standard[Body string | []byte](secret, id, timestamp string, body Body) string {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(id + "." + timestamp + "." + string(body)))
	return "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}
