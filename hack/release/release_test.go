package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Two runs have the same checksums, and the files contain the version and the licenses.
func TestRelease(t *testing.T) {
	t.Setenv(passwordEnv, "throw-away")
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	key := filepath.Join(t.TempDir(), "key")
	printed(t, func() error { return keygen(key) })
	chart, err := os.ReadFile("../../charts/posthorn/Chart.yaml")
	if err != nil {
		t.Fatal(err)
	}
	number, _, _ := strings.Cut(string(chartVersion.FindSubmatch(chart)[2]), "-")
	version := number + "-test"
	run := func() (dir, sums string) {
		dir = t.TempDir()
		r := release{root: "../..", out: dir, version: version, platforms: []string{"linux/amd64"}, pluginPlatforms: []string{"linux/amd64"}}
		if err := r.make(key); err != nil {
			t.Fatal(err)
		}
		return dir, read(t, dir, sumsName)
	}
	dir, first := run()
	if _, second := run(); first != second {
		t.Errorf("checksums of two runs differ: got\n%s\nwant\n%s", second, first)
	}
	printed(t, func() error { return verify(dir, filepath.Join(dir, publicName)) })

	for name, want := range map[string]string{
		"posthorn-chart-" + version + ".tgz":                  "posthorn/LICENSE",
		"posthorn_" + version + "_linux_amd64.tar.gz":         "THIRD_PARTY_LICENSES.md",
		"kubectl-posthorn_" + version + "_linux_amd64.tar.gz": "THIRD_PARTY_LICENSES.md",
		"posthorn_" + version + "_docs.tar.gz":                "docs/install.md",
		"posthorn_" + version + "_image.oci.tar":              "licenses/THIRD_PARTY_LICENSES.md",
	} {
		if files := entries(t, read(t, dir, name)); files[want] == "" {
			t.Errorf("%s has no %s", name, want)
		}
	}
	tagged := repository + ":" + version
	for name, c := range map[string]struct {
		text string
		want int
	}{
		"version: " + version:                     {entries(t, read(t, dir, "posthorn-chart-"+version+".tgz"))["posthorn/Chart.yaml"], 1},
		"posthorn.dev/bundle-version: " + version: {read(t, dir, "posthorn_"+version+"_crds-standard.yaml"), 5},
		"posthorn.dev/channel: experimental":      {read(t, dir, "posthorn_"+version+"_crds-experimental.yaml"), 5},
		tagged:                                    {read(t, dir, "posthorn_"+version+"_install.yaml"), 2},
		"\nkind: CustomResourceDefinition\n":      {read(t, dir, "posthorn_"+version+"_crds-standard.yaml"), 5},
		`io.containerd.image.name": "` + tagged:   {entries(t, read(t, dir, "posthorn_"+version+"_image.oci.tar"))["index.json"], 1},
	} {
		if got := strings.Count(c.text, name); got != c.want {
			t.Errorf("occurrences of %q: got %d, want %d", name, got, c.want)
		}
	}
	if text := read(t, dir, "INSTALL.md"); strings.Contains(text, "VERSION") {
		t.Errorf("INSTALL.md: got VERSION, want %s everywhere", version)
	}
}

// Each link of a page is a URL, or names a file of the archive or of the chart, which INSTALL.md unpacks beside it.
func TestLinksOfThePages(t *testing.T) {
	dir := t.TempDir()
	if err := (&release{root: "../..", out: dir, version: "1.2.3"}).pages(); err != nil {
		t.Fatal(err)
	}
	files := entries(t, read(t, dir, "posthorn_1.2.3_docs.tar.gz"))
	found := map[string]bool{}
	for name := range files {
		for ; name != "."; name = path.Dir(name) {
			found[name] = true
		}
	}
	links := 0
	for name, text := range files {
		if path.Ext(name) != ".md" {
			continue
		}
		for _, link := range regexp.MustCompile(`(?:\]\(|src=")([^)"#]+)`).FindAllStringSubmatch(text, -1) {
			target := path.Join(path.Dir(name), link[1])
			if strings.Contains(link[1], "://") || strings.HasPrefix(target, "charts/posthorn/") {
				continue
			}
			if links++; !found[target] {
				t.Errorf("%s: the archive has no %s", name, target)
			}
		}
	}
	if links < 500 {
		t.Errorf("links inside the archive: got %d, want more than 500", links)
	}
	if want := "https://github.com/posthorn/posthorn/tree/v1.2.3/test/README.md"; !strings.Contains(files["docs/reliability.md"]+files["docs/architecture.md"], want) {
		t.Errorf("a link to the tests: got none to %s", want)
	}
}

// A version of another tree is refused before anything is built.
func TestVersionOfTheTree(t *testing.T) {
	err := (&release{root: "../..", version: "99.0.0"}).checkVersion()
	if err == nil || !strings.Contains(err.Error(), "is not release 99.0.0") {
		t.Errorf("got error %v, want one about the version of the tree", err)
	}
}

func read(t *testing.T, dir, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// entries returns the files of an archive, and of the archives in it.
func entries(t *testing.T, data string) map[string]string {
	t.Helper()
	var in io.Reader = strings.NewReader(data)
	if strings.HasPrefix(data, "\x1f\x8b") {
		var err error
		if in, err = gzip.NewReader(in); err != nil {
			t.Fatal(err)
		}
	}
	files := map[string]string{}
	for archive := tar.NewReader(in); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		var content bytes.Buffer
		if _, err := io.Copy(&content, archive); err != nil {
			t.Fatal(err)
		}
		files[h.Name] = content.String()
		if strings.HasPrefix(content.String(), "\x1f\x8b") {
			for name, text := range entries(t, content.String()) {
				files[name] = text
			}
		}
	}
}
