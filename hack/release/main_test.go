package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The committed SECURITY.md names no key that signs nothing, and a release needs the key that it names.
func TestReleaseNeedsTheKeyOfSecurityMD(t *testing.T) {
	t.Setenv(passwordEnv, "throw-away")
	dir := t.TempDir()
	key, other := filepath.Join(dir, "a.key"), filepath.Join(dir, "b.key")
	line := printed(t, func() error { return keygen(key) })
	otherLine := printed(t, func() error { return keygen(other) })
	committed, err := os.ReadFile("../../SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	placeholder := string(fingerprintLine.Find(committed))
	if placeholder == "" {
		t.Fatal("SECURITY.md has no line with the fingerprint")
	}
	for _, c := range []struct{ name, key, security, want string }{
		{"no key", "", line, "set KEY to the private key; make one with"},
		{"no such key", filepath.Join(dir, "none"), line, "read the key"},
		{"no line", key, "# Security\n", "SECURITY.md has no line"},
		{"a placeholder", key, placeholder, "SECURITY.md names another release key"},
		{"another key", key, otherLine, "SECURITY.md names another release key"},
		{"a part of the fingerprint", key, line[:len(line)-5], "SECURITY.md names another release key"},
		{"the key", key, line, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := t.TempDir()
			if err := os.WriteFile(filepath.Join(root, "SECURITY.md"), []byte("# Security\n\n"+c.security+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			switch err := checkKey(root, c.key, "1.0.0"); {
			case (err == nil) != (c.want == ""), err != nil && !strings.Contains(err.Error(), c.want):
				t.Errorf("got error %v, want %q", err, c.want)
			}
		})
	}
	t.Setenv(passwordEnv, "wrong")
	if err := checkKey("../..", key, "1.0.0"); err == nil || !strings.Contains(err.Error(), passwordEnv) {
		t.Errorf("a wrong password: got error %v, want one that names %s", err, passwordEnv)
	}
}

// make writes nothing without a key.
func TestMakeWithoutAKey(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	r := release{root: "../..", out: out, version: "1.0.0"}
	if err := r.make(""); err == nil || !strings.Contains(err.Error(), "set KEY") {
		t.Errorf("got error %v, want one about KEY", err)
	}
	if _, err := os.Stat(out); !os.IsNotExist(err) {
		t.Errorf("folder of the release: got %v, want none", err)
	}
}

// Users verify the files with the public key that is beside them.
func TestSignature(t *testing.T) {
	t.Setenv(passwordEnv, "throw-away")
	dir, key := t.TempDir(), filepath.Join(t.TempDir(), "a.key")
	printed(t, func() error { return keygen(key) })
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("posthorn.tar.gz", "program")
	r := release{out: dir}
	if err := r.sums(); err != nil {
		t.Fatal(err)
	}
	if err := sign(dir, key); err != nil {
		t.Fatal(err)
	}
	public := filepath.Join(dir, publicName)
	if got := printed(t, func() error { return verify(dir, public) }); got != "signature and 1 checksums ok" {
		t.Errorf("verify: got %q", got)
	}
	write("posthorn.tar.gz", "another program")
	if err := verify(dir, public); err == nil {
		t.Error("a changed file: got no error")
	}
	if err := r.sums(); err != nil {
		t.Fatal(err)
	}
	if err := verify(dir, public); err == nil {
		t.Error("changed checksums: got no error")
	}
}

// printed returns what a function prints, without the line break.
func printed(t *testing.T, f func() error) string {
	t.Helper()
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	before := os.Stdout
	os.Stdout = out
	err = f()
	os.Stdout = before
	_ = out.Close()
	var text bytes.Buffer
	if _, readErr := text.ReadFrom(in); err != nil || readErr != nil {
		t.Fatal(err, readErr)
	}
	return strings.TrimSpace(text.String())
}
