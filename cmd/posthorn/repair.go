package main

import (
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/dispatcher/backup"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore/repair"
	"github.com/posthorn/posthorn/internal/plural"
)

func newRepair() *cobra.Command {
	var data string
	var apply bool
	cmd := &cobra.Command{
		Use:   "repair --data DIR [--apply]",
		Short: "Find and repair damaged files in a stopped dispatcher's store",
		Long: `Reads every file of a stopped dispatcher's store and reports the damage and the
lost data. It changes nothing. The exit code is 1 if there is damage.

With --apply a new store with all readable data replaces the damaged one, which is
kept beside it as queue.damaged-TIME. Each unreadable message becomes a dead letter
of its destinations with the reason Damaged. Readable messages may be delivered
twice. The repair needs as much free disk space as the store uses.`,
		Example: `  posthorn repair --data /data
  posthorn repair --data /data --apply`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if data == "" {
				return command.Usagef("the data directory is missing; set --data to the dispatcher's data directory")
			}
			store := filepath.Join(data, backup.QueueFolder)
			if apply {
				if err := checkOwner(store); err != nil {
					return err
				}
			}
			r, err := repair.Run(store, apply, pebblestore.Verify)
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
			fmt.Fprintf(out, "readable: %s pending or not yet freed, %s, %s\n", plural.Count(r.Messages, "message"),
				plural.Count(r.DeadLetters, "dead letter"), plural.Count(r.Lanes, "lane"))
			switch {
			case len(r.Damaged)+len(r.Lost) == 0:
				fmt.Fprintln(out, "No file is damaged; nothing was changed.")
			case r.Aside != "":
				fmt.Fprintf(out, "Repaired. The damaged store is kept in %s; remove it when it is no longer needed.\n", r.Aside)
			default:
				fmt.Fprintln(out, "Nothing was changed. Restore a snapshot of the volume if there is one; otherwise run the repair with --apply.")
				return command.ErrFailed
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&data, "data", "", "data directory of the dispatcher")
	cmd.Flags().BoolVar(&apply, "apply", false, "replace the damaged store with the readable data")
	return cmd
}
