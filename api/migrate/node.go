package migrate

import (
	"fmt"

	"go.yaml.in/yaml/v3"
)

// object is a mapping of the YAML tree. Its Node is never nil; one of another kind has no fields.
type object struct{ *yaml.Node }

// resolve returns the target of an alias, and any other node unchanged.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// index returns the position of a field's key in Content, or -1.
func (o object) index(field string) int {
	if o.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(o.Content); i += 2 {
			if o.Content[i].Value == field {
				return i
			}
		}
	}
	return -1
}

// get returns the value of a field, or nil.
func (o object) get(field string) *yaml.Node {
	if i := o.index(field); i >= 0 {
		return resolve(o.Content[i+1])
	}
	return nil
}

// object returns the mapping in a field, or an empty one.
func (o object) object(field string) object {
	if n := o.get(field); n != nil {
		return object{n}
	}
	return object{&yaml.Node{}}
}

// text returns the scalar in a field, or "".
func (o object) text(field string) string {
	if n := o.get(field); n != nil && n.Kind == yaml.ScalarNode {
		return n.Value
	}
	return ""
}

func (o object) remove(field string) {
	if i := o.index(field); i >= 0 {
		o.Content = append(o.Content[:i], o.Content[i+2:]...)
	}
}

// replace renames a field and, unless value is nil, replaces its value. It reports whether
// the field exists. It returns an error if both names exist.
func (o object) replace(old, field string, value func(*yaml.Node) (*yaml.Node, error)) (bool, error) {
	i := o.index(old)
	if i < 0 {
		return false, nil
	}
	if o.index(field) >= 0 {
		return false, fmt.Errorf("it has both %s and %s; remove %s", old, field, old)
	}
	o.Content[i].Value = field
	if value == nil {
		return true, nil
	}
	n, err := value(resolve(o.Content[i+1]))
	if err != nil {
		return false, fmt.Errorf("%s: %w", old, err)
	}
	o.Content[i+1] = n
	return true, nil
}

// rename renames a field.
func (o object) rename(old, field string) (bool, error) { return o.replace(old, field, nil) }

// key returns a key with the style of another one, so that JSON remains JSON.
func key(like *yaml.Node, name string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: name, Style: like.Style & yaml.DoubleQuotedStyle}
}

// mapping returns a mapping of one field, in flow style unless the value is a block.
func mapping(k, v *yaml.Node) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Style: yaml.FlowStyle, Content: []*yaml.Node{k, v}}
	if v.Kind == yaml.MappingNode {
		n.Style &= v.Style
	} else { // Move the comments out of the braces, where they would break the line.
		value := *v
		n.HeadComment, n.LineComment, n.FootComment = v.HeadComment, v.LineComment, v.FootComment
		value.HeadComment, value.LineComment, value.FootComment = "", "", ""
		n.Content[1] = &value
	}
	return n
}
