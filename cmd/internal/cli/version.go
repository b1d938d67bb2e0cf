package cli

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

func newVersion() *cobra.Command {
	var objects *command.Objects
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Show the version of this program",
		Example: "  posthorn version\n  posthorn version -o json",
		Args:    command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Version   string `json:"version"`
				GoVersion string `json:"goVersion"`
				Platform  string `json:"platform"`
			}{command.BuildVersion(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
			if objects.Chosen() {
				return objects.Print(cmd.OutOrStdout(), v)
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s (%s, %s)\n", v.Version, v.GoVersion, v.Platform)
			return err
		},
	}
	objects = command.ObjectsFlag(cmd)
	return cmd
}
