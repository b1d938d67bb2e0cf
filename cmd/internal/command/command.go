// Package command has what all commands of Posthorn's programs share: how a command line is run
// (Run), its errors and exit codes, its arguments and flags, and output that is safe on terminals.
// It knows no command.
package command

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/posthorn/posthorn/internal/termsafe"
)

// Exit codes, for scripts.
const (
	ExitOK      = 0
	ExitFailure = 1 // the request failed, or its result is negative
	ExitUsage   = 2 // the command line is invalid
	// ExitInterrupted is the shell's code for a program that an interrupt ended.
	ExitInterrupted = 130
)

// Version is the version of the program; main sets it before Run.
var Version = "dev"

// ErrFailed fails a command that has already printed its error.
var ErrFailed = errors.New("failed")

type usageError struct{ error }

// UsageError marks an error as a mistake on the command line.
func UsageError(err error) error { return usageError{err} }

// Usagef makes an error for a mistake on the command line.
func Usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

type interruptedError struct{ error }

func (e interruptedError) Unwrap() error { return e.error }

// Interrupted marks the error of a command that an interrupt ended before its result.
func Interrupted(err error) error { return interruptedError{err} }

// Run runs one command line of a program's root command and returns its exit code. An interrupt or
// SIGTERM ends the command's context, a second one the process.
func Run(root *cobra.Command, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process immediately.
	context.AfterFunc(ctx, stop)

	root.Version = BuildVersion()
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return UsageError(explainFlag(cmd, err)) })
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(SafeOnTerminal(stdout))
	stderr = SafeOnTerminal(stderr) // Errors and warnings may quote external text.
	root.SetErr(stderr)
	root.InitDefaultCompletionCmd(args...)
	if completion, _, err := root.Find([]string{"completion"}); err == nil && completion != root {
		completion.Args, completion.RunE = OnlyCommands, ShowHelp // An unknown shell is an error.
	}
	cmd, err := root.ExecuteContextC(ctx)
	var usage usageError
	_, interrupted := errors.AsType[interruptedError](err)
	switch {
	case err == nil:
		return ExitOK
	case errors.Is(err, ErrFailed) && interrupted:
		return ExitInterrupted
	case errors.Is(err, ErrFailed):
		return ExitFailure
	case interrupted:
		fmt.Fprintf(stderr, "posthorn: %v\n", err)
		return ExitInterrupted
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "posthorn: %v\nSee '%s --help'.\n", err, cmd.CommandPath())
		return ExitUsage
	}
	fmt.Fprintf(stderr, "posthorn: %v\n", err)
	if errors.Is(err, syscall.EADDRINUSE) {
		fmt.Fprintf(stderr, "Another process listens there. Stop it, or set another address: '%s --help'.\n", cmd.CommandPath())
	}
	return ExitFailure
}

// explainFlag adds the accepted format to a flag's parse error, or similar names if the flag is unknown.
func explainFlag(cmd *cobra.Command, err error) error {
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok && len(unknown.GetSpecifiedName()) > 1 {
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				names = append(names, "--"+f.Name)
			}
		})
		return fmt.Errorf("%w%s", err, DidYouMean("--"+unknown.GetSpecifiedName(), names))
	}
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

// terminal is a standard stream that is connected to a terminal.
type terminal struct {
	*termsafe.Writer
	file *os.File
	// plain is set by --no-color.
	plain bool
}

// A Color is the color of a text on a terminal.
type Color byte

// Values of Color.
const (
	Plain  Color = '0'
	Red    Color = '1'
	Green  Color = '2'
	Yellow Color = '3'
)

// colors has the parameters of ANSI's escape sequence.
var colors = map[Color]string{Plain: "0", Red: "31", Green: "32", Yellow: "33"}

// colorMark begins a change of color in the text that is written to a terminal, before the color. It
// is random, because external text must not contain it.
var colorMark = []byte("\x01" + rand.Text())

// Paint colors a text, on a terminal only, and not with --no-color or if the environment has NO_COLOR. All
// texts of a column of text/tabwriter must be painted, Plain ones too, because it counts the marks.
func Paint(w io.Writer, c Color, text string) string {
	if t, ok := w.(terminal); !ok || t.plain || os.Getenv("NO_COLOR") != "" {
		return text
	}
	return string(colorMark) + string(rune(c)) + text + string(colorMark) + string(rune(Plain))
}

// withoutC0 escapes the control characters below space, which JSON never has, but other texts may. Only
// tabs and line breaks remain.
type withoutC0 struct{ to io.Writer }

func (w withoutC0) Write(p []byte) (int, error) {
	isC0 := func(c byte) bool { return c < ' ' && c != '\n' && c != '\t' }
	text := p
	if slices.ContainsFunc(p, isC0) {
		text = nil
		for i := 0; i < len(p); i++ {
			c := p[i]
			if rest, ok := bytes.CutPrefix(p[i:], colorMark); ok && len(rest) > 0 {
				text = append(text, "\x1b["+colors[Color(rest[0])]+"m"...)
				i += len(colorMark)
			} else if isC0(c) {
				text = fmt.Appendf(text, `\u%04x`, c)
			} else {
				text = append(text, c)
			}
		}
	}
	if _, err := w.to.Write(text); err != nil {
		return 0, err
	}
	return len(p), nil
}

// SafeOnTerminal escapes control sequences on terminals, because much of the output of commands
// is written by senders and receivers. Files and pipes get the text unchanged.
func SafeOnTerminal(w io.Writer) io.Writer {
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return terminal{Writer: termsafe.NewWriter(withoutC0{f}), file: f}
	}
	return w
}

// IsTerminal reports whether a command's output or error stream is a terminal.
func IsTerminal(w io.Writer) bool {
	_, ok := w.(terminal)
	return ok
}

// RedrawLine replaces the present line of a terminal by a text, and does nothing elsewhere.
func RedrawLine(w io.Writer, text string) {
	if t, ok := w.(terminal); ok {
		_, _ = io.WriteString(t.file, "\r\033[K") // The terminal itself would escape it.
		_, _ = io.WriteString(t, text)
	}
}

// Confirm asks a question on the terminal, and fails unless the answer is yes. Without a terminal it
// fails with what to do in place of an answer.
func Confirm(cmd *cobra.Command, question, instead string) error {
	in, ok := cmd.InOrStdin().(*os.File)
	if !ok || !term.IsTerminal(int(in.Fd())) || !IsTerminal(cmd.ErrOrStderr()) {
		return Usagef("there is no terminal to confirm on; %s", instead)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%s [y/N] ", question)
	answer := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(in).ReadString('\n')
		answer <- strings.ToLower(strings.TrimSpace(line))
	}()
	select {
	case <-cmd.Context().Done():
		return cmd.Context().Err()
	case text := <-answer:
		if text != "y" && text != "yes" {
			return errors.New("not confirmed; nothing was changed")
		}
		return nil
	}
}

// BuildVersion returns Version, with the commit of a development build.
func BuildVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok && strings.HasSuffix(Version, "dev") {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return Version + "-" + s.Value[:min(12, len(s.Value))]
			}
		}
	}
	return Version
}

// OnlyCommandsOr is OnlyCommands with the text for some unknown commands: what to do instead.
func OnlyCommandsOr(instead map[string]string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 && instead[args[0]] != "" {
			return Usagef("unknown command %q: %s", args[0], instead[args[0]])
		}
		return OnlyCommands(cmd, args)
	}
}

// OnlyCommands rejects arguments of a command that only has subcommands.
func OnlyCommands(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	slices.Sort(names)
	return Usagef("unknown command %q%s", args[0], DidYouMean(args[0], names))
}

// DidYouMean returns "; did you mean NAME?" with the names that are similar to a typed one, or "".
func DidYouMean(typed string, names []string) string {
	// Cobra measures the similarity, of commands.
	all := &cobra.Command{SuggestionsMinimumDistance: 2}
	for _, name := range names {
		all.AddCommand(&cobra.Command{Use: name, Run: func(*cobra.Command, []string) {}})
	}
	near := all.SuggestionsFor(typed)
	if len(near) == 0 {
		return ""
	}
	return fmt.Sprintf("; did you mean %s?", strings.Join(near[:min(len(near), 3)], " or "))
}

// ShowHelp runs a command that only has subcommands.
func ShowHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// ExactArgs is cobra.ExactArgs with the usage exit code and the names of missing arguments.
func ExactArgs(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) < len(names) {
			return Usagef("%s is missing", names[len(args)])
		}
		if len(args) > len(names) {
			return Usagef("unexpected argument %q", args[len(names)])
		}
		return nil
	}
}

// AtMostArgs is cobra.MaximumNArgs with the usage exit code.
func AtMostArgs(n int) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) > n {
			return Usagef("unexpected argument %q", args[n])
		}
		return nil
	}
}

// OutputFlag registers -o with a fixed set of choices.
func OutputFlag(cmd *cobra.Command, value *string, unset, usage string, choices ...string) {
	choiceFlag(cmd, value, "output", "o", unset, usage, choices)
}

// ColorFlag registers --no-color, for a command that colors its output.
func ColorFlag(cmd *cobra.Command) {
	cmd.Flags().BoolFunc("no-color", "no colors on a terminal, as with the environment variable NO_COLOR", func(value string) error {
		plain, err := strconv.ParseBool(value)
		if t, ok := cmd.OutOrStdout().(terminal); ok {
			t.plain = plain
			cmd.SetOut(t)
		}
		return err
	})
}

// ChoiceFlag registers a flag with a fixed set of choices.
func ChoiceFlag(cmd *cobra.Command, value *string, name, unset, usage string, choices ...string) {
	choiceFlag(cmd, value, name, "", unset, usage+": "+strings.Join(choices, ", "), choices)
}

func choiceFlag(cmd *cobra.Command, value *string, name, shorthand, unset, usage string, choices []string) {
	*value = unset
	cmd.Flags().VarP(&choice{value, choices}, name, shorthand, usage)
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
