package audience

import (
	"errors"
	"fmt"
	"io"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// VerifyFiles reads the files in dir that the states among the values of a Store name, and returns
// an error if one is missing or damaged. It calls proceed for each record, and ends with its error.
func VerifyFiles(fs vfs.FS, dir string, values map[string][]byte, proceed func() error) error {
	for key, value := range values {
		n, ok := nameOfKey(key)
		if !ok {
			continue
		}
		r, err := decode(value)
		if err != nil {
			return fmt.Errorf("audience %s/%s: %w", n.namespace, n.name, err)
		}
		for file := range r.files() {
			if err := verifyFile(fs, fs.PathJoin(dir, n.folder(), file), proceed); err != nil {
				return fmt.Errorf("audience %s/%s: %w", n.namespace, n.name, err)
			}
		}
	}
	return nil
}

func verifyFile(fs vfs.FS, path string, proceed func() error) error {
	r, err := open(fs, path)
	if err != nil {
		return err
	}
	defer r.close()
	for {
		if err := proceed(); err != nil {
			return err
		}
		if _, err := r.next(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
