package backup

import (
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/posthorn/posthorn/internal/durable"
)

// TokenName is the file, in a data directory, of the token that a request for a backup needs
// without a cluster. It is not part of a backup.
const TokenName = "backup.token"

// maxTokenBytes bounds the token file when it is read.
const maxTokenBytes = 1 << 10

// NewToken replaces the token of a data directory. Only the owner of the file can read it.
func NewToken(dataDir string) (string, error) {
	token := rand.Text()
	return token, durable.Replace(filepath.Join(dataDir, TokenName), []byte(token+"\n"), 0o600)
}

// ReadToken reads a token file.
func ReadToken(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxTokenBytes+1))
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(text))
	if len(text) > maxTokenBytes || token == "" || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", fmt.Errorf("%s is not a token file; use the file %s of the data directory", file, TokenName)
	}
	return token, nil
}
