// Command release makes the files of a release in an empty folder: archives of the binaries, an
// image for several architectures, the chart, the CRDs, manifests, the pages, an SBOM, the licenses, and
// their checksums. Two runs on one commit give equal files. It signs the checksums with the key whose
// fingerprint is in SECURITY.md; the signature is the one of `cosign sign-blob`. `make release` runs it:
//
//	cd hack/release && GOWORK=off go run . make -root ../.. -out DIR -version 1.0.0 -key KEY -platforms "linux/amd64 linux/arm64" -plugin-platforms linux/amd64
//	cd hack/release && GOWORK=off go run . keygen -key KEY
//	cd hack/release && GOWORK=off go run . verify -out DIR -key KEY.pub
package main

import (
	"bytes"
	"crypto"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
)

const (
	sumsName      = "SHA256SUMS"
	signatureName = sumsName + ".sig"
	publicName    = "cosign.pub"
	// passwordEnv has the password of the private key, as for cosign.
	passwordEnv = "COSIGN_PASSWORD"
)

var licenseFiles = []string{"LICENSE", "THIRD_PARTY_LICENSES.md"}

// release has the settings of a run.
type release struct {
	root, out, version string
	// platforms of the program, of which the image has those of Linux, and of the kubectl plugin.
	platforms, pluginPlatforms []string
	// time is the time of the commit; all files have it.
	time time.Time
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("release: ")
	if len(os.Args) < 2 {
		log.Fatal("usage: release make|keygen|verify [flags]")
	}
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	r := release{}
	var key, platforms, pluginPlatforms string
	flags.StringVar(&platforms, "platforms", "linux/amd64", "platforms of the program and, of Linux, of the image: OS/ARCH, separated by spaces")
	flags.StringVar(&pluginPlatforms, "plugin-platforms", "linux/amd64", "platforms of the kubectl plugin")
	flags.StringVar(&r.root, "root", "../..", "folder of the repository")
	flags.StringVar(&r.out, "out", "", "folder of the release")
	flags.StringVar(&r.version, "version", "", "version without a v, for example 1.0.0")
	flags.StringVar(&key, "key", "", "PEM file of a key; its password is in "+passwordEnv)
	_ = flags.Parse(os.Args[2:])
	r.platforms, r.pluginPlatforms = strings.Fields(platforms), strings.Fields(pluginPlatforms)
	var err error
	switch os.Args[1] {
	case "make":
		err = r.make(key)
	case "keygen":
		err = keygen(key)
	case "verify":
		err = verify(r.out, key)
	default:
		err = fmt.Errorf("unknown command %q", os.Args[1])
	}
	if err != nil {
		log.Fatal(err)
	}
}

func (r *release) make(key string) error {
	if r.version == "" || r.out == "" {
		return errors.New("set -version and -out")
	}
	// Before the builds, which take minutes.
	if err := checkKey(r.root, key, r.version); err != nil {
		return err
	}
	if err := r.checkVersion(); err != nil {
		return err
	}
	var err error
	for _, path := range []*string{&r.root, &r.out} {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	if files, err := os.ReadDir(r.out); err == nil && len(files) > 0 {
		return fmt.Errorf("%s is not empty", r.out)
	}
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	if r.time, err = commitTime(r.root); err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	for _, platform := range r.platforms {
		if err := r.program(work, "posthorn", platform); err != nil {
			return err
		}
	}
	for _, platform := range r.pluginPlatforms {
		if err := r.program(work, "kubectl-posthorn", platform); err != nil {
			return err
		}
	}
	for _, step := range []func() error{func() error { return r.image(work) }, r.chart, r.crds, r.manifests, r.pages, r.sbom, r.licenses, r.sums} {
		if err := step(); err != nil {
			return err
		}
	}
	return sign(r.out, key)
}

// fingerprintLine is the line of SECURITY.md with the fingerprint of the key that signs releases.
var fingerprintLine = regexp.MustCompile(`(?m)^SHA-256 fingerprint of the release key: (.*)$`)

// checkVersion fails unless the version is the tree's, or a pre-release or the release of it.
func (r *release) checkVersion() error {
	chart, err := os.ReadFile(filepath.Join(r.root, "charts", "posthorn", "Chart.yaml"))
	if err != nil {
		return err
	}
	tree, _, _ := strings.Cut(string(chartVersion.FindSubmatch(chart)[2]), "-")
	if number, _, _ := strings.Cut(r.version, "-"); number != tree {
		return fmt.Errorf("the version of the tree is %s, so it is not release %s: set the version in charts/posthorn/Chart.yaml, and run make generate", tree, r.version)
	}
	return nil
}

// checkKey fails unless a key signs the release whose fingerprint is in SECURITY.md, where users look for it.
// Any key signs a pre-release, which has a - in its version.
func checkKey(root, key, version string) error {
	if key == "" {
		return errors.New("a release is signed: set KEY to the private key; make one with: cd hack/release && COSIGN_PASSWORD=… go run . keygen -key cosign.key")
	}
	signer, err := signature.LoadSignerVerifierFromPEMFile(key, crypto.SHA256, password)
	if err != nil {
		return fmt.Errorf("read the key: %w; its password is in %s", err, passwordEnv)
	}
	if strings.Contains(version, "-") {
		return nil
	}
	public, err := signer.PublicKey()
	if err != nil {
		return err
	}
	want, err := fingerprint(public)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(root, "SECURITY.md"))
	if err != nil {
		return err
	}
	switch m := fingerprintLine.FindSubmatch(text); {
	case m == nil:
		return fmt.Errorf("SECURITY.md has no line %q", "SHA-256 fingerprint of the release key: "+want)
	case string(m[1]) != want:
		return fmt.Errorf("SECURITY.md names another release key, %q; the fingerprint of %s is %s", m[1], key, want)
	}
	return nil
}

// fingerprint is the SHA-256 of a public key in DER, as `openssl pkey -pubin -outform DER | sha256sum` prints it.
func fingerprint(public crypto.PublicKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(public)
	return fmt.Sprintf("%x", sha256.Sum256(der)), err
}

// commitTime is SOURCE_DATE_EPOCH, or the time of the last commit.
func commitTime(root string) (time.Time, error) {
	text := os.Getenv("SOURCE_DATE_EPOCH")
	if text == "" {
		out, err := exec.Command("git", "-C", root, "log", "-1", "--format=%ct").Output()
		if err != nil {
			return time.Time{}, fmt.Errorf("time of the commit: %w; set SOURCE_DATE_EPOCH", err)
		}
		text = strings.TrimSpace(string(out))
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	return time.Unix(seconds, 0).UTC(), err
}

// program builds a program for a platform into the work folder, and archives it with the licenses.
func (r *release) program(work, name, platform string) error {
	system, arch, _ := strings.Cut(platform, "/")
	binary := name
	if system == "windows" {
		binary += ".exe"
	}
	path := filepath.Join(work, system+"-"+arch, binary)
	build := exec.Command("go", "build", "-C", r.root, "-trimpath", "-buildvcs=false", "-ldflags",
		"-s -w -buildid= -X main.version="+r.version, "-o", path, "./cmd/"+name)
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK="+filepath.Join(r.root, "go.work"), "GOOS="+system, "GOARCH="+arch)
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return fmt.Errorf("build %s for %s: %w", name, platform, err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	licenses, err := r.files("", licenseFiles...)
	if err != nil {
		return err
	}
	return r.archive(fmt.Sprintf("%s_%s_%s_%s.tar.gz", name, r.version, system, arch), append([]file{{binary, 0o755, content}}, licenses...))
}

// licenses copies the licenses.
func (r *release) licenses() error {
	for _, name := range licenseFiles {
		content, err := os.ReadFile(filepath.Join(r.root, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(r.out, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// sums writes the checksums of all files.
func (r *release) sums() error {
	text, err := checksums(r.out)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, sumsName), text, 0o644)
}

func checksums(dir string) ([]byte, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), sumsName) || entry.Name() == publicName {
			continue
		}
		f, err := os.Open(filepath.Join(dir, entry.Name()))
		if err != nil {
			return nil, err
		}
		sum := sha256.New()
		_, err = io.Copy(sum, f)
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
		fmt.Fprintf(&text, "%x  %s\n", sum.Sum(nil), entry.Name())
	}
	return text.Bytes(), nil
}

func password(bool) ([]byte, error) { return []byte(os.Getenv(passwordEnv)), nil }

// keygen writes a key pair: KEY, encrypted by the password, and KEY.pub. It prints the line for SECURITY.md.
func keygen(key string) error {
	if key == "" {
		return errors.New("set -key")
	}
	private, public, err := cryptoutils.GeneratePEMEncodedECDSAKeyPair(elliptic.P256(), password)
	if err != nil {
		return err
	}
	parsed, err := cryptoutils.UnmarshalPEMToPublicKey(public)
	if err != nil {
		return err
	}
	sum, err := fingerprint(parsed)
	if err != nil {
		return err
	}
	fmt.Printf("SHA-256 fingerprint of the release key: %s\n", sum)
	return errors.Join(os.WriteFile(key, private, 0o600), os.WriteFile(key+".pub", public, 0o644))
}

// sign writes the signature of the checksums, in the format of cosign sign-blob, and the public key.
func sign(dir, key string) error {
	signer, err := signature.LoadSignerVerifierFromPEMFile(key, crypto.SHA256, password)
	if err != nil {
		return fmt.Errorf("read the key: %w", err)
	}
	sums, err := os.ReadFile(filepath.Join(dir, sumsName))
	if err != nil {
		return err
	}
	signed, err := signer.SignMessage(bytes.NewReader(sums))
	if err != nil {
		return err
	}
	public, err := signer.PublicKey()
	if err != nil {
		return err
	}
	text, err := cryptoutils.MarshalPublicKeyToPEM(public)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, publicName), text, 0o644),
		os.WriteFile(filepath.Join(dir, signatureName), []byte(base64.StdEncoding.EncodeToString(signed)+"\n"), 0o644),
	)
}

// verify checks the signature of the checksums, and the checksums of all files.
func verify(dir, key string) error {
	verifier, err := signature.LoadVerifierFromPEMFile(key, crypto.SHA256)
	if err != nil {
		return fmt.Errorf("read the key: %w", err)
	}
	want, err := os.ReadFile(filepath.Join(dir, sumsName))
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(dir, signatureName))
	if err != nil {
		return err
	}
	signed, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(text)))
	if err != nil {
		return err
	}
	if err := verifier.VerifySignature(bytes.NewReader(signed), bytes.NewReader(want)); err != nil {
		return fmt.Errorf("signature of %s: %w", sumsName, err)
	}
	got, err := checksums(dir)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("the files differ from %s; run sha256sum --check %s", sumsName, sumsName)
	}
	fmt.Printf("signature and %d checksums ok\n", bytes.Count(want, []byte("\n")))
	return nil
}
