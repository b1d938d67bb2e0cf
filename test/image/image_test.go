// Package image builds Posthorn's image from scratch, as `make image` does, for
// each architecture that the Dockerfile is for, and looks at what is in it.
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
				cmd = exec.Command(filepath.Join(root, "hack", "cluster", "make-image"), "registry.internal/posthorn:v9", program, filepath.Join(bin, "posthorn-linux-"+arch+".tar"))
			}
			cmd.Dir = root
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
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
				t.Fatalf("%v: %s", err, files["manifest.json"].data)
			}
			if want := []string{"registry.internal/posthorn:v9"}; !slices.Equal(manifest[0].RepoTags, want) {
				t.Errorf("tags %v, want %v", manifest[0].RepoTags, want)
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
				t.Errorf("an image for %s/%s, want linux/%s", config.OS, config.Architecture, arch)
			}
			// It runs as what the Dockerfile makes.
			entrypoint, _ := json.Marshal(config.Config.Entrypoint)
			for _, line := range []string{"USER " + config.Config.User, "ENTRYPOINT " + string(entrypoint), "ENV " + strings.Join(config.Config.Env, " ")} {
				if !strings.Contains(string(dockerfile), "\n"+line+"\n") {
					t.Errorf("the Dockerfile does not say %q", line)
				}
			}
			layer := unpack(t, files[manifest[0].Layers[0]].data)
			if data := layer["var/lib/posthorn/"]; data.Header == nil || data.Uid != 65532 {
				t.Error("/var/lib/posthorn is not the user's")
			}
			binary := layer["posthorn"]
			if binary.Header == nil || binary.Mode != 0o755 {
				t.Fatalf("no program /posthorn among %d files", len(layer))
			}
			program, err := elf.NewFile(bytes.NewReader(binary.data))
			if err != nil || program.Machine != machine {
				t.Fatalf("the program is for another machine than %v (%v)", machine, err)
			}
			if libraries, err := program.ImportedLibraries(); err != nil || len(libraries) > 0 {
				t.Errorf("the program needs %v (%v), which the image does not have", libraries, err)
			}
			if arch != runtime.GOARCH {
				return
			}
			path := filepath.Join(bin, "posthorn")
			if err := os.WriteFile(path, binary.data, 0o755); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command(path, "--version").CombinedOutput(); err != nil || !strings.Contains(string(out), "v9") {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

func TestOnlyLinuxBinaries(t *testing.T) {
	root, err := env.Root()
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(root, "hack", "cluster", "make-image")
	out, err := exec.Command(script, "posthorn:v9", script, filepath.Join(t.TempDir(), "image.tar")).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "no Linux binary") {
		t.Errorf("%v: %s", err, out)
	}
}
