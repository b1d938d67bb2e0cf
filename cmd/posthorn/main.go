// Command posthorn contains every role of Posthorn in one binary: the operator and the dispatcher
// of a cluster, both in one process without a cluster (run), and the client commands.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/posthorn/posthorn/dispatcher/termsafe"
)

// version is set by the linker.
var version = "dev"

// Exit codes, for scripts.
const (
	exitOK      = 0
	exitFailure = 1 // the request failed, or its result is negative
	exitUsage   = 2 // the command line is invalid
)

// usageError marks a mistake on the command line.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// errSilent fails a command that has already printed its error.
var errSilent = errors.New("failed")

func main() {
	// The Go heap is limited to nine tenths of the container's limit; the rest is for memory that
	// the Go runtime does not manage. GOMEMLIMIT takes precedence. An unreadable limit counts as no
	// limit.
	_, _ = memlimit.Set()
	os.Exit(Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// Main runs one command line and returns its exit code.
func Main(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process immediately.
	context.AfterFunc(ctx, stop)

	root := newRoot()
	if strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe") == "kubectl-posthorn" {
		root = newPlugin()
	}
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(safeOnTerminal(stdout))
	stderr = safeOnTerminal(stderr) // Errors and warnings may quote external text.
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errSilent):
		return exitFailure
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "posthorn: %v\nSee '%s --help'.\n", err, cmd.CommandPath())
		return exitUsage
	case meta.IsNoMatchError(err):
		err = fmt.Errorf("%w: is Posthorn installed in this cluster? Its CustomResourceDefinitions are not", err)
	}
	fmt.Fprintf(stderr, "posthorn: %v\n", err)
	if errors.Is(err, syscall.EADDRINUSE) {
		fmt.Fprintf(stderr, "Another process listens there. Stop it, or set another address: '%s --help'.\n", cmd.CommandPath())
	}
	return exitFailure
}

// terminal is a standard stream that is connected to a terminal.
type terminal struct{ *termsafe.Writer }

// safeOnTerminal escapes control sequences on terminals, because much of the output of commands
// is written by senders and receivers. Files and pipes get the text unchanged.
func safeOnTerminal(w io.Writer) io.Writer {
	if f, ok := w.(*os.File); ok && isTerminal(f) {
		return terminal{termsafe.NewWriter(f)}
	}
	return w
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "posthorn",
		Short: "Signed webhooks, declared in Kubernetes",
		Long: `Posthorn receives user-data calls (identify, track, page, screen, group, alias),
stores each call durably before it answers, and forwards it as a signed HTTP POST
to the declared webhooks.

Without a cluster:   posthorn run --manifests DIR
In a cluster:        posthorn operator, posthorn dispatcher

Exit codes: 0 success; 1 failure or negative result; 2 usage error.`,
		Args: onlyCommands,
		RunE: showHelp,
	}
	asRoot(root)
	root.AddGroup(
		&cobra.Group{ID: "server", Title: "Servers:"},
		&cobra.Group{ID: "look", Title: "Looking:"},
		&cobra.Group{ID: "send", Title: "Sending:"},
		&cobra.Group{ID: "try", Title: "Trying out:"},
	)
	for group, commands := range map[string][]*cobra.Command{
		"server": {newRun(), newOperator(), newDispatcher(), newRepair()},
		"look":   {newWhy(), newGet(), newAttempts(reachDirect), newTail(reachDirect), newDeadLetters(reachDirect), newDebug(reachDirect), newKubectl("kubectl")},
		"send":   {newSend(callDirect), newAudience(callDirect), newDeleteUser()},
		"try":    {newCompile(), newMigrate(), newSink(), newVerify()},
	} {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	return root
}

// newPlugin makes the root command of `kubectl posthorn`: kubectl finds plugins by the name of the
// executable.
func newPlugin() *cobra.Command {
	root := newKubectl("kubectl-posthorn")
	root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl posthorn"}
	asRoot(root)
	return root
}

// asRoot sets the defaults that all subcommands inherit.
func asRoot(root *cobra.Command) {
	root.Version = buildVersion()
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{explainFlag(err)} })
}

// explainFlag adds the accepted format to a flag's parse error.
func explainFlag(err error) error {
	invalid, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	flag, rule := invalid.GetFlag(), errors.Unwrap(invalid).Error()
	switch flag.Value.Type() {
	case "int", "int32", "int64":
		rule = "use a whole number"
	case "float64":
		rule = "use a number"
	case "duration":
		rule = "use a duration like 90s, 10m or 2h"
	case "bool":
		rule = "use true or false"
	}
	return fmt.Errorf("--%s %q: %s", flag.Name, invalid.GetValue(), rule)
}

// onlyCommands rejects arguments of a command that only has subcommands.
func onlyCommands(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if cmd.SuggestionsMinimumDistance == 0 {
		cmd.SuggestionsMinimumDistance = 2
	}
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		return usagef("unknown command %q; did you mean %s?", args[0], strings.Join(near, " or "))
	}
	return usagef("unknown command %q", args[0])
}

func showHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }

func buildVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok && version == "dev" {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return "dev-" + s.Value[:min(12, len(s.Value))]
			}
		}
	}
	return version
}

// exactArgs is cobra.ExactArgs with the usage exit code and the names of missing arguments.
func exactArgs(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) < len(names) {
			return usagef("%s is missing", names[len(args)])
		}
		if len(args) > len(names) {
			return usagef("unexpected argument %q", args[len(names)])
		}
		return nil
	}
}

// atMostArgs is cobra.MaximumNArgs with the usage exit code.
func atMostArgs(n int) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) > n {
			return usagef("unexpected argument %q", args[n])
		}
		return nil
	}
}

// outputFlag registers -o with a fixed set of choices.
func outputFlag(cmd *cobra.Command, value *string, unset, usage string, choices ...string) {
	*value = unset
	cmd.Flags().VarP(&choice{value, choices}, "output", "o", usage)
}

// choice is a flag value from a fixed set of words. It implements pflag.Value.
type choice struct {
	value   *string
	choices []string
}

func (c *choice) String() string { return *c.value }
func (c *choice) Type() string   { return "string" }

func (c *choice) Set(text string) error {
	if !slices.Contains(c.choices, text) {
		return fmt.Errorf("use %s", strings.Join(c.choices, ", "))
	}
	*c.value = text
	return nil
}

// logFlags are the flags of every server.
type logFlags struct{ level, format string }

func (l *logFlags) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&l.level, "log-level", "info", "debug, info, warn or error")
	cmd.Flags().StringVar(&l.format, "log-format", "text", "text or json")
}

func (l *logFlags) logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.level)); err != nil {
		return nil, usagef("--log-level %q: use debug, info, warn or error", l.level)
	}
	o := &slog.HandlerOptions{Level: level, ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == "err" && len(groups) == 0 { // logr uses this key.
			a.Key = "error"
		}
		return a
	}}
	switch l.format {
	case "text":
		return slog.New(newSampler(slog.NewTextHandler(w, o))), nil
	case "json":
		return slog.New(newSampler(slog.NewJSONHandler(termsafe.NewWriter(w), o))), nil
	}
	return nil, usagef("--log-format %q: use text or json", l.format)
}
