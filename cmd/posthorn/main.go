// Command posthorn contains every role of Posthorn in one binary: the operator and the dispatcher
// of a cluster, both in one process without a cluster (run), and the client commands of package
// cmd/internal/cli.
package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/cli"
	"github.com/posthorn/posthorn/cmd/internal/command"
)

// version is set by the linker.
var version = "dev"

func main() {
	// The Go heap is limited to nine tenths of the container's limit; the rest is for memory that
	// the Go runtime does not manage. GOMEMLIMIT takes precedence. An unreadable limit counts as no
	// limit.
	_, _ = memlimit.Set()
	command.Version = version
	os.Exit(Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// Main runs one command line and returns its exit code.
func Main(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot()
	if strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe") == "kubectl-posthorn" {
		root = cli.NewPlugin()
	}
	return command.Run(root, args, stdin, stdout, stderr)
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "posthorn",
		Short: "Signed webhooks, declared in Kubernetes",
		Long: `Posthorn receives user-data calls (identify, track, page, screen, group, alias),
stores each call durably before it answers, and forwards it as a signed HTTP POST
to the declared webhooks.

Without a cluster:   posthorn run -f DIR
In a cluster:        posthorn operator, posthorn dispatcher

Exit codes: 0 success; 1 failure or negative result; 2 usage error;
130 interrupted before the result.`,
		RunE: command.ShowHelp,
	}
	cli.Add(root, cli.GroupServer, newRun(), newOperator(), newDispatcher())
	cli.AddTo(root)
	cli.Add(root, cli.GroupData, newBackup(), newRestore(), newDrain(), newRepair(), newReplication())
	// It is not a client command, because it links the API server's validation.
	cli.Add(root, cli.GroupDev, newCompile(), newRender())
	cli.SetGroups(root, cli.InsteadLocal)
	return root
}
