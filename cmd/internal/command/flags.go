package command

import (
	"cmp"
	"os"

	"github.com/spf13/cobra"
)

// Flags that several commands have, so that each has one name, one default and one meaning.

// ManifestsFlag registers -f, which names manifests.
func ManifestsFlag(cmd *cobra.Command, path *string, usage string) {
	cmd.Flags().StringVarP(path, "filename", "f", "", usage)
}

// CheckManifests fails unless the value of -f is a folder.
func CheckManifests(path string) error {
	if path == "" {
		return Usagef("the folder of manifests is missing; set -f DIR")
	}
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		return Usagef("-f %q is not a folder", path)
	}
	return nil
}

// AdminFlag registers --admin, the address of the admin API for clients.
func AdminFlag(cmd *cobra.Command, address *string) {
	cmd.Flags().StringVar(address, "admin", cmp.Or(os.Getenv("POSTHORN_ADMIN"), "127.0.0.1:8081"),
		"admin address of a running Posthorn; the environment variable POSTHORN_ADMIN sets another default")
}

// YesFlag registers -y, for a command that asks for confirmation.
func YesFlag(cmd *cobra.Command, yes *bool) {
	cmd.Flags().BoolVarP(yes, "yes", "y", false, "do not ask for confirmation")
}

// NamespaceFlag registers -n of a command without a cluster. As in kubectl, the namespace "default" is
// the default.
func NamespaceFlag(cmd *cobra.Command, namespace *string) {
	cmd.Flags().StringVarP(namespace, "namespace", "n", "default", "the namespace")
}

// AllNamespacesFlag registers -A.
func AllNamespacesFlag(cmd *cobra.Command, all *bool) {
	cmd.Flags().BoolVarP(all, "all-namespaces", "A", false, "all namespaces")
}

// CheckAllNamespaces fails if -A is set together with -n or the name of an object.
func CheckAllNamespaces(cmd *cobra.Command, all bool, name string) error {
	switch {
	case all && name != "":
		return Usagef("-A is for all objects; leave out -A or the name %q", name)
	case all && cmd.Flags().Changed("namespace"):
		return Usagef("set either --namespace or --all-namespaces")
	}
	return nil
}
