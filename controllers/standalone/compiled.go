package standalone

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/manifest"
)

// Compiled is the result of Compile.
type Compiled struct {
	Namespaces []CompiledNamespace `json:"namespaces"`
	Problems   []manifest.Problem  `json:"problems,omitempty"`
	Warnings   []manifest.Problem  `json:"warnings,omitempty"`
	// NotAccepted has a problem for each condition Accepted or ResolvedRefs that is False in
	// Namespaces, with the position of the object.
	NotAccepted []manifest.Problem `json:"-"`
	// Objects is the number of valid objects, Secrets included.
	Objects int `json:"-"`
}

// CompiledNamespace is one namespace's part.
type CompiledNamespace struct {
	Namespace string `json:"namespace"`
	// Revision and EncodedBytes describe the live config.
	Revision     string            `json:"revision"`
	EncodedBytes int               `json:"encodedBytes"`
	Config       liveconfig.Config `json:"config"`
	// Verdicts are the conditions Accepted and ResolvedRefs of each object.
	Verdicts compile.Verdicts `json:"verdicts"`
}

// OK reports whether every manifest is valid, and every object is accepted and
// has its references resolved.
func (c Compiled) OK() bool {
	return len(c.Problems)+len(c.NotAccepted) == 0
}

// Compile compiles a folder of manifests, or one file, and the Secrets of values, without running a
// Control. The result prints and marshals without secrets. Compile returns an error only if the folder
// cannot be read or has no manifest.
func Compile(path string, values []SecretValue, policy compile.Policy) (Compiled, error) {
	s, err := loadOnce(path, values)
	if err != nil {
		return Compiled{}, err
	}
	out := Compiled{Namespaces: []CompiledNamespace{}, Problems: s.problems, Warnings: s.warnings, Objects: len(s.objects)}
	snapshots, at := s.snapshots(policy), s.positions()
	var expressions compile.Expressions
	expressions.Set(objectsOf(snapshots))
	for _, namespace := range slices.Sorted(maps.Keys(snapshots)) {
		snapshots[namespace].ExpressionsOver = expressions.Over(namespace)
		config, verdicts := compilers.Compile(snapshots[namespace].Snapshot)
		encoded, err := compilers.Encode(nil, config, verdicts, compile.DefaultLimit, func() (liveconfig.Config, bool, error) {
			return liveconfig.Config{}, false, nil
		})
		if err != nil {
			return Compiled{}, fmt.Errorf("namespace %s: %w", namespace, err)
		}
		out.Namespaces = append(out.Namespaces, CompiledNamespace{Namespace: namespace, Revision: encoded.Revision,
			EncodedBytes: encoded.Chunks.Len(), Config: encoded.Config, Verdicts: encoded.Verdicts})
		problems, warnings := at.judged(namespace, encoded.Verdicts)
		out.NotAccepted, out.Warnings = append(out.NotAccepted, problems...), append(out.Warnings, warnings...)
	}
	return out, nil
}

// loadOnce loads a folder of manifests, or one file, and the Secrets of values.
func loadOnce(path string, values []SecretValue) (*store, error) {
	if _, err := definitions(); err != nil {
		return nil, err
	}
	marks, err := manifests(path)
	if err != nil {
		return nil, err
	}
	if len(marks) == 0 {
		return nil, fmt.Errorf("%s has no manifest (*.yaml, *.yml, *.json)", path)
	}
	s := newStore()
	s.secretValues = slices.Clone(values)
	s.load(marks, time.Now())
	return s, nil
}

// judged returns the conditions of a namespace's verdicts that are False, and warnings about accepted objects.
func (at positions) judged(namespace string, verdicts compile.Verdicts) (problems, warnings []manifest.Problem) {
	for _, o := range at.sortedIf(func(o *stored) bool { return o.resource != nil && o.namespace == namespace }) {
		v, ok := verdicts[o.of.Compile.Section][o.name]
		if !ok {
			continue
		}
		if !v.Accepted {
			problems = append(problems, at.problems(o, v.Message, v.Reason)...)
		}
		if v.Unresolved != nil {
			problems = append(problems, at.problems(o, v.Unresolved.Message, v.Unresolved.Reason)...)
		}
		warnings = append(warnings, at.warnings(o, v)...)
	}
	return problems, warnings
}
