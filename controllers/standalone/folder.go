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

// mark identifies the version of a file.
type mark struct {
	path  string
	size  int64
	mtime time.Time
	// secret is true for the file of a SecretValue.
	secret bool
}

// markOf identifies the version of a file that may be missing.
func markOf(path string) mark {
	m := mark{path: path, size: -1}
	if info, err := os.Stat(path); err == nil {
		m.size, m.mtime = info.Size(), info.ModTime()
	}
	return m
}

// manifests lists the manifest files in a folder, sorted by name. If path is a file, it
// lists that file. It follows links, as the files of a mounted ConfigMap are, and excludes
// hidden files and sub-folders.
func manifests(path string) ([]mark, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read manifests: %w", err)
	}
	if !info.IsDir() {
		return []mark{{path: path, size: info.Size(), mtime: info.ModTime()}}, nil
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
			continue // The file was removed, or it is a broken link.
		}
		if err != nil {
			return nil, fmt.Errorf("read manifests: %w", err)
		}
		if info.Mode().IsRegular() {
			marks = append(marks, mark{path: file, size: info.Size(), mtime: info.ModTime()})
		}
	}
	return marks, nil
}

// readFile reads a manifest file of at most maxFileBytes.
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
