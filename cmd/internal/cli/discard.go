package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

func newDiscard() *cobra.Command {
	var d direct
	var yes bool
	cmd := &cobra.Command{
		Use:   "discard NAMESPACE/NAME",
		Short: "Delete parked objects that have no manifest any more (standalone)",
		Long: `Deletes the parked objects with a name: objects that the store has, and that no
manifest of this process has, although it did not see their deletion. 'posthorn
problems' lists them. Their pending messages are discarded after the grace period, as
after the removal of a manifest; until then a manifest restores them. On a terminal
the command shows the objects and asks for confirmation; otherwise it requires --yes.`,
		Example: "  posthorn discard shop/crm\n  posthorn discard shop/crm --yes",
		Args:    command.ExactArgs("NAMESPACE/NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			namespace, name, ok := strings.Cut(args[0], "/")
			if !ok || namespace == "" || name == "" {
				return command.Usagef("%q: use NAMESPACE/NAME", args[0])
			}
			t, err := d.target()
			if err != nil {
				return err
			}
			objects, err := t.Discard(cmd.Context(), namespace, name, true)
			switch {
			case err != nil:
				return err
			case len(objects) == 0:
				return errors.New("no parked object has this name; posthorn problems lists the parked objects. To delete an object that has a manifest, remove the manifest")
			}
			list := strings.Join(objects, ", ")
			if !yes {
				if err := command.Confirm(cmd, fmt.Sprintf("Delete %s, and discard the pending messages?", list),
					"set --yes to delete "+list); err != nil {
					return err
				}
			}
			if objects, err = t.Discard(cmd.Context(), namespace, name, false); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "deleted: %s; the pending messages are discarded after the grace period\n", strings.Join(objects, ", "))
			return nil
		},
	}
	d.adminFlag(cmd)
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask for confirmation")
	return cmd
}
