package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/api/migrate"
	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/dispatcher/durable"
)

func newMigrate() *cobra.Command {
	var files []string
	var write bool
	cmd := &cobra.Command{
		Use:   "migrate -f FILE|DIR|-",
		Short: "Rewrite manifests of release 0.2.0 to the current API",
		Long: `Rewrites Sources, WebhookDestinations, Audiences, Redeliveries and DeletionRequests
of release 0.2.0, and prints all documents. Comments and the order of fields are
kept; documents of other kinds and manifests of the current API are not changed.
Fields that the API server sets in exported objects are removed, such as the status.

Redeliveries and DeletionRequests run once and cannot be changed. Those that have
finished, as their exported status shows, are omitted. Warnings go to standard error.

Exits 0 when all documents can be applied, 1 when one cannot. The steps of an
upgrade: docs/upgrading.md.`,
		Example: `  posthorn migrate -f old.yaml > new.yaml
  posthorn migrate -f ./webhooks --write
  kubectl get psrc,whd,paud,rdl,pdel -A -o yaml | posthorn migrate -f - > new.yaml`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(files) == 0 {
				return command.Usagef("the manifests are missing; set -f FILE, -f DIR or -f - for standard input")
			}
			if write && slices.Contains(files, "-") {
				return command.Usagef("--write cannot change standard input; remove --write or -f -")
			}
			paths, err := manifestFiles(files)
			if err != nil {
				return err
			}
			return migrateFiles(cmd, paths, write)
		},
	}
	f := cmd.Flags()
	f.StringArrayVarP(&files, "file", "f", nil, "file, folder (its .yaml, .yml and .json files) or - for standard input; may be repeated")
	f.BoolVar(&write, "write", false, "change the files in place, print the names of the changed ones")
	return cmd
}

// manifestFiles lists files, and the manifests in folders.
func manifestFiles(args []string) (paths []string, err error) {
	for _, arg := range args {
		info, err := os.Stat(arg)
		switch {
		case arg == "-":
			paths = append(paths, arg)
			continue
		case err != nil:
			return nil, err
		case !info.IsDir():
			paths = append(paths, arg)
			continue
		}
		entries, err := os.ReadDir(arg)
		if err != nil {
			return nil, err
		}
		found := len(paths)
		for _, entry := range entries {
			if !entry.IsDir() && !strings.HasPrefix(entry.Name(), ".") && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(entry.Name())) {
				paths = append(paths, filepath.Join(arg, entry.Name()))
			}
		}
		if len(paths) == found {
			return nil, fmt.Errorf("%s: the folder has no .yaml, .yml or .json file", arg)
		}
	}
	return paths, nil
}

// migrateFiles rewrites all files or, when one of them has an error, none.
func migrateFiles(cmd *cobra.Command, paths []string, write bool) error {
	olds, news := make([][]byte, len(paths)), make([][]byte, len(paths))
	problem := false
	for i, path := range paths {
		var err error
		if path == "-" {
			olds[i], err = io.ReadAll(cmd.InOrStdin())
		} else {
			olds[i], err = os.ReadFile(path)
		}
		if err != nil {
			return err
		}
		var notes []migrate.Note
		if news[i], notes, err = migrate.File(olds[i]); err != nil {
			return fmt.Errorf("%s, %w", path, err)
		}
		for _, n := range notes {
			problem = problem || n.Problem
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: %s, %s\n", map[bool]string{true: "problem", false: "warning"}[n.Problem], path, n)
		}
	}
	for i, path := range paths {
		switch {
		case !write:
			printDocuments(cmd.OutOrStdout(), i > 0, news[i])
		case !bytes.Equal(olds[i], news[i]):
			if err := replaceFile(path, news[i]); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), path)
		}
	}
	if problem {
		return command.ErrFailed
	}
	return nil
}

// printDocuments prints a file, apart from the file before it.
func printDocuments(w io.Writer, follows bool, text []byte) {
	if follows && !bytes.HasPrefix(text, []byte("---")) {
		fmt.Fprintln(w, "---")
	}
	_, _ = w.Write(text)
	if len(text) > 0 && text[len(text)-1] != '\n' {
		fmt.Fprintln(w)
	}
}

// replaceFile gives a file another content at once: after a crash it has one of the two.
func replaceFile(path string, text []byte) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return err
	}
	if err := durable.Replace(path, text, info.Mode().Perm()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
