package cli

import (
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

// newDebug makes the command that shows the /debug paths of a dispatcher that runs with --debug.
func newDebug(flags connectorFlags) *cobra.Command {
	var r connector
	var pod string
	cmd := &cobra.Command{
		Use:   "debug lanes|config|pprof/NAME",
		Short: "Inspect a dispatcher that runs with --debug",
		Long: `Shows the lanes of a dispatcher that runs with --debug (position, in flight,
circuit, next attempt), its live config without secrets, or a profile of the Go
runtime for 'go tool pprof'. Lanes and config are printed as lines of JSON.`,
		Example: `  posthorn debug lanes
  posthorn debug config
  posthorn debug pprof/heap > heap.pb.gz
  posthorn debug 'pprof/profile?seconds=10' > cpu.pb.gz`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 || args[0] != "lanes" && args[0] != "config" && !strings.HasPrefix(args[0], "pprof/") {
				return command.Usagef("an argument is missing: lanes, config or pprof/NAME")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			targets, closeAll, err := r.connect(cmd.Context())
			if err != nil {
				return err
			}
			defer closeAll()
			if strings.HasPrefix(args[0], "pprof") && pod == "" && len(targets) > 1 {
				return command.Usagef("there are %d pods, but a profile needs exactly one; set --pod", len(targets))
			}
			found := false
			for _, t := range targets {
				if pod != "" && t.pod != pod {
					continue
				}
				found = true
				data, err := t.Debug(cmd.Context(), args[0])
				if err != nil {
					return t.explain(err)
				}
				_, err = io.Copy(cmd.OutOrStdout(), data)
				data.Close()
				if err != nil {
					return err
				}
			}
			if !found {
				return command.Usagef("--pod %q: no ready dispatcher has this name", pod)
			}
			return nil
		},
	}
	r = flags(cmd)
	cmd.Flags().StringVar(&pod, "pod", "", "only this pod")
	return cmd
}
