// Package cli has the client commands of the programs posthorn and kubectl-posthorn. They use the
// admin API of dispatchers (contract/adminapi), the tracking API, and the API server of a
// cluster.
//
// The package imports neither the dispatcher's engine nor controller-runtime nor the API server's
// packages, so that the commands are small and build for every platform of kubectl.
package cli

import "github.com/spf13/cobra"

// AddTo adds the client commands to the root command of posthorn.
func AddTo(root *cobra.Command) {
	Add(root, GroupBasic, newStatus(), newGet(), newSend(sendDirect), newTest(connectDirect), newImport(sendDirect), newAudience(sendDirect),
		newDeleteUser())
	Add(root, GroupDebug, newWhy(), newProblems(), newAttempts(connectDirect), newTail(connectDirect), newTrace(connectDirect),
		newDeadLetters(connectDirect), newSlots(connectDirect), newDebug(connectDirect))
	Add(root, GroupData, newDiscard())
	Add(root, GroupDev, newSink(), newVerify())
	Add(root, GroupOther, newKubectl("kubectl"), newVersion())
}

// NewPlugin makes the root command of `kubectl posthorn`: kubectl finds plugins by the name of the
// executable, kubectl-posthorn.
func NewPlugin() *cobra.Command {
	root := newKubectl("kubectl-posthorn")
	root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl posthorn"}
	return root
}
