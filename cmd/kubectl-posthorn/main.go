// Command kubectl-posthorn is the kubectl plugin alone, for workstations: it builds for Linux, macOS
// and Windows. The program posthorn has the same commands under the name kubectl-posthorn.
package main

import (
	"os"

	"github.com/posthorn/posthorn/cmd/internal/cli"
	"github.com/posthorn/posthorn/cmd/internal/command"
)

// version is set by the linker.
var version = "dev"

func main() {
	command.Version = version
	os.Exit(command.Run(cli.NewPlugin(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
