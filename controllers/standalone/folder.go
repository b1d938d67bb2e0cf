package standalone

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// maxFileBytes bounds a manifest file.
const maxFileBytes = 16 << 20

// mark is by what a changed file is known.
type mark struct {
	path  string
	size  int64
	mtime time.Time
}

// manifests lists the manifest files of a folder, or the one file that path
// is, sorted by name. Links are followed, so that a mounted ConfigMap works;
// hidden files and sub-folders are left out.
func manifests(path string) ([]mark, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read manifests: %w", err)
	}
	if !info.IsDir() {
		return []mark{{path, info.Size(), info.ModTime()}}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, fmt.Errorf("read manifests: %w", err)
	}
	var marks []mark
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") || !slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(entry.Name())) {
			continue
		}
		file := filepath.Join(path, entry.Name())
		info, err := os.Stat(file)
		if os.IsNotExist(err) {
			continue // gone, or a link to nowhere
		}
		if err != nil {
			return nil, fmt.Errorf("read manifests: %w", err)
		}
		if info.Mode().IsRegular() {
			marks = append(marks, mark{file, info.Size(), info.ModTime()})
		}
	}
	return marks, nil
}

// readFile reads a manifest file, and no more of it than is allowed.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxFileBytes {
		return nil, fmt.Errorf("has more than %d MiB; split it", maxFileBytes>>20)
	}
	return text, nil
}
