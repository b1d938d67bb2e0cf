// Package cli has the client commands of the programs posthorn and kubectl-posthorn. They use the
// admin API of dispatchers (contract/adminapi), the tracking API, and the API server of a
// cluster.
//
// The package imports neither the dispatcher's engine nor controller-runtime nor the API server's
// packages, so that the commands are small and build for every platform of kubectl.
package cli

import "github.com/spf13/cobra"

// GroupTry is the group of the commands that need no running Posthorn.
const GroupTry = "try"

// AddTo adds the client commands and their groups to the root command of posthorn.
func AddTo(root *cobra.Command) {
	for _, group := range []struct {
		id, title string
		commands  []*cobra.Command
	}{
		{"look", "Looking:", []*cobra.Command{newStatus(), newWhy(), newGet(), newProblems(), newTrace(connectDirect), newAttempts(connectDirect), newTail(connectDirect), newDeadLetters(connectDirect), newDiscard(), newSlots(connectDirect), newDebug(connectDirect), newKubectl("kubectl")}},
		{"send", "Sending:", []*cobra.Command{newSend(sendDirect), newImport(sendDirect), newAudience(sendDirect), newDeleteUser()}},
		{GroupTry, "Trying out:", []*cobra.Command{newSink(), newVerify(), newVersion()}},
	} {
		root.AddGroup(&cobra.Group{ID: group.id, Title: group.title})
		for _, c := range group.commands {
			c.GroupID = group.id
			root.AddCommand(c)
		}
	}
}

// NewPlugin makes the root command of `kubectl posthorn`: kubectl finds plugins by the name of the
// executable, kubectl-posthorn.
func NewPlugin() *cobra.Command {
	root := newKubectl("kubectl-posthorn")
	root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl posthorn"}
	return root
}
