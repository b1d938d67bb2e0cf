package command

import (
	"encoding/json"
	"io"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/internal/termsafe"
)

// Objects prints the objects of a command in the format of its flag -o: a line of JSON each, or a
// document of YAML each, in which control characters of external text are escaped.
type Objects struct {
	format  string
	printed bool
}

// ObjectsFlag registers -o of a command that prints objects or results.
func ObjectsFlag(cmd *cobra.Command) *Objects {
	o := &Objects{}
	OutputFlag(cmd, &o.format, "", "json: one object per line; yaml: one document per object", "json", "yaml")
	return o
}

// Chosen reports whether -o is set; otherwise the command prints text.
func (o *Objects) Chosen() bool { return o.format != "" }

// Print prints an object.
func (o *Objects) Print(w io.Writer, object any) error {
	if o.format == "json" {
		return json.NewEncoder(termsafe.NewWriter(w)).Encode(object)
	}
	text, err := yaml.Marshal(object)
	if err != nil {
		return err
	}
	if o.printed {
		text = append([]byte("---\n"), text...)
	}
	o.printed = true
	_, err = w.Write(text)
	return err
}

// PrintAll prints each object of a list.
func PrintAll[T any](w io.Writer, o *Objects, list []T) error {
	for _, object := range list {
		if err := o.Print(w, object); err != nil {
			return err
		}
	}
	return nil
}
