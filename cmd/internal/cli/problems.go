package cli

import (
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/controllers/manifest"
)

func newProblems() *cobra.Command {
	var d direct
	var objects *command.Objects
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
			if err := printProblems(cmd.OutOrStdout(), objects, found); err != nil {
				return err
			}
			if len(found.Problems)+len(found.NotAccepted) > 0 {
				return command.ErrFailed
			}
			if !objects.Chosen() {
				fmt.Fprintln(cmd.ErrOrStderr(), "No problems found.")
			}
			return nil
		},
	}
	command.AdminFlag(cmd, &d.admin)
	objects = command.ObjectsFlag(cmd)
	return cmd
}

// printProblems prints the problems, and as text also the warnings.
func printProblems(w io.Writer, objects *command.Objects, found manifest.Problems) error {
	if objects.Chosen() {
		return command.PrintAll(w, objects, slices.Concat(found.Problems, found.NotAccepted))
	}
	for _, list := range [][]manifest.Problem{found.Problems, found.NotAccepted, found.Warnings} {
		for _, p := range list {
			if _, err := fmt.Fprintln(w, p.Detail()); err != nil {
				return err
			}
		}
	}
	return nil
}
