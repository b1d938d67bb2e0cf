// Package image builds Posthorn's image with `make image`, for each architecture of the
// Dockerfile, and checks its content.
package image

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/posthorn/posthorn/test/env"
	"github.com/posthorn/posthorn/test/need"
)

// file is an entry of a tar archive.
type file struct {
	*tar.Header
	data []byte
}

func unpack(t *testing.T, archive []byte) map[string]file {
	t.Helper()
	files := map[string]file{}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[header.Name] = file{header, data}
	}
}

// TestImage checks the image of this architecture, and of another one with a small program in the
// place of posthorn. With POSTHORN_LONG=1 it builds posthorn for both, which takes minutes.
func TestImage(t *testing.T) {
	need.Program(t, "python3")
	root, err := env.Root()
	if err != nil {
		t.Fatal(err)
	}
	dockerfile, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	for arch, machine := range map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		t.Run(arch, func(t *testing.T) {
			bin := t.TempDir()
			cmd := exec.Command("make", "--no-print-directory", "image", "ARCH="+arch, "BIN="+bin, "VERSION=v9", "IMAGE=registry.internal/posthorn")
			if arch != runtime.GOARCH && os.Getenv("POSTHORN_LONG") == "" {
				program := filepath.Join(bin, "posthorn")
				build := exec.Command("go", "build", "-trimpath", "-o", program, "./testdata/program")
				build.Env = append(os.Environ(), "GOOS=linux", "GOARCH="+arch, "CGO_ENABLED=0")
				if out, err := build.CombinedOutput(); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				cmd = exec.Command(filepath.Join(root, "hack", "cluster", "make-image"), "registry.internal/posthorn:v9", program,
					filepath.Join(bin, "posthorn-linux-"+arch+".tar"), "LICENSE", "THIRD_PARTY_LICENSES.md")
			}
			cmd.Dir = root
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("make image: got error %v, want none\n%s", err, out)
			}
			archive, err := os.ReadFile(filepath.Join(bin, "posthorn-linux-"+arch+".tar"))
			if err != nil {
				t.Fatal(err)
			}
			files := unpack(t, archive)
			var manifest []struct {
				Config           string
				RepoTags, Layers []string
			}
			if err := json.Unmarshal(files["manifest.json"].data, &manifest); err != nil || len(manifest) != 1 || len(manifest[0].Layers) != 1 {
				t.Fatalf("manifest.json: got %s and error %v, want one image with one layer", files["manifest.json"].data, err)
			}
			if want := []string{"registry.internal/posthorn:v9"}; !slices.Equal(manifest[0].RepoTags, want) {
				t.Errorf("tags: got %v, want %v", manifest[0].RepoTags, want)
			}
			var config struct {
				Architecture, OS string
				Config           struct {
					User       string
					Entrypoint []string
					Env        []string
				}
			}
			if err := json.Unmarshal(files[manifest[0].Config].data, &config); err != nil {
				t.Fatal(err)
			}
			if config.Architecture != arch || config.OS != "linux" {
				t.Errorf("platform: got %s/%s, want linux/%s", config.OS, config.Architecture, arch)
			}
			// The config equals the Dockerfile's.
			entrypoint, _ := json.Marshal(config.Config.Entrypoint)
			for _, line := range []string{"USER " + config.Config.User, "ENTRYPOINT " + string(entrypoint),
				"ENV " + strings.Join(config.Config.Env, " ")} {
				if !strings.Contains(string(dockerfile), "\n"+line+"\n") {
					t.Errorf("the Dockerfile lacks the line %q", line)
				}
			}
			layer := unpack(t, files[manifest[0].Layers[0]].data)
			if data := layer["var/lib/posthorn/"]; data.Header == nil || data.Uid != 65532 {
				t.Errorf("owner of /var/lib/posthorn: got %+v, want the user 65532", data.Header)
			}
			for _, name := range []string{"LICENSE", "THIRD_PARTY_LICENSES.md"} {
				want, err := os.ReadFile(filepath.Join(root, name))
				if err != nil {
					t.Fatal(err)
				}
				if got := layer["licenses/"+name].data; !bytes.Equal(got, want) {
					t.Errorf("/licenses/%s in the image has %d bytes, want the %d of the repository's file", name, len(got), len(want))
				}
			}
			if !strings.Contains(string(dockerfile), "\nCOPY LICENSE THIRD_PARTY_LICENSES.md /licenses/\n") {
				t.Error("the Dockerfile does not copy the licenses into the image")
			}
			binary := layer["posthorn"]
			if binary.Header == nil || binary.Mode != 0o755 {
				t.Fatalf("/posthorn: got %+v among %d files, want a file with mode 755", binary.Header, len(layer))
			}
			program, err := elf.NewFile(bytes.NewReader(binary.data))
			if err != nil {
				t.Fatalf("read the program: got error %v, want an ELF file", err)
			}
			if program.Machine != machine {
				t.Fatalf("machine of the program: got %v, want %v", program.Machine, machine)
			}
			if libraries, err := program.ImportedLibraries(); err != nil || len(libraries) > 0 {
				t.Errorf("shared libraries of the program: got %v and error %v, want none", libraries, err)
			}
			if arch != runtime.GOARCH {
				return
			}
			path := filepath.Join(bin, "posthorn")
			if err := os.WriteFile(path, binary.data, 0o755); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command(path, "--version").CombinedOutput(); err != nil || !strings.Contains(string(out), "v9") {
				t.Errorf("posthorn --version: got %s and error %v, want v9", out, err)
			}
		})
	}
}

func TestOnlyLinuxBinaries(t *testing.T) {
	need.Program(t, "python3")
	root, err := env.Root()
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(root, "hack", "cluster", "make-image")
	out, err := exec.Command(script, "posthorn:v9", script, filepath.Join(t.TempDir(), "image.tar")).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "not a Linux binary") {
		t.Errorf("make-image with a script: got error %v and %s, want \"not a Linux binary\"", err, out)
	}
}
