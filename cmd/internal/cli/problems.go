package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/controllers/manifest"
)

func newProblems() *cobra.Command {
	var d direct
	var output string
	cmd := &cobra.Command{
		Use:   "problems",
		Short: "List the manifests with a problem (standalone)",
		Long: `Lists the problems of the manifests of a Posthorn that runs without a cluster: rejected
manifests, and objects that refer to something that is missing, such as a Secret. Each line
has the file and its line, the object, the rule, and what is in effect instead. Exits 1 if
there is a problem.`,
		Example: "  posthorn problems\n  posthorn problems -o json",
		Args:    command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var found manifest.Problems
			if err := d.read(cmd.Context(), "/problems", &found); err != nil {
				return err
			}
			if err := printProblems(cmd.OutOrStdout(), output, found); err != nil {
				return err
			}
			if len(found.Problems)+len(found.NotAccepted) > 0 {
				return command.ErrFailed
			}
			if output == "" {
				fmt.Fprintln(cmd.ErrOrStderr(), "No problems found.")
			}
			return nil
		},
	}
	d.adminFlag(cmd)
	command.OutputFlag(cmd, &output, "", "json: one problem per line", "json")
	return cmd
}

// printProblems prints the problems, and as text also the ignored objects.
func printProblems(w io.Writer, output string, found manifest.Problems) error {
	if output == "json" {
		out := json.NewEncoder(w)
		for _, p := range slices.Concat(found.Problems, found.NotAccepted) {
			if err := out.Encode(p); err != nil {
				return err
			}
		}
		return nil
	}
	for _, list := range [][]manifest.Problem{found.Problems, found.NotAccepted, found.Ignored} {
		for _, p := range list {
			if _, err := fmt.Fprintln(w, p.Detail()); err != nil {
				return err
			}
		}
	}
	return nil
}
