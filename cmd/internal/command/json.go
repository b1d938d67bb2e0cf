package command

import (
	"io"
	"os"
	"strings"
)

// MaxJSON bounds ReadJSON, in bytes. A dispatcher accepts calls of 32 KiB.
const MaxJSON = 1 << 20

// ReadJSON returns the value of a flag that is JSON, @FILE or @- (standard input). fix is the advice for a longer one than MaxJSON.
func ReadJSON(flag, value string, stdin io.Reader, fix string) ([]byte, error) {
	name, ok := strings.CutPrefix(value, "@")
	if !ok {
		return []byte(value), nil
	}
	in := stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, UsageError(err)
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, MaxJSON+1))
	if err == nil && len(text) > MaxJSON {
		err = Usagef("--%s %s: larger than %d bytes; %s", flag, value, MaxJSON, fix)
	}
	return text, err
}
