package main

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// crds writes the CRDs of each channel to one file.
func (r *release) crds() error {
	for _, channel := range []string{"standard", "experimental"} {
		crds, err := filesIn(filepath.Join(r.root, "config", "crd", channel), "")
		if err != nil {
			return err
		}
		var text bytes.Buffer
		for _, crd := range crds {
			if filepath.Ext(crd.name) == ".yaml" {
				text.Write(r.stamp(crd.content))
			}
		}
		if err := os.WriteFile(filepath.Join(r.out, "posthorn_"+r.version+"_crds-"+channel+".yaml"), text.Bytes(), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// manifests writes what `kubectl kustomize config/default` prints.
func (r *release) manifests() error {
	objects, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join(r.root, "config", "default"))
	if err != nil {
		return err
	}
	text, err := objects.AsYaml()
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, "posthorn_"+r.version+"_install.yaml"), r.stamp(text), 0o644)
}

// versions are the places of the version in manifests and pages: the tag of the image, and an annotation of CRDs.
var versions = regexp.MustCompile(`(` + regexp.QuoteMeta(repository) + `:|posthorn\.dev/bundle-version: )[\w.-]+`)

// stamp replaces the version in a manifest or a page.
func (r *release) stamp(text []byte) []byte {
	return versions.ReplaceAll(text, []byte("${1}"+r.version))
}

// besidePages are further files of the archive: commands of the pages read them, and links open them.
var besidePages = []string{"README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "THIRD_PARTY_LICENSES.md", "config/argocd", "config/samples",
	"dispatcher/intake/ingest/openapi.yaml", "hack/demo/manifests"}

// outside are links of a page to the repository.
var outside = regexp.MustCompile(`\]\(([^():#]+)(#[^()]*)?\)`)

// toRepository replaces the links to files that neither the archive nor the chart has by links to the
// repository at the tag of the version.
func (r *release) toRepository(page file, inside map[string]bool) []byte {
	return outside.ReplaceAllFunc(page.content, func(link []byte) []byte {
		m := outside.FindSubmatch(link)
		target := path.Join(path.Dir(page.name), string(m[1]))
		if inside[target] || strings.HasPrefix(target, "charts/") {
			return link
		}
		return fmt.Appendf(nil, "](https://github.com/posthorn/posthorn/tree/v%s/%s%s)", r.version, target, m[2])
	})
}

// pages writes the instructions for these files, and an archive of the pages.
func (r *release) pages() error {
	install, err := os.ReadFile(filepath.Join(r.root, "hack", "release", "INSTALL.md"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(r.out, "INSTALL.md"), bytes.ReplaceAll(install, []byte("VERSION"), []byte(r.version)), 0o644); err != nil {
		return err
	}
	pages, inside := []file{}, map[string]bool{}
	for _, name := range append(besidePages, "docs") {
		found, err := r.below(name)
		if err != nil {
			return err
		}
		pages = append(pages, found...)
	}
	for _, page := range pages {
		for name := page.name; name != "."; name = path.Dir(name) {
			inside[name] = true
		}
	}
	for i, page := range pages {
		if path.Ext(page.name) == ".md" {
			pages[i].content = r.toRepository(page, inside)
		}
		pages[i].content = r.stamp(pages[i].content)
	}
	return r.archive("posthorn_"+r.version+"_docs.tar.gz", pages)
}
