package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

func newDiscard() *cobra.Command {
	var d direct
	var yes bool
	var objects *command.Objects
	cmd := &cobra.Command{
		Use:   "discard NAME",
		Short: "Delete parked objects that have no manifest any more (standalone)",
		Long: `Deletes the parked objects with a name: objects that the store has, and that no
manifest of this process has, although it did not see their deletion. 'posthorn
problems' lists them. Their pending messages are discarded after the grace period, as
after the removal of a manifest; until then a manifest restores them. On a terminal
the command shows the objects and asks for confirmation; otherwise it requires --yes.`,
		Example: "  posthorn discard crm -n shop\n  posthorn discard crm -n shop --yes",
		Args:    command.ExactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			namespace, name := d.ns, args[0]
			t, err := d.target()
			if err != nil {
				return err
			}
			found, err := t.Discard(cmd.Context(), namespace, name, true)
			switch {
			case err != nil:
				return err
			case len(found) == 0:
				return fmt.Errorf("no parked object in namespace %s has this name; posthorn problems lists the parked objects. To delete an object that has a manifest, remove the manifest", namespace)
			}
			list := strings.Join(found, ", ")
			if !yes {
				if err := command.Confirm(cmd, fmt.Sprintf("Delete %s, and discard the pending messages?", list),
					"set --yes to delete "+list); err != nil {
					return err
				}
			}
			if found, err = t.Discard(cmd.Context(), namespace, name, false); err != nil {
				return err
			}
			if objects.Chosen() {
				return objects.Print(cmd.OutOrStdout(), map[string][]string{"deleted": found})
			}
			fmt.Fprintf(cmd.OutOrStdout(), "deleted: %s; the pending messages are discarded after the grace period\n", strings.Join(found, ", "))
			return nil
		},
	}
	command.AdminFlag(cmd, &d.admin)
	command.NamespaceFlag(cmd, &d.ns)
	command.YesFlag(cmd, &yes)
	objects = command.ObjectsFlag(cmd)
	return cmd
}
