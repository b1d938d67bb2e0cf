package main

import (
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
)

func newRepair() *cobra.Command {
	var data string
	var apply bool
	cmd := &cobra.Command{
		Use:   "repair --data DIR [--apply]",
		Short: "Look for damaged files in a stopped dispatcher's store, and keep what can be read",
		Long: `Reads every file of the store of a dispatcher that does not run, and says what
is damaged and what is lost by that. Nothing is changed, and the exit code is 1
when there is damage.

With --apply a sound store made of what can be read takes the damaged one's place,
which is kept beside it as queue.damaged-TIME. Messages that cannot be read become
dead letters with the reason Damaged of the destinations that they were for.
Others may be delivered a second time. It needs as much free disk as the store takes.`,
		Example: `  posthorn repair --data /data
  posthorn repair --data /data --apply`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if data == "" {
				return usagef("the data folder is missing; set --data to that of the dispatcher")
			}
			r, err := pebblestore.Repair(filepath.Join(data, "queue"), apply)
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			for _, d := range r.Damaged {
				fmt.Fprintf(out, "damaged: %s: %s\n", d.Path, d.What)
			}
			for _, lost := range r.Lost {
				fmt.Fprintf(out, "lost: %s\n", lost)
			}
			fmt.Fprintf(out, "readable: %d messages that wait or were not freed yet, %d dead letters, %d lanes\n", r.Messages, r.DeadLetters, r.Lanes)
			switch {
			case len(r.Damaged)+len(r.Lost) == 0:
				fmt.Fprintln(out, "No file is damaged; nothing was changed.")
			case r.Aside != "":
				fmt.Fprintf(out, "Repaired. The store as it was is in %s; remove it when nobody needs it any more.\n", r.Aside)
			default:
				fmt.Fprintln(out, "Nothing was changed. Restore the volume's snapshot if there is one; otherwise repair with --apply.")
				return errSilent
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&data, "data", "", "the dispatcher's data folder")
	cmd.Flags().BoolVar(&apply, "apply", false, "replace the damaged store")
	return cmd
}
