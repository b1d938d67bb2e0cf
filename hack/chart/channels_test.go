package main

import (
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

// A field that is marked as experimental, the rules around it that name it, and its entry in required are only in the
// experimental channel.
func TestChannels(t *testing.T) {
	source, err := os.ReadFile("testdata/things.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, channel := range []string{"experimental", "standard"} {
		want, err := os.ReadFile(filepath.Join("testdata", channel+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		got, err := inChannel(source, channel, "1.2.3")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("the CRD in the channel %s (-want +got):\n%s", channel, diff)
		}
	}
}

// The CRDs of a release are recorded once; the record of a version before it is replaced.
func TestRecord(t *testing.T) {
	dir := t.TempDir()
	for _, step := range []struct {
		version, text string
		want          map[string]string
	}{
		{"1.0.0-dev", "a", map[string]string{"1.0.0-dev": "a"}},
		{"1.0.0-dev", "b", map[string]string{"1.0.0-dev": "b"}},
		{"1.0.0", "c", map[string]string{"1.0.0": "c"}},
		{"1.0.0", "d", map[string]string{"1.0.0": "c"}},
		{"1.1.0-dev", "d", map[string]string{"1.0.0": "c", "1.1.0-dev": "d"}},
	} {
		file := &fstest.MapFile{Data: []byte(step.text)}
		if err := record(fstest.MapFS{"standard/x.yaml": file, "experimental/x.yaml": file}, dir, step.version); err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		files, _ := filepath.Glob(filepath.Join(dir, "*", "standard", "x.yaml"))
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			got[filepath.Base(filepath.Dir(filepath.Dir(f)))] = string(text)
		}
		if diff := cmp.Diff(step.want, got); diff != "" {
			t.Errorf("%s with the CRD %q (-want +got):\n%s", step.version, step.text, diff)
		}
	}
}
