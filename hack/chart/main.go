// Command chart derives the standard CRDs from the experimental ones, records both for the version
// (test/crds), writes the comments of the reference samples, and copies generated files of config/
// to the Helm chart: the CRDs, and the RBAC
// rules of operator, dispatcher and users, one object per file. It copies the version of
// Chart.yaml, the only place where a person sets it, to the other files. Run it from the root of
// the repository.
package main

import (
	"bytes"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

const target = "charts/posthorn/files"

// roles maps files of config/ to the roles whose rules they contain.
var roles = map[string]string{
	"operator":   "config/rbac/role.yaml",
	"dispatcher": "config/dispatcher/rbac.yaml",
	"users":      "config/rbac/user_roles.yaml",
	"access":     "config/rbac/access_roles.yaml",
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("chart: ")
	if err := generate(); err != nil {
		log.Fatal(err)
	}
}

func generate() error {
	version, err := setVersion()
	if err != nil {
		return err
	}
	if err := writeChannels(version); err != nil {
		return err
	}
	if err := writeComments(); err != nil {
		return err
	}
	if err := record(os.DirFS("config/crd"), "test/crds/testdata", version); err != nil {
		return err
	}
	return copyAll()
}

func copyAll() error {
	files := map[string][]byte{}
	crds, err := filepath.Glob("config/crd/*/*.yaml")
	if err != nil || len(crds) == 0 {
		return fmt.Errorf("no CRDs in config/crd (%w); run it from the root of the repository", err)
	}
	for _, crd := range crds {
		data, err := os.ReadFile(crd)
		if err != nil {
			return err
		}
		files["crds/"+strings.TrimPrefix(crd, "config/crd/")] = headed(crd, data)
	}
	for subject, from := range roles {
		data, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		for _, text := range documents(data) {
			// Role and ClusterRole have the same fields; other kinds are not copied.
			var role rbacv1.ClusterRole
			if err := yaml.Unmarshal(text, &role); err != nil {
				return fmt.Errorf("%s: %w", from, err)
			}
			if !strings.HasSuffix(role.Kind, "Role") {
				continue
			}
			name := strings.ToLower(role.Kind)
			if subject == "users" || subject == "access" {
				name = strings.TrimPrefix(role.Name, "posthorn-")
			}
			file := fmt.Sprintf("rbac/%s-%s.yaml", subject, name)
			if files[file] != nil {
				return fmt.Errorf("%s: two objects have the file name %s; rename one of them", from, file)
			}
			files[file] = headed(from, text)
		}
	}
	for _, dir := range []string{"crds", "rbac"} {
		if err := os.RemoveAll(filepath.Join(target, dir)); err != nil {
			return err
		}
	}
	for name, data := range files {
		name = filepath.Join(target, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(name, data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// documents returns the YAML documents of a file.
func documents(data []byte) [][]byte {
	var docs [][]byte
	for _, doc := range regexp.MustCompile(`(?m)^---$`).Split(string(data), -1) {
		if strings.TrimSpace(doc) != "" {
			docs = append(docs, []byte(doc))
		}
	}
	return docs
}

func headed(from string, data []byte) []byte {
	return []byte("# Copied from " + from + " by hack/chart; do not edit.\n" + string(bytes.TrimSpace(bytes.TrimPrefix(data,
		[]byte("---\n")))) + "\n")
}
