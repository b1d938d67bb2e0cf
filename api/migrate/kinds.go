package migrate

import (
	"errors"
	"slices"

	"go.yaml.in/yaml/v3"
)

// steps describes the rewriting of a kind's spec.
type steps struct {
	// rewrite rewrites a spec and reports whether it had the API of release 0.2.0.
	rewrite func(spec object) (bool, error)
	// required are fields of the current API; a spec has at least one of them.
	required []string
	// job means that the object runs once and that its spec cannot be changed.
	job bool
}

var kinds = map[string]steps{
	"Source":             {rewrite: source, required: []string{"writeKeys"}},
	"WebhookDestination": {rewrite: destination, required: []string{"sourceRefs", "sourceSelector"}},
	"Audience":           {rewrite: audience, required: []string{"sourceRef"}},
	"Redelivery":         {rewrite: redelivery, required: []string{"destinationRef"}, job: true},
	"DeletionRequest":    {rewrite: deletionRequest, required: []string{"userId"}, job: true},
}

// all runs steps and reports whether one of them changed something.
func all(steps ...func() (bool, error)) (changed bool, err error) {
	for _, step := range steps {
		did, err := step()
		if err != nil {
			return false, err
		}
		changed = changed || did
	}
	return changed, nil
}

func source(spec object) (bool, error) {
	i := spec.index("writeKeySecretRef")
	return spec.replace("writeKeySecretRef", "writeKeys", func(ref *yaml.Node) (*yaml.Node, error) {
		return list(mapping(key(spec.Content[i], "secretKeyRef"), ref)), nil
	})
}

func audience(spec object) (bool, error) {
	return all(
		func() (bool, error) { return reference(spec, "source", "sourceRef") },
		func() (bool, error) { return spec.rename("name", "displayName") },
		func() (bool, error) { return spec.rename("kind", "type") },
	)
}

func redelivery(spec object) (bool, error) { return reference(spec, "destination", "destinationRef") }

// deletionRequest rewrites the names of sources to references.
func deletionRequest(spec object) (bool, error) {
	i := spec.index("sources")
	return spec.replace("sources", "sourceRefs", func(names *yaml.Node) (*yaml.Node, error) { return references(spec.Content[i], names) })
}

func destination(spec object) (bool, error) {
	steps := []func() (bool, error){
		func() (bool, error) { return sources(spec) },
		func() (bool, error) { return spec.rename("success", "successPolicy") },
		func() (bool, error) { return signing(spec.object("signing")) },
		func() (bool, error) { return delivery(spec.object("delivery")) },
	}
	if endpoints := spec.get("endpoints"); endpoints != nil {
		for _, endpoint := range endpoints.Content {
			tls := object{resolve(endpoint)}.object("tls")
			steps = append(steps, func() (bool, error) { return tls.rename("caSecretRef", "caSecretKeyRef") })
		}
	}
	return all(steps...)
}

// sources rewrites {names} to sourceRefs and {selector} to sourceSelector.
func sources(spec object) (bool, error) {
	old := spec.object("sources")
	i := spec.index("sources")
	switch names, selector := old.get("names"), old.get("selector"); {
	case i < 0:
		return false, nil
	case (names != nil) == (selector != nil):
		return false, errors.New("spec.sources must have either names or selector")
	case names != nil:
		return spec.replace("sources", "sourceRefs", func(*yaml.Node) (*yaml.Node, error) { return references(spec.Content[i], names) })
	default:
		return spec.replace("sources", "sourceSelector", func(*yaml.Node) (*yaml.Node, error) { return selector, nil })
	}
}

// signing moves the fields of the scheme to an entry of schemes.
func signing(old object) (bool, error) {
	if old.index("secretRef") < 0 && old.index("scheme") < 0 && old.index("previousSecretRef") < 0 {
		return false, nil
	}
	if old.index("schemes") >= 0 {
		return false, errors.New("spec.signing has both schemes and the fields of release 0.2.0; remove the latter")
	}
	scheme := object{&yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Style: old.Style}}
	like := old.Content[0]
	if i := old.index("scheme"); i >= 0 {
		scheme.Content = slices.Clone(old.Content[i : i+2])
		old.remove("scheme")
		scheme.Content[0].Value = "type"
	} else {
		// The default of release 0.2.0; the current API has none.
		scheme.Content = []*yaml.Node{key(like, "type"), key(like, "HMACSHA1")}
		scheme.HeadComment, like.HeadComment = like.HeadComment, ""
	}
	scheme.Content = append(scheme.Content, old.Content...)
	changed, err := all(
		func() (bool, error) { return scheme.rename("secretRef", "secretKeyRef") },
		func() (bool, error) { return scheme.rename("previousSecretRef", "previousSecretKeyRef") },
	)
	schemes := list(scheme.Node)
	schemes.Style = old.Style & yaml.FlowStyle
	old.Content = []*yaml.Node{key(like, "schemes"), schemes}
	return changed, err
}

// delivery moves the fields of retries to retry, at the position of the first of them.
func delivery(old object) (bool, error) {
	retry := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Style: old.Style}
	place, rest := -1, []*yaml.Node{}
	for i := 0; i+1 < len(old.Content) && old.Kind == yaml.MappingNode; i += 2 {
		switch k := old.Content[i]; k.Value {
		case "retryWindow", "minBackoff", "maxBackoff":
			if place < 0 {
				place = len(rest)
			}
			if k.Value == "retryWindow" {
				k.Value = "window"
			}
			retry.Content = append(retry.Content, old.Content[i:i+2]...)
		default:
			rest = append(rest, old.Content[i:i+2]...)
		}
	}
	if place < 0 {
		return false, nil
	}
	if old.index("retry") >= 0 {
		return false, errors.New("spec.delivery has both retry and the fields of release 0.2.0; remove the latter")
	}
	name := key(retry.Content[0], "retry")
	old.Content = append(rest[:place:place], append([]*yaml.Node{name, retry}, rest[place:]...)...)
	return true, nil
}

// reference replaces a field with a name by a field with a reference {name}.
func reference(spec object, old, field string) (bool, error) {
	i := spec.index(old)
	return spec.replace(old, field, func(name *yaml.Node) (*yaml.Node, error) {
		if name.Kind != yaml.ScalarNode {
			return nil, errors.New("must be a name")
		}
		return mapping(key(spec.Content[i], "name"), name), nil
	})
}

// references converts a list of names to a list of references {name}.
func references(like, names *yaml.Node) (*yaml.Node, error) {
	if names.Kind != yaml.SequenceNode {
		return nil, errors.New("must be a list of names")
	}
	refs := *names
	refs.Anchor, refs.Content = "", nil
	for _, name := range names.Content {
		name = resolve(name)
		if name.Kind != yaml.ScalarNode {
			return nil, errors.New("must be a list of names")
		}
		refs.Content = append(refs.Content, mapping(key(like, "name"), name))
	}
	return &refs, nil
}

// list returns a list of one entry.
func list(n *yaml.Node) *yaml.Node {
	return &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Content: []*yaml.Node{n}}
}
