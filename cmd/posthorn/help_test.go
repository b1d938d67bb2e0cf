package main

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/posthorn/posthorn/cmd/internal/cli"
	"github.com/posthorn/posthorn/cmd/internal/command"
)

var exampleFlag = regexp.MustCompile(` (--?[a-zA-Z][a-z-]*)`)

// Every command says in a line what it does, and how it is called, by examples of
// itself with flags that it has.
func TestHelp(t *testing.T) {
	seen := 0
	var walk func(root, c *cobra.Command, called string)
	walk = func(root, c *cobra.Command, called string) {
		if c.Short == "" && c != root || strings.HasSuffix(c.Short, ".") || len(c.Short) > 110 {
			t.Errorf("%s: the short help is %q", c.CommandPath(), c.Short)
		}
		for _, sub := range c.Commands() {
			if sub.Name() != "kubectl" { // walked as a root
				walk(root, sub, called)
			}
		}
		if c.HasSubCommands() {
			return
		}
		seen++
		if !strings.Contains(c.Example, called+" ") {
			t.Errorf("%s: no example", c.CommandPath())
		}
		for line := range strings.Lines(c.Example) {
			i := strings.LastIndex(line, " "+called+" ")
			if i < 0 {
				continue // the part before the commands
			}
			call, _, _ := strings.Cut(line[i+1+len(called):], " | ")
			if found, _, err := root.Find(strings.Fields(strings.SplitN(call, " -", 2)[0])); err != nil || found != c {
				t.Errorf("%s: %q is an example of %s (%v)", c.CommandPath(), line, found.CommandPath(), err)
			}
			for _, m := range exampleFlag.FindAllStringSubmatch(call, -1) {
				name := strings.TrimLeft(m[1], "-")
				if c.Flag(name) == nil && (len(name) != 1 || c.Flags().ShorthandLookup(name) == nil &&
					c.InheritedFlags().ShorthandLookup(name) == nil) {
					t.Errorf("%s: the example %q has the flag %s, which is none", c.CommandPath(), line, m[1])
				}
			}
		}
	}
	root, plugin := newRoot(), cli.NewPlugin()
	walk(root, root, "posthorn")
	walk(plugin, plugin, "kubectl posthorn")
	if seen < 25 {
		t.Errorf("only %d commands were found", seen)
	}
}

// A flag has one shorthand and one type in all commands, and a shorthand one flag.
func TestFlagsHaveOneMeaning(t *testing.T) {
	shorthands := map[string]string{"all-namespaces": "A", "filename": "f", "namespace": "n", "output": "o", "yes": "y"}
	// A value, or several.
	oneOf := strings.NewReplacer("Slice", "", "int32", "number", "int64", "number", "int", "number", "float64", "number")
	types, names := map[string]string{}, map[string]string{}
	check := func(path string, f *pflag.Flag) {
		kind := oneOf.Replace(f.Value.Type())
		if before, ok := types[f.Name]; ok && before != kind {
			t.Errorf("%s: the type of --%s is %s, and in another command %s", path, f.Name, kind, before)
		}
		types[f.Name] = kind
		if before, ok := names[f.Shorthand]; ok && f.Shorthand != "" && before != f.Name {
			t.Errorf("%s: -%s is --%s, and in another command --%s", path, f.Shorthand, f.Name, before)
		}
		names[f.Shorthand] = f.Name
		if want := shorthands[f.Name]; want != "" && f.Shorthand != want {
			t.Errorf("%s: the shorthand of --%s is %q, want %q", path, f.Name, f.Shorthand, want)
		}
	}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		c.Flags().VisitAll(func(f *pflag.Flag) { check(c.CommandPath(), f) })
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot())
	walk(cli.NewPlugin())
	for _, old := range []string{"manifests", "file", "metrics-bind-address", "health-probe-bind-address", "code", "status"} {
		if _, ok := types[old]; ok {
			t.Errorf("--%s was renamed", old)
		}
	}
	if len(types) < 80 {
		t.Errorf("only %d flags were found", len(types))
	}
}

// The groups are in the order of kubectl: the daily commands before the tools, the rest last; every command has one.
func TestGroups(t *testing.T) {
	for root, want := range map[*cobra.Command][]string{
		newRoot(): {"Server Commands:", "run", "Basic Commands:", "status", "Troubleshooting and Debugging Commands:", "why",
			"Data Management Commands:", "Development Commands:", "Other Commands:"},
		cli.NewPlugin(): {"Basic Commands:", "status", "Troubleshooting and Debugging Commands:", "why", "Other Commands:"},
	} {
		var out bytes.Buffer
		if code := command.Run(root, []string{"--help"}, nil, &out, &out); code != command.ExitOK {
			t.Errorf("%s --help: got exit code %d, want 0", root.Name(), code)
		}
		text := out.String()
		if strings.Contains(text, "Additional Commands:") {
			t.Errorf("%s: a command has no group:\n%s", root.Name(), text)
		}
		for _, part := range want {
			_, after, ok := strings.Cut(text, part)
			if !ok {
				t.Errorf("%s: %q is missing, or out of order, in\n%s", root.Name(), part, out.String())
				break
			}
			text = after
		}
	}
}

// An unknown command of another program names the command for the task.
func TestCommandsOfOtherPrograms(t *testing.T) {
	for name, want := range map[string][2]string{
		"describe": {"why NAME", "kubectl describe"}, "logs": {"attempts DESTINATION", "attempts DESTINATION"},
		"resend": {"deadletters redeliver", "'redeliver DESTINATION'"}, "listen": {"tail --forward-to", "tail --forward-to"},
		"trigger": {"test DESTINATION", "test DESTINATION"}, "statsu": {"did you mean status?", "did you mean status?"},
	} {
		for i, root := range []*cobra.Command{newRoot(), cli.NewPlugin()} {
			var out bytes.Buffer
			if code := command.Run(root, []string{name}, nil, &out, &out); code != command.ExitUsage || !strings.Contains(out.String(), want[i]) {
				t.Errorf("%s %s: got exit code %d and %q, want 2 and %q", root.Name(), name, code, out.String(), want[i])
			}
		}
	}
	for name := range cli.InsteadLocal {
		if found, _, err := newRoot().Find([]string{name}); err == nil && found.HasParent() {
			t.Errorf("%s is a command; its text is never shown", name)
		}
	}
}

// Every command that prints objects or results has -o; the others are servers, work on data, or print what another
// flag or argument selects.
func TestOutputFlags(t *testing.T) {
	without := []string{"run", "operator", "dispatcher", "drain", "backup", "restore", "repair", "adopt", "page", "debug", "verify"}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			walk(sub)
		}
		if c.HasSubCommands() {
			return
		}
		output := c.Flag("output")
		if want := !slices.Contains(without, c.Name()); want != (output != nil) {
			t.Errorf("%s: got a flag --output %t, want %t", c.CommandPath(), output != nil, want)
		}
		if output != nil && (!strings.Contains(output.Usage, "json") || !strings.Contains(output.Usage, "yaml") && c.Name() != "sink") {
			t.Errorf("%s: --output is for %q, want json and yaml", c.CommandPath(), output.Usage)
		}
	}
	walk(newRoot())
	walk(cli.NewPlugin())
}
