package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"

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

// pages writes the instructions for these files, and an archive of the pages.
func (r *release) pages() error {
	install, err := os.ReadFile(filepath.Join(r.root, "hack", "release", "INSTALL.md"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(r.out, "INSTALL.md"), bytes.ReplaceAll(install, []byte("VERSION"), []byte(r.version)), 0o644); err != nil {
		return err
	}
	pages, err := filesIn(filepath.Join(r.root, "docs"), "docs/")
	if err != nil {
		return err
	}
	for i, page := range pages {
		pages[i].content = r.stamp(page.content)
	}
	more, err := r.files("", "README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")
	if err != nil {
		return err
	}
	return r.archive("posthorn_"+r.version+"_docs.tar.gz", append(more, pages...))
}
