package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"
	"github.com/spdx/tools-golang/spdxlib"
)

// caFile has the certificate authorities of the image, from the machine that makes the release.
const caFile = "/etc/ssl/certs/ca-certificates.crt"

// file is an entry of an archive. A name that ends in / is a folder.
type file struct {
	name    string
	mode    int64
	content []byte
}

// writeTar writes files with the time of the release. owners has the owners of entries that are
// not root's.
func (r *release) writeTar(w io.Writer, files []file, owners map[string]int) error {
	out := tar.NewWriter(w)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.content)), ModTime: r.time, Format: tar.FormatPAX, Typeflag: tar.TypeReg,
			Uid: owners[f.name], Gid: owners[f.name]}
		if strings.HasSuffix(f.name, "/") {
			h.Typeflag = tar.TypeDir
		}
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		if _, err := out.Write(f.content); err != nil {
			return err
		}
	}
	return out.Close()
}

func (r *release) archive(name string, files []file) error {
	f, err := os.Create(filepath.Join(r.out, name))
	if err != nil {
		return err
	}
	zip, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	if err != nil {
		return err
	}
	return errors.Join(r.writeTar(zip, files, nil), zip.Close(), f.Close())
}

// repository is the name of the image.
const repository = "ghcr.io/posthorn/posthorn"

// image writes an OCI archive with an image for each architecture. As in the Dockerfile the user is
// 65532, who owns /var/lib/posthorn.
func (r *release) image(work string) error {
	var index v1.ImageIndex = mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, platform := range r.platforms {
		arch, isLinux := strings.CutPrefix(platform, "linux/")
		if !isLinux {
			continue
		}
		img, err := r.imageFor(work, arch)
		if err != nil {
			return err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	dir := filepath.Join(work, "oci")
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := path.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": r.version, "io.containerd.image.name": repository + ":" + r.version})); err != nil {
		return err
	}
	files, err := filesIn(dir, "")
	if err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(r.out, "posthorn_"+r.version+"_image.oci.tar"))
	if err != nil {
		return err
	}
	return errors.Join(r.writeTar(f, files, nil), f.Close())
}

func (r *release) imageFor(work, arch string) (v1.Image, error) {
	files := []file{
		{"tmp/", 0o1777, nil},
		{"var/", 0o755, nil},
		{"var/lib/", 0o755, nil},
		{"var/lib/posthorn/", 0o755, nil},
		{"etc/", 0o755, nil},
		{"etc/passwd", 0o644, []byte("root:x:0:0:root:/:/none\nnonroot:x:65532:65532:nonroot:/:/none\n")},
		{"etc/ssl/", 0o755, nil},
		{"etc/ssl/certs/", 0o755, nil},
		{"licenses/", 0o755, nil},
	}
	for _, f := range []struct {
		name, from string
		mode       int64
	}{
		{strings.TrimPrefix(caFile, "/"), caFile, 0o644},
		{"licenses/LICENSE", filepath.Join(r.root, "LICENSE"), 0o644},
		{"licenses/THIRD_PARTY_LICENSES.md", filepath.Join(r.root, "THIRD_PARTY_LICENSES.md"), 0o644},
		{"posthorn", filepath.Join(work, "linux-"+arch, "posthorn"), 0o755},
	} {
		content, err := os.ReadFile(f.from)
		if err != nil {
			return nil, err
		}
		files = append(files, file{f.name, f.mode, content})
	}
	var blob bytes.Buffer
	if err := r.writeTar(&blob, files, map[string]int{"var/lib/posthorn/": 65532}); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(blob.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if img, err = mutate.Append(img, mutate.Addendum{Layer: layer,
		History: v1.History{Created: v1.Time{Time: r.time}, CreatedBy: "hack/release"}}); err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = "linux", arch, v1.Time{Time: r.time}
	config.Config = v1.Config{
		Entrypoint: []string{"/posthorn"}, User: "65532:65532", Env: []string{"PATH=/"},
		Labels: map[string]string{"org.opencontainers.image.version": r.version, "org.opencontainers.image.licenses": "Apache-2.0"},
	}
	return mutate.ConfigFile(img, config)
}

// filesIn returns the files below a folder, sorted, with a prefix.
func filesIn(dir, prefix string) (files []file, err error) {
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		content, err := os.ReadFile(path)
		files = append(files, file{prefix + filepath.ToSlash(name), 0o644, content})
		return err
	})
	return files, err
}

// below returns a file of the repository, or the files below a folder.
func (r *release) below(name string) ([]file, error) {
	if info, err := os.Stat(filepath.Join(r.root, name)); err != nil || !info.IsDir() {
		return r.files("", name)
	}
	return filesIn(filepath.Join(r.root, name), name+"/")
}

// files reads files of the repository, with a prefix of their names.
func (r *release) files(prefix string, names ...string) (files []file, err error) {
	for _, name := range names {
		content, err := os.ReadFile(filepath.Join(r.root, name))
		if err != nil {
			return nil, err
		}
		files = append(files, file{prefix + name, 0o644, content})
	}
	return files, nil
}

var chartVersion = regexp.MustCompile(`(?m)^(version|appVersion): (.*)$`)

// chart packages the chart, as helm package --version VERSION --app-version VERSION does.
func (r *release) chart() error {
	files, err := filesIn(filepath.Join(r.root, "charts", "posthorn"), "posthorn/")
	if err != nil {
		return err
	}
	for i := range files {
		files[i].content = r.stamp(files[i].content)
		if files[i].name == "posthorn/Chart.yaml" {
			files[i].content = chartVersion.ReplaceAll(files[i].content, []byte("$1: "+r.version))
		}
	}
	license, err := r.files("posthorn/", "LICENSE")
	if err != nil {
		return err
	}
	return r.archive("posthorn-chart-"+r.version+".tgz", append(files, license...))
}

// sbom writes the modules of the program, with their licenses, as SPDX 2.3.
func (r *release) sbom() error {
	licenses, err := r.moduleLicenses()
	if err != nil {
		return err
	}
	doc := &spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT",
		DocumentName: "posthorn-" + r.version, DocumentNamespace: "https://github.com/posthorn/posthorn/releases/" + r.version + "/sbom",
		CreationInfo: &spdx.CreationInfo{Created: r.time.Format("2006-01-02T15:04:05Z"),
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "posthorn-hack-release"}}},
	}
	add := func(path, version, license string) {
		id := common.ElementID("Package-" + regexp.MustCompile(`[^A-Za-z0-9.-]`).ReplaceAllString(path, "-"))
		p := &v2_3.Package{
			PackageName: path, PackageSPDXIdentifier: id, PackageVersion: version, PackageDownloadLocation: "NOASSERTION",
			PackageLicenseConcluded: license, PackageLicenseDeclared: license, PackageCopyrightText: "NOASSERTION",
			PackageExternalReferences: []*v2_3.PackageExternalReference{{Category: common.CategoryPackageManager,
				RefType: common.TypePackageManagerPURL, Locator: "pkg:golang/" + path + "@" + version}},
		}
		relation := &v2_3.Relationship{RefA: common.MakeDocElementID("", "Package-github.com-posthorn-posthorn"),
			RefB: common.MakeDocElementID("", string(id)), Relationship: common.TypeRelationshipContains}
		if len(doc.Packages) == 0 {
			relation.RefA, relation.Relationship = common.MakeDocElementID("", "DOCUMENT"), common.TypeRelationshipDescribe
		}
		doc.Packages, doc.Relationships = append(doc.Packages, p), append(doc.Relationships, relation)
	}
	add("github.com/posthorn/posthorn", r.version, "Apache-2.0")
	// The build of the archive for linux/amd64 has the modules that are linked.
	info, err := r.builtModules()
	if err != nil {
		return err
	}
	add("stdlib", strings.TrimPrefix(info.GoVersion, "go"), "BSD-3-Clause")
	for _, m := range info.Deps {
		license := licenses[m.Path]
		if license == "" && strings.HasPrefix(m.Path, "github.com/posthorn/") {
			license = "Apache-2.0"
		}
		if license == "" {
			return fmt.Errorf("THIRD_PARTY_LICENSES.md has no license of %s; run make generate", m.Path)
		}
		add(m.Path, m.Version, license)
	}
	if err := spdxlib.ValidateDocument(doc); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(r.out, "posthorn_"+r.version+".spdx.json"))
	if err != nil {
		return err
	}
	return errors.Join(spdxjson.Write(doc, f, spdxjson.Indent("  ")), f.Close())
}

// builtModules reads the modules of the program from its archive.
func (r *release) builtModules() (*buildinfo.BuildInfo, error) {
	f, err := os.Open(filepath.Join(r.out, "posthorn_"+r.version+"_linux_amd64.tar.gz"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	zip, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	in := tar.NewReader(zip)
	if _, err := in.Next(); err != nil {
		return nil, err
	}
	binary, err := io.ReadAll(in)
	if err != nil {
		return nil, err
	}
	return buildinfo.Read(bytes.NewReader(binary))
}

var licenceRow = regexp.MustCompile(`(?m)^\| (\S+) \| \S+ \| ([^|]+) \|$`)

// moduleLicenses reads the table of THIRD_PARTY_LICENSES.md.
func (r *release) moduleLicenses() (map[string]string, error) {
	text, err := os.ReadFile(filepath.Join(r.root, "THIRD_PARTY_LICENSES.md"))
	if err != nil {
		return nil, err
	}
	licenses := map[string]string{}
	for _, row := range licenceRow.FindAllStringSubmatch(string(text), -1) {
		licenses[row[1]] = strings.ReplaceAll(row[2], ", ", " AND ")
	}
	return licenses, nil
}
