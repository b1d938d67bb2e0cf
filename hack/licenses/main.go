// Command licenses writes THIRD_PARTY_LICENSES.md: the modules that are linked into the posthorn
// binary, with their versions, licenses and license texts. It fails for a module without a license
// that it recognizes and accepts. `make generate` runs it:
//
//	cd hack/licenses && GOWORK=off go run . ../..
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

const (
	target = "THIRD_PARTY_LICENSES.md"
	binary = "./cmd/posthorn"
	// client is the module of the Go client, which has Posthorn's license.
	client = "github.com/posthorn/posthorn/analytics"
	// leastCoverage is the part of a license file, in percent, that known license texts must cover.
	leastCoverage = 75
)

// architectures are the image's.
var architectures = []string{"amd64", "arm64", "ppc64le", "riscv64"}

// accepted are the licenses that permit a distribution as a part of the binary with their texts.
var accepted = []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "Zlib"}

// module is a linked module with its license files, by their paths within the module.
type module struct {
	path, version, dir string
	files              map[string][]byte
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("licenses: ")
	if len(os.Args) != 2 {
		log.Fatal("usage: licenses ROOT")
	}
	if err := generate(os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

func generate(root string) error {
	modules, err := linked(root)
	if err != nil {
		return err
	}
	text, err := render(modules)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root, target), text, 0o644)
}

// linked lists the modules of the binary's packages on all architectures, sorted by path; the
// standard library is the first one.
func linked(root string) ([]*module, error) {
	byPath := map[string]*module{}
	for _, arch := range architectures {
		cmd := exec.Command("go", "list", "-deps", "-json=Dir,Standard,Root,Module", binary)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOWORK=off")
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("list the packages of %s: %w", binary, err)
		}
		for packages := json.NewDecoder(bytes.NewReader(out)); ; {
			var p struct {
				Dir, Root string
				Standard  bool
				Module    *struct {
					Path, Version, Dir string
					Main               bool
				}
			}
			if err := packages.Decode(&p); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, err
			}
			m := &module{path: "Go standard library", dir: p.Root}
			switch {
			case p.Standard:
			case p.Module == nil:
				return nil, fmt.Errorf("the package in %s has no module", p.Dir)
			case p.Module.Main, p.Module.Path == client:
				continue
			default:
				m = &module{path: p.Module.Path, version: p.Module.Version, dir: p.Module.Dir}
			}
			if known := byPath[m.path]; known != nil {
				m = known
			} else {
				m.files = map[string][]byte{}
				byPath[m.path] = m
			}
			if err := m.collect(p.Dir); err != nil {
				return nil, err
			}
		}
	}
	var list []*module
	for _, m := range byPath {
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b *module) int { return strings.Compare(a.path, b.path) })
	return list, nil
}

var licenceFile = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|copyright)([-_.].*)?$`)

// notLinked are license files of code that is not in the binary: BoringSSL is linked only with
// GOEXPERIMENT=boringcrypto.
var notLinked = []string{"src/crypto/internal/boring/LICENSE"}

// source matches source files whose names look like licenses.
var source = regexp.MustCompile(`\.(go|json|yaml|sh|tmpl)$`)

// collect reads the license files of a package's folder and of the folders above it, up to the
// module's.
func (m *module) collect(dir string) error {
	for {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.IsDir() || !licenceFile.MatchString(e.Name()) || source.MatchString(e.Name()) {
				continue
			}
			name, err := filepath.Rel(m.dir, filepath.Join(dir, e.Name()))
			if err != nil {
				return err
			}
			name = filepath.ToSlash(name)
			if m.files[name] != nil || slices.Contains(notLinked, name) {
				continue
			}
			text, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				return err
			}
			m.files[name] = tidy(text)
		}
		if dir == m.dir {
			return nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return fmt.Errorf("%s is not a folder of %s", dir, m.path)
		}
		dir = parent
	}
}

// tidy removes differences that do not belong to the text: line ends and spaces at their ends.
func tidy(text []byte) []byte {
	lines := strings.Split(strings.ReplaceAll(strings.ReplaceAll(string(text), "\r\n", "\n"), "\f", ""), "\n")
	for i, line := range lines {
		lines[i] = strings.TrimRight(line, " \t\r")
	}
	return []byte(strings.Trim(strings.Join(lines, "\n"), "\n") + "\n")
}

// licenses returns the licenses of a module, sorted.
func (m *module) licenses() ([]string, error) {
	var names []string
	for file, text := range m.files {
		if strings.HasPrefix(strings.ToLower(filepath.Base(file)), "notice") {
			continue
		}
		coverage := licensecheck.Scan(text)
		if coverage.Percent < leastCoverage {
			return nil, fmt.Errorf("%s %s: known licenses cover %.0f %% of %s; check the file and the limit", m.path, m.version, coverage.Percent, file)
		}
		for _, match := range coverage.Match {
			if match.IsURL {
				continue
			}
			if !slices.Contains(accepted, match.ID) {
				return nil, fmt.Errorf("%s %s: %s has the license %s, which is not in the accepted list", m.path, m.version, file, match.ID)
			}
			names = append(names, match.ID)
		}
	}
	slices.Sort(names)
	if names = slices.Compact(names); len(names) == 0 {
		return nil, fmt.Errorf("%s %s: no license file in %s", m.path, m.version, m.dir)
	}
	return names, nil
}

// part is a license text and the files that contain it.
type part struct {
	text  string
	files []string
}

func render(modules []*module) ([]byte, error) {
	var b bytes.Buffer
	b.WriteString("# Third-party licenses\n\n" +
		"<!-- Generated by `make generate` (hack/licenses); do not edit. -->\n\n" +
		"The `posthorn` binary contains code of these modules, under their own licenses. The texts and\n" +
		"notices follow below the table. Posthorn itself has the license in [LICENSE](LICENSE).\n\n" +
		"| module | version | license |\n| --- | --- | --- |\n")
	var parts []*part
	byText := map[string]*part{}
	for _, m := range modules {
		licenses, err := m.licenses()
		if err != nil {
			return nil, err
		}
		version := m.version
		if version == "" {
			version = "of the toolchain"
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", m.path, version, strings.Join(licenses, ", "))
		var files []string
		for file := range m.files {
			files = append(files, file)
		}
		slices.Sort(files)
		for _, file := range files {
			text := string(m.files[file])
			if byText[text] == nil {
				byText[text] = &part{text: text}
				parts = append(parts, byText[text])
			}
			byText[text].files = append(byText[text].files, m.path+": "+file)
		}
	}
	b.WriteString("\n## Texts\n")
	for _, p := range parts {
		b.WriteString("\n")
		for _, file := range p.files {
			fmt.Fprintf(&b, "- %s\n", file)
		}
		// Four backticks: a text may contain three.
		fmt.Fprintf(&b, "\n````text\n%s````\n", p.text)
	}
	return b.Bytes(), nil
}
