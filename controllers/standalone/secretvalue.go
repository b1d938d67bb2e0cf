package standalone

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/posthorn/posthorn/controllers/manifest"
)

// SecretValue is the value of a key of a Secret that a file or an environment variable has, in place
// of a manifest. It cannot print itself.
type SecretValue struct {
	namespace, name, key string
	// file has the value, and is read again when it changes; empty for an environment variable.
	file string
	// value is the last one that was read.
	value []byte
}

// secretValuesFile is the name of the manifest that the SecretValues replace.
const secretValuesFile = "--secret"

// String is "NAMESPACE/NAME/KEY".
func (v SecretValue) String() string { return v.namespace + "/" + v.name + "/" + v.key }

// GoString is String, so that no format prints the value.
func (v SecretValue) GoString() string { return v.String() }

// ReadSecretValues reads the values of the flag --secret, NAMESPACE/NAME/KEY=file:PATH or
// NAMESPACE/NAME/KEY=env:NAME each. Its errors contain no values, not even malformed ones.
func ReadSecretValues(flags []string) (values []SecretValue, err error) {
	seen := map[string]bool{}
	for _, flag := range flags {
		target, source, _ := strings.Cut(flag, "=")
		parts := strings.Split(target, "/")
		kind, from, _ := strings.Cut(source, ":")
		if len(parts) != 3 || from == "" || kind != "file" && kind != "env" {
			return nil, errors.New("use NAMESPACE/NAME/KEY=file:PATH or NAMESPACE/NAME/KEY=env:NAME")
		}
		v := SecretValue{namespace: parts[0], name: parts[1], key: parts[2]}
		if kind == "file" {
			v.file = from
			v.value, err = readSecretFile(from)
		} else if v.value = []byte(os.Getenv(from)); len(v.value) == 0 {
			err = fmt.Errorf("the environment variable %s is not set, or empty", from)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", v, err)
		}
		if seen[v.String()] {
			return nil, fmt.Errorf("%s is set twice", v)
		}
		seen[v.String()] = true
		values = append(values, v)
	}
	if problems := parseSecretValues(values).problems; len(problems) > 0 {
		return nil, errors.New(problems[0].Object + ": " + problems[0].Message)
	}
	return values, nil
}

// readSecretFile reads a value without the line breaks at its end, which many editors add.
func readSecretFile(path string) ([]byte, error) {
	// A pipe would wait for its writer, and has the value only once.
	if info, err := os.Stat(path); err == nil && info.Mode()&os.ModeNamedPipe != 0 {
		return nil, fmt.Errorf("%s is a pipe, which cannot be read again; write the value to a file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, corev1.MaxSecretSize+1))
	if err != nil {
		return nil, err
	}
	if len(text) > corev1.MaxSecretSize {
		return nil, fmt.Errorf("%s has more than %d bytes", path, corev1.MaxSecretSize)
	}
	if text = []byte(strings.TrimRight(string(text), "\r\n")); len(text) == 0 {
		return nil, fmt.Errorf("%s is empty", path)
	}
	return text, nil
}

// parseSecretValues returns the Secrets with values, as if a manifest had them.
func parseSecretValues(values []SecretValue) parsed {
	type secret struct {
		APIVersion string            `json:"apiVersion"`
		Kind       string            `json:"kind"`
		Metadata   map[string]string `json:"metadata"`
		Data       map[string][]byte `json:"data"`
	}
	var secrets []*secret
	byName := map[string]*secret{}
	for _, v := range values {
		name := v.namespace + "/" + v.name
		if byName[name] == nil {
			byName[name] = &secret{"v1", kindSecret, map[string]string{"namespace": v.namespace, "name": v.name}, map[string][]byte{}}
			secrets = append(secrets, byName[name])
		}
		byName[name].Data[v.key] = v.value
	}
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": secrets})
	if err != nil {
		panic(fmt.Sprintf("standalone: %v", err)) // Impossible: the type has an encoding.
	}
	p := parse(secretValuesFile+".json", text)
	for i := range p.problems {
		p.problems[i].File, p.problems[i].Line = secretValuesFile, 0
	}
	for _, o := range p.objects {
		o.line = 0
	}
	return p
}

// marksOfSecretValues identifies the versions of the files.
func marksOfSecretValues(values []SecretValue) (marks []mark) {
	for _, v := range values {
		if v.file == "" {
			continue
		}
		m := markOf(v.file)
		m.secret = true
		marks = append(marks, m)
	}
	return marks
}

// readSecretValues reads the files again, and returns their Secrets. A value that cannot be read
// keeps its last version.
func (s *store) readSecretValues() *file {
	var problems []manifest.Problem
	unread := false
	for i := range s.secretValues {
		v := &s.secretValues[i]
		if v.file == "" {
			continue
		}
		value, err := readSecretFile(v.file)
		if err != nil {
			if pathErr, ok := errors.AsType[*os.PathError](err); ok {
				err = pathErr.Err // The problem has the path.
			}
			unread = true
			problems = append(problems, manifest.Problem{File: v.file, Object: id{kindSecret, v.namespace, v.name}.String(),
				Message: fmt.Sprintf("--secret %s: %v", v, err)})
			continue
		}
		v.value = value
	}
	f := &file{path: secretValuesFile, unread: unread, parsed: parseSecretValues(s.secretValues)}
	f.problems = append(f.problems, problems...)
	return f
}

// restoreSecretValues adds the Secrets of the values to restored objects, which do not include them.
func (s *store) restoreSecretValues(now time.Time) {
	for _, o := range parseSecretValues(s.secretValues).objects {
		s.objects[o.id] = &stored{object: o, file: secretValuesFile,
			version: version{Generation: 1, Created: seconds(now), Changed: seconds(now)}}
	}
}
