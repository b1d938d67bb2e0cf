package cli

import (
	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
)

// The groups of the commands, in the order of the help.
const (
	GroupServer = "server"
	GroupBasic  = "basic"
	GroupDebug  = "debug"
	GroupData   = "data"
	GroupDev    = "development"
	GroupOther  = "other"
)

var groups = []*cobra.Group{
	{ID: GroupServer, Title: "Server Commands:"}, {ID: GroupBasic, Title: "Basic Commands:"},
	{ID: GroupDebug, Title: "Troubleshooting and Debugging Commands:"}, {ID: GroupData, Title: "Data Management Commands:"},
	{ID: GroupDev, Title: "Development Commands:"}, {ID: GroupOther, Title: "Other Commands:"},
}

// Add adds commands to a group of a root command.
func Add(root *cobra.Command, group string, commands ...*cobra.Command) {
	for _, c := range commands {
		c.GroupID = group
		root.AddCommand(c)
	}
}

// SetGroups adds the groups that have commands, and explains the commands of other programs.
func SetGroups(root *cobra.Command, instead map[string]string) {
	cobra.EnableCommandSorting = false // The groups have their own order.
	for _, group := range groups {
		for _, c := range root.Commands() {
			if c.GroupID == group.ID && !root.ContainsGroup(group.ID) {
				root.AddGroup(group)
			}
		}
	}
	root.SetHelpCommandGroupID(GroupOther)
	root.SetCompletionCommandGroupID(GroupOther)
	root.Args = command.OnlyCommandsOr(instead)
}

// InsteadLocal has the commands of posthorn for names that users of other programs type.
var InsteadLocal = map[string]string{
	"describe":  "'why NAME' explains an object, 'get KIND NAME -o yaml' prints it",
	"logs":      "'tail' follows the delivery attempts, 'attempts DESTINATION' shows the last ones",
	"log":       "'tail' follows the delivery attempts; 'replication' is for a replicated log",
	"resend":    "'deadletters redeliver DESTINATION' sends dead letters again",
	"replay":    "'deadletters redeliver DESTINATION' sends dead letters again",
	"redeliver": "'deadletters redeliver DESTINATION' sends dead letters again",
	"listen":    "'tail --forward-to URL' sends the deliveries on to a receiver that you develop",
	"trigger":   "'test DESTINATION' sends a test event, 'send TYPE' a call to all destinations",
	"apply":     "write the manifest into the folder of 'run -f'",
	"delete":    "remove the manifest from the folder of 'run -f'; 'delete-user' deletes a user",
	"start":     "'run -f DIR' runs Posthorn",
	"serve":     "'run -f DIR' runs Posthorn",
	"validate":  "'compile -f DIR' checks manifests",
	"lint":      "'compile -f DIR' checks manifests",
}

// insteadPlugin has the same for the plugin.
var insteadPlugin = map[string]string{
	"describe":    "'why NAME' explains an object; 'kubectl describe' shows it",
	"get":         "'kubectl get posthorn' shows the objects of all kinds",
	"logs":        InsteadLocal["logs"],
	"resend":      "'redeliver DESTINATION' sends dead letters again",
	"replay":      "'redeliver DESTINATION' sends dead letters again",
	"listen":      InsteadLocal["listen"],
	"trigger":     InsteadLocal["trigger"],
	"delete-user": "apply a DeletionRequest",
	"problems":    "'status' and 'why' show the problems",
}
